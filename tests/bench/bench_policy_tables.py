"""The tables of docs: capacity at the SLO on a real trace, and every policy on workloads that none was tuned on.

    ROPEWAY_SHARED=../shared python tests/bench/bench_policy_tables.py --journal rows.jsonl [--seeds 5] [--sections ...]

Every replay is kept in the journal, and what is there is not run again: it may be stopped and started as one likes, and
two of them may share the work of one machine (`--share 1/2`, `--share 2/2`, each with a journal of its own; `--also`
reads the other's). Delete the journal when policies have changed. All seeds take some hours of one core.
"""

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from math import isfinite
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from loadtest.audit.link import LinkShape
from loadtest.audit.prepared import PreparedTrace, prepare
from loadtest.audit.runs import AMPLE_BLOCKS, SLO_SHARE, Scenario, loads_to_capacity, replay, slo_capacity
from loadtest.traces.reading import read_trace
from loadtest.workloads.generating import WORKLOADS, generate

Row = dict[str, Any]
CAPACITIES = {"hbm": 2_500, "tight": 4_570, "ample": AMPLE_BLOCKS}
TRACES = {"conversation": "conversation_trace.jsonl", "synthetic": "synthetic_trace.jsonl"}
FACTOR = 1.07
"""Between loads, from where the capacity of most lies."""


class Variant(NamedTuple):
    """A policy in one of its settings."""

    label: str
    policy: str
    link_gbps: float = 0.0
    priorities: bool = False
    raw: bool = False
    prior_factor: float = 1.0


Chosen = Callable[[Variant], bool]


class Cell(NamedTuple):
    """One workload on one fleet at one load."""

    workload: str
    load: float = 1.0
    nodes: int = 8
    capacity: str = "hbm"


OURS = Variant("kv-aware", "kv-aware", priorities=True)
CAPACITY_VARIANTS = (
    OURS,
    Variant("dynamo", "dynamo"),
    Variant("dynamo-tuned", "dynamo-tuned"),
    Variant("llm-d", "llm-d"),
    Variant("kv-aware, engines first come first served", "kv-aware"),
    Variant("kv-aware, pull over 400 Gbit/s", "kv-aware", 400.0, True),
    Variant("kv-aware, priors x0.5", "kv-aware", priorities=True, prior_factor=0.5),
    Variant("kv-aware, priors x3", "kv-aware", priorities=True, prior_factor=3.0),
    Variant("kv-aware, raw arrivals", "kv-aware", priorities=True, raw=True),
    Variant("dynamo, raw arrivals", "dynamo", raw=True),
    Variant("dynamo-tuned, raw arrivals", "dynamo-tuned", raw=True),
    Variant("llm-d, raw arrivals", "llm-d", raw=True),
)
STARTS = {"hbm": 3.75, "tight": 4.0, "ample": 4.25}
KNEE = Cell("conversation", 4.5)
HELD_OUT = (
    Cell("synthetic", 3.0),
    Cell("conversation", 1.5, nodes=4),
    Cell("conversation", 2.0, nodes=4, capacity="ample"),
    Cell("conversation", 8.0, nodes=16),
    Cell("conversation", 9.0, nodes=16, capacity="ample"),
    Cell("tenants"),
    Cell("tenants-long"),
    Cell("tenants-flat"),
    Cell("tenants-cold"),
    Cell("fan-out"),
    Cell("fan-out-small", nodes=16),
    Cell("agents"),
    Cell("agents", 1.6),
)
HELD_OUT_VARIANTS = (
    OURS,
    Variant("kv-aware, first come first served", "kv-aware"),
    Variant("kv-aware, pull over 400 Gbit/s", "kv-aware", 400.0, True),
    Variant("greedy-ttft", "greedy-ttft"),
    Variant("llm-d", "llm-d"),
    Variant("dynamo", "dynamo"),
    Variant("dynamo-tuned", "dynamo-tuned"),
    Variant("sglang", "sglang"),
    Variant("production-stack", "production-stack"),
    Variant("preble", "preble"),
    Variant("aibrix", "aibrix"),
    Variant("prefix-aware", "prefix-aware"),
    Variant("session", "session"),
    Variant("least-loaded", "least-loaded"),
    Variant("round-robin", "round-robin"),
)


