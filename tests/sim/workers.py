"""Simulated workers: each reads requests to their last byte and plays an answer, byte by byte, with pauses."""

import asyncio
import json
from dataclasses import dataclass, field
from enum import StrEnum
from random import Random
from typing import Any, cast

from tests.sim.answers import Answer, Fault, Framing, draw
from tests.sim.network import End, Network

ON_ITS_WAY_SECONDS = 1.0
"""What a worker has written may not have arrived so long after."""


class Door(StrEnum):
    """What becomes of a connection to a worker."""

    OPEN = "open"
    SHUT = "shut"
    HANGS = "hangs"


@dataclass(slots=True)
class Served:
    """One upstream request, as the worker saw it."""

    marker: str
    worker: str
    answer: Answer
    document: dict[str, Any]
    came_at: float
    sent: int = 0
    """Bytes of the answer on the wire."""
    ended_at: float | None = None
    """All was written, or the connection was gone."""
    lost: bool = False
    """The connection was gone before all was written."""


@dataclass(slots=True)
class Worker:
    name: str
    port: int
    random: Random
    faults: float
    stalls: bool
    """Whether it may fall silent for ever; where nothing limits silence it may not."""
    pause_seconds_max: float
    network: Network
    door: Door = Door.OPEN
    served: list[Served] = field(default_factory=list)
    connections: "dict[Connection, None]" = field(default_factory=dict)
    complaints: list[str] = field(default_factory=list)

    def listen(self) -> None:
        self.network.listen("worker", self.port, self.accept)

    async def accept(self) -> asyncio.Protocol:
        if self.door is Door.SHUT:
            raise ConnectionRefusedError(111, "Connection refused")
        if self.door is Door.HANGS:
            await asyncio.Event().wait()
        connection = Connection(self)
        self.connections[connection] = None
        return connection

    def restart(self, down_seconds: float, reset: bool) -> None:
        """Every connection goes, and for a while there is nobody to connect to."""
        self.door = Door.SHUT
        for connection in list(self.connections):
            connection.drop(reset)
        asyncio.get_running_loop().call_later(down_seconds, self._come_back)

    def hang(self, seconds: float) -> None:
        self.door = Door.HANGS
        asyncio.get_running_loop().call_later(seconds, self._come_back)

    def _come_back(self) -> None:
        self.door = Door.OPEN

    def stop(self) -> None:
        for connection in list(self.connections):
            connection.drop(reset=True)


class Connection(asyncio.Protocol):
    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._buffer = b""
        self._end: End
        self._serving: Served | None = None
        self._last: Served | None = None
        self._steps: list[tuple[float, bytes]] = []
        self._timer: asyncio.TimerHandle | None = None

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._end = cast(End, transport)

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        while self._serving is None and (request := self._take_request()) is not None:
            self._serve(request)

    def connection_lost(self, exc: Exception | None) -> None:
        self._worker.connections.pop(self, None)
        if self._timer is not None:
            self._timer.cancel()
        self._finish(lost=True)

    # Requests

    def _take_request(self) -> bytes | None:
        head, blank, rest = self._buffer.partition(b"\r\n\r\n")
        if not blank:
            return None
        lengths = [line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")]
        if len(lengths) != 1 or b"transfer-encoding" in head.lower():
            self._worker.complaints.append(f"a request with {len(lengths)} lengths: {head!r}")
            return None
        size = int(lengths[0].partition(b":")[2])
        if len(rest) < size:
            return None
        self._buffer = rest[size:]
        if self._buffer:
            self._worker.complaints.append(f"more than one request at a time: {self._buffer[:200]!r}")
        return rest[:size]

    def _serve(self, body: bytes) -> None:
        worker = self._worker
        document = json.loads(body)
        streams = bool(document.get("stream"))
        usage = bool((document.get("stream_options") or {}).get("include_usage"))
        answer = draw(worker.random, document["marker"], streams, usage, worker.faults, worker.stalls)
        self._serving = Served(document["marker"], worker.name, answer, document, self._now())
        self._last = self._serving
        worker.served.append(self._serving)
        self._steps = self._cut(answer)
        self._play()

    def _cut(self, answer: Answer) -> list[tuple[float, bytes]]:
        """(seconds to wait before, bytes)."""
        random, seconds_max = self._worker.random, self._worker.pause_seconds_max
        wire = answer.wire if answer.fault is None else answer.wire[: answer.stop]
        cuts = sorted({random.randint(0, len(wire)) for _ in range(random.choice((0, 1, 2, 6)))} | {len(wire)})
        steps, start = [], 0
        for cut in cuts:
            steps.append((random.choice((0.0, random.random() * seconds_max)), wire[start:cut]))
            start = cut
        return steps

    def _play(self) -> None:
        self._timer = None
        if self._serving is None:
            return
        if not self._steps:
            self._end_answer(self._serving.answer)
            return
        seconds, data = self._steps.pop(0)
        self._timer = asyncio.get_running_loop().call_later(seconds, self._write, data)

    def _write(self, data: bytes) -> None:
        if self._serving is not None:
            self._serving.sent += len(data)
            self._end.write(data)
            self._play()

    def _end_answer(self, answer: Answer) -> None:
        if answer.fault is Fault.STALL:
            return
        self._finish(lost=False)
        if answer.fault is Fault.RESET:
            self.drop(reset=True)
        elif answer.fault is Fault.CLOSE or answer.framing is Framing.CLOSE or not answer.keep_alive:
            self._end.close()
        elif self._worker.random.random() < 0.1:
            # A keep-alive connection that goes when nobody expects it, perhaps with a word.
            seconds = self._worker.random.random() * 2
            asyncio.get_running_loop().call_later(seconds, self._leave, self._worker.random.random() < 0.3)

    def _leave(self, with_a_word: bool) -> None:
        if self._serving is None and not self._end.is_closing():
            if with_a_word:
                self._end.write(b"HTTP/1.1 408 Request Timeout\r\nConnection: close\r\nContent-Length: 0\r\n\r\n")
            self._end.close()

    def drop(self, reset: bool) -> None:
        last = self._last
        if (
            reset
            and last is not None
            and last.ended_at is not None
            and self._now() - last.ended_at < ON_ITS_WAY_SECONDS
        ):
            # A reset may overtake what was written just before it.
            last.lost = True
        self._end.resets = reset
        self._end.abort()

    def _finish(self, lost: bool) -> None:
        serving, self._serving = self._serving, None
        if serving is not None:
            serving.ended_at, serving.lost = self._now(), lost

    def _now(self) -> float:
        return asyncio.get_running_loop().time()
