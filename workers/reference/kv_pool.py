"""Bookkeeping of the paged KV pool: which block is whose, what it is called, and who goes first when room is needed.

A block is in exactly one of three states:

* referenced: some live sequence's table names it (several, where they share a prefix);
* idle: nobody references it, but it has a name and can be found again, until it is evicted;
* free: it holds nothing of use.

Rules that the prefix cache rests on:

* A sequence references the blocks of its whole prefix. So a named block in use has its parent in use, and an idle
  block's parent was last used no earlier than the block itself.
* Idle blocks leave oldest first, and a sequence gives its blocks back deepest first: a parent never goes before its
  children, and what is announced never has holes.
* A name is held by one block. When two sequences compute the same block at once, the later one takes over the block of
  the earlier one at `commit` and gives its own back: no duplicates to announce, and the first rule holds.
"""

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import NamedTuple

from cachecore.blocks import Chain, PrefixHash, split_chain
from cachecore.events import AllBlocksCleared, BlockRemoved, BlockStored, KvEvent


class OutOfBlocksError(Exception):
    """Fewer blocks are left than asked for. Nothing has been taken."""


class NamedRun(NamedTuple):
    """Consecutive full blocks of one sequence whose KV has just been computed."""

    blocks: Sequence[int]
    chain: Chain
    """Their names."""
    parent: PrefixHash | None
    """The name before the first; None at the beginning of a prompt."""
    token_ids: Sequence[int]
    cache_salt: str = ""


class KvPool:
    """See the module's opening. Knows no tensors: a block is a number."""

    def __init__(self, blocks_total: int, block_size_tokens: int) -> None:
        self.blocks_total = blocks_total
        self.block_size_tokens = block_size_tokens
        self.generation = 0
        """Grows when the cache is cleared: names given before mean nothing any more."""
        self._references = [0] * blocks_total
        self._names: list[PrefixHash | None] = [None] * blocks_total
        self._by_name: dict[PrefixHash, int] = {}
        self._free = list(range(blocks_total - 1, -1, -1))
        self._idle: OrderedDict[int, None] = OrderedDict()
        self._events: list[KvEvent] = []

    def __repr__(self) -> str:
        referenced = self.blocks_total - self.blocks_available
        return f"KvPool(referenced={referenced}, idle={len(self._idle)}, free={len(self._free)})"

    @property
    def blocks_available(self) -> int:
        """Blocks that `allocate` can give: free ones and idle ones."""
        return len(self._free) + len(self._idle)

    @property
    def usage(self) -> float:
        """Share of the blocks that live sequences reference, 0..1."""
        return 1.0 - self.blocks_available / self.blocks_total

    def match(self, chain: Chain) -> list[int]:
        """The blocks of the longest cached prefix of `chain`. Takes no reference: `acquire` them at once."""
        blocks = []
        for name in split_chain(chain):
            block = self._by_name.get(name)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def acquire(self, blocks: Sequence[int]) -> None:
        """Reference blocks that `match` found."""
        for block in blocks:
            if not self._references[block]:
                del self._idle[block]
            self._references[block] += 1

    def allocate(self, count: int) -> list[int]:
        """Take `count` blocks, evicting idle ones as needed. Raises OutOfBlocksError."""
        if count > self.blocks_available:
            raise OutOfBlocksError(f"{count} blocks wanted, {self.blocks_available} available")
        self._evict(count - len(self._free))
        blocks = [self._free.pop() for _ in range(count)]
        for block in blocks:
            self._references[block] = 1
        return blocks

    def release(self, blocks: Sequence[int]) -> None:
        """Give back one reference to each block of a sequence's table, given in the sequence's order."""
        for block in reversed(blocks):
            self._references[block] -= 1
            if self._references[block]:
                continue
            if self._names[block] is None:
                self._free.append(block)
            else:
                self._idle[block] = None

    def commit(self, run: NamedRun) -> list[int]:
        """Name computed blocks. Returns the blocks to use in their place: those that bore the names already, if any."""
        names = list(split_chain(run.chain))
        blocks = list(run.blocks)
        fresh = []
        for index, name in enumerate(names):
            known = self._by_name.get(name)
            if known is None:
                self._by_name[name] = blocks[index]
                self._names[blocks[index]] = name
                fresh.append(index)
            elif known != blocks[index]:
                self.acquire([known])
                self.release([blocks[index]])
                blocks[index] = known
        self._announce(run, names, fresh)
        return blocks

    def clear(self) -> None:
        """Forget every name. Live sequences keep their blocks, which can no longer be found by others."""
        self.generation += 1
        self._by_name.clear()
        self._names = [None] * self.blocks_total
        self._free.extend(self._idle)
        self._idle.clear()
        self._events.append(AllBlocksCleared())

    def names(self) -> Sequence[PrefixHash]:
        """Every block that a prefix can hit."""
        return list(self._by_name)

    def take_events(self) -> list[KvEvent]:
        """What has been stored and removed since the last call, in order."""
        events, self._events = self._events, []
        return events

    def _evict(self, count: int) -> None:
        handles = []
        for _ in range(count):
            block, _ = self._idle.popitem(last=False)
            name = self._names[block]
            assert name is not None  # noqa: S101 - idle blocks are named
            self._names[block] = None
            del self._by_name[name]
            self._free.append(block)
            handles.append(handle_of(name))
        if handles:
            self._events.append(BlockRemoved(tuple(handles)))

    def _announce(self, run: NamedRun, names: Sequence[PrefixHash], fresh: Sequence[int]) -> None:
        """One event for each stretch of consecutive new names."""
        size = self.block_size_tokens
        for start, end in _stretches(fresh):
            parent = names[start - 1] if start else run.parent
            self._events.append(
                BlockStored(
                    block_hashes=tuple(handle_of(name) for name in names[start:end]),
                    parent_block_hash=None if parent is None else handle_of(parent),
                    token_ids=run.token_ids[start * size : end * size],
                    block_size=size,
                    # The salt is part of a prompt's first block alone: the others carry it through their parent.
                    cache_salt=(run.cache_salt or None) if parent is None else None,
                )
            )


def _stretches(indices: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Runs of consecutive numbers in an ascending sequence, as (first, last + 1)."""
    for _, group in groupby(enumerate(indices), key=lambda pair: pair[1] - pair[0]):
        members = [index for _, index in group]
        yield members[0], members[-1] + 1


def handle_of(name: PrefixHash) -> int:
    """What a block is called in KV events: the low 64 bits of its name, big endian."""
    return int.from_bytes(name[-8:], "big")
