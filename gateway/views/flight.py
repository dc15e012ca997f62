"""Metrics of what is kept while requests are under way: each returns to zero, or to idle, when the last has ended."""

import time
from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from gateway.fleet.knowledge import Knowledge
from gateway.fleet.registry import Fleet


class FlightCollector(Collector):
    def __init__(self, knowledge: Knowledge, fleet: Fleet) -> None:
        self._knowledge = knowledge
        self._fleet = fleet

    def collect(self) -> Iterator[Metric]:
        knowledge, now = self._knowledge, time.monotonic()
        for predictions in (knowledge.predictions, knowledge.inexact_predictions):
            predictions.expire(now)
        predicted = len(knowledge.predictions) + len(knowledge.inexact_predictions)
        leased = len(knowledge.prefills) + len(knowledge.arrivals)
        accounted = len(knowledge.accounting)
        yield _gauge("accounted_requests", "Requests in the accounts, those of other gateways too.", accounted)
        yield _gauge("predictions", "Dispatches whose blocks are believed to come.", predicted)
        yield _gauge("leases", "Blocks that a request is waiting for another one to compute or bring.", leased)
        yield from self._workers()

    def _workers(self) -> Iterator[Metric]:
        idle = GaugeMetricFamily("ropeway_worker_idle_connections", "Open connections that wait.", labels=("worker",))
        sent = CounterMetricFamily("ropeway_worker_sent_requests", "Requests written to it.", labels=("worker",))
        for record in self._fleet.workers.values():
            idle.add_metric((record.name,), record.connections.idle)
            sent.add_metric((record.name,), record.connections.sent)
        yield idle
        yield sent


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(f"ropeway_{name}", text, value=value)
