"""Where blocks will be soon: our own dispatches, believed until the worker's events arrive or the belief expires.

Without this a burst of siblings would scatter: the first one's blocks are announced only after its prefill. A
prediction lives for one constant time, so insertion order is expiry order.
"""

from collections import OrderedDict
from collections.abc import Mapping
from typing import NamedTuple

from policies.state.chains import ChainStore
from policies.state.inflight import WorkerKey

PREDICTION_TTL_SECONDS = 30.0
PREDICTIONS_MAX = 100_000


class _Prediction(NamedTuple):
    key: WorkerKey
    chain: bytes
    expires_at: float


class PredictedInsertions:
    """Predicted insertions, by the request that will cause them. Bounded: beyond `predictions_max` the oldest goes."""

    def __init__(
        self,
        store: ChainStore,
        ttl_seconds: float = PREDICTION_TTL_SECONDS,
        predictions_max: int = PREDICTIONS_MAX,
    ) -> None:
        if ttl_seconds <= 0 or predictions_max < 1:
            raise ValueError("ttl_seconds and predictions_max must be positive")
        self._store = store
        self._ttl_seconds = ttl_seconds
        self._predictions_max = predictions_max
        self._pending: OrderedDict[str, _Prediction] = OrderedDict()
        self.confirmed = 0
        self.cancelled = 0
        self.expired = 0

    def __len__(self) -> int:
        return len(self._pending)

    def __repr__(self) -> str:
        return (
            f"PredictedInsertions({len(self)} pending, {self.confirmed} confirmed, "
            f"{self.cancelled} cancelled, {self.expired} expired)"
        )

    def predict(self, request_id: str, key: WorkerKey, chain: bytes, now: float) -> None:
        """`key` was given a request with this chain. A request sent again moves its prediction."""
        self.expire(now)
        self._withdraw(request_id)
        if not chain:
            return
        self._store.store(key, chain)
        self._pending[request_id] = _Prediction(key, chain, now + self._ttl_seconds)
        if len(self._pending) > self._predictions_max:
            self._withdraw(next(iter(self._pending)))
            self.expired += 1

    def depths(self, chain: bytes, now: float) -> Mapping[WorkerKey, int]:
        """Leading blocks of `chain` that each worker is predicted to have."""
        self.expire(now)
        return self._store.depths(chain) if self._pending else {}

    def confirm(self, request_id: str) -> None:
        """The worker's events have announced the blocks: from here on the events alone are believed."""
        self.confirmed += self._withdraw(request_id)

    def cancel(self, request_id: str) -> None:
        """The request failed before its prefill: its blocks will not come."""
        self.cancelled += self._withdraw(request_id)

    def cancel_all(self, prefix: str) -> None:
        """Whoever sent the requests whose ids begin so is gone, and nobody will hear how they end."""
        for request_id in [request for request in self._pending if request.startswith(prefix)]:
            self.cancelled += self._withdraw(request_id)

    def forget(self, key: WorkerKey) -> None:
        """The worker is gone or has restarted."""
        for request_id in [request for request, prediction in self._pending.items() if prediction.key == key]:
            del self._pending[request_id]
        self._store.forget(key)

    def expire(self, now: float) -> None:
        """Drop what has outlived its time. Called by every other method that is told the time."""
        pending = self._pending
        while pending and next(iter(pending.values())).expires_at <= now:
            _, prediction = pending.popitem(last=False)
            self._store.remove(prediction.key, prediction.chain)
            self.expired += 1

    def _withdraw(self, request_id: str) -> bool:
        prediction = self._pending.pop(request_id, None)
        if prediction is None:
            return False
        self._store.remove(prediction.key, prediction.chain)
        return True
