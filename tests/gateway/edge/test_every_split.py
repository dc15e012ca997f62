"""Requests and answers cut at every byte: what the gateway makes of them does not depend on how they come.

On a simulated loop and network, where a cut is a cut: two writes at different times are two reads.
"""

import asyncio
from collections.abc import Iterable, Sequence
from itertools import pairwise
from random import Random
from typing import Any, NamedTuple

import h11
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from uvicorn.server import ServerState

from gateway.edge.contract import Deadlines, Ending
from gateway.edge.server import Edge, EdgeLimits, Inbound
from gateway.edge.upstream import UpstreamPool
from tests.gateway.edge.conftest import Handler
from tests.sim.loop import SimulatedLoop
from tests.sim.network import Network, Weather
from tests.sim.world import uvicorn_config

Piece = bytes | None
"""None ends what is written."""


class Seen(NamedTuple):
    requests: list[tuple[bytes, str, bytes]]
    """(method, path, body) of those that reached the pipeline."""
    answers: bytes
    """All that the client got."""
    ended: bool
    """And then the connection closed."""
    endings: list[Ending]
    first_bytes: int
    tails: list[bytes]


class _Writer(asyncio.Protocol):
    """Writes pieces, one at a time, and keeps what comes."""

    def __init__(self, pieces: Iterable[Piece]) -> None:
        self.pieces = list(pieces)
        self.received = b""
        self.ended = False

    def connection_made(self, transport: Any) -> None:
        self.transport = transport

    def write_all(self) -> None:
        loop = asyncio.get_running_loop()
        for number, piece in enumerate(self.pieces):
            loop.call_later(0.01 * number, self._write, piece)

    def _write(self, piece: Piece) -> None:
        if piece is None:
            self.transport.close()
        else:
            self.transport.write(piece)

    def data_received(self, data: bytes) -> None:
        self.received += data

    def eof_received(self) -> None:
        self.ended = True


class _Worker(_Writer):
    """Answers once a request has come whole."""

    def data_received(self, data: bytes) -> None:
        self.received += data
        if self.received.endswith(b"}"):
            self.received = b""
            self.write_all()


class _Answering(Handler):
    """Whose messages are answered at once, by an error that the body names, where no worker is asked."""

    def __init__(self, strips_usage: bool) -> None:
        super().__init__()
        self.strips_usage = strips_usage
        self.seen: list[tuple[bytes, str, bytes]] = []

    def begin(self, inbound: Inbound) -> Any:
        self.seen.append((inbound.head.method, inbound.path, inbound.body))
        return super().begin(inbound)


def play(request: Sequence[Piece], answer: Sequence[Piece], strips_usage: bool = False) -> Seen:
    loop = SimulatedLoop()
    try:
        return loop.run_until_complete(_play(loop, request, answer, strips_usage))
    finally:
        loop.close()


async def _play(loop: SimulatedLoop, request: Sequence[Piece], answer: Sequence[Piece], strips_usage: bool) -> Seen:
    network = loop.network = Network(loop, Random(0), Weather(latency_seconds_max=0.0), lambda *_: None)

    async def accept() -> asyncio.Protocol:
        return _Worker(answer)

    network.listen("worker", 1, accept)
    handler, pool = _Answering(strips_usage), UpstreamPool("worker", 1)
    handler.pools.append(pool)
    edge = Edge(handler, EdgeLimits(100_000, 9, 60.0, 60.0), Deadlines(1.0, None, None))
    client = _Writer(request)
    edge_protocol = edge.protocol(config=uvicorn_config(), server_state=ServerState(), app_state={})
    network.join(client, edge_protocol, "client")
    client.write_all()
    await asyncio.sleep(
        0.01 * (len(request) + len(answer) + 3) * (1 + b"".join(filter(None, request)).count(b"HTTP/1"))
    )
    ends = [end for journey in handler.journeys for end in journey.ends]
    first_bytes = sum(journey.first_bytes for journey in handler.journeys)
    return Seen(
        handler.seen,
        client.received,
        client.ended,
        [end.ending for end in ends],
        first_bytes,
        [end.tail for end in ends],
    )


def cut(data: bytes, *positions: int) -> list[Piece]:
    bounds = [0, *sorted(positions), len(data)]
    return [data[start:end] for start, end in pairwise(bounds) if start != end]


def chunk(data: bytes, extension: bytes = b"") -> bytes:
    return b"%x%b\r\n%b\r\n" % (len(data), extension, data)


# Requests

