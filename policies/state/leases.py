"""Short leases on blocks that nobody has yet: who computes them now, and when they should be there.

A burst of siblings needs one prompt that is cached nowhere. It is known by its first block that no worker has
confirmed: as long as that is so, it is the same one for all siblings. A few of them compute it (`BUILDERS_MAX`), the
others wait until it can be pulled (`policies.bursts`). And who pulls it is known by the last block that is pulled: the
others at that worker wait for it as well.
"""

from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

from policies.state.inflight import WorkerKey

GRACE_SECONDS = 2.0
"""A lease lives so much longer than the prefill should take: then whoever computes it is not believed any longer."""
LEASES_MAX = 10_000
BUILDERS_MAX = 2
"""Of one block: should one of them be slow or die, there is the other."""


class Lease(NamedTuple):
    block: bytes
    request_id: str
    key: WorkerKey
    """Where the block will be."""
    ready_at: float
    """When it should have it."""


class Leases:
    """Who gets which block now. One lease a request, at most `block_leases_max` a block; one that is not released
    expires. At most `leases_max` are kept: beyond that the oldest go."""

    def __init__(
        self, block_leases_max: int = BUILDERS_MAX, grace_seconds: float = GRACE_SECONDS, leases_max: int = LEASES_MAX
    ) -> None:
        if block_leases_max < 1 or grace_seconds <= 0 or leases_max < 1:
            raise ValueError("block_leases_max, grace_seconds and leases_max must be positive")
        self._block_leases_max = block_leases_max
        self._grace_seconds = grace_seconds
        self._leases_max = leases_max
        self._by_request: OrderedDict[str, Lease] = OrderedDict()
        self._by_block: dict[bytes, list[Lease]] = {}

    def __len__(self) -> int:
        return len(self._by_request)

    def __repr__(self) -> str:
        return f"Leases({list(self._by_request.values())})"

    def acquire(self, block: bytes, request_id: str, key: WorkerKey, ready_at: float, now: float) -> bool:
        """The request brings `block` there, by `ready_at`. False where enough others do. A request sent again gives up
        its earlier lease."""
        self.release(request_id)
        if len(self.of(block, now)) >= self._block_leases_max:
            return False
        if len(self._by_request) >= self._leases_max:
            self.release(next(iter(self._by_request)))
        lease = self._by_request[request_id] = Lease(block, request_id, key, ready_at)
        self._by_block.setdefault(block, []).append(lease)
        return True

    def of(self, block: bytes, now: float) -> Sequence[Lease]:
        """Who gets `block` now."""
        leases = self._by_block.get(block)
        if leases is None:
            return ()
        for lease in [lease for lease in leases if lease.ready_at + self._grace_seconds <= now]:
            self.release(lease.request_id)
        return tuple(leases)

    def release(self, request_id: str) -> None:
        """The request has the block, or has failed. Unknown ids change nothing."""
        lease = self._by_request.pop(request_id, None)
        if lease is None:
            return
        leases = self._by_block[lease.block]
        leases.remove(lease)
        if not leases:
            del self._by_block[lease.block]

    def forget(self, key: WorkerKey) -> None:
        """The worker is gone: nobody should wait for it."""
        for request_id in [lease.request_id for lease in self._by_request.values() if lease.key == key]:
            self.release(request_id)
