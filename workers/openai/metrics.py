"""`/metrics` under vLLM's names, so that one scraper reads every engine; and what moved of KV, under ours."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from workers.engine import Engine, HostMetrics, TransferMetrics

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
        if metrics.transfer is not None:
            yield from _transfers(metrics.transfer, self._values)
        if metrics.host is not None:
            yield from _host(metrics.host, self._values)

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


class TransferCollector(Collector):
    """Of an engine that tells everything else itself."""

    def __init__(self, model: str, rank: int, read: Callable[[], TransferMetrics]) -> None:
        self._values = (model, str(rank))
        self._read = read

    def collect(self) -> Iterator[Metric]:
        yield from _transfers(self._read(), self._values)


def _transfers(transfer: TransferMetrics, values: tuple[str, str]) -> Iterator[Metric]:
    yield _family(GaugeMetricFamily, "transfer_loading", "Generations that wait for KV.", values, transfer.loading)
    for name, text, value in (
        ("pulled_tokens", "Prompt tokens whose KV was pulled.", transfer.pulled_tokens),
        ("pulled_bytes", "Payload bytes pulled.", transfer.pulled_bytes),
        ("pull_seconds", "Time that successful pulls took.", transfer.pull_seconds),
        ("served", "Pulls of others, served to the end.", transfer.served),
        ("served_bytes", "Payload bytes sent to others.", transfer.served_bytes),
    ):
        yield _family(CounterMetricFamily, f"transfer_{name}", text, values, value)
    yield _labelled(
        "pulls", "Plans of requests, by what became of them.", ("outcome", "reason"), values, transfer.pulls
    )
    refused = {(reason,): count for reason, count in transfer.refused.items()}
    yield _labelled("refused", "Pulls of others that were refused.", ("reason",), values, refused)


def _host(host: HostMetrics, values: tuple[str, str]) -> Iterator[Metric]:
    for name, text, value in (
        ("blocks", "Blocks in host memory.", host.blocks),
        ("bytes", "Bytes of host memory in use.", host.bytes),
        ("bytes_max", "Bytes of host memory set aside.", host.bytes_max),
    ):
        yield _family(GaugeMetricFamily, f"host_{name}", text, values, value)
    for name, text, count in (
        ("hit_tokens", "Tokens that came back from host memory.", host.hit_tokens),
        ("stored_blocks", "Blocks that the engine's memory gave up and host memory kept.", host.stored_blocks),
        ("removed_blocks", "Blocks removed from host memory for want of room.", host.removed_blocks),
        ("saved_bytes", "Bytes copied to host memory.", host.saved_bytes),
        ("fetched_bytes", "Bytes copied back from host memory.", host.fetched_bytes),
        ("copy_seconds", "Time that the engine's thread spent on these copies.", host.copy_seconds),
    ):
        yield _family(CounterMetricFamily, f"host_{name}", text, values, count)


def _family(kind: "type[_Family]", name: str, text: str, values: tuple[str, str], value: float) -> "_Family":
    family = kind(f"ropeway_worker_{name}", text, labels=_LABELS)
    family.add_metric(values, value)
    return family


def _labelled(
    name: str, text: str, labels: tuple[str, ...], values: tuple[str, str], counts: Mapping[Any, int]
) -> Metric:
    family = CounterMetricFamily(f"ropeway_worker_transfer_{name}", text, labels=(*_LABELS, *labels))
    for key, count in counts.items():
        family.add_metric((*values, *key), count)
    return family


_Family = TypeVar("_Family", GaugeMetricFamily, CounterMetricFamily)


def registry_of(engine: Engine) -> CollectorRegistry:
    registry = CollectorRegistry()
    registry.register(EngineCollector(engine))
    return registry
