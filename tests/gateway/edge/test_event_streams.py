"""Event streams of every form over real sockets: what the worker writes is what the client reads, when it is written.

Each form is one that engines, or proxies before them, have been seen to write.
"""

import asyncio
import json
from typing import Any

import pytest

from gateway.edge.contract import Ending
from gateway.usage import Usage, read_usage

CLOSE, HANG = "close", "hang"
STREAM_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
END = b"0\r\n\r\n"
DONE = b"data: [DONE]\n\n"
USAGE = b'"usage":{"prompt_tokens":12,"completion_tokens":3,"prompt_tokens_details":{"cached_tokens":8}}'
NONE = b'"usage":null'


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def says(text: str, usage: bytes = NONE, **choice: Any) -> bytes:
    choices = json.dumps([{"index": 0, "delta": {"content": text}, "finish_reason": None} | choice]).encode()
    return b'{"choices":%b,%b}' % (choices, usage)


def events(*documents: bytes, end: bytes = b"\n\n") -> bytes:
    return b"".join(b"data: " + document + end for document in documents)


ALONE = b'{"choices":[],' + USAGE + b"}"
FORMS = {
    "comments": b": keep-alive\n\n: PROCESSING\n"
    + events(says("a"))
    + b": glued\n\n"
    + events(says("b"), ALONE)
    + DONE,
    "line feeds": events(says("a"), says("b"), ALONE) + DONE,
    "carriage returns": events(says("a"), says("b"), ALONE, b"[DONE]", end=b"\r\n\r\n"),
    "mixed line ends": events(says("a")) + events(ALONE, end=b"\r\n\r\n") + events(b"[DONE]", end=b"\r\r"),
    "no space": b"event: message\nid: 1\nretry: 5\ndata:" + says("a") + b"\n\ndata:" + ALONE + b"\n\ndata:[DONE]\n\n",
    "two spaces": b"data:  " + says("a") + b"\n\ndata:  " + ALONE + b"\n\n" + DONE,
    "two lines of data": events(says("a")) + b"data: " + ALONE.replace(b',"comp', b',\ndata: "comp') + b"\n\n" + DONE,
    "usage beside content": events(says("a"), says("the last", USAGE, finish_reason="stop")) + DONE,
    "many bytes a character": events(says("渐重 🌍"), '{"choices":[{"delta":{"content":"渐重 🌍"}}]}'.encode(), ALONE)
    + DONE,
    "no choices": events(b'{"id":"x"}', b'{"choices":[{"delta":null}]}', b'{"choices":[{}]}', ALONE) + DONE,
    "several choices": events(*(says("x", index=index) for index in (2, 0, 1)), ALONE) + DONE,
    "reasons of its own": events(says("a", finish_reason="error"), says("b", finish_reason="abort"), ALONE) + DONE,
    "no end": events(says("a"), ALONE),
    "an error at the end": events(says("a"), ALONE, b'{"error":{"message":"boom","code":500}}') + DONE,
}


@pytest.mark.parametrize("form", FORMS)
async def test_every_form_passes_as_it_is_and_is_understood(gateway: Any, form: str) -> None:
    stream = FORMS[form]
    apart = [piece for byte in stream for piece in (chunk(bytes([byte])), 0.0)]
    half = len(stream) // 2
    await gateway.worker(
        [STREAM_HEAD + chunk(stream) + END],
        [STREAM_HEAD, chunk(stream[:half]), 0.01, chunk(stream[half:]), 0.01, END],
        [STREAM_HEAD, *apart, END],
    )
    client = await gateway.client()
    for _ in range(3):
        client.post()
        answer = await client.answer()
        assert (answer.status, answer.content, answer.complete) == (200, stream, True)
    for journey in gateway.handler.journeys:
        assert (journey.ends[0].ending, journey.first_bytes) == (Ending.COMPLETE, 1)
    for journey in gateway.handler.journeys[:2]:
        assert read_usage(journey.ends[0].tail) == Usage(12, 3, 8)


@pytest.mark.parametrize("form", FORMS)
async def test_nothing_but_the_usage_alone_is_taken_out(gateway: Any, form: str) -> None:
    gateway.handler.strips_usage = True
    stream = FORMS[form]
    await gateway.worker([STREAM_HEAD + chunk(stream) + END])
    client = await gateway.client()
    client.post()
    content = (await client.answer()).content
    kept = [part for part in stream.replace(b"\r", b"\n").split(b"\n\n") if b'"choices":[],' not in part]
    assert [part for part in content.replace(b"\r", b"\n").split(b"\n\n") if part] == [part for part in kept if part]


@pytest.mark.parametrize("strips_usage", [False, True])
async def test_an_event_is_out_before_the_next_one_is_made(gateway: Any, strips_usage: bool) -> None:
    gateway.handler.strips_usage = strips_usage
    first = events(says("a"))
    await gateway.worker([STREAM_HEAD + chunk(first), HANG])
    client = await gateway.client()
    client.post(b"{}", b"/v1/x", b"Accept-Encoding: gzip, br")
    async with asyncio.timeout(5):
        read = await client.reader.readuntil(chunk(first))
    assert b"content-encoding" not in read


