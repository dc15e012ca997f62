"""Prometheus metrics. The hot path adds to plain numbers; names and labels are put to them when someone scrapes."""

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Sequence

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from gateway.edge.contract import Ending
from gateway.fleet.knowledge import Knowledge
from gateway.fleet.registry import Fleet
from gateway.fleet.trust import TrustLevel
from gateway.fleet.worker import Parity
from policies.contract import Evidence, Receipt

TTFT_BUCKETS_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
DURATION_BUCKETS_SECONDS = (0.01, 0.05, 0.1, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)
DECISION_BUCKETS_SECONDS = (0.00001, 0.000025, 0.00005, 0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01)

UNSETTLED_MAX = 128


class Histogram:
    """Counts per bucket, and their sum."""

    __slots__ = ("_bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self._bounds, value)] += 1
        self.total += value

    def buckets(self) -> list[tuple[str, float]]:
        """Cumulative, as Prometheus wants them."""
        result: list[tuple[str, float]] = []
        seen = 0
        for bound, count in zip((*map(str, self._bounds), "+Inf"), self.counts, strict=True):
            seen += count
            result.append((bound, seen))
        return result


class GatewayMetrics:
    """What the pipeline counts.

    Decisions and endings are only noted; `settle` counts them when there are many, or before anyone looks: a hundred in
    a row cost less than each one between two requests.
    """

    def __init__(self) -> None:
        self.endings: Counter[tuple[str, int]] = Counter()
        self.refusals: Counter[int] = Counter()
        self.decisions: Counter[tuple[str, str, str]] = Counter()
        self.retries: Counter[str] = Counter()
        self.failed_lookups = 0
        self.prompt_tokens = 0
        self.matched_tokens: Counter[str] = Counter()
        self.tier_tokens = [0, 0, 0]
        """Of these, confirmed and reachable using L0; L0 and L1; and all tiers."""
        self.reported_prompt_tokens = 0
        self.reported_cached_tokens = 0
        self.phantom_tokens = 0
        """Tokens said to be cached that the worker computed after all."""
        self.ttft = Histogram(TTFT_BUCKETS_SECONDS)
        self.duration = Histogram(DURATION_BUCKETS_SECONDS)
        self.decision = Histogram(DECISION_BUCKETS_SECONDS)
        self._routed: list[Receipt] = []
        self._ended: list[tuple[Ending, int, float]] = []

    def routed(self, receipt: Receipt) -> None:
        self._routed.append(receipt)
        if len(self._routed) >= UNSETTLED_MAX:
            self.settle()

    def first_byte(self, seconds: float) -> None:
        self.ttft.observe(seconds)

    def retried(self, reason: str) -> None:
        self.retries[reason.partition(":")[0]] += 1

    def refused(self, status: int) -> None:
        """A request that was answered with an error before any worker was chosen."""
        self.refusals[status] += 1

    def ended(self, ending: Ending, status: int, seconds: float) -> None:
        self._ended.append((ending, status, seconds))
        if len(self._ended) >= UNSETTLED_MAX:
            self.settle()

    def hit(self, receipt: Receipt, cached_tokens: int) -> None:
        """What the worker reports, beside what was confirmed to us."""
        self.reported_prompt_tokens += receipt.reported_prompt_tokens or 0
        self.reported_cached_tokens += cached_tokens
        chosen = receipt.candidate
        if chosen.evidence is Evidence.EXACT:
            self.phantom_tokens += max(chosen.confirmed_tokens - cached_tokens, 0)

    def settle(self) -> None:
        """Count what was noted."""
        routed, self._routed = self._routed, []
        l0 = l1 = l2 = 0
        for receipt in routed:
            worker, _, matched_tokens, _, (near, host, pooled), evidence = receipt.candidate_fields[receipt.chosen]
            self.decisions[(receipt.policy, worker, evidence)] += 1
            self.prompt_tokens += receipt.query.prompt_tokens
            self.matched_tokens[evidence] += matched_tokens
            l0 += near
            l1 += host
            l2 += pooled
            self.decision.observe(receipt.decision_us / 1e6)
        self.tier_tokens = [old + new for old, new in zip(self.tier_tokens, (l0, l1, l2), strict=True)]
        ended, self._ended = self._ended, []
        for ending, status, seconds in ended:
            self.endings[(ending, status)] += 1
            self.duration.observe(seconds)


class GatewayCollector(Collector):
    """Turns the gateway's numbers into metrics at scrape time. Labels are bounded: workers, policies, statuses."""

    def __init__(self, metrics: GatewayMetrics, fleet: Fleet, knowledge: Knowledge) -> None:
        self._metrics = metrics
        self._fleet = fleet
        self._knowledge = knowledge

    def collect(self) -> Iterator[Metric]:
        self._metrics.settle()
        yield from self._requests()
        yield from self._tokens()
        yield from self._latencies()
        yield from self._workers()
        yield from self._index()

    def _requests(self) -> Iterator[Metric]:
        metrics = self._metrics
        yield _counter(
            "requests",
            "Requests sent to workers, by how they ended.",
            ("ending", "status"),
            {(ending, str(status)): count for (ending, status), count in metrics.endings.items()},
        )
        yield _counter(
            "refusals",
            "Requests answered with an error before a worker was chosen.",
            ("status",),
            {(str(status),): count for status, count in metrics.refusals.items()},
        )
        yield _counter(
            "decisions",
            "Decisions, by policy, worker and evidence.",
            ("policy", "worker", "evidence"),
            {(policy, worker, str(evidence)): count for (policy, worker, evidence), count in metrics.decisions.items()},
        )
        yield _counter(
            "retries",
            "Attempts repeated before the first byte.",
            ("reason",),
            {(reason,): count for reason, count in metrics.retries.items()},
        )

        yield _counter(
            "failed_lookups",
            "Requests placed without the shared index, which did not answer in time.",
            (),
            {(): metrics.failed_lookups},
        )

    def _tokens(self) -> Iterator[Metric]:
        metrics = self._metrics
        yield _counter("prompt_tokens", "Prompt tokens routed.", (), {(): metrics.prompt_tokens})
        yield _counter(
            "matched_tokens",
            "Prompt tokens matched at the chosen worker.",
            ("evidence",),
            {(str(evidence),): count for evidence, count in metrics.matched_tokens.items()},
        )
        yield _counter(
            "reported_prompt_tokens",
            "Prompt tokens of answers whose worker reports cached tokens.",
            (),
            {(): metrics.reported_prompt_tokens},
        )
        yield _counter(
            "reported_cached_tokens",
            "Prompt tokens that workers say they had cached.",
            (),
            {(): metrics.reported_cached_tokens},
        )
        yield _counter(
            "phantom_tokens",
            "Tokens confirmed by events that the worker computed after all.",
            (),
            {(): metrics.phantom_tokens},
        )

    def _latencies(self) -> Iterator[Metric]:
        for name, text, histogram in (
            ("ttft_seconds", "From decision to the first event of a stream that says something.", self._metrics.ttft),
            ("request_duration_seconds", "From decision to the end of the answer.", self._metrics.duration),
            ("decision_seconds", "Snapshot and policy, index lookup excluded.", self._metrics.decision),
        ):
            family = HistogramMetricFamily(f"ropeway_{name}", text)
            family.add_metric((), histogram.buckets(), histogram.total)
            yield family

    def _workers(self) -> Iterator[Metric]:
        gauges = {
            name: GaugeMetricFamily(f"ropeway_worker_{name}", text, labels=("worker",))
            for name, text in (
                ("healthy", "1 when the worker takes requests."),
                ("parity_failed", "1 when the worker tokenizes other than we do, and gets no affinity."),
                ("events_trusted", "1 when its KV events are complete and the index is believed about it."),
                ("inflight_requests", "Requests dispatched and not finished."),
                ("waiting_requests", "Of those, without a first token."),
                ("outstanding_prefill_seconds", "Predicted prefill of waiting requests."),
                ("connections", "Open connections."),
            )
        }
        for record in self._fleet.workers.values():
            accounts = [self._knowledge.accounting.account(h.name, h.rank) for h in record.holders]
            for name, value in (
                ("healthy", float(record.eligible)),
                ("parity_failed", float(record.parity is Parity.FAILED)),
                ("events_trusted", float(record.trust.level is TrustLevel.EXACT)),
                ("inflight_requests", sum(account.inflight for account in accounts)),
                ("waiting_requests", sum(account.waiting for account in accounts)),
                ("outstanding_prefill_seconds", sum(account.outstanding_prefill_seconds for account in accounts)),
                ("connections", len(record.connections)),
            ):
                gauges[name].add_metric((record.name,), value)
        yield from gauges.values()
        roles = GaugeMetricFamily("ropeway_worker_role", "What a worker is for.", labels=("worker", "role"))
        for record in self._fleet.workers.values():
            roles.add_metric((record.name, record.role), 1.0)
        yield roles

    def _index(self) -> Iterator[Metric]:
        stats = self._knowledge.index.stats()
        for name, text, value in (
            ("blocks", "Distinct blocks in the index.", stats.blocks),
            ("holdings", "Holdings in the index: a block at a place.", stats.holdings),
            ("runs", "Path-compressed runs in the index.", stats.runs),
        ):
            yield GaugeMetricFamily(f"ropeway_index_{name}", text, value=value)
        for name, text, value in (
            ("evicted_blocks", "Blocks forgotten to keep the index bounded.", stats.evicted_blocks),
            ("stale_batches", "Event batches that had been applied before.", stats.stale_batches),
            ("unknown_removals", "Removals of blocks that were not held.", stats.unknown_removals),
        ):
            yield CounterMetricFamily(f"ropeway_index_{name}", text, value=value)


def _counter(name: str, text: str, labels: tuple[str, ...], values: dict[tuple[str, ...], int]) -> Metric:
    family = CounterMetricFamily(f"ropeway_{name}", text, labels=labels)
    for key, value in values.items():
        family.add_metric(key, value)
    return family
