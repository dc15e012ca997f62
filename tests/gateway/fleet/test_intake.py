"""Event streams over real sockets, followed by one and by one after another."""

import asyncio
import time
from contextlib import asynccontextmanager

import pytest
import zmq
import zmq.asyncio

from cachecore.blocks import pack_tokens, split_chain
from cachecore.events import AllBlocksCleared, BlockRemoved, BlockStored, Dialect, EventBatch, encode_batch
from cachecore.holders import Epoch, Tier, Worker, WorkerName
from cachecore.index.content import MemoryContentIndex
from cachecore.index.content_feed import ContentFeed
from cachecore.index.memory import MemoryIndex
from cachecore.rekey import Rekeyer
from cachecore.scope import DEFAULT_TENANT, IdentityScope, Keyring, Naming
from gateway.fleet.intake import EventIntake, EventSource
from gateway.fleet.sequence import VoidReason
from gateway.fleet.texts import NoIndex
from tests.cachecore.handover import Engine, Kept, naming_for
from workers.publisher import EventPublisher, PublisherConfig, ReplayFraming

SIZE = 4
HOLDER = Worker(WorkerName("w1"), Epoch(1))
RING = Keyring({0: bytes(32)}, 0)
NAMING = Naming.of(IdentityScope("m", RING.key_id(DEFAULT_TENANT), SIZE), RING)


def chain_of(*handles):
    """The names of blocks stored by `stored`."""
    return NAMING.hasher.chain(NAMING.root, pack_tokens([token for handle in handles for token in tokens_of(handle)]))


def tokens_of(handle):
    return [handle % 100_000 * 10 + place for place in range(SIZE)]


def held_by(index, tier=Tier.L0):
    return set(index.holdings(HOLDER, tier))


def stored(handle, parent=None):
    return BlockStored((handle,), parent, tokens_of(handle), SIZE)


def payload(*events, rank=None):
    return encode_batch(EventBatch(time.time(), events, rank), Dialect.VLLM_MAP)


async def until(condition):
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.005)


class Script:
    """A publisher that does as it is told: any number, any framing, and a replay that can be held back."""

    def __init__(self, context, framing):
        self.framing = framing
        self.live = context.socket(zmq.XPUB)
        self.live.setsockopt(zmq.XPUB_VERBOSE, 1)
        self.endpoint = f"tcp://127.0.0.1:{self.live.bind_to_random_port('tcp://127.0.0.1')}"
        self.router = context.socket(zmq.ROUTER)
        self.router.sndhwm = 0  # or what it drops depends on who gets the processor
        self.replay_endpoint = f"tcp://127.0.0.1:{self.router.bind_to_random_port('tcp://127.0.0.1')}"
        self.buffer = {}
        self.drops = set()
        """Numbers that a replay leaves out, unless they are what was asked for or came before."""
        self.asked = []
        self.answers = asyncio.Event()
        self.answers.set()

    async def subscribed(self):
        while (await self.live.recv())[:1] != b"\1":
            pass  # one that was there before has gone

    async def send(self, sequence, *events, kept=True, topic=b"kv@w1@m", **more):
        message = payload(*events, **more)
        if kept:
            self.buffer[sequence] = message
        await self.live.send_multipart([topic, sequence.to_bytes(8, "big"), message])

    def keep(self, sequence, *events):
        """Sent when nobody listened."""
        self.buffer[sequence] = payload(*events)

    async def serve(self):
        while True:
            client, empty, start = await self.router.recv_multipart()
            assert empty == b""
            self.asked.append(int.from_bytes(start, "big"))
            await self.answers.wait()
            for sequence in sorted(self.buffer):
                if sequence in self.drops and sequence > self.asked[-1]:
                    continue
                if sequence >= self.asked[-1]:
                    await self._answer(client, b"kv@w1@m", sequence.to_bytes(8, "big"), self.buffer[sequence])
            await self._answer(client, b"", b"\xff" * 8, b"")

    async def _answer(self, client, topic, sequence, message):
        middle = [topic] if self.framing is ReplayFraming.V4 else []
        await self.router.send_multipart([client, b"", *middle, sequence, message])


@pytest.fixture
def context():
    context = zmq.asyncio.Context()
    yield context
    context.destroy(linger=0)


@pytest.fixture(params=list(ReplayFraming))
async def script(request, context):
    script = Script(context, request.param)
    server = asyncio.create_task(script.serve())
    yield script
    server.cancel()


