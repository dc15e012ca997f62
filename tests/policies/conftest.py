from collections import Counter
from collections.abc import Callable, Mapping
from random import Random

import pytest

from policies.contract import Evidence, FleetRates, Query, Snapshot, WorkerView
from policies.estimates import PrefillModel
from policies.state.chains import HASH_BYTES
from policies.state.inflight import InflightAccounting, WorkerKey


class NaiveStore:
    """The simplest thing that keeps `ChainStore`'s promises: a counter per (worker, block)."""

    def __init__(self) -> None:
        self.counts: dict[WorkerKey, Counter[bytes]] = {}
        self.unknown_removals = 0

    @staticmethod
    def blocks(chain: bytes) -> list[bytes]:
        return [chain[start : start + HASH_BYTES] for start in range(0, len(chain), HASH_BYTES)]

    def store(self, key: WorkerKey, chain: bytes) -> int:
        held = self.depths(chain).get(key, 0)
        self.counts.setdefault(key, Counter()).update(self.blocks(chain))
        return held

    def extend(self, key: WorkerKey, earlier: bytes, chain: bytes) -> None:
        assert chain.startswith(earlier)
        self.store(key, chain)
        self.remove(key, earlier)

    def remove(self, key: WorkerKey, chain: bytes) -> None:
        counts = self.counts.get(key, Counter())
        for block in self.blocks(chain):
            if not counts[block]:
                self.unknown_removals += 1
            counts[block] -= 1
            if counts[block] <= 0:
                del counts[block]
        if not counts:
            self.counts.pop(key, None)

    def depths(self, chain: bytes) -> Mapping[WorkerKey, int]:
        found = {}
        for key, counts in self.counts.items():
            depth = 0
            for block in self.blocks(chain):
                if block not in counts:
                    break
                depth += 1
            if depth:
                found[key] = depth
        return found

    def forget(self, key: WorkerKey) -> None:
        self.counts.pop(key, None)


@pytest.fixture
def store() -> NaiveStore:
    return NaiveStore()


def _chain(text: str) -> bytes:
    """A chain with one block per letter; as real ones do, each name stands for everything before it."""
    return b"".join(text[:end].encode().rjust(HASH_BYTES, b".")[-HASH_BYTES:] for end in range(1, len(text) + 1))


@pytest.fixture
def chain() -> Callable[[str], bytes]:
    return _chain


class Fleet:
    """Idle workers with real accounting, and matches as the test wants them."""

    def __init__(self, names: str = "abc") -> None:
        self.names = list(names)
        self.inflight = InflightAccounting()
        self.model = PrefillModel()
        self.matched: dict[str, int] = {}
        self.evidence = Evidence.EXACT
        self.random = Random(7)
        self.requests = 0

    def snapshot(self, now: float = 0.0, rates: FleetRates | None = None) -> Snapshot:
        views = [
            WorkerView(
                name=name,
                rank=0,
                load=self.inflight.account(name),
                prefill=self.model,
                matched_tokens=self.matched.get(name, 0),
                confirmed_tokens=self.matched.get(name, 0) if self.evidence is Evidence.EXACT else 0,
                evidence=self.evidence,
            )
            for name in self.names
        ]
        return Snapshot(now, views, rates or self.inflight.rates(now, len(views)))

    def busy(self, name: str, requests: int, prompt_tokens: int = 1000, prefill_seconds: float = 0.05) -> None:
        """Requests that wait at a worker."""
        for _ in range(requests):
            self.requests += 1
            self.inflight.dispatch(f"busy-{self.requests}", name, 0, 0.0, prompt_tokens, prefill_seconds)

    def burst(self, policy, query: Query, requests: int, finish: bool = False) -> Counter[str]:
        """Requests at one moment, each counted at its decision; how many each worker got."""
        chosen: Counter[str] = Counter()
        for _ in range(requests):
            self.requests += 1
            view = policy.decide(query, self.snapshot(), self.random).worker
            seconds = view.prefill.prefill_seconds(query.prompt_tokens - view.matched_tokens, view.matched_tokens)
            self.inflight.dispatch(f"r{self.requests}", view.name, view.rank, 0.0, query.prompt_tokens, seconds)
            if finish:
                self.inflight.finish(f"r{self.requests}", 0.0)
            chosen[view.name] += 1
        return chosen


@pytest.fixture
def fleet() -> Callable[[str], Fleet]:
    return Fleet
