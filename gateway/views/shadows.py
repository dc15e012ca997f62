"""Metrics of policies that are asked and not followed; there only where some are."""

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from policies.shadow import Shadows

_LABELS = ("policy",)


class ShadowCollector(Collector):
    """What `policies.shadow` has found so far."""

    def __init__(self, shadows: Shadows) -> None:
        self._shadows = shadows

    def collect(self) -> Iterator[Metric]:
        decisions = CounterMetricFamily(
            "ropeway_shadow_decisions", "Requests that a shadow was asked about.", labels=_LABELS
        )
        agreed = CounterMetricFamily(
            "ropeway_shadow_agreed", "Of these, those that it would have placed alike.", labels=_LABELS
        )
        # Sums that may fall: what a shadow would have lost counts against what it would have saved.
        seconds = GaugeMetricFamily(
            "ropeway_shadow_regret_seconds",
            "Predicted time to first token that its choices would have saved.",
            labels=_LABELS,
        )
        tokens = GaugeMetricFamily(
            "ropeway_shadow_regret_tokens",
            "Prompt tokens to compute that its choices would have saved.",
            labels=_LABELS,
        )
        for shadow in self._shadows.shadows:
            name = (shadow.policy.name,)
            decisions.add_metric(name, shadow.decisions)
            agreed.add_metric(name, shadow.agreed)
            seconds.add_metric(name, shadow.regret_seconds)
            tokens.add_metric(name, shadow.regret_tokens)
        yield from (decisions, agreed, seconds, tokens)
