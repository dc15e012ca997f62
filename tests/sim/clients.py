"""Simulated clients: each has a connection, asks for a few things on it, reads by the book, and may leave at any time.

Answers are read by h11, which knows nothing of the gateway.
"""

import asyncio
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from random import Random
from typing import cast

import h11

from tests.sim.answers import chunk
from tests.sim.network import End


class Leaving(StrEnum):
    CLOSE = "close"
    RESET = "reset"
    HALF = "half"
    """Only the client's input ends: it still reads."""


class Sort(StrEnum):
    """What kind of request it is; all but the first have one right answer, which the gateway gives itself."""

    GOOD = "good"
    NO_JSON = "no json"
    NO_MODEL = "no model"
    BAD_HEAD = "bad head"
    BAD_CHUNK = "bad chunk"
    TOO_LARGE = "too large"
    COLD = "cold"


STATUSES = {
    Sort.NO_JSON: 400,
    Sort.NO_MODEL: 404,
    Sort.BAD_HEAD: 400,
    Sort.BAD_CHUNK: 400,
    Sort.TOO_LARGE: 413,
    Sort.COLD: 200,
}
CLOSING = {Sort.BAD_HEAD, Sort.BAD_CHUNK, Sort.TOO_LARGE}
"""After these nothing can be asked any more."""
BODY_BYTES_MAX = 100_000


@dataclass(slots=True)
class Asked:
    """One request, and what came of it."""

    marker: str
    sort: Sort
    wire: bytes
    head_bytes: int
    document: dict[str, object]
    streams: bool
    wants_usage: bool
    expects: bool
    """The body waits for a 100."""
    sent: int = 0
    sent_at: float | None = None
    """Its last byte was written."""
    interim: list[int] = field(default_factory=list)
    status: int | None = None
    headers: dict[bytes, bytes] = field(default_factory=dict)
    content: bytes = b""
    complete: bool = False
    ended_at: float | None = None


@dataclass(frozen=True, slots=True)
class Habits:
    """What a client is like."""

    starts_at: float
    http10: bool
    keep_alive: bool
    pipelines: bool
    leaving: Leaving | None
    leaves_at: float
    """Seconds after its start."""
    leaves_after_bytes: int | None
    """Or when so much has been read."""
    pieces_max: int
    """Of one request."""
    pause_seconds_max: float
    """Between pieces, and between requests."""
    reads_slowly: float
    """How often it pauses after a read."""
    patience_seconds: float


def draw_habits(random: Random) -> Habits:
    leaving = random.choice([None, None, None, *Leaving])
    return Habits(
        starts_at=random.random() * 5,
        http10=random.random() < 0.12,
        keep_alive=random.random() < 0.85,
        pipelines=random.random() < 0.25,
        leaving=leaving,
        leaves_at=random.expovariate(1 / 0.8),
        leaves_after_bytes=random.randint(1, 4000) if leaving is not None and random.random() < 0.5 else None,
        pieces_max=random.choice((1, 1, 2, 8)),
        pause_seconds_max=random.choice((0.0, 0.05, 0.5)),
        reads_slowly=random.choice((0.0, 0.0, 0.0, 0.5)),
        patience_seconds=40.0,
    )


def draw_request(random: Random, marker: str, http10: bool, keep_alive: bool) -> Asked:
    sort = Sort.GOOD if random.random() < 0.88 else random.choice(list(Sort))
    streams = random.random() < 0.6
    chat = random.random() < 0.8
    wants_usage = streams and random.random() < 0.3
    document: dict[str, object] = {"marker": marker, "model": "none" if sort is Sort.NO_MODEL else "m"}
    text = "p" * int(random.expovariate(1 / random.choice((100, 100, 2000))))
    if chat:
        document["messages"] = [{"role": "user", "content": f"{marker} {text}"}]
    else:
        document["prompt"] = f"{marker} {text}"
    if streams or random.random() < 0.2:
        document["stream"] = streams
    if wants_usage:
        document["stream_options"] = {"include_usage": True}
    if random.random() < 0.3:
        document["max_tokens"] = random.randint(1, 50)
    body = json.dumps(document, separators=random.choice((None, (",", ":")))).encode()
    if sort is Sort.NO_JSON:
        body = body[:-1]
    path = b"/v1/chat/completions" if chat else b"/v1/completions"
    if sort is Sort.COLD:
        path = b"/cold"
    expects = not http10 and random.random() < 0.05
    wire, head_bytes = _on_the_wire(random, sort, path, body, marker, (http10, keep_alive, expects))
    return Asked(marker, sort, wire, head_bytes, document, streams, wants_usage, expects)


