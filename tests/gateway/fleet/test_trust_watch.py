"""The watch over workers' trust, with a real index, real intakes and real publishers; only the clock is handed in."""

import asyncio
import logging
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import pytest
import zmq.asyncio
from prometheus_client import CollectorRegistry, generate_latest

from cachecore.blocks import Chain, pack_tokens
from cachecore.events import BlockRemoved, BlockStored, EventBatch
from cachecore.holders import Epoch, Tier
from cachecore.index.memory import MemoryIndex
from cachecore.rekey import Rekeyer
from cachecore.scope import DEFAULT_TENANT, IdentityScope, Keyring, Naming
from cachecore.store import StoreError
from gateway.config import WorkerConfig
from gateway.fleet.engines.contract import EngineLoad, EngineTraits
from gateway.fleet.evidence import Answer
from gateway.fleet.intake import EventIntake, EventSource
from gateway.fleet.knowledge import Knowledge
from gateway.fleet.trust import Doubt, TrustLevel
from gateway.fleet.trust_watch import TURN_SECONDS, TrustWatch
from gateway.fleet.worker import ModelPool, WorkerRecord
from gateway.views.trust import TrustCollector
from workers.publisher import EventPublisher

SIZE = 16
RING = Keyring({0: bytes(32)}, 0)
NAMING = Naming.of(IdentityScope("m", RING.key_id(DEFAULT_TENANT), SIZE), RING)


def tokens_of(handle: int) -> list[int]:
    return list(range(handle * SIZE, (handle + 1) * SIZE))


def chain_of(*handles: int) -> Chain:
    return NAMING.hasher.chain(NAMING.root, pack_tokens([token for handle in handles for token in tokens_of(handle)]))


def stored(*handles: int, parent: int | None = None) -> BlockStored:
    return BlockStored(handles, parent, [token for handle in handles for token in tokens_of(handle)], SIZE)


class Bench:
    """One worker in a pool, watched."""

    def __init__(self, block_tokens: int = SIZE, ranks: int = 1) -> None:
        self.now = 1_000_000.0
        """Far ahead of the real clock, by which intakes note when they heard something."""
        self.index = MemoryIndex()
        self.knowledge = Knowledge(self.index)
        record = self.record = WorkerRecord.of(WorkerConfig(url="http://127.0.0.1:1", block_size_tokens=block_tokens))
        record.epoch, record.healthy = Epoch(1), True
        record.holders = tuple(record.holder(rank) for rank in range(ranks))
        record.trust.follow(True)
        self.pool = ModelPool("m", block_size_tokens=SIZE, workers=[record])
        self.watch = TrustWatch({"m": self.pool}, self.knowledge, lambda: self.now)

    async def turn(self, seconds: float = TURN_SECONDS) -> None:
        self.now += seconds
        await self.watch.turn()

    async def sampled(self, chain: Chain, rank: int = 0) -> None:
        """A prompt is answered and sampled, and its time runs out."""
        await self.turn()
        assert self.record.trust.curious
        self.record.trust.sample(self.record.holders[rank], chain, self.now - 0.1, self.now)

    @property
    def doubts(self) -> list[Doubt]:
        return self.record.trust.doubts

    def scraped(self) -> str:
        registry = CollectorRegistry()
        registry.register(TrustCollector(self.watch, {self.record.name: self.record}))
        return generate_latest(registry).decode()


@asynccontextmanager
async def followed(bench: Bench, publisher: EventPublisher, replay: bool = True) -> AsyncIterator[EventIntake]:
    context = zmq.asyncio.Context()
    source = EventSource(publisher.endpoint, publisher.replay_endpoint if replay else None)
    rekeyer = Rekeyer(SIZE, lambda salt, adapter: NAMING)
    intake = EventIntake(bench.record.holders[0], source, bench.index, rekeyer, context)
    await intake.start()
    bench.record.intakes = [intake]
    try:
        yield intake
    finally:
        await intake.stop()
        context.destroy(linger=0)


async def applied(publisher: EventPublisher, intake: EventIntake, *events: BlockStored | BlockRemoved) -> None:
    """Publish, and wait until it is in the index."""
    publisher.publish(EventBatch(1.0, events))
    async with asyncio.timeout(10):
        while intake.stats().batches < publisher.next_sequence or intake.behind:
            await asyncio.sleep(0.005)


@pytest.fixture
def publisher() -> Iterator[EventPublisher]:
    publisher = EventPublisher()
    yield publisher
    publisher.close()


async def test_prompts_that_are_in_the_index_raise_no_doubt(publisher: EventPublisher) -> None:
    bench = Bench()
    async with followed(bench, publisher) as intake:
        for number in range(10):
            await bench.sampled(chain_of(number))
            await applied(publisher, intake, stored(number))
        await bench.turn(5.0)
    assert (bench.record.trust.level, bench.watch.raised) == (TrustLevel.EXACT, {})


async def test_silence_is_told_everywhere_and_history_recalled(
    publisher: EventPublisher, caplog: pytest.LogCaptureFixture
) -> None:
    bench = Bench()
    key = (bench.record.name, 0)
    bench.knowledge.history.note(key, chain_of(1, 2))
    async with followed(bench, publisher, replay=False):
        for number in range(6):
            await bench.sampled(chain_of(number))
        await bench.turn()
    assert (bench.doubts, bench.record.trust.level) == ([Doubt.SILENT], TrustLevel.HISTORY)
    assert bench.knowledge.history.depths(chain_of(1, 2)) == {key: 2}
    (record,) = [record for record in caplog.records if record.name == "ropeway.trust"]
    assert (record.levelno, record.getMessage()) == (
        logging.ERROR,
        "worker 127.0.0.1:1: silent: nothing came from its event stream at all while it answered requests; "
        "its matches count as guesses",
    )
    text = bench.scraped()
    assert 'ropeway_worker_trust{level="history",worker="127.0.0.1:1"} 1.0' in text
    assert 'ropeway_worker_trust{level="exact",worker="127.0.0.1:1"} 0.0' in text
    assert 'ropeway_worker_events_silent{worker="127.0.0.1:1"} 1.0' in text
    assert 'ropeway_worker_doubt{doubt="silent",worker="127.0.0.1:1"} 1.0' in text
    assert 'ropeway_doubts_total{doubt="silent",worker="127.0.0.1:1"} 1.0' in text


