"""Token buckets, held beside what they promise over any stretch of time."""

from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.state.limits import Accounts, Bucket, Elsewhere, Level, Rates, Spent


def test_a_bucket_begins_full_and_refills_at_its_rate() -> None:
    bucket = Bucket(60.0, 10.0, 0.0)
    assert bucket.level(0.0) == Level(10.0, 10.0, 0.0)
    bucket.take(10.0, 0.0)
    assert bucket.wait_seconds(1.0, 0.0) == pytest.approx(1.0)
    assert bucket.wait_seconds(4.0, 1.0) == pytest.approx(3.0)
    assert bucket.level(5.0) == Level(10.0, 5.0, 5.0)
    assert bucket.level(100.0) == Level(10.0, 10.0, 0.0)


def test_what_never_fits_is_never_waited_for() -> None:
    assert Bucket(60.0, 10.0, 0.0).wait_seconds(10.5, 0.0) == inf


def test_a_slow_rate_still_lets_one_through() -> None:
    bucket = Bucket(1.0, 1.0, 0.0)
    assert bucket.wait_seconds(1.0, 0.0) == 0.0
    bucket.take(1.0, 0.0)
    assert bucket.wait_seconds(1.0, 0.0) == pytest.approx(60.0)


def test_debts_are_paid_before_anything_else() -> None:
    bucket = Bucket(60.0, 10.0, 0.0)
    bucket.take(25.0, 0.0)
    assert bucket.level(0.0) == Level(10.0, 0.0, 25.0)
    assert bucket.wait_seconds(1.0, 10.0) == pytest.approx(6.0)


def test_a_clock_that_lags_refills_nothing() -> None:
    bucket = Bucket(60.0, 10.0, 5.0)
    bucket.take(10.0, 5.0)
    assert bucket.wait_seconds(1.0, 3.0) == pytest.approx(1.0)


def test_another_rate_keeps_what_was_used() -> None:
    bucket = Bucket(60.0, 10.0, 0.0)
    bucket.take(4.0, 0.0)
    assert bucket.tuned(120.0, 10.0, 0.0).level(0.0) == Level(20.0, 16.0, 2.0)
    assert bucket.tuned(12.0, 10.0, 0.0).level(0.0) == Level(2.0, 0.0, 20.0)


@given(
    st.floats(1, 10_000),
    st.floats(1, 120),
    st.lists(st.tuples(st.floats(0, 30), st.floats(0.1, 200)), max_size=60),
)
def test_nobody_gets_more_than_rate_and_burst(
    per_minute: float, burst: float, asked: list[tuple[float, float]]
) -> None:
    bucket, now, given_ = Bucket(per_minute, burst, 0.0), 0.0, 0.0
    for pause, amount in asked:
        now += pause
        if bucket.wait_seconds(amount, now) == 0.0:
            bucket.take(amount, now)
            given_ += amount
        assert given_ <= bucket.capacity + bucket.per_second * now + 1e-6


@given(st.floats(1, 1000), st.floats(0.1, 500), st.floats(0, 100))
def test_who_waits_as_told_is_let_in(per_minute: float, amount: float, used: float) -> None:
    bucket = Bucket(per_minute, 60.0, 0.0)
    bucket.take(used, 0.0)
    wait = bucket.wait_seconds(amount, 0.0)
    if wait < inf:
        assert bucket.wait_seconds(amount, wait + 1e-6) == pytest.approx(0.0, abs=1e-5)


def test_accounts_are_of_the_limited_alone_and_bounded() -> None:
    accounts = Accounts({"a": Rates(60.0), "b": Rates(60.0), "c": Rates(None, 60.0)}.get, subjects_max=2)
    assert accounts.of("nobody", 0.0) is None
    first = accounts.of("a", 0.0)
    assert first is not None
    assert (first.tokens, accounts.of("a", 1.0)) == (None, first)
    accounts.of("b", 0.0)
    accounts.of("a", 0.0)
    accounts.of("c", 0.0)
    assert len(accounts) == 2
    assert accounts.of("a", 0.0) is first


def test_rates_that_change_hold_at_once() -> None:
    rates = {"a": Rates(60.0, None, 10.0), "b": Rates(60.0)}
    accounts = Accounts(rates.get)
    account = accounts.of("a", 0.0)
    assert account is not None
    accounts.of("b", 0.0)
    account.spend(6, 0, 0.0)
    rates["a"] = Rates(120.0, 600.0, 10.0)
    del rates["b"]
    accounts.retune(0.0)
    assert account.requests is not None
    assert account.tokens is not None
    assert account.requests.level(0.0).remaining == 14.0
    assert account.tokens.level(0.0).remaining == 100.0
    assert len(accounts) == 1


def test_what_is_used_elsewhere_is_owed_here() -> None:
    accounts = Accounts({"a": Rates(60.0, 6000.0, 10.0)}.get)
    elsewhere = Elsewhere(accounts)
    elsewhere.hear("g2", "life-1", {"a": Spent(5.0, 500.0)}, 0.0)  # how much of it is new nobody knows
    account = accounts.of("a", 0.0)
    assert account is not None
    assert account.requests is not None
    assert account.tokens is not None
    assert account.requests.level(0.0).remaining == 10.0
    elsewhere.hear("g2", "life-1", {"a": Spent(8.0, 700.0), "unlimited": Spent(1.0, 1.0)}, 0.0)
    assert (account.requests.level(0.0).remaining, account.tokens.level(0.0).remaining) == (7.0, 800.0)
    # A restarted gateway counts from nothing again: its totals are not compared with those of its last life.
    elsewhere.hear("g2", "life-2", {"a": Spent(9.0, 900.0)}, 0.0)
    assert account.requests.level(0.0).remaining == 7.0
    # What is owed is not told on: it would be counted twice.
    assert accounts.spent(10) == {"a": Spent(0.0, 0.0)}


def test_a_report_that_leaves_somebody_out_loses_no_count() -> None:
    accounts = Accounts({"a": Rates(60.0, None, 10.0)}.get)
    elsewhere = Elsewhere(accounts)
    for used in ({"a": Spent(5.0, 0.0)}, {"b": Spent(1.0, 0.0)}, {"a": Spent(6.0, 0.0)}):
        elsewhere.hear("g2", "life-1", used, 0.0)
    account = accounts.of("a", 0.0)
    assert account is not None
    assert account.requests is not None
    assert account.requests.level(0.0).remaining == 9.0
