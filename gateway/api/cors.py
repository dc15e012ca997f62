"""Pages in browsers that ask the gateway, where `cors.origins` allows them (the Fetch standard's CORS protocol).

A browser asks ahead (`OPTIONS`) whether it may, without a key: that is answered here, before anybody is authenticated.
Every answer to an allowed origin says so, refusals as well, since a page may not read what does not. Without `origins`
none of this is in anybody's way.
"""

from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gateway.config import CorsConfig
from gateway.edge.contract import Deadlines
from gateway.edge.http1 import RequestHead
from gateway.edge.server import Edge, EdgeLimits, EdgeProtocol, Handler
from gateway.headers import HEADERS, Way

EXPOSED = ", ".join(header.name for header in HEADERS if Way.ANSWERED in header.ways)
METHODS = "GET, POST, DELETE, OPTIONS"
_NOTE = "cors"


class Cors:
    """Which origins are allowed, and what their browsers are told."""

    def __init__(self, config: CorsConfig) -> None:
        self._all = "*" in config.origins
        self._origins = frozenset(origin.lower() for origin in config.origins)
        self._preflight_seconds = config.preflight_seconds

    @property
    def enabled(self) -> bool:
        return self._all or bool(self._origins)

    def allows(self, origin: str) -> bool:
        return self._all or origin.lower() in self._origins

    def fields(self, origin: str) -> dict[str, str]:
        """Of an answer to an origin. Caches keep one for each, unless all get the same."""
        if not self.allows(origin):
            return {"vary": "origin"}
        fields = {"access-control-allow-origin": "*" if self._all else origin, "access-control-expose-headers": EXPOSED}
        return fields if self._all else {**fields, "vary": "origin"}

    def preflight(self, origin: str, asked_headers: str) -> dict[str, str]:
        """Of the answer to a browser that asks ahead. It is told nothing else if it may not."""
        fields = self.fields(origin)
        if self.allows(origin):
            fields["access-control-allow-methods"] = METHODS
            fields["access-control-max-age"] = f"{self._preflight_seconds}"
            if asked_headers:
                # By name: `*` does not stand for `authorization`.
                fields["access-control-allow-headers"] = asked_headers
        return fields

    def lines(self, head: RequestHead) -> bytes:
        """`fields` as header lines, remembered with the head."""
        lines: bytes | None = head.notes.get(_NOTE)
        if lines is None:
            origin = head.get(b"origin")
            fields = self.fields((origin or b"").decode("latin-1"))
            lines = b"".join(b"%b: %b\r\n" % (k.encode(), v.encode("latin-1")) for k, v in fields.items())
            head.notes[_NOTE] = lines
        return lines


class CorsEdge(Edge):
    """An edge whose answers say who may read them."""

    def __init__(self, handler: Handler, limits: EdgeLimits, deadlines: Deadlines, cors: Cors) -> None:
        super().__init__(handler, limits, deadlines)
        self.cors = cors

    def connection(self, uvicorn_arguments: dict[str, Any]) -> EdgeProtocol:
        return CorsProtocol(self, uvicorn_arguments)


class CorsProtocol(EdgeProtocol):
    """One client connection, whose answers say who may read them."""

    def connection_header(self) -> bytes:
        # With every answer, and the last thing in its head.
        line = super().connection_header()
        edge = self._edge
        assert isinstance(edge, CorsEdge)  # noqa: S101
        return line if self._head is None else line + edge.cors.lines(self._head)


class CorsMiddleware:
    """The same for what the application answers, and the browsers that ask ahead."""

    def __init__(self, app: ASGIApp, cors: Cors) -> None:
        self._app = app
        self._cors = cors

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope) if scope["type"] == "http" else {}
        origin = headers.get("origin")
        if origin is None:
            await self._app(scope, receive, send)
        elif scope["method"] == "OPTIONS" and "access-control-request-method" in headers:
            fields = self._cors.preflight(origin, headers.get("access-control-request-headers", ""))
            await _answer(send, {**fields, "content-length": "0"})
        else:
            await self._app(scope, receive, _saying(send, self._cors.fields(origin)))


async def _answer(send: Send, fields: dict[str, str]) -> None:
    headers = [(name.encode(), value.encode("latin-1")) for name, value in fields.items()]
    await send({"type": "http.response.start", "status": 204, "headers": headers})
    await send({"type": "http.response.body", "body": b""})


def _saying(send: Send, fields: dict[str, str]) -> Send:
    async def send_with_fields(message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = MutableHeaders(scope=message)
            for name, value in fields.items():
                headers[name] = value
        await send(message)

    return send_with_fields
