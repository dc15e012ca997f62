"""Publishes a worker's KV events over ZeroMQ, with replay, on the wire as vLLM and SGLang do.

Two sockets, both bound: a PUB socket that sends each batch as `[topic, sequence (u64 BE), payload]`, and a ROUTER
socket that sends again what a subscriber missed. A subscriber asks `[b"", first sequence (8 bytes BE)]` from a DEALER
and is answered batch by batch, in one of two framings, ended by sequence -1:

    V4   [b"", topic, sequence, payload] ... [b"", b"", ff*8, b""]      vLLM since 0.26
    V3   [b"", sequence, payload] ...        [b"", ff*8, b""]           older vLLM, SGLang

Only the last `buffer_batches` batches can be replayed; whoever asks for older ones sees the first sequence number
jump. PUB drops what a slow subscriber does not take: that is a gap too, and replay mends it.
"""

import logging
import struct
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, NamedTuple

import zmq

from cachecore.events import Dialect, EventBatch, encode_batch

logger = logging.getLogger(__name__)

END_OF_REPLAY = b"\xff" * 8
_SEQUENCE = struct.Struct(">Q")
_LINGER_MS = 200
_STOP = b"stop"


class ReplayFraming(StrEnum):
    V4 = "v4"
    V3 = "v3"

    @classmethod
    def of(cls, dialect: Dialect) -> "ReplayFraming":
        """The framing of the engines that speak `dialect` today."""
        return cls.V3 if dialect is Dialect.SGLANG else cls.V4


@dataclass(frozen=True, slots=True)
class PublisherConfig:
    """Where and how to publish. Port 0 in an endpoint binds a free port."""

    endpoint: str = "tcp://127.0.0.1:0"
    replay_endpoint: str | None = "tcp://127.0.0.1:0"
    topic: str = "kv-events"
    dialect: Dialect = Dialect.VLLM_MAP
    framing: ReplayFraming = ReplayFraming.V4
    buffer_batches: int = 10_000
    hwm: int = 100_000
    """Batches ZeroMQ queues for a slow subscriber before it drops."""


class Sequenced(NamedTuple):
    """A batch in its stream."""

    sequence: int
    payload: bytes


class EventPublisher:
    """One event stream. `publish` may be called from any thread; it never blocks on a subscriber.

    Raises `zmq.ZMQError` when an endpoint cannot be bound. Close it when done.
    """

    def __init__(self, config: PublisherConfig | None = None, context: "zmq.Context[Any] | None" = None) -> None:
        self.config = config or PublisherConfig()
        self._context = context or zmq.Context()
        self._owns_context = context is None
        self._topic = self.config.topic.encode()
        self._lock = threading.Lock()
        self._next_sequence = 0
        self._buffer: deque[Sequenced] = deque(maxlen=self.config.buffer_batches)
        self._closed = False
        self._thread: threading.Thread | None = None
        self.replay_endpoint: str | None = None
        self._live = self._context.socket(zmq.PUB)
        try:
            self._live.setsockopt(zmq.SNDHWM, self.config.hwm)
            self.endpoint = _bind(self._live, self.config.endpoint)
            if self.config.replay_endpoint is not None:
                self._start_replay(self.config.replay_endpoint)
        except BaseException:
            self.close()
            raise

    @property
    def next_sequence(self) -> int:
        return self._next_sequence

    def publish(self, batch: EventBatch) -> int:
        """Send a batch; returns its sequence number. Does nothing (and returns -1) once closed."""
        payload = encode_batch(batch, self.config.dialect)
        with self._lock:
            if self._closed:
                return -1
            item = Sequenced(self._next_sequence, payload)
            self._next_sequence += 1
            self._emit(item)
        return item.sequence

    def _emit(self, item: Sequenced) -> None:
        """What happens to a numbered batch. Called under the lock."""
        self._buffer.append(item)
        self._send(item)

    def _send(self, item: Sequenced) -> None:
        self._live.send_multipart((self._topic, _SEQUENCE.pack(item.sequence), item.payload), zmq.NOBLOCK)

    def describe(self, block_size_tokens: int) -> dict[str, Any]:
        """The `kv_events` block of `/server_info`."""
        return {
            "publisher": "zmq",
            "endpoint": self.endpoint,
            "replay_endpoint": self.replay_endpoint,
            "topic": self.config.topic,
            "block_size": block_size_tokens,
            "dp_size": 1,
            "dialect": self.config.dialect.value,
            "next_sequence": self._next_sequence,
        }

    def close(self) -> None:
        """Close both sockets and end the replay thread. May be called twice."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        if self._thread is not None:
            self._control.send(_STOP)
            self._thread.join()
            self._control.close(linger=0)
        self._live.close(linger=_LINGER_MS)
        if self._owns_context:
            self._context.term()

    def _start_replay(self, endpoint: str) -> None:
        router = self._context.socket(zmq.ROUTER)
        try:
            router.setsockopt(zmq.SNDHWM, 0)  # a ROUTER drops above its mark; the buffer bounds what it can be asked
            router.setsockopt(zmq.LINGER, _LINGER_MS)
            self.replay_endpoint = _bind(router, endpoint)
        except BaseException:
            router.close(linger=0)
            raise
        signal = f"inproc://publisher-{id(self)}"
        stop = self._context.socket(zmq.PAIR)
        stop.bind(signal)
        self._control = self._context.socket(zmq.PAIR)
        self._control.connect(signal)
        self._thread = threading.Thread(target=self._serve_replay, args=(router, stop), name="kv-replay", daemon=True)
        self._thread.start()

    def _serve_replay(self, router: "zmq.Socket[bytes]", stop: "zmq.Socket[bytes]") -> None:
        poller = zmq.Poller()
        poller.register(router, zmq.POLLIN)
        poller.register(stop, zmq.POLLIN)
        frame = _REPLAY_FRAMES[self.config.framing]
        try:
            while not any(socket is stop for socket, _ in poller.poll()):
                self._answer_replay(router, frame)
        finally:
            router.close()
            stop.close(linger=0)

    def _answer_replay(self, router: "zmq.Socket[bytes]", frame: "Framer") -> None:
        identity, *request = router.recv_multipart()
        if not request or len(request[-1]) != _SEQUENCE.size:
            logger.warning("a replay request of %d frames was ignored", len(request))
            return
        (first,) = _SEQUENCE.unpack(request[-1])
        with self._lock:
            items = [item for item in self._buffer if item.sequence >= first]
        for item in items:
            router.send_multipart([identity, *frame(self._topic, _SEQUENCE.pack(item.sequence), item.payload)])
        router.send_multipart([identity, *frame(b"", END_OF_REPLAY, b"")])


Framer = Callable[[bytes, bytes, bytes], list[bytes]]

_REPLAY_FRAMES: dict[ReplayFraming, Framer] = {
    ReplayFraming.V4: lambda topic, sequence, payload: [b"", topic, sequence, payload],
    ReplayFraming.V3: lambda _topic, sequence, payload: [b"", sequence, payload],
}


def _bind(socket: "zmq.Socket[bytes]", endpoint: str) -> str:
    """Bind, and name the endpoint as a subscriber on this machine reaches it."""
    socket.bind(endpoint)
    bound = socket.getsockopt(zmq.LAST_ENDPOINT)
    return bytes(bound).rstrip(b"\0").decode().replace("//0.0.0.0:", "//127.0.0.1:")
