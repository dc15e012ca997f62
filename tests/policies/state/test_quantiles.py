"""A quantile of the last values."""

from random import Random

import pytest

from policies.state.quantiles import VALUES_MAX, VALUES_MIN, RecentQuantile


def test_too_few_say_nothing() -> None:
    recent = RecentQuantile(0.5)
    for _ in range(VALUES_MIN - 1):
        recent.observe(1.0)
    assert recent.value is None
    recent.observe(1.0)
    assert recent.value == 1.0


@pytest.mark.parametrize("quantile", [0.5, 0.9, 0.95, 1.0])
def test_so_many_lie_below_it(quantile: float) -> None:
    random, recent = Random(1), RecentQuantile(quantile)
    values = [random.random() for _ in range(VALUES_MAX)]
    for value in values:
        recent.observe(value)
    assert recent.value is not None
    assert sum(value <= recent.value for value in values) == pytest.approx(quantile * VALUES_MAX, abs=1)


def test_old_values_are_forgotten() -> None:
    recent = RecentQuantile(0.95)
    for _ in range(VALUES_MAX):
        recent.observe(100.0)
    for _ in range(VALUES_MAX):
        recent.observe(1.0)
    assert recent.value == 1.0


@pytest.mark.parametrize("quantile", [0.0, 1.1, -1.0])
def test_what_is_no_quantile_is_refused(quantile: float) -> None:
    with pytest.raises(ValueError, match="quantile"):
        RecentQuantile(quantile)
