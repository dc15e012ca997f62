"""Short leases on a chain's next block: while one request computes it, its siblings can wait for that one prefill."""

from collections import OrderedDict
from typing import NamedTuple

from policies.state.inflight import WorkerKey

LEASE_TTL_SECONDS = 2.0
LEASES_MAX = 10_000


class Lease(NamedTuple):
    block: bytes
    """Name of the first block that the request computes."""
    request_id: str
    key: WorkerKey
    expires_at: float


class PrefillLeases:
    """Who computes which block now. One lease a block, one a request; a lease that is not released expires."""

    def __init__(self, ttl_seconds: float = LEASE_TTL_SECONDS, leases_max: int = LEASES_MAX) -> None:
        if ttl_seconds <= 0 or leases_max < 1:
            raise ValueError("ttl_seconds and leases_max must be positive")
        self._ttl_seconds = ttl_seconds
        self._leases_max = leases_max
        self._leases: OrderedDict[bytes, Lease] = OrderedDict()
        self._blocks: dict[str, bytes] = {}

    def __len__(self) -> int:
        return len(self._leases)

    def __repr__(self) -> str:
        return f"PrefillLeases({list(self._leases.values())})"

    def acquire(self, block: bytes, request_id: str, key: WorkerKey, now: float) -> Lease:
        """The lease on `block`: the caller's own when it was free, else that of the request to wait for."""
        held = self.holder(block, now)
        if held is not None:
            return held
        self.release(request_id)
        if len(self._leases) >= self._leases_max:
            self._drop(next(iter(self._leases)))
        lease = Lease(block, request_id, key, now + self._ttl_seconds)
        self._leases[block] = lease
        self._blocks[request_id] = block
        return lease

    def holder(self, block: bytes, now: float) -> Lease | None:
        """Who computes `block` now."""
        while self._leases:
            oldest = next(iter(self._leases.values()))
            if oldest.expires_at > now:
                break
            self._drop(oldest.block)
        return self._leases.get(block)

    def release(self, request_id: str) -> None:
        """The request's prefill is done, or it failed. Unknown ids change nothing."""
        block = self._blocks.get(request_id)
        if block is not None:
            self._drop(block)

    def forget(self, key: WorkerKey) -> None:
        """The worker is gone: nobody should wait for it."""
        for block in [lease.block for lease in self._leases.values() if lease.key == key]:
            self._drop(block)

    def _drop(self, block: bytes) -> None:
        del self._blocks[self._leases.pop(block).request_id]
