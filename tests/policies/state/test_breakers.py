"""A breaker's states, its pauses and its window."""

from random import Random

import pytest

from policies.state.breakers import SLICES, TRIAL_SECONDS_MAX, Breaker, BreakerSettings, Circuit, Outcomes

SETTINGS = BreakerSettings(
    failures_in_a_row=3,
    failure_share=0.5,
    requests_min=10,
    window_seconds=12.0,
    open_seconds_min=1.0,
    open_seconds_max=8.0,
    jitter_share=0.5,
)


def opened(now: float = 100.0, jitter: float = 0.0) -> Breaker:
    breaker = Breaker(SETTINGS)
    for _ in range(3):
        breaker.failed("r", now, jitter)
    assert breaker.circuit is Circuit.OPEN
    return breaker


def trial(breaker: Breaker, name: str = "trial") -> float:
    """When the pause is over and a trial is on its way."""
    now = breaker.reopens_at
    assert breaker.admits(now)
    breaker.sent(name, now)
    return now


def test_failures_in_a_row_open_it() -> None:
    breaker = Breaker(SETTINGS)
    assert [breaker.failed("r", 100.0, 0.0) for _ in range(3)] == [False, False, True]
    assert not breaker.admits(100.0)
    assert (breaker.failures_total, breaker.opened_total) == (3, 1)


def test_a_success_between_them_keeps_it_closed() -> None:
    breaker = Breaker(SETTINGS._replace(requests_min=1000))
    for _ in range(20):
        breaker.failed("r", 100.0, 0.0)
        breaker.failed("r", 100.0, 0.0)
        breaker.succeeded("r", 100.0)
    assert breaker.circuit is Circuit.CLOSED


def test_a_share_of_a_window_opens_it() -> None:
    breaker = Breaker(SETTINGS)
    breaker.advance(100.0)
    outcomes = []
    for _ in range(5):
        breaker.succeeded("r", 100.0)
        outcomes.append(breaker.failed("r", 100.0, 0.0))
    assert outcomes == [False] * 4 + [True]


def test_what_has_left_the_window_does_not_count() -> None:
    breaker = Breaker(SETTINGS)
    breaker.advance(100.0)
    for _ in range(4):
        breaker.failed("r", 100.0, 0.0)
        breaker.succeeded("r", 100.0)
    assert breaker.outcomes(100.0) == (8, 4)
    assert breaker.outcomes(100.0 + SETTINGS.window_seconds / 2) == (8, 4)
    assert breaker.outcomes(100.0 + SETTINGS.window_seconds + SETTINGS.window_seconds / SLICES) == (0, 0)


def test_a_window_moves_slice_by_slice() -> None:
    breaker, now = Breaker(SETTINGS), 100.0
    step = SETTINGS.window_seconds / SLICES
    for _ in range(20):
        breaker.advance(now)
        for _ in range(2):
            breaker.succeeded("r", now)
        now += step
    assert breaker.outcomes(now - step / 2) == Outcomes(2 * SLICES, 0)


def test_one_trial_at_a_time_and_its_success_closes_it() -> None:
    breaker = opened()
    assert not breaker.admits(breaker.reopens_at - 0.001)
    now = trial(breaker)
    assert breaker.circuit is Circuit.HALF_OPEN
    assert not breaker.admits(now)
    breaker.sent("another", now)  # where nobody else is left, say
    breaker.succeeded("another", now)
    assert breaker.circuit is Circuit.HALF_OPEN
    breaker.succeeded("trial", now)
    assert breaker.circuit is Circuit.CLOSED
    assert breaker.outcomes(now) == (0, 0)


def test_a_trial_that_says_nothing_makes_room_for_another() -> None:
    breaker = opened()
    now = trial(breaker)
    breaker.dropped("another")
    assert not breaker.admits(now)
    breaker.dropped("trial")
    assert breaker.admits(now)


def test_a_trial_that_never_ends_does_not_hold_it_open() -> None:
    breaker = opened()
    now = trial(breaker)
    assert not breaker.admits(now + TRIAL_SECONDS_MAX - 0.1)
    assert breaker.admits(now + TRIAL_SECONDS_MAX)


def test_each_pause_is_twice_as_long_up_to_a_limit() -> None:
    breaker, pauses = opened(), []
    for _ in range(6):
        pauses.append(breaker.reopens_at)
        now = trial(breaker)
        assert breaker.failed("trial", now, 0.0)
        pauses[-1] = breaker.reopens_at - now
    assert pauses == [2.0, 4.0, 8.0, 8.0, 8.0, 8.0]


def test_jitter_shortens_a_pause() -> None:
    assert opened(jitter=0.0).reopens_at == 101.0
    assert opened(jitter=0.5).reopens_at == 100.75


def test_who_relapses_soon_goes_on_where_it_was() -> None:
    breaker = opened()
    now = trial(breaker)
    breaker.failed("trial", now, 0.0)  # two seconds
    now = trial(breaker)
    breaker.succeeded("trial", now)
    for _ in range(3):
        breaker.failed("r", now + 3.9, 0.0)
    assert breaker.reopens_at == now + 3.9 + 4.0


def test_who_was_well_for_long_begins_anew() -> None:
    breaker = opened()
    now = trial(breaker)
    breaker.failed("trial", now, 0.0)
    now = trial(breaker)
    breaker.succeeded("trial", now)
    for _ in range(3):
        breaker.failed("r", now + 4.0, 0.0)
    assert breaker.reopens_at == now + 4.0 + 1.0


def test_late_news_of_earlier_requests_moves_nothing() -> None:
    breaker = opened()
    until = breaker.reopens_at
    assert not breaker.failed("r", 100.5, 0.0)
    breaker.succeeded("r", 100.5)
    assert (breaker.circuit, breaker.reopens_at) == (Circuit.OPEN, until)


def test_another_process_is_tried_at_once() -> None:
    breaker = opened()
    breaker.reborn()
    assert breaker.admits(100.0)
    breaker.sent("trial", 100.0)
    assert not breaker.admits(100.0)
    breaker.failed("trial", 100.0, 0.0)
    assert breaker.reopens_at == 102.0


@pytest.mark.parametrize("seed", range(20))
def test_whatever_happens_one_request_at_a_time_is_a_trial(seed: int) -> None:
    """Beside a model that knows nothing but the rules."""
    random, breaker, now = Random(seed), Breaker(SETTINGS), 50.0
    live: list[str] = []
    trials: set[str] = set()
    for number in range(2000):
        now += random.random() * 0.3
        if random.random() < 0.5 and breaker.admits(now):
            name = str(number)
            if breaker.circuit is Circuit.HALF_OPEN:
                assert not trials & set(live), "a trial is under way"
                trials.add(name)
            breaker.sent(name, now)
            live.append(name)
        elif live:
            name = live.pop(random.randrange(len(live)))
            before, fate = breaker.circuit, random.random()
            if fate < 0.5:
                breaker.failed(name, now, random.random())
            elif fate < 0.9:
                breaker.succeeded(name, now)
            else:
                breaker.dropped(name)
            if before is Circuit.OPEN:
                assert breaker.circuit is Circuit.OPEN
            if before is Circuit.HALF_OPEN and breaker.circuit is not before:
                assert name in trials
            trials.discard(name)
    assert breaker.opened_total > 5
