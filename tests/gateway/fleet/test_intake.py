"""The order of event streams, first by scripts, then over real sockets."""

import asyncio
import time
from contextlib import asynccontextmanager

import pytest
import zmq
import zmq.asyncio

from cachecore.blocks import pack_tokens
from cachecore.events import AllBlocksCleared, BlockRemoved, BlockStored, Dialect, EventBatch, encode_batch
from cachecore.holders import Epoch, Tier, Worker, WorkerName
from cachecore.index.memory import MemoryIndex
from cachecore.rekey import Rekeyer
from cachecore.scope import DEFAULT_TENANT, IdentityScope, Keyring, Naming
from gateway.fleet.intake import EventIntake, EventSource
from gateway.fleet.sequence import Apply, Replay, SequenceTracker, Void, VoidReason
from workers.publisher import EventPublisher, PublisherConfig, ReplayFraming

GAP, RESTART = Void(VoidReason.GAP), Void(VoidReason.RESTART)


# ---- scripts ---------------------------------------------------------------------------------------------------------


def batch(sequence, life=""):
    return Apply(sequence, f"{sequence}{life}".encode())


def started(first_live=0):
    """A tracker whose first replay brought nothing, and which has applied live batches below `first_live`."""
    tracker = SequenceTracker()
    assert tracker.start() == [Replay(0)]
    assert tracker.replay_ended(complete=True) == []
    for sequence in range(first_live):
        assert tracker.live(*batch(sequence)) == [batch(sequence)]
    return tracker


def test_live_batches_are_applied_as_they_come():
    assert started(5).expected == 5


def test_what_was_announced_before_we_came_is_replayed_first():
    tracker = SequenceTracker()
    tracker.start()
    assert tracker.live(*batch(3)) == []
    assert [tracker.replayed(*batch(sequence)) for sequence in range(5)] == [[batch(n)] for n in range(5)]
    assert tracker.replay_ended(complete=True) == []
    assert tracker.live(*batch(4)) == []
    assert tracker.live(*batch(5)) == [batch(5)]


def test_a_history_that_starts_in_the_middle_is_taken_as_it_comes():
    tracker = SequenceTracker()
    tracker.start()
    assert tracker.replayed(*batch(700)) == [batch(700)]
    assert tracker.replayed(*batch(703)) == [batch(703)]
    assert tracker.replay_ended(complete=True) == []
    assert tracker.live(*batch(704)) == [batch(704)]


def test_without_any_replay_the_stream_starts_where_we_came():
    tracker = SequenceTracker()
    tracker.start()
    assert tracker.replay_ended(complete=False) == []
    assert tracker.live(*batch(40)) == [Replay(0)]
    assert tracker.replay_ended(complete=False) == [batch(40)]
    assert tracker.live(*batch(41)) == [batch(41)]


def test_a_worker_that_comes_up_later_starts_at_zero():
    tracker = SequenceTracker()
    tracker.start()
    tracker.replay_ended(complete=False)
    assert tracker.live(*batch(0)) == [batch(0)]


def test_a_gap_is_filled_by_replay():
    """E7, the missing ones available."""
    tracker = started(3)
    assert tracker.live(*batch(5)) == [Replay(3)]
    assert tracker.live(*batch(6)) == []
    assert tracker.replayed(*batch(3)) == [batch(3)]
    assert tracker.replayed(*batch(4)) == [batch(4)]
    assert tracker.replayed(*batch(5)) == [batch(5)]
    assert tracker.replay_ended(complete=True) == [batch(6)]
    assert [tracker.live(*batch(n)) for n in range(7, 107)] == [[batch(n)] for n in range(7, 107)]


@pytest.mark.parametrize("complete", [True, False])
def test_a_gap_that_nobody_fills_voids_the_holder(complete):
    """E7, the missing ones lost."""
    tracker = started(3)
    assert tracker.live(*batch(5)) == [Replay(3)]
    assert tracker.live(*batch(6)) == []
    assert tracker.replay_ended(complete) == [GAP, batch(5), batch(6)]
    assert tracker.live(*batch(7)) == [batch(7)]


def test_a_replay_that_begins_too_late_voids_the_holder_once():
    tracker = started(3)
    tracker.live(*batch(9))
    assert tracker.replayed(*batch(6)) == [GAP, batch(6)]
    assert tracker.replayed(*batch(7)) == [batch(7)]
    assert tracker.replayed(*batch(8)) == [batch(8)]
    assert tracker.replay_ended(complete=True) == [batch(9)]


def test_a_replay_that_breaks_off_voids_the_holder():
    tracker = started(3)
    tracker.live(*batch(9))
    assert tracker.replayed(*batch(3)) == [batch(3)]
    assert tracker.replay_ended(complete=False) == [GAP, batch(9)]


def test_live_removals_wait_for_the_replayed_stores_before_them():
    """E9: live 10 removes what the delayed 5 stores."""
    tracker = started(5)
    order = tracker.live(*batch(10))
    for sequence in range(5, 10):
        order += tracker.replayed(*batch(sequence))
    order += tracker.replay_ended(complete=True)
    assert order == [Replay(5), *(batch(n) for n in range(5, 11))]


