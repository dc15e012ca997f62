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
* A name is held by one block for each fidelity. When two sequences compute the same block at once, the later one takes
  over the block of the earlier one at `commit` and gives its own back: no duplicates to announce, and the first rule
  holds.
* A chain is as good as its worst block: along it, fidelity only gets worse. Who accepts less than exact KV is given
  exact blocks as far as there are any, and goes on with worse ones.

What is evicted goes to the tier below, where there is one, and comes back when it is wanted again (`recall`, `find`).

One thread changes the pool, except that others may look up and reference blocks (`find`, `acquire`, `release`) under
the engine's lock: who sends KV to a peer holds it in place like that.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from hashlib import blake2b
from itertools import groupby
from typing import NamedTuple, Protocol

from cachecore.blocks import HASH_BYTES, Chain, PrefixHash, split_chain
from cachecore.events import AllBlocksCleared, BlockRemoved, BlockStored, KvEvent
from cachecore.scope import Fidelity, Naming
from workers.transfer.runs import Edges, Held, HeldRun


class OutOfBlocksError(Exception):
    """Fewer blocks are left than asked for. Nothing has been taken."""


class NamedRun(NamedTuple):
    """Consecutive full blocks of one sequence whose KV has just been computed, or has arrived."""

    blocks: Sequence[int]
    chain: Chain
    """Their names."""
    parent: PrefixHash | None
    """The name before the first; None at the beginning of a prompt."""
    token_ids: Sequence[int]
    cache_salt: str = ""
    """To be announced with the run; engines say it where a prompt begins, and where KV is less faithful than before."""
    fidelity: Fidelity = Fidelity.EXACT
    parent_fidelity: Fidelity = Fidelity.EXACT
    """No worse than `fidelity`."""
    first_block: int = 0
    """Where the run stands in its prompt."""
    naming: Naming | None = None
    """How the chain is named. A run without cannot be found by `find`."""


class Leaving(NamedTuple):
    """A block that is evicted, its bytes still in place."""

    block: int
    held: Held


class Kept(NamedTuple):
    """A block in the tier below, and where it lies there."""

    held: Held
    slot: int


class TierBelow(Protocol):
    """What keeps evicted blocks for longer."""

    def keep(self, leaving: Sequence[Leaving]) -> list[KvEvent]:
        """Children come before their parents. What is to be announced before the removals from here."""
        ...

    def match(self, chain: Chain, best: Fidelity, worst: Fidelity) -> list[Kept]:
        """The leading blocks of `chain`; along it fidelity gets worse from `best` on, and never worse than `worst`."""
        ...

    def look(self, name: PrefixHash, worst: Fidelity) -> Kept | None:
        """The best there is of one block."""
        ...

    def use(self, found: Sequence[Kept]) -> None:
        """They are wanted again."""
        ...

    def still(self, found: Sequence[Kept]) -> Sequence[Kept]:
        """The leading ones that are there yet."""
        ...

    def fetch(self, found: Sequence[Kept], blocks: Sequence[int]) -> None:
        """Copy them into as many blocks of the pool's."""
        ...

    def clear(self) -> None: ...


