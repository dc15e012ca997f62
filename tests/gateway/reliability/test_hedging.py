"""How long an answer is waited for before another worker is asked, and how often that may be."""

from random import Random

from gateway.config import HedgingConfig
from gateway.reliability.hedging import Hedging, Outcome
from policies.state.attempts import WINDOW_SECONDS
from policies.state.quantiles import VALUES_MIN


def test_a_fixed_time_is_the_same_for_all() -> None:
    hedging = Hedging(HedgingConfig(enabled=True, after_ms=250.0))
    hedging.observe(9.0, streams=True)
    assert (hedging.after_seconds(streams=True), hedging.after_seconds(streams=False)) == (0.25, 0.25)


def test_nothing_is_hedged_before_enough_has_been_seen() -> None:
    hedging = Hedging(HedgingConfig(enabled=True, quantile=0.5))
    for _ in range(VALUES_MIN - 1):
        hedging.observe(1.0, streams=True)
    assert hedging.after_seconds(streams=True) is None
    hedging.observe(1.0, streams=True)
    assert hedging.after_seconds(streams=True) == 1.0


def test_streams_go_by_first_tokens_and_others_by_whole_answers() -> None:
    hedging = Hedging(HedgingConfig(enabled=True))
    for number in range(VALUES_MIN):
        hedging.observe(0.001 * number, streams=True)
        hedging.observe(1.0 + number, streams=False)
    assert hedging.after_seconds(streams=True) == 0.03
    assert hedging.after_seconds(streams=False) == 31.0
    assert hedging.document()["after_ms"] == {"streams": 30.0, "whole": 31_000.0}


def settled(told: bool) -> float:
    """The time that is waited after many answers of up to a second, where the overtaken are `told` of or not."""
    random, hedging = Random(1), Hedging(HedgingConfig(enabled=True, quantile=0.9))
    for _ in range(10_000):
        seconds, after = random.random(), hedging.after_seconds(streams=True)
        if after is None or seconds <= after:
            hedging.observe(seconds, streams=True)
        elif told:
            hedging.observe(min(seconds, after + 0.01), streams=True)
    return hedging.after_seconds(streams=True) or 0.0


def test_the_quantile_does_not_sink_where_the_overtaken_are_told_of() -> None:
    """Of those only lower bounds are known, and they lie above it."""
    assert 0.8 < settled(told=True) < 1.0
    assert settled(told=False) < 0.2


def test_the_budget_says_how_often() -> None:
    now = 100.0
    config = HedgingConfig(enabled=True, budget_share=0.1, budget_per_second_min=0.1)
    hedging = Hedging(config, clock=lambda: now)
    hedging.budget.advance(now)
    hedging.budget.requests += 50
    granted = [hedging.granted() for _ in range(20)]
    assert granted.count(True) == 5 + 0.1 * WINDOW_SECONDS
    assert hedging.outcomes == {Outcome.DENIED: 14}
