"""Faults on the wire, the echo and the request log: an ASGI layer around a simulated worker's app.

Besides the app's routes it answers

    GET, POST, DELETE /simulate        the standing faults: see, replace, end
    GET, DELETE /simulate/log          what came in (bounded)
    any method /echo                   what was received; any other route does so with `x-simulate: {"echo": true}`
"""

import asyncio
import base64
import os
import re
import socket
import struct
import time
from collections import deque
from typing import Any

import msgspec
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from workers.openai.errors import ApiError, InvalidRequest
from workers.openai.responses import JsonResponse, RequestIds, error_response
from workers.simulated.access_log import AccessLog
from workers.simulated.faults import NO_FAULTS, Faults, read_faults
from workers.simulated.faulty_publisher import FaultyPublisher
from workers.simulated.link import ModelledSource
from workers.simulated.protocol import RAW_HEADERS, TRANSPORT

_LOG_ENTRIES_MAX = 1000
_content = re.compile(rb'"(?:content|text)":"[^"]').search
_FAULTS = "ropeway.faults"


class Exchange(msgspec.Struct):
    """One request as the log remembers it; times are wall-clock seconds."""

    arrived_at: float
    method: str
    path: str
    request_id: str = ""
    body_bytes: int = 0
    status: int = 0
    sent_bytes: int = 0
    sent_pieces: int = 0
    content_at: float | None = None
    """When the first piece with text of an answer in it was sent."""
    finished_at: float | None = None
    disconnected_at: float | None = None
    """When the client was seen to have left before the answer was complete."""


class Misbehaviour:
    """Wraps a worker's app. Needs `ObservedProtocol` to break connections and to echo header names unchanged."""

    def __init__(
        self,
        app: ASGIApp,
        publisher: FaultyPublisher | None = None,
        source: ModelledSource | None = None,
        access_log: AccessLog | None = None,
    ) -> None:
        self.access_log = access_log
        """None writes nothing."""
        self._app = app
        self._publisher = publisher
        self._source = source
        self._answers = RequestIds(self._answer)
        self._standing = NO_FAULTS
        self._standing_left: int | None = None
        self.log: deque[Exchange] = deque(maxlen=_LOG_ENTRIES_MAX)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        if scope["path"] in ("/simulate", "/simulate/log"):
            await self._answers(scope, receive, send)
            return
        if self.access_log is None:
            await self._serve(scope, _Wire(scope, receive, send))
            return
        wire = _Accounted(self.access_log, scope, receive, send)
        try:
            await self._serve(scope, wire)
        finally:
            wire.end()

    async def _serve(self, scope: Scope, wire: "_Wire") -> None:
        self.log.append(wire.exchange)
        try:
            faults = self._faults_of(scope)
        except ValueError as error:
            scope[_FAULTS] = InvalidRequest(f"x-simulate: {error}", param="x-simulate")
            await self._answers(scope, wire.receive, wire.send)
            return
        wire.faults = scope[_FAULTS] = faults
        answers_itself = faults.hang or faults.echo or faults.status is not None or scope["path"] == "/echo"
        await (self._answers if answers_itself else self._app)(scope, wire.receive, wire.send)

    def _faults_of(self, scope: Scope) -> Faults:
        for name, value in scope["headers"]:
            if name == b"x-simulate":
                return read_faults(value)
        if not scope["path"].startswith(self._standing.paths) or self._standing_left == 0:
            return NO_FAULTS
        if self._standing_left is not None:
            self._standing_left -= 1
        return self._standing

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Everything that this layer answers by itself."""
        body = await _read_body(receive)
        faults = scope.get(_FAULTS, NO_FAULTS)
        if isinstance(faults, ApiError):
            response: Response = error_response(faults)
        elif scope["path"] == "/simulate":
            response = self._control(scope["method"], body)
        elif scope["path"] == "/simulate/log":
            response = self._log(scope["method"])
        elif faults.hang:
            while (await receive())["type"] != "http.disconnect":
                pass
            return
        elif faults.status is not None:
            response = _faulty_answer(faults.status, faults.body)
        else:
            response = JsonResponse(_echo(scope, body))
        await response(scope, receive, send)

    def _control(self, method: str, body: bytes) -> Response:
        if method == "POST":
            try:
                self._stand(read_faults(body))
            except ValueError as error:
                return error_response(InvalidRequest(str(error)))
        elif method == "DELETE":
            self._stand(NO_FAULTS)
        return JsonResponse(self._standing)

    def _stand(self, faults: Faults) -> None:
        self._standing, self._standing_left = faults, faults.requests
        if self._publisher is not None:
            self._publisher.misbehave(faults.events, faults.events_batches)
        if self._source is not None:
            self._source.fault, self._source.fault_pulls = faults.transfer, faults.transfer_pulls

    def _log(self, method: str) -> Response:
        if method == "DELETE":
            self.log.clear()
        return JsonResponse({"requests": list(self.log)})


class _Wire:
    """One request's two directions: what passes is logged, and broken as told."""

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.exchange = Exchange(time.time(), scope["method"], _raw_path(scope))
        self.faults = NO_FAULTS
        self._transport = scope.get(TRANSPORT)
        self._receive = receive
        self._send = send
        self._broken = False
        self._events = 0

    async def receive(self) -> Message:
        message = await self._receive()
        exchange = self.exchange
        if message["type"] == "http.request":
            exchange.body_bytes += len(message.get("body", b""))
        elif exchange.finished_at is None and exchange.disconnected_at is None:
            exchange.disconnected_at = time.time()
        return message

    async def send(self, message: Message) -> None:
        if self._broken:
            return
        if message["type"] == "http.response.start":
            await self._begin(message)
        else:
            await self._continue(message)

    async def _begin(self, message: Message) -> None:
        self.exchange.status = message["status"]
        for name, value in message["headers"]:
            if name == b"x-request-id":
                self.exchange.request_id = value.decode("latin-1")
        if self.faults.delay_first_ms:
            await asyncio.sleep(self.faults.delay_first_ms / 1000)
        await self._send(message)

    async def _continue(self, message: Message) -> None:
        body, faults, exchange = message.get("body", b""), self.faults, self.exchange
        if faults.omit_done and body == b"data: [DONE]\n\n":
            return
        if faults.chunk_gap_ms and exchange.sent_pieces and body:
            await asyncio.sleep(faults.chunk_gap_ms / 1000)
        if faults.die_after_chunks is not None and self._events >= faults.die_after_chunks:
            self._break(abruptly=True)
            return
        room = None if faults.cut_stream_bytes is None else faults.cut_stream_bytes - exchange.sent_bytes
        cut = room is not None and len(body) > room
        if cut:
            message = {**message, "body": body[:room], "more_body": True}
        exchange.sent_bytes += len(message.get("body", b""))
        exchange.sent_pieces += bool(body)
        self._events += body.count(b"data: ")
        if exchange.content_at is None and _content(body):
            exchange.content_at = time.time()
        await self._send(message)
        if cut:
            self._break(abruptly=False)
        elif not message.get("more_body", False):
            exchange.finished_at = time.time()

    def _break(self, *, abruptly: bool) -> None:
        self._broken = True
        self.exchange.finished_at = time.time()
        if self._transport is None:
            return
        if abruptly:
            _reset(self._transport)
        else:
            self._transport.close()


