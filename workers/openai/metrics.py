"""`/metrics` under vLLM's names, so that one scraper reads every engine."""

from collections.abc import Iterator

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from workers.engine import Engine

_LABELS = ("model_name", "engine")


class EngineCollector(Collector):
    """Reads `Engine.metrics` when scraped."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._values = (engine.info.model, "0")

    def collect(self) -> Iterator[Metric]:
        metrics = self._engine.metrics
        yield self._gauge("num_requests_running", "Requests in execution.", metrics.requests_running)
        yield self._gauge("num_requests_waiting", "Requests waiting to be scheduled.", metrics.requests_waiting)
        yield self._gauge("kv_cache_usage_perc", "KV cache in use; 1 is full.", metrics.kv_cache_usage)
        yield self._counter("prefix_cache_queries", "Prompt tokens looked up.", metrics.prefix_cache_queries)
        yield self._counter("prefix_cache_hits", "Prompt tokens found.", metrics.prefix_cache_hits)
        yield self._counter("prompt_tokens", "Prompt tokens processed.", metrics.prompt_tokens)
        yield self._counter("generation_tokens", "Tokens generated.", metrics.generation_tokens)
        yield self._counter("num_preemptions", "Preemptions for want of KV blocks.", metrics.preemptions)
        yield self._finished()
        yield self._cache_config()

    def _gauge(self, name: str, help_text: str, value: float) -> Metric:
        family = GaugeMetricFamily(f"vllm:{name}", help_text, labels=_LABELS)
        family.add_metric(self._values, value)
        return family

    def _counter(self, name: str, help_text: str, value: float) -> Metric:
        family = CounterMetricFamily(f"vllm:{name}", help_text, labels=_LABELS)
        family.add_metric(self._values, value)
        return family

    def _finished(self) -> Metric:
        labels = (*_LABELS, "finished_reason")
        family = CounterMetricFamily("vllm:request_success", "Requests finished, by reason.", labels=labels)
        for reason in ("stop", "length", "abort"):
            family.add_metric((*self._values, reason), self._engine.metrics.requests_finished.get(reason, 0))
        return family

    def _cache_config(self) -> Metric:
        info = self._engine.info
        labels = (*_LABELS, "block_size", "num_gpu_blocks")
        family = GaugeMetricFamily("vllm:cache_config_info", "Configuration of the KV cache.", labels=labels)
        family.add_metric((*self._values, str(info.block_size_tokens), str(info.blocks_total)), 1)
        return family


def registry_of(engine: Engine) -> CollectorRegistry:
    registry = CollectorRegistry()
    registry.register(EngineCollector(engine))
    return registry
