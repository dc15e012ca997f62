"""One request and its answer over real sockets: what is spliced, what is retried, and how an answer breaks."""

import asyncio
import json
from typing import Any

import pytest

from gateway.edge.contract import Ending
from gateway.reliability.failures import BODY_CUT, CONNECT_REFUSED, CONNECTION_LOST, CONNECTION_STALE

CLOSE, RESET, HANG = "close", "reset", "hang"
OK = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"
CHUNKED_HEAD = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
STREAM_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
CHUNKS = b"5;a=b\r\nhello\r\n7\r\n, world\r\n0\r\nx-sum: 1\r\n\r\n"


def event(text: str) -> bytes:
    data = f'data: {{"text":"{text}"}}\n\n'.encode()
    return b"%x\r\n%b\r\n" % (len(data), data)


def byte_by_byte(data: bytes) -> list[Any]:
    return [piece for byte in data for piece in (bytes([byte]), 0.0)]


# Splicing


async def test_an_answer_with_a_length(gateway: Any) -> None:
    await gateway.worker([b"HTTP/1.1 201 Made\r\nX-A: 1\r\nX-a: 2\r\nContent-Length: 5\r\n\r\nhello"])
    client = await gateway.client()
    client.post(b'{"a":1}')
    answer = await client.answer()
    assert (answer.status, answer.content, answer.complete) == (201, b"hello", True)
    assert [value for name, value in answer.headers if name == b"x-a"] == [b"1", b"2"]
    assert answer.get(b"content-length") == b"5"
    assert answer.get(b"x-gateway") == b"yes"
    assert answer.get(b"connection") is None
    assert gateway.journey.ends == [(Ending.COMPLETE, 201, 5, b"hello")]
    assert gateway.journey.first_bytes == 1
    assert gateway.workers[0].requests[0].body == b'{"a":1}'


async def test_chunks_pass_as_they_are(gateway: Any) -> None:
    await gateway.worker([CHUNKED_HEAD + CHUNKS])
    client = await gateway.client()
    client.post()
    answer = await client.answer()
    assert answer.wire == CHUNKS
    assert answer.content == b"hello, world"
    assert gateway.journey.ends == [(Ending.COMPLETE, 200, len(CHUNKS), CHUNKS)]


@pytest.mark.parametrize("head", [CHUNKED_HEAD, STREAM_HEAD])
async def test_chunks_that_come_byte_by_byte(gateway: Any, head: bytes) -> None:
    await gateway.worker(byte_by_byte(head + CHUNKS))
    client = await gateway.client()
    for _ in range(2):
        client.post()
        assert (await client.answer()).wire == CHUNKS
    assert len(gateway.workers[0].connections) == 1
    assert [journey.ends[0].body_bytes for journey in gateway.handler.journeys] == [len(CHUNKS)] * 2


async def test_a_body_that_ends_with_the_connection_is_framed(gateway: Any) -> None:
    await gateway.worker([b"HTTP/1.1 200 OK\r\n\r\n", b"hel", 0.01, b"lo", CLOSE])
    client = await gateway.client()
    for _ in range(2):
        client.post()
        answer = await client.answer()
        assert (answer.content, answer.complete) == (b"hello", True)
        assert answer.get(b"transfer-encoding") == b"chunked"
    assert len(gateway.workers[0].connections) == 2


async def test_an_empty_body_that_ends_with_the_connection(gateway: Any) -> None:
    """Of an error: an answer would be missing."""
    await gateway.worker([b"HTTP/1.0 500 Oh\r\n\r\n", CLOSE])
    client = await gateway.client()
    client.post()
    answer = await client.answer()
    assert (answer.status, answer.wire, answer.complete) == (500, b"0\r\n\r\n", True)
    assert gateway.journey.first_bytes == 0


@pytest.mark.parametrize(
    "head",
    [
        b"HTTP/1.1 204 No Content\r\n\r\n",
        b"HTTP/1.1 204 No Content\r\ncontent-length: 0\r\n\r\n",
        b"HTTP/1.1 304 Not Modified\r\ncontent-length: 12\r\n\r\n",
    ],
)
async def test_statuses_without_a_body(gateway: Any, head: bytes) -> None:
    await gateway.worker([head], [OK])
    client = await gateway.client()
    client.post()
    answer = await client.answer()
    assert answer.get(b"content-length") is None
    assert answer.get(b"transfer-encoding") is None
    client.post()
    assert (await client.answer()).content == b"ok"


