"""Where in which run a block stands: a hash table of nine bytes a cell.

A table from name to place needs the name only to confirm a find, and the runs hold every name already. So a cell holds
a place and a few bits of the name, and what it points to is compared with the name asked for:

    tag, one byte in an array of its own: the top byte of the name's first word, 1 for 0; 0 where the cell is free
    bits 63..45   the same bits of the name's first word
    bits 44..13   the run's number
    bits 12..0    the position in the run, in blocks

Cells lie in buckets of eight. A name may lie in either of two buckets (chosen by its two words) and goes to the emptier
one; what fits in neither goes to an ordinary dict, which stays all but empty at the load the table allows. Since a
lookup reads both buckets whole, deleting is freeing a cell: there are no tombstones, and churn costs nothing.

Names are keyed hashes, so nobody without the key can aim at a bucket. Short inputs are handled block by block, long
ones with numpy: a handful of calls into numpy costs as much as a handful of blocks.
"""

import struct
from array import array
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from cachecore.blocks import HASH_BYTES
from cachecore.index.runs import Segment
from cachecore.native import native

S = TypeVar("S", bound=Segment)

_Words = NDArray[np.uint64]
_Rows = NDArray[np.intp]

_BUCKET = 8
_BUCKETS_MIN = 128
_BUCKETS_BEFORE_LEAP = 4096
"""A table that may become larger goes from here to its full size at once. Who knows few blocks keeps a small table (all
pages of a large one are soon in use, wherever few names fall), and who knows many waits for a copy once: some 25 ms."""
_LOAD_MAX = 0.8
_LOAD_MIN = 0.1
_TAG_SHIFT = 56
_CHECK_SHIFT = 45
_CHECK = 0xFFFF_E000_0000_0000
_RUN_SHIFT = 13
_RUN_MASK = 0xFFFF_FFFF
_POSITION_MASK = (1 << _RUN_SHIFT) - 1
_VECTOR_MIN = 24
"""From this many blocks on numpy is faster than a loop (measured)."""
_BATCH = 8192
"""Blocks moved at once to a table of another size: each batch sees how full the last has left the buckets."""

_TWO_WORDS = struct.Struct("<QQ")
_two_words, _each_two_words = _TWO_WORDS.unpack_from, _TWO_WORDS.iter_unpack
# By a mask of a bucket's free cells, the first in the top bit as np.packbits has it: how many, and which is the first.
_FREE = np.array([mask.bit_count() for mask in range(256)], dtype=np.uint8)
_FIRST_FREE = np.array([8 - mask.bit_length() for mask in range(256)], dtype=np.intp)


class Locator(Generic[S]):
    """Finds blocks by name. The caller keeps names unique: `add` is for names that `find` does not know."""

    __slots__ = ("_buckets_full", "_buckets_min", "_count_max", "_count_min", "_table", "count", "find", "runs")

    def __init__(self, blocks_hint: int = 0) -> None:
        """`blocks_hint`: what the table may come to hold, if that is known."""
        self.runs: list[S | None] = []
        """Every run by its number; None where a number is free."""
        self.count = 0
        """Blocks in the table."""
        self._buckets_min = self._buckets_full = _BUCKETS_MIN
        while blocks_hint > self._buckets_full * _BUCKET * _LOAD_MAX:
            self._buckets_full *= 2
        self._table = Table(self.runs, self._buckets_min)
        self._set_bounds()
        self.find: Callable[[bytes], tuple[S, int] | None] = self._table.find
        """The run and position of a block, or None."""

    def add(self, names: bytes | bytearray, run: S, position: int) -> None:
        """`names` are about to be put into `run` at `position`: what is in no run yet is in no table either."""
        self.count += len(names) // HASH_BYTES
        while self.count > self._count_max:
            self._grow()
        self._table.put(names, run.number, position)

    def discard(self, names: bytes | bytearray, run: S, position: int) -> None:
        """Take back an `add`, or a part of one."""
        self.count -= len(names) // HASH_BYTES
        self._table.take(names, run.number, position)

    def shrink(self) -> None:
        """Give memory back after most blocks have gone."""
        if self.count >= self._count_min:
            return
        buckets = self._table.buckets
        while buckets > self._buckets_min and self.count < _LOAD_MIN * buckets * _BUCKET:
            buckets //= 2
        self._resize(buckets)

    def used_cells(self) -> int:
        return self._table.used()

    def size_bytes(self) -> int:
        return 9 * _BUCKET * self._table.buckets + 200 * self._table.overflowing

    def _grow(self) -> None:
        buckets = 2 * self._table.buckets
        if _BUCKETS_BEFORE_LEAP < buckets <= self._buckets_full:
            buckets = self._buckets_min = self._buckets_full
        self._resize(buckets)

    def _resize(self, buckets: int) -> None:
        self._table.resize(buckets)
        self._set_bounds()

    def _set_bounds(self) -> None:
        buckets = self._table.buckets
        self._count_max = int(_LOAD_MAX * buckets * _BUCKET)
        self._count_min = int(_LOAD_MIN * buckets * _BUCKET) if buckets > self._buckets_min else 0


