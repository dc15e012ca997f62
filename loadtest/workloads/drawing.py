"""Draws that workloads share: lengths, popularity. All from a `Random` that is handed in."""

from bisect import bisect
from itertools import accumulate
from math import log, log1p
from random import Random


class Zipf:
    """Ranks 0..count-1, rank r drawn in proportion to 1 / (r + 1)**exponent."""

    def __init__(self, count: int, exponent: float = 1.0) -> None:
        self._bounds = list(accumulate((rank + 1) ** -exponent for rank in range(count)))

    def draw(self, rng: Random) -> int:
        return bisect(self._bounds, rng.random() * self._bounds[-1])


def around(rng: Random, mean: float, spread: float = 0.5, minimum: int = 1) -> int:
    """A length with this mean: log-normal, `spread` the standard deviation of its logarithm."""
    return max(minimum, round(rng.lognormvariate(log(mean) - spread * spread / 2, spread)))


def geometric(rng: Random, mean: float) -> int:
    """A count of at least one with this mean."""
    return 1 + int(log(1.0 - rng.random()) / log1p(-1.0 / mean)) if mean > 1.0 else 1
