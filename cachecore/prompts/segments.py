"""Where a prompt's text may be cut without changing its tokens.

A tokenizer takes its added tokens (`<|im_start|>`) out of the text first and tokenizes what lies between them on its
own. So a cut right before an added token changes nothing, if the token is surely taken there: no other added token may
overlap it (matching is leftmost-longest, so an overlapping neighbour could win) and it must not be of the kind that
looks at its surroundings (`lstrip`, `rstrip`, `single_word`) or at normalised text. Such tokens are called markers.

Each segment begins with its marker. Tokenizers that treat the very first piece of text in a special way (Metaspace with
`prepend_scheme: first`) see it in the first segment only, as in the whole.

Cuts depend on the text before them alone, so a conversation that grows keeps its segments.

Where literals and texts of a prompt are known apart (`Outline`), the cuts inside literals are known too, and texts need
only be searched for markers of their own. `Cutter` then finds the segments that `Segmenter.split` finds in the whole.
"""

import re
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from operator import add, ge
from typing import NamedTuple

from tokenizers import Tokenizer

from cachecore.prompts.native import chats as native
from cachecore.prompts.outlines import Outline, Slot

SEGMENT_CHARACTERS_MIN = 40
"""Headers stay with the text they introduce: `<|im_end|>\\n<|im_start|>user\\n` is no segment of its own."""
OUTLINE_SLOTS_MAX = 2048
OUTLINE_CHARACTERS_MAX = 2**17
CUT_CHARACTERS_MAX = 2**25
"""Of long texts in a prompt that is cut by its outline; a longer one goes the way that knows what is too long."""
INTERNED_CHARACTERS_MIN = 1024
INTERNED_CHARACTERS_MAX = 8 * 2**20
_LONG_TEXTS_MAX = 32
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

    def find_joined(self, before: str, text: str, after: str) -> str | None:
        """The known segment that is the three together."""
        head = (before + text[:_INTERNED_HEAD_CHARACTERS])[:_INTERNED_HEAD_CHARACTERS]
        start, end = len(before), len(before) + len(text)
        for segment in self._by_head.get(head, ()):
            around = segment.startswith(before) and len(segment) == end + len(after) and segment.startswith(after, end)
            if around and segment.startswith(text, start):
                self._by_head.move_to_end(head)
                return segment
        return None

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
        self.head = common_prefix(self.markers)
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
        if not self.head:
            found = self._pattern.search(text, start)
            return found.start() if found else -1
        # str.find runs at memory speed, a search of `re` an order of magnitude slower.
        at = text.find(self.head, start)
        while at >= 0 and not self._match(text, at):
            at = text.find(self.head, at + 1)
        return at

    def cutter(self, outline: Outline) -> "Cutter | None":
        """For prompts of an outline; None where a text could make a marker together with the literals around it."""
        if not self.markers or not 1 <= len(outline.slots) <= OUTLINE_SLOTS_MAX:
            return None
        if sum(map(len, outline.literals)) > OUTLINE_CHARACTERS_MAX:
            return None
        *inner, last = outline.literals[1:]
        for marker in self.markers:
            for at in range(1, len(marker)):
                begun, left = marker[:at], marker[at:]
                if last.startswith(left) or any(literal.endswith(begun) for literal in outline.literals[:-1]):
                    return None
                if any(literal.startswith(left) or left.startswith(literal) for literal in inner):
                    return None
        return Cutter(self, outline)

    def cuts(self, literal: str) -> list["Cut"]:
        """The cuts of a literal, of which the first that comes late enough is made."""
        cuts = []
        for found in self._pattern.finditer(literal):
            *segments, rest = self.split(literal[found.start() :])
            cuts.append(Cut(SEGMENT_CHARACTERS_MIN - found.start(), literal[: found.start()], segments, rest))
        return cuts

    def join(self, before: str, text: str, after: str = "") -> str | None:
        """The three as one long segment that a marker follows; None where `text` may hold markers."""
        segment = self._long.find_joined(before, text, after)
        if segment is None and not self.search(text):
            segment = before + text + after
            self._long.add(segment)
        return segment

    def search(self, text: str) -> bool:
        """Whether there may be markers in a text."""
        return (self.head in text) if self.head else self._pattern.search(text) is not None


