"""The judge itself: it sees what is there, and nothing where nothing is."""

from random import Random

import pytest

from tests.security.statistics import Pair, judge


def pairs(count: int, advantage_seconds: float, seed: int) -> list[Pair]:
    random = Random(seed)
    drifts = [random.expovariate(10) + number / count for number in range(count)]  # the machine warms up
    return [
        Pair(drift + random.gauss(0.1 - advantage_seconds, 0.01), drift + random.gauss(0.1, 0.01)) for drift in drifts
    ]


def test_what_differs_is_seen_through_drift() -> None:
    verdict = judge(pairs(500, 0.05, 1), Random(1), rounds=2000)
    assert verdict.pairs_told_apart > 0.99
    assert verdict.p < 0.001
    assert verdict.auc > 0.5


def test_what_differs_by_far_is_certain() -> None:
    verdict = judge([Pair(0.1 + number / 1e4, 0.5 + number / 1e4) for number in range(20)], Random(1))
    assert (verdict.auc, verdict.pairs_told_apart, verdict.trials) == (1.0, 1.0, 40)
    assert (verdict.cached_ms, verdict.fresh_ms) == (pytest.approx(100.95), pytest.approx(500.95))


def test_a_tenth_of_the_noise_is_seen_in_enough_trials() -> None:
    assert judge(pairs(3000, 0.001, 1), Random(1), rounds=1000).p < 0.01


def test_nothing_looks_like_something_as_often_as_it_should() -> None:
    """Of hundred experiments without a difference, p is below 0.05 in about five."""
    low = sum(judge(pairs(60, 0.0, seed), Random(seed), rounds=200).p < 0.05 for seed in range(100))
    assert 1 <= low <= 11


def test_slower_counts_as_well() -> None:
    verdict = judge(pairs(500, -0.05, 1), Random(1), rounds=2000)
    assert (verdict.p < 0.001, verdict.auc < 0.5) == (True, True)


def test_equal_times_say_nothing() -> None:
    verdict = judge([Pair(0.1, 0.1)] * 50, Random(1))
    assert (verdict.auc, verdict.pairs_told_apart, verdict.p) == (0.5, 0.5, 1.0)
