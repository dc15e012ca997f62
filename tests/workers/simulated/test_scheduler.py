"""Batching, hits and memory of the simulated engine, step by step and without a clock."""

import itertools
from collections.abc import Iterator
from typing import Any

import pytest

from cachecore.blocks import BlockHasher
from workers.engine import Generation, Sampling
from workers.simulated.cache import BlockCache
from workers.simulated.scheduler import Scheduler, SchedulerLimits, Work
from workers.timing import Chunk

BLOCK = 4


def voice(seed: int = 0) -> Iterator[int]:
    return itertools.count(1000 + seed * 100_000)


def scheduler_of(
    blocks: int = 100, batch_tokens: int = 64, sequences: int = 8, *, names_early: bool = True
) -> Scheduler:
    limits = SchedulerLimits(batch_tokens, sequences, names_early)
    return Scheduler(BlockCache(blocks), BlockHasher(bytes(32), BLOCK), limits)


def add(scheduler: Scheduler, tokens: Any, max_tokens: int = 1, **fields: Any) -> Work:
    generation = Generation("id", list(tokens), Sampling(max_tokens), **fields)
    return scheduler.add(generation, voice())


def run(scheduler: Scheduler, steps_max: int = 1000) -> int:
    """Steps until nothing is left to do."""
    for steps in range(steps_max):
        if not scheduler.busy:
            return steps
        scheduler.complete(scheduler.schedule())
    raise AssertionError("the scheduler does not come to an end")


def test_a_prompt_is_prefilled_in_chunks() -> None:
    scheduler = scheduler_of(batch_tokens=10)
    work = add(scheduler, range(25))
    chunks = []
    while scheduler.busy:
        step = scheduler.schedule()
        chunks += step.chunks
        said = scheduler.complete(step)
    assert chunks == [Chunk(10, 0), Chunk(10, 10), Chunk(5, 20)]
    assert [(item.token_id, item.finish_reason) for item in said] == [(1000, "length")]
    assert work.done


def test_decoding_goes_before_prefill_and_shares_the_budget() -> None:
    scheduler = scheduler_of(batch_tokens=10)
    first = add(scheduler, range(8), max_tokens=5)
    scheduler.complete(scheduler.schedule())
    add(scheduler, range(100, 130))
    step = scheduler.schedule()
    assert [(share.work is first, share.tokens) for share in step.shares] == [(True, 1), (False, 9)]
    assert step.decode_load.sequences == 1
    assert step.decode_load.context_tokens == 9


def test_a_full_hit_computes_its_last_block() -> None:
    scheduler = scheduler_of()
    add(scheduler, range(16))
    run(scheduler)
    repeated, longer = add(scheduler, range(16)), add(scheduler, range(17))
    run(scheduler)
    assert repeated.cached_tokens == 12
    assert longer.cached_tokens == 16
    assert scheduler.counters.hit_tokens == 28
    assert scheduler.counters.lookup_tokens == 49


@pytest.mark.parametrize(("names_early", "hits"), [(True, 7), (False, 0)])
def test_a_burst_of_siblings(names_early: bool, hits: int) -> None:
    scheduler = scheduler_of(batch_tokens=1000, names_early=names_early)
    works = [add(scheduler, [*range(40), 90 + number]) for number in range(8)]
    run(scheduler)
    assert sum(work.cached_tokens == 40 for work in works) == hits
    assert sum(work.cached_tokens == 0 for work in works) == 8 - hits


def test_copies_are_kept_by_vllm_and_shared_by_sglang() -> None:
    for names_early, copies in [(True, 2), (False, 1)]:
        scheduler = scheduler_of(batch_tokens=8, names_early=names_early)
        # A 4-token budget apiece: both compute block 0 in the same step.
        works = [add(scheduler, range(8)), add(scheduler, range(8))]
        run(scheduler)
        assert all(work.done for work in works)
        counts = scheduler.cache.contents()
        assert scheduler.cache.used == 0
        assert max(counts.values()) <= copies
    scheduler = scheduler_of(names_early=True)
    add(scheduler, range(8))
    scheduler.complete(scheduler.schedule())
    # A full hit recomputes its last block: the same content, a second copy.
    add(scheduler, range(8))
    run(scheduler)
    assert sorted(scheduler.cache.contents().values()) == [1, 2]


