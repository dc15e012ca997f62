"""The best that could be done with a burst of siblings, found by trying placements in the audit's own fleet.

A placement has some workers compute the shared prompt, and some pull it from those as soon as it is there. Siblings
that stay with the former come at once, or all but the first of each when the prompt has been computed; so do those that
pull. TTFT counts from the burst.
"""

from dataclasses import replace
from random import Random
from typing import NamedTuple

from loadtest.audit.engine import Engine, EngineShape
from loadtest.audit.fleet import Fleet
from loadtest.audit.link import Network
from loadtest.audit.prepared import PreparedTrace
from loadtest.audit.router import Router, RouterSettings
from loadtest.audit.runs import Scenario, capacity_blocks
from policies.contract import Decision, Query, Snapshot
from policies.transfer import PullOption


class Sent(NamedTuple):
    """Where one sibling goes, and from whom it pulls what it shares."""

    worker: int
    source: int | None
    at: float


class Placement(NamedTuple):
    ttft_seconds_mean: float
    computing_workers: int
    siblings_max: int
    """At one worker."""


class _Following:
    """Sends siblings as a placement says."""

    name = "following"

    def __init__(self, sent: list[Sent], shared_tokens: int, size_bytes: int) -> None:
        self._sent = sent
        self._shared = shared_tokens, size_bytes

    def decide(self, query: Query, snapshot: Snapshot, random: Random) -> Decision:
        worker, source, _ = self._sent.pop(0)
        tokens, size = self._shared
        pull = PullOption(f"worker-{source}", 0, tokens, "raw", 0, size, 0, 0.1, 0.1, 0.1, 30.0)
        return Decision(snapshot.workers[worker], "", pull=None if source is None else pull)


def best_placement(
    trace: PreparedTrace, scenario: Scenario, shared_blocks: int, computing_max: int, siblings_max: int
) -> Placement:
    """Of all even ones with at most so many workers that compute the prompt, and siblings at one worker."""
    count, nodes = len(trace.requests), scenario.nodes
    found = []
    for computing in range(1, min(computing_max, nodes) + 1):
        for pulling in range(nodes - computing + 1):
            step = computing * max(4 // computing, 1)
            for staying in range(computing, count + 1, step) if pulling else (count,):
                most = max(-(-staying // computing), -(-(count - staying) // pulling) if pulling else 0)
                if most <= siblings_max and (pulling or staying == count):
                    ttft = _ttft_mean(trace, scenario, shared_blocks, computing, pulling, staying)
                    found.append(Placement(ttft, computing, most))
    return min(found)


def _ttft_mean(
    trace: PreparedTrace, scenario: Scenario, shared_blocks: int, computing: int, pulling: int, staying: int
) -> float:
    means = []
    for first in {computing, staying}:
        sent = [Sent(number % computing, None, 0.0) for number in range(first)]
        ready = min(_ttfts(trace, scenario, shared_blocks, sent)) + 1e-6
        sent += [Sent(number % computing, None, ready) for number in range(first, staying)]
        sent += [
            Sent(computing + number % pulling, number % pulling % computing, ready)
            for number in range(len(trace.requests) - staying)
        ]
        ttfts = _ttfts(trace, scenario, shared_blocks, sent)
        means.append(sum(ttft + one.at for ttft, one in zip(ttfts, sent, strict=True)) / len(ttfts))
    return min(means)


def _ttfts(trace: PreparedTrace, scenario: Scenario, shared_blocks: int, sent: list[Sent]) -> list[float]:
    block, profile, nodes = trace.block_size_tokens, scenario.profile, scenario.nodes
    blocks, tokens = capacity_blocks(scenario, block), shared_blocks * block
    assert scenario.link is not None
    cut = replace(trace, requests=trace.requests[: len(sent)], arrivals_seconds=[one.at for one in sent])
    settings = RouterSettings(block, nodes, profile.sequences_max, blocks, float(profile.kv_bytes_per_token))
    policy = _Following(list(sent), tokens, tokens * profile.kv_bytes_per_token)
    engines = [Engine(EngineShape(profile, block, blocks)) for _ in range(nodes)]
    router, network = Router(policy, settings, Random(0)), Network(scenario.link, nodes)
    return Fleet(cut, cut.arrivals(1.0), engines, router, network).run().ttft
