"""Replays by name: what to run, what came of it in numbers, sweeps over loads and seeds.

token hit rate      sum of prompt tokens reused at first admission / sum of prompt tokens
block hit rate      the same, in blocks; a partly filled last block counts as one that missed
goodput             share of ALL requests with TTFT <= 2 s; refused and unfinished ones count against it
goodput by size     the same with TTFT <= 1 s + 2 x the prompt's prefill alone on an idle engine without a cache
capacity at an SLO  the load at which goodput falls to .90, linear between the loads that were run
"""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields, replace
from itertools import pairwise
from math import inf, isfinite, sqrt
from random import Random
from typing import Any

from cachecore.index.chains import ChainMultiset
from loadtest.audit.engine import Engine, EngineShape
from loadtest.audit.fleet import Fleet, Outcomes
from loadtest.audit.link import LinkShape, Network
from loadtest.audit.prepared import PreparedTrace
from loadtest.audit.router import Router, RouterSettings
from loadtest.figures import Spread, max_over_mean, spread
from policies import POLICIES
from policies.contract import Policy
from policies.estimates import LinkPrior, PrefillPrior
from policies.peers import PEERS
from workers.timing import LLAMA_3_70B_TP8, TimingProfile, blocks_for

SLO_TTFT_SECONDS = 2.0
SLO_SHARE = 0.90
SEEK_PRECISION = 0.02
"""Of the two loads that a capacity lies between: goodput bends there, and a wider line cuts the corner."""
SEEK_LOADS = (1 / 64, 256.0)
SIZE_AWARE_SECONDS = 1.0
SIZE_AWARE_FACTOR = 2.0
AMPLE_BLOCKS = 1_000_000_000
"""A cache that never evicts."""


@dataclass(frozen=True, slots=True)
class Scenario:
    """One replay of one trace."""

    policy: str = "kv-aware"
    nodes: int = 8
    load: float = 1.0
    """Arrivals come so many times as densely as in the trace."""
    profile: TimingProfile = LLAMA_3_70B_TP8
    capacity_blocks: int = 0
    """KV memory of each engine, in blocks of the trace; 0 for the profile's own."""
    capacity: str = ""
    """What reports call it; the number of blocks when empty."""
    node_speeds: Sequence[float] = ()
    """How much faster than the profile each engine is; all alike when empty."""
    link: LinkShape | None = None
    """Between engines; without one nothing is pulled."""
    link_known: bool = False
    """Whether the router knows from the beginning how fast links are; else it finds out."""
    engine_priorities: bool = False
    """Whether engines order their queues by the key that our gateway gives; peers' routers give none."""
    jitter_seconds: float = 0.0
    """Spreads arrivals, in the trace's time (`PreparedTrace.arrivals`)."""
    event_lag_seconds: float = 0.0
    prior_factor: float = 1.0
    """By how much the estimates' priors are off."""
    seed: int = 0
    """Of jitter and of ties."""

    def __post_init__(self) -> None:
        if self.nodes < 1 or not self.load > 0 or self.capacity_blocks < 0 or not self.prior_factor > 0:
            raise ValueError("nodes, load and prior_factor must be positive, and capacity_blocks not negative")
        if self.node_speeds and (len(self.node_speeds) != self.nodes or not min(self.node_speeds) > 0):
            raise ValueError(f"node_speeds needs a positive speed for each of {self.nodes} nodes")


@dataclass(frozen=True, slots=True)
class RunResult:
    """What one replay came to."""

    trace: str
    scenario: Scenario
    capacity_blocks: int
    """Of each engine."""
    requests: int
    rejects: int
    hit_rate: float
    """By tokens."""
    hit_rate_blocks: float
    ttft_ms: Spread
    tpot_ms: Spread
    """Of requests with more than one token."""
    e2e_ms: Spread
    goodput: float
    goodput_size_aware: float
    uncached_max_over_mean: float
    """Of prompt tokens computed, by engine."""
    requests_max_over_mean: float
    regret_tokens_mean: float
    """Tokens that some other worker had, and the chosen one not; per request."""
    ttft_error_ms_median: float
    """Of the policy's predictions, absolute; NaN where it makes none."""
    pulls: int
    failed_pulls: int
    bytes_moved: int
    recompute_saved_seconds: float
    """What computing the pulled tokens would have taken, each run alone on an engine."""
    utilisation: float
    """Share of the makespan in which an engine computed, mean over engines."""
    makespan_seconds: float
    simulator_seconds: float
    """Of computing, whatever else the machine did meanwhile."""

    def row(self) -> dict[str, Any]:
        """One row of the report's JSON."""
        scenario = self.scenario
        spreads = {
            f"{name}_{statistic}": _rounded(value)
            for name in ("ttft_ms", "tpot_ms", "e2e_ms")
            for statistic, value in asdict(getattr(self, name)).items()
        }
        plain = {
            field.name: _rounded(value)
            for field in fields(self)
            if isinstance(value := getattr(self, field.name), int | float)
        }
        return {
            "policy": scenario.policy,
            "nodes": scenario.nodes,
            "load": scenario.load,
            "capacity": scenario.capacity or self.capacity_blocks,
            "link_gbps": scenario.link.gigabits_per_second if scenario.link is not None else 0.0,
            "engine_priorities": scenario.engine_priorities,
            "prior_factor": scenario.prior_factor,
            "seed": scenario.seed,
            **plain,
            **spreads,
        }


