from math import inf

import pytest

from policies.contract import FleetRates
from policies.pricing import work_price


@pytest.mark.parametrize(
    ("utilisation", "arrivals", "wait", "price"),
    [
        (0.0, 0.0, 0.0, 0.0),
        (0.0, 1e9, 0.0, 0.0),
        (0.5, 1e9, 0.0, 0.5),
        (0.8, 1e9, 0.0, 3.2),
        (1.0, 60.0, 0.0, 60.0),
        (7.0, 60.0, 0.0, 60.0),
        (0.5, 1e9, 3.0, 0.5 + 2.0 * 3.0 / (0.5 + 0.1)),
        (1.0, 60.0, 3.0, 60.0 + 2.0 * 30.0),
    ],
)
def test_closed_forms(utilisation, arrivals, wait, price):
    rates = FleetRates(2.0, utilisation, arrivals, 30.0)
    assert work_price(rates, wait) == pytest.approx(price, rel=1e-6)


def test_price_rises_with_load_and_with_congestion():
    prices = [work_price(FleetRates(3.0, rho / 20, 90.0), wait) for wait in (0.0, 0.1, 1.0) for rho in range(21)]
    for start in range(0, 63, 21):
        assert prices[start : start + 21] == sorted(prices[start : start + 21])
    assert prices[0] == 0
    assert prices[41] > prices[20]
    assert max(prices) < inf
