"""The tree of shared prefixes, beside a count of every prefix by hand."""

from collections import Counter
from collections.abc import Iterator
from random import Random
from types import SimpleNamespace
from typing import Any, cast

from cachecore.blocks import HASH_BYTES, Chain, PrefixHash
from cachecore.holders import Epoch, Tier, Worker, WorkerName
from cachecore.index.contract import Match, Stored
from cachecore.index.memory import MemoryIndex
from gateway.views.prefixes import Node, document, tree
from policies.contract import Receipt

BLOCK = 16


def chain(path: str) -> bytes:
    """One block a letter; its name is that of the whole path."""
    return b"".join(path[: end + 1].encode().ljust(HASH_BYTES, b".")[:HASH_BYTES] for end in range(len(path)))


def receipts(*paths: str) -> list[Receipt]:
    return [
        cast(
            Receipt,
            SimpleNamespace(
                chain=chain(path), decided_at=float(number), block_size_tokens=BLOCK, model="m", tenant="default"
            ),
        )
        for number, path in enumerate(paths)
    ]


def outline(nodes: list[Node]) -> list[Any]:
    return [(node.start, node.stop, node.count, outline(node.children)) for node in nodes]


def walk(nodes: list[Node]) -> Iterator[Node]:
    for node in nodes:
        yield node
        yield from walk(node.children)


def test_what_is_shared_forks_where_prompts_do() -> None:
    shared = tree(receipts("aaab", "aaac", "aaacd", "aaacd", "x", "", "aaab"))
    assert outline(shared.roots) == [(0, 3, 5, [(3, 4, 3, [(4, 5, 2, [])]), (3, 4, 2, [])])]


def test_nothing_is_shared_by_one() -> None:
    assert tree(receipts("abc", "bcd", "")).roots == []


def test_counts_are_those_of_each_prefix() -> None:
    random = Random(5)
    for _ in range(30):
        paths = ["".join(random.choices("ab", k=random.randrange(0, 7))) for _ in range(40)]
        counts = Counter(path[:end] for path in paths for end in range(1, len(path) + 1))
        shared = {prefix: count for prefix, count in counts.items() if count > 1}
        covered = {}
        found = tree(receipts(*paths), nodes_max=10_000)
        for node in walk(found.roots):
            last = found.chain(node)[-HASH_BYTES:].rstrip(b".").decode()
            covered |= {last[: node.start + offset]: node.count for offset in range(1, node.stop - node.start + 1)}
        assert covered == shared


def test_the_heaviest_are_kept_with_all_above_them() -> None:
    paths = [letter * 3 + str(number) for letter in "abcdefgh" for number in range(ord(letter) - ord("a") + 2)]
    kept = tree(receipts(*paths), nodes_max=3)
    assert [kept.chain(node)[-HASH_BYTES:].rstrip(b".") for node in kept.roots] == [b"hhh", b"ggg", b"fff"]


def test_it_says_who_holds_them() -> None:
    index = MemoryIndex()
    for name, path, tier in (("w1", "aab", Tier.L0), ("w2", "a", Tier.L1)):
        stored = Stored(PrefixHash(b"r" * HASH_BYTES), Chain(chain(path)), tier)
        index.apply(Worker(WorkerName(name), Epoch(1)), 1, [stored])
    (root,) = document(receipts("aab1", "aab2"), index)
    assert root | {"holders": None} == {
        "name": chain("aab")[-HASH_BYTES:].hex(),
        "model": "m",
        "tenant": "default",
        "tokens": 48,
        "own_tokens": 48,
        "requests": 2,
        "holders": None,
        "children": [],
    }
    assert root["holders"] == {
        "count": 2,
        "whole": 1,
        "shown": [{"holder": "w1", "tier": "l0", "tokens": 48}, {"holder": "w2", "tier": "l1", "tokens": 16}],
    }


def test_an_index_elsewhere_is_not_asked() -> None:
    class Elsewhere:
        async def match(self, chain: Chain) -> Match:
            raise AssertionError

    (root,) = document(receipts("ab", "ab"), cast(Any, Elsewhere()))
    assert root["holders"] is None
