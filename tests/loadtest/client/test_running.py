"""The client against servers that are scripts of bytes and times."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager

import orjson
import pytest

from cachecore.blocks import EMPTY_CHAIN
from loadtest.client.answers import Answer
from loadtest.client.bodies import Wanted
from loadtest.client.measures import measured
from loadtest.client.running import ServerError, Target, model_of, send
from loadtest.traces.contract import NO_PREDECESSOR, TraceRequest

Script = Callable[[asyncio.StreamWriter, dict], Awaitable[None]]
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nx-ropeway-worker: w1\r\nconnection: close\r\n\r\n"
ROLE = b'data: {"choices":[{"delta":{"role":"assistant","content":""}}]}\n\n'
TOKEN = b'data: {"choices":[{"delta":{"content":"x"}}]}\n\n'
END = b'data: {"choices":[],"usage":{"prompt_tokens":8,"completion_tokens":2}}\n\ndata: [DONE]\n\n'


@asynccontextmanager
async def server(script: Script) -> AsyncIterator[str]:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        length = next((int(line[15:]) for line in head.split(b"\r\n") if line[:15].lower() == b"content-length:"), 0)
        await script(writer, orjson.loads(await reader.readexactly(length) or b"{}"))
        writer.close()

    listener = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with listener:
        yield f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}"


async def run(script: Script, requests: Sequence[TraceRequest], **options: int) -> list[Answer]:
    async with server(script) as url:
        target = Target(url, Wanted("m", 16), timeout_seconds=5.0)
        return await send(requests, [request.arrival_seconds for request in requests], target, **options)


def request(at: float = 0.0, follows: int = NO_PREDECESSOR, delay: float = 0.0) -> TraceRequest:
    return TraceRequest(at, EMPTY_CHAIN, 8, 2, follows=follows, delay_seconds=delay)


def writes(*pieces: bytes | float) -> Script:
    async def script(writer: asyncio.StreamWriter, body: dict) -> None:
        for piece in pieces:
            if isinstance(piece, float):
                await asyncio.sleep(piece)
            else:
                writer.write(piece)
                await writer.drain()

    return script


async def test_the_time_to_first_token_is_to_the_first_content() -> None:
    (answer,) = await run(writes(HEAD, ROLE, 0.3, TOKEN, 0.2, TOKEN, END), [request()])
    assert answer.failure == ""
    assert (answer.worker, answer.prompt_tokens, answer.output_tokens) == ("w1", 8, 2)
    assert answer.ttft_seconds is not None
    assert answer.ttft_seconds >= 0.3
    first, second = answer.token_times
    assert second - first >= 0.15


@pytest.mark.parametrize(
    ("script", "failure"),
    [
        (writes(HEAD, ROLE, TOKEN), "cut off"),
        (writes(HEAD, TOKEN, b'data: {"error":{"message":"gone"}}\n\n'), "error in the stream: gone"),
        (
            writes(b'HTTP/1.1 503 X\r\nconnection: close\r\n\r\n{"error":{"message":"no  worker"}}'),
            "status 503: no worker",
        ),
        (writes(b"HTTP/1.1 502 X\r\nconnection: close\r\n\r\nplain words"), "status 502: plain words"),
        (writes(b""), "cut off"),
        (writes(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\nconnection: close\r\n\r\n{}"), "malformed"),
    ],
)
async def test_a_failure_is_a_failure(script: Script, failure: str) -> None:
    (answer,) = await run(script, [request()])
    assert answer.failure.startswith(failure)
    result = measured("t", [answer])
    assert (result.answered, result.goodput, [*result.failures]) == (0, 0.0, [failure.partition(":")[0]])


async def test_nobody_waits_for_an_answer_but_who_follows_it() -> None:
    began: list[tuple[str, float]] = []
    loop = asyncio.get_running_loop()

    async def slow(writer: asyncio.StreamWriter, body: dict) -> None:
        began.append(("open", loop.time()))
        await asyncio.sleep(0.5)
        writer.write(HEAD + TOKEN + END)
        await writer.drain()

    requests = [request(0.0), request(0.05), request(0.1, follows=0, delay=0.2)]
    answers = await run(slow, requests)
    first, second, third = answers
    assert second.sent_at < first.ended_at
    assert third.sent_at >= first.ended_at + 0.2
    assert third.due_at == pytest.approx(first.ended_at + 0.2)


async def test_a_turn_whose_predecessor_failed_is_not_sent() -> None:
    asked = 0

    async def refuse(writer: asyncio.StreamWriter, body: dict) -> None:
        nonlocal asked
        asked += 1
        writer.write(b"HTTP/1.1 500 X\r\nconnection: close\r\n\r\n")
        await writer.drain()

    answers = await run(refuse, [request(), request(follows=0)])
    assert asked == 1
    assert answers[1].failure == "not sent: the turn before it failed"


async def test_what_is_in_flight_is_bounded() -> None:
    answers = await run(writes(0.3, HEAD, TOKEN, END), [request(), request(), request()], inflight_max=2)
    assert [answer.failure for answer in answers] == ["", "", "not sent: 2 requests were in flight"]


async def test_a_server_that_is_not_there() -> None:
    target = Target("http://127.0.0.1:1", Wanted("m", 16))
    (answer,) = await send([request()], [0.0], target)
    assert answer.kind_of_failure == "unreachable"
    with pytest.raises(ServerError, match="does not answer"):
        await model_of(target.url, {})


async def test_a_server_without_models() -> None:
    async with server(writes(b'HTTP/1.1 200 OK\r\nconnection: close\r\n\r\n{"data":[]}')) as url:
        with pytest.raises(ServerError, match="lists no model"):
            await model_of(url, {})
