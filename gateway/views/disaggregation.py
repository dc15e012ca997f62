"""Metrics of requests with two legs; there only where some worker does nothing but prefill."""

from collections import Counter
from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from gateway.views.metrics import TTFT_BUCKETS_SECONDS, Histogram
from policies.legs import Outcome


class DisaggregationMetrics:
    """What `gateway.disaggregation` counts."""

    def __init__(self) -> None:
        self.outcomes: Counter[Outcome] = Counter()
        self.prefill_seconds = Histogram(TTFT_BUCKETS_SECONDS)
        """First legs that were answered."""
        self.decode_seconds = Histogram(TTFT_BUCKETS_SECONDS)
        """The second legs of the same requests, to their first token."""


class DisaggregationCollector(Collector):
    """Says nothing until there was something to divide."""

    def __init__(self, metrics: DisaggregationMetrics) -> None:
        self._metrics = metrics

    def collect(self) -> Iterator[Metric]:
        metrics = self._metrics
        if not metrics.outcomes:
            return
        outcomes = CounterMetricFamily(
            "ropeway_disaggregated", "Requests before divided workers, by their legs.", labels=("outcome",)
        )
        for outcome in Outcome:
            outcomes.add_metric((outcome.value,), metrics.outcomes[outcome])
        yield outcomes
        seconds = HistogramMetricFamily(
            "ropeway_disaggregated_leg_seconds",
            "Of requests with two legs: the prefill worker's answer, and from there to the first token.",
            labels=("leg",),
        )
        for leg, histogram in (("prefill", metrics.prefill_seconds), ("decode", metrics.decode_seconds)):
            seconds.add_metric((leg,), histogram.buckets(), histogram.total)
        yield seconds
