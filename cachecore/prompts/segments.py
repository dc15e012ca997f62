"""Where a prompt's text may be cut without changing its tokens.

A tokenizer takes its added tokens (`<|im_start|>`) out of the text first and tokenizes what lies between them on its
own. So a cut right before an added token changes nothing, if the token is surely taken there: no other added token may
overlap it (matching is leftmost-longest, so an overlapping neighbour could win) and it must not be of the kind that
looks at its surroundings (`lstrip`, `rstrip`, `single_word`) or at normalised text. Such tokens are called markers.

Each segment begins with its marker. Tokenizers that treat the very first piece of text in a special way (Metaspace with
`prepend_scheme: first`) see it in the first segment only, as in the whole.

Cuts depend on the text before them alone, so a conversation that grows keeps its segments.
"""

import re
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from tokenizers import Tokenizer

SEGMENT_CHARACTERS_MIN = 40
"""Headers stay with the text they introduce: `<|im_end|>\\n<|im_start|>user\\n` is no segment of its own."""
INTERNED_CHARACTERS_MIN = 1024
INTERNED_CHARACTERS_MAX = 8 * 2**20
_INTERNED_HEAD_CHARACTERS = 64
_INTERNED_PER_HEAD_MAX = 8


class AddedToken(NamedTuple):
    """A token that a tokenizer matches before its model runs."""

    content: str
    plain: bool
    """Matched on raw text, whatever surrounds it."""


def added_tokens(tokenizer: Tokenizer) -> list[AddedToken]:
    return [
        AddedToken(token.content, not (token.normalized or token.lstrip or token.rstrip or token.single_word))
        for token in tokenizer.get_added_tokens_decoder().values()
    ]


def markers_among(candidates: Iterable[AddedToken], tokens: Sequence[AddedToken]) -> list[str]:
    """Those of the candidates that are safe to cut before, given all tokens of the tokenizer."""
    return [
        candidate.content
        for candidate in candidates
        if candidate.plain
        and candidate.content.strip() == candidate.content != ""
        and not any(_overlap(candidate.content, token.content) for token in tokens)
    ]


def _overlap(marker: str, other: str) -> bool:
    """Whether an occurrence of `other` can share characters with one of `marker`, other than being it."""
    if marker != other and (marker in other or other in marker):
        return True
    return any(
        marker.startswith(other[-size:]) or other.startswith(marker[-size:])
        for size in range(1, min(len(marker), len(other)))
    )


def common_prefix(texts: Sequence[str]) -> str:
    """The longest text that all begin with."""
    least, most = min(texts, default=""), max(texts, default="")
    low, high = 0, len(least)
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if most.startswith(least[:middle]) else (low, middle - 1)
    return least[:low]


class _LongSegments:
    """Long segments seen lately, by how they begin.

    A known one is recognised with one comparison, which is ten times faster than to search it for markers, copy it out
    of the text and hash it: the object handed back has its hash already.
    """

    def __init__(self) -> None:
        self._by_head: OrderedDict[str, list[str]] = OrderedDict()
        self._characters = 0

    def find(self, text: str, start: int) -> list[str]:
        """Known segments that `text` has at `start`."""
        head = text[start : start + _INTERNED_HEAD_CHARACTERS]
        known = self._by_head.get(head)
        if known is None:
            return []
        self._by_head.move_to_end(head)
        return [segment for segment in known if text.startswith(segment, start)]

    def add(self, segment: str) -> None:
        head = segment[:_INTERNED_HEAD_CHARACTERS]
        known = self._by_head.setdefault(head, [])
        self._by_head.move_to_end(head)
        known.insert(0, segment)
        self._characters += len(segment)
        if len(known) > _INTERNED_PER_HEAD_MAX:
            self._characters -= len(known.pop())
        while self._characters > INTERNED_CHARACTERS_MAX:
            _, dropped = self._by_head.popitem(last=False)
            self._characters -= sum(map(len, dropped))


class Segmenter:
    """Cuts texts before markers, not closer to each other than SEGMENT_CHARACTERS_MIN."""

    def __init__(self, markers: Iterable[str]) -> None:
        self.markers = sorted(markers, key=len, reverse=True)
        self._head = common_prefix(self.markers)
        self._pattern = re.compile("|".join(map(re.escape, self.markers)))
        self._match = self._pattern.match
        self._long = _LongSegments()

    def split(self, text: str) -> list[str]:
        """Segments that join to `text`."""
        if not self.markers:
            return [text]
        segments: list[str] = []
        start, end = 0, len(text)
        while start < end:
            segment = self._known(text, start) if end - start > INTERNED_CHARACTERS_MIN else None
            if segment is None:
                at = self._find(text, start + SEGMENT_CHARACTERS_MIN)
                segment = text[start:at] if at >= 0 else text[start:]
                if at - start >= INTERNED_CHARACTERS_MIN:
                    self._long.add(segment)
            segments.append(segment)
            start += len(segment)
        return segments

    def _known(self, text: str, start: int) -> str | None:
        """A known segment at `start` that a marker follows: no marker begins inside it, as none begin in overlap."""
        for segment in self._long.find(text, start):
            if self._match(text, start + len(segment)):
                return segment
        return None

    def _find(self, text: str, start: int) -> int:
        """Where the next marker begins, or -1."""
        if not self._head:
            found = self._pattern.search(text, start)
            return found.start() if found else -1
        # str.find runs at memory speed, a search of `re` an order of magnitude slower.
        at = text.find(self._head, start)
        while at >= 0 and not self._match(text, at):
            at = text.find(self._head, at + 1)
        return at
