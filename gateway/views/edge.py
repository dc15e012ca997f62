"""What the edge holds for its clients, as metrics."""

from collections import Counter
from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from gateway.edge.server import Edge, State


class EdgeCollector(Collector):
    def __init__(self, edge: Edge) -> None:
        self._edge = edge

    def collect(self) -> Iterator[Metric]:
        edge = self._edge
        states: Counter[State] = Counter(connection.state for connection in edge.connections)
        connections = GaugeMetricFamily(
            "ropeway_client_connections", "Open connections of clients, by what they are at.", labels=("state",)
        )
        for state in State:
            connections.add_metric((state.name.lower(),), states[state])
        yield connections
        for name, text, value in (
            ("connections_max", "Connections of clients that are taken.", edge.limits.connections_max),
            ("requests_bytes", "Of the bodies of requests under way.", edge.requests_bytes),
            ("requests_bytes_max", "Of these, what is taken.", edge.limits.requests_bytes_max),
            ("connections_refusing", "Connections beyond these that are being told so.", len(edge.turned_away)),
            (
                "unsent_bytes",
                "Kept for clients that have not taken them.",
                sum(c.unsent_bytes for c in edge.connections),
            ),
            ("received_bytes", "Of requests that are not whole.", sum(c.received_bytes for c in edge.connections)),
        ):
            yield GaugeMetricFamily(f"ropeway_client_{name}", text, value=value)
        for name, text, value in (
            ("connections_refused", "Connections beyond the bound.", edge.turned_away_count),
            ("connections_stalled", "Clients that were reset because they took nothing.", edge.stalled_count),
        ):
            yield CounterMetricFamily(f"ropeway_client_{name}", text, value=value)
