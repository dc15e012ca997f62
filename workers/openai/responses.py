"""Answers as ASGI responses: JSON, server-sent events, and the watch for a client that leaves.

`Answer` runs its work and listens for the disconnect at the same time; when the client leaves, the work is cancelled,
which closes the generation in the engine, whether or not a byte was sent.
"""

import asyncio
import logging
import secrets
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import aclosing
from typing import Any

import msgspec
from starlette.datastructures import MutableHeaders
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from workers.openai.errors import ApiError, translated

logger = logging.getLogger(__name__)

encode_json = msgspec.json.Encoder().encode

DONE = b"data: [DONE]\n\n"
_REQUEST_ID = "ropeway.request_id"
_REQUEST_ID_CHARS_MAX = 256


class JsonResponse(Response):
    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return encode_json(content)


def error_response(error: Exception) -> JsonResponse:
    known = translated(error)
    if known.status >= 500 and not isinstance(error, ApiError):
        logger.error("a request failed", exc_info=error)
    return JsonResponse(known.document(), known.status)


def event(document: Any) -> bytes:
    return b"data: " + encode_json(document) + b"\n\n"


class Answer(Response):
    """Runs `work` when called; the work writes the response with the `Send` it gets."""

    def __init__(self, work: Callable[[Scope, Receive, Send], Awaitable[None]]) -> None:
        super().__init__()
        self._work = work

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        work = asyncio.ensure_future(self._work(scope, receive, send))
        departure = asyncio.ensure_future(_departure(receive))
        try:
            await asyncio.wait((work, departure), return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                return
            await work
        finally:
            for task in (work, departure):
                task.cancel()
            await asyncio.gather(work, departure, return_exceptions=True)


Headers = Callable[[], Mapping[str, str]]
"""Asked for when the body begins, of which they may tell."""


def whole(answer: Callable[[], Awaitable[Any]], headers: Headers = dict) -> Answer:
    """One JSON document, once it is complete."""

    async def work(scope: Scope, receive: Receive, send: Send) -> None:
        try:
            document = await answer()
            response = JsonResponse(document, headers=headers())
        except Exception as error:
            response = error_response(error)
        await response(scope, receive, send)

    return Answer(work)


def streamed(events: AsyncGenerator[bytes, None], headers: Headers = dict) -> Answer:
    """Server-sent events. The status is decided by the first: what fails before it is an ordinary error."""

    async def work(scope: Scope, receive: Receive, send: Send) -> None:
        async with aclosing(events):
            try:
                first = await anext(events)
            except Exception as error:
                await error_response(error)(scope, receive, send)
                return
            own = [(name.encode(), value.encode()) for name, value in headers().items()]
            await send({"type": "http.response.start", "status": 200, "headers": [*_EVENT_STREAM_HEADERS, *own]})
            await _send(send, first)
            try:
                async for item in events:
                    await _send(send, item)
            except Exception as error:
                logger.error("a stream failed", exc_info=error)
                await _send(send, event(translated(error).document()))
            await _send(send, DONE)
            await send({"type": "http.response.body", "body": b"", "more_body": False})

    return Answer(work)


_EVENT_STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
]


async def _send(send: Send, body: bytes) -> None:
    await send({"type": "http.response.body", "body": body, "more_body": True})


async def _departure(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class RequestIds:
    """Gives every request an id (the client's own where it is usable) and says it on every response."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = scope[_REQUEST_ID] = _given_id(scope) or secrets.token_hex(12)

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)["x-request-id"] = request_id
            await send(message)

        await self._app(scope, receive, send_with_id)


def request_id_of(request: Request) -> str:
    return str(request.scope[_REQUEST_ID])


def _given_id(scope: Scope) -> str | None:
    for name, value in scope["headers"]:
        if name == b"x-request-id":
            text: str = value.decode("latin-1")
            usable = text.isascii() and text.isprintable() and len(text) <= _REQUEST_ID_CHARS_MAX
            return text if usable and text else None
    return None