def test_a_second_gap_while_replaying_is_asked_for_next():
    tracker = started(1)
    tracker.live(*batch(3))
    tracker.live(*batch(6))
    tracker.live(*batch(7))
    for sequence in (1, 2, 3):
        tracker.replayed(*batch(sequence))
    assert tracker.replay_ended(complete=True) == [Replay(4)]
    assert tracker.replayed(*batch(4)) + tracker.replayed(*batch(5)) == [batch(4), batch(5)]
    assert tracker.replay_ended(complete=True) == [batch(6), batch(7)]


def test_waiting_is_bounded_and_what_was_dropped_is_asked_for():
    tracker = SequenceTracker(waiting_max=2)
    tracker.start()
    for sequence in range(5):
        tracker.live(*batch(sequence))
    assert tracker.replay_ended(complete=True) == [batch(0), batch(1)]
    assert tracker.live(*batch(5)) == [Replay(2)]


def test_a_restart_voids_the_holder_and_starts_over():
    """E8: 98, 99, 100, then 0, 1."""
    tracker = started(101)
    assert tracker.live(*batch(0, "b")) == [RESTART, batch(0, "b")]
    assert tracker.live(*batch(1, "b")) == [batch(1, "b")]


def test_a_restart_whose_beginning_was_missed_is_replayed():
    tracker = started(101)
    assert tracker.live(*batch(2, "b")) == [RESTART, Replay(0)]
    assert [tracker.replayed(*batch(n, "b")) for n in (0, 1, 2)] == [[batch(n, "b")] for n in (0, 1, 2)]
    assert tracker.replay_ended(complete=True) == []
    assert tracker.live(*batch(3, "b")) == [batch(3, "b")]


def test_a_restart_during_a_replay_forgets_what_waited():
    tracker = started(3)
    tracker.live(*batch(9))
    assert tracker.live(*batch(0, "b")) == [RESTART, batch(0, "b")]
    assert tracker.replayed(*batch(3)) == []
    assert tracker.replay_ended(complete=False) == []
    assert tracker.live(*batch(1, "b")) == [batch(1, "b")]


def test_a_restart_at_the_same_number_is_told_by_its_content():
    tracker = started(1)
    assert tracker.live(*batch(0)) == []
    assert tracker.live(*batch(0, "b")) == [RESTART, batch(0, "b")]


def test_a_batch_that_comes_twice_is_applied_once():
    """E8: redelivery of 100."""
    tracker = started(101)
    assert tracker.live(*batch(100)) == []
    assert tracker.live(*batch(101)) == [batch(101)]


def test_live_copies_of_what_a_replay_brought_are_no_restart():
    tracker = started(2)
    tracker.live(*batch(3))
    for sequence in range(2, 20):
        tracker.replayed(*batch(sequence))
    tracker.replay_ended(complete=True)
    assert [tracker.live(*batch(n)) for n in range(4, 20)] == [[]] * 16
    assert tracker.live(*batch(20)) == [batch(20)]


def test_numbers_pass_two_to_the_sixty_third():
    tracker, start = started(), 2**63 - 1
    assert tracker.live(*batch(start)) == [Replay(0)]
    tracker.replay_ended(complete=True)
    assert tracker.live(*batch(start + 1)) == [batch(start + 1)]


def test_answers_to_no_question_are_ignored():
    tracker = started(3)
    assert tracker.replayed(*batch(3)) == []
    assert tracker.replay_ended(complete=True) == []
    assert repr(tracker) == "SequenceTracker(expected=3, replaying=False, waiting=0)"


# ---- sockets ---------------------------------------------------------------------------------------------------------

SIZE = 4
HOLDER = Worker(WorkerName("w1"), Epoch(1))
RING = Keyring({0: bytes(32)}, 0)
NAMING = Naming.of(IdentityScope("m", RING.key_id(DEFAULT_TENANT), SIZE), RING)


def chain_of(*handles):
    """The names of blocks stored by `stored`."""
    return NAMING.hasher.chain(NAMING.root, pack_tokens([token for handle in handles for token in tokens_of(handle)]))


def tokens_of(handle):
    return [handle % 100_000 * 10 + place for place in range(SIZE)]


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
        self.replay_endpoint = f"tcp://127.0.0.1:{self.router.bind_to_random_port('tcp://127.0.0.1')}"
        self.buffer = {}
        self.asked = []
        self.answers = asyncio.Event()
        self.answers.set()

    async def subscribed(self):
        assert (await self.live.recv())[:1] == b"\1"

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


@asynccontextmanager
async def taking(context, endpoint, replay_endpoint=None, **options):
    index, voided = MemoryIndex(), []
    rekeyer = Rekeyer(SIZE, lambda salt, adapter: NAMING if salt is None else None)
    source = EventSource(endpoint, replay_endpoint, **options)
    intake = EventIntake(HOLDER, source, index, rekeyer, context, voided.append)
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