_LENGTH = b'POST /v1/a HTTP/1.1\r\nHost: h\r\nX-A:\t b \r\nContent-Length: 7\r\n\r\n{"a":1}'
_CHUNKED = (
    b"\r\nPOST /v1//b/?x=1 HTTP/1.1\r\nhost: h\r\ntransfer-encoding: Chunked\r\n\r\n"
    + chunk(b'{"b"', b";name=value")
    + chunk(b":2}")
    + b"0;last\r\nX-Sum: 1\r\n\r\n"
)
_REFUSED = b"POST /v1/c HTTP/1.1\r\nHost: h\r\nContent-Length: 6\r\n\r\nrefuse"
_COLD = b"POST /cold HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n" + chunk(b"cold") + b"0\r\nA: b\r\n\r\n"
_LAST = b'POST /v1/d HTTP/1.0\r\nConnection: close\r\nContent-Length: 7\r\n\r\n{"d":4}'
_PIPELINE = _LENGTH + _CHUNKED + _REFUSED + _COLD + _LAST
_OK = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"
_MESSAGES = [
    (b"POST", "/v1/a", b'{"a":1}'),
    (b"POST", "/v1/b", b'{"b":2}'),
    (b"POST", "/v1/c", b"refuse"),
    (b"POST", "/v1/d", b'{"d":4}'),
]
MALFORMED = [
    b"POST /v1/a HTTP/1.1\r\nHost: h\r\nContent-Length : 7\r\n\r\n",
    b"POST /v1/a HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nabXX0\r\n\r\n",
    b"POST /v1/a HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n+1\r\na\r\n0\r\n\r\n",
    b"POST /v1/a HTTP/1.1\nHost: h\nContent-Length: 7\n\n\r\n\r\n",
    b"POST /v1/a HTTP/1.1\r\nHost: h\r\nContent-Length: 200000\r\n\r\n",
    b"POST /cold HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n1\r\na\r\n0\r\nA: b\n\r\n",
]


def test_a_pipeline_of_requests_cut_at_every_byte() -> None:
    whole = play([_PIPELINE], [_OK])
    assert whole.requests == _MESSAGES
    assert whole.answers.count(b"HTTP/1.1 200 OK") == 4
    assert whole.ended
    for position in range(1, len(_PIPELINE)):
        assert play(cut(_PIPELINE, position), [_OK]) == whole, position


def test_a_pipeline_of_requests_byte_by_byte() -> None:
    assert play(cut(_PIPELINE, *range(len(_PIPELINE))), [_OK]) == play([_PIPELINE], [_OK])


@pytest.mark.parametrize("request_bytes", MALFORMED)
def test_what_is_refused_is_refused_however_it_comes(request_bytes: bytes) -> None:
    whole = play([request_bytes], [_OK])
    assert whole.requests == []
    assert whole.answers.startswith((b"HTTP/1.1 400 ", b"HTTP/1.1 413 "))
    assert whole.ended
    for position in range(1, len(request_bytes), 2):
        assert play(cut(request_bytes, position), [_OK]) == whole, position


@given(st.integers(0, 2**32))
@settings(max_examples=30)
def test_a_pipeline_of_requests_cut_anywhere(seed: int) -> None:
    random = Random(seed)
    positions = [random.randrange(1, len(_PIPELINE)) for _ in range(random.randrange(30))]
    assert play(cut(_PIPELINE, *positions), [_OK]) == play([_PIPELINE], [_OK])


# Answers

_TEXT = b'data: {"choices":[{"index":0,"delta":{"content":"x"}}]}\n\n'
_USAGE = b'data: {"choices":[],"usage":{"prompt_tokens":9,"completion_tokens":2}}\n\n'
_EVENTS = [b": keep-alive\n\n", _TEXT, _USAGE, b"data: [DONE]\n\n"]
_CRLF = [event.replace(b"\n", b"\r\n") for event in _EVENTS]
_STREAM = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n"
_CHUNKS = b"transfer-encoding: chunked\r\n\r\n"
_INTERIM = b"HTTP/1.1 102 Processing\r\nx: y\r\n\r\nHTTP/1.1 103 Early Hints\r\n\r\n"
_DOCUMENT = b'{"choices":[{"text":"x"}],"usage":{"prompt_tokens":9,"completion_tokens":2}}'


def _in_chunks_of(size: int, content: bytes) -> bytes:
    """Chunks that know nothing of events."""
    return b"".join(chunk(content[at : at + size]) for at in range(0, len(content), size)) + b"0\r\n\r\n"


