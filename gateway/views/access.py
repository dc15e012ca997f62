"""Metrics of who comes in: API keys and rate limits."""

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from gateway.access import Access


class AccessCollector(Collector):
    """Labels are bounded: the tenants that have keys, and two resources."""

    def __init__(self, access: Access) -> None:
        self._access = access

    def collect(self) -> Iterator[Metric]:
        access = self._access
        yield GaugeMetricFamily("ropeway_api_keys", "API keys that are good now.", value=len(access.tenants.roster))
        yield GaugeMetricFamily(
            "ropeway_api_keys_unread",
            "1 while the file or the server with API keys cannot be read, and those of before stay.",
            value=float(bool(access.keys_problem)),
        )
        refused = CounterMetricFamily(
            "ropeway_rate_limited", "Requests refused over a limit per minute.", labels=("tenant", "resource")
        )
        for (tenant, resource), count in access.limits.refused.items():
            refused.add_metric((tenant, resource), count)
        yield refused
