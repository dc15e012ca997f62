"""A run: consecutive blocks of one chain, and who holds which of them.

Runs are paths of the tree of all prefixes. A run is not cut where another chain branches off in its middle: the other
chain begins a run of its own there, found by the name of its first block. So neither stores nor lookups ever split
anything, and there is nothing to merge afterwards.

Places are small integers here (slots). What a slot holds of a run is nearly always a leading piece, so it is kept as

* `depths[slot]`: how many leading blocks it holds. A slot is in `depths` exactly if it holds any block of the run;
* `masks[slot]`: a bit per block held, only where something is held beyond the leading piece (there is a hole);
* `copies[slot]`: how many further copies of each block, as a binary number whose digits lie in one mask per digit. So
  a thousand blocks are counted up or down in a few operations on integers.

`dead` has a bit for each block that no slot holds any more; such blocks keep their place in the run until the run's end
or half of it is dead.
"""

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

import numpy as np

from cachecore.blocks import HASH_BYTES, Chain, split_chain
from cachecore.native import native

RUN_BLOCKS_MAX = 8192
"""Bounds what one operation on a run costs: masks are at most 1 KiB."""


_NAME = np.dtype((np.void, HASH_BYTES))
_SORTED_MIN = 96
"""From this many names on sorting is faster than a set (measured)."""


def span(start: int, stop: int) -> int:
    """A mask of the blocks from `start` up to `stop`."""
    return (1 << stop) - (1 << start)


def leading(mask: int) -> int:
    """How many blocks from 0 on are in the mask without a gap."""
    return (~mask & (mask + 1)).bit_length() - 1


def python_well_formed(names: bytes) -> bool:
    """No block may follow itself: a chain that repeats a name or holds its own parent is nobody's."""
    if len(names) % HASH_BYTES:
        return False
    total = len(names) // HASH_BYTES
    if total <= 2:
        return total < 2 or names[:HASH_BYTES] != names[HASH_BYTES:]
    if total < _SORTED_MIN:
        return len(set(np.frombuffer(names, dtype=_NAME).tolist())) == total
    words = np.sort(np.frombuffer(names, dtype=np.uint64)[::2])
    if not (words[1:] == words[:-1]).any():
        return True
    return len(set(split_chain(Chain(names)))) == total


def python_unknown(chain: bytes, firsts: Mapping[bytes, object]) -> int:
    """How many blocks of a chain, whose first is in no segment, come before one that is: that one is the first of its
    segment, since in a segment a block's predecessor stands before it."""
    names: list[bytes] = np.frombuffer(chain, dtype=_NAME).tolist()
    if firsts.keys().isdisjoint(names):
        return len(names)
    return next(position for position, name in enumerate(names) if name in firsts)


def require(condition: bool, message: str) -> None:
    """An invariant. Not `assert`: it holds under -O as well."""
    if not condition:
        raise AssertionError(message)


