"""Usage that a client did not ask for, taken out of its event stream over real sockets."""

from typing import Any

import pytest

from gateway.edge.contract import Ending

CLOSE, RESET = "close", "reset"
CHUNKED_HEAD = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
STREAM_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
USAGE = b'data: {"choices":[],"usage":{"prompt_tokens":9,"completion_tokens":1}}\n\n'
DONE = b"data: [DONE]\n\n"
TEXT = b'data: {"text":"a"}\n\n'


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def byte_by_byte(data: bytes) -> list[Any]:
    return [piece for byte in data for piece in (bytes([byte]), 0.0)]


END = b"0\r\n\r\n"


@pytest.mark.parametrize(
    "script",
    [
        [STREAM_HEAD + chunk(TEXT) + chunk(USAGE) + chunk(DONE) + END],
        [STREAM_HEAD, chunk(TEXT), 0.01, chunk(USAGE + DONE) + END],
        byte_by_byte(STREAM_HEAD + chunk(TEXT) + chunk(USAGE[:20]) + chunk(USAGE[20:] + DONE) + END),
        [
            b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\n",
            TEXT + USAGE[:9],
            0.01,
            USAGE[9:] + DONE,
            CLOSE,
        ],
    ],
    ids=["at once", "in pieces", "byte by byte", "until the connection closes"],
)
async def test_usage_is_taken_out_and_still_accounted_for(gateway: Any, script: list[Any]) -> None:
    gateway.handler.strips_usage = True
    await gateway.worker(script)
    client = await gateway.client()
    for _ in range(2):
        client.post()
        answer = await client.answer()
        assert (answer.content, answer.complete) == (TEXT + DONE, True)
        assert answer.get(b"transfer-encoding") == b"chunked"
    for journey in gateway.handler.journeys:
        assert b'"prompt_tokens":9' in journey.ends[0].tail
        assert (journey.ends[0].ending, journey.first_bytes) == (Ending.COMPLETE, 1)


async def test_usage_is_taken_out_for_http10(gateway: Any) -> None:
    gateway.handler.strips_usage = True
    await gateway.worker([STREAM_HEAD, chunk(TEXT), chunk(USAGE + DONE) + END])
    client = await gateway.client()
    client.send(b"POST /v1/x HTTP/1.0\r\nContent-Length: 2\r\n\r\n{}")
    answer = await client.answer()
    assert (answer.wire, answer.get(b"connection")) == (TEXT + DONE, b"close")


@pytest.mark.parametrize(
    "script",
    [
        [CHUNKED_HEAD + chunk(USAGE) + END],
        [STREAM_HEAD.replace(b"200 OK", b"429 Busy") + chunk(USAGE) + END],
        [b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ncontent-length: %d\r\n\r\n" % len(USAGE) + USAGE],
    ],
    ids=["no stream", "an error", "a length"],
)
async def test_nothing_is_taken_out_of_other_answers(gateway: Any, script: list[Any]) -> None:
    gateway.handler.strips_usage = True
    await gateway.worker(script)
    client = await gateway.client()
    client.post()
    assert (await client.answer()).content == USAGE


async def test_a_stripped_stream_that_breaks_ends_with_an_error(gateway: Any) -> None:
    """Of an event that has not come to its end the client has seen nothing."""
    gateway.handler.strips_usage = True
    await gateway.worker([STREAM_HEAD, chunk(TEXT), 0.01, chunk(b'data: {"text":"cu'), 0.01, RESET])
    client = await gateway.client()
    client.post()
    answer = await client.answer()
    assert answer.content.startswith(TEXT + b'data: {"error":')
    assert not answer.complete
    assert gateway.journey.ends[0].ending is Ending.UPSTREAM_BROKE
