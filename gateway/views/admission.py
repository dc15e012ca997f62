"""Metrics of requests that wait at the gateway, and of those it refuses."""

from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from gateway.views.metrics import Histogram
from policies.state.admission import Reason

if TYPE_CHECKING:
    from gateway.admission import Admission

WAIT_BUCKETS_SECONDS = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)


class AdmissionMetrics:
    """What `gateway.admission` counts."""

    def __init__(self) -> None:
        self.refused: Counter[tuple[Reason, bool]] = Counter()
        """By reason, and whether the request had waited."""
        self.left = 0
        """Clients that went while they waited."""
        self.waits = Histogram(WAIT_BUCKETS_SECONDS)
        """Of those whose turn came; who passes at once is not among them."""


class AdmissionCollector(Collector):
    """Labels are bounded: models, reasons, and the tenants that have keys."""

    def __init__(self, admission: "Admission") -> None:
        self._admission = admission

    def collect(self) -> Iterator[Metric]:
        admission, metrics = self._admission, self._admission.metrics
        waiting = GaugeMetricFamily("ropeway_admission_waiting", "Requests that wait.", labels=("model",))
        held_back = GaugeMetricFamily(
            "ropeway_admission_held_back", "Tenants beyond their share while others wait elsewhere.", labels=("model",)
        )
        tokens = CounterMetricFamily(
            "ropeway_admission_tokens", "Tokens to compute and to say, of requests begun.", labels=("model", "tenant")
        )
        for model, gate in admission.gates.items():
            waiting.add_metric((model,), gate.queue.count)
            held_back.add_metric((model,), len(gate.shares.held_back))
            for tenant, total in gate.shares.totals.items():
                tokens.add_metric((model, tenant), total)
        yield from (waiting, held_back, tokens)
        yield GaugeMetricFamily("ropeway_admission_waiting_bytes", "Bodies that wait.", value=admission.held.bytes)
        refused = CounterMetricFamily(
            "ropeway_admission_refused", "Requests refused, on arrival or after a wait.", labels=("reason", "when")
        )
        for reason in Reason:
            for waited, when in ((False, "arrival"), (True, "waiting")):
                refused.add_metric((reason.value, when), metrics.refused[reason, waited])
        yield refused
        yield CounterMetricFamily("ropeway_admission_left", "Clients that went while they waited.", value=metrics.left)
        waits = HistogramMetricFamily("ropeway_admission_wait_seconds", "Of requests whose turn came.")
        waits.add_metric((), metrics.waits.buckets(), metrics.waits.total)
        yield waits
