"""Chunks are the text's own: they come again wherever it stands, for one tenant."""

import random
from itertools import pairwise

import pytest

from cachecore.blocks import pack_tokens
from cachecore.chunks import CHUNK_TOKENS_MAX, RADIUS_TOKENS, Chunk, Chunker, shared
from cachecore.scope import DEFAULT_TENANT, IdentityScope, KeyId, Keyring, Naming, TenantId

KEYRING = Keyring.generate()


def chunker(tenant: TenantId = DEFAULT_TENANT, keyring: Keyring = KEYRING, **scope: object) -> Chunker:
    return Chunker(Naming.of(IdentityScope("model", KeyId(tenant, 0), **{"block_size_tokens": 16, **scope}), keyring))


def text(seed: int, count: int, vocabulary: int = 50_000) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(vocabulary) for _ in range(count)]


def cut(tokens: list[int], by: Chunker | None = None) -> list[Chunk]:
    return list((by or chunker()).cut(pack_tokens(tokens)))


def names(chunks: list[Chunk]) -> set[bytes]:
    return {chunk.name for chunk in chunks}


def test_chunks_follow_each_other_and_are_neither_short_nor_long() -> None:
    chunks = cut(text(1, 20_000))
    assert all(one.end == other.start for one, other in pairwise(chunks))
    lengths = [chunk.end - chunk.start for chunk in chunks]
    assert min(lengths) > RADIUS_TOKENS
    assert max(lengths) <= CHUNK_TOKENS_MAX
    assert 8 <= sum(lengths) / len(lengths) <= 10
    assert len(names(chunks)) == len(chunks)


@pytest.mark.parametrize("shift", [0, 3, 16, 100])
def test_a_passage_has_its_chunks_wherever_it_stands(shift: int) -> None:
    passage = text(2, 400)
    here = cut([*text(3, 50), *passage, *text(4, 60)])
    there = cut([*text(5, 50 + shift), *passage, *text(6, 10)])
    common = names(here) & names(there)
    covered = sum(chunk.end - chunk.start for chunk in here if chunk.name in common)
    assert covered >= 370
    for chunk in there:
        if chunk.name in common:
            [same] = [one for one in here if one.name == chunk.name]
            assert chunk.start - same.start == chunk.end - same.end == shift


def test_what_two_texts_say_around_a_place() -> None:
    assert shared([1, 2, 3, 4, 5], 2, [9, 2, 3, 4, 7], 2) == (1, 2)
    assert shared([1, 2, 3], 0, [7, 1, 2, 3], 1) == (0, 3)
    assert shared([1, 2], 1, [1, 3], 1) == (1, 0)


def test_another_word_changes_the_chunks_around_it_alone() -> None:
    before = text(7, 600)
    after = [*before[:300], 1, *before[301:]]
    same = names(cut(before)) & names(cut(after))
    assert len(names(cut(before))) - len(same) <= 4
    for chunk in cut(before):
        if chunk.start > 320 or chunk.end < 280:
            assert chunk.name in same


def test_tenants_models_and_keys_have_nothing_in_common() -> None:
    tokens = text(8, 500)
    ours = names(cut(tokens))
    assert names(cut(tokens, chunker(TenantId("rival")))).isdisjoint(ours)
    assert names(cut(tokens, chunker(keyring=Keyring.generate()))).isdisjoint(ours)
    assert names(cut(tokens, chunker(client_salt=b"other"))).isdisjoint(ours)
    assert names(cut(tokens, chunker())) == ours


@pytest.mark.parametrize("tokens", [[], [1], text(9, 2 * RADIUS_TOKENS), [7] * 5000, [1, 2] * 2000])
def test_text_that_cannot_be_cut_has_no_chunks_that_are_too_long(tokens: list[int]) -> None:
    assert all(chunk.end - chunk.start <= CHUNK_TOKENS_MAX for chunk in cut(tokens))
    assert len(cut([7] * 5000)) == 0