class SharedIndex(MemoryIndex):
    """Stands for an index that outlives whoever writes to it."""

    def __init__(self):
        super().__init__()
        self.kept = Kept()

    def apply(self, holder, sequence, events):
        taken = super().apply(holder, sequence, events)
        if taken:
            self.kept.apply(events)
        return taken

    def forget(self, holder):
        super().forget(holder)
        self.kept = Kept()


class Taken:
    """An intake with what it feeds."""

    def __init__(self, intake, index, rekeyer, voided):
        self.intake = intake
        self.index = index
        self.rekeyer = rekeyer
        self.voided = voided

    @property
    def stats(self):
        return self.intake.stats()

    def depth(self, *handles):
        return max(self.index.match(chain_of(*handles)).depths.values(), default=0)

    async def applied(self, batches):
        await until(lambda: self.stats.batches >= batches)


def default_only(salt, adapter):
    return NAMING if salt is None else None


@asynccontextmanager
async def taking(context, endpoint, replay_endpoint=None, *, after=None, naming_for=default_only, **options):
    """An intake that starts afresh, or `after` others that wrote to this index."""
    index, voided = after or SharedIndex(), []
    rekeyer = Rekeyer(SIZE, naming_for)
    rekeyer.restore(index.kept.restored_runs())
    source = EventSource(endpoint, replay_endpoint, **options)
    resume_from = index.sequence(HOLDER)
    intake = EventIntake(HOLDER, source, index, rekeyer, context, voided.append, resume_from=resume_from)
    await intake.start()
    try:
        yield Taken(intake, index, rekeyer, voided)
    finally:
        await intake.stop()


async def test_live_events_reach_the_index(context, script):
    async with taking(context, script.endpoint, script.replay_endpoint) as taken:
        await script.subscribed()
        await script.send(0, stored(1))
        await script.send(1, stored(2, 1))
        await taken.applied(2)
        assert taken.depth(1, 2) == 2
        await script.send(2, BlockRemoved((2,)))
        await taken.applied(3)
        assert taken.depth(1, 2) == 1
        assert taken.stats.events == 3
        assert 0 <= taken.stats.lag_seconds < 10
        assert time.monotonic() - taken.stats.last_seen < 10
        await script.send(3, AllBlocksCleared())
        await taken.applied(4)
        assert taken.depth(1) == 0
        assert taken.index.sequence(HOLDER) == 3
    assert script.asked == [0]


async def test_a_worker_that_was_up_before_us(context, script):
    script.keep(0, stored(1))
    script.keep(1, stored(2, 1))
    async with taking(context, script.endpoint, script.replay_endpoint) as taken:
        await taken.applied(2)
        assert taken.depth(1, 2) == 2
        await script.subscribed()
        await script.send(2, stored(3, 2))
        await taken.applied(3)
        assert taken.depth(1, 2, 3) == 3
    assert script.asked == [0]


async def test_a_gap_is_replayed(context, script):
    async with taking(context, script.endpoint, script.replay_endpoint) as taken:
        await script.subscribed()
        await script.send(0, stored(1))
        await taken.applied(1)
        script.keep(1, stored(2, 1))
        await script.send(2, stored(3, 2))
        await taken.applied(3)
        assert taken.depth(1, 2, 3) == 3
        assert (taken.stats.gaps, taken.stats.replays, taken.voided) == (0, 2, [])
    assert script.asked == [0, 1]


async def test_live_events_wait_for_a_delayed_replay(context, script):
    """E9: A is removed live while the replay that stores it is under way; it must not rise again."""
    async with taking(context, script.endpoint, script.replay_endpoint) as taken:
        await script.subscribed()
        await script.send(0, stored(1))
        await taken.applied(1)
        script.answers.clear()
        script.keep(1, stored(2, 1))
        await script.send(2, BlockRemoved((2,)))
        await until(lambda: script.asked == [0, 1])
        assert taken.stats.batches == 1
        script.answers.set()
        await taken.applied(3)
        assert taken.depth(1, 2) == 1
        assert taken.rekeyer.stats().unknown_handle == 0


async def test_a_replay_that_cannot_fill_the_gap_voids_the_holder(context, script):
    async with taking(context, script.endpoint, script.replay_endpoint) as taken:
        await script.subscribed()
        await script.send(0, stored(1))
        await taken.applied(1)
        await script.send(4, stored(5))
        await taken.applied(2)
        assert (taken.depth(1), taken.depth(5)) == (0, 1)
        assert taken.voided == [VoidReason.GAP]
        assert taken.stats.gaps == 1
        assert taken.rekeyer.stats().handles == 1


