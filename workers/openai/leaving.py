"""How a worker leaves without losing a request.

Told to stop, it says so on `/health` and goes on taking requests for a while: whoever sends them has to notice first.
Then it refuses new ones with 503, so that they are asked elsewhere, finishes what it has begun, and only then ends.
Without anybody who asks for its health, or is connected at all, there is nobody to wait for.
"""

import argparse
import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import NamedTuple

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from starlette.types import ASGIApp, Receive, Scope, Send

from workers.openai.errors import ApiError
from workers.openai.responses import JsonResponse

_POLL_SECONDS = 0.05
_WATCHED_SECONDS = 15.0
"""Who has asked for the health of a worker within this will ask again."""
_ANNOUNCE_SECONDS = 3.0
_FINISH_SECONDS = 10.0


class Patience(NamedTuple):
    announce_seconds: float = 0.0
    """How long requests are still taken, for whoever sends them to notice."""
    finish_seconds: float = 0.0
    """What requests under way are given after that."""


NO_PATIENCE = Patience()


class Presence:
    """Whether a worker takes requests, and how many it has begun. Its app and its server share it."""

    def __init__(self) -> None:
        self.leaving = False
        """Said on `/health`."""
        self.refusing = False
        self.under_way = 0
        """Requests for inference."""
        self._health_asked_at = float("-inf")

    def health_asked(self) -> None:
        self._health_asked_at = time.monotonic()

    async def leave(self, patience: Patience, connected: Callable[[], bool], hurried: asyncio.Event) -> None:
        """Returns when nothing is under way, or time is up. `connected`: whether anybody is; `hurried` ends waiting."""
        self.leaving = True
        watched = time.monotonic() - self._health_asked_at < _WATCHED_SECONDS
        if watched:
            await _wait_while(connected, patience.announce_seconds, hurried)
        self.refusing = True
        await _wait_while(lambda: self.under_way > 0, patience.finish_seconds, hurried)


async def _wait_while(condition: Callable[[], bool], seconds_max: float, hurried: asyncio.Event) -> None:
    until = time.monotonic() + seconds_max
    while condition() and not hurried.is_set() and time.monotonic() < until:
        with suppress(TimeoutError):
            await asyncio.wait_for(hurried.wait(), _POLL_SECONDS)


class Door:
    """An ASGI layer that counts requests for inference in and out, and refuses them once the worker does not wait for
    more."""

    def __init__(self, app: ASGIApp, presence: Presence) -> None:
        self._app = app
        self._presence = presence

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        presence = self._presence
        if scope["type"] != "http" or scope["method"] != "POST" or not scope["path"].startswith("/v1/"):
            await self._app(scope, receive, send)
            return
        if presence.refusing:
            await _refusal()(scope, receive, send)
            return
        presence.under_way += 1
        try:
            await self._app(scope, receive, send)
        finally:
            presence.under_way -= 1


class PresenceCollector(Collector):
    def __init__(self, presence: Presence) -> None:
        self._presence = presence

    def collect(self) -> Iterator[Metric]:
        under_way, leaving = self._presence.under_way, float(self._presence.leaving)
        yield GaugeMetricFamily("ropeway_worker_requests", "Requests for inference under way.", value=under_way)
        yield GaugeMetricFamily("ropeway_worker_leaving", "1 once the worker was told to stop.", value=leaving)


def _refusal() -> JsonResponse:
    error = ApiError(503, "The worker is stopping: ask another one, or again.", code="draining")
    return JsonResponse(error.document(), error.status, {"retry-after": "1", "connection": "close"})


def add_leaving_arguments(group: "argparse._ArgumentGroup") -> None:
    group.add_argument(
        "--announce-seconds",
        type=float,
        default=_ANNOUNCE_SECONDS,
        metavar="S",
        help="after SIGTERM, take requests for so long, while /health says that it stops: gateways ask every other "
        "second (default: %(default)s)",
    )
    group.add_argument(
        "--finish-seconds",
        type=float,
        default=_FINISH_SECONDS,
        metavar="S",
        help="what requests under way are given then (default: %(default)s); another signal ends it",
    )


def patience_of(args: argparse.Namespace) -> Patience:
    """Raises ValueError."""
    if args.announce_seconds < 0 or args.finish_seconds < 0:
        raise ValueError("--announce-seconds and --finish-seconds must not be negative")
    return Patience(args.announce_seconds, args.finish_seconds)
