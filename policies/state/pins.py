"""Which blocks requests in flight hold: an engine can evict none of them, and siblings hold the same ones."""

from collections.abc import Mapping

from policies.state.chains import ChainStore
from policies.state.inflight import WorkerKey


class PinnedChains:
    """Chains of requests in flight, each counted from `pin` to `unpin`; blocks of several are counted once."""

    __slots__ = ("_store",)

    def __init__(self, store: ChainStore) -> None:
        self._store = store

    def pin(self, key: WorkerKey, chain: bytes) -> int:
        """How many of its leading blocks others hold at that worker."""
        return self._store.store(key, chain) if chain else 0

    def unpin(self, key: WorkerKey, chain: bytes) -> int:
        """Take back one `pin` of this very chain: how many of its leading blocks others still hold."""
        if not chain:
            return 0
        self._store.remove(key, chain)
        return self._store.depths(chain).get(key, 0)

    def depths(self, chain: bytes) -> Mapping[WorkerKey, int]:
        """Leading blocks of a chain that requests in flight hold, by worker."""
        return self._store.depths(chain) if chain else {}