async def test_what_a_gap_has_cost_is_known_again_where_the_engine_goes_on_from_it(context, script):
    async with taking(context, script.endpoint) as taken:
        await script.subscribed()
        await script.send(0, stored(1))
        await script.send(2, stored(5))
        await taken.applied(2)
        assert (taken.depth(1), taken.voided) == (0, [VoidReason.GAP])
        await script.send(3, stored(2, 1))
        await taken.applied(3)
        assert (taken.depth(1, 2), taken.rekeyer.stats().proven) == (2, 1)


async def test_without_a_replay_endpoint_a_gap_voids_the_holder(context, script):
    async with taking(context, script.endpoint) as taken:
        await script.subscribed()
        await script.send(7, stored(1))
        await taken.applied(1)
        assert (taken.depth(1), taken.voided) == (1, [])
        await script.send(9, stored(2))
        await taken.applied(2)
        assert (taken.depth(1), taken.depth(2), taken.voided) == (0, 1, [VoidReason.GAP])
        assert taken.stats.replays == 0


async def test_silence_at_the_replay_socket_does_not_stop_the_stream(context, script):
    script.answers.clear()
    async with taking(context, script.endpoint, script.replay_endpoint, replay_timeout_seconds=0.05) as taken:
        await script.subscribed()
        await script.send(0, stored(1))
        await taken.applied(1)
        assert taken.stats.replays_failed == 1
        await script.send(2, stored(2))
        await taken.applied(2)
        assert taken.voided == [VoidReason.GAP]
        script.answers.set()
        await script.send(3, stored(3, 2))
        await taken.applied(3)
        assert taken.depth(2, 3) == 2


async def test_a_restarted_publisher(context, script):
    async with taking(context, script.endpoint, script.replay_endpoint) as taken:
        await script.subscribed()
        for sequence in range(3):
            await script.send(sequence, stored(sequence + 1))
        await taken.applied(3)
        await script.send(0, stored(9))
        await taken.applied(4)
        assert [taken.depth(handle) for handle in (1, 2, 3, 9)] == [0, 0, 0, 1]
        assert (taken.voided, taken.stats.restarts, taken.stats.stale) == ([VoidReason.RESTART], 1, 0)


async def test_bad_messages_cost_themselves_only(context, script):
    async with taking(context, script.endpoint, script.replay_endpoint) as taken:
        await script.subscribed()
        await script.send(0, stored(1))
        await taken.applied(1)
        await script.live.send_multipart([b"kv", b"short", payload(stored(8))])
        await script.live.send_multipart([b"kv", bytes(8)])
        await script.live.send_multipart([b"kv", (1).to_bytes(8, "big"), b"garbage"])
        await script.send(2, stored(2, 1))
        await taken.applied(3)
        assert (taken.stats.malformed, taken.depth(1, 2)) == (3, 2)


async def test_topics_are_filtered(context, script):
    async with taking(context, script.endpoint, script.replay_endpoint, topic="kv@w1@") as taken:
        await script.subscribed()
        await script.send(0, stored(8), topic=b"kv@w2@m", kept=False)
        await script.send(0, stored(1))
        await taken.applied(1)
        assert (taken.depth(1), taken.depth(8)) == (1, 0)


async def test_another_rank_s_events_are_not_credited(context, script):
    async with taking(context, script.endpoint, script.replay_endpoint, expected_rank=0) as taken:
        await script.subscribed()
        await script.send(0, stored(1), rank=1)
        await script.send(1, stored(2), rank=0)
        await script.send(2, stored(3))
        await taken.applied(3)
        assert [taken.depth(handle) for handle in (1, 2, 3)] == [0, 1, 1]
        assert taken.stats.other_rank == 1


async def test_an_index_that_fails_costs_what_is_known(context, script, caplog):
    class Failing(MemoryIndex):
        def apply(self, holder, sequence, events):
            if sequence == 1:
                raise RuntimeError("broken")
            return super().apply(holder, sequence, events)

    async with taking(context, script.endpoint, script.replay_endpoint) as taken:
        taken.index = taken.intake._index = Failing()
        await script.subscribed()
        for sequence in range(3):
            await script.send(sequence, stored(sequence + 1))
        await until(lambda: taken.depth(3))
        assert (taken.depth(1), taken.voided) == (0, [VoidReason.GAP])
    assert "batch 1 could not be applied" in caplog.text


