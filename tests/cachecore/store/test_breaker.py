from cachecore.store import Breaker


def test_it_opens_after_failures_in_a_row_only() -> None:
    breaker = Breaker(threshold=3)
    assert not breaker.failed("a", 1.0)
    assert not breaker.failed("b", 2.0)
    breaker.succeeded(3.0)
    assert (breaker.failures, breaker.reason, breaker.opened) == (0, "", False)
    assert [breaker.failed("c", now) for now in (4.0, 5.0, 6.0)] == [False, False, True]
    assert (breaker.opened, breaker.since, breaker.reason) == (True, 6.0, "c")


def test_it_opens_once_and_closes_at_the_first_success() -> None:
    breaker = Breaker(threshold=1)
    assert breaker.failed("x", 1.0)
    assert not breaker.failed("y", 2.0)
    assert (breaker.since, breaker.reason, breaker.failures) == (1.0, "y", 2)
    breaker.succeeded(3.0)
    assert (breaker.opened, breaker.since, breaker.reason, breaker.failures) == (False, 3.0, "", 0)
    assert breaker.failed("z", 4.0)


def test_probes_come_less_often_up_to_a_bound() -> None:
    breaker = Breaker(threshold=1, probe_seconds_min=0.1, probe_seconds_max=1.0)
    breaker.failed("x", 0.0)
    delays = []
    for _ in range(6):
        delays.append(breaker.probe_delay_seconds)
        breaker.failed("x", 0.0)
    assert delays == [0.1, 0.2, 0.4, 0.8, 1.0, 1.0]
    breaker.succeeded(0.0)
    breaker.failed("x", 0.0)
    assert breaker.probe_delay_seconds == 0.1


def test_a_fresh_one_has_the_settings_and_nothing_else() -> None:
    breaker = Breaker(threshold=2, probe_seconds_min=0.5)
    breaker.failed("x", 0.0)
    assert breaker.fresh() == Breaker(threshold=2, probe_seconds_min=0.5)