def _on_the_wire(
    random: Random, sort: Sort, path: bytes, body: bytes, marker: str, manner: tuple[bool, bool, bool]
) -> tuple[bytes, int]:
    http10, keep_alive, expects = manner
    chunked = not http10 and (sort is Sort.BAD_CHUNK or random.random() < 0.15)
    if sort is Sort.BAD_CHUNK and http10:
        body = body[:-1]  # there are no chunks there: no JSON, then
    lines = [b"POST %b HTTP/1.%d" % (path, 0 if http10 else 1), b"Host: gateway"]
    if sort is Sort.BAD_HEAD:
        lines.append(b"Broken header")
    lines += [b"Content-Type: application/json", b"X-Request-Id: %b" % marker.encode()]
    if http10 and keep_alive:
        lines.append(b"Connection: keep-alive")
    elif not keep_alive:
        lines.append(b"Connection: close")
    if expects:
        lines.append(b"Expect: 100-continue")
    if sort is Sort.TOO_LARGE:
        body = body.ljust(BODY_BYTES_MAX + 10)
    if chunked:
        lines.append(b"Transfer-Encoding: chunked")
        cut = random.randrange(len(body))
        pieces = [piece for piece in (body[:cut], body[cut:]) if piece]
        body = b"".join(map(chunk, pieces)) + b"0\r\n\r\n"
        if sort is Sort.BAD_CHUNK:
            body = chunk(pieces[0]) + b"zz\r\n" + body
    else:
        lines.append(b"Content-Length: %d" % len(body))
    head = b"\r\n".join(lines) + b"\r\n\r\n"
    return head + body, len(head)


