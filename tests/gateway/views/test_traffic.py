"""Samples of traffic: differences of what is counted, in a bounded ring."""

from random import Random
from types import SimpleNamespace
from typing import cast

import pytest

from gateway.edge.contract import Ending
from gateway.views.metrics import GatewayMetrics
from gateway.views.receipts import Receipts
from gateway.views.traffic import Sample, Traffic, latencies, percentile
from gateway.views.transfers import TransferMetrics
from policies.contract import Receipt


def receipt(decided_at: float, seen_ttft_ms: float | None) -> Receipt:
    return cast(Receipt, SimpleNamespace(decided_at=decided_at, seen_ttft_ms=seen_ttft_ms))


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_a_sample_is_the_difference_to_the_one_before(clock: Clock) -> None:
    metrics, transfers = GatewayMetrics(), TransferMetrics()
    metrics.prompt_tokens, metrics.endings[(Ending.COMPLETE, 200)] = 500, 7
    traffic = Traffic(metrics, Receipts(), lambda: 3, transfers, clock=clock)
    metrics.prompt_tokens += 1000
    metrics.tier_tokens[:] = [400, 500, 600]
    metrics.matched_tokens.update({"exact": 600, "predicted": 100})
    metrics.endings[(Ending.COMPLETE, 200)] += 8
    metrics.endings[(Ending.UPSTREAM_BROKE, 200)] += 1
    metrics.endings[(Ending.COMPLETE, 503)] += 1
    metrics.endings[(Ending.CLIENT_GONE, 0)] += 2
    metrics.refusals[400] += 4
    transfers.pulled_tokens, transfers.pulled_bytes, transfers.saved_seconds = 50, 8_000_000, 0.5
    clock.now += 4.0
    assert traffic.take() == Sample(
        1004.0, 3.0, 0.5, 1.0, 0.4, 0.1, 0.1, 0.1, 0.05, None, None, None, 3, 2_000_000.0, 125.0
    )
    clock.now += 4.0
    assert traffic.take() == Sample(1008.0, *[0.0] * 3, *[None] * 8, 3, 0.0, 0.0)


def test_the_ring_is_bounded_and_tells_what_is_new(clock: Clock) -> None:
    traffic = Traffic(GatewayMetrics(), Receipts(), lambda: 0, samples_max=3, clock=clock)
    for _ in range(5):
        clock.now += 1.0
        traffic.take()
    assert [sample.at for sample in traffic.since(0)] == [1003.0, 1004.0, 1005.0]
    assert [sample.at for sample in traffic.since(4)] == [1005.0]
    assert traffic.since(5) == []
    document = traffic.document()
    assert [row[document["fields"].index("at")] for row in document["samples"]] == [1003.0, 1004.0, 1005.0]


def test_latency_is_of_the_last_minute_alone() -> None:
    receipts = [
        receipt(99.0, 30.0),
        receipt(98.0, None),
        receipt(97.0, 10.0),
        receipt(39.0, 5000.0),
        receipt(99.5, 1.0),
    ]
    assert latencies(receipts, 100.0) == {"window_seconds": 60.0, "count": 2, "p50": 10.0, "p90": 30.0, "p99": 30.0}
    assert latencies([], 100.0)["p50"] is None


def test_percentiles_are_nearest_ranks() -> None:
    random = Random(3)
    for count in (1, 2, 3, 10, 99, 100, 101, 250):
        values = sorted(random.random() for _ in range(count))
        for percent in (50, 90, 99):
            rank = next(rank for rank in range(1, count + 1) if rank * 100 >= percent * count)
            assert percentile(values, percent) == values[rank - 1]
