"""Chunks of text, cut where the text itself says so: the same words make the same chunks wherever they stand.

Blocks are cut by counting from a prompt's beginning: a passage that moves by three tokens has no block in common with
what it was. Chunks are cut at tokens whose surroundings have, of all within RADIUS_TOKENS, the smallest hash. Whether a
token is one depends on some tokens around it and on nothing else, so two prompts that share a passage share all its
chunks but those at its ends. On average a chunk is 2 RADIUS_TOKENS + 1 tokens long, never less than RADIUS_TOKENS + 1.

Where one cuts and how a chunk is called are keyed by the tenant's hash key: nobody else can ask for a text.
"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from cachecore.blocks import TOKEN_BYTES, PrefixHash
from cachecore.scope import Naming

RADIUS_TOKENS = 4
CHUNK_TOKENS_MAX = 128
"""Text that never says where to cut (the same token over and over) makes longer ones, which are left out."""
_WINDOW_TOKENS = 4
"""Whose hash speaks for a token: itself and those behind it."""
_CUTS_LABEL = b"ropeway.chunk.cuts.v1"
_NAME_LABEL = b"ropeway.chunk.name.v1"


class Chunk(NamedTuple):
    start: int
    """In tokens."""
    end: int
    name: PrefixHash
    """Of its text alone. No chain has it."""


def shared(first: Sequence[int], at: int, second: Sequence[int], other: int) -> tuple[int, int]:
    """How many tokens before `at` of the first text and `other` of the second are the same, and how many from there."""
    before = same_tokens(reversed(first[:at]), reversed(second[:other]))
    return before, same_tokens(first[at:], second[other:])


def same_tokens(first: Iterable[int], second: Iterable[int]) -> int:
    """How many are the same, from the beginning on."""
    count = 0
    for one, other in zip(first, second, strict=False):
        if one != other:
            break
        count += 1
    return count


class Chunker:
    """Cuts the prompts of one scope. Immutable once made."""

    __slots__ = ("_factors", "_naming")

    def __init__(self, naming: Naming) -> None:
        self._naming = naming
        secret = naming.hasher.root(_CUTS_LABEL, naming.root) + naming.hasher.root(_CUTS_LABEL, naming.root[::-1])
        self._factors = np.frombuffer(secret, dtype="<u8") | np.uint64(1)

    def cut(self, tokens: bytes | bytearray | memoryview) -> Iterator[Chunk]:
        """The chunks of `tokens` (`pack_tokens`), in order. What lies before the first cut and behind the last one is
        in none."""
        data = bytes(tokens)
        cuts = self._cuts(np.frombuffer(data, dtype="<u4").astype(np.uint64))
        for start, end in pairwise(cuts):
            if end - start <= CHUNK_TOKENS_MAX:
                yield Chunk(start, end, self._name(data[start * TOKEN_BYTES : end * TOKEN_BYTES]))

    def _name(self, text: bytes) -> PrefixHash:
        return self._naming.hasher.root(_NAME_LABEL, self._naming.root + text)

    def _cuts(self, tokens: NDArray[np.uint64]) -> list[int]:
        hashes = self._hashes(tokens)
        if len(hashes) <= 2 * RADIUS_TOKENS:
            return []
        around = np.lib.stride_tricks.sliding_window_view(hashes, RADIUS_TOKENS).min(axis=1)
        middle = hashes[RADIUS_TOKENS:-RADIUS_TOKENS]
        before, behind = around[: len(middle)], around[RADIUS_TOKENS + 1 :]
        # Of equal ones the first: two cuts are never nearer to each other than the radius.
        cuts: list[int] = (np.flatnonzero((middle < before) & (middle <= behind)) + RADIUS_TOKENS).tolist()
        return cuts

    def _hashes(self, tokens: NDArray[np.uint64]) -> NDArray[np.uint64]:
        """One for each window, by the upper bits of a sum of products modulo 2^64."""
        count = max(0, len(tokens) - _WINDOW_TOKENS + 1)
        total = np.zeros(count, np.uint64)
        for offset in range(_WINDOW_TOKENS):
            mixed = (tokens[offset : offset + count] + np.uint64(offset + 1)) * self._factors[offset]
            total += (mixed ^ (mixed >> np.uint64(29))) * self._factors[-1 - offset]
        return total >> np.uint64(16)
