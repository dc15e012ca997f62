"""What a soak has shown: series of samples, and whether anything goes on growing or getting slower."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

RSS_SLOPE_PERCENT_MAX = 1.0
"""Of the mean, per ten minutes."""
P99_RATIO_MAX = 1.5
"""Of the second half to the first, beyond `P99_SLACK_MS`: a machine has its moments."""
P99_SLACK_MS = 20.0
GROWTH_RATIO_MAX = 1.25
GROWTH_ENTRIES_MIN = 200


class Sample(NamedTuple):
    """At one moment."""

    seconds: float
    """Since the beginning."""
    resident_bytes: int
    sizes: Mapping[str, float]
    """Entries of the gateway's collections, and other gauges that must stay bounded."""


def slope_percent(points: Sequence[tuple[float, float]], per_seconds: float = 600.0) -> float:
    """Of a line through (seconds, value) by least squares, as a share of the mean value."""
    count = len(points)
    mean_x = sum(x for x, _ in points) / count
    mean_y = sum(y for _, y in points) / count
    spread = sum((x - mean_x) ** 2 for x, _ in points)
    if not spread or not mean_y:
        return 0.0
    slope = sum((x - mean_x) * (y - mean_y) for x, y in points) / spread
    return slope * per_seconds / mean_y * 100.0


def percentile(values: Sequence[float], share: float) -> float:
    """Nearest rank; NaN of nothing."""
    ordered = sorted(values)
    return ordered[min(int(len(ordered) * share), len(ordered) - 1)] if ordered else float("nan")


def growing(samples: Sequence[Sample]) -> dict[str, list[float]]:
    """Collections whose mean grew from each third of the samples to the next, and in all by more than is noise."""
    third = len(samples) // 3
    if not third:
        return {}
    thirds = samples[:third], samples[third : 2 * third], samples[-third:]
    found = {}
    for name in sorted({name for sample in samples for name in sample.sizes}):
        first, second, last = (sum(s.sizes.get(name, 0.0) for s in part) / len(part) for part in thirds)
        much = last > first * GROWTH_RATIO_MAX and last - first > GROWTH_ENTRIES_MIN
        if first < second < last and much:
            found[name] = [round(first), round(second), round(last)]
    return found


def verdict(
    samples: Sequence[Sample], latencies: Sequence[tuple[float, float]], warm_up_seconds: float, seconds: float
) -> dict[str, Any]:
    """`latencies`: (seconds since the beginning, milliseconds). Only what came after the warm-up counts."""
    counted = [sample for sample in samples if sample.seconds >= warm_up_seconds]
    middle = (warm_up_seconds + seconds) / 2
    first = [ms for at, ms in latencies if warm_up_seconds <= at < middle]
    second = [ms for at, ms in latencies if at >= middle]
    p99_ms = percentile(first, 0.99), percentile(second, 0.99)
    slope = slope_percent([(sample.seconds, float(sample.resident_bytes)) for sample in counted])
    grown = growing(counted)
    reasons = []
    if slope > RSS_SLOPE_PERCENT_MAX:
        reasons.append(f"resident memory grows by {slope:.2f} % in ten minutes")
    if not p99_ms[1] <= p99_ms[0] * P99_RATIO_MAX + P99_SLACK_MS:
        reasons.append(f"the 99th percentile went from {p99_ms[0]:.0f} to {p99_ms[1]:.0f} ms")
    reasons += [f"{name} grows: {', '.join(map(str, means))}" for name, means in grown.items()]
    return {
        "verdict": "stable" if not reasons else "not stable",
        "reasons": reasons,
        "resident_slope_percent_per_ten_minutes": round(slope, 3),
        "p99_ms_by_half": [round(value, 1) for value in p99_ms],
        "requests_by_half": [len(first), len(second)],
        "growing": grown,
    }