async def test_an_engine_that_connects_to_us(context, tmp_path):
    endpoint = f"ipc://{tmp_path}/events"
    async with taking(context, endpoint, bind=True) as taken:
        with context.socket(zmq.XPUB) as publisher:
            publisher.linger = 0
            publisher.connect(endpoint)
            await publisher.recv()
            await publisher.send_multipart([b"", bytes(8), payload(stored(1))])
            await taken.applied(1)
            assert taken.depth(1) == 1


async def test_an_endpoint_that_cannot_be_used_is_said_at_once(context):
    intake = EventIntake(HOLDER, EventSource("nonsense"), MemoryIndex(), Rekeyer(SIZE, lambda *_: NAMING), context)
    with pytest.raises(zmq.ZMQError):
        await intake.start()


async def test_a_silent_worker_and_a_clean_stop(context):
    before = asyncio.all_tasks()
    async with taking(context, "tcp://127.0.0.1:9", "tcp://127.0.0.1:9") as taken:
        await asyncio.sleep(0.02)
        assert (taken.stats.last_seen, taken.stats.batches) == (None, 0)
        await taken.intake.stop()
    assert asyncio.all_tasks() == before


async def test_stopping_before_anything_has_run_closes_the_socket(context, script):
    async with taking(context, script.endpoint, script.replay_endpoint) as taken:
        pass
    assert taken.intake._live.closed


async def test_other_work_gets_its_turn_during_a_burst(context, script):
    """Two thousand batches wait; a bystander on the loop is served between them, not after them."""
    for sequence in range(2000):
        script.keep(sequence, stored(sequence + 1))
    async with taking(context, script.endpoint, script.replay_endpoint, turn_seconds=0.0) as taken:
        turns = set()

        async def bystander():
            while taken.stats.batches < 2000:
                turns.add(taken.stats.batches)
                await asyncio.sleep(0)

        async with asyncio.timeout(30):
            await bystander()
        assert len(turns) > 1000
        assert len(set(taken.index.holdings(HOLDER, Tier.L0))) == 2000


async def test_what_an_engine_drops_from_a_full_queue_is_asked_for_again(context, script):
    script.drops = {3, 4, 7}
    for sequence in range(9):
        script.keep(sequence, stored(sequence + 1))
    async with taking(context, script.endpoint, script.replay_endpoint) as taken:
        await taken.applied(9)
        assert len(set(taken.index.holdings(HOLDER, Tier.L0))) == 9
        assert (taken.voided, taken.stats.replays_failed) == ([], 0)
    assert script.asked == [0, 3, 4, 7]


async def test_reading_stops_while_applying_is_behind(context, script):
    for sequence in range(300):
        script.keep(sequence, stored(sequence + 1))
    queued = []
    async with taking(context, script.endpoint, script.replay_endpoint, waiting_batches_max=16) as taken:
        async with asyncio.timeout(30):
            while taken.stats.batches < 300:
                queued.append(taken.stats.queued)
                await asyncio.sleep(0)
        assert max(queued) <= 16
        assert taken.voided == []


# ---- one after another -----------------------------------------------------------------------------------------------


async def test_another_goes_on_where_one_stopped(context, script):
    async with taking(context, script.endpoint, script.replay_endpoint) as first:
        await script.subscribed()
        await script.send(0, stored(1), stored(2, 1), stored(3, 2))
        await script.send(1, stored(3, 2))
        await first.applied(2)
    script.keep(2, BlockRemoved((2,)), stored(4, 3))
    async with taking(context, script.endpoint, script.replay_endpoint, after=first.index) as second:
        await second.applied(1)
        assert first.index.sequence(HOLDER) == 2
        assert held_by(first.index) == {chain_of(1), *split_chain(chain_of(1, 2, 3, 4)[32:])}
        await script.subscribed()
        await script.send(3, BlockRemoved((3,)), BlockRemoved((4,)))
        await second.applied(2)
        assert held_by(first.index) == {chain_of(1), chain_of(1, 2, 3)[32:]}
        await script.send(4, BlockRemoved((3,)), BlockRemoved((1,)))
        await second.applied(3)
        assert held_by(first.index) == set()
        assert (second.voided, second.rekeyer.stats().unknown_handle, second.stats.stale) == ([], 0, 0)
    assert script.asked == [0, 1]


