"""Prompts made of pieces, and the names of their blocks, without any text.

A piece is a text that is told by a key and has a fixed number of tokens: a system prompt, a document, a question. Two
prompts share exactly the tokens of the pieces that they begin with alike. Prompts are beginnings in a tree: following
the same pieces twice leads to the same beginning, so a block is named by the beginning it ends in and by the position
of its end, and no two different prompts share a name.
"""

from collections.abc import Hashable
from typing import NamedTuple

import numpy

from cachecore.blocks import EMPTY_CHAIN, Chain


class Piece(NamedTuple):
    key: Hashable
    tokens: int
    role: str = "user"
    """Whose message it is, where prompts become bodies."""


class Beginning:
    """The beginning of prompts, up to the end of a piece."""

    __slots__ = ("_children", "_number", "_tree", "chain", "parent", "piece", "tokens")

    def __init__(
        self, tree: "PromptTree", number: int, tokens: int, chain: Chain, parent: "Beginning | None", piece: Piece
    ) -> None:
        self._tree = tree
        self._number = number
        self._children: dict[Piece, Beginning] = {}
        self.tokens = tokens
        self.chain = chain
        """Names of its full blocks."""
        self.parent = parent
        self.piece = piece
        """The last one."""

    def then(self, piece: Piece) -> "Beginning":
        """What it is with a piece more. A piece of no tokens is nothing."""
        if piece.tokens <= 0:
            return self
        child = self._children.get(piece)
        if child is None:
            child = self._children[piece] = self._tree.grown(self, piece)
        return child

    def alone(self, piece: Piece) -> "Beginning":
        """As `then`, for a piece that no other prompt will ever have: nothing is kept of it."""
        return self._tree.grown(self, piece) if piece.tokens > 0 else self

    def pieces(self) -> list[Piece]:
        """From the first on."""
        found: list[Piece] = []
        node = self
        while node.parent is not None:
            found.append(node.piece)
            node = node.parent
        return found[::-1]


class PromptTree:
    """Grows beginnings. Names are unique within one tree."""

    def __init__(self, block_size_tokens: int) -> None:
        self.block_size_tokens = block_size_tokens
        self._count = 0
        self.root = Beginning(self, 0, 0, EMPTY_CHAIN, None, Piece("", 0))

    def grown(self, start: Beginning, piece: Piece) -> Beginning:
        self._count += 1
        tokens = start.tokens + piece.tokens
        size = self.block_size_tokens
        names = _names(self._count, start.tokens // size, tokens // size)
        return Beginning(self, self._count, tokens, Chain(start.chain + names), start, piece)


def _names(number: int, start: int, end: int) -> bytes:
    """Of blocks `start` to `end`, which end in the beginning of this number."""
    if start == end:
        return b""
    pairs = numpy.empty((end - start, 2), dtype="<i8")
    pairs[:, 0] = number
    pairs[:, 1] = numpy.arange(start, end)
    return pairs.tobytes()
