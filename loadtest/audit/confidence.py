"""Means over seeds, with the interval that the true mean lies in 95 times of 100 (Student's t)."""

from collections.abc import Sequence
from math import sqrt
from typing import NamedTuple

_T_95 = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131,
    2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
)  # fmt: skip
"""By degrees of freedom, from 1 on."""
_NORMAL_95 = 1.96


class Estimate(NamedTuple):
    mean: float
    half_width: float | None
    """Of the 95 % interval; None of a single value."""


def estimate(values: Sequence[float]) -> Estimate:
    """Raises ValueError without values."""
    count = len(values)
    if not count:
        raise ValueError("a mean of nothing")
    mean = sum(values) / count
    if count == 1:
        return Estimate(mean, None)
    variance = sum((value - mean) ** 2 for value in values) / (count - 1)
    quantile = _T_95[count - 2] if count - 2 < len(_T_95) else _NORMAL_95
    return Estimate(mean, quantile * sqrt(variance / count))
