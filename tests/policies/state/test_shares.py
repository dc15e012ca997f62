import pytest

from policies.state.shares import TAU_SECONDS, TENANTS_MAX, Standing, TenantShares


def told(shares: TenantShares, now: float, **waiting: float) -> dict[str, Standing]:
    shares.roll(now)
    return shares.standings(waiting, 100)


def test_totals_grow_and_the_recent_past_fades() -> None:
    shares = TenantShares()
    shares.count("a", 100.0)
    shares.count("a", 50.0)
    assert told(shares, 0.0, b=7.0) == {"a": Standing(150.0, 0.0, 150.0), "b": Standing(0.0, 7.0, 0.0)}
    shares.count("a", 10.0)
    (standing,) = told(shares, TAU_SECONDS).values()
    assert standing.total_tokens == 160.0
    assert standing.recent_tokens == pytest.approx(150.0 / 2.71828 + 10.0, rel=1e-3)
    assert told(shares, 100 * TAU_SECONDS) == {}
    assert shares.totals == {"a": 160.0}


def test_the_busiest_are_told_of_first() -> None:
    shares = TenantShares()
    for number in range(10):
        shares.count(f"t{number}", float(number))
    shares.roll(0.0)
    assert list(shares.standings({"t1": 100.0}, 3)) == ["t1", "t9", "t8"]


def test_what_others_started_is_heard_once_also_when_reports_are_lost() -> None:
    here, there = TenantShares(), TenantShares()
    there.count("a", 100.0)
    # The first report of a run tells nothing new: who knows when that was.
    assert here.hear("g2", "run", told(there, 0.0), 0.0) == {}
    there.count("a", 40.0)
    told(there, 0.25)  # lost
    there.count("a", 2.0)
    there.count("b", 5.0)
    assert here.hear("g2", "run", told(there, 0.5), 0.5) == {"a": 42.0, "b": 5.0}
    assert here.hear("g2", "run", told(there, 0.5), 0.5) == {}
    again = TenantShares()
    again.count("a", 9.0)
    assert here.hear("g2", "another run", told(again, 1.0), 1.0) == {}


def test_who_was_given_more_is_held_back_while_another_waits_elsewhere() -> None:
    here, there = TenantShares(slack_tokens=10.0), TenantShares()
    here.count("greedy", 1000.0)
    here.roll(0.0)
    here.settle(0.0)
    assert here.held_back == frozenset()

    there.count("modest", 100.0)
    here.hear("g2", "run", told(there, 0.0, modest=50.0), 0.0)
    here.settle(0.0)
    assert here.held_back == {"greedy"}
    # Its own waiting elsewhere is no reason, nor is one that has had as much.
    here.hear("g2", "run", told(there, 0.0, greedy=50.0), 0.0)
    here.settle(0.0)
    assert here.held_back == frozenset()
    there.count("modest", 895.0)
    here.hear("g2", "run", told(there, 0.0, modest=50.0), 0.0)
    here.settle(0.0)
    assert here.held_back == frozenset()


def test_weights_say_what_is_more() -> None:
    there = TenantShares()
    here = TenantShares(lambda tenant: 20.0 if tenant == "greedy" else 1.0, 10.0)
    here.count("greedy", 1000.0)
    here.roll(0.0)
    there.count("modest", 100.0)
    here.hear("g2", "run", told(there, 0.0, modest=50.0), 0.0)
    here.settle(0.0)
    assert here.held_back == frozenset()


def test_a_silent_gateway_counts_for_nothing() -> None:
    here, there = TenantShares(slack_tokens=10.0, silence_seconds=3.0), TenantShares()
    here.count("greedy", 1000.0)
    here.roll(0.0)
    here.hear("g2", "run", told(there, 0.0, modest=50.0), 0.0)
    here.settle(2.9)
    assert here.held_back == {"greedy"}
    assert here.recent_tokens() == {"greedy": 1000.0, "modest": 0.0}
    here.settle(3.0)
    assert here.held_back == frozenset()
    assert here.recent_tokens() == {"greedy": 1000.0}


def test_tenants_are_bounded() -> None:
    shares = TenantShares()
    for number in range(TENANTS_MAX + 5):
        shares.count(str(number), 1.0)
    assert len(shares.totals) == TENANTS_MAX
    shares.count("0", 1.0)
    assert shares.totals["0"] == 2.0
