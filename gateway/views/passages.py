"""Metrics of passages that are turned and repaired; there only where they are looked for."""

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from gateway.shifted import PassagePlanner


class PassageCollector(Collector):
    def __init__(self, planner: PassagePlanner) -> None:
        self._planner = planner

    def collect(self) -> Iterator[Metric]:
        metrics, index = self._planner.metrics, self._planner.index
        yield CounterMetricFamily(
            "ropeway_passages_prompts", "Prompts sent with plans to turn passages.", value=metrics.prompts
        )
        yield CounterMetricFamily("ropeway_passages_runs", "Runs that were planned to be turned.", value=metrics.runs)
        yield CounterMetricFamily("ropeway_passages_tokens", "Tokens of these runs.", value=metrics.tokens)
        yield GaugeMetricFamily(
            "ropeway_passages_blocks", "Blocks whose text can be looked up, in this process.", value=len(index)
        )