def capacity_blocks(scenario: Scenario, block_size_tokens: int) -> int:
    """Blocks of each engine."""
    return scenario.capacity_blocks or scenario.profile.kv_blocks(block_size_tokens)


def policy_named(name: str) -> Policy:
    """A fresh policy of ours or a peer's. Raises ValueError for a name that neither has."""
    if name in POLICIES:
        return POLICIES[name]()
    if name in PEERS:
        return PEERS[name](ChainMultiset)
    raise ValueError(f"unknown policy {name!r}; there are {', '.join([*POLICIES, *PEERS])}")


def replay(trace: PreparedTrace, scenario: Scenario, policy: Policy | None = None) -> RunResult:
    """Run it. `policy` in place of the one that the scenario names, for those that have no name. Raises ValueError for
    a policy that does not exist, and for engines without memory."""
    began = time.thread_time()
    outcomes = run_fleet(trace, scenario, policy)
    return _result(trace, scenario, outcomes, time.thread_time() - began)


def run_fleet(trace: PreparedTrace, scenario: Scenario, policy: Policy | None = None) -> Outcomes:
    """As `replay`: what became of each request."""
    return _fleet(trace, scenario, policy or policy_named(scenario.policy)).run()


def _fleet(trace: PreparedTrace, scenario: Scenario, policy: Policy) -> Fleet:
    profile, block, link = scenario.profile, trace.block_size_tokens, scenario.link
    blocks = capacity_blocks(scenario, block)
    speeds = scenario.node_speeds or [1.0] * scenario.nodes
    engines = [Engine(EngineShape(_sped_up(profile, speed), block, blocks)) for speed in speeds]
    settings = RouterSettings(
        block,
        scenario.nodes,
        profile.sequences_max,
        blocks,
        profile.kv_bytes_per_token / link.compression if link is not None else 0.0,
        _prior(scenario.prior_factor),
        LinkPrior(link.latency_seconds, link.bytes_per_second) if link is not None and scenario.link_known else None,
        scenario.engine_priorities and scenario.policy in POLICIES,
    )
    router = Router(policy, settings, Random(scenario.seed))
    arrivals = trace.arrivals(scenario.load, scenario.jitter_seconds, scenario.seed)
    network = Network(link, scenario.nodes) if link is not None else None
    return Fleet(trace, arrivals, engines, router, network, scenario.event_lag_seconds)


def _sped_up(profile: TimingProfile, speed: float) -> TimingProfile:
    if speed == 1.0:
        return profile
    times = {
        field.name: getattr(profile, field.name) / speed
        for field in fields(profile)
        if field.name.endswith("_seconds") and field.name != "decode_usage_seconds"
    }
    usage = tuple(term / speed for term in profile.decode_usage_seconds)
    return replace(profile, **times, decode_usage_seconds=usage)


def _prior(factor: float) -> PrefillPrior:
    prior = PrefillPrior()
    times = {
        field.name: factor * getattr(prior, field.name) for field in fields(prior) if field.name.endswith("_seconds")
    }
    return replace(prior, **times)


# What came of it