async def test_phantoms_are_read_again_then_forgotten(publisher: EventPublisher) -> None:
    bench = Bench()
    async with followed(bench, publisher) as intake:
        await applied(publisher, intake, stored(1, 2, 3))

        async def wrong() -> None:
            for _ in range(8):
                bench.record.trust.note(Answer(bench.now + 1.0, 480, 480, False, 0))
            await bench.turn(2.0)
            async with asyncio.timeout(10):
                while intake.behind or intake.stats().doubted < sum(bench.watch.raised.values()):
                    await asyncio.sleep(0.005)

        await wrong()
        assert bench.doubts == [Doubt.PHANTOM]
        async with asyncio.timeout(10):
            while len(set(bench.index.holdings(intake.holder, Tier.L0))) < 3:
                await asyncio.sleep(0.005)
        await wrong()
        async with asyncio.timeout(10):
            while set(bench.index.holdings(intake.holder, Tier.L0)):
                await asyncio.sleep(0.005)
        assert intake.stats().doubted == 2
        await applied_after_doubt(publisher, intake, stored(7))
        assert set(bench.index.holdings(intake.holder, Tier.L0)) == {chain_of(7)}


async def applied_after_doubt(publisher: EventPublisher, intake: EventIntake, event: BlockStored) -> None:
    batches = intake.stats().batches
    publisher.publish(EventBatch(1.0, (event,)))
    async with asyncio.timeout(10):
        while intake.stats().batches == batches:
            await asyncio.sleep(0.005)


async def test_of_larger_engine_blocks_only_whole_ones_are_expected() -> None:
    """A prompt of three of our blocks fills one of the engine's, of two."""
    bench = Bench(block_tokens=2 * SIZE)
    rekeyer = Rekeyer(SIZE, lambda salt, adapter: NAMING)
    engine = BlockStored((1,), None, [*tokens_of(0), *tokens_of(1)], 2 * SIZE)
    bench.index.apply(bench.record.holders[0], 0, rekeyer.rekey([engine]))
    for _ in range(12):
        await bench.sampled(chain_of(0, 1, 2))
    assert bench.doubts == []
    assert bench.record.trust.slack_tokens == 2 * SIZE


@pytest.mark.parametrize(("rank_header", "doubts"), [(b"x-rank", [Doubt.SILENT]), (b"", [])])
async def test_a_rank_that_the_engine_chose_itself(rank_header: bytes, doubts: list[Doubt]) -> None:
    bench = Bench(ranks=2)
    bench.record.traits = EngineTraits(rank_header=rank_header)
    rekeyer = Rekeyer(SIZE, lambda salt, adapter: NAMING)
    bench.index.apply(bench.record.holders[1], 0, rekeyer.rekey([stored(1)]))
    for _ in range(8):
        await bench.sampled(chain_of(1), rank=0)
    assert bench.doubts == doubts


async def test_a_stream_that_another_gateway_follows_is_heard_by_its_progress() -> None:
    bench = Bench()
    rekeyer = Rekeyer(SIZE, lambda salt, adapter: NAMING)
    for number in range(12):
        bench.index.apply(bench.record.holders[0], number, rekeyer.rekey([stored(1000 + number)]))
        await bench.sampled(chain_of(number))
    assert bench.doubts == [Doubt.UNANNOUNCED], "it speaks, and of other things"


async def test_an_index_that_does_not_answer_is_no_evidence() -> None:
    class Unreachable(MemoryIndex):
        async def match(self, chain: Chain) -> object:  # type: ignore[override]
            raise StoreError("no")

    bench = Bench()
    bench.knowledge.index = Unreachable()
    for number in range(12):
        await bench.sampled(chain_of(number))
    assert bench.doubts == []


async def test_counters_of_hits_are_read_once_each() -> None:
    bench = Bench()
    for scrape in range(12):
        bench.record.load = EngineLoad(0, 0, float(scrape), 10_000, 500)
        for _ in range(4):
            for _ in range(2):
                bench.record.trust.note(Answer(bench.now, 640, 640, False, None))
            await bench.turn()
    assert bench.doubts == [Doubt.PHANTOM]


async def test_what_is_kept_of_workers_goes_with_them() -> None:
    bench = Bench()
    for number in range(6):
        await bench.sampled(chain_of(number))
    await bench.turn()
    assert bench.watch.raised
    bench.pool.workers.clear()
    await bench.turn()
    assert (bench.watch.raised, bench.watch._heard, bench.watch._loads) == ({}, {}, {})


async def test_a_turn_that_fails_is_logged_and_the_watch_goes_on(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = Bench()
    monkeypatch.setattr("gateway.fleet.trust_watch.TURN_SECONDS", 0.001)
    monkeypatch.setattr(bench.index, "sequence", lambda holder: 1 / 0)
    watching = asyncio.create_task(bench.watch.run())
    async with asyncio.timeout(10):
        while caplog.text.count("a turn of the watch over the workers' events failed") < 2:
            await asyncio.sleep(0.005)
    watching.cancel()
    await asyncio.gather(watching, return_exceptions=True)
