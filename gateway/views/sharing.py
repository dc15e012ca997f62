"""Metrics of what a gateway shares with others; there only where it does."""

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from gateway.sharing import Sharing


class SharingCollector(Collector):
    def __init__(self, sharing: Sharing) -> None:
        self._sharing = sharing

    def collect(self) -> Iterator[Metric]:
        sharing, backend = self._sharing, self._sharing.backend
        health, peers, written = backend.store.health(), sharing.peers.stats(), backend.publisher.stats()
        yield _gauge("store_up", "1 while the shared store answers within its budget.", float(health.up))
        yield _gauge("store_latency_seconds", "Of the store's last answer.", health.latency_seconds)
        yield _gauge("streams_owned", "Event streams that this gateway follows for all.", len(sharing.streams.owned()))
        yield _gauge("peers", "Other gateways heard of lately.", len(sharing.peers.alive()))
        yield _counter("peer_notes_sent", "Notes sent to other gateways.", peers.sent_notes)
        yield _counter("peer_notes_dropped", "Notes that could not be sent.", peers.dropped_notes)
        yield _counter("peer_notes_received", "Notes of other gateways.", peers.received.notes)
        yield _counter("index_steps_written", "Steps written to the shared index.", written.extra["written_steps"])
        yield _counter(
            "index_restatements", "Holders written anew after a loss of the store's.", written.extra["restatements"]
        )
        if backend.mirror is not None:
            progress = backend.mirror.progress()
            yield _gauge("mirror_ready", "1 when lookups are answered from the mirror.", float(progress.ready))
            if progress.lag_seconds is not None:
                yield _gauge("mirror_lag_seconds", "Since every stream was read to its end.", progress.lag_seconds)
            yield _counter("mirror_entries", "Stream entries read.", progress.entries)
            yield _counter("mirror_resyncs", "Holders copied anew.", progress.resyncs)


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(f"ropeway_{name}", text, value=value)


def _counter(name: str, text: str, value: float) -> Metric:
    return CounterMetricFamily(f"ropeway_{name}", text, value=value)
