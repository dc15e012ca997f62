"""Whoever follows the events knows exactly what the engine holds, in every dialect and under churn."""

import itertools
from collections import Counter
from collections.abc import Iterable
from random import Random

import pytest

from cachecore.blocks import BlockHasher
from cachecore.events import BlockRemoved, Dialect, EventBatch, encode_batch
from tests.workers.following import Follower
from workers.engine import Generation, Sampling
from workers.simulated.cache import BlockCache
from workers.simulated.journal import handle_of, kv_events
from workers.simulated.scheduler import Scheduler, SchedulerLimits, Work

BLOCK = 4


def prompts(random: Random) -> Iterable[list[int]]:
    """Prompts that branch off a few stems."""
    stems = [[random.randrange(50) for _ in range(40)] for _ in range(4)]
    while True:
        stem = random.choice(stems)
        yield stem[: random.randrange(1, 40)] + [random.randrange(50) for _ in range(random.randrange(1, 20))]


@pytest.mark.parametrize("dialect", list(Dialect))
@pytest.mark.parametrize("seed", range(4))
def test_events_and_contents_agree_after_every_step(dialect: Dialect, seed: int) -> None:
    random = Random(seed)
    limits = SchedulerLimits(48, 6, names_early=dialect is not Dialect.SGLANG)
    scheduler = Scheduler(BlockCache(40), BlockHasher(bytes(32), BLOCK), limits)
    follower = Follower()
    source = iter(prompts(random))
    live: list[Work] = []
    for step_number in range(400):
        if random.random() < 0.5:
            sampling = Sampling(random.randrange(1, 30))
            salt, adapter = random.choice(["", "", "s1", "s2"]), random.choice(["", "", "a1"])
            generation = Generation("id", next(source), sampling, salt, adapter, random.randrange(3))
            live.append(scheduler.add(generation, itertools.cycle(range(60, 90))))
        if live and random.random() < 0.05:
            scheduler.abort(random.choice(live))
        if step_number == 250:
            scheduler.reset()
        scheduler.complete(scheduler.schedule())
        events = kv_events(scheduler.cache.take_journal(), dialect, BLOCK)
        follower.take(encode_batch(EventBatch(0.0, events, 0), dialect))
        held = {handle_of(name): copies for name, copies in scheduler.cache.contents().items()}
        assert +follower.copies == Counter(held)
    assert follower.removed > 50
    assert scheduler.counters.hit_tokens > 100
    assert scheduler.counters.preemptions > 0


def test_vllm_removes_block_by_block_and_sglang_in_one_go() -> None:
    for dialect, events_per_batch in [(Dialect.VLLM_MAP, 3), (Dialect.SGLANG, 1)]:
        limits = SchedulerLimits(64, 4, names_early=dialect is not Dialect.SGLANG)
        scheduler = Scheduler(BlockCache(3), BlockHasher(bytes(32), BLOCK), limits)
        for tokens in ([1] * 12, [2] * 12):
            scheduler.cache.take_journal()
            scheduler.add(Generation("id", tokens, Sampling(1)), itertools.repeat(7))
            scheduler.complete(scheduler.schedule())
        events = kv_events(scheduler.cache.take_journal(), dialect, BLOCK)
        removed = [event for event in events if isinstance(event, BlockRemoved)]
        assert len(removed) == events_per_batch
        assert sum(len(event.block_hashes) for event in removed) == 3