def _result(trace: PreparedTrace, scenario: Scenario, outcomes: Outcomes, seconds: float) -> RunResult:
    requests, nodes, block = trace.requests, scenario.nodes, trace.block_size_tokens
    placed = [number for number, worker in enumerate(outcomes.worker) if worker >= 0]
    prompt_tokens = sum(requests[number].prompt_tokens for number in placed)
    prompt_blocks = sum(blocks_for(requests[number].prompt_tokens, block) for number in placed)
    cached = outcomes.cached_tokens
    uncached_by_node, requests_by_node = [0] * nodes, [0] * nodes
    for number in placed:
        uncached_by_node[outcomes.worker[number]] += requests[number].prompt_tokens - cached[number]
        requests_by_node[outcomes.worker[number]] += 1
    span = outcomes.ended_at - min(outcomes.arrived_at, default=0.0)
    return RunResult(
        trace.name,
        scenario,
        capacity_blocks(scenario, block),
        len(requests),
        len(outcomes.rejected),
        _share(sum(cached), prompt_tokens),
        _share(sum(tokens // block for tokens in cached), prompt_blocks),
        spread(outcomes.ttft),
        spread(_tpot(trace, outcomes)),
        spread(outcomes.duration),
        _share(sum(ttft <= SLO_TTFT_SECONDS for ttft in outcomes.ttft), len(requests)),
        _share(_within_own_bounds(trace, scenario.profile, outcomes), len(requests)),
        max_over_mean(uncached_by_node),
        max_over_mean(requests_by_node),
        _share(sum(outcomes.regret_tokens), len(requests)),
        _median_error_ms(outcomes),
        outcomes.pulls,
        sum(outcomes.failed_pulls.values()),
        outcomes.moved_bytes,
        _recompute_saved(scenario.profile, outcomes),
        _share(sum(outcomes.busy_seconds), nodes * span),
        span,
        seconds,
    )


def _tpot(trace: PreparedTrace, outcomes: Outcomes) -> list[float]:
    return [
        (duration - ttft) / (request.output_tokens - 1)
        for request, ttft, duration in zip(trace.requests, outcomes.ttft, outcomes.duration, strict=True)
        if request.output_tokens > 1 and isfinite(duration)
    ]


def _within_own_bounds(trace: PreparedTrace, profile: TimingProfile, outcomes: Outcomes) -> int:
    return sum(
        ttft <= SIZE_AWARE_SECONDS + SIZE_AWARE_FACTOR * profile.prompt_seconds(request.prompt_tokens)
        for request, ttft in zip(trace.requests, outcomes.ttft, strict=True)
    )


def _recompute_saved(profile: TimingProfile, outcomes: Outcomes) -> float:
    saved = 0.0
    for cached, pulled in zip(outcomes.cached_tokens, outcomes.pulled_tokens, strict=True):
        if pulled:
            saved += profile.prompt_seconds(min(pulled, cached), cached - min(pulled, cached))
    return saved


def _median_error_ms(outcomes: Outcomes) -> float:
    errors = sorted(
        abs(predicted - ttft)
        for predicted, ttft in zip(outcomes.predicted_ttft, outcomes.ttft, strict=True)
        if predicted is not None and isfinite(ttft)
    )
    return errors[len(errors) // 2] * 1e3 if errors else float("nan")


def _share(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


def _rounded(value: float) -> float | int | None:
    """For JSON, which knows no infinity."""
    if isinstance(value, int):
        return value
    return round(value, 6) if isfinite(value) else None


# Sweeps


def seeds(trace: PreparedTrace, scenario: Scenario, count: int) -> list[RunResult]:
    """The same with `count` seeds from the scenario's on."""
    return [replay(trace, replace(scenario, seed=scenario.seed + number)) for number in range(count)]


def sweep(
    trace: PreparedTrace,
    scenario: Scenario,
    loads: Sequence[float],
    done: Callable[[RunResult], object] = lambda _: None,
    share_min: float = 0.0,
) -> list[RunResult]:
    """One replay at each load, from the lowest on; none after goodput has fallen below `share_min`."""
    results: list[RunResult] = []
    for load in sorted(loads):
        result = replay(trace, replace(scenario, load=load))
        results.append(result)
        done(result)
        if result.goodput < share_min:
            break
    return results


def loads_to_capacity(
    keeps_up: Callable[[float], bool],
    start: float = 1.0,
    factor: float = 2.0,
    precision: float = SEEK_PRECISION,
) -> Iterator[float]:
    """Asks at `start`, then at loads `factor` apart, up or down, until the capacity lies between two, then halves what
    is between until they are within `precision` of each other. Yields each load once it has been asked about; ends
    without two neighbours beyond `SEEK_LOADS`."""
    low, high, load = 0.0, inf, start
    while high > low * (1 + precision) and SEEK_LOADS[0] <= load <= SEEK_LOADS[1]:
        asked = load
        low, high = (load, high) if keeps_up(load) else (low, load)
        load = low * factor if high == inf else high / factor if not low else float(f"{sqrt(low * high):.4g}")
        yield asked


def seek_capacity(
    trace: PreparedTrace,
    scenario: Scenario,
    factor: float = 2.0,
    done: Callable[[RunResult], object] = lambda _: None,
) -> list[RunResult]:
    """Replays at `loads_to_capacity` from the scenario's load on. Goodput is taken to fall with the load."""
    results: list[RunResult] = []

    def keeps_up(load: float) -> bool:
        results.append(replay(trace, replace(scenario, load=load)))
        done(results[-1])
        return results[-1].goodput >= SLO_SHARE

    for _ in loads_to_capacity(keeps_up, scenario.load, factor):
        pass
    return results


def slo_capacity(points: Iterable[tuple[float, float]], share: float = SLO_SHARE) -> float:
    """The load at which goodput falls to `share`, from (load, goodput): linear between neighbours. 0 where even the
    lowest load misses it, infinity where none does: then the capacity lies outside of what was run."""
    ordered = sorted(points)
    if not ordered or ordered[0][1] < share:
        return 0.0
    for (load, goodput), (next_load, next_goodput) in pairwise(ordered):
        if next_goodput < share:
            return load + (goodput - share) / (goodput - next_goodput) * (next_load - load)
    return inf
