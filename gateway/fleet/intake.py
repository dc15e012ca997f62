"""Reads one worker rank's KV events into the index.

    SUB socket ─┐
                ├─► SequenceTracker ─► queue ─► decode ─► re-key ─► index.apply
    DEALER ─────┘   (what, in order)   (a little each turn of the loop)

The live stream is a PUB socket that an engine binds; what is missing of it is asked for at its replay socket. Each
replay has a socket of its own, so that late answers to one that was given up never mix with the next.

Applying is spread over the event loop's turns: requests share the loop, and a burst of events must not delay them.
When applying falls behind, reading stops, then ZeroMQ's queue fills, then the publisher drops: a gap, which a replay
fills. Memory stays bounded at each stage.
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import zmq
import zmq.asyncio

from cachecore.events import EventBatch, decode_batch
from cachecore.holders import Worker
from cachecore.index.content_feed import ContentFeed
from cachecore.index.contract import PrefixIndex
from cachecore.rekey import Rekeyer, RekeyStats
from gateway.fleet.framing import MESSAGE_BYTES_MAX, live_message, replay_request, replayed_message
from gateway.fleet.sequence import Action, Apply, Replay, SequenceTracker, Void, VoidReason

logger = logging.getLogger(__name__)

_READS_PER_TURN: Final = 32
_BEHIND_BATCHES: Final = 100


@dataclass(frozen=True, slots=True)
class EventSource:
    """Where a rank's events come from, and how they are taken in."""

    live_endpoint: str
    replay_endpoint: str | None = None
    topic: str = ""
    """Prefix of the topics to read; empty reads all."""
    bind: bool = False
    """Bind the live endpoint, for engines configured to connect to it."""
    not_before: float = 0.0
    """Wall-clock seconds. Batches that are older say nothing: the cache was emptied since, without a word for it."""
    expected_rank: int | None = None
    """Batches that name another data-parallel rank are dropped and counted; None takes all."""
    replay_timeout_seconds: float = 5.0
    """Silence after which a replay is given up."""
    waiting_batches_max: int = 10_000
    """Live batches that wait for a replay; as many may wait to be applied, and in ZeroMQ's own queue."""
    turn_seconds: float = 0.001
    """How long to apply batches before other work of the loop gets its turn (one batch at least)."""


@dataclass(slots=True)
class IntakeStats:
    """Counters only grow."""

    batches: int = 0
    """Applied."""
    events: int = 0
    malformed: int = 0
    """Events that could not be read, and messages without the right frames."""
    other_rank: int = 0
    stale: int = 0
    """Batches that the index had seen."""
    refused: int = 0
    """Batches that the index would not take though it had not seen them. After the first nothing more is applied."""
    gaps: int = 0
    """Times that batches were lost for good and the holder was cleared."""
    restarts: int = 0
    doubted: int = 0
    """Times that what it held was forgotten because it had turned out wrong."""
    replays: int = 0
    """Asked for, the first one included."""
    replays_failed: int = 0
    unanswered: int = 0
    """Questions for events that were not answered as they should be, to an engine that has to be asked."""
    queued: int = 0
    """Batches that wait to be applied."""
    lag_seconds: float = 0.0
    """Age of the last batch when it was applied, by the worker's clock and ours."""
    last_seen: float | None = None
    """Monotonic time of the last live message; None before the first."""


