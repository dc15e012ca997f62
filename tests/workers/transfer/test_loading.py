"""Loading sequences in the scheduler, without a model or a network: loads are settled by hand."""

import random
from typing import Any

import pytest

from cachecore.blocks import PrefixHash, split_chain
from cachecore.holders import Epoch, Worker, WorkerName
from cachecore.scope import DEFAULT_TENANT, Fidelity, IdentityScope, Keyring, Naming
from cachecore.transfer.capability import Capability, Run
from cachecore.transfer.errors import Reason
from cachecore.transfer.plan import Plan, Pull
from cachecore.transfer.transport import Failed, Fetched
from workers.engine import Generation, Sampling
from workers.reference.kv_pool import KvPool
from workers.reference.scheduler import LiveSequence, Scheduler
from workers.transfer.loads import Load

SIZE = 4
KEYRING = Keyring({0: bytes(32)}, 0)
NAMING = Naming.of(IdentityScope("m", KEYRING.key_id(DEFAULT_TENANT), SIZE), KEYRING)
SOURCE, TARGET = (Worker(WorkerName(name), Epoch(1)) for name in ("source", "target"))


class Bench:
    """A scheduler whose loads are kept."""

    def __init__(self, blocks: int = 32, tokens: int = 16, sequences: int = 8) -> None:
        self.loads: list[Load] = []
        self.planner = Scheduler(KvPool(blocks, SIZE), tokens, sequences, begin=self.loads.append)

    def add(self, arrival: int, prompt: list[int], *runs: tuple[int, int], **fields: Any) -> LiveSequence:
        """A sequence with a pull for each of the runs of blocks."""
        generation = Generation(str(arrival), prompt, Sampling(max_tokens=50), **fields)
        sequence = LiveSequence(generation, NAMING, arrival)
        sequence.pulls = [pull_for(sequence, first, end) for first, end in runs]
        self.planner.add(sequence)
        return sequence

    def step(self) -> list[tuple[int, int, int]]:
        """One step; what was planned as (arrival, start, end)."""
        chunks = self.planner.plan()
        for chunk in chunks:
            self.planner.complete(chunk)
            if chunk.completes:
                chunk.sequence.token_ids.append(chunk.end % 90)
        return [(chunk.sequence.arrival, chunk.start, chunk.end) for chunk in chunks]

    def settle(self, sequence: LiveSequence, *good: bool, fidelity: Fidelity = Fidelity.EXACT) -> None:
        """Have its runs end, well or not."""
        assert sequence.load is not None
        for run, is_good in zip(sequence.load.runs, good, strict=True):
            run.fidelity = fidelity
            run.outcome = Fetched(1, 1, 0.1) if is_good else Failed(Reason.CLOSED, 0)
        self.planner.settle(sequence)


def pull_for(sequence: LiveSequence, first: int, end: int, codec: str = "raw") -> Pull:
    names = list(split_chain(sequence.named(end)))
    run = Run(PrefixHash(names[first - 1] if first else NAMING.root), names[-1], first, end - first)
    key_id = NAMING.scope.key_id
    capability = Capability(key_id, SOURCE, TARGET, run, codec, Fidelity.FUSED, 1e12, bytes(16))
    return Pull(Plan(SOURCE, ("tcp://h:1",), run, first * SIZE, first * SIZE, codec, 1.0), capability, "token")


def test_a_load_takes_no_part_of_a_step() -> None:
    bench = Bench()
    bench.add(0, list(range(40)))
    waiting = bench.add(1, list(range(50, 90)), (0, 9))
    assert bench.step() == [(0, 0, 16)]
    assert bench.planner.loading == [waiting]
    assert [run.blocks for run in bench.loads[0].runs] == [waiting.blocks[:9]]
    assert len(waiting.blocks) == 10
    assert bench.step() == [(0, 16, 32)]
    bench.settle(waiting, True)
    assert waiting.cached_tokens == 36
    assert bench.step() == [(0, 32, 40), (1, 36, 40)]


def test_what_is_earlier_in_line_keeps_its_blocks() -> None:
    bench = Bench(blocks=24)
    bench.add(0, list(range(40)))
    bench.step()
    bench.add(1, list(range(60, 76)))  # 4 of the 14 blocks that will be left
    late = bench.add(2, list(range(45)), (0, 11))
    bench.planner.batched_tokens_max = 16
    bench.step()
    assert bench.planner.loading == []  # 12 do not fit beside those
    assert late in bench.planner.waiting


