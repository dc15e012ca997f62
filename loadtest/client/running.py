"""Sends a trace to an OpenAI server, open loop: each request at its time, whatever became of those before.

A queue that grows shows as latency, never as fewer requests: nothing here waits for an answer, but for a conversation's
next turn, which cannot come before its predecessor's answer. Times to first token count from when a request was due.
"""

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx
import orjson

from loadtest.client.answers import Answer, StreamObserver, error_text, read_document
from loadtest.client.bodies import Wanted, posted
from loadtest.commands import UsageError
from loadtest.traces.contract import NO_PREDECESSOR, TraceRequest


class ServerError(UsageError):
    """The server cannot be tested at all. The message is one line."""


INFLIGHT_MAX = 4_096
ANSWER_BYTES_MAX = 64 * 1024 * 1024
_ERROR_BYTES_MAX = 65_536
NOT_SENT = "not sent"


@dataclass(frozen=True, slots=True)
class Target:
    """The server under load."""

    url: str
    wanted: Wanted
    headers: Mapping[str, str] = field(default_factory=dict)
    timeout_seconds: float = 600.0
    """Without a byte; answers may take as long as they like."""


@dataclass(slots=True)
class _Run:
    target: Target
    client: httpx.AsyncClient
    began_at: float
    inflight_max: int
    done: Callable[[Answer], object]
    inflight: int = 0


async def send(
    requests: Sequence[TraceRequest],
    arrivals_seconds: Sequence[float],
    target: Target,
    done: Callable[[Answer], object] = lambda _: None,
    inflight_max: int = INFLIGHT_MAX,
) -> list[Answer]:
    """Send each request at its arrival (seconds from now, in order), or a pause after the end of the one it follows,
    whichever is later. Answers in the order of the requests; `done` is told of each as it ends.

    A turn whose predecessor failed is not sent, which is a failure as well, and so is one that would be one too many
    in flight.
    """
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=256)
    timeout = httpx.Timeout(target.timeout_seconds, pool=None)
    async with httpx.AsyncClient(base_url=target.url, limits=limits, timeout=timeout, trust_env=False) as client:
        run = _Run(target, client, time.perf_counter(), inflight_max, done)
        tasks: list[asyncio.Task[Answer]] = []
        for number, (request, arrival) in enumerate(zip(requests, arrivals_seconds, strict=True)):
            await _until(run.began_at + arrival)
            before = tasks[request.follows] if request.follows != NO_PREDECESSOR else None
            due_at = run.began_at + arrival
            tasks.append(asyncio.create_task(_turn(run, request, Answer(number, due_at), before)))
        return [await task for task in tasks]


async def model_of(url: str, headers: Mapping[str, str]) -> str:
    """The first model that a server lists. Raises ServerError."""
    try:
        async with httpx.AsyncClient(base_url=url, trust_env=False) as client:
            response = await client.get("/v1/models", headers=headers)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise ServerError(f"{url} does not answer: {error or type(error).__name__}") from error
    if response.status_code != httpx.codes.OK:
        raise ServerError(f"{url}/v1/models: status {response.status_code}: {error_text(_json(response.content))}")
    try:
        return str(response.json()["data"][0]["id"])
    except (ValueError, LookupError, TypeError):
        raise ServerError(f"{url}/v1/models lists no model") from None


async def _until(moment: float) -> None:
    left = moment - time.perf_counter()
    # Always once: whoever was due before is to be under way.
    await asyncio.sleep(max(left, 0.0))


async def _turn(run: _Run, request: TraceRequest, answer: Answer, before: "asyncio.Task[Answer] | None") -> Answer:
    if before is not None:
        previous = await before
        if previous.failure:
            answer.failure = f"{NOT_SENT}: the turn before it failed"
        else:
            answer.due_at = max(answer.due_at, previous.ended_at + request.delay_seconds)
            await _until(answer.due_at)
    if run.inflight >= run.inflight_max:
        answer.failure = f"{NOT_SENT}: {run.inflight_max} requests were in flight"
    if not answer.failure:
        run.inflight += 1
        try:
            await _ask(run, request, answer)
        finally:
            run.inflight -= 1
    answer.ended_at = time.perf_counter()
    run.done(answer)
    return answer


async def _ask(run: _Run, request: TraceRequest, answer: Answer) -> None:
    target = run.target
    path, body = posted(request, answer.number, target.wanted)
    headers = {"content-type": "application/json", **target.headers}
    answer.sent_at = time.perf_counter()
    try:
        async with run.client.stream("POST", path, content=body, headers=headers) as response:
            answer.status = response.status_code
            answer.worker = response.headers.get("x-ropeway-worker", "")
            answer.policy = response.headers.get("x-ropeway-policy", "")
            if response.status_code != httpx.codes.OK:
                answer.failure = f"status {response.status_code}: {await _said(response)}"
            elif "text/event-stream" in response.headers.get("content-type", ""):
                await _read_stream(response, answer)
            else:
                read_document(answer, await _whole(response, ANSWER_BYTES_MAX), time.perf_counter())
    except httpx.ConnectError as error:
        answer.failure = f"unreachable: {error}"
    except httpx.TimeoutException as error:
        answer.failure = f"time-out: {type(error).__name__}"
    except httpx.HTTPError as error:
        answer.failure = f"cut off: {error or type(error).__name__}"


async def _read_stream(response: httpx.Response, answer: Answer) -> None:
    observer = StreamObserver(answer)
    async for piece in response.aiter_raw():
        observer.received(piece, time.perf_counter())
    observer.ended()


async def _said(response: httpx.Response) -> str:
    return error_text(_json(await _whole(response, _ERROR_BYTES_MAX)))


def _json(body: bytes) -> Any:
    """The document, or the text that it is instead."""
    try:
        return orjson.loads(body)
    except orjson.JSONDecodeError:
        return body.decode(errors="replace")


async def _whole(response: httpx.Response, bytes_max: int) -> bytes:
    pieces: list[bytes] = []
    size = 0
    async for piece in response.aiter_bytes():
        size += len(piece)
        if size > bytes_max:
            raise httpx.DecodingError(f"an answer of more than {bytes_max} bytes")
        pieces.append(piece)
    return b"".join(pieces)
