"""Figures that replays and load tests are told in alike."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import inf, isfinite


@dataclass(frozen=True, slots=True)
class Spread:
    """Of one quantity over all requests that have it; milliseconds. Infinite where there are none."""

    mean: float
    p50: float
    p90: float
    p99: float


def spread(seconds: Iterable[float]) -> Spread:
    """Of the finite ones."""
    ordered = sorted(value for value in seconds if isfinite(value))
    if not ordered:
        return Spread(inf, inf, inf, inf)
    mean = sum(ordered) / len(ordered)
    return Spread(*(value * 1e3 for value in (mean, *(percentile(ordered, share) for share in (0.5, 0.9, 0.99)))))


def percentile(ordered: Sequence[float], share: float) -> float:
    """The value that so much of an ordered sequence lies below."""
    return ordered[min(int(share * len(ordered)), len(ordered) - 1)]


def max_over_mean(amounts: Sequence[float]) -> float:
    """Of what each worker got; 1 where nobody got anything."""
    return max(amounts) * len(amounts) / sum(amounts) if sum(amounts) else 1.0
