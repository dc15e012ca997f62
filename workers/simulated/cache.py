"""The simulated engine's KV memory: counted blocks, some of them named and hittable.

As in vLLM, a named block that no request uses stays hittable until its memory is wanted; the one unused longest goes
first. A request releases its blocks tail first, and whoever uses a block uses its whole prefix, so a leaf always leaves
before its parent. Two requests that compute the same block at once leave two copies of it, each announced when it comes
and when it goes. Blocks without a name are interchangeable, so only their number is kept.

Everything that changes the set of hittable blocks is written to a journal, in order: KV events are made from it.
"""

from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from cachecore.blocks import PrefixHash


class Block:
    """One block of memory in a request's table or in the cache."""

    __slots__ = ("name", "references")

    def __init__(self) -> None:
        self.name: PrefixHash | None = None
        self.references = 1


class NamedRun(NamedTuple):
    """Journal: consecutive blocks of one prompt became hittable."""

    names: Sequence[PrefixHash]
    parent: PrefixHash | None
    """None where the run begins the prompt."""
    token_ids: Sequence[int]
    cache_salt: str
    adapter: str


class Evicted(NamedTuple):
    """Journal: a copy of a block is gone."""

    name: PrefixHash


class Emptied(NamedTuple):
    """Journal: nothing is hittable any more."""


JournalEntry = NamedRun | Evicted | Emptied


class BlockCache:
    """`blocks_total` blocks of KV memory."""

    def __init__(self, blocks_total: int) -> None:
        self.blocks_total = blocks_total
        self.journal: list[JournalEntry] = []
        self._blank = blocks_total
        self._copies: dict[PrefixHash, list[Block]] = {}
        self._idle: OrderedDict[Block, None] = OrderedDict()
        """Named blocks that no request uses, longest unused first."""

    @property
    def free(self) -> int:
        """Blocks that can be allocated, at the price of what is cached in some of them."""
        return self._blank + len(self._idle)

    @property
    def used(self) -> int:
        return self.blocks_total - self.free

    def match(self, names: Iterable[PrefixHash]) -> list[Block]:
        """The leading blocks that are hittable. They are not yet held."""
        found: list[Block] = []
        for name in names:
            copies = self._copies.get(name)
            if copies is None:
                break
            found.append(copies[0])
        return found

    def idle_among(self, blocks: Iterable[Block]) -> int:
        """How many of the blocks count as free now."""
        return sum(block.references == 0 for block in blocks)

    def hold(self, blocks: Iterable[Block]) -> None:
        for block in blocks:
            if block.references == 0:
                del self._idle[block]
            block.references += 1

    def allocate(self, count: int) -> list[Block]:
        """Blocks without content, held once; evicts as needed. `count` must not exceed `free`."""
        return [self._allocate() for _ in range(count)]

    def release(self, blocks: Sequence[Block]) -> None:
        """Give a request's blocks back, given in the order of its prompt."""
        for block in reversed(blocks):
            block.references -= 1
            if block.references:
                continue
            if block.name is None:
                self._blank += 1
            else:
                self._idle[block] = None

    def name(self, block: Block, name: PrefixHash) -> None:
        """Make a held block hittable. The caller writes the journal, since it knows the run."""
        block.name = name
        self._copies.setdefault(name, []).append(block)

    def clear(self) -> None:
        """Nothing is hittable any more; blocks in use stay in use, unnamed."""
        for copies in self._copies.values():
            for block in copies:
                block.name = None
        self._blank += len(self._idle)
        self._idle.clear()
        self._copies.clear()
        self.journal.append(Emptied())

    def contents(self) -> Counter[PrefixHash]:
        """Copies of every hittable block."""
        return Counter({name: len(copies) for name, copies in self._copies.items()})

    def take_journal(self) -> list[JournalEntry]:
        journal, self.journal = self.journal, []
        return journal

    def _allocate(self) -> Block:
        if self._blank:
            self._blank -= 1
            return Block()
        block, _ = self._idle.popitem(last=False)
        name = block.name
        if name is not None:
            copies = self._copies[name]
            copies.remove(block)
            if not copies:
                del self._copies[name]
            self.journal.append(Evicted(name))
        return Block()
