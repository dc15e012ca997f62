"""Prompts made of pieces: equal names mean equal beginnings, and nothing else does."""

from itertools import takewhile
from random import Random

import pytest

from cachecore.blocks import split_chain
from loadtest.traces.pieces import Beginning, Piece, PromptTree


def grown(tree: PromptTree, *pieces: Piece) -> Beginning:
    prompt = tree.root
    for piece in pieces:
        prompt = prompt.then(piece)
    return prompt


def tokens_of(prompt: Beginning) -> list[tuple[object, int]]:
    """What stands for the tokens: a piece's key and the place in it."""
    return [(piece.key, place) for piece in prompt.pieces() for place in range(piece.tokens)]


def common(one: object, other: object) -> int:
    pairs = zip(one, other, strict=False)  # type: ignore[call-overload]
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("block", [1, 4, 7])
def test_names_are_equal_as_far_as_tokens_are(seed: int, block: int) -> None:
    rng, tree = Random(seed), PromptTree(block)
    kinds = [Piece(kind, 1 + 3 * place) for place, kind in enumerate("abc")]
    prompts = [grown(tree, *rng.choices(kinds, k=rng.randint(1, 5))) for _ in range(40)]
    for one in prompts:
        assert len(one.chain) == one.tokens // block * 16
        assert len(set(split_chain(one.chain))) == one.tokens // block
        for other in prompts:
            shared = common(tokens_of(one), tokens_of(other)) // block
            assert common(split_chain(one.chain), split_chain(other.chain)) == shared


def test_what_is_alone_shares_nothing_of_its_own() -> None:
    tree = PromptTree(4)
    system = grown(tree, Piece("system", 8))
    one, other = (system.alone(Piece("question", 8)) for _ in range(2))
    assert one.chain[:32] == other.chain[:32] == system.chain
    assert one.chain[32:48] != other.chain[32:48]
    assert system.then(Piece("question", 8)).chain not in (one.chain, other.chain)


def test_a_block_over_two_pieces_depends_on_both() -> None:
    tree = PromptTree(10)
    chains = {grown(tree, Piece(first, 5), Piece("same", 5)).chain for first in "ab"}
    assert len(chains) == 2


def test_a_piece_of_nothing_is_nothing() -> None:
    tree = PromptTree(4)
    assert tree.root.then(Piece("x", 0)) is tree.root
    assert tree.root.alone(Piece("x", 0)) is tree.root
    assert tree.root.pieces() == []