class Replays:
    """Runs what the journal does not know, or, of a share, only finds out what there is to run."""

    def __init__(self, journal: Path, also: Sequence[Path], share: tuple[int, int]) -> None:
        self._journal = journal
        self._share = share
        self._rows: dict[str, Row] = {}
        self._traces: dict[tuple[str, int], PreparedTrace] = {}
        for path in (journal, *also):
            for line in path.read_text().splitlines() if path.exists() else ():
                entry = json.loads(line)
                self._rows[entry["key"]] = entry["row"]

    def mine(self, seed: int) -> bool:
        """Whether this process runs the seed."""
        number, of = self._share
        return seed % of == number - 1

    def row(self, cell: Cell, variant: Variant, seed: int) -> Row | None:
        """None where it is another process's to run and not done yet."""
        key = json.dumps([*cell, *variant[1:], seed])
        row = self._rows.get(key)
        if row is None and self.mine(seed):
            result = replay(self._trace(cell.workload, seed), self._scenario(cell, variant, seed))
            row = self._rows[key] = result.row()
            with self._journal.open("a") as file:
                file.write(json.dumps({"key": key, "row": row}) + "\n")
            print(f"{cell} {variant.label} seed {seed}: {row['ttft_ms_mean']:.0f} ms", file=sys.stderr, flush=True)
        return row

    def _trace(self, name: str, seed: int) -> PreparedTrace:
        key = (name, 0 if name in TRACES else seed)
        if key not in self._traces:
            if len(self._traces) > 2:
                self._traces.clear()
            shared = Path(os.environ.get("ROPEWAY_SHARED", "../shared"))
            path = shared / "traces" / "mooncake" / TRACES.get(name, "")
            self._traces[key] = prepare(read_trace(path) if name in TRACES else generate(name, seed))
        return self._traces[key]

    def _scenario(self, cell: Cell, variant: Variant, seed: int) -> Scenario:
        trace, workload = self._trace(cell.workload, seed), WORKLOADS.get(cell.workload)
        tokens = workload.cache_tokens if workload is not None else None
        return Scenario(
            variant.policy,
            cell.nodes,
            cell.load,
            capacity_blocks=tokens // trace.block_size_tokens if tokens else CAPACITIES[cell.capacity],
            capacity=cell.capacity,
            link=LinkShape(variant.link_gbps) if variant.link_gbps else None,
            engine_priorities=variant.priorities,
            jitter_seconds=0.0 if variant.raw else trace.grid_seconds / 2,
            prior_factor=variant.prior_factor,
            seed=seed,
        )


def capacity(replays: Replays, cell: Cell, variant: Variant, seed: int) -> float | None:
    """Sought from the cell's load on. None where none is found, or where replays are another process's to run."""
    points: list[tuple[float, float]] = []

    def keeps_up(load: float) -> bool:
        row = replays.row(cell._replace(load=load), variant, seed)
        if row is None:
            raise LookupError
        points.append((load, row["goodput"]))
        return bool(row["goodput"] >= SLO_SHARE)

    try:
        for _ in loads_to_capacity(keeps_up, cell.load, FACTOR):
            pass
    except LookupError:
        return None
    found = slo_capacity(points)
    return found if isfinite(found) else None