ANSWERS: dict[str, tuple[bytes, bytes, bool]] = {
    "length": (b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(_DOCUMENT), _DOCUMENT), _DOCUMENT, False),
    "interim": (_INTERIM + b"HTTP/1.1 200 \r\ncontent-length: 2\r\n\r\nok", b"ok", False),
    "chunks": (_STREAM + _CHUNKS + b"".join(map(chunk, _EVENTS)) + b"0\r\n\r\n", b"".join(_EVENTS), True),
    "trailers": (
        _STREAM + _CHUNKS + b"".join(chunk(event, b";a=b") for event in _CRLF) + b"0\r\nX-Sum: 1\r\n\r\n",
        b"".join(_CRLF),
        True,
    ),
    "odd chunks": (_STREAM + _CHUNKS + _in_chunks_of(11, b"".join(_EVENTS)), b"".join(_EVENTS), True),
    "until close": (_STREAM + b"\r\n" + b"".join(_EVENTS), b"".join(_EVENTS), True),
    "a document until close": (b"HTTP/1.0 200 OK\r\n\r\n" + _DOCUMENT, _DOCUMENT, False),
}
HTTP11 = b"POST /v1/a HTTP/1.1\r\nHost: h\r\nContent-Length: 2\r\n\r\n{}"
HTTP10 = b"POST /v1/a HTTP/1.0\r\nConnection: keep-alive\r\nContent-Length: 2\r\n\r\n{}"


def read(answer: bytes, closed: bool) -> tuple[int, bytes]:
    """(status, content) of a complete answer, as another reader has it."""
    reader = h11.Connection(h11.CLIENT)
    reader.send(h11.Request(method="GET", target="/", headers=[("host", "h")]))
    reader.send(h11.EndOfMessage())
    reader.receive_data(answer)
    if closed:
        reader.receive_data(b"")
    status, content = 0, b""
    while not isinstance(event := reader.next_event(), h11.EndOfMessage):
        assert event is not h11.NEED_DATA, "the answer is not complete"
        if isinstance(event, h11.Response):
            status = event.status_code
        elif isinstance(event, h11.Data):
            content += bytes(event.data)
    return status, content


def check(name: str, request: bytes, strips_usage: bool, positions: Iterable[int]) -> None:
    wire, content, streams = ANSWERS[name]
    end: list[Piece] = [None] if "close" in name else []
    seen = play([request], [*cut(wire, *positions), *end], strips_usage)
    if strips_usage and streams:
        content = content.replace(_USAGE, b"").replace(_USAGE.replace(b"\n", b"\r\n"), b"")
    assert read(seen.answers, seen.ended) == (200, content)
    assert (seen.endings, seen.first_bytes) == ([Ending.COMPLETE], 1)
    if strips_usage and streams:
        assert b'"prompt_tokens":9' in seen.tails[0]


@pytest.mark.parametrize("strips_usage", [False, True], ids=["as it is", "stripped"])
@pytest.mark.parametrize("name", ANSWERS)
def test_an_answer_cut_at_every_byte(name: str, strips_usage: bool) -> None:
    for position in range(1, len(ANSWERS[name][0])):
        check(name, HTTP11, strips_usage, [position])


@pytest.mark.parametrize("request_bytes", [HTTP11, HTTP10], ids=["1.1", "1.0"])
@pytest.mark.parametrize("name", ANSWERS)
def test_an_answer_byte_by_byte(name: str, request_bytes: bytes) -> None:
    for strips_usage in (False, True):
        check(name, request_bytes, strips_usage, range(1, len(ANSWERS[name][0])))


@given(st.sampled_from(sorted(ANSWERS)), st.booleans(), st.booleans(), st.integers(0, 2**32))
@settings(max_examples=60)
def test_an_answer_cut_anywhere(name: str, http10: bool, strips_usage: bool, seed: int) -> None:
    random, size = Random(seed), len(ANSWERS[name][0])
    positions = [random.randrange(1, size) for _ in range(random.randrange(12))]
    check(name, HTTP10 if http10 else HTTP11, strips_usage, positions)


@pytest.mark.parametrize("name", [name for name in ANSWERS if "close" not in name])
def test_an_answer_that_ends_too_early_never_ends_well(name: str) -> None:
    """Wherever the worker leaves: the client gets an error, or sees that the end is missing."""
    wire, content, _ = ANSWERS[name]
    for stop in range(len(wire)):
        seen = play([HTTP11], [wire[:stop], None] if stop else [None])
        assert Ending.COMPLETE not in seen.endings, stop
        try:
            status, got = read(seen.answers, seen.ended)
        except (AssertionError, h11.RemoteProtocolError):
            assert seen.ended, stop
            continue
        assert (status, got != content) in {(502, True), (503, True)}, stop
