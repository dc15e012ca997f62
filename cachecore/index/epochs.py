"""Lives of workers that do not count them: all gateways must mean the same life by the same number.

An engine that says when its process started has its epoch from that, and nothing of this is needed. Of another engine
a restart is only noticed: it was away, or its event stream began anew. Whoever notices says which life is over, and the
server answers with the one after it, the same to everybody who saw that life end.
"""

from typing import Protocol

from cachecore.holders import Epoch, Worker, WorkerName
from cachecore.index import lua
from cachecore.index.schema import Schema, shard_of
from cachecore.store import Call, RedisStore, StoreError

_EPOCH = lua.load("epoch")
_BUDGET_SECONDS = 0.25
NO_EPOCH = Epoch(0)


class Epochs(Protocol):
    async def after(self, worker: WorkerName, over: Epoch) -> Epoch:
        """The present life of a worker whose life `over` has ended; NO_EPOCH when none is known to have."""
        ...


class OwnEpochs:
    """Counts for one gateway."""

    async def after(self, worker: WorkerName, over: Epoch) -> Epoch:
        return Epoch(over + 1)


class SharedEpochs:
    """Counts for all gateways. Without the server it counts on; `settle` tells the server once it is back."""

    def __init__(self, store: RedisStore, schema: Schema) -> None:
        self._store = store
        self._schema = schema
        self._present: dict[WorkerName, Epoch] = {}

    async def after(self, worker: WorkerName, over: Epoch) -> Epoch:
        try:
            epoch = Epoch(int(await self._store.run(self._call(worker, over), _BUDGET_SECONDS)))
        except StoreError:
            epoch = Epoch(over + 1)
        self._present[worker] = epoch
        return epoch

    def forget(self, worker: WorkerName) -> None:
        self._present.pop(worker, None)

    async def settle(self) -> None:
        """See that the server knows of every life that has begun here: it may have been away, or have lost its data."""
        calls = [self._call(worker, Epoch(epoch - 1)) for worker, epoch in self._present.items()]
        if calls:
            await self._store.run_many(calls, _BUDGET_SECONDS)

    def _call(self, worker: WorkerName, over: Epoch) -> Call:
        shard = shard_of(Worker(worker, over))
        return Call(_EPOCH, (self._schema.epochs(shard),), (worker, over))
