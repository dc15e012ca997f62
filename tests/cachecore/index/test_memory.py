"""The index in memory: the common behaviour, beside the naive index on random histories, bounds and memory."""

import random
from collections.abc import Iterator

import pytest

from cachecore.blocks import HASH_BYTES, Chain, PrefixHash
from cachecore.holders import Holder, Place, Tier
from cachecore.index import memory, runs
from cachecore.index.contract import Cleared, IndexEvent, Match, PrefixIndex, Removed, Stored
from cachecore.index.locator import Locator
from cachecore.index.memory import MemoryIndex
from cachecore.index.runs import Run
from tests.cachecore.index.behaviour import A0, TEN, A, B, C, Driver, PrefixIndexBehaviour
from tests.cachecore.index.histories import ROOT, History, chain_of, cut, name_at, run_beside_naive, worker


class Checked(MemoryIndex):
    """Checks its invariants after every batch and every forgotten holder."""

    def apply(self, holder: Holder, sequence: int, events: list[IndexEvent]) -> bool:  # type: ignore[override]
        applied = super().apply(holder, sequence, events)
        self.check_invariants()
        return applied

    def forget(self, holder: Holder) -> None:
        super().forget(holder)
        self.check_invariants()


class TestMemoryIndex(PrefixIndexBehaviour):
    @pytest.fixture
    def index(self) -> PrefixIndex:
        return Checked()


class TestBoundedMemoryIndex(PrefixIndexBehaviour):
    """A bound that is never reached changes nothing."""

    @pytest.fixture
    def index(self) -> PrefixIndex:
        return Checked(blocks_max=2000)


