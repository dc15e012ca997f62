"""What a gateway knows of pools, as metrics. Their occupancy and latency are the workers' to tell."""

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from gateway.fleet.pools import PoolFollower

_COUNTERS = {
    "stored": "Runs that were told of for the first time.",
    "removed": "Runs told to be gone.",
    "swept": "Runs that a whole listing did not name.",
    "forgotten": "Runs forgotten to stay within the bound.",
    "doubted": "Runs that a worker did not find.",
    "odd": "Runs told of that no match could find.",
}
_TELLERS = {
    "listings": "Pools listed as a whole.",
    "changes": "Changes heard.",
    "failures": "Questions that were not answered.",
}


class PoolCollector(Collector):
    """Labels are bounded: pools and workers."""

    def __init__(self, follower: PoolFollower) -> None:
        self._follower = follower

    def collect(self) -> Iterator[Metric]:
        knowledge, tellers = self._follower.knowledge, self._follower.tellers
        runs = GaugeMetricFamily("ropeway_pool_runs", "Runs known to be in a pool.", labels=("pool",))
        for holder, count in knowledge.runs_by_pool().items():
            runs.add_metric((holder.name,), count)
        yield runs
        for name, text in _COUNTERS.items():
            yield CounterMetricFamily(f"ropeway_pool_runs_{name}", text, value=getattr(knowledge.stats, name))
        followed = GaugeMetricFamily("ropeway_pool_teller_up", "1 while a worker tells of pools.", labels=("worker",))
        for worker, state in tellers.items():
            followed.add_metric((worker,), float(not state.reason))
        yield followed
        for name, text in _TELLERS.items():
            family = CounterMetricFamily(f"ropeway_pool_teller_{name}", text, labels=("worker",))
            for worker, state in tellers.items():
                family.add_metric((worker,), getattr(state, name))
            yield family
