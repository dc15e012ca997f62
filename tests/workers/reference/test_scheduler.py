"""The scheduler without a model: a step is simulated by completing its chunks and appending a token."""

import random

import pytest

from cachecore.scope import DEFAULT_TENANT, IdentityScope, Keyring, Naming
from workers.engine import Generation, Sampling
from workers.reference.kv_pool import KvPool
from workers.reference.scheduler import LiveSequence, Scheduler

SIZE = 4
KEYRING = Keyring({0: bytes(32)}, 0)
NAMING = Naming.of(IdentityScope("m", KEYRING.key_id(DEFAULT_TENANT), SIZE), KEYRING)


def scheduler(blocks: int = 32, tokens: int = 16, sequences: int = 8) -> Scheduler:
    return Scheduler(KvPool(blocks, SIZE), tokens, sequences)


def sequence(arrival: int, prompt: list[int], priority: int = 0, **sampling: object) -> LiveSequence:
    settings = Sampling(max_tokens=50, **sampling)
    return LiveSequence(Generation(str(arrival), prompt, settings, priority=priority), NAMING, arrival)


def step(planner: Scheduler) -> list[tuple[int, int, int]]:
    """One step; what was planned as (arrival, start, end)."""
    chunks = planner.plan()
    assert sum(chunk.end - chunk.start for chunk in chunks) <= planner.batched_tokens_max
    for chunk in chunks:
        assert len(chunk.sequence.blocks) == -(-chunk.end // SIZE)
        planner.complete(chunk)
        if chunk.completes:
            chunk.sequence.token_ids.append(chunk.end % 90)
    return [(chunk.sequence.arrival, chunk.start, chunk.end) for chunk in chunks]


def test_long_prompts_are_cut_and_decodes_come_first() -> None:
    planner = scheduler()
    planner.add(sequence(0, list(range(40))))
    assert step(planner) == [(0, 0, 16)]
    planner.add(sequence(1, [90, 91]))
    assert step(planner) == [(0, 16, 32)]
    assert step(planner) == [(0, 32, 40), (1, 0, 2)]
    planner.add(sequence(2, list(range(50, 80))))
    assert step(planner) == [(0, 40, 41), (1, 2, 3), (2, 0, 14)]


def test_smaller_priority_runs_sooner_then_earlier_arrival() -> None:
    planner = scheduler(sequences=1)
    for arrival, priority in ((0, 1), (1, 0), (2, 0)):
        planner.add(sequence(arrival, [arrival], priority))
    assert step(planner) == [(1, 0, 1)]
    planner.finish(planner.running[0])
    assert step(planner) == [(2, 0, 1)]


def test_a_full_hit_still_computes_the_last_token() -> None:
    planner = scheduler()
    prompt = list(range(12))
    first = sequence(0, prompt)
    planner.add(first)
    step(planner)
    planner.finish(first)
    second, longer = sequence(1, prompt), sequence(2, [*prompt, 77])
    planner.add(second)
    planner.add(longer)
    assert step(planner) == [(1, 8, 12), (2, 12, 13)]
    assert (second.cached_tokens, longer.cached_tokens) == (8, 12)
    assert planner.cache_hits == 20
    assert planner.cache_queries == 12 + 12 + 13


def test_prompt_logprobs_do_not_read_the_cache_but_fill_it() -> None:
    planner = scheduler()
    first = sequence(0, list(range(12)), prompt_logprobs=0)
    planner.add(first)
    step(planner)
    planner.finish(first)
    second = sequence(1, list(range(12)), prompt_logprobs=0)
    planner.add(second)
    assert step(planner) == [(1, 0, 12)]
    planner.finish(second)
    third = sequence(2, list(range(12)))
    planner.add(third)
    assert step(planner) == [(2, 8, 12)]


def test_the_youngest_gives_way_when_blocks_run_out() -> None:
    planner = scheduler(blocks=4)
    older, younger = sequence(0, list(range(7))), sequence(1, list(range(50, 57)))
    planner.add(older)
    planner.add(younger)
    assert step(planner) == [(0, 0, 7), (1, 0, 7)]
    assert step(planner) == [(0, 7, 8), (1, 7, 8)]
    assert step(planner) == [(0, 8, 9)]
    assert planner.preemptions == 1
    assert younger in planner.waiting
    assert younger.blocks == []
    # It fits again once the other has gone, and finds what was not needed meanwhile.
    planner.finish(older)
    ((_, start, end),) = step(planner)
    assert (start, end) == (4, 9)
    assert younger.cached_tokens == 0


def test_urgency_decides_who_gives_way() -> None:
    planner = scheduler(blocks=4)
    planner.add(sequence(0, list(range(7)), priority=5))
    planner.add(sequence(1, list(range(50, 57))))
    step(planner)
    step(planner)
    assert step(planner) == [(1, 8, 9)]


def test_a_prompt_waits_until_all_of_it_fits() -> None:
    planner = scheduler(blocks=4)
    planner.add(sequence(0, list(range(8))))
    planner.add(sequence(1, list(range(50, 62))))
    assert step(planner) == [(0, 0, 8)]
    assert step(planner) == [(0, 8, 9)]
    planner.finish(planner.running[0])
    assert step(planner) == [(1, 0, 12)]


def test_siblings_wait_for_the_first_to_compute_what_they_share() -> None:
    planner = scheduler()
    shared = list(range(24))
    for arrival in range(3):
        planner.add(sequence(arrival, [*shared, 70 + arrival, 80]))
    planner.add(sequence(3, [60, 61]))
    assert step(planner) == [(0, 0, 16)]
    assert step(planner) == [(0, 16, 26), (3, 0, 2)]
    assert step(planner) == [(0, 26, 27), (3, 2, 3), (1, 24, 26), (2, 24, 26)]


def test_siblings_of_one_that_leaves_go_on() -> None:
    planner = scheduler()
    for arrival in range(2):
        planner.add(sequence(arrival, list(range(24))))
    step(planner)
    planner.finish(planner.running[0])
    assert step(planner) == [(1, 16, 24)]


def test_a_cleared_cache_is_not_fed_by_those_under_way() -> None:
    planner = scheduler()
    under_way = sequence(0, list(range(7)))
    planner.add(under_way)
    step(planner)
    planner.pool.clear()
    planner.pool.take_events()
    step(planner)
    assert planner.pool.take_events() == []
    planner.finish(under_way)
    assert planner.pool.blocks_available == planner.pool.blocks_total


@pytest.mark.parametrize("seed", range(20))
def test_everyone_finishes_and_every_block_comes_back(seed: int) -> None:
    rng = random.Random(seed)
    planner = scheduler(blocks=12, tokens=rng.choice([3, 8, 64]), sequences=rng.choice([2, 5]))
    live = [sequence(arrival, rng.choices(range(3), k=rng.randint(1, 30)), rng.randint(0, 1)) for arrival in range(25)]
    goals = {one: len(one.token_ids) + rng.randint(1, 16) for one in live}
    pending = list(live)
    for _ in range(3000):
        if pending and rng.random() < 0.3:
            planner.add(pending.pop())
        step(planner)
        for one in list(planner.running):
            if len(one.token_ids) >= goals[one] or rng.random() < 0.005:
                planner.finish(one)
        if not pending and not planner.has_work:
            break
    assert not planner.has_work
    assert planner.pool.blocks_available == planner.pool.blocks_total