class TestBesideNaive:
    @pytest.mark.parametrize("seed", range(8))
    @pytest.mark.parametrize("layers", [False, True])
    def test_random_histories(self, seed: int, layers: bool) -> None:
        run_beside_naive(Checked(), History(seed, layers=layers), steps=60)

    @pytest.mark.parametrize("seed", range(100, 104))
    def test_runs_that_fill_up(self, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
        for module in (memory, runs):
            monkeypatch.setattr(module, "RUN_BLOCKS_MAX", 20)
        run_beside_naive(Checked(), History(seed), steps=60)

    @pytest.mark.parametrize("seed", range(200, 206))
    def test_a_table_that_overflows(self, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
        """Loaded to three names a cell, most names end in the dict."""
        monkeypatch.setattr("cachecore.index.locator._BUCKETS_MIN", 2)
        monkeypatch.setattr("cachecore.index.locator._LOAD_MAX", 3.0)
        index = Checked()
        run_beside_naive(index, History(seed), steps=60)

    @pytest.mark.parametrize("seed", range(300, 304))
    def test_sweeping_one_run_at_a_time(self, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(memory, "SWEEP_RUNS", 1)
        run_beside_naive(Checked(), History(seed, conversations=12, blocks_max=40), steps=80)


# The harness is worth what it catches: each of these is broken in one way.


class IgnoresHoles(MemoryIndex):
    def match(self, chain: Chain) -> Match:
        found = super().match(chain)
        deepest = {}
        for place in found.depths:
            held = set(self.holdings(place.holder, place.tier))
            names = [chain[at : at + HASH_BYTES] for at in range(0, len(chain), HASH_BYTES)]
            deepest[place] = max(at + 1 for at, name in enumerate(names) if name in held)
        return Match(found.blocks, deepest)


class IgnoresCopies(MemoryIndex):
    def _hold(self, run: Run, slot: int, start: int, stop: int) -> None:
        super()._hold(run, slot, start, stop)
        run.copies.clear()


class TrustsTheFirstBlock(MemoryIndex):
    def _walk(self, chain: bytes) -> list[memory._Step]:
        path, position = super()._walk(chain), 0
        for number, step in enumerate(path):
            path[number] = memory._Step(step.run, min(step.run.blocks, len(chain) // HASH_BYTES - position))
            position += step.blocks
        return path


class BelievesTheDead(MemoryIndex):
    def forget(self, holder: Holder) -> None:
        self._holders[holder].sequence = None


class AppliesTwice(MemoryIndex):
    def apply(self, holder: Holder, sequence: int, events: list[IndexEvent]) -> bool:  # type: ignore[override]
        if not super().apply(holder, sequence, events):
            super().apply(holder, (self.sequence(holder) or 0) + 1, events)
            return False
        return True


class ClearsTooMuch(MemoryIndex):
    def _clear(self, state: memory._HolderState, event: Cleared) -> None:
        super()._clear(state, Cleared())


class ClearsNothing(MemoryIndex):
    def _clear(self, state: memory._HolderState, event: Cleared) -> None:
        if event.tier is None:
            super()._clear(state, event)


class MixesTiers(MemoryIndex):
    def _store(self, holder: Holder, state: memory._HolderState, event: Stored) -> None:
        super()._store(holder, state, event._replace(tier=Tier.L0))

    def _remove(self, state: memory._HolderState, event: Removed) -> None:
        super()._remove(state, event._replace(tier=Tier.L0))


class SumsNoTiers(MemoryIndex):
    def _add_layers(self, path: list[memory._Step], depths: dict[Place, int]) -> None:
        pass


class ReusesSlotsAtOnce(MemoryIndex):
    def _clear(self, state: memory._HolderState, event: Cleared) -> None:
        super()._clear(state, event)
        self._free_slots += self._struck_slots
        self._struck_slots = []


class LosesWhatIsBehindABranch(MemoryIndex):
    def _next_run(self, run: Run | None, *rest: object) -> tuple[Run, int]:
        return super()._next_run(None, *rest)  # type: ignore[arg-type]

    def _truncate(self, run: Run, blocks: int) -> None:
        super()._truncate(run, max(0, blocks - 1))


SABOTAGED = [
    IgnoresHoles,
    IgnoresCopies,
    TrustsTheFirstBlock,
    BelievesTheDead,
    AppliesTwice,
    ClearsTooMuch,
    ClearsNothing,
    MixesTiers,
    SumsNoTiers,
    ReusesSlotsAtOnce,
    LosesWhatIsBehindABranch,
]


@pytest.mark.parametrize("broken", SABOTAGED, ids=lambda broken: broken.__name__)
def test_the_harness_catches_a_broken_index(broken: type[MemoryIndex]) -> None:
    def run_all() -> None:
        for seed in range(12):
            run_beside_naive(broken(), History(seed), steps=60)

    with pytest.raises((AssertionError, KeyError, IndexError)):
        run_all()


# Bounds


def unique_chains(count: int, blocks: int) -> Iterator[Chain]:
    for number in range(count):
        yield chain_of(*([1_000_000 + number] * blocks))


async def test_a_bound_shortens_the_least_recently_matched() -> None:
    index = Checked(blocks_max=100)
    driver = Driver(index)
    chains = list(unique_chains(10, 10))
    for chain in chains:
        driver.store(A, chain)
    assert index.stats().blocks == 100
    await driver.depths(chains[0])
    driver.store(A, chain_of(*range(50, 65)))
    assert await driver.depths(chains[0]) == {A0: 10}
    assert await driver.depths(chains[1]) == {}
    assert await driver.depths(chains[2]) == {A0: 5}
    assert await driver.depths(chains[3]) == {A0: 10}
    assert (index.stats().evicted_blocks, index.stats().blocks) == (15, 100)


async def test_a_bound_takes_what_hangs_below_first() -> None:
    index = Checked(blocks_max=40)
    driver = Driver(index)
    prompt = chain_of(*range(20))
    for number in range(30):
        turn = Chain(prompt + chain_of(*[100 + number] * 6, parent=name_at(prompt, 20)))
        driver.store(A, turn)
        assert await driver.depths(turn) == {A0: 26}
    assert await driver.depths(prompt) == {A0: 20}


async def test_a_store_larger_than_the_bound_keeps_its_beginning() -> None:
    index = Checked(blocks_max=8)
    driver = Driver(index)
    driver.store(A, TEN)
    assert await driver.depths(TEN) == {A0: 8}


@pytest.mark.parametrize("seed", range(6))
def test_a_bounded_index_is_never_deeper_than_an_unbounded_one(seed: int) -> None:
    bounded, unbounded, history = Checked(blocks_max=60), MemoryIndex(), History(seed)
    shorter = 0
    for _ in range(80):
        batch = history.batch()
        bounded.apply(*batch)
        unbounded.apply(*batch)
        assert bounded.stats().blocks <= 60
        for query in history.queries():
            # A removal that the bound has made unknown may leave a copy less, never one more.
            ours, theirs = bounded.match(query).depths, unbounded.match(query).depths
            assert all(depth <= theirs.get(place, 0) for place, depth in ours.items())
            shorter += ours != theirs
    assert shorter > 20
    assert bounded.stats().evicted_blocks > 0


# Memory over time


async def test_forgetting_is_swept_in_bounded_steps() -> None:
    index = Checked()
    driver = Driver(index)
    for chain in unique_chains(300, 4):
        driver.store(A, chain)
    driver.store(B, TEN)
    index.forget(A)
    assert index.stats().holdings == 10
    assert index.stats().runs == 301
    steps = 1
    while index.sweep(50):
        steps += 1
        index.check_invariants()
    assert steps == 7
    assert (index.stats().runs, index.stats().blocks) == (1, 10)
    assert await driver.depths(TEN) == {Place(B, Tier.L0): 10}


def test_sweeping_happens_along_with_writing() -> None:
    index = Checked()
    driver = Driver(index)
    for chain in unique_chains(100, 4):
        driver.store(A, chain)
    index.forget(A)
    for number in range(4):
        driver.store(B, chain_of(number))
    assert index.stats().blocks == 4


def test_holders_that_come_and_go_leave_nothing() -> None:
    index = MemoryIndex()
    for life in range(1000):
        holder = worker("w", epoch=life)
        index.apply(holder, 0, [Stored(ROOT, TEN), Stored(ROOT, cut(TEN, 0, 3), Tier.L1)])
        index.forget(holder)
    while index.sweep(64):
        pass
    index.check_invariants()
    stats = index.stats()
    assert (stats.blocks, stats.holdings, stats.runs, stats.holders) == (0, 0, 0, 0)
    assert len(index._places) < 10
    assert len(index._locator.runs) < 10


def test_lives_that_overlap_do_not_use_up_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """There is always something to be swept, and the list of runs is no longer than it must be all the same."""
    monkeypatch.setattr(memory, "SWEEP_RUNS", 4)
    index = MemoryIndex()
    for life in range(100):
        young, old = worker("w", epoch=life), worker("w", epoch=life - 1)
        for number in range(40):
            index.apply(young, number, [Stored(ROOT, chain_of(life, number))])
            if number == 20:
                index.forget(old)
        index.check_invariants()
    assert len(index._locator.runs) < 200


def test_pieces_may_lie_where_the_sweep_has_been() -> None:
    """A run that is still to be swept becomes pieces, one of them behind the sweep: nothing dead is left there."""
    index = Checked()
    driver = Driver(index)
    chain = chain_of(*range(40))
    driver.store(A, chain_of(77))
    driver.store(A, chain)
    driver.store(B, chain, 36)
    driver.remove(A, chain_of(77))
    index.forget(B)
    assert index.sweep(1)
    driver.remove(A, chain, 4, 36)
    while index.sweep(1):
        index.check_invariants()
    driver.store(C, chain_of(78))
    assert index.match(chain).depths == {A0: 4}
    assert index.stats().holdings == 9


def test_branching_again_and_again_leaves_no_fragments() -> None:
    """A base, and branches at 31 points of it that come and go: as many runs as before them."""
    index = MemoryIndex()
    driver = Driver(index)
    base = chain_of(*range(1024))
    driver.store(A, base)
    branches = [chain_of(*[5000 + at] * 4, parent=name_at(base, at)) for at in range(32, 1024, 32)]
    for _ in range(30):
        for at, branch in zip(range(32, 1024, 32), branches, strict=True):
            index.apply(B, (index.sequence(B) or 0) + 1, [Stored(name_at(base, at), branch)])
        index.apply(B, (index.sequence(B) or 0) + 1, [Cleared()])
    while index.sweep(64):
        pass
    index.check_invariants()
    assert (index.stats().runs, index.stats().blocks) == (1, 1024)
    assert len(index._locator.runs) < 100


def test_punching_and_filling_holes_comes_back_to_one_run() -> None:
    index = Checked()
    driver = Driver(index)
    chain = chain_of(*range(256))
    rng = random.Random(1)
    driver.store(A, chain)
    for _ in range(6):
        gone = [at for at in range(256) if rng.random() < 0.8]
        driver.apply(A, Removed(Chain(b"".join(chain[at * 16 : at * 16 + 16] for at in gone))))
        assert index.stats().blocks == 256 - len(gone)
        for at in gone:
            driver.apply(A, Stored(name_at(chain, at), cut(chain, at, at + 1)))
        driver.store(B, chain)
        driver.apply(B, Cleared())
    while index.sweep(64):
        pass
    driver.store(B, chain)
    driver.store(B, chain)
    assert index.stats().runs <= 3
    assert index.match(chain).depths[A0] == 256


def test_dead_blocks_do_not_pile_up() -> None:
    """A run of which only the last block is held shrinks to it."""
    index = Checked()
    driver = Driver(index)
    chain = chain_of(*range(200))
    driver.store(A, chain)
    driver.remove(A, chain, 0, 199)
    assert index._locator.count < 20
    assert list(index.holdings(A, Tier.L0)) == [chain[-16:]]


def test_copies_cost_no_more_for_being_many() -> None:
    index = MemoryIndex()
    for sequence in range(1000):
        index.apply(A, sequence, [Stored(ROOT, TEN)])
    (run,) = index._runs.values()
    assert len(run.copies[0]) == 10
    for sequence in range(1000, 1999):
        index.apply(A, sequence, [Removed(TEN)])
    assert index.match(TEN).depths == {A0: 10}
    assert run.copies == {}


# The locator


def test_the_locator_grows_and_shrinks() -> None:
    locator = Locator()
    rng = random.Random(3)
    names = [PrefixHash(rng.randbytes(16)) for _ in range(5000)]
    run = Run(0)
    locator.runs.append(run)
    small = locator.size_bytes()
    for start in range(0, 5000, 50):
        piece = b"".join(names[start : start + 50])
        locator.add(piece, run, start)
        run.names += piece
    assert [locator.find(name) for name in names] == [(run, position) for position in range(5000)]
    assert locator.find(rng.randbytes(16)) is None
    assert locator.size_bytes() == 8 * small
    locator.discard(bytes(run.names[160:]), run, 10)
    del run.names[160:]
    locator.shrink()
    assert locator.size_bytes() == small
    assert [locator.find(name) for name in names[:11]] == [*((run, position) for position in range(10)), None]


def test_a_locator_that_has_grown_a_while_goes_to_the_size_of_its_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cachecore.index.locator._BUCKETS_BEFORE_LEAP", 512)
    locator = Locator(blocks_hint=20_000)
    small = locator.size_bytes()
    run = Run(0)
    locator.runs.append(run)
    names = random.Random(4).randbytes(16 * 8000)
    sizes = set()
    for start in range(0, len(names), 16 * 100):
        piece = names[start : start + 16 * 100]
        locator.add(piece, run, run.blocks)
        run.names += piece
        locator.shrink()
        sizes.add(locator.size_bytes() // small)
    assert sizes == {1, 2, 4, 32}
    assert locator.used_cells() == 8000
    locator.discard(bytes(run.names[160:]), run, 10)
    del run.names[160:]
    locator.shrink()
    assert locator.size_bytes() == 32 * small
    assert locator.find(names[144:160]) == (run, 9)
