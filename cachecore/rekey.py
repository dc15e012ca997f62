"""From an engine's events to an index's: blocks get our names, computed from their tokens.

Engines name blocks by hashes that depend on their version, their configuration and sometimes their process. None of
that is reproduced here. A store event carries the tokens, so our own names are computed from them after the parent's
name, and the engine's hash serves as a handle: later events use it to name a parent or a removal.

What a child inherits. vLLM says salt and adapter with the first block of a prompt only. Scope, and with it the key that
names blocks, is therefore resolved at the root and passed on from parent to child. So is fidelity, except that a run
with a salt of ours may say that it is worse than its parent; it is never better, and what follows it is as bad.

What is refused. One rule: a wrong name is worse than none. A store whose parent was never seen waits, in a bounded
place, and is never attached to the root; a store whose lengths, sizes or handles do not fit is dropped and counted, and
costs itself only. Blocks of a scope that is not ours are followed without names, so that their children are recognised.

Only attention over the whole prefix says anything about prefixes: events of sliding-window, Mamba and other groups are
ignored. Of several full-attention groups the first one seen speaks for all.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

from cachecore.blocks import Extra, pack_tokens
from cachecore.events import BlockKeys, BlockRemoved, BlockStored, ExtraKey, KvEvent, tier_of
from cachecore.holders import Tier
from cachecore.index.contract import Cleared, IndexEvent, Origin
from cachecore.ledgers import (
    Emission,
    HandleRecord,
    Ledger,
    PartLedger,
    RestoredRun,
    Root,
    StoredRun,
    WholeLedger,
)
from cachecore.scope import Naming, stated_fidelity

NamingFor = Callable[[str | None, str | None], Naming | None]
"""(cache salt, adapter) of an event -> how to name its blocks; None when the scope is not ours."""

HANDLES_MAX: Final = 2_000_000
PENDING_BLOCKS_MAX: Final = 16_384
_NAMINGS_MAX: Final = 4_096
_PREFIX_KINDS: Final = frozenset({None, "full_attention", "mla_attention", "sink_full_attention"})
_SCOPE_TAGS: Final = frozenset({"lora", "cache_salt"})


@dataclass(slots=True)
class RekeyStats:
    """Counters only grow; the last three are sizes."""

    stored: int = 0
    """Our blocks announced as stored, copies included."""
    removed: int = 0
    cleared: int = 0
    unknown_parent: int = 0
    """Engine blocks given up because their parent was not seen."""
    unknown_handle: int = 0
    """Removals of handles that are not known in that tier."""
    foreign: int = 0
    """Engine blocks stored under a scope that is not ours."""
    proven: int = 0
    """Engine blocks that were in doubt and are held, since one behind them was stored."""
    ignored: int = 0
    """Events of groups that say nothing about prefixes."""
    refused: Counter[str] = field(default_factory=Counter)
    """Events dropped, by reason: `block_size`, `length`, `repeated_handle`, `medium`, `token`, `extra`."""
    pending: int = 0
    """Engine blocks that wait for their parent."""
    handles: int = 0
    namings: int = 0


class _Refused(Exception):
    """An event that cannot be used; the argument is the reason."""


class Rekeyer:
    """Follows the event stream of one rank of one life of a worker.

    `block_size_tokens` is ours. The engine's may be any multiple of it or any part that divides it. `with_texts` puts
    what blocks say into their stores, for a content index.
    """

    def __init__(
        self,
        block_size_tokens: int,
        naming_for: NamingFor,
        *,
        handles_max: int = HANDLES_MAX,
        pending_blocks_max: int = PENDING_BLOCKS_MAX,
        with_texts: bool = False,
    ) -> None:
        self._block_size_tokens = block_size_tokens
        self._naming_for = naming_for
        self._handles_max = handles_max
        self._with_texts = with_texts
        self._pending = _Pending(pending_blocks_max)
        self._ledger: Ledger | None = None
        self._parts_per_block = 0
        self._roots: dict[tuple[str | None, str | None, int | None], Root] = {}
        self._group_kinds: dict[int, str | None] = {}
        self._group: int | None = None
        self._stats = RekeyStats()

    def rekey(self, events: Iterable[KvEvent]) -> list[IndexEvent]:
        """The index events that these engine events amount to, in order. Never raises for what an engine sends."""
        out = Emission(self._with_texts)
        for event in events:
            try:
                self._apply(event, out)
            except _Refused as refused:
                self._stats.refused[str(refused)] += 1
        events_out = out.flush()
        self._stats.stored += out.stored_blocks
        self._stats.removed += out.removed_blocks
        self._stats.foreign += out.foreign_blocks
        self._stats.proven += out.proven_blocks
        return events_out

    def restore(self, runs: Iterable[RestoredRun]) -> None:
        """Go on where another rekeyer of this stream stopped, from what an index has kept of the events it gave.

        For a rekeyer that has seen nothing yet. The runs hold every batch up to a certain one; the next to be rekeyed
        is the one after it. From then on the events are those the other would have given, except for children of
        blocks that it followed without names and for blocks that waited for their parent: an index has neither. Such
        children wait here, at worst for ever, which makes later matches shorter.

        Keys and settings may have changed since. Where a run's naming is not what it was, or no longer ours, the run
        keeps its names so that its removals are understood, and its children are followed without names.

        Raises ValueError, and still knows nothing, when the runs contradict themselves or each other, or when none of
        them is named as it would be now: then there is nothing to go on with.
        """
        ledger = WholeLedger(self._block_size_tokens, self._handles_max)
        group, ours = None, False
        for run in runs:
            group = run.origin.group if group is None else group
            root = self._root_again(run.origin)
            ours = ours or root is not None
            ledger.restore(run, root)
        if len(ledger) and not ours:
            raise ValueError("none of the runs is named as it would be now")
        if len(ledger):
            self._ledger, self._parts_per_block, self._group = ledger, 1, group

    def clear(self) -> None:
        """Forget every handle: the engine was restarted, or emptied its cache."""
        self._ledger = None
        self._pending.clear()

    def doubt(self) -> None:
        """Believe of no block that it is held: events of this life of the engine were lost, or were not to be believed.
        What is stored behind such a block proves it again."""
        if self._ledger is None or not self._ledger.doubt():
            self._ledger = None
        self._pending.clear()

    def stats(self) -> RekeyStats:
        self._stats.pending = len(self._pending)
        self._stats.handles = 0 if self._ledger is None else len(self._ledger)
        self._stats.namings = len(self._roots)
        return self._stats

    def handles(self) -> Iterator[HandleRecord]:
        """Every handle known, parents before their children as far as they arrived so."""
        if self._ledger is not None:
            yield from self._ledger.records()

    def _apply(self, event: KvEvent, out: Emission) -> None:
        if isinstance(event, BlockRemoved):
            self._remove(event, out)
        elif isinstance(event, BlockStored):
            self._store(event, out)
        else:
            self.clear()
            self._stats.cleared += 1
            out.flush().append(Cleared())

    # ---- stores ------------------------------------------------------------------------------------------------------

    def _store(self, event: BlockStored, out: Emission) -> None:
        if not self._learn_group(event):
            self._stats.ignored += 1
            return
        ledger = self._ledger_for(event.block_size)
        run = _checked(event)
        if run.parent is None or ledger.goes_on(run.parent, run.tier, out):
            self._store_with_followers(ledger, run, out)
        else:
            self._stats.unknown_parent += self._pending.add(run, run.parent)

    def _store_with_followers(self, ledger: Ledger, run: StoredRun, out: Emission) -> None:
        """Store the run, then the runs that waited for one of its blocks, then those that waited for these."""
        ready = [run]
        for each in ready:
            root = self._root(each.salt, each.adapter, self._group) if each.parent is None else None
            ledger.store(each, root, out)
            if self._pending:
                ready += self._pending.take(each.handles)

    def _learn_group(self, event: BlockStored) -> bool:
        """Whether the event speaks for prefixes. Removals name their group and not its kind, so it is remembered."""
        group, kind = event.group_idx, event.kv_cache_spec_kind
        if group is None:
            return kind in _PREFIX_KINDS
        if kind is not None:
            self._group_kinds[group] = kind
        if self._group is None and self._group_kinds.get(group) in _PREFIX_KINDS:
            self._group = group
        return self._group == group

    def _ledger_for(self, engine_block_size: int) -> Ledger:
        """The one ledger. An engine keeps to one side: multiples of our block size, or one certain part of it."""
        ours = self._block_size_tokens
        if engine_block_size % ours and ours % engine_block_size:
            raise _Refused("block_size")
        parts = max(1, ours // engine_block_size)
        if self._ledger is None:
            self._parts_per_block = parts
            self._ledger = WholeLedger(ours, self._handles_max) if parts == 1 else PartLedger(parts, self._handles_max)
        if parts != self._parts_per_block:
            raise _Refused("block_size")
        return self._ledger

    def _root(self, salt: str | None, adapter: str | None, group: int | None) -> Root | None:
        key = (salt, adapter, group)
        root = self._roots.get(key)
        if root is None:
            naming = self._naming_for(salt, adapter)
            if naming is None:
                return None  # not kept: a reloaded keyring may know it a moment later
            if naming.hasher.block_size_tokens != self._block_size_tokens:
                raise ValueError("a naming's block size must be the rekeyer's")
            if len(self._roots) >= _NAMINGS_MAX:
                self._roots.clear()
            root = self._roots[key] = Root(naming, Origin(*key, naming.root))
        return root

    def _root_again(self, origin: Origin) -> Root | None:
        """The root that a chain had; None when its naming is no longer ours, or another than it was."""
        root = self._root(origin.salt, origin.adapter, origin.group)
        return root if root is not None and root.origin == origin else None

    # ---- removals ----------------------------------------------------------------------------------------------------

    def _remove(self, event: BlockRemoved, out: Emission) -> None:
        if event.group_idx is not None and event.group_idx != self._group:
            self._stats.ignored += 1
            return
        tier = _tier(event.medium, event.locality)
        unknown: Sequence[int] = event.block_hashes
        if self._ledger is not None:
            unknown = self._ledger.remove(event.block_hashes, tier, out)
        if unknown:
            self._stats.unknown_handle += sum(not self._pending.remove(handle, tier) for handle in unknown)


class _Pending:
    """Runs whose parent has not been seen, oldest first, at most `blocks_max` engine blocks."""

    def __init__(self, blocks_max: int) -> None:
        self._blocks_max = blocks_max
        self._runs: dict[int, list[StoredRun]] = {}
        """By the parent they wait for."""
        self._waiting: dict[tuple[int, Tier], int] = {}
        """The parent that a waiting block's run waits for."""

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, run: StoredRun, parent: int) -> int:
        """Keep a run; how many blocks were given up for it (or of it)."""
        keys = [(handle, run.tier) for handle in run.handles]
        # A second copy of a waiting block is not kept: fewer copies than there are shorten matches, more would lie.
        if len(keys) > self._blocks_max or any(key in self._waiting for key in keys):
            return len(keys)
        given_up = 0
        while len(self._waiting) + len(keys) > self._blocks_max:
            given_up += self._drop(next(iter(self._runs)))
        self._runs.setdefault(parent, []).append(run)
        self._waiting.update(dict.fromkeys(keys, parent))
        return given_up

    def take(self, parents: Iterable[int]) -> list[StoredRun]:
        """The runs that waited for any of these blocks."""
        runs = [run for parent in parents for run in self._runs.pop(parent, ())]
        for run in runs:
            self._forget(run)
        return runs

    def remove(self, handle: int, tier: Tier) -> bool:
        """A waiting block is gone: its run ends before it."""
        parent = self._waiting.get((handle, tier))
        if parent is None:
            return False
        runs = self._runs[parent]
        place = next(index for index, run in enumerate(runs) if run.tier == tier and handle in run.handles)
        run = runs.pop(place)
        self._forget(run)
        if not runs:
            del self._runs[parent]
        kept = run.handles.index(handle)
        if kept:
            size = len(run.tokens) // len(run.handles)
            self.add(run._replace(handles=run.handles[:kept], tokens=run.tokens[: kept * size]), parent)
        return True

    def clear(self) -> None:
        self._runs.clear()
        self._waiting.clear()

    def _drop(self, parent: int) -> int:
        return sum(self._forget(run) for run in self._runs.pop(parent))

    def _forget(self, run: StoredRun) -> int:
        for handle in run.handles:
            del self._waiting[handle, run.tier]
        return len(run.handles)


