"""What workers find when they recompute answers that came from reused KV, followed for the guard.

    worker ── GET /kv_quality?since=N ─► samples ─► QualityGuard ─► what may be planned (gateway.transfers)

Every gateway asks every worker that moves KV, by itself: a few samples in a thousand answers, every few seconds.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass

import httpx
import msgspec

from cachecore.holders import Epoch
from gateway.fleet.worker import ModelPool, WorkerRecord
from policies.state.guard import QualityGuard, Sample

logger = logging.getLogger("ropeway.quality")

INTERVAL_SECONDS = 2.0


class _Document(msgspec.Struct, frozen=True):
    """A `Sample`, as it travels. Further keys may be there."""

    tenant: str
    codec: str
    fidelity: str
    recompute_fraction: float
    kl: float
    top1: float


class _Told(msgspec.Struct, frozen=True):
    next: int
    samples: list[_Document]


@dataclass(slots=True)
class _Journal:
    """How far one life of a worker has been read."""

    epoch: Epoch
    next: int = 0
    silent: bool = False
    """It keeps none."""


class QualityFollower:
    """Tells the guard of every sample once. `start` and `stop` own its task."""

    def __init__(
        self,
        guard: QualityGuard,
        pools: Mapping[str, ModelPool],
        http: Callable[[], httpx.AsyncClient],
        clock: Callable[[], float] = time.monotonic,
        interval_seconds: float = INTERVAL_SECONDS,
    ) -> None:
        self._guard = guard
        self._pools = pools
        self._http = http
        self._clock = clock
        self._interval_seconds = interval_seconds
        self._journals: dict[WorkerRecord, _Journal] = {}
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        self._task = asyncio.create_task(self._follow(), name="kv quality")

    async def stop(self) -> None:
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task

    async def _follow(self) -> None:
        while True:
            await asyncio.sleep(self._interval_seconds)
            try:
                await self.read_all()
            except Exception:
                logger.exception("reading what workers say of KV quality failed")

    async def read_all(self) -> None:
        """Ask each worker once."""
        asked = list(self._asked())
        self._journals = {record: self._journal(record) for _, record in asked}
        await asyncio.gather(*(self._read(model, record) for model, record in asked))

    def _asked(self) -> Iterator[tuple[str, WorkerRecord]]:
        for pool in self._pools.values():
            for record in pool.workers:
                if record.healthy and record.transfer is not None:
                    yield pool.model, record

    def _journal(self, record: WorkerRecord) -> _Journal:
        known = self._journals.get(record)
        return known if known is not None and known.epoch == record.epoch else _Journal(record.epoch)

    async def _read(self, model: str, record: WorkerRecord) -> None:
        journal = self._journals[record]
        if journal.silent:
            return
        try:
            answer = await self._http().get(f"{record.url}/kv_quality", params={"since": journal.next})
            if answer.status_code == 404:
                journal.silent = True
                return
            told = msgspec.json.decode(answer.raise_for_status().content, type=_Told)
        except (httpx.HTTPError, msgspec.DecodeError) as error:
            logger.debug("worker %s: /kv_quality: %s", record.name, error or type(error).__name__)
            return
        journal.next = told.next
        for document in told.samples:
            self._record(model, Sample(*msgspec.structs.astuple(document)))

    def _record(self, model: str, sample: Sample) -> None:
        trip = self._guard.record(model, sample, self._clock())
        if trip is None:
            return
        what = "is off" if trip.recompute_fraction is None else f"recomputes {trip.recompute_fraction:.0%} from now on"
        logger.warning(
            "KV by %s for tenant %s of %s %s: mean KL %.3g over %d samples, budget %.3g",
            trip.way.way,
            trip.way.tenant,
            trip.way.model,
            what,
            trip.kl_mean,
            trip.samples,
            trip.budget,
        )
