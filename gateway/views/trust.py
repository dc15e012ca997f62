"""Metrics of how far each worker's events are believed. `ropeway_worker_events_silent` is the one to alert on."""

from collections.abc import Iterator, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from gateway.fleet.trust import TrustLevel
from gateway.fleet.trust_watch import TrustWatch
from gateway.fleet.worker import WorkerRecord


class TrustCollector(Collector):
    """Labels are bounded: workers, levels, doubts."""

    def __init__(self, watch: TrustWatch, workers: Mapping[str, WorkerRecord]) -> None:
        self._watch = watch
        self._workers = workers

    def collect(self) -> Iterator[Metric]:
        levels = GaugeMetricFamily(
            "ropeway_worker_trust",
            "1 at the level at which a worker's events are believed.",
            labels=("worker", "level"),
        )
        silent = GaugeMetricFamily(
            "ropeway_worker_events_silent",
            "1 while a worker answers requests and nothing comes from its event stream.",
            labels=("worker",),
        )
        standing = GaugeMetricFamily(
            "ropeway_worker_doubt", "1 for each doubt that stands about a worker's events.", labels=("worker", "doubt")
        )
        raised = CounterMetricFamily(
            "ropeway_doubts", "Doubts raised about workers' events.", labels=("worker", "doubt")
        )
        for record in self._workers.values():
            for level in TrustLevel:
                levels.add_metric((record.name, level.value), float(record.trust.level is level))
            silent.add_metric((record.name,), float(record.trust.alarmed))
            for doubt in record.trust.doubts:
                standing.add_metric((record.name, doubt.value), 1.0)
        for (worker, doubt), count in self._watch.raised.items():
            raised.add_metric((worker, doubt.value), count)
        yield from (levels, silent, standing, raised)