def capacities(replays: Replays, seeds: int, chosen: Chosen) -> Iterator[str]:
    yield f"| policy | {' | '.join(CAPACITIES)} |"
    yield f"|---{'|---' * len(CAPACITIES)}|"
    base: dict[str, float] = {}
    for variant in filter(chosen, CAPACITY_VARIANTS):
        columns = []
        for name in CAPACITIES:
            cell = Cell("conversation", STARTS[name], capacity=name)
            found = [one for seed in range(seeds) if (one := capacity(replays, cell, variant, seed)) is not None]
            if not found:
                columns.append("")
                continue
            value = mean(found)
            base.setdefault(name, value)
            half = (max(found) - min(found)) / 2
            columns.append(f"{value:.3f} ({half:.3f}); {base[name] / value:.3f}")
        yield f"| {variant.label} | {' | '.join(columns)} |"


def knee(replays: Replays, seeds: int, chosen: Chosen) -> Iterator[str]:
    yield "| policy | TTFT mean, s | p90, s | goodput |"
    yield "|---|---|---|---|"
    for variant in filter(chosen, CAPACITY_VARIANTS):
        rows = [row for seed in range(seeds) if (row := replays.row(KNEE, variant, seed)) is not None]
        if rows:
            means, p90s = spread(rows, "ttft_ms_mean"), spread(rows, "ttft_ms_p90")
            yield f"| {variant.label} | {means} | {p90s} | {goodput(rows)} |"


def held_out(replays: Replays, seeds: int, chosen: Chosen) -> Iterator[str]:
    """Mean and p90 in seconds, and beside them by how much they are above the best of the others."""
    yield "| cell | policy | hit | TTFT mean, s | to the best | p90, s | to the best | goodput | max/mean |"
    yield "|---|---|---|---|---|---|---|---|---|"
    for cell in HELD_OUT:
        found = {}
        for variant in filter(chosen, HELD_OUT_VARIANTS):
            rows = [row for seed in range(seeds) if (row := replays.row(cell, variant, seed)) is not None]
            if rows:
                found[variant] = rows
        others = [rows for variant, rows in found.items() if variant.policy != "kv-aware"]
        for variant, rows in found.items():
            ratios = [
                value_of(rows, key) / min((value_of(one, key) for one in others), default=float("nan")) - 1
                for key in ("ttft_ms_mean", "ttft_ms_p90")
            ]
            place = f"{cell.workload} x{cell.load:g}, {cell.nodes} nodes, {cell.capacity}"
            yield (
                f"| {place} | {variant.label} | {value_of(rows, 'hit_rate'):.3f} | {spread(rows, 'ttft_ms_mean')} | "
                f"{ratios[0]:+.1%} | {spread(rows, 'ttft_ms_p90')} | {ratios[1]:+.1%} | {goodput(rows)} | "
                f"{value_of(rows, 'uncached_max_over_mean'):.2f} |"
            )


def value_of(rows: Sequence[Row], key: str) -> float:
    return mean(row[key] for row in rows)


def spread(rows: Sequence[Row], key: str) -> str:
    """Mean over seeds in seconds, and half the range."""
    values = [row[key] / 1e3 for row in rows]
    return f"{mean(values):.3f} ({(max(values) - min(values)) / 2:.3f})"


def goodput(rows: Sequence[Row]) -> str:
    return f"{value_of(rows, 'goodput'):.3f}"


SECTIONS = {"capacities": capacities, "knee": knee, "held-out": held_out}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--journal", type=Path, required=True)
    parser.add_argument("--also", type=Path, nargs="*", default=[], help="journals to read besides")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--share", default="1/1", help="of the seeds")
    parser.add_argument("--sections", nargs="*", default=list(SECTIONS), choices=list(SECTIONS))
    parser.add_argument("--policies", nargs="*", default=[], help="only these")
    options = parser.parse_args()
    every = {variant.policy for variant in (*CAPACITY_VARIANTS, *HELD_OUT_VARIANTS)}
    chosen = set(options.policies) or every
    number, of = map(int, options.share.split("/"))
    replays = Replays(options.journal, options.also, (number, of))
    for name in options.sections:
        print(f"\n## {name}\n")
        for line in SECTIONS[name](replays, options.seeds, lambda variant: variant.policy in chosen):
            print(line, flush=True)


if __name__ == "__main__":
    main()