async def test_a_history_that_was_lost_between_the_two_voids_the_holder(context, script):
    async with taking(context, script.endpoint, script.replay_endpoint) as first:
        await script.subscribed()
        await script.send(0, stored(1))
        await first.applied(1)
    script.buffer.clear()
    script.keep(2, stored(2))
    async with taking(context, script.endpoint, script.replay_endpoint, after=first.index) as second:
        await second.applied(1)
        assert (second.depth(1), second.depth(2), second.voided) == (0, 1, [VoidReason.GAP])
        assert (second.index.sequence(HOLDER), second.rekeyer.stats().handles) == (2, 1)


@pytest.mark.parametrize("batches", [0, 1, 2])
async def test_a_publisher_that_restarted_between_the_two(context, script, batches):
    async with taking(context, script.endpoint, script.replay_endpoint) as first:
        await script.subscribed()
        for sequence in range(3):
            await script.send(sequence, stored(sequence + 1))
        await first.applied(3)
    script.buffer.clear()
    for sequence in range(batches):
        script.keep(sequence, stored(sequence + 11))
    async with taking(context, script.endpoint, script.replay_endpoint, after=first.index) as second:
        await until(lambda: second.voided)
        await second.applied(batches)
        await script.subscribed()
        await script.send(batches, stored(99))
        await second.applied(batches + 1)
        assert held_by(second.index) == {chain_of(n) for n in (*range(11, 11 + batches), 99)}
        assert (second.voided, second.stats.restarts, second.stats.stale) == ([VoidReason.RESTART], 1, 0)
        assert second.index.sequence(HOLDER) == batches


@pytest.mark.parametrize("dialect", list(Dialect))
async def test_many_hands_over_a_stream_that_goes_on(context, dialect):
    """Each follower is cut off in the middle of its work; what the last one leaves is what the engine holds."""
    publisher = EventPublisher(PublisherConfig(dialect=dialect, framing=ReplayFraming.of(dialect)))
    engine, index = Engine(3, SIZE, orphans=False), SharedIndex()
    # Two dialects cannot say a salt and an adapter together; one prompt at least must live through every hand-over.
    engine.scopes = engine.scopes[:2]

    async def publish(batches):
        for _ in range(batches):
            publisher.publish(EventBatch(time.time(), tuple(engine.batch())))
            await asyncio.sleep(0.0002)

    follow = {"after": index, "naming_for": naming_for, "turn_seconds": 0.0}
    unknown = followers = 0
    try:
        publish_all = asyncio.create_task(publish(600))
        while not publish_all.done():
            async with taking(context, publisher.endpoint, publisher.replay_endpoint, **follow) as taken:
                await until(lambda taken=taken: publish_all.done() or taken.stats.batches >= 40)
            followers += 1
            unknown += taken.rekeyer.stats().unknown_handle
            assert taken.voided == []
        async with taking(context, publisher.endpoint, publisher.replay_endpoint, **follow) as taken:
            await until(lambda: index.sequence(HOLDER) == publisher.next_sequence - 1)
            assert taken.voided == []
            assert index.kept.copies == engine.truth()
            for tier in Tier:
                assert set(index.holdings(HOLDER, tier)) == {name for (at, _), name in engine.truth() if at is tier}
        assert (followers > 5, unknown, bool(engine.truth())) == (True, 0, True)
    finally:
        publisher.close()


async def test_an_index_that_takes_nothing_more_is_left_alone(context, script, caplog):
    """Another has become the stream's owner: what it writes is not ours to forget, and nothing may follow a hole."""

    class Fenced(SharedIndex):
        fenced = False

        def apply(self, holder, sequence, events):
            return not self.fenced and super().apply(holder, sequence, events)

    index = Fenced()
    async with taking(context, script.endpoint, script.replay_endpoint, after=index) as taken:
        await script.subscribed()
        await script.send(0, stored(1))
        await taken.applied(1)
        index.fenced = True
        await script.send(1, stored(2))
        await taken.applied(2)
        index.fenced = False
        await script.send(2, stored(3))
        await asyncio.sleep(0.05)
        assert (taken.stats.refused, taken.stats.batches, taken.stats.stale) == (1, 2, 0)
        assert (held_by(index), index.sequence(HOLDER), taken.voided) == ({chain_of(1)}, 0, [])
    assert "the index does not take batch 1" in caplog.text