async def test_interim_answers_are_skipped(gateway: Any) -> None:
    interim = b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nlink: x\r\n\r\n"
    await gateway.worker([interim + OK], byte_by_byte(interim + OK))
    client = await gateway.client()
    for _ in range(2):
        client.post()
        answer = await client.answer()
        assert (answer.status, answer.content, answer.interim) == (200, b"ok", [])


async def test_hop_by_hop_headers_of_a_worker_stay_behind(gateway: Any) -> None:
    await gateway.worker(
        [
            b"HTTP/1.1 200 OK\r\nconnection: X-Foo\r\nx-foo: 1\r\nkeep-alive: timeout=1\r\nx-request-id: theirs\r\n"
            b"proxy-authenticate: x\r\nupgrade: h2c\r\nx-bar: 2\r\ncontent-length: 2\r\n\r\nok"
        ]
    )
    client = await gateway.client()
    client.post(b"{}", b"/v1/x", b"Connection: keep-alive, X-Foo", b"X-Foo: 1", b"TE: trailers", b"X-Bar: 2")
    answer = await client.answer()
    assert answer.headers == [(b"x-bar", b"2"), (b"x-gateway", b"yes"), (b"content-length", b"2")]
    names = {name for name, _ in gateway.workers[0].requests[0].headers}
    assert names == {b"host", b"x-bar", b"content-length"}


async def test_event_streams_are_not_to_be_buffered(gateway: Any) -> None:
    await gateway.worker(
        [STREAM_HEAD + b"0\r\n\r\n"],
        [STREAM_HEAD.replace(b"\r\n\r\n", b"\r\ncache-control: no-store\r\nx-accel-buffering: yes\r\n\r\n") + CHUNKS],
    )
    client = await gateway.client()
    client.post()
    answer = await client.answer()
    assert (answer.get(b"cache-control"), answer.get(b"x-accel-buffering")) == (b"no-cache", b"no")
    client.post()
    answer = await client.answer()
    assert (answer.get(b"cache-control"), answer.get(b"x-accel-buffering")) == (b"no-store", b"yes")


async def test_compressed_errors_pass_untouched(gateway: Any) -> None:
    body = b"\x1f\x8b\x08\x00rest"
    head = b"HTTP/1.1 429 Too Many\r\ncontent-encoding: gzip\r\nretry-after: 7\r\ncontent-length: %d\r\n\r\n" % len(
        body
    )
    await gateway.worker([head + body])
    client = await gateway.client()
    client.post()
    answer = await client.answer()
    assert (answer.status, answer.content) == (429, body)
    assert (answer.get(b"content-encoding"), answer.get(b"retry-after")) == (b"gzip", b"7")


async def test_the_tail_spans_what_engines_write_last(gateway: Any) -> None:
    """vLLM's usage, its `[DONE]` and the end of the chunks, each in a read of its own."""
    usage, done = event("usage"), event("[DONE]")
    await gateway.worker([CHUNKED_HEAD, event("a"), 0.02, usage, 0.02, done, 0.02, b"0\r\n\r\n"])
    client = await gateway.client()
    client.post()
    await client.answer()
    assert gateway.journey.ends[0].tail == usage + done + b"0\r\n\r\n"


# HTTP/1.0 clients


@pytest.mark.parametrize("script", [[CHUNKED_HEAD + CHUNKS], byte_by_byte(CHUNKED_HEAD + CHUNKS)])
async def test_chunks_are_unpacked_for_http10(gateway: Any, script: list[Any]) -> None:
    await gateway.worker(script)
    client = await gateway.client()
    client.send(b"POST /v1/x HTTP/1.0\r\nConnection: keep-alive\r\nContent-Length: 2\r\n\r\n{}")
    answer = await client.answer()
    assert answer.get(b"connection") == b"close"
    assert answer.get(b"transfer-encoding") is None
    assert (answer.content, answer.complete) == (b"hello, world", True)


