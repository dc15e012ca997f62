"""What predictions and routing history need of an index, so that this room can use one without knowing it."""

from collections.abc import Mapping
from typing import Protocol

from policies.state.inflight import WorkerKey

HASH_BYTES = 16
"""A chain is the packed names of consecutive blocks from the first one on, each this long and each naming everything
before it: equal names at depth n mean equal prefixes of n blocks."""


class ChainStore(Protocol):
    """Which worker is believed to hold which chain. Holdings are counted, as in `cachecore.index`: a block is held
    until it has been removed as often as it was stored, so overlapping chains can come and go independently."""

    def store(self, key: WorkerKey, chain: bytes) -> int:
        """Returns how many leading blocks of it the worker held before."""
        ...

    def extend(self, key: WorkerKey, earlier: bytes, chain: bytes) -> None:
        """As `store` of `chain` and `remove` of `earlier`, which it begins with."""
        ...

    def remove(self, key: WorkerKey, chain: bytes) -> None:
        """Take back one `store` of this very chain."""
        ...

    def depths(self, chain: bytes) -> Mapping[WorkerKey, int]:
        """Leading blocks of `chain` held by each worker; workers that hold none are absent. Changes nothing."""
        ...

    def forget(self, key: WorkerKey) -> None: ...