async def test_batches_that_the_index_has_seen_are_stale_and_no_refusal(context, script):
    for sequence in range(3):
        script.keep(sequence, stored(sequence + 1))
    index, rekeyer = MemoryIndex(), Rekeyer(SIZE, default_only)
    index.apply(HOLDER, 1, rekeyer.rekey([stored(1)]))
    source = EventSource(script.endpoint, script.replay_endpoint)
    intake = EventIntake(HOLDER, source, index, rekeyer, context, resume_from=0)
    await intake.start()
    await until(lambda: intake.stats().batches == 2)
    await intake.stop()
    assert (intake.stats().refused, intake.stats().stale) == (0, 1)
    assert held_by(index) == {chain_of(1), chain_of(3)}


async def test_a_halted_intake_applies_nothing_more(context, script):
    for sequence in range(500):
        script.keep(sequence, stored(sequence + 1))
    async with taking(context, script.endpoint, script.replay_endpoint, turn_seconds=0.0) as taken:
        await taken.applied(3)
        taken.intake.halt()
        applied = taken.stats.batches
        await asyncio.sleep(0.05)
        assert (taken.stats.batches, taken.index.sequence(HOLDER), taken.stats.queued) == (applied, applied - 1, 0)
        assert applied < 500


# ---- with the workers' own publisher ---------------------------------------------------------------------------------


@pytest.mark.parametrize("framing", list(ReplayFraming))
@pytest.mark.parametrize("dialect", list(Dialect))
async def test_with_the_workers_publisher(context, dialect, framing):
    publisher = EventPublisher(PublisherConfig(dialect=dialect, framing=framing))
    try:
        publisher.publish(EventBatch(time.time(), (stored(2**63 + 1),)))
        async with taking(context, publisher.endpoint, publisher.replay_endpoint, topic="kv-events") as taken:
            await taken.applied(1)
            publisher.publish(EventBatch(time.time(), (stored(2, 2**63 + 1), BlockRemoved((404,)))))
            publisher.publish(EventBatch(time.time(), (stored(3, 2),)))
            # What was sent before the subscription took effect is missed. A later batch shows the gap; replay fills it.
            published = 3
            while taken.stats.batches < 3:
                publisher.publish(EventBatch(time.time(), ()))
                published += 1
                await asyncio.sleep(0.02)
            await taken.applied(published)
            assert taken.depth(2**63 + 1, 2, 3) == 3
            assert taken.voided == []
            assert taken.rekeyer.stats().unknown_handle == 1
    finally:
        publisher.close()


# ---- texts -----------------------------------------------------------------------------------------------------------


def found(feed, handle):
    [content] = NAMING.hasher.contents(pack_tokens(tokens_of(handle)))
    return [holding.position_blocks for holding in feed.index.find(content)]


@asynccontextmanager
async def reading(context, script, feed, index):
    intake = EventIntake(
        HOLDER,
        EventSource(script.endpoint, script.replay_endpoint),
        index,
        Rekeyer(SIZE, default_only, with_texts=True),
        context,
        contents=feed,
    )
    await intake.start()
    try:
        yield intake
    finally:
        await intake.stop()


@pytest.mark.parametrize("index_type", [MemoryIndex, NoIndex])
async def test_texts_are_found_as_long_as_the_stream_is_followed(context, script, index_type):
    feed = ContentFeed(MemoryContentIndex())
    script.keep(0, stored(1), stored(2, 1))
    async with reading(context, script, feed, index_type()) as intake:
        await until(lambda: intake.stats().batches == 1)
        assert (found(feed, 1), found(feed, 2)) == ([0], [1])
        await script.subscribed()
        await script.send(1, BlockRemoved((2,)))
        await until(lambda: intake.stats().batches == 2)
        assert (found(feed, 1), found(feed, 2)) == ([0], [])
        await script.send(9, stored(3), kept=False)
        await until(lambda: intake.stats().gaps == 1)
        assert found(feed, 1) == []
        await script.send(10, stored(4))
        await until(lambda: intake.stats().batches == 4)
        assert found(feed, 4) == [0]
    assert (found(feed, 4), len(feed.index)) == ([], 0)


async def test_texts_of_a_batch_that_the_index_does_not_take_are_not_found(context, script):
    class Fenced(MemoryIndex):
        def apply(self, holder, sequence, events):
            return False

    feed = ContentFeed(MemoryContentIndex())
    script.keep(0, stored(1))
    async with reading(context, script, feed, Fenced()) as intake:
        await until(lambda: intake.stats().refused == 1)
        assert found(feed, 1) == []