async def test_a_stream_reaches_http10_as_it_comes(gateway: Any) -> None:
    await gateway.worker([STREAM_HEAD + event("a"), HANG])
    client = await gateway.client()
    client.send(b"POST /v1/x HTTP/1.0\r\nContent-Length: 2\r\n\r\n{}")
    read = await asyncio.wait_for(client.reader.readuntil(b"}\n\n"), 5)
    assert read.partition(b"\r\n\r\n")[2] == b'data: {"text":"a"}\n\n'


async def test_http10_persists_on_request(gateway: Any) -> None:
    await gateway.worker([OK])
    client = await gateway.client()
    for _ in range(2):
        client.send(b"POST /v1/x HTTP/1.0\r\nConnection: Keep-Alive\r\nContent-Length: 2\r\n\r\n{}")
        answer = await client.answer()
        assert (answer.content, answer.get(b"connection")) == (b"ok", b"keep-alive")
    client.send(b"POST /v1/x HTTP/1.0\r\nContent-Length: 2\r\n\r\n{}")
    assert (await client.answer()).get(b"connection") == b"close"
    assert await client.at_end()


async def test_a_broken_answer_is_no_short_answer_to_http10(gateway: Any) -> None:
    await gateway.worker([b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n5\r\nhello\r\n5\r\nwo", CLOSE])
    client = await gateway.client()
    client.send(b"POST /v1/x HTTP/1.0\r\nContent-Length: 2\r\n\r\n{}")
    # The connection's end is the body's here, so it must not end in order.
    assert not (await client.answer()).complete


async def test_a_broken_stream_tells_http10(gateway: Any) -> None:
    await gateway.worker([STREAM_HEAD + event("a"), 0.01, CLOSE])
    client = await gateway.client()
    client.send(b"POST /v1/x HTTP/1.0\r\nContent-Length: 2\r\n\r\n{}")
    answer = await client.answer()
    first, second, rest = answer.content.split(b"\n\n")
    assert (first, rest) == (b'data: {"text":"a"}', b"")
    assert json.loads(second.removeprefix(b"data: "))["error"]["code"] == "upstream_failed"


async def test_a_worker_that_cheats_on_chunks_breaks_off(gateway: Any) -> None:
    # The chunk's line end is missing: passed on as it is, but not to be unpacked.
    await gateway.worker([CHUNKED_HEAD + b"2\r\nabXX0\r\n\r\n"])
    client = await gateway.client()
    client.send(b"POST /v1/x HTTP/1.0\r\nContent-Length: 2\r\n\r\n{}")
    assert not (await client.answer()).complete
    assert gateway.journey.ends[0].ending is Ending.UPSTREAM_BROKE


# Before the answer


async def test_connections_are_reused_on_both_sides(gateway: Any) -> None:
    worker = await gateway.worker([OK])
    client = await gateway.client()
    for number in range(5):
        client.post(b"x" * number)
        assert (await client.answer()).content == b"ok"
    assert len(worker.connections) == 1
    assert [request.body for request in worker.requests] == [b"x" * number for number in range(5)]
    assert gateway.handler.pools[0].idle == 1


@pytest.mark.parametrize(
    "headers", [b"HTTP/1.1 200 OK\r\nconnection: close\r\n", b"HTTP/1.0 200 OK\r\n"], ids=["close", "http10"]
)
async def test_a_workers_connection_may_end_with_the_answer(gateway: Any, headers: bytes) -> None:
    worker = await gateway.worker([headers + b"content-length: 2\r\n\r\nok"])
    client = await gateway.client()
    for _ in range(2):
        client.post()
        answer = await client.answer()
        assert answer.content == b"ok"
        assert answer.get(b"connection") is None
    assert len(worker.connections) == 2


async def test_bytes_after_an_answer_spoil_the_connection(gateway: Any) -> None:
    worker = await gateway.worker([OK + b"HTTP/1.1 200 OK\r\ncontent-length: 4\r\n\r\nevil"])
    client = await gateway.client()
    for _ in range(2):
        client.post()
        assert (await client.answer()).content == b"ok"
    assert len(worker.connections) == 2


async def test_bytes_between_answers_spoil_the_connection(gateway: Any, settled: Any) -> None:
    worker = await gateway.worker([OK, 0.02, b"HTTP/1.1 408 Late\r\ncontent-length: 0\r\n\r\n"])
    client = await gateway.client()
    client.post()
    await client.answer()
    await settled(lambda: worker.open == 0)
    client.post()
    assert (await client.answer()).status == 200


@pytest.mark.parametrize("end", [CLOSE, RESET])
async def test_a_stale_connection_is_replaced(gateway: Any, end: str) -> None:
    # The worker closes when the second request is already on its way: nobody's fault.
    worker = await gateway.worker([OK], [end], [OK])
    client = await gateway.client()
    for _ in range(2):
        client.post(b"again")
        assert (await client.answer()).content == b"ok"
    assert gateway.handler.journeys[1].failures == [CONNECTION_STALE]
    assert [request.body for request in worker.requests] == [b"again"] * 3
    assert len(worker.connections) == 2


async def test_stale_connections_are_not_tried_one_by_one(gateway: Any) -> None:
    worker = await gateway.worker([0.05, OK])
    clients = [await gateway.client() for _ in range(5)]
    for client in clients:
        client.post()
    for client in clients:
        await client.answer()
    assert gateway.handler.pools[0].idle == 5
    worker.scripts = [[CLOSE], [OK]]
    clients[0].post()
    assert (await clients[0].answer()).status == 200
    assert gateway.handler.journeys[-1].failures == [CONNECTION_STALE]
    assert len(worker.connections) == 6


async def test_a_refused_connection_leads_elsewhere(gateway: Any) -> None:
    gateway.refuse()
    worker = await gateway.worker([OK])
    client = await gateway.client()
    client.post(b"body")
    assert (await client.answer()).content == b"ok"
    assert gateway.journey.failures == [CONNECT_REFUSED]
    assert [request.body for request in worker.requests] == [b"body"]


async def test_no_worker_can_be_reached(gateway: Any) -> None:
    gateway.refuse()
    gateway.refuse()
    client = await gateway.client()
    for _ in range(2):
        client.post()
        answer = await client.answer()
        assert answer.status == 503
        assert json.loads(answer.content)["error"]["code"] == "upstream_unavailable"
        assert int(answer.get(b"retry-after")) >= 1
        assert answer.get(b"x-request-id") == b"some"
    assert gateway.handler.journeys[0].ends == [(Ending.REFUSED, 503, 0, b"")]


async def test_attempts_are_bounded(gateway: Any) -> None:
    for _ in range(5):
        await gateway.worker([CLOSE])
    client = await gateway.client()
    client.post()
    assert (await client.answer()).status == 503
    assert sum(len(worker.requests) for worker in gateway.workers) == 3


@pytest.mark.parametrize("end", [CLOSE, RESET])
async def test_a_worker_that_dies_unanswered_is_replaced(gateway: Any, end: str) -> None:
    first = await gateway.worker([end])
    second = await gateway.worker([OK])
    client = await gateway.client()
    client.post(b"body")
    assert (await client.answer()).content == b"ok"
    assert [request.body for request in first.requests + second.requests] == [b"body"] * 2
    assert gateway.journey.failures == [CONNECTION_LOST]


@pytest.mark.parametrize(
    "garbage",
    [
        [b"SSH-2.0-OpenSSH_9.6\r\n\r\n"],
        [b"HTTP/1.1 200 OK\r\nbroken header\r\n\r\n"],
        [b"HTTP/1.1 200 OK\r\ncontent-length: 1\r\ncontent-length: 2\r\n\r\n"],
        [b"HTTP/1.1 101 Switching\r\n\r\n"],
        [b"HTTP/1.1 200 OK\r\nx-a: " + b"x" * 70_000],
        [b"HTTP/1.1 200 OK\r\nx-half", 0.01, CLOSE],
    ],
)
async def test_what_is_not_http_is_a_502(gateway: Any, garbage: list[Any]) -> None:
    worker = await gateway.worker(garbage, [OK])
    elsewhere = await gateway.worker([OK])
    client = await gateway.client()
    client.post()
    answer = await client.answer()
    assert answer.status == 502
    assert json.loads(answer.content)["error"]["code"] == "upstream_failed"
    # It has answered, if badly: the request is not repeated, and the client's connection goes on.
    assert (len(worker.requests), len(elsewhere.requests)) == (1, 0)
    client.post()
    assert (await client.answer()).content == b"ok"


async def test_a_decision_that_fails_is_a_500(gateway: Any) -> None:
    client = await gateway.client()
    gateway.handler.failure = RuntimeError("a fault of ours")
    for seconds in (None, 0.01):
        gateway.handler.decision_seconds = seconds
        client.post()
        answer = await client.answer()
        assert answer.status == 500
        assert b"a fault of ours" not in answer.content


async def test_a_faulty_listener_costs_no_answer(gateway: Any, caplog: pytest.LogCaptureFixture) -> None:
    await gateway.worker([OK])
    gateway.handler.failure = None
    begin = gateway.handler._journey

    def faulty(inbound: Any) -> Any:
        journey = begin(inbound)
        ended = journey.ended

        def fail(*arguments: Any) -> None:
            ended(*arguments)
            raise RuntimeError("accounts")

        journey.ended = fail
        return journey

    gateway.handler._journey = faulty
    client = await gateway.client()
    for _ in range(2):
        client.post()
        assert (await client.answer()).content == b"ok"
    assert "cannot account for an exchange" in caplog.text
    caplog.clear()


# Midway


@pytest.mark.parametrize("end", [CLOSE, RESET])
@pytest.mark.parametrize("count", [0, 1, 3])
async def test_a_stream_that_breaks_between_events_says_so(gateway: Any, count: int, end: str) -> None:
    events = b"".join(event(f"{number}") for number in range(count))
    await gateway.worker([STREAM_HEAD, events, 0.02, end])
    elsewhere = await gateway.worker([OK])
    client = await gateway.client()
    client.post()
    answer = await client.answer()
    assert (answer.status, answer.complete) == (200, False)
    assert answer.wire.startswith(events)
    *parts, last, rest = answer.content.split(b"\n\n")
    assert parts == [b'data: {"text":"%d"}' % number for number in range(count)]
    error = json.loads(last.removeprefix(b"data: "))["error"]
    assert (error["type"], error["code"], rest) == ("server_error", "upstream_failed", b"")
    assert not answer.wire.endswith(b"0\r\n\r\n")
    assert gateway.journey.ends[0].ending is Ending.UPSTREAM_BROKE
    assert gateway.journey.failures == [BODY_CUT]
    assert elsewhere.requests == []


@pytest.mark.parametrize(
    ("path", "said"),
    [
        (b"/v1/messages", {"type": "error", "error": {"type": "api_error", "message": BODY_CUT.message}}),
        (
            b"/v1/responses",
            {"type": "error", "code": "upstream_failed", "message": BODY_CUT.message, "param": None},
        ),
    ],
)
async def test_a_break_is_told_in_the_form_of_the_api(gateway: Any, path: bytes, said: dict[str, Any]) -> None:
    """Whose streams a worker may bring by itself."""
    await gateway.worker([STREAM_HEAD, event("x"), 0.02, CLOSE])
    client = await gateway.client()
    client.post(b"{}", path)
    answer = await client.answer()
    assert not answer.complete
    name, data = answer.content.removeprefix(b'data: {"text":"x"}\n\n').split(b"\n", 1)
    assert name == b"event: error"
    assert json.loads(data.removeprefix(b"data: ")) == said


@pytest.mark.parametrize(
    "rest",
    [
        pytest.param(event("b")[:9], id="within a chunk"),
        pytest.param(event("b")[:-1], id="within a line end"),
        pytest.param(b"1", id="within a chunk header"),
        pytest.param(b"8\r\ndata: {}\r\n", id="within an event"),
        pytest.param(b"0\r\n", id="within the trailer"),
    ],
)
async def test_a_stream_that_breaks_elsewhere_is_aborted(gateway: Any, rest: bytes) -> None:
    await gateway.worker([STREAM_HEAD + event("a"), 0.02, rest, 0.02, CLOSE])
    client = await gateway.client()
    client.post()
    answer = await client.answer()
    assert not answer.complete
    assert answer.wire == event("a") + rest


async def test_a_malformed_chunk_is_not_passed_on(gateway: Any) -> None:
    broken = event("b")[20:] + b"zz\r\n"
    await gateway.worker([STREAM_HEAD + event("a") + event("b")[:20], 0.02, broken])
    client = await gateway.client()
    client.post()
    answer = await client.answer()
    # The client stands within a chunk: an error event would be read as a part of it.
    assert (answer.wire, answer.complete) == (event("a") + event("b")[:20], False)


@pytest.mark.parametrize(
    ("head", "begun"),
    [
        (b"HTTP/1.1 200 OK\r\ncontent-length: 10\r\n\r\n", b"hello"),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 10\r\n\r\n", b""),
        (CHUNKED_HEAD, b"5\r\nhello\r\n"),
        (CHUNKED_HEAD, b""),
    ],
)
async def test_an_answer_that_breaks_is_aborted(gateway: Any, head: bytes, begun: bytes) -> None:
    await gateway.worker([head, begun, 0.02, CLOSE])
    client = await gateway.client()
    client.post()
    answer = await client.answer()
    assert (answer.wire, answer.complete) == (begun, False)
    assert gateway.journey.ends == [(Ending.UPSTREAM_BROKE, 200, len(begun), begun)]


async def test_a_reset_is_no_end_of_a_body(gateway: Any) -> None:
    await gateway.worker([b"HTTP/1.1 200 OK\r\n\r\nhello", 0.02, RESET])
    client = await gateway.client()
    client.post()
    answer = await client.answer()
    assert (answer.wire, answer.complete) == (b"5\r\nhello\r\n", False)


# Deadlines


async def test_a_worker_that_never_answers(gateway: Any, settled: Any) -> None:
    worker = await gateway.worker([HANG], [OK])
    gateway.deadlines.first_byte_seconds = 0.1
    gateway.sweep()
    client = await gateway.client()
    client.post()
    answer = await client.answer()
    assert (answer.status, json.loads(answer.content)["error"]["code"]) == (504, "upstream_timeout")
    await settled(lambda: worker.open == 0)
    client.post()
    assert (await client.answer()).content == b"ok"


async def test_a_stream_that_falls_silent(gateway: Any, settled: Any) -> None:
    worker = await gateway.worker([STREAM_HEAD + event("a"), HANG])
    gateway.deadlines.first_byte_seconds = 60.0
    gateway.deadlines.idle_seconds = 0.1
    gateway.sweep()
    client = await gateway.client()
    client.post()
    answer = await client.answer()
    assert not answer.complete
    assert b"upstream_failed" in answer.content
    await settled(lambda: worker.open == 0)


async def test_an_answer_that_falls_silent(gateway: Any, settled: Any) -> None:
    worker = await gateway.worker([b"HTTP/1.1 200 OK\r\ncontent-length: 10\r\n\r\nhello", HANG])
    gateway.deadlines.idle_seconds = 0.1
    gateway.sweep()
    client = await gateway.client()
    client.post()
    answer = await client.answer()
    assert (answer.wire, answer.complete) == (b"hello", False)
    await settled(lambda: worker.open == 0)


async def test_a_slow_but_steady_stream_outlives_the_deadlines(gateway: Any) -> None:
    steady = [step for number in range(20) for step in (event(f"{number}"), 0.03)]
    await gateway.worker([STREAM_HEAD, *steady, b"0\r\n\r\n"])
    gateway.deadlines.first_byte_seconds = gateway.deadlines.idle_seconds = 0.25
    gateway.sweep()
    client = await gateway.client()
    client.post()
    answer = await client.answer()
    assert answer.complete
    assert answer.content.count(b"data: ") == 20


# Back-pressure


async def test_a_slow_reader_slows_the_worker(gateway: Any, settled: Any) -> None:
    piece = b"10000\r\n" + b"x" * 65_536 + b"\r\n"
    count = 400
    await gateway.worker([STREAM_HEAD, *[piece] * count, b"0\r\n\r\n"])
    gateway.deadlines.idle_seconds = 0.05
    gateway.sweep()
    client = await gateway.client(receive_buffer_bytes=16_384)
    client.post()
    await settled(lambda: bool(gateway.edge.connections) and next(iter(gateway.edge.connections))._writing_paused)
    await settled(lambda: gateway.read_workers == 0)
    # Waiting for the client is no silence.
    await asyncio.sleep(0.3)
    assert gateway.read_workers == 0
    assert gateway.journey.ends == []
    answer = await client.answer()
    assert answer.complete
    assert len(answer.content) == count * 65_536


async def test_answers_wait_while_earlier_ones_are_unread(gateway: Any) -> None:
    worker = await gateway.worker([b"HTTP/1.1 200 OK\r\ncontent-length: 10000\r\n\r\n" + b"x" * 10_000])
    client = await gateway.client(receive_buffer_bytes=16_384)
    count = 300
    for _ in range(count):
        client.post()
    asked = -1
    while asked != len(worker.requests):
        asked = len(worker.requests)
        await asyncio.sleep(0.3)
    # The writer fell behind at the end of an answer: the next one has begun, and waits to be read.
    assert asked < count / 2
    for _ in range(count):
        assert len((await client.answer()).content) == 10_000
    assert len(worker.connections) == 1


# The client leaves


@pytest.mark.parametrize("abrupt", [False, True])
@pytest.mark.parametrize(
    "script",
    [
        pytest.param([HANG], id="unanswered"),
        pytest.param([STREAM_HEAD, *[event("x"), 0.02] * 500], id="streaming"),
        pytest.param([STREAM_HEAD, HANG], id="before the first event"),
        pytest.param([STREAM_HEAD + event("x"), HANG], id="between events"),
        pytest.param([b"HTTP/1.1 200 OK\r\ncontent-length: 9000000\r\n\r\n" + b"x" * 4_000_000, HANG], id="paused"),
    ],
)
async def test_the_worker_learns_that_the_client_left(
    gateway: Any, settled: Any, script: list[Any], abrupt: bool
) -> None:
    worker = await gateway.worker(script)
    client = await gateway.client(receive_buffer_bytes=16_384)
    client.post()
    await settled(lambda: len(worker.requests) == 1)
    await asyncio.sleep(0.1)
    if abrupt:
        client.reset()
    else:
        await client.close()
    await settled(lambda: worker.open == 0)
    assert [end.ending for end in gateway.journey.ends] == [Ending.CLIENT_GONE]


async def test_a_client_may_leave_while_we_connect(gateway: Any, settled: Any, monkeypatch: Any) -> None:
    worker = await gateway.worker([OK])
    pool = gateway.handler.pools[0]
    connect = pool.connect

    async def slowly(timeout_seconds: float) -> Any:
        await asyncio.sleep(0.2)
        return await connect(timeout_seconds)

    monkeypatch.setattr(pool, "connect", slowly)
    client = await gateway.client()
    client.post()
    await settled(lambda: len(gateway.handler.journeys) == 1)
    client.reset()
    await settled(lambda: len(gateway.journey.ends) == 1)
    assert gateway.journey.ends[0].ending is Ending.CLIENT_GONE
    await asyncio.sleep(0.3)
    assert worker.connections == []


async def test_a_client_may_leave_while_we_decide(gateway: Any, settled: Any) -> None:
    gateway.handler.decision_seconds = 0.2
    client = await gateway.client()
    client.post()
    await asyncio.sleep(0.05)
    client.reset()
    await settled(lambda: not gateway.edge.connections)
    await asyncio.sleep(0.25)
    assert gateway.handler.journeys == []


@pytest.mark.parametrize("decision_seconds", [None, 0.3])
async def test_a_half_closed_client_gets_its_answer(gateway: Any, decision_seconds: float | None) -> None:
    await gateway.worker([0.4, OK])
    gateway.handler.decision_seconds = decision_seconds
    gateway.sweep()
    client = await gateway.client()
    client.post()
    client.writer.write_eof()
    answer = await client.answer()
    assert (answer.status, answer.content) == (200, b"ok")
    assert set(answer.interim) <= {102}
    assert await client.at_end()


async def test_a_half_closed_client_gets_its_stream(gateway: Any) -> None:
    stream = [STREAM_HEAD, event("a"), 0.1, event("b"), 0.3, event("c"), b"0\r\n\r\n"]
    await gateway.worker(stream)
    client = await gateway.client()
    client.post()
    await asyncio.sleep(0.05)
    client.writer.write_eof()
    answer = await client.answer()
    assert answer.complete
    # In the silence it may have been asked whether it still listens.
    comment = b"3\r\n:\n\n\r\n"
    assert answer.wire.replace(comment, b"") == event("a") + event("b") + event("c") + b"0\r\n\r\n"
    assert await client.at_end()
