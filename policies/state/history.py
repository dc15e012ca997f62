"""Where prompts went before: the stand-in for an index where a worker publishes no events.

Every routed request is recorded, whichever rule chose its worker. What a worker is believed to hold is bounded by the
blocks it was sent most recently, as its own cache is; a conversation's turn replaces the turn before, whose blocks it
repeats.

Of a worker whose events speak for it requests are only noted, which costs next to nothing: should the events fail, what
was noted is recorded then.
"""

from collections import OrderedDict, deque
from collections.abc import Mapping

from policies.state.chains import HASH_BYTES, ChainStore
from policies.state.inflight import WorkerKey

WORKER_BLOCKS_MAX = 65_536
"""Per worker: about a million tokens at 16 tokens a block, and 1 MiB of names."""

_NOTHING_ASKED: tuple[bytes, Mapping[WorkerKey, int]] = (b"", {})


class _WorkerHistory:
    """Chains sent to one worker, least recently sent first, by the name of their last block."""

    __slots__ = ("blocks", "chains")

    def __init__(self) -> None:
        self.chains: OrderedDict[bytes, bytes] = OrderedDict()
        self.blocks = 0


class _Notes:
    """Chains sent to a worker of which no history is kept, oldest first."""

    __slots__ = ("bytes", "chains")

    def __init__(self) -> None:
        self.chains: deque[bytes] = deque()
        self.bytes = 0


class RoutingHistory:
    """Own routing history over a counted `ChainStore`, bounded per worker."""

    def __init__(self, store: ChainStore, worker_blocks_max: int = WORKER_BLOCKS_MAX) -> None:
        if worker_blocks_max < 1:
            raise ValueError("worker_blocks_max must be positive")
        self._store = store
        self._worker_blocks_max = worker_blocks_max
        self._worker_bytes_max = worker_blocks_max * HASH_BYTES
        self._workers: dict[WorkerKey, _WorkerHistory] = {}
        self._noted: dict[WorkerKey, _Notes] = {}
        self._asked = _NOTHING_ASKED
        """The last question for depths and its answer, which still holds: the prompt will be recorded next."""

    def __repr__(self) -> str:
        sizes = {key: (len(history.chains), history.blocks) for key, history in self._workers.items()}
        return f"RoutingHistory((chains, blocks) by worker: {sizes})"

    def blocks(self, key: WorkerKey) -> int:
        """Blocks of the chains recorded for a worker, shared ones counted once for each chain."""
        history = self._workers.get(key)
        return history.blocks if history else 0

    def depths(self, chain: bytes) -> Mapping[WorkerKey, int]:
        """Leading blocks of `chain` that went to each worker before. Changes nothing."""
        depths = self._store.depths(chain)
        self._asked = (chain, depths)
        return depths

    def record(self, key: WorkerKey, chain: bytes) -> None:
        """A prompt with this chain was sent to `key`. Of a chain longer than the bound, the beginning is kept."""
        size_bytes = len(chain)
        if size_bytes > self._worker_bytes_max:
            chain, size_bytes = chain[: self._worker_bytes_max], self._worker_bytes_max
        if not chain:
            return
        history = self._workers.get(key)
        if history is None:
            history = self._workers[key] = _WorkerHistory()
        chains, tail = history.chains, chain[-HASH_BYTES:]
        if tail in chains:
            chains.move_to_end(tail)
            return
        asked, depths = self._asked
        depth = (depths if asked == chain else self._store.depths(chain)).get(key, 0)
        self._asked = _NOTHING_ASKED
        # Where an earlier chain ends at the depth we share, this one contains it whole.
        earlier = chains.pop(chain[(depth - 1) * HASH_BYTES : depth * HASH_BYTES], None) if depth else None
        if earlier is not None:
            self._store.extend(key, earlier, chain)
            history.blocks -= len(earlier) // HASH_BYTES
        else:
            self._store.store(key, chain)
        chains[tail] = chain
        history.blocks += size_bytes // HASH_BYTES
        while history.blocks > self._worker_blocks_max:
            self._drop(key, history, next(iter(chains)))

    def note(self, key: WorkerKey, chain: bytes) -> None:
        """In place of `record`, for a worker whose history is not asked for now. Bounded as history is."""
        notes = self._noted.get(key)
        if notes is None:
            notes = self._noted[key] = _Notes()
        notes.chains.append(chain)
        notes.bytes += len(chain)
        while notes.bytes > self._worker_bytes_max:
            notes.bytes -= len(notes.chains.popleft())

    def recall(self, key: WorkerKey) -> None:
        """The worker's history is asked for from now on: record what was noted."""
        notes = self._noted.pop(key, None)
        for chain in notes.chains if notes is not None else ():
            self.record(key, chain)

    def forget(self, key: WorkerKey) -> None:
        """The worker is gone or has restarted."""
        self._noted.pop(key, None)
        self._asked = _NOTHING_ASKED
        if self._workers.pop(key, None) is not None:
            self._store.forget(key)

    def _drop(self, key: WorkerKey, history: _WorkerHistory, tail: bytes) -> None:
        chain = history.chains.pop(tail, None)
        if chain is not None:
            history.blocks -= len(chain) // HASH_BYTES
            self._store.remove(key, chain)
