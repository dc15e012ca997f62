import pytest

from policies.state.sources import PAUSE_SECONDS_MAX, PAUSES_SECONDS, SourceAccounts


def test_what_is_under_way_counts_until_it_is_reported_or_should_have_ended() -> None:
    accounts = SourceAccounts()
    accounts.begin("1", "a", 1000, ends_at=2.0)
    accounts.begin("2", "a", 500, ends_at=5.0)
    accounts.begin("3", "b", 7, ends_at=5.0)
    assert accounts.ahead_bytes(1.0) == {"a": 1500, "b": 7}
    assert accounts.ahead_bytes(2.0) == {"a": 500, "b": 7}
    accounts.end("2")
    accounts.end("2")
    assert accounts.ahead_bytes(2.0) == {"b": 7}
    assert accounts.ahead_bytes(5.0) == {}
    assert len(accounts) == 0


def test_a_source_that_fails_is_left_alone_for_longer_each_time_by_whom_it_failed() -> None:
    accounts = SourceAccounts()
    now, pauses = 0.0, []
    for _ in range(20):
        accounts.failed("a", "t", "unreachable", now)
        assert accounts.paused("a", "t", now)
        assert not accounts.paused("a", "other", now)
        assert not accounts.paused("t", "a", now)
        (pause,) = accounts.document(now).values()
        pauses.append(pause)
        now += pause
        assert not accounts.paused("a", "t", now)
    assert pauses[:3] == [2.0, 4.0, 8.0]
    assert pauses[-1] == PAUSE_SECONDS_MAX


def test_a_delivery_makes_up_for_it() -> None:
    accounts = SourceAccounts()
    for _ in range(3):
        accounts.failed("a", "t", "closed", 0.0)
    accounts.delivered("a", "t")
    assert not accounts.paused("a", "t", 0.0)
    accounts.failed("a", "t", "closed", 0.0)
    assert accounts.document(0.0) == {"a>t": PAUSES_SECONDS["closed"]}


@pytest.mark.parametrize("reason", ["stale", "other_epoch", "expired", "other_target", "nonsense"])
def test_what_is_not_the_sources_fault_costs_it_nothing(reason: str) -> None:
    accounts = SourceAccounts()
    accounts.failed("a", "t", reason, 0.0)
    assert not accounts.paused("a", "t", 0.0)


def test_old_pauses_are_forgotten() -> None:
    accounts = SourceAccounts()
    for number in range(100):
        accounts.failed(f"a{number}", "t", "forged", 0.0)
    accounts.failed("b", "t", "forged", PAUSES_SECONDS["forged"] + PAUSE_SECONDS_MAX)
    assert len(accounts._pauses) == 1
