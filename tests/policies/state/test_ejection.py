"""Who is left out of a fleet, why, and how many at most."""

from random import Random

import pytest

from policies.state.breakers import Outcomes
from policies.state.ejection import SEEN_MIN, Ejections, EjectionSettings, Member, Slowness

SETTINGS = EjectionSettings(share_max=0.5, failure_margin=0.2, requests_min=20, seconds=30.0, seconds_max=90.0)
SLOW = SETTINGS._replace(failure_margin=None, slowness_factor=3.0)


def fleet(*failures: int, requests: int = 100) -> list[Member]:
    return [Member(f"w{number}", Outcomes(requests, count)) for number, count in enumerate(failures)]


def slow_fleet(*seconds: float, seen: int = 50) -> list[Member]:
    nothing = Outcomes(0, 0)
    return [Member(f"w{number}", nothing, Slowness(value, seen)) for number, value in enumerate(seconds)]


def test_who_fails_more_than_the_others_is_out_for_a_while() -> None:
    ejections = Ejections(SETTINGS)
    assert ejections.judge(fleet(0, 25, 0), 10.0) == ["w1"]
    assert ejections.reason("w1", 39.9) == "fails 25% of its requests, the others 0%"
    assert (ejections.reason("w1", 40.0), ejections.reason("w0", 10.0)) == ("", "")
    assert ejections.total == 1


def test_a_fleet_that_fails_as_a_whole_is_left_as_it_is() -> None:
    assert Ejections(SETTINGS).judge(fleet(60, 70, 65, 55), 10.0) == []


@pytest.mark.parametrize(
    "members", [fleet(10, requests=19), fleet(0, 15, requests=15), fleet(100)], ids=["few", "few all over", "alone"]
)
def test_too_little_says_nothing(members: list[Member]) -> None:
    assert Ejections(SETTINGS).judge(members, 10.0) == []


def test_no_more_than_a_share_and_the_worst_first() -> None:
    assert Ejections(SETTINGS).judge(fleet(0, 0, 0, 90, 80, 70, 0, 0), 10.0) == ["w3", "w4", "w5"]
    assert Ejections(SETTINGS._replace(share_max=0.25)).judge(fleet(0, 0, 0, 90, 80, 70, 0, 0), 10.0) == ["w3", "w4"]
    assert Ejections(SETTINGS._replace(share_max=0.3)).judge(fleet(0, 90, 0), 10.0) == []


def test_those_with_open_circuits_count_among_them() -> None:
    members = fleet(0, 90, 0, 0)
    barred = [member._replace(barred=member.name in ("w2", "w3")) for member in members]
    assert Ejections(SETTINGS).judge(barred, 10.0) == []


def test_those_that_are_out_are_neither_judged_nor_a_measure() -> None:
    ejections = Ejections(SETTINGS)
    assert ejections.judge(fleet(0, 90, 0, 0), 10.0) == ["w1"]
    assert ejections.judge(fleet(0, 90, 0, 0), 20.0) == []
    assert ejections.judge(fleet(0, 90, 50, 0), 20.0) == ["w2"]


def test_each_ejection_in_a_row_is_longer_until_it_is_forgiven() -> None:
    ejections, now, lengths = Ejections(SETTINGS), 0.0, []
    for _ in range(5):
        assert ejections.judge(fleet(0, 90, 0), now) == ["w1"]
        ends = next(now + step for step in range(1000) if not ejections.reason("w1", now + step))
        lengths.append(ends - now)
        now = ends
    assert lengths == [30, 60, 90, 90, 90]
    now += SETTINGS.seconds_max + 1
    assert ejections.judge(fleet(0, 90, 0), now) == ["w1"]
    assert not ejections.reason("w1", now + 30)


def test_who_leaves_is_forgotten() -> None:
    ejections = Ejections(SETTINGS)
    ejections.judge(fleet(0, 90, 0), 10.0)
    ejections.forget("w1")
    assert ejections.reason("w1", 10.0) == ""


def test_who_is_much_slower_than_the_others_is_out() -> None:
    ejections = Ejections(SLOW)
    assert ejections.judge(slow_fleet(0.1, 0.11, 0.29, 0.09), 10.0) == []
    assert ejections.judge(slow_fleet(0.1, 0.11, 0.4, 0.09), 10.0) == ["w2"]
    assert ejections.reason("w2", 10.0) == "is 4.0 times as slow as the others"


def test_slowness_is_measured_before_it_is_believed_and_anew_after_a_return() -> None:
    ejections = Ejections(SLOW)
    assert ejections.judge(slow_fleet(0.1, 0.9, seen=SEEN_MIN - 1), 0.0) == []
    assert ejections.judge(slow_fleet(0.1, 0.9, seen=SEEN_MIN), 0.0) == ["w1"]
    assert ejections.judge(slow_fleet(0.1, 0.9, seen=2 * SEEN_MIN - 1), 40.0) == []
    assert ejections.judge(slow_fleet(0.1, 0.9, seen=2 * SEEN_MIN), 41.0) == ["w1"]


def test_what_is_not_judged_ejects_nobody() -> None:
    assert Ejections(SLOW._replace(slowness_factor=None)).judge(slow_fleet(0.1, 9.0), 0.0) == []
    assert Ejections(SETTINGS._replace(failure_margin=None)).judge(fleet(0, 100, 0), 0.0) == []


@pytest.mark.parametrize("seed", range(10))
def test_however_they_do_the_share_holds(seed: int) -> None:
    random = Random(seed)
    size, share = random.randint(1, 12), random.random()
    ejections = Ejections(SETTINGS._replace(share_max=share))
    for step in range(200):
        now = step * 2.0
        members = [
            Member(f"w{n}", Outcomes(100, random.randint(0, 100)), barred=random.random() < 0.1) for n in range(size)
        ]
        before = sum(m.barred or bool(ejections.reason(m.name, now)) for m in members)
        ejected = ejections.judge(members, now)
        assert not ejected or before + len(ejected) <= share * size
        out = {member.name for member in members if ejections.reason(member.name, now)}
        assert len(out) < size or not out
