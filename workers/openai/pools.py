"""What a worker tells of its pools: `GET /kv_pools/<name>/runs`, `GET /kv_pools/changes?since=N`, and metrics."""

from collections.abc import AsyncIterator, Iterator, Mapping
from typing import Any, Protocol

from fastapi import FastAPI
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from cachecore.store.pools import KvPool
from cachecore.store.pools.contract import LATENCY_BOUNDS_SECONDS, Latency
from cachecore.store.pools.journal import Journal, encode_changes
from workers.openai.errors import ApiError, InvalidRequest
from workers.openai.responses import error_response

POLL_SECONDS = 10.0
"""How long a question for changes waits for one."""

# Fields of PoolStats.
_PREFIX = "ropeway_worker_pool"
_GAUGES = {
    "up": "1 when the pool answers.",
    "runs": "Runs in the pool.",
    "bytes": "Bytes in the pool.",
    "bytes_max": "Bytes that the pool may hold.",
}
_COUNTERS = {
    "hits": "Runs found.",
    "stored": "Runs stored.",
    "present": "Runs that another writer had stored already.",
    "read_bytes": "Bytes read.",
    "written_bytes": "Bytes written.",
}
_COUNTERS_BY_REASON = {
    "misses": "Runs not found, by reason.",
    "declined": "Runs not stored, by reason.",
    "removed": "Runs removed by this worker, by reason.",
}
_LATENCIES = {
    "first_frame": "From a question to the first frame of a hit.",
    "write": "To store a run.",
}


class PoolDesk(Protocol):
    """The pools that a worker has open. They may belong to another loop than the one that serves."""

    @property
    def pools(self) -> Mapping[str, KvPool]: ...

    @property
    def journal(self) -> Journal: ...

    @property
    def offers(self) -> Mapping[str, int]:
        """What became of the runs that the engine has computed, by outcome."""
        ...

    @property
    def means(self) -> Mapping[str, int]:
        """How often mean KV of texts was `stored`, and `used` in place of a passage's own."""
        ...

    @property
    def waiting(self) -> int:
        """Runs that are still to be stored."""
        ...

    def listing(self, name: str) -> AsyncIterator[bytes]:
        """All that lies in a pool, in pieces."""
        ...

    def describe(self) -> list[dict[str, Any]]:
        """`transfer.pools` of `/server_info`."""
        ...


def mount_pools(app: FastAPI, desk: PoolDesk, poll_seconds: float = POLL_SECONDS) -> None:
    """Serve the two routes. What they take and give: `cachecore.store.pools.journal`."""

    async def changes(http: Request) -> Response:
        text = http.query_params.get("since", "-1")
        if not text.removeprefix("-").isdecimal() or len(text) > 20:
            return error_response(InvalidRequest(f"since must be a number, not {text!r}", param="since"))
        told = await desk.journal.wait(int(text), poll_seconds)
        return Response(encode_changes(told), media_type="application/json")

    async def runs(http: Request) -> Response:
        name = http.path_params["name"]
        if name not in desk.pools:
            return error_response(ApiError(404, f"there is no pool {name!r} here"))
        return StreamingResponse(desk.listing(name), media_type="application/octet-stream")

    app.add_route("/kv_pools/changes", changes, methods=["GET"])
    app.add_route("/kv_pools/{name}/runs", runs, methods=["GET"])


class PoolCollector(Collector):
    """Occupancy, throughput and latency of each pool, as this worker sees them. Reads `KvPool.stats` when scraped."""

    def __init__(self, desk: PoolDesk) -> None:
        self._desk = desk

    def collect(self) -> Iterator[Metric]:
        offers = CounterMetricFamily(f"{_PREFIX}_offers", "Runs computed, by what became of them.", labels=("outcome",))
        for outcome, count in self._desk.offers.items():
            offers.add_metric((outcome,), count)
        yield offers
        means = CounterMetricFamily(f"{_PREFIX}_means", "Means of texts, by what was done with them.", labels=("done",))
        for done, count in self._desk.means.items():
            means.add_metric((done,), count)
        yield means
        yield GaugeMetricFamily(f"{_PREFIX}_waiting", "Runs that are still to be stored.", value=self._desk.waiting)
        stats = {name: pool.stats() for name, pool in self._desk.pools.items()}
        for name, text in _GAUGES.items():
            gauge = GaugeMetricFamily(f"{_PREFIX}_{name}", text, labels=("pool",))
            for pool, stat in stats.items():
                gauge.add_metric((pool,), float(getattr(stat, name)))
            yield gauge
        for name, text in _COUNTERS.items():
            counter = CounterMetricFamily(f"{_PREFIX}_{name}", text, labels=("pool",))
            for pool, stat in stats.items():
                counter.add_metric((pool,), getattr(stat, name))
            yield counter
        for name, text in _COUNTERS_BY_REASON.items():
            counter = CounterMetricFamily(f"{_PREFIX}_{name}", text, labels=("pool", "reason"))
            for pool, stat in stats.items():
                for reason, count in getattr(stat, name).items():
                    counter.add_metric((pool, str(reason)), count)
            yield counter
        for name, text in _LATENCIES.items():
            histogram = HistogramMetricFamily(f"{_PREFIX}_{name}_seconds", text, labels=("pool",))
            for pool, stat in stats.items():
                latency: Latency = getattr(stat, name)
                histogram.add_metric((pool,), _buckets(latency), latency.seconds)
            yield histogram


def _buckets(latency: Latency) -> list[tuple[str, float]]:
    """Cumulative, as Prometheus wants them."""
    buckets, seen = [], 0
    for bound, count in zip((*map(str, LATENCY_BOUNDS_SECONDS), "+Inf"), latency.counts, strict=True):
        seen += count
        buckets.append((bound, float(seen)))
    return buckets
