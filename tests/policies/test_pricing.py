from dataclasses import replace
from math import exp, inf, sqrt

import pytest

from policies.contract import FleetRates
from policies.pricing import crowding_each, kv_price, queue_key_seconds, slot_price, work_price


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


def test_where_prefixes_can_be_pulled_the_floor_stays_low():
    rates = FleetRates(2.0, 0.9, 1e9, 30.0)
    assert work_price(rates, 0.0, pulls=True) == pytest.approx(0.81)
    assert work_price(rates, 0.0) == pytest.approx(8.1, rel=1e-6)


def test_kv_is_priced_by_the_worker_that_is_least_short(fleet):
    workers = fleet("abc")
    for name, requests in (("a", 9), ("b", 5), ("c", 9)):
        workers.busy(name, requests)
        for number in range(workers.requests - requests, workers.requests):
            workers.inflight.first_token(f"busy-{number + 1}", 0.0)
    accounts = [workers.inflight.account(name) for name in "abc"]
    assert kv_price(workers.snapshot().workers) == 0.0
    for account in accounts[:2]:
        account.new_life(0, 10_000)
    pressures = [account.kv_pressure() for account in accounts]
    assert pressures[0] > pressures[1] > 0.0 == pressures[2]
    assert kv_price(workers.snapshot().workers) == pressures[1]
    accounts[1].new_life(0, 1_000_000)
    assert kv_price(workers.snapshot().workers) == 0.0


def test_queue_keys_let_short_prefills_pass_for_a_while():
    assert queue_key_seconds(10.0, 0.1) < queue_key_seconds(8.0, 1.0) < queue_key_seconds(28.1, 0.0)


def test_price_rises_with_load_and_with_congestion():
    prices = [work_price(FleetRates(3.0, rho / 20, 90.0), wait) for wait in (0.0, 0.1, 1.0) for rho in range(21)]
    for start in range(0, 63, 21):
        assert prices[start : start + 21] == sorted(prices[start : start + 21])
    assert prices[0] == 0
    assert prices[41] > prices[20]
    assert max(prices) < inf


@pytest.mark.parametrize(
    ("requests", "capacity", "price"),
    [
        (0, 8, 0.0),
        (4, 8, 0.5 ** sqrt(18) / (0.5 + 1 / 16)),
        (8, 8, 16.0),
        (20, 8, 16.0),
        (128, 256, 0.5 ** sqrt(514) / (0.5 + 1 / 512)),
        (4, 0, 0.0),
    ],
)
def test_slots_are_dear_when_they_are_short(fleet, requests, capacity, price):
    workers = fleet("ab")
    for name in "ab":
        workers.busy(name, requests)
    views = [replace(view, capacity_requests=capacity) for view in workers.snapshot().workers]
    assert slot_price(views) == pytest.approx(price)


def test_workers_of_unknown_capacity_do_not_dilute_the_price(fleet):
    workers = fleet("ab")
    workers.busy("a", 8)
    known, unknown = workers.snapshot().workers
    assert slot_price([replace(known, capacity_requests=8), unknown]) == pytest.approx(8.0)


def test_crowding_is_a_ratio_of_what_was_placed(fleet):
    """Nine, four and one requests of 0.05 s each. The mean request is the slack."""
    workers = fleet("abc")
    workers.busy("a", 9)
    workers.busy("b", 4)
    workers.busy("c", 1)
    snapshot = workers.snapshot()
    assert crowding_each(snapshot.workers, snapshot.rates) == pytest.approx([5.0, 2.5, 1.0])


def test_crowding_forgets_with_tau(fleet):
    """Twenty requests at one worker count as twenty times exp(-2) after a minute."""
    workers = fleet("ab")
    workers.busy("a", 20)
    snapshot = workers.snapshot(60.0)
    assert crowding_each(snapshot.workers, snapshot.rates) == pytest.approx([1 + 20 * exp(-2), 1.0])


def test_an_idle_worker_is_not_crowded(fleet):
    """A lone conversation stays where it began, however many turns it has had there."""
    workers = fleet("ab")
    workers.busy("a", 9)
    for number in range(1, 9):
        workers.inflight.finish(f"busy-{number}", 1.0)
    snapshot = workers.snapshot()
    assert crowding_each(snapshot.workers, snapshot.rates) == [2.0, 1.0]
    workers.inflight.finish("busy-9", 1.0)
    assert crowding_each(snapshot.workers, snapshot.rates) == [1.0, 1.0]


def test_few_long_prompts_crowd_as_much_as_many_short_ones(fleet):
    workers = fleet("ab")
    workers.busy("a", 1, prefill_seconds=2.0)
    workers.busy("b", 20, prefill_seconds=0.1)
    snapshot = workers.snapshot()
    assert crowding_each(snapshot.workers, snapshot.rates) == pytest.approx([1.0, 1.0])


def test_where_slots_are_what_requests_take_up_they_crowd_by_slots(fleet):
    """Eight slots, held for 2 s each time: a quarter of a second for each request, whatever its prefill."""
    workers = fleet("ab")
    for name in "ab":
        workers.inflight.account(name).new_life(8)
        workers.inflight.dispatch(f"seen-{name}", name, 0, 0.0, 100, 0.0)
    for name in "ab":
        workers.inflight.finish(f"seen-{name}", 2.0, 10, answered=True)
    before = workers.inflight.account("a").placed
    workers.inflight.dispatch("r0", "a", 0, 2.0, 100, 0.01)
    rates = workers.inflight.rates(2.0, 2)
    assert workers.inflight.account("a").placed - before == pytest.approx(0.25 * rates.placed_unit, rel=0.01)
    workers.inflight.dispatch("r1", "b", 0, 2.0, 100, 0.4)
    assert workers.inflight.account("b").placed == pytest.approx(0.4 * rates.placed_unit, rel=0.01)