class PythonSegment:
    """Consecutive blocks of one chain. `number` is the segment's place in its locator's list."""

    __slots__ = ("names", "number")

    def __init__(self, number: int) -> None:
        self.number = number
        self.names = bytearray()

    @property
    def blocks(self) -> int:
        return len(self.names) // HASH_BYTES

    @property
    def first(self) -> bytes:
        return bytes(self.names[:HASH_BYTES])

    def shared(self, chain: bytes, position: int, start: int = 0) -> int:
        """How many blocks of `chain` from `position` on equal the segment's from `start` on; the first is known to.

        Names are chained, so equality at one block proves all before it, and the place of divergence can be bisected.
        """
        names = self.names
        same = min(len(names) // HASH_BYTES - start, len(chain) // HASH_BYTES - position)
        chain_at, names_at = (position - 1) * HASH_BYTES, (start - 1) * HASH_BYTES
        low, high = 1, same + 1
        while low + 1 < high:
            offset = same * HASH_BYTES
            if names.startswith(chain[chain_at + offset : chain_at + offset + HASH_BYTES], names_at + offset):
                low = same
            else:
                high = same
            same = (low + high) // 2
        return low

    def equal(self, listed: memoryview, start: int) -> int:
        """As `shared`, for blocks that are merely listed and prove nothing of each other; at least 1."""
        names, at = self.names, start * HASH_BYTES
        limit = min(len(names) - at, len(listed))
        low, high = HASH_BYTES, 2 * HASH_BYTES
        while high <= limit and names.startswith(listed[low:high], at + low):
            low, high = high, 2 * high
        high = min(high, limit)
        while low < high:
            middle = (low + high + HASH_BYTES) // (2 * HASH_BYTES) * HASH_BYTES
            if names.startswith(listed[low:middle], at + low):
                low = middle
            else:
                high = middle - HASH_BYTES
        return low // HASH_BYTES


if TYPE_CHECKING or native is None:
    Segment = PythonSegment
    unknown = python_unknown
    well_formed = python_well_formed
else:
    Segment = native.Segment
    unknown = native.unknown
    well_formed = native.well_formed


class Run(Segment):
    """See the module's opening. `number` is the run's place in the index's list of runs."""

    __slots__ = ("copies", "dead", "depths", "masks")

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.depths: dict[int, int] = {}
        self.masks: dict[int, int] = {}
        self.copies: dict[int, list[int]] = {}
        self.dead = 0

    def __repr__(self) -> str:
        return f"Run({self.number}, {self.blocks} blocks from {self.first.hex()[:8]}, depths={self.depths})"

    def held(self, slot: int) -> int:
        """Mask of the blocks that the slot holds."""
        return self.masks.get(slot) or (1 << self.depths.get(slot, 0)) - 1

    def depth(self, slots: Iterable[int]) -> int:
        """How many leading blocks these slots hold between them."""
        if not self.masks or not any(slot in self.masks for slot in slots):
            return max(self.depths.get(slot, 0) for slot in slots)
        union = 0
        for slot in slots:
            union |= self.held(slot)
        return leading(union)

    def store(self, slot: int, start: int, stop: int) -> int:
        """One more copy of blocks `start` to `stop` for the slot; how many of them are new to it."""
        if self.dead:
            self.dead &= ~span(start, stop)
        depth = self.depths.get(slot, 0)
        if start == depth and slot not in self.masks:
            self.depths[slot] = stop
            return stop - start
        held, blocks = self.held(slot), span(start, stop)
        self._count_up(slot, held & blocks)
        self._set_held(slot, held | blocks)
        return (blocks & ~held).bit_count()

    def remove(self, slot: int, blocks: int) -> tuple[int, int]:
        """One copy fewer of the blocks in the mask: which the slot held, and which it no longer holds (two masks)."""
        held = self.held(slot)
        known = held & blocks
        gone = known & ~self._count_down(slot, known) if slot in self.copies else known
        if gone:
            self._set_held(slot, held & ~gone)
            self.dead |= self._unheld(gone)
        return known, gone

    def drop(self, slot: int) -> None:
        """The slot holds nothing here any more."""
        held = self.held(slot)
        self.copies.pop(slot, None)
        self._set_held(slot, 0)
        self.dead |= self._unheld(held)

    def truncate(self, blocks: int) -> dict[int, int]:
        """Forget all but the first `blocks` blocks; how many holdings each slot has lost by that."""
        lost = {}
        kept = span(0, blocks)
        for slot in [slot for slot, depth in self.depths.items() if depth > blocks or slot in self.masks]:
            held = self.held(slot)
            lost[slot] = (held & ~kept).bit_count()
            if slot in self.copies:
                self._set_copies(slot, [digit & kept for digit in self.copies[slot]])
            self._set_held(slot, held & kept)
        self.dead &= kept
        del self.names[blocks * HASH_BYTES :]
        return lost

    def copy_into(self, target: "Run", start: int, stop: int) -> None:
        """Append blocks `start` to `stop`, with all that is known of them, to another run."""
        at, kept = target.blocks, span(0, stop - start)
        target.names += self.names[start * HASH_BYTES : stop * HASH_BYTES]
        target.dead |= (self.dead >> start & kept) << at
        for slot in self.depths:
            held = self.held(slot) >> start & kept
            if held:
                target._set_held(slot, target.held(slot) | held << at)
        for slot, digits in self.copies.items():
            moved = [(digit >> start & kept) << at for digit in digits]
            there = target.copies.get(slot, [])
            longest = max(len(moved), len(there))
            moved += [0] * (longest - len(moved))
            there = there + [0] * (longest - len(there))
            target._set_copies(slot, [a | b for a, b in zip(moved, there, strict=True)])

    def _set_held(self, slot: int, held: int) -> None:
        if not held:
            self.depths.pop(slot, None)
            self.masks.pop(slot, None)
            return
        depth = self.depths[slot] = leading(held)
        if held >> depth:
            self.masks[slot] = held
        else:
            self.masks.pop(slot, None)

    def _unheld(self, blocks: int) -> int:
        """Which of these blocks no slot holds."""
        for slot, depth in self.depths.items():
            blocks = blocks & ~self.masks[slot] if slot in self.masks else blocks >> depth << depth
            if not blocks:
                break
        return blocks

    def _count_up(self, slot: int, blocks: int) -> None:
        if not blocks:
            return
        digits = self.copies.setdefault(slot, [])
        for place, digit in enumerate(digits):
            digits[place], blocks = digit ^ blocks, digit & blocks
        if blocks:
            digits.append(blocks)

    def _count_down(self, slot: int, blocks: int) -> int:
        """Take one copy from each block that has further ones; which blocks those were."""
        digits = self.copies[slot]
        further = 0
        for digit in digits:
            further |= digit
        taken = borrow = blocks & further
        for place, digit in enumerate(digits):
            digits[place], borrow = digit ^ borrow, borrow & ~digit
        self._set_copies(slot, digits)
        return taken

    def _set_copies(self, slot: int, digits: list[int]) -> None:
        while digits and not digits[-1]:
            digits.pop()
        if digits:
            self.copies[slot] = digits
        else:
            self.copies.pop(slot, None)

    def check_invariants(self) -> None:
        """Raise AssertionError where the parts disagree: for tests."""
        full = span(0, self.blocks)
        union = 0
        require(0 < self.blocks <= RUN_BLOCKS_MAX, "a run is empty or too long")
        for slot, depth in self.depths.items():
            held = self.held(slot)
            union |= held
            require(held > 0 and depth == leading(held), "a depth is not what its mask says")
            require(slot not in self.masks or held >> depth > 0, "a mask without a hole")
        require(self.dead == full & ~union, "dead blocks are marked wrongly")
        require(not self.dead >> (self.blocks - 1), "a run's end is dead")
        require(not union & ~full, "holdings lie beyond the end")
        require(self.masks.keys() <= self.depths.keys(), "a mask without a depth")
        for slot, digits in self.copies.items():
            require(digits[-1] > 0, "copies have a leading zero")
            require(not any(digit & ~self.held(slot) for digit in digits), "copies of what is not held")