async def test_the_first_token_is_neither_a_comment_nor_a_role(gateway: Any, settled: Any) -> None:
    role = events(b'{"choices":[{"index":0,"delta":{"role":"assistant","content":""}}]}')
    for token in (events(says("x")), events(b'{"choices":[{"delta":{"reasoning_content":"hm"}}]}')):
        await gateway.worker(
            [STREAM_HEAD, chunk(role), 0.02, chunk(b": still here\n\n"), 0.3, chunk(token), 0.3, chunk(DONE) + END]
        )
        client = await gateway.client()
        client.post()
        async with asyncio.timeout(5):
            await client.reader.readuntil(b": still here\n\n\r\n")
            journey = gateway.handler.journeys[-1]
            assert journey.first_bytes == 0
            await client.reader.readuntil(token)
        assert journey.first_bytes == 1
        await settled(lambda journey=journey: journey.ends)
        assert journey.first_bytes == 1
        gateway.handler.pools.pop()


@pytest.mark.parametrize("strips_usage", [False, True])
async def test_what_a_worker_compresses_is_left_alone(gateway: Any, strips_usage: bool) -> None:
    """Nothing is taken out of it, and where it breaks off nothing readable follows."""
    gateway.handler.strips_usage = strips_usage
    head = STREAM_HEAD.replace(b"\r\n\r\n", b"\r\ncontent-encoding: gzip\r\n\r\n")
    body = b"\x1f\x8b\x08\x00" + b"x" * 40
    await gateway.worker([head + chunk(body) + END], [head + chunk(body), 0.02, CLOSE])
    client = await gateway.client()
    client.post()
    answer = await client.answer()
    assert (answer.content, answer.get(b"content-encoding"), answer.complete) == (body, b"gzip", True)
    client.post()
    answer = await client.answer()
    assert (answer.content, answer.complete) == (body, False)


UNTIL_CLOSE = b"HTTP/1.1 200 OK\r\ncontent-type: %b\r\n\r\n"
EVENTS, DOCUMENT = b"text/event-stream; charset=utf-8", b"application/json"


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        (EVENTS, FORMS["line feeds"]),
        (EVENTS, FORMS["carriage returns"]),
        (EVENTS, FORMS["mixed line ends"]),
        (EVENTS, FORMS["no end"]),
        (EVENTS, FORMS["line feeds"].rstrip()),
        (DOCUMENT, b'{"choices":[]}\r\n'),
        (DOCUMENT, b"[]"),
        (b"text/plain", b"any wor"),
    ],
)
async def test_what_ends_with_its_connection_is_whole(gateway: Any, kind: bytes, body: bytes) -> None:
    await gateway.worker([UNTIL_CLOSE % kind + body, 0.01, CLOSE], [UNTIL_CLOSE % kind, 0.01, body, 0.01, CLOSE])
    client = await gateway.client()
    for _ in range(2):
        client.post()
        answer = await client.answer()
        assert (answer.content, answer.complete) == (body, True)


@pytest.mark.parametrize("strips_usage", [False, True])
@pytest.mark.parametrize(
    ("kind", "body", "shown"),
    [
        (EVENTS, events(says("a")) + b'data: {"choi', events(says("a"))),
        (EVENTS, events(says("a")) + b"data: {}\n", events(says("a"))),
        (DOCUMENT, b'{"choices":[{"text":"half of a', b'{"choices":[{"text":"half of a'),
    ],
)
async def test_what_ends_with_its_connection_and_not_by_itself_was_cut_off(
    gateway: Any, strips_usage: bool, kind: bytes, body: bytes, shown: bytes
) -> None:
    gateway.handler.strips_usage = strips_usage
    await gateway.worker([UNTIL_CLOSE % kind + body, 0.01, CLOSE])
    client = await gateway.client()
    client.post()
    answer = await client.answer()
    assert (answer.status, answer.complete) == (200, False)
    # Who has seen whole events only is told by another one.
    told = strips_usage and kind is EVENTS
    assert answer.content.startswith(shown if told else body)
    assert (b"upstream_failed" in answer.content) is told
    assert gateway.journey.ends[0].ending is Ending.UPSTREAM_BROKE


@pytest.mark.parametrize("head", [b"HTTP/1.0 200 OK\r\n", b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n"])
async def test_an_answer_of_nothing_is_none(gateway: Any, head: bytes) -> None:
    """A worker that dies behind its head, where the connection's end is the body's."""
    elsewhere = [b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"]
    await gateway.worker([head + b"\r\n", 0.01, CLOSE], elsewhere)
    client = await gateway.client()
    client.post()
    answer = await client.answer()
    assert not answer.complete
    assert (b"upstream_failed" in answer.content) == (b"event-stream" in head)
    assert gateway.journey.ends[0].ending is Ending.UPSTREAM_BROKE
