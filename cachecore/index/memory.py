"""The prefix index of one process: runs of blocks, and one comparison per run.

* `_runs` finds a run by the name of its first block and, when the index is bounded, keeps runs in order of last use. A
  match hops from run to run: the query's next block names the next run, or nothing does and the match ends. Names are
  chained, so comparing the last block of a piece confirms the piece (`Run.shared`).
* The locator finds any block by name, for stores that go on from the middle of a run and for removals.
* Places are numbered: a slot is one (holder, tier, fidelity) and is never reused while a run mentions it. To forget a
  holder its slots are struck from `_places`; matches skip struck slots at once, and `sweep` removes them from the runs
  a few runs at a time. Clearing a tier does the same, and the holder's next store opens a new slot.
* A match touches the runs of its path deepest first, so a run is always fresher than what hangs below it, and bounding
  the index by dropping ends of the least recently used run takes leaves first.
"""

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np

from cachecore.blocks import HASH_BYTES, Chain, PrefixHash, split_chain
from cachecore.holders import Holder, Place, Tier
from cachecore.index.contract import Cleared, IndexEvent, IndexStats, Match, Removed, Stored
from cachecore.index.locator import Locator
from cachecore.index.runs import RUN_BLOCKS_MAX, Run, require, span, unknown, well_formed
from cachecore.scope import Fidelity

# A named tuple's own constructor is a function in Python.
_new = tuple.__new__
SWEEP_RUNS = 64
"""Runs looked at per batch applied while slots wait to be swept."""
_COMPACT_BLOCKS_MIN = 16


class _Step(NamedTuple):
    """A query goes through a run: it shares the run's first `blocks` blocks."""

    run: Run
    blocks: int


@dataclass(slots=True)
class _HolderState:
    sequence: int | None = None
    slots: dict[tuple[Tier, Fidelity], int] = field(default_factory=dict)


