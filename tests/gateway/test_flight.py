"""What is kept for requests under way is seen, and seen to go."""

import asyncio
import time
from types import SimpleNamespace
from typing import Any, cast

from cachecore.index.memory import MemoryIndex
from gateway.edge.upstream import UpstreamPool
from gateway.fleet.knowledge import Knowledge
from gateway.fleet.registry import Fleet
from gateway.views.flight import FlightCollector
from policies.state.predictions import PREDICTION_TTL_SECONDS

CHAIN = bytes(range(32))


def samples(collector: FlightCollector) -> dict[str, float]:
    return {sample.name: sample.value for metric in collector.collect() for sample in metric.samples}


def collector(knowledge: Knowledge, pool: UpstreamPool | None = None) -> FlightCollector:
    connections = pool if pool is not None else UpstreamPool("127.0.0.1", 1)
    record = SimpleNamespace(name="w", connections=connections)
    return FlightCollector(knowledge, cast(Fleet, SimpleNamespace(workers={"w": record})))


def test_nothing_is_under_way() -> None:
    assert samples(collector(Knowledge(MemoryIndex()))) == {
        "ropeway_accounted_requests": 0,
        "ropeway_predictions": 0,
        "ropeway_leases": 0,
        "ropeway_worker_idle_connections": 0,
        "ropeway_worker_sent_requests_total": 0,
    }


def test_predictions_are_counted_until_they_expire() -> None:
    knowledge, now = Knowledge(MemoryIndex()), time.monotonic()
    view = collector(knowledge)
    knowledge.predictions.predict("old", ("w", 0), CHAIN, now - PREDICTION_TTL_SECONDS - 1)
    knowledge.inexact_predictions.predict("new", ("w", 0), CHAIN, now)
    # Nobody has told the first one what time it is.
    assert len(knowledge.predictions) == 1
    assert samples(view)["ropeway_predictions"] == 1
    knowledge.cancel_predictions("new")
    assert samples(view)["ropeway_predictions"] == 0


class Server(asyncio.Protocol):
    """Says nothing; knows how many connections it has."""

    def __init__(self, transports: set[asyncio.BaseTransport]) -> None:
        self._transports = transports

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport
        self._transports.add(transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self._transports.discard(self._transport)


async def test_requests_are_counted_beyond_their_connections() -> None:
    open_there: set[asyncio.BaseTransport] = set()
    server = await asyncio.get_running_loop().create_server(lambda: Server(open_there), "127.0.0.1", 0)
    async with server:
        pool = UpstreamPool("127.0.0.1", server.sockets[0].getsockname()[1])
        view = collector(Knowledge(MemoryIndex()), pool)
        for count in (1, 2):
            connection = await pool.connect(5.0)
            connection.send(cast(Any, object()), [b"GET / HTTP/1.1\r\n\r\n"])
            while not open_there:
                await asyncio.sleep(0)
            assert samples(view)["ropeway_worker_sent_requests_total"] == count
            connection.abort()
            while len(pool) or open_there:
                await asyncio.sleep(0)
            assert samples(view)["ropeway_worker_sent_requests_total"] == count