class KvPool:
    """See the module's opening. Knows no tensors: a block is a number."""

    def __init__(
        self, blocks_total: int, block_size_tokens: int, on_named: Callable[[NamedRun], object] = lambda run: None
    ) -> None:
        """`on_named` hears of every run that has got its names."""
        self.on_named = on_named
        self.below: TierBelow | None = None
        """Where what is evicted goes."""
        self.blocks_total = blocks_total
        self.block_size_tokens = block_size_tokens
        self.generation = 0
        """Grows when the cache is cleared: names given before mean nothing any more."""
        self._references = [0] * blocks_total
        self._held: list[Held | None] = [None] * blocks_total
        self._by_name: tuple[dict[PrefixHash, int], ...] = tuple({} for _ in Fidelity)
        """For each fidelity."""
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

    def match(self, chain: Chain, worst: Fidelity = Fidelity.EXACT) -> list[int]:
        """The blocks of the longest cached prefix of `chain`, exact ones as far as possible and none worse than
        `worst`. Takes no reference: `acquire` them at once."""
        blocks = []
        levels = self._by_name[: worst + 1]
        for name in split_chain(chain):
            # What follows less faithful KV was computed from it.
            while levels and name not in levels[0]:
                levels = levels[1:]
            if not levels:
                break
            blocks.append(levels[0][name])
        return blocks

    def fidelity_of(self, block: int) -> Fidelity:
        """Of a named block, and so of the prefix that it ends."""
        held = self._held[block]
        return Fidelity.EXACT if held is None else held.fidelity

    def recall(self, chain: Chain, worst: Fidelity = Fidelity.EXACT) -> list[int]:
        """As `match`, after what the tier below has of the rest was brought back, as far as there is room for it."""
        hits = self.match(chain, worst)
        if self.below is None or len(hits) * HASH_BYTES == len(chain):
            return hits
        for fidelity in Fidelity:  # the best first: there may be exact KV below where there is worse here
            if fidelity <= worst:
                self._recall(self.below, chain, fidelity)
        return self.match(chain, worst)

    def _recall(self, below: TierBelow, chain: Chain, worst: Fidelity) -> None:
        hits = self.match(chain, worst)
        best = self.fidelity_of(hits[-1]) if hits else Fidelity.EXACT
        kept = below.match(Chain(chain[len(hits) * HASH_BYTES :]), best, worst)
        if kept:
            self._bring_back(below, kept, hits)

    def _bring_back(self, below: TierBelow, kept: Sequence[Kept], hits: Sequence[int]) -> None:
        """Give blocks of the tier below, parents first, a place here; `hits` are not to be evicted for it."""
        self.acquire(hits)
        kept = kept[: self.blocks_available]
        below.use(kept)
        blocks = self.allocate(len(kept))
        kept = below.still(kept)
        below.fetch(kept, blocks[: len(kept)])
        start = 0
        for stretch in following_each_other([each.held for each in kept]):
            end = start + len(stretch)
            blocks[start:end] = self.commit(_named_again(stretch, blocks[start:end]))
            start = end
        self.release([*hits, *blocks])

    def find(self, tail: PrefixHash, count: int, worst: Fidelity = Fidelity.EXACT) -> HeldRun | None:
        """The `count` blocks that end with the one named `tail`; None unless all are here. Takes no reference."""
        found = self._ancestors(tail, count, worst)
        kept = [each for each in found if isinstance(each, Kept)]
        if len(found) < count:
            return None
        if kept and self.below is not None:
            self._bring_back(self.below, kept, [each for each in found if isinstance(each, int)])
            found = self._ancestors(tail, count, worst)
        blocks = [each for each in found if isinstance(each, int)]
        if len(blocks) < count:
            return None
        return HeldRun(blocks, [held for block in blocks if (held := self._held[block]) is not None])

    def _ancestors(self, tail: PrefixHash, count: int, worst: Fidelity) -> list[int | Kept]:
        """The last blocks, at most `count`, of the chain that ends with the one named `tail`: here or else below."""
        found: list[int | Kept] = []
        name: PrefixHash | None = tail
        while name is not None and len(found) < count:
            block = next((level[name] for level in self._by_name[: worst + 1] if name in level), None)
            kept = self.below.look(name, worst) if block is None and self.below is not None else None
            held = kept.held if kept is not None else None if block is None else self._held[block]
            each = kept if block is None else block
            if held is None or each is None:
                break
            found.append(each)
            name, worst = held.parent, held.fidelity
        found.reverse()
        return found

    def edges(self, run: HeldRun, worst: Fidelity = Fidelity.EXACT) -> Edges:
        """What is held right before and behind a run. Takes no reference. Looks at every block."""
        first, tail = run.held[0], run.held[-1].name
        before = self.find(first.parent, 1, worst) if first.parent is not None else None
        after = [
            (block, held.token_ids)
            for block, held in enumerate(self._held)
            if held is not None and held.parent == tail and held.fidelity <= worst
        ]
        return Edges((before.blocks[0], before.held[0].token_ids) if before else None, after)

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
            if self._held[block] is None:
                self._free.append(block)
            else:
                self._idle[block] = None

    def commit(self, run: NamedRun) -> list[int]:
        """Name computed blocks. Returns the blocks to use in their place: those that bore the names already, if any."""
        names = list(split_chain(run.chain))
        blocks = list(run.blocks)
        by_name = self._by_name[run.fidelity]
        fresh = []
        for index, name in enumerate(names):
            known = by_name.get(name)
            if known is None:
                by_name[name] = blocks[index]
                self._held[blocks[index]] = self._describe(run, names, index)
                fresh.append(index)
            elif known != blocks[index]:
                self.acquire([known])
                self.release([blocks[index]])
                blocks[index] = known
        self._announce(run, names, fresh)
        self.on_named(run)
        return blocks

    def clear(self) -> None:
        """Forget every name. Live sequences keep their blocks, which can no longer be found by others."""
        self.generation += 1
        for names in self._by_name:
            names.clear()
        self._held = [None] * self.blocks_total
        self._free.extend(self._idle)
        self._idle.clear()
        if self.below is not None:
            self.below.clear()
        self._events.append(AllBlocksCleared())

    def handles(self) -> Sequence[int]:
        """Every block that a prefix can hit, as events call it."""
        return [handle_of(held.name, held.fidelity) for held in self._held if held is not None]

    def take_events(self) -> list[KvEvent]:
        """What has been stored and removed since the last call, in order."""
        events, self._events = self._events, []
        return events

    def _evict(self, count: int) -> None:
        leaving = []
        for _ in range(count):
            block, _ = self._idle.popitem(last=False)
            held = self._held[block]
            assert held is not None  # noqa: S101 - idle blocks are named
            self._held[block] = None
            del self._by_name[held.fidelity][held.name]
            self._free.append(block)
            leaving.append(Leaving(block, held))
        if leaving:
            if self.below is not None:
                self._events += self.below.keep(leaving)
            self._events.append(BlockRemoved(tuple(handle_of(held.name, held.fidelity) for _, held in leaving)))

    def _announce(self, run: NamedRun, names: Sequence[PrefixHash], fresh: Sequence[int]) -> None:
        """One event for each stretch of consecutive new names."""
        size = self.block_size_tokens
        for start, end in _stretches(fresh):
            parent, parent_fidelity = (names[start - 1], run.fidelity) if start else (run.parent, run.parent_fidelity)
            # Salt and fidelity are inherited: they are said where a prompt begins, and where fidelity gets worse.
            salted = parent is None or parent_fidelity != run.fidelity
            self._events.append(
                BlockStored(
                    block_hashes=tuple(handle_of(name, run.fidelity) for name in names[start:end]),
                    parent_block_hash=None if parent is None else handle_of(parent, parent_fidelity),
                    token_ids=run.token_ids[start * size : end * size],
                    block_size=size,
                    cache_salt=(run.cache_salt or None) if salted else None,
                )
            )

    def _describe(self, run: NamedRun, names: Sequence[PrefixHash], index: int) -> Held:
        size = self.block_size_tokens
        parent, parent_fidelity = (names[index - 1], run.fidelity) if index else (run.parent, run.parent_fidelity)
        token_ids = run.token_ids[index * size : (index + 1) * size]
        salt = run.cache_salt if parent is None or parent_fidelity != run.fidelity else ""
        number = run.first_block + index
        return Held(names[index], run.fidelity, parent, number, token_ids, run.naming, parent_fidelity, salt)


