"""Intervals against values from tables of Student's t."""

import pytest

from loadtest.audit.confidence import estimate


def test_a_single_value_has_no_interval() -> None:
    assert estimate([3.0]) == (3.0, None)


@pytest.mark.parametrize(
    ("values", "mean", "half_width"),
    [
        ([1.0, 3.0], 2.0, 12.706),  # standard error 1
        ([1.0, 2.0, 3.0, 4.0, 5.0], 3.0, 2.776 * (2.5 / 5) ** 0.5),
        ([0.0, 1.0] * 20, 0.5, 1.96 * (10 / 39 / 40) ** 0.5),
        ([4.0] * 5, 4.0, 0.0),
    ],
)
def test_the_interval_is_students(values: list[float], mean: float, half_width: float) -> None:
    assert estimate(values) == pytest.approx((mean, half_width))


def test_a_mean_of_nothing_is_an_error() -> None:
    with pytest.raises(ValueError, match="nothing"):
        estimate([])
