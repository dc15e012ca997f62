"""What audits and load tests have to say: rows, bounds beside them, capacities, advice; and all of it as JSON.

A row is what one replay, or one run against real workers, came to (`RunResult.row`); rows that differ only in their
seed are averaged, and then each figure has a second one, `<figure>_ci95`, half the width of its interval.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite
from typing import Any, NamedTuple

from loadtest.audit.confidence import estimate

Row = Mapping[str, Any]

IDENTITY = ("policy", "nodes", "load", "capacity", "link_gbps", "engine_priorities", "prior_factor")
"""What tells rows apart."""
INTERVAL = "_ci95"
_OF_A_SEED = ("seed", "simulator_seconds")

FORMULAS = {
    "hit rate": "prompt tokens reused at first admission / all prompt tokens",
    "in blocks": "the same in blocks: of runs, the last one counts though partly filled; of bounds, those with a name",
    "pulled": "of these, tokens that came from a peer: bytes moved / KV bytes a token",
    "missed": "cold: 1 - infinite; capacity: infinite - pooled; placement, bursts included: pooled - hit rate",
    "goodput": "requests with TTFT <= 2 s / all requests; refused and unfinished ones count against it",
    "goodput, size-aware": "the same with TTFT <= 1 s + 2 x the prompt's prefill alone on an idle engine",
    "x first": "mean TTFT / that of the first policy named, seed by seed: its interval knows that both met the same",
    "regret": "tokens that some other worker had and the chosen one had not, per request",
    "balance": "prompt tokens computed by the busiest worker / mean over workers",
    "GPU hours saved": "prompt tokens reused x mean prefill seconds a token x GPUs of an engine",
    "SLO capacity": "the load at which 90 % of all requests have TTFT <= 2 s, linear between the loads that were run",
    "infinite": "one cache that keeps everything",
    "oracle": "one cache as large as the fleet's together, which drops what is used again last",
    "pooled": "one cache as large as the fleet's together, least recently used first",
    "siloed": "a cache of its own on each node, requests in turn",
    "host": "the same with host memory behind each (twice the engine's own, unless --host-memory says)",
}
"""Printed with every report, so that nobody has to guess what a figure counts."""


class Bound(NamedTuple):
    """A hit rate that no replay is needed for."""

    name: str
    nodes: int
    capacity: str
    hit_rate: float
    """By tokens."""
    hit_rate_blocks: float
    gpu_hours_saved: float


class Capacity(NamedTuple):
    """The load up to which a policy keeps its SLO."""

    policy: str
    nodes: int
    capacity: str
    link_gbps: float
    load: float | None
    """None: outside of the loads that were run."""
    half_width: float | None
    """Of the interval over seeds."""
    note: str = ""
    """On which side of what was run it lies."""
    floor: float | None = None
    """The greatest load that was run, where it lies above."""


class Advice(NamedTuple):
    """One thing to do, or to leave."""

    topic: str
    text: str
    figures: Mapping[str, Any] = {}
    """What it rests on, for JSON and plots."""


class Histogram(NamedTuple):
    title: str
    labels: Sequence[str]
    counts: Sequence[int]


class Curve(NamedTuple):
    """y over x, with a name for each."""

    title: str
    x_name: str
    y_name: str
    points: Sequence[tuple[float, float]]


@dataclass(frozen=True, slots=True)
class Report:
    trace: str
    facts: Mapping[str, Any] = field(default_factory=dict)
    """What was replayed, on what: shown first."""
    ceilings: Mapping[str, Any] = field(default_factory=dict)
    """`ceilings_row`: hit rates without time, by golden names."""
    rows: Sequence[Row] = ()
    """Averaged over seeds."""
    bounds: Sequence[Bound] = ()
    capacities: Sequence[Capacity] = ()
    advice: Sequence[Advice] = ()
    histograms: Sequence[Histogram] = ()
    curves: Sequence[Curve] = ()
    notes: Sequence[str] = ()

    def as_json(self) -> dict[str, Any]:
        return {
            "trace": self.trace,
            "hit_rate_infinite": None,
            **self.ceilings,
            "rows": list(self.rows),
            "slo_capacity": self._first_capacities(),
            "slo_capacities": [capacity._asdict() for capacity in self.capacities],
            "bounds": [bound._asdict() for bound in self.bounds],
            "advice": [{"topic": topic, "text": text, **figures} for topic, text, figures in self.advice],
            "histograms": [histogram._asdict() for histogram in self.histograms],
            "curves": [curve._asdict() for curve in self.curves],
            "facts": dict(self.facts),
            "formulas": FORMULAS,
            "notes": list(self.notes),
        }

    def _first_capacities(self) -> dict[str, float | None]:
        """By policy, of the first fleet that was asked about."""
        loads: dict[str, float | None] = {}
        for capacity in self.capacities:
            loads.setdefault(capacity.policy, capacity.load)
        return loads


def averaged(rows: Iterable[Row]) -> list[dict[str, Any]]:
    """One row for all seeds of the same run, in order of first appearance. See the module's opening."""
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault(tuple(row.get(name) for name in IDENTITY), []).append(row)
    return [_averaged(group) for group in groups.values()]


def _averaged(group: Sequence[Row]) -> dict[str, Any]:
    first = group[0]
    result = {name: first[name] for name in IDENTITY if name in first}
    result["seeds"] = len(group)
    for name, value in first.items():
        if name in result or name in _OF_A_SEED:
            continue
        if isinstance(value, bool) or not isinstance(value, int | float | None):
            result[name] = value
            continue
        mean, half_width = _figure([row.get(name) for row in group])
        result[name] = mean
        if half_width is not None:
            result[name + INTERVAL] = half_width
    return result


def _figure(values: Sequence[float | None]) -> tuple[float | None, float | None]:
    """Mean and half-width; None where a seed has no figure."""
    known = [value for value in values if value is not None and isfinite(value)]
    if len(known) < len(values):
        return None, None
    if len(known) == 1:
        return known[0], None
    mean, half_width = estimate(known)
    return round(mean, 6), None if half_width is None else round(half_width, 6)