def following_each_other(blocks: Sequence[Held]) -> Iterator[list[Held]]:
    """Blocks, parents first, as stretches of such that follow each other and are equally good."""
    stretch: list[Held] = []
    for held in blocks:
        if stretch and (held.parent, held.fidelity) != (stretch[-1].name, stretch[-1].fidelity):
            yield stretch
            stretch = []
        stretch.append(held)
    if stretch:
        yield stretch


def _named_again(blocks: Sequence[Held], places: Sequence[int]) -> NamedRun:
    """Blocks that follow each other, as they were named before."""
    first = blocks[0]
    return NamedRun(
        blocks=places,
        chain=Chain(b"".join(held.name for held in blocks)),
        parent=first.parent,
        token_ids=[token for held in blocks for token in held.token_ids],
        cache_salt=first.cache_salt,
        fidelity=first.fidelity,
        parent_fidelity=first.parent_fidelity,
        first_block=first.number,
        naming=first.naming,
    )


def _stretches(indices: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Runs of consecutive numbers in an ascending sequence, as (first, last + 1)."""
    for _, group in groupby(enumerate(indices), key=lambda pair: pair[1] - pair[0]):
        members = [index for _, index in group]
        yield members[0], members[-1] + 1


def handle_of(name: PrefixHash, fidelity: Fidelity = Fidelity.EXACT) -> int:
    """What a block is called in KV events: the low 64 bits of its name, big endian; of a digest of both where it is not
    exact, since one name may be held at several fidelities."""
    if fidelity is Fidelity.EXACT:
        return int.from_bytes(name[-8:], "big")
    digest = blake2b(name + bytes([fidelity]), digest_size=8, person=b"ropeway.handle").digest()
    return int.from_bytes(digest, "big")