# ---- checking --------------------------------------------------------------------------------------------------------


def _checked(event: BlockStored) -> StoredRun:
    """The event as a run. Raises _Refused when it contradicts itself."""
    handles, parent = event.block_hashes, event.parent_block_hash
    if not handles or len(event.token_ids) != len(handles) * event.block_size:
        raise _Refused("length")
    distinct = set(handles)
    if len(distinct) != len(handles) or parent in distinct:
        raise _Refused("repeated_handle")
    try:
        tokens = pack_tokens(event.token_ids)
    except (OverflowError, TypeError):
        raise _Refused("token") from None
    tier = _tier(event.medium, event.locality)
    salt = event.cache_salt
    return StoredRun(handles, parent, tokens, tier, _extras(event), salt, event.lora_name, stated_fidelity(salt))


def _tier(medium: str, locality: str | None) -> Tier:
    """What lies with another machine is as far as a pool, whatever its medium is there."""
    tier = Tier.L2 if locality == "REMOTE" else tier_of(medium)
    if tier is None:
        raise _Refused("medium")
    return tier


def _extras(event: BlockStored) -> tuple[tuple[Extra, ...], ...] | None:
    """What blocks depend on besides tokens and scope; None for the common run without any."""
    keys = event.extra_keys
    if keys is None:
        return None
    scope_texts = (event.lora_name, event.cache_salt)
    extras_of = {block: _block_extras(block, scope_texts) for block in set(keys)}
    if not any(extras_of.values()):
        return None
    count = len(event.block_hashes)
    return (*(extras_of[block] for block in keys[:count]), *((),) * (count - len(keys)))


def _block_extras(keys: BlockKeys, scope_texts: tuple[str | None, str | None]) -> tuple[Extra, ...]:
    extras = (_extra(key) for key in keys or () if key not in scope_texts)
    return tuple(extra for extra in extras if extra is not None)


def _extra(key: ExtraKey) -> Extra | None:
    """A key as an extra; None for one that says the scope again. A key of unknown form still tells blocks apart."""
    match key:
        case (str(tag), *_) if tag in _SCOPE_TAGS:
            return None
        case (str(identifier), int(offset)) | ("mm", str(identifier), int(offset)):
            return _at(offset, identifier.encode())
        case ("prompt_embeds", bytes(digest)) | bytes(digest):
            return Extra(0, digest)
        case str(text):
            return Extra(0, text.encode())
        case _:
            return Extra(0, repr(key).encode())


def _at(offset_tokens: int, identifier: bytes) -> Extra:
    if not -(2**31) <= offset_tokens < 2**31:
        raise _Refused("extra")
    return Extra(offset_tokens, identifier)
