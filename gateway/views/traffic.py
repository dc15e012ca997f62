"""How the last minutes went: a bounded ring of samples that the gateway keeps, each of one interval.

Nothing is added to a request for it: a sample is the difference between two looks at what is counted anyway.
"""

import asyncio
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from itertools import takewhile
from typing import Any, NamedTuple

from gateway.edge.contract import Ending
from gateway.views.metrics import GatewayMetrics
from gateway.views.receipts import Receipts
from gateway.views.transfers import TransferMetrics
from policies.contract import Receipt

INTERVAL_SECONDS = 2.0
SAMPLES_MAX = 300
"""Ten minutes."""
LATENCY_WINDOW_SECONDS = 60.0

_BROKEN = frozenset({Ending.UPSTREAM_BROKE, Ending.REFUSED})


class Sample(NamedTuple):
    """One interval. Shares are of the prompt tokens routed in it; null where there were none."""

    at: float
    """Wall-clock seconds, of its end."""
    requests_per_second: float
    errors_per_second: float
    """Requests that failed at or before a worker, by no fault of the client's."""
    refused_per_second: float
    """Answered with an error before a worker was chosen."""
    hit_l0: float | None
    """Confirmed at the chosen worker, in the engine's own memory."""
    hit_l1: float | None
    """Confirmed, in its host memory."""
    hit_l2: float | None
    """Confirmed, in a pool."""
    hit_guessed: float | None
    """Matched by predictions and history, not confirmed."""
    hit_pulled: float | None
    """Brought from another worker or a pool, and used."""
    ttft_ms_p50: float | None
    """Of streams that began within the last minute and are among the last receipts; so are the next two."""
    ttft_ms_p90: float | None
    ttft_ms_p99: float | None
    inflight: int
    pulled_bytes_per_second: float
    saved_ms_per_second: float
    """Time to first token that pulls were to save, by the decisions."""


class _Totals(NamedTuple):
    at: float
    requests: int
    errors: int
    refused: int
    prompt_tokens: int
    tier_tokens: tuple[int, int, int]
    matched_tokens: int
    pulled_tokens: int
    pulled_bytes: int
    saved_seconds: float


class Traffic:
    """Samples of one gateway, oldest first. `run` belongs to whoever starts it."""

    def __init__(
        self,
        metrics: GatewayMetrics,
        receipts: Receipts,
        inflight: Callable[[], int],
        transfers: TransferMetrics | None = None,
        samples_max: int = SAMPLES_MAX,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._metrics = metrics
        self._receipts = receipts
        self._inflight = inflight
        self._transfers = transfers or TransferMetrics()
        self._clock = clock
        self._samples: deque[Sample] = deque(maxlen=samples_max)
        self._before = self._totals()
        self.taken = 0
        """How many samples there have been, those forgotten counted in."""

    def __repr__(self) -> str:
        return f"Traffic({len(self._samples)} of {self.taken} samples)"

    async def run(self) -> None:
        """Take samples, forever."""
        while True:
            await asyncio.sleep(INTERVAL_SECONDS)
            self.take()

    def take(self) -> Sample:
        """Close the interval that began with the last sample."""
        before, now = self._before, self._totals()
        self._before = now
        latency = latencies(self._receipts, now.at)
        seconds = max(now.at - before.at, 1e-3)
        prompt = now.prompt_tokens - before.prompt_tokens
        l0, l1, l2 = (after - earlier for after, earlier in zip(now.tier_tokens, before.tier_tokens, strict=True))
        matched = now.matched_tokens - before.matched_tokens

        def share(tokens: int) -> float | None:
            return tokens / prompt if prompt else None

        sample = Sample(
            now.at,
            (now.requests - before.requests) / seconds,
            (now.errors - before.errors) / seconds,
            (now.refused - before.refused) / seconds,
            share(l0),
            share(l1 - l0),
            share(l2 - l1),
            share(max(matched - l2, 0)),
            share(now.pulled_tokens - before.pulled_tokens),
            latency["p50"],
            latency["p90"],
            latency["p99"],
            self._inflight(),
            (now.pulled_bytes - before.pulled_bytes) / seconds,
            (now.saved_seconds - before.saved_seconds) * 1e3 / seconds,
        )
        self._samples.append(sample)
        self.taken += 1
        return sample

    def since(self, taken: int) -> list[Sample]:
        """Those after the first `taken` ones, as far as they are kept."""
        count = min(self.taken - taken, len(self._samples))
        return list(self._samples)[len(self._samples) - count :]

    def document(self) -> dict[str, Any]:
        """For `/status`."""
        return {
            "interval_seconds": INTERVAL_SECONDS,
            "fields": list(Sample._fields),
            "samples": [rounded(sample) for sample in self._samples],
        }

    def _totals(self) -> _Totals:
        metrics, transfers = self._metrics, self._transfers
        metrics.settle()
        l0, l1, l2 = metrics.tier_tokens
        return _Totals(
            self._clock(),
            sum(metrics.endings.values()),
            errors(metrics.endings),
            sum(metrics.refusals.values()),
            metrics.prompt_tokens,
            (l0, l1, l2),
            sum(metrics.matched_tokens.values()),
            transfers.pulled_tokens,
            transfers.pulled_bytes,
            transfers.saved_seconds,
        )


def errors(endings: Counter[tuple[str, int]]) -> int:
    """Requests that failed by no fault of their client's."""
    return sum(count for (ending, status), count in endings.items() if ending in _BROKEN or status >= 500)


def latencies(receipts: Iterable[Receipt], now: float) -> dict[str, Any]:
    """Time to first token of the streams among the receipts, newest first, that were decided within the last minute."""
    recent = takewhile(lambda receipt: receipt.decided_at > now - LATENCY_WINDOW_SECONDS, receipts)
    seen = sorted(receipt.seen_ttft_ms for receipt in recent if receipt.seen_ttft_ms is not None)
    quantiles = {f"p{percent}": percentile(seen, percent) for percent in (50, 90, 99)}
    return {"window_seconds": LATENCY_WINDOW_SECONDS, "count": len(seen), **quantiles}


def percentile(ordered: Sequence[float], percent: int) -> float | None:
    """The nearest rank; None of nothing."""
    return ordered[-(-len(ordered) * percent // 100) - 1] if ordered else None


def rounded(sample: Sample) -> list[float | None]:
    """As it is sent: four digits after the point are more than anybody sees."""
    return [None if value is None else round(value, 4) for value in sample]
