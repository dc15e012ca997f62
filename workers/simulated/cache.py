"""The simulated engine's KV memory: counted blocks, some of them named and hittable.

As in vLLM, a named block that no request uses stays hittable until its memory is wanted; the one unused longest goes
first. A request releases its blocks tail first, and whoever uses a block uses its whole prefix, so a leaf always leaves
before its parent. Two requests that compute the same block at once leave two copies of it, each announced when it comes
and when it goes. Blocks without a name are interchangeable, so only their number is kept.

A block whose KV is not exact is another block than the exact one of that name, and lies under another key (`key_of`).
Which is what a chain is made of, so each block knows the key of the one before it.

Everything that changes the set of hittable blocks is written to a journal, in order: KV events are made from it.
"""

from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from hashlib import blake2b
from typing import NamedTuple

from cachecore.blocks import HASH_BYTES, PrefixHash
from cachecore.scope import Fidelity


def key_of(name: PrefixHash, fidelity: Fidelity) -> PrefixHash:
    """What a block lies under: its name, or what is made of it where its KV is not exact."""
    if fidelity is Fidelity.EXACT:
        return name
    return PrefixHash(blake2b(name + bytes([fidelity]), digest_size=HASH_BYTES).digest())


class Block:
    """One block of memory in a request's table or in the cache."""

    __slots__ = ("fidelity", "name", "parent", "references")

    def __init__(self) -> None:
        self.name: PrefixHash | None = None
        """Its key; None while it cannot be hit."""
        self.parent: PrefixHash | None = None
        """Key of the block before it, or the root of the chain."""
        self.fidelity = Fidelity.EXACT
        self.references = 1


class Held(NamedTuple):
    """A run that is hittable, block by block."""

    parent: PrefixHash | None
    fidelity: Fidelity


class NamedRun(NamedTuple):
    """Journal: consecutive blocks of one prompt became hittable."""

    names: Sequence[PrefixHash]
    """Their keys."""
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

_UP_TO = {worst: [fidelity for fidelity in Fidelity if fidelity <= worst] for worst in Fidelity}


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

    def match(self, names: Iterable[PrefixHash], worst: Fidelity = Fidelity.EXACT) -> list[Block]:
        """The leading blocks that are hittable, exact ones first, others down to `worst`. They are not yet held."""
        found: list[Block] = []
        for name in names:
            block = self._find(name, worst)
            if block is None:
                break
            found.append(block)
        return found

    def trace(self, tail: PrefixHash, blocks: int, worst: Fidelity) -> Held | None:
        """The run of so many blocks that ends with the one named `tail`; None where one of them is not hittable."""
        block, parent, fidelity = self._find(tail, worst), None, Fidelity.EXACT
        for _ in range(blocks):
            if block is None or block.fidelity > worst:
                return None
            parent, fidelity = block.parent, max(fidelity, block.fidelity)
            copies = self._copies.get(parent) if parent is not None else None
            block = copies[0] if copies else None
        return Held(parent, fidelity)

    def _find(self, name: PrefixHash, worst: Fidelity) -> Block | None:
        for fidelity in _UP_TO[worst]:
            copies = self._copies.get(key_of(name, fidelity))
            if copies is not None:
                return copies[0]
        return None

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

    def name(
        self, blocks: Sequence[Block], names: Sequence[PrefixHash], parent: PrefixHash, fidelity: Fidelity
    ) -> None:
        """Make held blocks hittable, which continue the chain of `parent`, a key or a root. The caller writes the
        journal, since it knows the run."""
        for block, name in zip(blocks, names, strict=True):
            block.parent, block.fidelity = parent, fidelity
            block.name = parent = key_of(name, fidelity)
            self._copies.setdefault(parent, []).append(block)

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