class Cut(NamedTuple):
    """A place in a literal where the segment that the text before it belongs to may end."""

    least: int
    """Characters of that segment before the literal from which on it is long enough."""
    end: str
    """What the literal adds to it."""
    segments: Sequence[str]
    """Further segments that end within the literal."""
    rest: str
    """How the next segment begins."""


class Cutter:
    """Cuts the prompts of one outline, without looking at more than their texts.

    In most templates a marker follows right after each text, so nearly every text ends a segment. Then all are cut at
    once, in a few calls whatever their number, and only what is long or short is looked at by itself.
    """

    def __init__(self, segmenter: Segmenter, outline: Outline) -> None:
        self._outline = outline
        first, *literals = outline.literals
        *self._segments, opening = segmenter.split(first) or [""]
        self._literals = [(literal, segmenter.cuts(literal)) for literal in literals]
        self._in_order = outline.slots == tuple(Slot(index, False) for index in range(outline.slots[-1].message + 1))
        self._size_max = CUT_CHARACTERS_MAX // len(literals)
        self._head, self._search, self._join = segmenter.head, segmenter.search, segmenter.join
        first_cuts = [cuts[0] for _, cuts in self._literals if cuts]
        self._regular = len(first_cuts) == len(literals) and not any(cut.end or cut.segments for cut in first_cuts)
        """Whether each text can end a segment, and nothing else does."""
        self._befores = [opening, *[cut.rest for cut in first_cuts]]
        self._leasts = [cut.least for cut in first_cuts]

    def split(self, texts: list[str]) -> list[str] | None:
        """The segments of a prompt with these texts; None where they may hold markers themselves."""
        values = texts if self._in_order else self._outline.values(texts)
        if self._regular and self._head:
            segments = self._split_regular(values) if native is None else self._split_natively(values)
            if segments is not None:
                return segments
        return self._split_each(values)

    def _split_natively(self, values: list[str]) -> list[str] | None:
        """As `_split_regular`."""
        assert native is not None  # noqa: S101
        segments: list[str] | None = native.cut(
            self._segments,
            self._befores,
            self._leasts,
            self._head,
            self._join,
            INTERNED_CHARACTERS_MIN,
            self._size_max,
            _LONG_TEXTS_MAX,
            values,
        )
        return segments

    def _split_regular(self, values: Sequence[str]) -> list[str] | None:
        """As `split`; None where that must look at each text."""
        befores, values = self._befores, values[: len(self._leasts)]
        joined: list[tuple[int, str]] = []
        together = "\n".join(values)
        if len(together) >= INTERNED_CHARACTERS_MIN:
            values, sizes = [*values], [*map(len, values)]
            while (size := max(sizes)) >= INTERNED_CHARACTERS_MIN:
                index = sizes.index(size)
                segment = self._join(befores[index], values[index]) if size <= self._size_max else None
                if segment is None or len(joined) >= _LONG_TEXTS_MAX:
                    return None
                joined.append((index, segment))
                values[index], sizes[index] = "", 0
            together = "\n".join(values)
        if self._head in together:
            return None
        segments = [*map(add, befores, values)]
        for index, segment in joined:
            segments[index] = segment
        if not all(map(ge, map(len, segments), self._leasts)):
            return None
        return [*self._segments, *segments, befores[-1]]

    def _split_each(self, values: Sequence[str]) -> list[str] | None:
        segments, before = self._segments.copy(), self._befores[0]
        head, size_max = self._head, self._size_max
        for value, (literal, cuts) in zip(values, self._literals, strict=False):
            size = len(value)
            if size >= INTERNED_CHARACTERS_MIN and cuts:
                _, end, further, rest = cuts[0]
                segment = self._join(before, value, end) if size <= size_max else None
                if segment is None:
                    return None
                segments.append(segment)
                segments += further
                before = rest
                continue
            if size > size_max or ((head in value) if head else self._search(value)):
                return None
            before += value
            size = len(before)
            for least, end, further, rest in cuts:
                if size >= least:
                    segments.append(before + end)
                    segments += further
                    before = rest
                    break
            else:
                before += literal
        if before:
            segments.append(before)
        return segments
