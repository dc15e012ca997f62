"""Metrics of pulls; there only where workers can be told to pull."""

import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from cachecore.scope import Fidelity
from cachecore.transfer.errors import REASONS
from gateway.views.metrics import Histogram
from policies.state.guard import QualityGuard
from policies.transfer import PullOption, PullReport

RATIO_BUCKETS = (0.25, 0.5, 0.7, 0.85, 1.0, 1.2, 1.5, 2.0, 4.0, 8.0)
LOAD_BUCKETS_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
OUTCOMES = frozenset({"fetched", "held", "refused", "failed", "unreported", "malformed"})
_REASONS = frozenset(map(str, REASONS))
_OTHER = "other"


class TransferMetrics:
    """What `gateway.transfers` counts."""

    def __init__(self) -> None:
        self.plans: Counter[tuple[str, str]] = Counter()
        """By kind of source and codec."""
        self.unsigned = 0
        """Decisions to pull that could not be made into plans."""
        self.outcomes: Counter[tuple[str, str]] = Counter()
        """By outcome and reason, as workers report them."""
        self.answers: Counter[Fidelity] = Counter()
        self.planned_tokens = 0
        self.pulled_tokens = 0
        self.pulled_bytes = 0
        self.saved_seconds = 0.0
        """What the first tokens were to come sooner, by the decisions."""
        self.seconds = Histogram(LOAD_BUCKETS_SECONDS)
        self.predicted_seconds = Histogram(LOAD_BUCKETS_SECONDS)
        """Of the same pulls."""
        self.error_ratio = Histogram(RATIO_BUCKETS)

    def planned(self, from_pool: bool, option: PullOption) -> None:
        self.plans[("pool" if from_pool else "worker", option.codec)] += 1
        self.planned_tokens += option.tokens
        self.saved_seconds += option.saved_seconds

    def reported(self, option: PullOption, report: PullReport) -> None:
        # Labels are bounded, whatever a worker writes.
        outcome = report.outcome if report.outcome in OUTCOMES else _OTHER
        reason = report.reason if not report.reason or report.reason in _REASONS else _OTHER
        self.outcomes[(outcome, reason)] += 1
        self.pulled_tokens += report.tokens
        self.pulled_bytes += report.size_bytes
        if outcome == "fetched" and report.seconds > 0:
            self.seconds.observe(report.seconds)
            self.predicted_seconds.observe(option.load_seconds)
            self.error_ratio.observe(report.seconds / option.load_seconds)

    def document(self) -> dict[str, Any]:
        """For `/status`."""
        return {
            "planned_tokens": self.planned_tokens,
            "pulled_tokens": self.pulled_tokens,
            "pulled_bytes": self.pulled_bytes,
            "saved_seconds": self.saved_seconds,
            "outcomes": {
                f"{outcome}: {reason}" if reason else outcome: count
                for (outcome, reason), count in self.outcomes.items()
            },
        }


class QualityCollector(Collector):
    """What the guard believes. Labels are bounded as the guard's memory is."""

    def __init__(self, guard: QualityGuard, clock: Callable[[], float] = time.monotonic) -> None:
        self._guard = guard
        self._clock = clock

    def collect(self) -> Iterator[Metric]:
        labels = ("model", "tenant", "way")
        kl = GaugeMetricFamily("ropeway_kv_quality_kl", "Mean KL to exact KV over the last samples.", labels=labels)
        allowed = GaugeMetricFamily("ropeway_kv_quality_allowed", "1 while it may be planned.", labels=labels)
        trips = CounterMetricFamily("ropeway_kv_quality_trips", "How often a budget was exceeded.", labels=labels)
        for report in self._guard.report(self._clock()):
            kl.add_metric(report.way, report.kl_mean)
            allowed.add_metric(report.way, float(report.allowed))
            trips.add_metric(report.way, report.trips)
        yield from (kl, allowed, trips)


class TransferCollector(Collector):
    def __init__(self, metrics: TransferMetrics, under_way: Callable[[], int]) -> None:
        self._metrics = metrics
        self._under_way = under_way

    def collect(self) -> Iterator[Metric]:
        metrics = self._metrics
        plans = CounterMetricFamily(
            "ropeway_transfer_plans", "Requests sent with a plan to pull KV.", labels=("source", "codec")
        )
        for labels, count in metrics.plans.items():
            plans.add_metric(labels, count)
        yield plans
        outcomes = CounterMetricFamily(
            "ropeway_transfer_outcomes", "What became of plans, as workers report it.", labels=("outcome", "reason")
        )
        for labels, count in metrics.outcomes.items():
            outcomes.add_metric(labels, count)
        yield outcomes
        answers = CounterMetricFamily(
            "ropeway_transfer_answers", "Answers by the worst KV they came from.", labels=("fidelity",)
        )
        for fidelity, count in metrics.answers.items():
            answers.add_metric((fidelity.name.lower(),), count)
        yield answers
        yield from self._totals()
        yield from self._times()

    def _totals(self) -> Iterator[Metric]:
        metrics = self._metrics
        for name, text, value in (
            ("unsigned_plans", "Decisions to pull that could not be made into plans.", metrics.unsigned),
            ("planned_tokens", "Prompt tokens that workers were told to pull.", metrics.planned_tokens),
            ("pulled_tokens", "Prompt tokens that workers pulled and used.", metrics.pulled_tokens),
            ("pulled_bytes", "Bytes of KV that workers pulled.", metrics.pulled_bytes),
            ("saved_seconds", "What first tokens were to come sooner, by the decisions.", metrics.saved_seconds),
        ):
            yield CounterMetricFamily(f"ropeway_transfer_{name}", text, value=value)
        yield GaugeMetricFamily("ropeway_transfer_under_way", "Pulls not reported yet.", value=self._under_way())

    def _times(self) -> Iterator[Metric]:
        metrics = self._metrics
        for name, text, histogram in (
            ("seconds", "Duration of pulls, as workers report it.", metrics.seconds),
            ("predicted_seconds", "Of the same pulls, what was predicted.", metrics.predicted_seconds),
            ("error_ratio", "Seen duration over the predicted one.", metrics.error_ratio),
        ):
            family = HistogramMetricFamily(f"ropeway_transfer_{name}", text)
            family.add_metric((), histogram.buckets(), histogram.total)
            yield family