def test_output_blocks_are_hittable_too() -> None:
    scheduler = scheduler_of()
    first = add(scheduler, range(6), max_tokens=7)
    run(scheduler)
    assert len(first.tokens) == 13
    follow_up = add(scheduler, [*first.tokens, 5, 6, 7])
    run(scheduler)
    # The last token said was never computed; 12 were, three blocks.
    assert follow_up.cached_tokens == 12


def test_salts_and_adapters_separate() -> None:
    scheduler = scheduler_of()
    for fields in ({}, {"cache_salt": "a"}, {"adapter": "a"}, {"cache_salt": "a", "adapter": "a"}):
        work = add(scheduler, range(20), **fields)
        run(scheduler)
        assert work.cached_tokens == 0
    again = add(scheduler, range(20), cache_salt="a")
    run(scheduler)
    assert again.cached_tokens == 16


def test_the_longest_unused_leaf_is_evicted_first() -> None:
    scheduler = scheduler_of(blocks=6)
    add(scheduler, range(12))
    run(scheduler)
    add(scheduler, range(100, 112))
    run(scheduler)
    add(scheduler, range(200, 205))  # two blocks: the first prompt loses its tail
    run(scheduler)
    first, second = add(scheduler, range(12)), None
    run(scheduler)
    assert first.cached_tokens == 4
    second = add(scheduler, range(100, 112))
    run(scheduler)
    assert second.cached_tokens in (4, 8)


def test_priority_goes_before_arrival() -> None:
    scheduler = scheduler_of(sequences=1)
    order = [add(scheduler, [number] * 5, priority=priority) for number, priority in enumerate([0, 5, -1, 0])]
    finished: list[Work] = []
    while scheduler.busy:
        finished += [said.work for said in scheduler.complete(scheduler.schedule())]
    assert finished == [order[2], order[0], order[3], order[1]]


def test_preemption_gives_way_and_everybody_finishes() -> None:
    scheduler = scheduler_of(blocks=10)
    works = [add(scheduler, [number] * 8, max_tokens=24) for number in range(4)]
    said = 0
    while scheduler.busy:
        said += len(scheduler.complete(scheduler.schedule()))
        assert scheduler.cache.free >= 0
    assert scheduler.counters.preemptions > 0
    assert said == 4 * 24
    assert all(work.tokens[8:].tolist() == list(range(1000, 1024)) for work in works)
    assert scheduler.cache.used == 0


def test_an_urgent_request_is_not_the_victim() -> None:
    scheduler = scheduler_of(blocks=6)
    casual = add(scheduler, [1] * 8, max_tokens=12, priority=1)
    urgent = add(scheduler, [2] * 8, max_tokens=12)
    finished = []
    while scheduler.busy:
        finished += [item.work for item in scheduler.complete(scheduler.schedule()) if item.finish_reason]
    assert scheduler.counters.preemptions > 0
    assert finished == [urgent, casual]


@pytest.mark.parametrize("when", ["waiting", "prefill", "decode"])
def test_abort_returns_the_memory(when: str) -> None:
    scheduler = scheduler_of(batch_tokens=8)
    work = add(scheduler, range(16), max_tokens=50)
    for _ in range({"waiting": 0, "prefill": 1, "decode": 4}[when]):
        scheduler.complete(scheduler.schedule())
    assert scheduler.abort(work)
    assert not scheduler.abort(work)
    assert (scheduler.busy, scheduler.cache.used, scheduler.waiting_count) == (False, 0, 0)
    assert not scheduler.schedule().shares


def test_abort_within_a_step_says_nothing() -> None:
    scheduler = scheduler_of()
    work = add(scheduler, range(16), max_tokens=50)
    step = scheduler.schedule()
    scheduler.abort(work)
    assert scheduler.complete(step) == []


def test_reset_starts_running_requests_over() -> None:
    scheduler = scheduler_of()
    work = add(scheduler, range(16), max_tokens=6)
    for _ in range(3):
        scheduler.complete(scheduler.schedule())
    scheduler.reset()
    assert not scheduler.cache.contents()
    run(scheduler)
    assert work.tokens[16:].tolist() == list(range(1000, 1006))
