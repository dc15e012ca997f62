"""Which of our names stand behind an engine's handles, and how many copies of each are where.

A ledger follows one event stream whose blocks are a multiple of ours (`WholeLedger`: each handle stands for one or more
of our names) or a part of ours (`PartLedger`: a name exists while all its parts are held). Both answer the same four
questions; `rekey.py` decides what reaches them.

Copies are physical: an engine may hold a block twice in one tier and announces each copy, so a handle is forgotten when
it has been removed as often as it was stored. The counts of a handle's three tiers share one integer.

A chain is as good as its worst block, so fidelity never gets better from parent to child. A handle stands for blocks of
one fidelity; the same name at another fidelity comes under another handle.

Where events were lost, or were not to be believed, nothing is known to be held; but what handles stand for is still
true. An engine computes no block behind a hole, so one that goes on from such a handle in its own memory (L0) proves
that the handle and all before it are there. A hot beginning is announced once and never again: without this it would be
lost to an index for as long as the engine keeps it. Only a `WholeLedger` does so.

Another process can go on with a `WholeLedger`: its stores say which handles they are about, and from what an index has
kept of them (`RestoredRun`) the same ledger is built again. A `PartLedger` needs the tokens of parts that are not yet
whole, which no index keeps; its stores go without handles, and without texts.
"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby, islice
from typing import Final, NamedTuple, Protocol

import msgspec

from cachecore.blocks import HASH_BYTES, TOKEN_BYTES, Chain, Extra, PrefixHash, canonical_extras
from cachecore.holders import Tier
from cachecore.index.contract import IndexEvent, Origin, Removed, Stored, Text
from cachecore.scope import Fidelity, Naming

_COPIES_BITS: Final = 32
_COPIES_MASK: Final = (1 << _COPIES_BITS) - 1
_EVICTED_SHARE: Final = 16


class StoredRun(NamedTuple):
    """A store, checked and packed: consecutive engine blocks of one chain that entered one tier."""

    handles: tuple[int, ...]
    """All different, none of them `parent`."""
    parent: int | None
    tokens: bytes
    """`pack_tokens`, as many for each handle."""
    tier: Tier
    extras: tuple[tuple[Extra, ...], ...] | None = None
    """For each handle, offsets relative to its own block."""
    salt: str | None = None
    adapter: str | None = None
    fidelity: Fidelity = Fidelity.EXACT
    """What the run says of itself; its blocks are as good as this or their parent, whichever is worse."""


class Root(NamedTuple):
    """Where the chains of one scope begin."""

    naming: Naming
    origin: Origin
    """What the engine said that led to it."""


class RestoredRun(NamedTuple):
    """Consecutive blocks of one chain in one tier, as an index has kept them of `Stored` events with handles.

    Their parent is not needed: they have been named.
    """

    names: Chain
    handles: Sequence[int]
    """One for each name; names of one engine block stand together and have the same."""
    origin: Origin
    tier: Tier = Tier.L0
    copies: Sequence[int] = ()
    """Of each name; empty when there is one of each."""
    fidelity: Fidelity = Fidelity.EXACT


class HandleRecord(NamedTuple):
    """What is known of one handle, for dumps."""

    handle: int
    names: Chain
    """Empty for blocks of a scope that is not ours, and for parts that do not end one of our blocks."""
    naming: Naming | None
    copies: tuple[int, int, int]
    """In L0, L1, L2."""
    fidelity: Fidelity = Fidelity.EXACT


class Emission:
    """Collects index events in order; removals that follow each other in one layer become one event."""

    __slots__ = (
        "_layer",
        "_removed",
        "events",
        "foreign_blocks",
        "proven_blocks",
        "removed_blocks",
        "stored_blocks",
        "with_texts",
    )

    def __init__(self, with_texts: bool = False) -> None:
        self.with_texts = with_texts
        self.events: list[IndexEvent] = []
        self.stored_blocks = 0
        self.removed_blocks = 0
        self.foreign_blocks = 0
        """Engine blocks that were followed without names."""
        self.proven_blocks = 0
        """Engine blocks that are held because one behind them was stored."""
        self._removed: dict[bytes, None] = {}
        self._layer = Tier.L0, Fidelity.EXACT

    def stored(
        self,
        parent: PrefixHash,
        chain: Chain,
        tier: Tier,
        fidelity: Fidelity,
        handles: tuple[int, ...] = (),
        origin: Origin | None = None,
        text: Text | None = None,
    ) -> None:
        self.flush()
        self.stored_blocks += len(chain) // HASH_BYTES
        self.events.append(Stored(parent, chain, tier, fidelity, handles, origin, text))

    def removed(self, names: bytes, tier: Tier, fidelity: Fidelity) -> None:
        """One copy of `names` is gone. A second copy of a name needs an event of its own."""
        if (tier, fidelity) != self._layer or names in self._removed:
            self.flush()
            self._layer = tier, fidelity
        self.removed_blocks += len(names) // HASH_BYTES
        self._removed[names] = None

    def flush(self) -> list[IndexEvent]:
        if self._removed:
            self.events.append(Removed(Chain(b"".join(self._removed)), *self._layer))
            self._removed.clear()
        return self.events


class Ledger(Protocol):
    def __len__(self) -> int:
        """Handles known."""
        ...

    def goes_on(self, parent: int, tier: Tier, out: Emission) -> bool:
        """Whether blocks that enter `tier` after `parent` can be named. They may prove that it is held."""
        ...

    def doubt(self) -> bool:
        """Nothing is known to be held any longer, what handles stand for is. False where that is of no use."""
        ...

    def store(self, run: StoredRun, root: Root | None, out: Emission) -> None:
        """Name the run's blocks after their parent, which is known; `root` names a run without a parent.

        Blocks in a scope that is not ours (`root` None, or a parent in such a scope) are followed without names, so
        that their children are recognised as well.
        """
        ...

    def remove(self, handles: Iterable[int], tier: Tier, out: Emission) -> list[int]:
        """One copy of each is gone. Returns the handles that are not known in that tier."""
        ...

    def records(self) -> Iterator[HandleRecord]: ...


def _unit(tier: Tier) -> int:
    return 1 << (_COPIES_BITS * tier)


def _surplus(handles: int, handles_max: int) -> int:
    return handles - handles_max + handles_max // _EVICTED_SHARE


def _copies_in(copies: int, tier: Tier) -> int:
    return copies >> (_COPIES_BITS * tier) & _COPIES_MASK


def _copies_by_tier(copies: int) -> tuple[int, int, int]:
    return _copies_in(copies, Tier.L0), _copies_in(copies, Tier.L1), _copies_in(copies, Tier.L2)


def _names_per_handle(run: RestoredRun) -> int:
    handles = run.handles
    if not handles or len(handles) * HASH_BYTES != len(run.names):
        raise ValueError(f"{len(handles)} handles for {len(run.names)} bytes of names")
    each = next((at for at, handle in enumerate(handles) if handle != handles[0]), len(handles))
    firsts = handles[::each]
    if any(handles[at::each] != firsts for at in range(1, each)) or len(set(firsts)) != len(firsts):
        raise ValueError("handles stand for different numbers of blocks")
    return each


def _copies_per_handle(run: RestoredRun, each: int) -> Sequence[int]:
    """All blocks of a handle come and go together."""
    if not run.copies:
        return (1,) * (len(run.handles) // each)
    copies = run.copies[::each]
    if len(run.copies) != len(run.handles) or any(run.copies[at::each] != copies for at in range(1, each)):
        raise ValueError("blocks of one handle have different numbers of copies")
    if not all(0 < count <= _COPIES_MASK for count in copies):
        raise ValueError("what is held has at least one copy")
    return copies


# ---- engine blocks that hold one or more of ours ---------------------------------------------------------------------


class _Block(msgspec.Struct, gc=False):  # a million of these: no dict, and nothing for the collector to walk
    names: bytes
    root: Root | None
    """None in a scope that is not ours, or no longer ours; children are then followed without names."""
    copies: int
    fidelity: Fidelity
    before: int | None
    """Handle of the block before it; its own where that is not known."""


class WholeLedger:
    """Engine blocks of k times our size, k >= 1: each handle stands for k consecutive names.

    `handles_max` bounds it when removals get lost: the oldest handles are given up as if they had been removed, those
    first that are not known to be held.
    """

    def __init__(self, block_size_tokens: int, handles_max: int) -> None:
        self._block_size_tokens = block_size_tokens
        self._handles_max = handles_max
        self._blocks: dict[int, _Block] = {}
        self._doubted: dict[int, _Block] = {}
        """Not known to be held. Their copies mean nothing."""

    def __len__(self) -> int:
        return len(self._blocks)

    def goes_on(self, parent: int, tier: Tier, out: Emission) -> bool:
        return parent in self._blocks or (parent in self._doubted and tier is Tier.L0 and self._prove(parent, out))

    def doubt(self) -> bool:
        self._doubted.update(self._blocks)
        self._blocks = {}
        return True

    def store(self, run: StoredRun, root: Root | None, out: Emission) -> None:
        root, parent, fidelity = self._after(run, root)
        chain = Chain(b"")
        if root is not None:
            chain = root.naming.hasher.chain(parent, run.tokens, self._canonical(run))
            text = Text(root.naming, run.tokens) if out.with_texts and run.extras is None else None
            out.stored(parent, chain, run.tier, fidelity, run.handles, root.origin, text)
        else:
            out.foreign_blocks += len(run.handles)
        self._follow(run, root, chain, fidelity, out)
        if len(self._blocks) + len(self._doubted) > self._handles_max:
            self._evict(out)

    def restore(self, run: RestoredRun, root: Root | None) -> None:
        """Know a run's handles again; `root` None keeps the names, for removals, and gives none to children.

        Raises ValueError when the run contradicts itself or one restored before. So does a handle of which only some
        names were kept: a child of it would be named after the wrong block.
        """
        blocks, unit, each = self._blocks, _unit(run.tier), _names_per_handle(run)
        copies, step = _copies_per_handle(run, each), each * HASH_BYTES
        known = next(iter(blocks.values()), None)
        if known is not None and len(known.names) != step:
            raise ValueError("handles stand for different numbers of blocks")
        before = run.handles[0]
        for at, handle in enumerate(run.handles[::each]):
            names = run.names[at * step : (at + 1) * step]
            block = blocks.setdefault(handle, _Block(names, root, 0, run.fidelity, before))
            before = handle
            if block.names != names or block.fidelity is not run.fidelity:
                raise ValueError(f"handle {handle} stands for different blocks")
            block.copies += copies[at] * unit

    def _after(self, run: StoredRun, root: Root | None) -> tuple[Root | None, PrefixHash, Fidelity]:
        """Root and name that a run continues, and how good it is; the name is empty outside our scopes."""
        if run.parent is None:
            return root, PrefixHash(b"") if root is None else root.naming.root, run.fidelity
        block = self._blocks[run.parent]
        return block.root, PrefixHash(block.names[-HASH_BYTES:]), max(block.fidelity, run.fidelity)

    def _follow(self, run: StoredRun, root: Root | None, chain: Chain, fidelity: Fidelity, out: Emission) -> None:
        blocks, unit, step = self._blocks, _unit(run.tier), len(chain) // len(run.handles)
        start, before = 0, run.parent
        for handle in run.handles:
            names = chain[start : start + step]
            start += step
            if self._doubted:
                self._doubted.pop(handle, None)
            block = blocks.get(handle)
            if block is not None and (block.names != names or block.fidelity is not fidelity):
                self._disown(blocks.pop(handle), out)
                block = None
            if block is None:
                blocks[handle] = _Block(names, root, unit, fidelity, before)
            else:
                block.copies += unit
            before = handle

    def _prove(self, handle: int, out: Emission) -> bool:
        """A block was stored behind this one: it is held, and so are all before it. False where they are not known as
        far as a root, or a block that is held."""
        path: dict[int, _Block] = {}
        at: int | None = handle
        while at is not None and at not in self._blocks:
            block = self._doubted.get(at)
            if block is None or at in path or block.before == at:
                return False
            path[at], at = block, block.before
        before = None if at is None else self._blocks[at]
        for (root, fidelity), run in groupby(reversed(path), lambda handle: (path[handle].root, path[handle].fidelity)):
            handles = (*run,)
            if root is not None:
                parent = root.naming.root if before is None else PrefixHash(before.names[-HASH_BYTES:])
                chain = Chain(b"".join(path[handle].names for handle in handles))
                out.stored(parent, chain, Tier.L0, fidelity, handles, root.origin)
            before = path[handles[-1]]
        for handle in reversed(path):
            block = self._blocks[handle] = self._doubted.pop(handle)
            block.copies = _unit(Tier.L0)
        out.proven_blocks += len(path)
        return True

    def remove(self, handles: Iterable[int], tier: Tier, out: Emission) -> list[int]:
        blocks, shift = self._blocks, _COPIES_BITS * tier
        unknown = []
        for handle in handles:
            block = blocks.get(handle)
            if block is None or not block.copies >> shift & _COPIES_MASK:
                unknown.append(handle)
                continue
            block.copies -= 1 << shift
            if not block.copies:
                del blocks[handle]
            if block.names:
                out.removed(block.names, tier, block.fidelity)
        return unknown

    def records(self) -> Iterator[HandleRecord]:
        for handle, block in self._blocks.items():
            naming = None if block.root is None else block.root.naming
            yield HandleRecord(handle, Chain(block.names), naming, _copies_by_tier(block.copies), block.fidelity)

    def _disown(self, block: _Block, out: Emission) -> None:
        """Take back all copies of a block that we can no longer follow."""
        for tier in Tier:
            for _ in range(_copies_in(block.copies, tier) if block.names else 0):
                out.removed(block.names, tier, block.fidelity)

    def _evict(self, out: Emission) -> None:
        # Many at once: a dict that loses its first entry again and again walks over the graves each time.
        surplus = _surplus(len(self._blocks) + len(self._doubted), self._handles_max)
        for handle in list(islice(self._doubted, surplus)):
            del self._doubted[handle]
            surplus -= 1
        for handle in list(islice(self._blocks, surplus)):
            self._disown(self._blocks.pop(handle), out)

    def _canonical(self, run: StoredRun) -> list[bytes] | None:
        """Extras of each of OUR blocks.

        An item's length is not announced: from the block it starts in, it counts until the engine's block ends.
        """
        if run.extras is None:
            return None
        size = self._block_size_tokens
        count = len(run.tokens) // TOKEN_BYTES // size // len(run.handles)
        return [
            canonical_extras(
                Extra(offset - index * size, identifier) for offset, identifier in extras if offset < (index + 1) * size
            )
            for extras in run.extras
            for index in range(count)
        ]


# ---- engine blocks that are parts of ours ----------------------------------------------------------------------------


class _Part:
    """One engine block inside one of ours."""

    __slots__ = ("copies", "extras", "fidelity", "handle", "name", "naming", "parent", "path", "tokens", "wholes")

    def __init__(self, handle: int, naming: Naming | None, parent: PrefixHash, path: tuple["_Part", ...]) -> None:
        self.handle = handle
        self.naming = naming
        self.parent = parent
        """Name of our block before the one this part belongs to."""
        self.path = (*path, self)
        """The parts of our block up to and with this one."""
        self.tokens = b""
        """Of the path; dropped once they are hashed."""
        self.extras: tuple[Extra, ...] = ()
        """Of the path, relative to our block."""
        self.name = PrefixHash(b"")
        """Of our block, for its last part."""
        self.wholes: dict[_Part, None] = {}
        """Last parts of our blocks that this part belongs to: several where prompts diverge inside a block."""
        self.copies = 0
        self.fidelity = Fidelity.EXACT
        """Of the path: that of our block, for its last part."""

    def held(self, tier: Tier) -> bool:
        return all(_copies_in(part.copies, tier) for part in self.path)


class PartLedger:
    """Engine blocks of 1/m of our size, m >= 2.

    One of our blocks is stored in a tier when its last missing part arrives there and removed when the first is lost.
    Its stores name no handles: nobody else can go on with this ledger.
    """

    def __init__(self, parts_per_block: int, handles_max: int) -> None:
        self._parts_per_block = parts_per_block
        self._handles_max = handles_max
        self._parts: dict[int, _Part] = {}

    def __len__(self) -> int:
        return len(self._parts)

    def goes_on(self, parent: int, tier: Tier, out: Emission) -> bool:
        return parent in self._parts

    def doubt(self) -> bool:
        return False

    def store(self, run: StoredRun, root: Root | None, out: Emission) -> None:
        before = None if run.parent is None else self._parts[run.parent]
        part_bytes = len(run.tokens) // len(run.handles)
        complete: list[_Part] = []
        for index, handle in enumerate(run.handles):
            part = self._parts.get(handle)
            if part is None:
                tokens = run.tokens[index * part_bytes : (index + 1) * part_bytes]
                part = self._add(handle, before, root, tokens, run.extras[index] if run.extras else ())
                part.fidelity = run.fidelity if before is None else max(before.fidelity, run.fidelity)
            complete += self._arrived(part, run.tier)
            out.foreign_blocks += part.naming is None
            before = part
        _emit_runs(complete, run.tier, out)
        if len(self._parts) > self._handles_max:
            self._evict(out)

    def remove(self, handles: Iterable[int], tier: Tier, out: Emission) -> list[int]:
        return [handle for handle in handles if not self._remove(handle, tier, out)]

    def _remove(self, handle: int, tier: Tier, out: Emission) -> bool:
        part = self._parts.get(handle)
        if part is None or not _copies_in(part.copies, tier):
            return False
        lost = [whole for whole in part.wholes if whole.naming is not None and whole.held(tier)]
        part.copies -= _unit(tier)
        if not _copies_in(part.copies, tier):
            for whole in lost:
                out.removed(whole.name, tier, whole.fidelity)
        self._forget_unused(part)
        return True

    def records(self) -> Iterator[HandleRecord]:
        for handle, part in self._parts.items():
            yield HandleRecord(handle, Chain(part.name), part.naming, _copies_by_tier(part.copies), part.fidelity)

    def _add(
        self, handle: int, before: _Part | None, root: Root | None, tokens: bytes, extras: Sequence[Extra]
    ) -> _Part:
        part = self._continued(handle, before, root)
        place = len(part.path) - 1
        shift = place * (len(tokens) // TOKEN_BYTES)
        moved = tuple(Extra(offset + shift, identifier) for offset, identifier in extras)
        prefix = part.path[-2] if place else None
        part.tokens = (prefix.tokens if prefix else b"") + tokens
        part.extras = tuple({*(prefix.extras if prefix else ()), *moved})
        if len(part.path) == self._parts_per_block:
            self._complete(part)
        self._parts[handle] = part
        return part

    def _continued(self, handle: int, before: _Part | None, root: Root | None) -> _Part:
        """A new part after `before`: further along in the same block of ours, or at the start of the next."""
        if before is None:
            if root is None:
                return _Part(handle, None, PrefixHash(b""), ())
            return _Part(handle, root.naming, root.naming.root, ())
        if len(before.path) == self._parts_per_block:
            return _Part(handle, before.naming, before.name, ())
        return _Part(handle, before.naming, before.parent, before.path)

    def _complete(self, last: _Part) -> None:
        if last.naming is not None:
            extras = [canonical_extras(last.extras)]
            last.name = PrefixHash(last.naming.hasher.chain(last.parent, last.tokens, extras))
        last.tokens = b""
        for part in last.path:
            part.wholes[last] = None

    def _arrived(self, part: _Part, tier: Tier) -> list[_Part]:
        """Count one more copy; the last parts of our blocks that became complete by it."""
        first = not _copies_in(part.copies, tier)
        part.copies += _unit(tier)
        return [whole for whole in part.wholes if first and whole.naming is not None and whole.held(tier)]

    def _forget_unused(self, part: _Part) -> None:
        """A part without copies stays while other parts of its blocks are held: it may come back."""
        candidates = list(part.path)
        for whole in list(part.wholes):
            if not any(member.copies for member in whole.path):
                candidates += whole.path
                for member in whole.path:
                    del member.wholes[whole]
        for member in candidates:
            if not member.copies and not member.wholes:
                self._parts.pop(member.handle, None)

    def _evict(self, out: Emission) -> None:
        for handle in list(islice(self._parts, _surplus(len(self._parts), self._handles_max))):
            part = self._parts.get(handle)
            for tier in Tier:
                while part is not None and _copies_in(part.copies, tier):
                    self._remove(handle, tier, out)


def _emit_runs(complete: list[_Part], tier: Tier, out: Emission) -> None:
    """Our blocks that follow each other, equally good, become one stored run."""
    start = 0
    for end in range(1, len(complete) + 1):
        if end == len(complete) or not _follows(complete[end], complete[end - 1]):
            names = Chain(b"".join(part.name for part in complete[start:end]))
            out.stored(complete[start].parent, names, tier, complete[start].fidelity)
            start = end


def _follows(part: _Part, before: _Part) -> bool:
    return part.parent == before.name and part.fidelity is before.fidelity
