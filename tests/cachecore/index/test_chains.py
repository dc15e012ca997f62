"""ChainMultiset beside a list of chains."""

from random import Random

import pytest

from cachecore.blocks import HASH_BYTES, BlockHasher, pack_tokens
from cachecore.index.chains import ChainMultiset

HASHER = BlockHasher(b"k" * 32, 1)
ROOT = HASHER.root(b"scope")


def chain(tokens: str) -> bytes:
    return HASHER.chain(ROOT, pack_tokens(list(tokens.encode())))


def naive_depths(stored, query):
    depths = {}
    for key, other in stored:
        shared = 0
        while other[: shared + HASH_BYTES] == query[: shared + HASH_BYTES] and shared < min(len(other), len(query)):
            shared += HASH_BYTES
        if shared:
            depths[key] = max(depths.get(key, 0), shared // HASH_BYTES)
    return depths


def test_the_longest_of_overlapping_chains_counts_until_it_is_taken_back():
    chains = ChainMultiset()
    a, b = ("a", 0), ("b", 0)
    chains.store(a, chain("abcd"))
    chains.store(a, chain("abcdef"))
    chains.store(b, chain("abx"))
    assert chains.depths(chain("abcdefg")) == {a: 6, b: 2}
    chains.remove(a, chain("abcdef"))
    assert chains.depths(chain("abcdefg")) == {a: 4, b: 2}
    chains.remove(a, chain("abcdef"))
    assert chains.depths(chain("abcdefg")) == {a: 4, b: 2}, "never stored twice, so nothing is taken"
    chains.forget(a)
    assert chains.depths(chain("abcdefg")) == {b: 2}
    chains.remove(b, chain("abx"))
    assert len(chains) == 0


@pytest.mark.parametrize("seed", range(20))
def test_agrees_with_a_list_of_chains(seed):
    random = Random(seed)
    chains, stored = ChainMultiset(), []
    keys = [("a", 0), ("a", 1), ("b", 0)]
    texts = ["".join(random.choice("xy") for _ in range(random.randint(1, 9))) for _ in range(12)]
    for _ in range(300):
        key, text = random.choice(keys), chain(random.choice(texts))
        action = random.random()
        if action < 0.5:
            chains.store(key, text)
            stored.append((key, text))
        elif action < 0.97 and (key, text) in stored:
            chains.remove(key, text)
            stored.remove((key, text))
        elif action >= 0.97:
            chains.forget(key)
            stored = [entry for entry in stored if entry[0] != key]
        query = chain(random.choice(texts))
        assert dict(chains.depths(query)) == naive_depths(stored, query)
    for key, text in stored:
        chains.remove(key, text)
    assert len(chains) == 0


@pytest.mark.parametrize("seed", range(20))
def test_extending_is_storing_the_longer_and_removing_the_shorter(seed):
    random = Random(seed)
    chains, stored = ChainMultiset(), []
    keys = [("a", 0), ("b", 0)]
    for _ in range(300):
        key, text = random.choice(keys), "".join(random.choice("xy") for _ in range(random.randint(1, 4)))
        mine = [other for other_key, other in stored if other_key == key]
        if mine and random.random() < 0.6:
            earlier = random.choice(mine)
            text = earlier + text
            chains.extend(key, chain(earlier), chain(text))
            stored.remove((key, earlier))
        else:
            chains.store(key, chain(text))
        stored.append((key, text))
        if len(stored) > 12:
            gone = stored.pop(random.randrange(len(stored)))
            chains.remove(gone[0], chain(gone[1]))
        query = chain(random.choice(stored)[1] + "x")
        assert dict(chains.depths(query)) == naive_depths([(k, chain(t)) for k, t in stored], query)
    for key, text in stored:
        chains.remove(key, chain(text))
    assert len(chains) == 0


def test_a_growing_conversation_stays_one_node():
    chains = ChainMultiset()
    chains.store(("a", 0), chain("system"))
    text = "system: "
    chains.store(("a", 0), chain(text))
    for turn in "bcdefgh":
        chains.extend(("a", 0), chain(text), chain(text + turn))
        text += turn
    assert repr(chains) == "ChainMultiset(2 nodes, 15 blocks)"