class PythonTable(Generic[S]):
    """The cells of a locator. The runs are the locator's own list."""

    __slots__ = (
        "_cell_flat",
        "_cells",
        "_mask",
        "_overflow",
        "_runs",
        "_tag_flat",
        "_tag_rows",
        "_tags",
    )

    def __init__(self, runs: list[S | None], buckets: int) -> None:
        self._runs = runs
        self._overflow: dict[bytes, int] = {}
        self._allocate(buckets)

    @property
    def buckets(self) -> int:
        return self._mask + 1

    @property
    def overflowing(self) -> int:
        """Names that found no cell."""
        return len(self._overflow)

    def find(self, name: bytes, /) -> tuple[S, int] | None:
        first, second = _two_words(name)
        tag, tags = first >> _TAG_SHIFT or 1, self._tags
        for bucket in (first & self._mask, second & self._mask):
            start = bucket << 3
            at = tags.find(tag, start, start + _BUCKET)
            while at >= 0:
                found = self._confirm(self._cells[at], name)
                if found is not None:
                    return found
                at = tags.find(tag, at + 1, start + _BUCKET)
        return self._confirm(self._overflow[name], name) if name in self._overflow else None

    def put(self, names: bytes | bytearray, number: int, position: int, /) -> None:
        """`names` stand in the run of that number from `position` on."""
        total = len(names) // HASH_BYTES
        entry = number << _RUN_SHIFT | position
        if total < _VECTOR_MIN:
            self._put_few(names, range(entry, entry + total))
        else:
            self._put_many(_words(names), _count_from(entry, total))

    def take(self, names: bytes | bytearray, number: int, position: int, /) -> None:
        """Take back a `put`, or a part of one."""
        total = len(names) // HASH_BYTES
        entry = number << _RUN_SHIFT | position
        if total < _VECTOR_MIN:
            for offset in range(total):
                self._take_one(names, offset, entry + offset)
        else:
            self._take_many(_words(names), _count_from(entry, total))
            for name in [name for name in self._overflow if name in names]:
                del self._overflow[name]

    def resize(self, buckets: int, /) -> None:
        """Start over with so many buckets, from the runs."""
        self._allocate(buckets)
        self._overflow.clear()
        batch: list[S] = []
        blocks = 0
        for run in self._runs:
            if run is not None:
                batch.append(run)
                blocks += run.blocks
            if blocks >= _BATCH:
                self._put_runs(batch)
                batch, blocks = [], 0
        if blocks:
            self._put_runs(batch)

    def used(self) -> int:
        return len(self._tags) - self._tags.count(0) + len(self._overflow)

    def _allocate(self, buckets: int) -> None:
        self._tags = bytearray(_BUCKET * buckets)
        self._cells = array("Q", bytes(8 * _BUCKET * buckets))
        # The same memory for numpy: flat, and by the bucket (a bucket's eight tags are one word).
        self._tag_flat = np.frombuffer(self._tags, dtype=np.uint8)
        self._tag_rows: _Words = self._tag_flat.view(np.uint64)
        self._cell_flat: _Words = np.frombuffer(self._cells, dtype=np.uint64)
        self._mask = buckets - 1

    def _confirm(self, cell: int, name: bytes) -> tuple[S, int] | None:
        run, position = self._runs[cell >> _RUN_SHIFT & _RUN_MASK], cell & _POSITION_MASK
        if run is not None and run.names.startswith(name, position * HASH_BYTES):
            return run, position
        return None

    def _put_few(self, names: bytes | bytearray, entries: Iterable[int]) -> None:
        # In one loop, without a call of ours for each: engines announce a few blocks at a time.
        tags, cells, mask = self._tags, self._cells, self._mask
        count, find = tags.count, tags.find
        for (first, second), entry in zip(_each_two_words(names), entries, strict=True):
            start, other = (first & mask) << 3, (second & mask) << 3
            if count(0, start, start + _BUCKET) < count(0, other, other + _BUCKET):
                start = other
            at = find(0, start, start + _BUCKET)
            if at >= 0:
                tags[at], cells[at] = first >> _TAG_SHIFT or 1, first & _CHECK | entry
            else:
                self._overflow[_TWO_WORDS.pack(first, second)] = entry

    def _take_one(self, names: bytes | bytearray, offset: int, entry: int) -> None:
        first, second = _two_words(names, offset * HASH_BYTES)
        tag, cell = first >> _TAG_SHIFT or 1, first & _CHECK | entry
        for bucket in (first & self._mask, second & self._mask):
            start = bucket << 3
            at = self._tags.find(tag, start, start + _BUCKET)
            while at >= 0:
                if self._cells[at] == cell:
                    self._tags[at] = 0
                    return
                at = self._tags.find(tag, at + 1, start + _BUCKET)
        del self._overflow[bytes(names[offset * HASH_BYTES : (offset + 1) * HASH_BYTES])]

    def _put_many(self, words: _Words, entries: _Words) -> None:
        """Each name takes a free cell of its emptier bucket; of those that chose one cell, the last has it and the
        others choose again. The last few, and any that find both buckets full, go block by block."""
        entries = entries | words[:, 0] & np.uint64(_CHECK)
        while len(words) >= _VECTOR_MIN:
            buckets = self._buckets(words)
            free = np.packbits(self._tag_rows.take(buckets).view(np.uint8) == 0).reshape(-1, 2)
            room = _FREE.take(free)
            second = room[:, 1] > room[:, 0]
            mask = np.where(second, free[:, 1], free[:, 0])
            if not mask.all():
                break
            cells = np.where(second, buckets[:, 1], buckets[:, 0]) * _BUCKET + _FIRST_FREE.take(mask)
            self._cell_flat[cells] = entries
            self._tag_flat[cells] = _tags(words)
            pending = self._cell_flat.take(cells) != entries
            words, entries = words[pending], entries[pending]
        self._put_few(words.tobytes(), entries.tolist())

    def _take_many(self, words: _Words, entries: _Words) -> None:
        buckets = self._buckets(words)
        tags = self._tag_rows.take(buckets).view(np.uint8).reshape(-1, 2 * _BUCKET)
        alike = np.flatnonzero(tags == _tags(words)[:, None])
        cells = buckets.reshape(-1).take(alike >> 3) * _BUCKET + (alike & 7)
        wanted = entries | words[:, 0] & np.uint64(_CHECK)
        found = cells[self._cell_flat.take(cells) == wanted.take(alike >> 4)]
        self._tag_flat[found] = 0

    def _buckets(self, words: _Words) -> _Rows:
        return (words & np.uint64(self._mask)).view(np.int64)

    def _put_runs(self, runs: list[S]) -> None:
        lengths = np.array([run.blocks for run in runs], dtype=np.intp)
        entries = np.array([run.number << _RUN_SHIFT for run in runs], dtype=np.uint64)
        starts = np.cumsum(lengths) - lengths
        positions = np.arange(lengths.sum()) - np.repeat(starts, lengths)
        words = _words(b"".join(run.names for run in runs))
        self._put_many(words, np.repeat(entries, lengths) + positions.astype(np.uint64))


if TYPE_CHECKING or native is None:  # noqa: SIM108  (a type checker skips blocks, not halves of expressions)
    Table = PythonTable
else:
    Table = native.Table


def _words(names: bytes | bytearray) -> _Words:
    return np.frombuffer(names, dtype="<u8").reshape(-1, 2)


def _tags(words: _Words) -> NDArray[np.uint8]:
    tags: NDArray[np.uint8] = np.maximum(words[:, 0] >> np.uint64(_TAG_SHIFT), np.uint64(1)).astype(np.uint8)
    return tags


def _count_from(entry: int, total: int) -> _Words:
    return np.arange(entry, entry + total, dtype=np.uint64)
