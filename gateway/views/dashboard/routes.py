"""The dashboard's page and what it lives on: its files, the feed of `Status`, single receipts.

The page itself says nothing of the gateway and needs no key. It is there wherever the operators' routes are, since it
asks for nothing but these. Its files carry a tag of their content: a browser asks each time and is answered 304.
"""

import asyncio
import mimetypes
from collections.abc import MutableMapping
from contextlib import aclosing
from hashlib import sha256
from importlib.resources import files
from typing import Any, NamedTuple

import orjson
from fastapi import Depends, FastAPI, Request, Response
from starlette.types import Receive, Scope, Send

from gateway.errors import NotFound
from gateway.tenants import OperatorKey
from gateway.views.feed import STUCK_SECONDS, Feed
from gateway.views.status import StatusView

PAGE = "index.html"
_SUFFIXES = (".html", ".css", ".js", ".svg")

_POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self'",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    )
)
HEADERS = {
    "cache-control": "no-cache",
    "content-security-policy": _POLICY,
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), geolocation=(), microphone=()",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
}


class Asset(NamedTuple):
    """One file of the page."""

    content: bytes
    media_type: str
    etag: str

    def answer(self, request: Request) -> Response:
        headers = {**HEADERS, "etag": self.etag}
        if self.etag in request.headers.get("if-none-match", ""):
            return Response(None, 304, headers)
        return Response(self.content, 200, headers, self.media_type)


def load_assets() -> dict[str, Asset]:
    """The page's files by name."""
    return {
        file.name: _asset(file.name, file.read_bytes())
        for file in files(__package__).iterdir()
        if file.name.endswith(_SUFFIXES)
    }


def _asset(name: str, content: bytes) -> Asset:
    media_type = "text/javascript" if name.endswith(".js") else mimetypes.guess_type(name)[0] or "text/plain"
    return Asset(content, media_type, f'"{sha256(content).hexdigest()[:32]}"')


class EventStream(Response):
    """One watcher's events, for as long as it takes them."""

    def __init__(self, feed: Feed) -> None:
        super().__init__(None, 200, {"cache-control": "no-store", "x-accel-buffering": "no"}, "text/event-stream")
        del self.headers["content-length"]
        self._feed = feed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        tasks = [asyncio.ensure_future(self._tell(send)), asyncio.ensure_future(_gone(receive))]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _tell(self, send: Send) -> None:
        async with aclosing(self._feed.watch()) as events:
            async for event in events:
                if not await _sent(send, _part(event, more=True)):
                    return
        await _sent(send, _part(b"", more=False))


def _part(body: bytes, more: bool) -> MutableMapping[str, Any]:
    return {"type": "http.response.body", "body": body, "more_body": more}


async def _sent(send: Send, message: MutableMapping[str, Any]) -> bool:
    """Whether the watcher took it in time."""
    try:
        async with asyncio.timeout(STUCK_SECONDS):
            await send(message)
    except TimeoutError:
        return False
    return True


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def add_dashboard_routes(app: FastAPI, status: StatusView, feed: Feed, admin_key: OperatorKey) -> None:
    assets = load_assets()

    def authorize(request: Request) -> None:
        authorization = request.headers.get("authorization")
        admin_key.check(authorization.encode("latin-1") if authorization is not None else None)

    admin = [Depends(authorize)]

    @app.api_route("/", methods=["GET", "HEAD"], include_in_schema=False)
    @app.api_route("/dashboard", methods=["GET", "HEAD"], include_in_schema=False)
    async def page(request: Request) -> Response:
        """The dashboard. The page itself needs no key: what it shows does."""
        return assets[PAGE].answer(request)

    @app.api_route("/dashboard/{name}", methods=["GET", "HEAD"], include_in_schema=False)
    async def asset(request: Request, name: str) -> Response:
        """A file of the dashboard's."""
        found = assets.get(name)
        if found is None:
            raise NotFound(f"the dashboard has no file {name!r}")
        return found.answer(request)

    @app.get("/status/feed", dependencies=admin)
    async def status_feed() -> Response:
        """The document of `/status` as server-sent events: whole at first, then what has changed."""
        feed.require_room()
        return EventStream(feed)

    @app.get("/status/receipts/{request_id:path}", dependencies=admin)
    async def receipt(request_id: str) -> Response:
        """Why a request went where it went, while it is among the last ones."""
        found = status.receipt(request_id)
        if found is None:
            raise NotFound(f"{request_id!r} is not among the last requests")
        return Response(orjson.dumps(found), media_type="application/json")
