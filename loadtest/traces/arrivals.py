"""Arrival times, made fit for a replay: taken off their grid, sped up, cut.

Times of many traces are rounded: all that came within three seconds, say, stands on one stamp. Replayed as they are,
such files send bursts that nobody sent, and these dominate every latency at low load. So a stamp is spread over its
grid again, evenly, by a seed; whoever wants the raw bursts leaves that out.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from random import Random

from loadtest.traces.contract import NO_PREDECESSOR, Trace, TraceRequest

GRID_SECONDS_MIN = 0.05
"""A finer grid changes no latency that is worth reporting."""
GRID_STAMPS_MIN = 16
GRID_SHARE_MIN = 0.95
_ROUNDING_SECONDS = 0.0015
"""Stamps cut to whole milliseconds stand up to one beside their grid."""


def poisson(rng: Random, rate: float) -> Iterator[float]:
    """Arrival times in seconds, `rate` a second, for ever."""
    now = 0.0
    while True:
        now += rng.expovariate(rate)
        yield now


def grid_seconds(arrivals: Sequence[float]) -> float:
    """The grid that arrivals stand on, or 0.0. They are on it when nearly all are, and several share a stamp."""
    stamps = sorted(set(arrivals))
    if len(stamps) < GRID_STAMPS_MIN or len(stamps) == len(arrivals):
        return 0.0
    gaps = Counter(round(later - earlier, 2) for earlier, later in pairwise(stamps))
    best = 0.0
    for gap, _ in gaps.most_common(5):
        if gap >= max(GRID_SECONDS_MIN, best) and _share_on(stamps, gap) >= GRID_SHARE_MIN:
            best = gap
    return best


def _share_on(stamps: Sequence[float], grid: float) -> float:
    start = stamps[0]
    return sum(abs((stamp - start + grid / 2) % grid - grid / 2) <= _ROUNDING_SECONDS for stamp in stamps) / len(stamps)


def dequantised(trace: Trace, seed: int = 0, grid: float | None = None) -> Trace:
    """Each arrival moved by up to half the grid either way, evenly; unchanged where there is no grid.

    `grid` in seconds; None to find it. What follows another request moves with it.
    """
    starts = [request.arrival_seconds for request in trace.requests if request.follows == NO_PREDECESSOR]
    found = grid_seconds(starts) if grid is None else grid
    if found <= 0.0:
        return trace
    rng = Random(seed)
    half = found / 2
    moved = [request.arrival_seconds + rng.uniform(-half, half) for request in trace.requests]
    note = f"arrivals spread over their grid of {found:g} s (seed {seed})"
    return _retimed(trace, moved, [*trace.notes, note])


def sped_up(trace: Trace, factor: float) -> Trace:
    """Arrivals `factor` times as dense. Pauses in a conversation stay as they are: more people come, none is faster."""
    if factor <= 0.0:
        raise ValueError(f"a speedup must be greater than 0, not {factor}")
    if factor == 1.0:
        return trace
    return _retimed(trace, [request.arrival_seconds / factor for request in trace.requests], trace.notes)


def sliced(trace: Trace, start_seconds: float = 0.0, duration_seconds: float | None = None) -> Trace:
    """What arrives within so many seconds from `start_seconds` on. A turn whose predecessor is cut off begins anew."""
    end = float("inf") if duration_seconds is None else start_seconds + duration_seconds
    kept = [place for place, request in enumerate(trace.requests) if start_seconds <= request.arrival_seconds < end]
    return _picked(trace, kept)


def first(trace: Trace, count: int) -> Trace:
    """Its first `count` requests."""
    return _picked(trace, range(min(count, len(trace.requests))))


def _picked(trace: Trace, kept: Sequence[int]) -> Trace:
    new_places = {place: index for index, place in enumerate(kept)}
    start = trace.requests[kept[0]].arrival_seconds if kept else 0.0
    requests = [
        trace.requests[place]._replace(
            arrival_seconds=trace.requests[place].arrival_seconds - start,
            follows=new_places.get(trace.requests[place].follows, NO_PREDECESSOR),
        )
        for place in kept
    ]
    return _with(trace, requests, trace.notes)


def _retimed(trace: Trace, arrivals: Sequence[float], notes: Iterable[str]) -> Trace:
    """With other arrival times, in their order, from 0 on. What follows another request stays as far behind it."""
    times = list(arrivals)
    for place, request in enumerate(trace.requests):
        if request.follows != NO_PREDECESSOR:
            behind = request.arrival_seconds - trace.requests[request.follows].arrival_seconds
            times[place] = times[request.follows] + behind
    order = sorted(range(len(times)), key=times.__getitem__)
    new_places = {place: index for index, place in enumerate(order)}
    start = times[order[0]] if order else 0.0
    requests = [
        trace.requests[place]._replace(
            arrival_seconds=times[place] - start,
            follows=new_places.get(trace.requests[place].follows, NO_PREDECESSOR),
        )
        for place in order
    ]
    return _with(trace, requests, notes)


def _with(trace: Trace, requests: Sequence[TraceRequest], notes: Iterable[str]) -> Trace:
    return Trace(trace.name, trace.format, trace.block_size_tokens, requests, tuple(notes))
