"""An audit from a trace and a plan: bounds first, then the replays, then what follows from both."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import product
from math import isfinite
from typing import Any, NamedTuple

from loadtest.audit import advice
from loadtest.audit.ceilings import Ceilings, HitRate, ceilings_row
from loadtest.audit.confidence import estimate
from loadtest.audit.link import LinkShape
from loadtest.audit.plan import HOST_RATIO, Cache, Plan
from loadtest.audit.prepared import PreparedTrace, prepare
from loadtest.audit.report import Advice, Bound, Capacity, Report, Row, averaged
from loadtest.audit.runs import (
    AMPLE_BLOCKS,
    SLO_SHARE,
    RunResult,
    Scenario,
    loads_to_capacity,
    replay,
    slo_capacity,
)
from loadtest.audit.traffic import cache_curve, cache_sizes, traffic_of
from loadtest.commands import Progress, UsageError, silent
from loadtest.hardware import Link
from loadtest.traces.contract import Trace
from loadtest.traces.health import longer_than

TraceOfSeed = Callable[[int], Trace]
"""The same trace for every seed, or another draw of the same workload."""
_SECONDS_PER_HOUR = 3_600


class _Fleet(NamedTuple):
    nodes: int
    cache: Cache
    blocks: int
    link: Link | None

    @property
    def link_gbps(self) -> float:
        return 0.0 if self.link is None else self.link.gbps


def audit(trace_of: TraceOfSeed, plan: Plan, progress: Progress = silent) -> Report:
    """Raises UsageError, and TraceError from `trace_of`."""
    return _Audit(trace_of, plan, progress).report()


def hit_rates(trace: Trace, progress: Progress = silent) -> Report:
    """The bounds alone, by golden names."""
    ceilings = ceilings_row(trace, progress=lambda done, total: progress("bounds", done, total))
    return Report(trace.name, _trace_facts(trace), ceilings, notes=trace.notes)


def _trace_facts(trace: Trace) -> dict[str, Any]:
    tokens = sum(request.input_tokens for request in trace.requests)
    return {
        "format": trace.format,
        "requests": len(trace.requests),
        "prompt tokens": tokens,
        "block": f"{trace.block_size_tokens} tokens",
        "span": f"{trace.duration_seconds:,.0f} s",
    }


class _Audit:
    def __init__(self, trace_of: TraceOfSeed, plan: Plan, progress: Progress) -> None:
        self._plan = plan
        self._progress = progress
        self._trace = trace_of(0)
        if not self._trace.requests:
            raise UsageError(f"{self._trace.name}: no requests to replay")
        self._trace_of = trace_of
        self._seeds = range(plan.seeds)
        self._prepared: dict[int, PreparedTrace] = {}
        self._ceilings = Ceilings(self._trace)
        self._prompt_tokens = sum(request.input_tokens for request in self._trace.requests)
        self._computing_seconds = sum(
            plan.profile.prompt_seconds(request.input_tokens) for request in self._trace.requests
        )
        self._jitter_seconds = self._prepared_for(0).grid_seconds / 2 if plan.spreads_arrivals else 0.0
        self._fleets = [
            _Fleet(nodes, cache, self._blocks(cache, nodes), link)
            for nodes, cache, link in product(plan.nodes, plan.caches, plan.links)
        ]

    def _blocks(self, cache: Cache, nodes: int) -> int:
        return cache.blocks(self._plan.profile, self._trace.block_size_tokens, self._ceilings.distinct_blocks, nodes)

    def report(self) -> Report:
        plan, trace = self._plan, self._trace
        traffic = traffic_of(trace)
        points = cache_sizes(self._ceilings, trace.block_size_tokens)
        bounds = list(self._bounds())
        runs = self._replays()
        first_runs = {_setting(run): run for run in runs if run.scenario.policy == plan.policies[0]}
        rows = averaged(self._row(run, bounds, first_runs.get(_setting(run))) for run in runs)
        capacities = self._capacities(runs)
        first = self._fleets[0]
        engine = advice.Engine(plan.profile, plan.gpus, next((link for link in plan.links if link is not None), None))
        return Report(
            trace=trace.name,
            facts=_trace_facts(trace) | self._facts(first),
            ceilings=ceilings_row(trace, lru_blocks=(), nodes=sorted(set(plan.nodes))),
            rows=rows,
            bounds=bounds,
            capacities=capacities,
            advice=[
                *advice.on_traffic(traffic, points, self._memory(first)),
                *advice.on_links(traffic, engine),
                *advice.on_pool(traffic, engine, bounds, rows),
                *advice.on_savings(rows, bounds, trace.duration_seconds, plan.dollars_per_gpu_hour),
                *self._fewer_nodes(capacities),
            ],
            histograms=traffic.histograms(),
            curves=[cache_curve(points)],
            notes=[*trace.notes, *self._notes()],
        )

    def _memory(self, fleet: _Fleet) -> advice.Memory:
        tokens = fleet.nodes * fleet.blocks * self._trace.block_size_tokens
        return advice.Memory(tokens, self._plan.profile.kv_bytes_per_token)

    def _facts(self, fleet: _Fleet) -> dict[str, Any]:
        plan = self._plan
        tokens = fleet.blocks * self._trace.block_size_tokens
        memory = "all that comes" if fleet.blocks >= AMPLE_BLOCKS else f"{tokens:,} tokens"
        return {
            "engine": f"{plan.profile.name} on {plan.gpus} GPU{'s' if plan.gpus > 1 else ''}, KV of {memory}",
            "seeds": plan.seeds,
            "constants": plan.profile.source,
        }

    def _notes(self) -> Iterator[str]:
        tokens = min(fleet.blocks for fleet in self._fleets) * self._trace.block_size_tokens
        if (note := longer_than(self._trace.requests, tokens)) is not None:
            yield note
        if self._prepared_for(0).grid_seconds and not self._jitter_seconds:
            yield "arrivals were left on their grid: bursts that nobody sent dominate latencies at low load"
        if self._plan.seeds == 1:
            yield "one seed: no intervals (--seeds 5)"

    # Bounds

    def _bounds(self) -> Iterator[Bound]:
        ceilings = self._ceilings
        infinite = ceilings.infinite()
        fleets = list({fleet[:3]: fleet for fleet in self._fleets}.values())
        for done, (nodes, cache, blocks, _) in enumerate(fleets):
            self._progress("bounds", done, len(fleets))
            ample = blocks >= AMPLE_BLOCKS
            steps: dict[str, HitRate] = {
                "infinite": infinite,
                "oracle": infinite if ample else ceilings.oracle(nodes * blocks),
                "pooled": infinite if ample else ceilings.pooled(nodes * blocks),
                "siloed": ceilings.siloed(nodes, blocks),
            }
            if not ample:
                steps["host"] = ceilings.siloed(nodes, blocks + self._host_blocks(blocks))
            for name, rate in steps.items():
                yield Bound(name, nodes, cache.text, rate.tokens, rate.blocks, self._gpu_hours(rate.tokens))
        self._progress("bounds", len(fleets), len(fleets))

    def _host_blocks(self, blocks: int) -> int:
        """Behind an engine with so many of its own."""
        size = self._plan.profile.kv_bytes_per_token * self._trace.block_size_tokens
        if self._plan.host_bytes is None or not size:
            return HOST_RATIO * blocks
        return int(self._plan.host_bytes / size)

    def _gpu_hours(self, hit_rate: float) -> float:
        """Of prefill that so much reuse saves over the whole trace."""
        gpu_seconds = hit_rate * self._computing_seconds * self._plan.gpus
        return round(gpu_seconds / _SECONDS_PER_HOUR, 4)

    # Replays

    def _replays(self) -> list[RunResult]:
        results: list[RunResult] = []
        units = list(product(self._fleets, self._plan.policies))
        for done, (fleet, policy) in enumerate(units):
            ran: list[RunResult] = []
            keeps_up = partial(self._keeps_up, ran, fleet, policy)
            steps = _swept(keeps_up, self._plan.loads) if self._plan.loads else _searched(keeps_up)
            for share in steps:
                self._progress("replays", done + share, len(units))
            results += sorted(ran, key=lambda run: run.scenario.load)
        return results

    def _keeps_up(self, ran: list[RunResult], fleet: _Fleet, policy: str, load: float) -> bool:
        """With any seed. Adds to what was run."""
        found = [replay(self._prepared_for(seed), self._scenario(fleet, policy, load, seed)) for seed in self._seeds]
        ran += found
        return any(one.goodput >= SLO_SHARE for one in found)

    def _prepared_for(self, seed: int) -> PreparedTrace:
        """Of a file, seeds differ by how its arrivals are spread; of a workload, by what is drawn."""
        if seed not in self._prepared:
            trace = self._trace_of(seed) if seed else self._trace
            is_same = trace is self._trace and 0 in self._prepared
            self._prepared[seed] = self._prepared[0] if is_same else prepare(trace)
        return self._prepared[seed]

    def _scenario(self, fleet: _Fleet, policy: str, load: float, seed: int) -> Scenario:
        plan, link = self._plan, fleet.link
        return Scenario(
            policy=policy,
            nodes=fleet.nodes,
            load=load,
            profile=plan.profile,
            capacity_blocks=fleet.blocks,
            capacity=fleet.cache.text,
            link=None if link is None else LinkShape(link.gbps, link.latency_seconds, plan.codec.compression),
            engine_priorities=plan.engine_priorities,
            jitter_seconds=self._jitter_seconds,
            prior_factor=plan.prior_factor,
            seed=seed,
        )

    def _row(self, result: RunResult, bounds: Sequence[Bound], first: RunResult | None) -> Row:
        """With what the trace, the bounds and the first policy's run with the same seed add to what the replay knows of
        itself."""
        plan, scenario, hit_rate = self._plan, result.scenario, result.hit_rate
        wire = plan.profile.kv_bytes_per_token / plan.codec.compression
        pulled = result.bytes_moved / wire / self._prompt_tokens if wire else 0.0
        beside = {
            bound.name: bound.hit_rate
            for bound in bounds
            if (bound.nodes, bound.capacity) == (scenario.nodes, scenario.capacity)
        }
        return result.row() | {
            "hit_rate_pulled": round(min(pulled, hit_rate), 6),
            "missed_cold": round(1 - beside["infinite"], 6),
            "missed_capacity": round(beside["infinite"] - beside["pooled"], 6),
            "missed_placement": round(beside["pooled"] - hit_rate, 6),
            "gpu_hours_saved": self._gpu_hours(hit_rate),
            "ttft_over_first": round(result.ttft_ms.mean / first.ttft_ms.mean, 6) if first is not None else None,
        }

    # Capacities

    def _capacities(self, runs: Sequence[RunResult]) -> list[Capacity]:
        if len(self._plan.loads) == 1:
            return []
        groups: dict[tuple[str, int, str, float], list[RunResult]] = {}
        for run in runs:
            scenario = run.scenario
            fleet = (scenario.policy, scenario.nodes, scenario.capacity, _gbps(scenario))
            groups.setdefault(fleet, []).append(run)
        return [_capacity(*key, group) for key, group in groups.items()]

    def _fewer_nodes(self, capacities: Sequence[Capacity]) -> list[Advice]:
        pairs = list(advice.compared_capacities(capacities))
        found = []
        for done, (ours, theirs) in enumerate(pairs):
            self._progress("fewer nodes", done, len(pairs))
            nodes = advice.nodes_for(ours, theirs)
            if nodes is not None and theirs.load is not None:
                found.append(self._fewest(ours, theirs, theirs.load, min(nodes, theirs.nodes)))
        self._progress("fewer nodes", len(pairs), len(pairs))
        return [one for one in found if one is not None]

    def _fewest(self, ours: Capacity, theirs: Capacity, load: float, start: int) -> Advice | None:
        """The fewest nodes from `start` on that keep the SLO at their capacity, by replays."""
        fleet = next(one for one in self._fleets if (one.nodes, one.cache.text, one.link_gbps) == theirs[1:4])
        for nodes in range(start, theirs.nodes + 1):
            results = [
                replay(self._prepared_for(seed), self._scenario(fleet._replace(nodes=nodes), ours.policy, load, seed))
                for seed in self._seeds
            ]
            goodput = estimate([one.goodput for one in results]).mean
            if goodput >= SLO_SHARE:
                return advice.on_nodes(ours.policy, theirs.policy, load, theirs.nodes, nodes, round(goodput, 4))
        return None


def _swept(keeps_up: Callable[[float], bool], loads: Sequence[float]) -> Iterator[float]:
    """From the lowest load on, until the SLO is missed: beyond that, queues only grow. Yields how far it has come."""
    ordered = sorted(loads)
    for number, load in enumerate(ordered, start=1):
        if not keeps_up(load):
            break
        yield number / len(ordered)
    yield 1.0


def _searched(keeps_up: Callable[[float], bool]) -> Iterator[float]:
    """Yields how far it may have come: nobody knows how many loads it takes."""
    for steps, _ in enumerate(loads_to_capacity(keeps_up), start=1):
        yield 1 - 0.8**steps
    yield 1.0


def _setting(run: RunResult) -> tuple[int, str, float, float, int]:
    """All but the policy."""
    scenario = run.scenario
    return scenario.nodes, scenario.capacity, _gbps(scenario), scenario.load, scenario.seed


def _gbps(scenario: Scenario) -> float:
    return 0.0 if scenario.link is None else scenario.link.gigabits_per_second


def _capacity(policy: str, nodes: int, cache: str, link_gbps: float, runs: Iterable[RunResult]) -> Capacity:
    points: dict[int, list[tuple[float, float]]] = {}
    for run in runs:
        points.setdefault(run.scenario.seed, []).append((run.scenario.load, run.goodput))
    loads = [load for found in points.values() for load, _ in found]
    capacities = [slo_capacity(found) for found in points.values()]
    unknown = Capacity(policy, nodes, cache, link_gbps, None, None)
    if not all(map(isfinite, capacities)):
        return unknown._replace(note=f"above {max(loads):g}", floor=max(loads))
    if not all(capacities):
        return unknown._replace(note=f"below {min(loads):g}")
    mean, half_width = estimate(capacities)
    return unknown._replace(load=round(mean, 4), half_width=None if half_width is None else round(half_width, 4))
