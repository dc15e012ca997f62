from math import inf

import pytest

from loadtest.figures import Spread, max_over_mean, percentile, spread


def test_a_percentile_is_a_value_that_was_seen() -> None:
    assert [percentile([1.0, 2.0, 3.0, 4.0], share) for share in (0.0, 0.5, 0.9, 1.0)] == [1.0, 3.0, 4.0, 4.0]


def test_a_spread_is_of_what_is_finite_and_in_milliseconds() -> None:
    assert spread([0.003, inf, 0.001]) == Spread(2.0, 3.0, 3.0, 3.0)
    assert spread([inf]) == Spread(inf, inf, inf, inf)


def test_balance() -> None:
    assert max_over_mean([1.0, 3.0]) == pytest.approx(1.5)
    assert max_over_mean([]) == max_over_mean([0.0, 0.0]) == 1.0