def test_a_hole_is_computed_and_what_follows_it_stepped_over() -> None:
    bench = Bench(tokens=10)
    sequence = bench.add(0, list(range(40)), (0, 2), (4, 8))
    bench.step()
    bench.settle(sequence, True, True)
    assert sequence.computed == 8
    assert bench.step() == [(0, 8, 16)]
    assert sequence.computed == 32
    assert bench.step() == [(0, 32, 40)]
    assert len(bench.planner.pool.match(sequence.named(10))) == 10


def test_only_what_came_counts() -> None:
    bench = Bench()
    sequence = bench.add(0, list(range(40)), (0, 4), (4, 9))
    bench.step()
    bench.settle(sequence, False, True)
    assert (sequence.computed, sequence.cached_tokens) == (0, 20)
    assert bench.planner.pool.match(sequence.named(9)) == []
    assert bench.step() == [(0, 0, 16)]
    assert sequence.computed == 36


def test_nothing_is_named_before_all_of_it_is_there() -> None:
    bench = Bench()
    sequence = bench.add(0, list(range(40)), (0, 9))
    bench.step()
    assert sequence.load is not None
    sequence.load.runs[0].layers = 5
    assert bench.step() == []
    assert bench.planner.pool.match(sequence.named(9)) == []
    bench.settle(sequence, True)
    assert bench.planner.pool.match(sequence.named(9)) == sequence.blocks[:9]


def test_who_accepts_worse_kv_may_wait_for_it_and_who_does_not_computes() -> None:
    bench = Bench(blocks=64, tokens=64)
    loading = bench.add(0, list(range(40)), fidelity=Fidelity.QUANTIZED)
    loading.pulls = [pull_for(loading, 0, 9, "i8")]
    bench.step()
    bench.add(1, list(range(40)), fidelity=Fidelity.QUANTIZED)
    bench.add(2, list(range(40)))
    assert bench.step() == [(2, 0, 40)]
    bench.settle(loading, True, fidelity=Fidelity.QUANTIZED)
    assert loading.fidelity is Fidelity.QUANTIZED
    # What 2 has computed is exact, and so preferred.
    assert bench.step() == [(2, 40, 41), (0, 36, 40), (1, 36, 40)]
    assert [one.fidelity for one in bench.planner.running] == [Fidelity.QUANTIZED, Fidelity.EXACT, Fidelity.EXACT]


def test_the_youngest_gives_way_also_while_it_loads() -> None:
    bench = Bench(blocks=12, tokens=16)
    bench.add(0, list(range(16)))
    assert bench.step() == [(0, 0, 16)]
    younger = bench.add(1, list(range(50, 78)), (0, 6))
    bench.step()
    assert len(younger.blocks) == 7
    for _ in range(4):  # until 0 needs a block more than there is
        assert bench.step() != []
    assert younger in bench.planner.waiting
    assert bench.loads[0].cancelled
    assert (younger.blocks, younger.load, len(younger.pulls)) == ([], None, 1)
    bench.planner.finish(bench.planner.running[0])
    bench.step()
    assert bench.loads[1].began == bench.loads[0].began  # its deadline stays
    bench.planner.finish(younger)
    assert bench.planner.pool.blocks_available == 12
    assert bench.loads[1].cancelled


@pytest.mark.parametrize("seed", range(20))
def test_everyone_finishes_and_every_block_comes_back(seed: int) -> None:
    rng = random.Random(seed)
    bench = Bench(blocks=12, tokens=rng.choice([3, 8, 64]), sequences=rng.choice([2, 5]))
    planner, goals = bench.planner, {}
    for arrival in range(25):
        prompt = rng.choices(range(3), k=rng.randint(1, 30))
        cuts = sorted(rng.sample(range(len(prompt) // SIZE + 1), k=min(4, len(prompt) // SIZE + 1)))
        runs = [run for run in zip(cuts[::2], cuts[1::2], strict=False) if rng.random() < 0.8]
        fidelity = rng.choice([Fidelity.EXACT, Fidelity.QUANTIZED])
        one = bench.add(arrival, prompt, *runs, priority=rng.randint(0, 1), fidelity=fidelity)
        goals[one] = len(prompt) + rng.randint(1, 16)
    for _ in range(3000):
        bench.step()
        for one in list(planner.loading):
            if one.load is not None and rng.random() < 0.3:
                outcomes = [rng.random() < 0.7 for _ in one.load.runs]
                bench.settle(one, *outcomes, fidelity=rng.choice([Fidelity.EXACT, one.generation.fidelity]))
        for one in [*planner.running, *planner.loading]:
            if len(one.token_ids) >= goals[one] or rng.random() < 0.005:
                planner.finish(one)
        if not planner.has_work:
            break
    assert not planner.has_work
    assert planner.pool.blocks_available == planner.pool.blocks_total
    assert all(load.cancelled or load.settled for load in bench.loads)