class Client(asyncio.Protocol):
    def __init__(self, name: str, random: Random, habits: Habits, requests: list[Asked]) -> None:
        self.name = name
        self.habits = habits
        self.requests = requests
        self.complaints: list[str] = []
        self.left_at: float | None = None
        """It will read no more."""
        self.half_left_at: float | None = None
        self.gateway_ended_at: float | None = None
        self.reset = False
        self.finished = False
        self.end: End
        self._random = random
        self._asking = 0
        self._answering = 0
        self._received_bytes = 0
        self._rest: list[tuple[float, bytes]] = []
        """What of the requests begun has not been sent: (seconds to wait before, bytes)."""
        self._sending = self._waits_for_continue = False
        self._timers: set[asyncio.TimerHandle] = set()
        self._reader = _reader()

    @property
    def undetectable(self) -> bool:
        """It closed its connection: nothing tells that from a half-closed one until something is written to it."""
        return self.left_at is not None and not self.end.resets

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.end = cast(End, transport)
        habits = self.habits
        if habits.leaving is not None and habits.leaves_after_bytes is None:
            self._later(habits.leaves_at, self._leave)
        self._later(habits.patience_seconds, self._lose_patience)
        self._ask()

    def data_received(self, data: bytes) -> None:
        self._received_bytes += len(data)
        self._read(data)
        after = self.habits.leaves_after_bytes
        if after is not None and self._received_bytes >= after:
            self._leave()
        elif self._random.random() < self.habits.reads_slowly:
            self.end.pause_reading()
            self._later(self._random.random() * 2, self.end.resume_reading)

    def eof_received(self) -> bool:
        self.gateway_ended_at = self._now()
        self._read(b"")
        # Half a client's request may be on its way; whoever ends first has ended.
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        self.reset = exc is not None
        self.gateway_ended_at = self.gateway_ended_at or self._now()
        self.finished = True
        for timer in self._timers:
            timer.cancel()

    # Asking

    def _ask(self) -> None:
        """Begin the next request; all of them where it pipelines."""
        if self._asking == len(self.requests) or self.end.is_closing() or self.half_left_at is not None:
            return
        asked = self.requests[self._asking]
        self._asking += 1
        random, seconds_max = self._random, self.habits.pause_seconds_max
        count = random.randint(1, self.habits.pieces_max)
        cuts = {random.randint(0, len(asked.wire)) for _ in range(count - 1)} | {len(asked.wire)}
        if asked.expects:
            cuts.add(asked.head_bytes)
        start, steps = 0, []
        for cut in sorted(cuts - {0}):
            steps.append((random.random() * seconds_max if start else 0.0, asked.wire[start:cut]))
            start = cut
        self._rest += steps
        self._send_next()

    def _send_next(self) -> None:
        if self._rest and not self._sending and not self._waits_for_continue:
            self._sending = True
            seconds, data = self._rest.pop(0)
            self._later(seconds, self._send, data)

    def _send(self, data: bytes) -> None:
        self._sending = False
        if self.end.is_closing() or self.half_left_at is not None:
            return
        self.end.write(data)
        asked = self.requests[self._asking - 1]
        asked.sent += len(data)
        if asked.sent == len(asked.wire):
            asked.sent_at = self._now()
            if self.habits.pipelines:
                self._ask()
        elif asked.expects and asked.sent == asked.head_bytes:
            self._waits_for_continue = True
            self._later(0.3, self._go_on)
            return
        self._send_next()

    def _go_on(self) -> None:
        if self._waits_for_continue:
            self._waits_for_continue = False
            self._send_next()

    # Reading

    def _read(self, data: bytes) -> None:
        try:
            self._reader.receive_data(data)
            self._take_events()
        except h11.RemoteProtocolError as error:
            if data:
                self.complaints.append(f"the gateway broke HTTP: {error}; {data[:200]!r}")

    def _take_events(self) -> None:
        while True:
            event = self._reader.next_event()
            if event is h11.NEED_DATA or event is h11.PAUSED or isinstance(event, h11.ConnectionClosed):
                return
            if self._answering == self._asking:
                self.complaints.append(f"an answer to nothing: {event}")
                return
            asked = self.requests[self._answering]
            if isinstance(event, h11.InformationalResponse):
                asked.interim.append(event.status_code)
                if event.status_code == 100:
                    self._go_on()
            elif isinstance(event, h11.Response):
                asked.status = event.status_code
                asked.headers = dict(event.headers)
            elif isinstance(event, h11.Data):
                asked.content += bytes(event.data)
            elif isinstance(event, h11.EndOfMessage):
                self._answered(asked)

    def _answered(self, asked: Asked) -> None:
        asked.complete, asked.ended_at = True, self._now()
        self._answering += 1
        rest, closed = self._reader.trailing_data
        self._reader = _reader()
        if self._answering == len(self.requests) and not self._rest:
            if not closed:
                self.end.close()
            return
        if rest:
            self._reader.receive_data(rest)
        if not self.habits.pipelines:
            self._later(self._random.random() * self.habits.pause_seconds_max, self._ask)

    # Leaving

    def _leave(self) -> None:
        if self.end.is_closing() or self.half_left_at is not None:
            return
        if self.habits.leaving is Leaving.HALF:
            self.half_left_at = self._now()
            self.end.write_eof()
            return
        self.left_at = self._now()
        self.end.resets = self.habits.leaving is Leaving.RESET
        self.end.abort()

    def _lose_patience(self) -> None:
        if not self.end.is_closing():
            self.complaints.append(f"{self.name} was never answered")
            self.left_at = self._now()
            self.end.resets = True
            self.end.abort()

    def _later(self, seconds: float, act: Callable[..., None], *arguments: object) -> None:
        # Those that have gone off are cancelled with the others, which does nothing.
        self._timers.add(asyncio.get_running_loop().call_later(seconds, act, *arguments))

    def _now(self) -> float:
        return asyncio.get_running_loop().time()


def _reader() -> h11.Connection:
    """Reads one answer."""
    connection = h11.Connection(h11.CLIENT, max_incomplete_event_size=100_000)
    request = h11.Request(method="POST", target="/", headers=[("host", "gateway"), ("content-length", "0")])
    connection.send(request)
    connection.send(h11.EndOfMessage())
    return connection