class Intake:
    """Applies what one rank of one life of a worker says of its cache, from `start` to `stop`, on the running loop.

    Where it comes from is for those who are derived from this: they queue what is to be applied, in its order.

    `on_void` is called after everything known of the holder was dropped.

    `contents`, where texts are looked up, is told of what the rekeyer's stores say. It is of this process alone: it
    knows the holder from here on, and no longer than the intake follows it.
    """

    def __init__(
        self,
        holder: Worker,
        source: EventSource,
        index: PrefixIndex,
        rekeyer: Rekeyer,
        on_void: Callable[[VoidReason], None] = lambda reason: None,
        *,
        contents: ContentFeed | None = None,
    ) -> None:
        self.holder = holder
        self.source = source
        self._index = index
        self._rekeyer = rekeyer
        self._on_void = on_void
        self._contents = contents
        self._stats = IntakeStats()
        self._queue: deque[Apply | Void] = deque()
        self._filled, self._drained = asyncio.Event(), asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Begin to read, after what was announced before if that can be had. Raises zmq.ZMQError for an endpoint that
        cannot be used."""
        raise NotImplementedError

    def forget(self, reread: bool) -> None:
        """What the holder was believed to hold is wrong: forget it, and with `reread` begin again with what the
        publisher can show."""
        raise NotImplementedError

    async def stop(self) -> None:
        """Stop reading and close what was opened; what is queued is dropped. Raises what a task of the intake died
        of."""
        tasks, self._tasks = self.halt(), []
        outcomes = await asyncio.gather(*tasks, return_exceptions=True)
        await self._close()
        for outcome in outcomes:
            if isinstance(outcome, Exception):
                raise outcome

    async def _close(self) -> None:
        """What `start` has opened."""
        raise NotImplementedError

    def halt(self) -> list[asyncio.Task[None]]:
        """From this moment on apply nothing, for instance because another follows the stream. `stop` must still come.

        Returns the tasks that end now.
        """
        self._queue.clear()
        self._forget_contents()
        tasks = self._under_way()
        for task in tasks:
            task.cancel()
        return tasks

    def _under_way(self) -> list[asyncio.Task[None]]:
        return list(self._tasks)

    @property
    def behind(self) -> bool:
        """Whether what has come in cannot yet be seen in the index."""
        return len(self._queue) > _BEHIND_BATCHES

    def stats(self) -> IntakeStats:
        self._stats.queued = len(self._queue)
        return self._stats

    def rekey_stats(self) -> RekeyStats:
        return self._rekeyer.stats()

    # ---- applying ----------------------------------------------------------------------------------------------------

    def _enqueue(self, action: Apply | Void) -> None:
        self._queue.append(action)
        self._filled.set()

    async def _apply_queued(self) -> None:
        while True:
            await self._filled.wait()
            turn_ends = time.perf_counter() + self.source.turn_seconds
            while self._queue:
                self._take(self._queue.popleft())
                if time.perf_counter() >= turn_ends:
                    break
            if not self._queue:
                self._filled.clear()
            self._drained.set()
            await asyncio.sleep(0)

    def _take(self, action: Apply | Void) -> None:
        if isinstance(action, Void):
            self._void(action.reason)
            return
        try:
            self._apply(action)
        except Exception:
            # Half a batch may be in the index. The stream goes on; what it has said so far is not believed.
            logger.exception("events of %s: batch %d could not be applied", self.holder, action.sequence)
            self._void(VoidReason.GAP)

    def _apply(self, action: Apply) -> None:
        self._apply_batch(action.sequence, decode_batch(action.payload))

    def _apply_batch(self, sequence: int, batch: EventBatch) -> None:
        self._stats.malformed += batch.malformed
        wanted = self.source.expected_rank
        events = batch.events
        if wanted is not None and batch.rank is not None and batch.rank != wanted:
            self._stats.other_rank += 1
            events = ()
        if 0.0 < batch.timestamp < self.source.not_before:
            events = ()
        self._stats.batches += 1
        self._stats.events += len(events)
        if batch.timestamp:
            self._stats.lag_seconds = time.time() - batch.timestamp
        told = self._rekeyer.rekey(events)
        if not self._index.apply(self.holder, sequence, told):
            self._not_taken(sequence)
        elif self._contents is not None:
            self._contents.apply(self.holder, told)

    def _not_taken(self, sequence: int) -> None:
        known = self._index.sequence(self.holder)
        if known is not None and sequence <= known:
            self._stats.stale += 1
            return
        # What came next would stand on a hole, and what the index knows may be another follower's: leave it alone.
        self._stats.refused += 1
        logger.warning("events of %s: the index does not take batch %d; nothing more is applied", self.holder, sequence)
        self.halt()

    def _void(self, reason: VoidReason) -> None:
        if reason is VoidReason.RESTART:
            self._rekeyer.clear()
        else:
            self._rekeyer.doubt()
        self._index.forget(self.holder)
        self._forget_contents()
        match reason:
            case VoidReason.GAP:
                self._stats.gaps += 1
            case VoidReason.RESTART:
                self._stats.restarts += 1
            case VoidReason.DOUBT:
                self._stats.doubted += 1
        self._on_void(reason)

    def _forget_contents(self) -> None:
        if self._contents is not None:
            self._contents.forget(self.holder)


class EventIntake(Intake):
    """An intake of what an engine publishes over ZeroMQ.

    `resume_from` goes on for another intake, whose last batch it names. The index and the (restored) rekeyer must know
    the stream up to that batch; what came after it is asked for.
    """

    def __init__(
        self,
        holder: Worker,
        source: EventSource,
        index: PrefixIndex,
        rekeyer: Rekeyer,
        context: zmq.asyncio.Context,
        on_void: Callable[[VoidReason], None] = lambda reason: None,
        *,
        resume_from: int | None = None,
        contents: ContentFeed | None = None,
    ) -> None:
        super().__init__(holder, source, index, rekeyer, on_void, contents=contents)
        self._context = context
        self._resume_from = resume_from
        self._tracker = SequenceTracker(source.waiting_batches_max)
        self._live: zmq.asyncio.Socket | None = None
        self._replay: asyncio.Task[None] | None = None
        self._reads = 0

    async def start(self) -> None:
        live = self._live = self._socket(zmq.SUB)
        try:
            live.setsockopt_string(zmq.SUBSCRIBE, self.source.topic)
            (live.bind if self.source.bind else live.connect)(self.source.live_endpoint)
        except zmq.ZMQError:
            live.close(linger=0)
            raise
        self._tasks = [asyncio.create_task(self._read_live(live)), asyncio.create_task(self._apply_queued())]
        cursor = self._resume_from
        self._do(self._tracker.start() if cursor is None else self._tracker.resume(cursor))

    async def _close(self) -> None:
        self._replay = None
        if self._live is not None:
            self._live.close(linger=0)

    def _under_way(self) -> list[asyncio.Task[None]]:
        return [*self._tasks, *([self._replay] if self._replay else [])]

    def forget(self, reread: bool) -> None:
        self._do(self._tracker.doubt(reread))

    @property
    def behind(self) -> bool:
        return self._tracker.replaying or super().behind

    # ---- reading -----------------------------------------------------------------------------------------------------

    def _socket(self, kind: int) -> zmq.asyncio.Socket:
        socket = self._context.socket(kind)
        socket.setsockopt(zmq.RCVHWM, self.source.waiting_batches_max)
        socket.setsockopt(zmq.MAXMSGSIZE, MESSAGE_BYTES_MAX)
        return socket

    async def _read_live(self, live: zmq.asyncio.Socket) -> None:
        while True:
            frames = await live.recv_multipart()
            self._stats.last_seen = time.monotonic()
            message = live_message(frames)
            if message is not None:
                self._do(self._tracker.live(message.sequence, message.payload))
            else:
                self._stats.malformed += 1
            await self._room()

    async def _read_replay(self, start: int, endpoint: str) -> None:
        complete = False
        try:
            async with asyncio.timeout(None) as silence:
                complete = await self._request_replay(start, endpoint, silence)
        except (TimeoutError, zmq.ZMQError):
            self._stats.replays_failed += 1
        # The end may ask for another replay, which takes this task's place and must not cancel it.
        self._replay = None
        self._do(self._tracker.replay_ended(complete))

    async def _request_replay(self, start: int, endpoint: str, silence: asyncio.Timeout) -> bool:
        loop = asyncio.get_running_loop()
        with self._socket(zmq.DEALER) as dealer:
            dealer.linger = 0
            dealer.connect(endpoint)
            await dealer.send_multipart(replay_request(start))
            while True:
                silence.reschedule(loop.time() + self.source.replay_timeout_seconds)
                frames = await dealer.recv_multipart()
                silence.reschedule(None)
                message = replayed_message(frames)
                if message is None:
                    self._stats.malformed += 1
                elif message.ends_replay:
                    return True
                else:
                    self._do(self._tracker.replayed(message.sequence, message.payload))
                    if self._replay is not asyncio.current_task():
                        await asyncio.sleep(0)  # ends here: another replay was asked for, and has cancelled this one
                await self._room()

    async def _room(self) -> None:
        """Wait while too much is queued, and yield now and then: a read that finds a message ready does not."""
        while len(self._queue) >= self.source.waiting_batches_max:
            self._drained.clear()
            await self._drained.wait()
        self._reads += 1
        if self._reads % _READS_PER_TURN == 0:
            await asyncio.sleep(0)

    # ---- acting ------------------------------------------------------------------------------------------------------

    def _do(self, actions: Sequence[Action]) -> None:
        for action in actions:
            if isinstance(action, Replay):
                self._start_replay(action.start)
            else:
                self._enqueue(action)

    def _start_replay(self, start: int) -> None:
        if self._replay is not None:
            self._replay.cancel()
            self._replay = None
        if self.source.replay_endpoint is None:
            self._do(self._tracker.replay_ended(complete=False))
            return
        self._stats.replays += 1
        self._replay = asyncio.create_task(self._read_replay(start, self.source.replay_endpoint))
