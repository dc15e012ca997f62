"""From tokens to text as they arrive: never half a character, never the beginning of a stop string.

Detokenizing a growing sequence has three traps. A character may span tokens, and decoders write U+FFFD for one that is
not complete. Byte fallback even spoils the complete characters before it (a run of byte tokens is decoded all or not at
all), so nothing is taken from a text that ends so, and text is cut where it last ended well. And tokenizers decode a
token differently at the beginning of a text (SentencePiece drops a space there), so what came last is decoded along.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

_UNFINISHED = "\ufffd"
_UNFINISHED_MAX = 3
"""Bytes of a character in UTF-8 before its last."""
_PATIENCE_TOKENS = 16
"""No character has so many tokens: what has not made one by then never will."""


class TextStream:
    """Decodes one sequence incrementally."""

    __slots__ = ("_context", "_decode", "_emitted_chars", "_pending")

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
        self._context: list[int] = []
        """The tokens that made the last text, all of it handed out."""
        self._pending: list[int] = []
        self._emitted_chars = 0
        """Characters of the context's and the pending tokens' text that have been handed out."""

    def feed(self, token_ids: Sequence[int]) -> str:
        """The text that these tokens complete."""
        self._pending += token_ids
        text = self._decode(self._context + self._pending)
        if text.endswith(_UNFINISHED):
            return self._salvage(text) if len(self._pending) >= _PATIENCE_TOKENS else ""
        new = text[self._emitted_chars :]
        if new:
            self._context, self._pending = self._pending, []
            self._emitted_chars = len(self._decode(self._context))
        return new

    def flush(self) -> str:
        """What was held back; the sequence has ended."""
        text = self._decode(self._context + self._pending)
        new = text[self._emitted_chars :]
        self._emitted_chars = len(text)
        return new

    def _salvage(self, text: str) -> str:
        """The part of bytes that are no text which can become nothing else."""
        unfinished = min(len(text) - len(text.rstrip(_UNFINISHED)), _UNFINISHED_MAX)
        new = text[self._emitted_chars : len(text) - unfinished]
        self._emitted_chars += len(new)
        return new


class Scanned(NamedTuple):
    text: str
    stop: str | None = None
    """The stop string that was found: nothing comes after `text`."""


class StopScanner:
    """Finds stop strings in text that arrives in pieces; neither they nor what follows is let through.

    Of several, the one that is complete first counts, however the text was cut.
    """

    __slots__ = ("_held", "_stops")

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = stops
        self._held = ""

    def feed(self, piece: str) -> Scanned:
        if not self._stops:
            return Scanned(piece)
        text = self._held + piece
        found = [(text.find(stop) + len(stop), -len(stop), stop) for stop in self._stops if stop in text]
        if found:
            end, _, stop = min(found)
            self._held = ""
            return Scanned(text[: end - len(stop)], stop)
        kept = self._prefix_length(text)
        self._held = text[len(text) - kept :]
        return Scanned(text[: len(text) - kept])

    def flush(self) -> str:
        held, self._held = self._held, ""
        return held

    def _prefix_length(self, text: str) -> int:
        """Length of the longest end of `text` with which a stop string begins."""
        longest = min(len(text), max(map(len, self._stops)) - 1)
        for length in range(longest, 0, -1):
            end = text[len(text) - length :]
            if any(stop.startswith(end) for stop in self._stops):
                return length
        return 0
