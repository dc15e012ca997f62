"""Gives up what nobody holds any more: earlier lives of workers, and holders that nobody has followed for long.

A gateway that sees a new life forgets the old one itself. What is left over is from lives that ended while no gateway
was there to see it: behind a restart of everything, or under a worker that was taken out for good.
"""

import logging
import time
from collections.abc import Callable

from cachecore.holders import Holder, Worker
from cachecore.index.leases import Leases
from cachecore.index.redis import read_records
from cachecore.index.schema import Record, Schema, Version
from cachecore.index.writer import forget_call
from cachecore.store import RedisStore
from gateway.fleet.registry import Fleet

logger = logging.getLogger("ropeway.sharing")

BUDGET_SECONDS = 1.0
HOLDERS_PER_SWEEP = 64
ABANDONED_SECONDS = 600.0
"""After this long without a follower a holder's worker is taken to be gone."""


class Sweeper:
    """Every gateway has one; what one has swept the others do not find."""

    def __init__(
        self,
        store: RedisStore,
        schema: Schema,
        leases: Leases,
        fleet: Fleet,
        stream_length_max: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store = store
        self._schema = schema
        self._leases = leases
        self._fleet = fleet
        self._stream_length_max = stream_length_max
        self._clock = clock
        self._unled_since: dict[Holder, float] = {}
        """Holders of workers that are not in this fleet, without a lease when they were looked at."""
        self.swept = 0

    async def sweep(self) -> None:
        """Look once. Raises StoreError."""
        records = await read_records(self._store, self._schema)
        dead = [holder for holder in records if self._is_over(holder)]
        dead += await self._abandoned([holder for holder in records if not self._is_known(holder)])
        for holder in dead[:HOLDERS_PER_SWEEP]:
            await self._forget(holder, records[holder])

    async def _forget(self, holder: Holder, record: Record) -> None:
        over = Version(record.version.fence, record.version.revision + 1)
        await self._store.run(forget_call(self._schema, holder, over, self._stream_length_max), BUDGET_SECONDS)
        self.swept += 1
        logger.info("swept %s", holder)

    def _is_known(self, holder: Holder) -> bool:
        return not isinstance(holder, Worker) or holder.name in self._fleet.workers

    def _is_over(self, holder: Holder) -> bool:
        """Whether a worker of ours has been seen in a later life than this one."""
        if not isinstance(holder, Worker):
            return False
        record = self._fleet.workers.get(holder.name)
        return record is not None and record.discovery is not None and holder.epoch < record.epoch

    async def _abandoned(self, strangers: list[Holder]) -> list[Holder]:
        claims = await self._leases.ask(strangers, [False] * len(strangers)) if strangers else []
        now = self._clock()
        unled = [holder for holder, claim in zip(strangers, claims, strict=True) if not claim.owner]
        self._unled_since = {holder: self._unled_since.get(holder, now) for holder in unled}
        return [holder for holder, since in self._unled_since.items() if now - since >= ABANDONED_SECONDS]