def _reset(transport: asyncio.Transport) -> None:
    """Close so that the peer sees a reset rather than an end, as when the process behind a socket dies."""
    # A duplicate shares the connection's options; uvloop's own socket object does not set them.
    with socket.socket(fileno=os.dup(transport.get_extra_info("socket").fileno())) as duplicate:
        duplicate.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    transport.abort()


class _Accounted(_Wire):
    """A wire whose request is in the access log."""

    def __init__(self, log: AccessLog, scope: Scope, receive: Receive, send: Send) -> None:
        super().__init__(scope, receive, send)
        self._log = log
        self._request_id = next((v.decode("latin-1") for n, v in scope["headers"] if n == b"x-request-id"), "")
        self._body = bytearray()
        self._number: int | None = None

    async def receive(self) -> Message:
        message = await super().receive()
        if self._number is None and message["type"] == "http.request":
            self._body += message.get("body", b"")
            if not message.get("more_body", False):
                self._number = self._log.received(self.exchange.path, self._request_id, bytes(self._body))
        return message

    def end(self) -> None:
        """Whatever became of it."""
        exchange = self.exchange
        if self._number is not None:
            complete = exchange.finished_at is not None and exchange.disconnected_at is None and not self._broken
            self._log.ended(
                self._number, exchange.path, self._request_id, exchange.status, exchange.sent_bytes, complete
            )


async def _read_body(receive: Receive) -> bytes:
    body = bytearray()
    while True:
        message = await receive()
        if message["type"] != "http.request":
            return bytes(body)
        body += message.get("body", b"")
        if not message.get("more_body", False):
            return bytes(body)


def _faulty_answer(status: int, body: Any) -> Response:
    if isinstance(body, str):
        return Response(body, status, media_type="text/plain")
    if body is None:
        return error_response(ApiError(status, "simulated fault"))
    return JsonResponse(body, status)


def _echo(scope: Scope, body: bytes) -> dict[str, Any]:
    headers = scope.get(RAW_HEADERS, scope["headers"])
    return {
        "method": scope["method"],
        "path": _raw_path(scope),
        "headers": [[name.decode("latin-1"), value.decode("latin-1")] for name, value in headers],
        "body_base64": base64.b64encode(body).decode(),
    }


def _raw_path(scope: Scope) -> str:
    query: bytes = scope.get("query_string", b"")
    path: bytes = scope.get("raw_path") or scope["path"].encode()
    return (path + b"?" + query if query else path).decode("latin-1")