class MemoryIndex:
    """A `PrefixIndex` in memory. `blocks_max` bounds the distinct blocks kept; 0 means no bound."""

    def __init__(self, blocks_max: int = 0) -> None:
        self._blocks_max = blocks_max
        self._runs: OrderedDict[bytes, Run] = OrderedDict()
        self._locator: Locator[Run] = Locator(blocks_max)
        self._run_numbers: list[int] = []
        self._holders: dict[Holder, _HolderState] = {}
        self._places: list[Place | None] = []
        self._owners: list[_HolderState | None] = []
        self._held: list[int] = []
        self._free_slots: list[int] = []
        self._struck_slots: list[int] = []
        self._sweeping: list[int] = []
        self._sweep_number = 0
        self._layered = 0
        self._dead_blocks = 0
        self._stats = IndexStats(blocks_max=blocks_max, extra={"malformed_events": 0})

    # Writing

    def apply(self, holder: Holder, sequence: int, events: Sequence[IndexEvent]) -> bool:
        state = self._holders.get(holder)
        if state is None:
            state = self._holders[holder] = _HolderState()
        elif state.sequence is not None and sequence <= state.sequence:
            self._stats.stale_batches += 1
            return False
        state.sequence = sequence
        for event in events:
            if isinstance(event, Stored):
                self._store(holder, state, event)
            elif isinstance(event, Removed):
                self._remove(state, event)
            else:
                self._clear(state, event)
        if self._blocks_max and self._locator.count > self._blocks_max:
            self._evict()
        if self._sweeping or self._struck_slots:
            self.sweep(SWEEP_RUNS * max(1, len(events)))
        self._locator.shrink()
        return True

    def forget(self, holder: Holder) -> None:
        state = self._holders.pop(holder, None)
        if state is not None:
            self._clear(state, Cleared())

    def sweep(self, runs_max: int) -> bool:
        """Free what forgotten holders and cleared tiers have left in up to `runs_max` runs; False when nothing is left
        to do."""
        if not self._sweeping:
            self._sweeping, self._struck_slots, self._sweep_number = self._struck_slots, [], 0
        runs = self._locator.runs
        stop = min(len(runs), self._sweep_number + runs_max)
        for run in runs[self._sweep_number : stop]:
            if run is not None:
                self._sweep_run(run)
        self._sweep_number = stop
        if stop == len(runs):
            self._free_slots += self._sweeping
            self._sweeping = []
        return bool(self._sweeping or self._struck_slots)

    # Reading

    def match(self, chain: Chain) -> Match:
        if chain[:HASH_BYTES] not in self._runs:
            return _new(Match, (len(chain) // HASH_BYTES, {}))
        path = self._walk(chain)
        self._touch([step.run for step in path])
        depths = self._depths(path)
        if self._layered:
            self._add_layers(path, depths)
        return Match(len(chain) // HASH_BYTES, depths)

    def sequence(self, holder: Holder) -> int | None:
        state = self._holders.get(holder)
        return state.sequence if state else None

    def blocks_held(self, holder: Holder, tier: Tier) -> int:
        """How many blocks the holder has in the tier: `holdings`, counted and not looked at."""
        state = self._holders.get(holder)
        return sum(self._held[slot] for (held, _), slot in state.slots.items() if held == tier) if state else 0

    def holdings(self, holder: Holder, tier: Tier) -> Iterator[PrefixHash]:
        state = self._holders.get(holder)
        slots = [slot for (at, _), slot in state.slots.items() if at == tier] if state else []
        for run in list(self._runs.values()) if slots else ():
            held = 0
            for slot in slots:
                held |= run.held(slot)
            for position, name in enumerate(split_chain(Chain(bytes(run.names)))):
                if held >> position & 1:
                    yield name

    def stats(self) -> IndexStats:
        return replace(
            self._stats,
            blocks=self._locator.count - self._dead_blocks,
            holdings=sum(self._held),
            runs=len(self._runs),
            holders=len(self._holders),
            extra=dict(self._stats.extra),
        )

    # Matching

    def _walk(self, chain: bytes) -> list[_Step]:
        path: list[_Step] = []
        position, total = 0, len(chain) // HASH_BYTES
        find = self._runs.get
        while position < total:
            run = find(chain[position * HASH_BYTES : (position + 1) * HASH_BYTES])
            if run is None:
                break
            blocks = run.shared(chain, position)
            path.append(_Step(run, blocks))
            position += blocks
        return path

    def _depths(self, path: list[_Step]) -> dict[Place, int]:
        """Leading blocks of each place taken by itself."""
        places = self._places
        run, blocks = path[0]
        reached = run.depths
        if len(path) > 1:
            reached, blocks = _descend(path), sum(step.blocks for step in path)
        depths: dict[Place, int] = {}
        for slot, depth in reached.items():
            place = places[slot]
            if depth and place is not None:
                depths[place] = depth if depth < blocks else blocks
        return depths

    def _add_layers(self, path: list[_Step], depths: dict[Place, int]) -> None:
        """Where a holder has several places: what it can serve from one and all nearer and better ones together."""
        owners = {id(owner): owner for slot in path[0].run.depths if (owner := self._owners[slot]) is not None}
        for owner in owners.values():
            if len(owner.slots) < 2:
                continue
            for (tier, fidelity), slot in owner.slots.items():
                within = [other for (t, f), other in owner.slots.items() if t <= tier and f <= fidelity]
                depth = _depth_of(path, within) if len(within) > 1 else 0
                place = self._places[slot]
                if depth and place is not None and _holds_any(path, slot, depth):
                    depths[place] = depth

    # Storing

    def _store(self, holder: Holder, state: _HolderState, event: Stored) -> None:
        chain = event.chain
        if not well_formed(event.parent + chain):
            self._stats.extra["malformed_events"] += 1
            return
        slot = state.slots.get((event.tier, event.fidelity))
        if slot is None:
            slot = self._open_slot(state, Place(holder, event.tier, event.fidelity))
        before = self._locator.find(event.parent)
        run, start = (before[0], before[1] + 1) if before else (None, 0)
        touched = [run] if run else []
        position, total = 0, len(chain) // HASH_BYTES
        while position < total:
            name = chain[position * HASH_BYTES : (position + 1) * HASH_BYTES]
            if run is None or not run.names.startswith(name, start * HASH_BYTES):
                run, start = self._next_run(run, start, chain, position, touched)
            blocks = run.shared(chain, position, start)
            self._hold(run, slot, start, start + blocks)
            position, start = position + blocks, start + blocks
        self._touch(touched)

    def _touch(self, path: list[Run]) -> None:
        """These runs, each above the next, were used."""
        if self._blocks_max:
            for run in reversed(path):
                self._runs.move_to_end(run.first)

    def _next_run(
        self, run: Run | None, start: int, chain: bytes, position: int, touched: list[Run]
    ) -> tuple[Run, int]:
        """Where the block at `position` of the chain stands, which is not `start` of `run`. If nowhere yet, put it and
        all unknown blocks after it there, or into a new run where `start` is not the run's end."""
        name = chain[position * HASH_BYTES : (position + 1) * HASH_BYTES]
        found = self._locator.find(name)
        if found is not None:
            found = self._join(run, found[0]) if run and found[1] == 0 and start == run.blocks else found
        else:
            rest = chain[position * HASH_BYTES :]
            count = unknown(rest, self._runs)
            if run is None or start != run.blocks or start == RUN_BLOCKS_MAX:
                run, start = self._open_run(), 0
                self._runs[name] = run
            self._append(run, rest[: min(count, RUN_BLOCKS_MAX - start) * HASH_BYTES])
            found = run, start
        if found[0] not in touched:
            touched.append(found[0])
        return found

    def _append(self, run: Run, names: bytes) -> None:
        self._locator.add(names, run, run.blocks)
        run.names += names

    def _hold(self, run: Run, slot: int, start: int, stop: int) -> None:
        dead = run.dead
        self._held[slot] += run.store(slot, start, stop)
        if dead:
            self._dead_blocks -= (dead & ~run.dead).bit_count()

    def _join(self, run: Run, after: Run) -> tuple[Run, int]:
        """Where a chain goes on from the end of one run to the start of another: make them one, if the first is the
        longer (so that a chain stored from its end backwards costs n log n) and both fit. Where `after` begins now."""
        start = run.blocks
        if after.blocks > start or start + after.blocks > RUN_BLOCKS_MAX or self._sweeping:
            return after, 0  # joining would move struck slots to where the sweep has been
        self._close_run(after)
        self._locator.add(after.names, run, start)
        after.copy_into(run, 0, after.blocks)
        return run, start

    # Removing

    def _remove(self, state: _HolderState, event: Removed) -> None:
        slot = state.slots.get((event.tier, event.fidelity))
        chain, total = event.chain, len(event.chain) // HASH_BYTES
        if len(chain) % HASH_BYTES:
            self._stats.extra["malformed_events"] += 1
            return
        if slot is None:
            self._stats.unknown_removals += total
            return
        if total > 1 and self._descends(chain):
            chain = Chain(np.frombuffer(chain, dtype=np.uint64).reshape(-1, 2)[::-1].tobytes())
        rest = memoryview(chain)
        while rest:
            found = self._locator.find(bytes(rest[:HASH_BYTES]))
            blocks = 1
            if found is None:
                self._stats.unknown_removals += 1
            else:
                run, start = found
                blocks = run.equal(rest, start)
                self._release(run, slot, span(start, start + blocks))
            rest = rest[blocks * HASH_BYTES :]

    def _descends(self, chain: bytes) -> bool:
        """Engines free a sequence from its end: the second block named stands before the first."""
        found = self._locator.find(chain[HASH_BYTES : 2 * HASH_BYTES])
        return found is not None and found[0].names.startswith(chain[:HASH_BYTES], (found[1] + 1) * HASH_BYTES)

    def _release(self, run: Run, slot: int, blocks: int) -> None:
        dead = run.dead
        known, gone = run.remove(slot, blocks)
        self._stats.unknown_removals += blocks.bit_count() - known.bit_count()
        self._held[slot] -= gone.bit_count()
        if run.dead != dead:
            self._dead_blocks += (run.dead & ~dead).bit_count()
            self._settle(run)

    def _clear(self, state: _HolderState, event: Cleared) -> None:
        layered = len(state.slots) > 1
        for key in [key for key in state.slots if event.tier is None or key[0] == event.tier]:
            slot = state.slots.pop(key)
            (self._struck_slots if self._held[slot] else self._free_slots).append(slot)
            self._places[slot] = self._owners[slot] = None
            self._held[slot] = 0
        self._layered -= layered and len(state.slots) < 2

    def _sweep_run(self, run: Run) -> None:
        if self._drop_struck(run):
            self._settle(run)

    def _drop_struck(self, run: Run) -> bool:
        struck = [slot for slot in run.depths if self._places[slot] is None]
        dead = run.dead
        for slot in struck:
            run.drop(slot)
        self._dead_blocks += (run.dead & ~dead).bit_count()
        return bool(struck)

    # Slots and runs

    def _open_slot(self, state: _HolderState, place: Place) -> int:
        if self._free_slots:
            slot = self._free_slots.pop()
            self._places[slot], self._owners[slot] = place, state
        else:
            slot = len(self._places)
            self._places.append(place)
            self._owners.append(state)
            self._held.append(0)
        state.slots[place.tier, place.fidelity] = slot
        self._layered += len(state.slots) == 2
        return slot

    def _open_run(self) -> Run:
        runs = self._locator.runs
        if self._run_numbers:
            run = Run(self._run_numbers.pop())
            runs[run.number] = run
        else:
            run = Run(len(runs))
            runs.append(run)
        return run

    def _close_run(self, run: Run) -> None:
        del self._runs[run.first]
        self._locator.discard(run.names, run, 0)
        self._locator.runs[run.number] = None
        self._run_numbers.append(run.number)

    def _settle(self, run: Run) -> None:
        """Give back what is dead: the run's end at once, the rest when it is half of the run."""
        total = run.blocks
        alive = (span(0, total) & ~run.dead).bit_length()
        if alive < total:
            self._truncate(run, alive)
        dead = run.dead.bit_count()
        if alive and dead * 2 > alive >= _COMPACT_BLOCKS_MIN:
            self._compact(run)

    def _truncate(self, run: Run, blocks: int) -> None:
        self._dead_blocks -= (run.dead >> blocks).bit_count()
        if blocks:
            self._locator.discard(run.names[blocks * HASH_BYTES :], run, blocks)
        else:
            self._close_run(run)
        for slot, lost in run.truncate(blocks).items():
            if self._places[slot] is not None:
                self._held[slot] -= lost

    def _compact(self, run: Run) -> None:
        """Replace a run by one for each piece of it that is still held."""
        self._drop_struck(run)  # a piece may get a number that the sweep has passed
        self._dead_blocks -= run.dead.bit_count()
        self._close_run(run)
        alive, start = span(0, run.blocks) & ~run.dead, 0
        while alive >> start:
            start += (alive >> start & -(alive >> start)).bit_length() - 1
            stop = start + (~(alive >> start) & (alive >> start) + 1).bit_length() - 1
            piece = self._open_run()
            self._locator.add(run.names[start * HASH_BYTES : stop * HASH_BYTES], piece, 0)
            run.copy_into(piece, start, stop)
            self._runs[piece.first] = piece
            start = stop

    def _evict(self) -> None:
        """Forget the ends of the least recently used runs until the bound is kept."""
        while (excess := self._locator.count - self._blocks_max) > 0:
            run = next(iter(self._runs.values()))
            kept = max(0, run.blocks - excess)
            self._stats.evicted_blocks += (span(kept, run.blocks) & ~run.dead).bit_count()
            self._truncate(run, kept)
            if kept:
                self._settle(run)

    def check_invariants(self) -> None:
        """Raise AssertionError where the structures disagree. Walks everything: for tests."""
        held = [0] * len(self._places)
        free = set(self._run_numbers)
        dead = blocks = 0
        for number, run in enumerate(self._locator.runs):
            if run is None:
                require(number in free, "a run number is neither used nor free")
                continue
            require(run.number == number, "a run has another's number")
            require(self._runs.get(run.first) is run, "a run cannot be found by its first block")
            run.check_invariants()
            for position, name in enumerate(split_chain(Chain(bytes(run.names)))):
                require(self._locator.find(name) == (run, position), "the locator does not find a block")
            for slot in run.depths:
                held[slot] += run.held(slot).bit_count()
            dead += run.dead.bit_count()
            blocks += run.blocks
        require(blocks == self._locator.count == self._locator.used_cells(), "blocks are counted wrongly")
        require(dead == self._dead_blocks, "dead blocks are counted wrongly")
        require(not self._blocks_max or blocks <= self._blocks_max, "the bound is exceeded")
        struck = {*self._struck_slots, *self._sweeping}
        for slot, count in enumerate(held):
            if self._places[slot] is None:
                require(self._held[slot] == 0, "a struck slot counts holdings")
                require(slot in struck or (count == 0 and slot in self._free_slots), "a slot is lost or reused early")
            else:
                require(self._held[slot] == count, "holdings are counted wrongly")
        layered = sum(len(state.slots) > 1 for state in self._holders.values())
        require(layered == self._layered, "layered holders are counted wrongly")


def _descend(path: list[_Step]) -> dict[int, int]:
    """How far each slot holds the path: from run to run with those that hold all of it so far."""
    run, blocks = path[0]
    reached = {slot: min(depth, blocks) for slot, depth in run.depths.items()}
    whole = [slot for slot, depth in reached.items() if depth == blocks]
    for run, blocks in path[1:]:
        still = []
        for slot in whole:
            depth = run.depths.get(slot, 0)
            if depth >= blocks:
                depth = blocks
                still.append(slot)
            reached[slot] += depth
        whole = still
        if not whole:
            break
    return reached


def _depth_of(path: list[_Step], slots: list[int]) -> int:
    total = 0
    for run, blocks in path:
        depth = run.depth(slots)
        if depth < blocks:
            return total + depth
        total += blocks
    return total


def _holds_any(path: list[_Step], slot: int, blocks: int) -> bool:
    """Whether the slot holds any of the path's first `blocks` blocks."""
    for run, shared in path:
        if run.held(slot) & span(0, min(shared, blocks)):
            return True
        blocks -= shared
        if blocks <= 0:
            break
    return False
