"""Whoever follows the events knows exactly what the engine holds, in every dialect and under churn."""

import itertools
from collections import Counter
from collections.abc import Iterable
from random import Random

import pytest

from cachecore.blocks import BlockHasher
from cachecore.events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    Dialect,
    EventBatch,
    decode_batch,
    encode_batch,
)
from workers.engine import Generation, Sampling
from workers.simulated.cache import BlockCache
from workers.simulated.journal import handle_of, kv_events
from workers.simulated.scheduler import Scheduler, SchedulerLimits, Work

BLOCK = 4


class Follower:
    """What a subscriber makes of a stream: copies by handle, and the prompt that each handle stands for."""

    def __init__(self) -> None:
        self.copies: Counter[int] = Counter()
        self.prefixes: dict[int, tuple[str, str, tuple[int, ...]]] = {}

    def take(self, payload: bytes) -> None:
        batch = decode_batch(payload)
        assert batch.malformed == 0
        for event in batch.events:
            match event:
                case BlockStored():
                    self.store(event)
                case BlockRemoved():
                    assert all(self.copies[handle] > 0 for handle in event.block_hashes)
                    self.copies -= Counter(event.block_hashes)
                case AllBlocksCleared():
                    self.copies.clear()

    def store(self, event: BlockStored) -> None:
        assert len(event.token_ids) == len(event.block_hashes) * event.block_size
        if event.parent_block_hash is None:
            salt, adapter, tokens = event.cache_salt or "", event.lora_name or "", ()
        else:
            assert self.copies[event.parent_block_hash] > 0, "the parent is not held"
            salt, adapter, tokens = self.prefixes[event.parent_block_hash]
        for number, handle in enumerate(event.block_hashes):
            tokens = (*tokens, *event.token_ids[number * BLOCK : (number + 1) * BLOCK])
            known = self.prefixes.setdefault(handle, (salt, adapter, tokens))
            assert known == (salt, adapter, tokens), "one handle stands for two prompts"
            self.copies[handle] += 1


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
    removals = 0
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
        removals += sum(isinstance(event, BlockRemoved) for event in events)
        follower.take(encode_batch(EventBatch(0.0, events, 0), dialect))
        held = {handle_of(name): copies for name, copies in scheduler.cache.contents().items()}
        assert +follower.copies == Counter(held)
    assert removals > 50
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
