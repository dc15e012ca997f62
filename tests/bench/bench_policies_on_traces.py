"""Policies on a trace or a workload, over loads and seeds: `python tests/bench/bench_policies_on_traces.py --help`.

Prints a line for each replay and, for each policy, its mean over seeds and the load at which goodput falls to .90;
`--json FILE` keeps the rows. `$ROPEWAY_SHARED/traces/mooncake` is where named traces lie.
"""

import argparse
import json
import os
import sys
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from statistics import mean

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from loadtest.audit.link import LinkShape
from loadtest.audit.prepared import PreparedTrace, prepare
from loadtest.audit.runs import AMPLE_BLOCKS, RunResult, Scenario, seek_capacity, slo_capacity, sweep
from loadtest.traces.reading import read_trace
from loadtest.workloads.generating import WORKLOADS, generate
from workers.timing import PROFILES

CAPACITIES = {"hbm": 2_500, "tight": 4_570, "ample": AMPLE_BLOCKS}
TRACES = {"conversation": "conversation_trace.jsonl", "synthetic": "synthetic_trace.jsonl"}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", default="conversation", help=f"{', '.join([*TRACES, *WORKLOADS])}, or a file")
    parser.add_argument("--policies", default="kv-aware,dynamo,dynamo-tuned,llm-d")
    parser.add_argument("--nodes", type=int, default=8)
    parser.add_argument("--loads", default="1")
    parser.add_argument("--seek", action="store_true", help="from the first load on, look for the capacity at the SLO")
    parser.add_argument("--factor", type=float, default=1.07, help="between loads when seeking")
    parser.add_argument("--capacity", default="hbm", help="hbm, tight, ample or blocks")
    parser.add_argument("--profile", default="llama-3-70b-tp8", choices=sorted(PROFILES))
    parser.add_argument("--link", type=float, default=0.0, help="Gbit/s; 0 pulls nothing")
    parser.add_argument("--priorities", action="store_true", help="engines order their queues by the router's key")
    parser.add_argument("--raw", action="store_true", help="leave arrivals on their grid")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--prior-factor", type=float, default=1.0)
    parser.add_argument("--event-lag", type=float, default=0.0, help="seconds")
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


def load_trace(name: str, seed: int) -> PreparedTrace:
    if name in WORKLOADS:
        return prepare(generate(name, seed))
    shared = Path(os.environ.get("ROPEWAY_SHARED", "../shared"))
    return prepare(read_trace(shared / "traces" / "mooncake" / TRACES[name] if name in TRACES else name))


def show(result: RunResult) -> None:
    scenario, ttft = result.scenario, result.ttft_ms
    print(
        f"{scenario.policy:24} x{scenario.load:<5g} seed {scenario.seed:<3} hit {result.hit_rate:.3f}  "
        f"ttft {ttft.mean / 1e3:7.3f} p50 {ttft.p50 / 1e3:7.3f} p90 {ttft.p90 / 1e3:7.3f} p99 {ttft.p99 / 1e3:7.3f} s  "
        f"good {result.goodput:.3f} {result.goodput_size_aware:.3f}  "
        f"max/mean {result.uncached_max_over_mean:.2f} {result.requests_max_over_mean:.2f}  "
        f"pulls {result.pulls} {result.bytes_moved / 1e9:.0f} GB  {result.simulator_seconds:.1f} s",
        flush=True,
    )


def summarise(results: list[RunResult]) -> dict[str, float]:
    """Prints means over seeds; returns the SLO capacity of each policy: the mean of its seeds' own."""
    cells: dict[tuple[str, float], list[RunResult]] = defaultdict(list)
    for result in results:
        cells[result.scenario.policy, result.scenario.load].append(result)
    print("\nmeans over seeds: load, hit, ttft mean and p90 (half range), goodput")
    for (policy, load), runs in cells.items():
        means = [run.ttft_ms.mean / 1e3 for run in runs]
        print(
            f"{policy:24} x{load:<5g} {mean(run.hit_rate for run in runs):.3f}  {mean(means):7.3f} "
            f"{mean(run.ttft_ms.p90 for run in runs) / 1e3:7.3f} ({(max(means) - min(means)) / 2:.3f})  "
            f"{mean(run.goodput for run in runs):.3f}"
        )
    capacities = {}
    for policy in dict.fromkeys(policy for policy, _ in cells):
        by_seed: dict[int, list[tuple[float, float]]] = defaultdict(list)
        for result in results:
            if result.scenario.policy == policy:
                by_seed[result.scenario.seed].append((result.scenario.load, result.goodput))
        found = [slo_capacity(points) for points in by_seed.values() if len(points) > 1]
        if found:
            capacities[policy] = mean(found)
            print(f"{policy:24} capacity at the SLO x{mean(found):.3f} ({(max(found) - min(found)) / 2:.3f})")
    return capacities


def main() -> None:
    options = arguments()
    capacity = CAPACITIES.get(options.capacity)
    loads = [float(load) for load in options.loads.split(",")]
    results: list[RunResult] = []
    starts: dict[str, float] = {}
    for seed in range(options.first_seed, options.first_seed + options.seeds):
        trace = load_trace(options.trace, seed)
        base = Scenario(
            nodes=options.nodes,
            profile=PROFILES[options.profile],
            capacity_blocks=int(options.capacity) if capacity is None else capacity,
            capacity=options.capacity,
            link=LinkShape(options.link) if options.link else None,
            engine_priorities=options.priorities,
            jitter_seconds=0.0 if options.raw else trace.grid_seconds / 2,
            event_lag_seconds=options.event_lag,
            prior_factor=options.prior_factor,
            seed=seed,
        )
        for policy in options.policies.split(","):
            scenario = replace(base, policy=policy)
            if options.seek:
                # Seeds differ little: the next one begins where this one ended.
                found = seek_capacity(trace, replace(scenario, load=starts.get(policy, loads[0])), options.factor, show)
                starts[policy] = found[-1].scenario.load
                results += found
            else:
                results += sweep(trace, scenario, loads, show)
    capacities = summarise(results)
    if options.json:
        document = {"trace": options.trace, "rows": [result.row() for result in results], "slo_capacity": capacities}
        options.json.write_text(json.dumps(document, indent=1))


if __name__ == "__main__":
    main()
