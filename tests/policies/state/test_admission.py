from collections import Counter
from math import inf
from random import Random

import pytest

from policies.state.admission import (
    RETRY_SECONDS_MAX,
    AdmissionQueue,
    Held,
    Lateness,
    Limits,
    Reason,
    Refusal,
    Ticket,
)

QUANTUM = 100.0


def anywhere(tenant: str, group: str) -> bool:
    return True


def ticket(tenant: str = "a", tokens: float = 10.0, *, by: float = inf, rank: float = 0.0, size: int = 1, group=""):
    return Ticket(tenant, tokens, size, by, rank, group)


def queue_of(*tickets: Ticket, weights: dict[str, float] | None = None, **limits) -> AdmissionQueue:
    queue = AdmissionQueue(Limits(quantum_tokens=QUANTUM)._replace(**limits), lambda t: (weights or {}).get(t, 1.0))
    for one in tickets:
        assert queue.offer(one, 0.0) == []
    return queue


def taken(queue: AdmissionQueue, count: int, now: float = 0.0) -> list[Ticket]:
    found = [queue.take(now, anywhere) for _ in range(count)]
    assert None not in found
    return found


def tenants(tickets: list[Ticket]) -> str:
    return "".join(one.tenant for one in tickets)


def test_an_empty_queue_has_nobody_next() -> None:
    queue = queue_of()
    assert queue.take(0.0, anywhere) is None
    assert (queue.count, queue.next_expiry(), queue.expire(1e9), queue.empty()) == (0, inf, [], [])


def test_one_tenant_is_served_in_order_of_arrival_and_priority_until_it_has_aged() -> None:
    ageing = 5.0
    arrivals = [("old and low", 0.0, 2), ("later and high", 9.0, 0), ("later still and high", 11.0, 0)]
    named = {}
    queue = queue_of()
    for name, at, level in arrivals:
        named[name] = ticket(rank=at + level * ageing)
        queue.offer(named[name], at)
    order = [next(name for name, one in named.items() if one is found) for found in taken(queue, 3)]
    assert order == ["later and high", "old and low", "later still and high"]


def test_nobody_is_taken_where_there_is_no_room_and_no_line_blocks_another() -> None:
    queue = queue_of(ticket("a", group="lora"), ticket("a", rank=1.0), ticket("b", group="lora"))
    assert queue.take(0.0, lambda tenant, group: False) is None
    found = queue.take(0.0, lambda tenant, group: group != "lora")
    assert (found.tenant, found.group) == ("a", "")
    assert queue.take(0.0, lambda tenant, group: group != "lora") is None
    assert queue.take(0.0, lambda tenant, group: tenant == "b").tenant == "b"


def test_rounds_go_by_tokens_and_weights_and_not_by_requests() -> None:
    many = [ticket("a", 10.0, rank=n) for n in range(400)]
    few = [ticket("b", 100.0, rank=n) for n in range(40)]
    heavy = [ticket("c", 50.0, rank=n) for n in range(80)]
    queue = queue_of(*many, *few, *heavy, weights={"c": 2.0})
    got = Counter()
    for found in taken(queue, 140):
        got[found.tenant] += found.tokens
    assert got["a"] == pytest.approx(got["b"], abs=QUANTUM)
    assert got["c"] == pytest.approx(2 * got["a"], abs=2 * QUANTUM)


def test_a_request_of_many_quanta_is_served_after_its_share_of_rounds() -> None:
    queue = queue_of(ticket("big", 1e6), *[ticket("small", 10.0, rank=n) for n in range(1000)])
    served = tenants([queue.take(0.0, anywhere) for _ in range(1001)])
    assert served.count("big") == 1
    lonely = queue_of(ticket("big", 1e9))
    assert lonely.take(0.0, anywhere).tenant == "big"


def test_whoever_comes_in_the_middle_of_a_round_is_next_once_in_a_round() -> None:
    queue = queue_of(*[ticket("flood", 10.0, rank=n) for n in range(40)])
    assert tenants(taken(queue, 2)) == "floodflood"
    queue.offer(ticket("quiet", 60.0), 0.0)
    assert tenants(taken(queue, 1)) == "quiet"
    # What it has left of the round does not reach for another one: the flood has the rest of this one, and the next.
    queue.offer(ticket("quiet", 60.0), 0.0)
    following = [queue.take(0.0, anywhere).tenant for _ in range(20)]
    assert following.index("quiet") == 18


def test_who_asks_again_and_again_gets_no_more_than_a_share() -> None:
    queue = queue_of(*[ticket("flood", 10.0, rank=n) for n in range(1000)])
    got = Counter()
    for _ in range(500):
        if "again" not in queue.waiting_tokens():
            queue.offer(ticket("again", 10.0), 0.0)
        got[queue.take(0.0, anywhere).tenant] += 1
    assert got["again"] == pytest.approx(250, abs=11)


def test_what_was_served_elsewhere_is_charged_and_bounded() -> None:
    queue = queue_of(*[ticket(tenant, 10.0, rank=n) for tenant in "ab" for n in range(400)])
    queue.charge("a", 500.0)
    queue.charge("nobody", 500.0)
    got = Counter(found.tenant for found in taken(queue, 150))
    assert got["b"] - got["a"] == pytest.approx(50, abs=11)

    queue = queue_of(*[ticket(tenant, 10.0, rank=n) for tenant in "ab" for n in range(400)])
    queue.charge("a", 1e12)
    assert "a" in tenants(taken(queue, 200))


def test_a_refund_makes_up_for_a_turn_that_came_to_nothing() -> None:
    queue = queue_of(*[ticket(tenant, 100.0, rank=n) for tenant in "ab" for n in range(50)])
    got = Counter()
    for _ in range(60):
        found = queue.take(0.0, anywhere)
        if found.tenant == "a" and found.rank % 2:
            queue.refund(found)
        else:
            got[found.tenant] += 1
    assert got["a"] == pytest.approx(got["b"], abs=2)


# Bounds


def test_a_full_queue_takes_the_place_from_the_longest_line() -> None:
    flood = [ticket("flood", rank=n) for n in range(4)]
    queue = queue_of(*flood, requests_max=4)
    assert queue.would_shed("flood", 9.0, 1)
    assert not queue.would_shed("quiet", 9.0, 1)
    assert queue.offer(ticket("quiet"), 0.0) == [flood[3]]
    assert not flood[3].waiting
    refused = queue.offer(ticket("flood", rank=9.0), 0.0)
    assert isinstance(refused, Refusal)
    assert refused.reason is Reason.OVER_SHARE
    assert queue.waiting_tokens() == {"flood": 30.0, "quiet": 10.0}
    # A more urgent one of its own takes the place of its least urgent.
    urgent = ticket("flood", rank=-1.0)
    assert not queue.would_shed("flood", -1.0, 1)
    assert queue.offer(urgent, 0.0) == [flood[2]]
    assert taken(queue, 2)[1] is urgent


def test_one_tenants_full_queue_is_full_and_nobodys_share() -> None:
    queue = queue_of(ticket(), ticket(), requests_max=2)
    refused = queue.offer(ticket(rank=1.0), 0.0)
    assert isinstance(refused, Refusal)
    assert refused.reason is Reason.QUEUE_FULL


def test_bytes_are_bounded_over_all_queues_and_nobody_loses_its_place_for_nothing() -> None:
    held = Held()
    first, second = (AdmissionQueue(Limits(bytes_max=100), held=held) for _ in range(2))
    waiting = ticket("a", 10.0, size=60)
    assert first.offer(waiting, 0.0) == []
    assert isinstance(second.offer(ticket("b", 10.0, size=60), 0.0), Refusal)
    assert (held.requests, held.bytes) == (1, 60)
    # Room for it could be made; but then its own line would be the longest.
    assert isinstance(first.offer(ticket("c", 9.0, size=101), 0.0), Refusal)
    assert waiting.waiting
    assert (held.requests, held.bytes) == (1, 60)
    assert first.take(0.0, anywhere) is waiting
    assert (held.requests, held.bytes) == (0, 0)


def test_who_leaves_leaves_nothing() -> None:
    staying, leaving = ticket("a"), ticket("b")
    queue = queue_of(staying, leaving)
    queue.leave(leaving)
    queue.leave(leaving)
    assert (queue.count, queue.waiting_tokens()) == (1, {"a": 10.0})
    assert queue.empty() == [staying]
    assert queue.count == 0


def test_who_is_too_late_is_given_back_in_time() -> None:
    late, later, never = ticket(by=1.0), ticket("b", by=2.0), ticket("c")
    queue = queue_of(never, later, late)
    assert queue.next_expiry() == 1.0
    assert queue.expire(0.99) == []
    assert queue.expire(1.0) == [late]
    assert queue.expire(5.0) == [later]
    assert queue.empty() == [never]


# Predictions


def draining(queue: AdmissionQueue, tokens_per_second: float, seconds: float) -> float:
    """Let time pass with the queue handing out what it can."""
    now, given = 0.0, 0.0
    while now < seconds:
        now += 0.01
        while given < tokens_per_second * now:
            given += queue.take(now, anywhere).tokens
    return now


def test_a_wait_is_ones_own_line_and_what_shares_let_pass_meanwhile() -> None:
    queue = queue_of(
        *[ticket("a", 10.0, rank=n) for n in range(500)],
        *[ticket("b", 10.0, rank=n) for n in range(500)],
        ticket("c", 10.0, rank=0.0),
        weights={"b": 3.0},
    )
    assert queue.wait_seconds(ticket("d", 10.0)) == 0.0  # nothing is known yet
    now = draining(queue, 1000.0, 2.0)
    assert queue.drain_rate == pytest.approx(1000.0, rel=0.02)
    left = queue.waiting_tokens()
    # Three of b's tokens pass for each of a's.
    expected = (left["a"] + min(left["b"], 3 * (left["a"] + 10))) / queue.drain_rate
    assert queue.wait_seconds(ticket("a", 10.0, rank=1e9)) == pytest.approx(expected)
    assert queue.wait_seconds(ticket("d", 10.0)) == pytest.approx((10.0 + 30.0) / queue.drain_rate)
    assert queue.wait_seconds(ticket("a", 10.0, rank=-1.0)) == pytest.approx(30.0 / queue.drain_rate)

    told = queue.offer(ticket("a", 10.0, rank=1e9, by=now + expected / 2), now)
    assert isinstance(told, Refusal)
    assert told.reason is Reason.OVER_SHARE
    assert told.retry_after_seconds == pytest.approx(expected / 2)
    assert queue.offer(ticket("a", 10.0, rank=1e9, by=now + expected * 1.01), now) == []
    told = queue.offer(ticket("d", 10.0, by=now + 0.01), now)
    assert isinstance(told, Refusal)
    assert told.reason is Reason.DEADLINE


def test_what_waits_at_the_worker_counts_and_a_line_alone_is_no_share() -> None:
    queue = queue_of(ticket())
    told = queue.offer(ticket(by=1.0), 0.0, after_seconds=1.5)
    assert told == Refusal(Reason.DEADLINE, 0.5)
    assert queue.offer(ticket(by=1.0), 0.0, after_seconds=0.5) == []


def test_a_queue_that_stands_still_is_predicted_to_and_says_a_bounded_time() -> None:
    queue = queue_of(*[ticket(rank=n) for n in range(300)])
    now = draining(queue, 1000.0, 1.0)
    assert queue.take(now + 600.0, lambda tenant, group: False) is None
    told = queue.offer(ticket(rank=1e9, by=now + 601.0), now + 600.0)
    assert told == Refusal(Reason.DEADLINE, RETRY_SECONDS_MAX)


def test_lateness_is_the_bad_case_and_is_forgotten() -> None:
    lateness, random, now = Lateness(), Random(1), 0.0
    for _ in range(5000):
        now += 0.01
        lateness.observe(1.0, 1.0 + random.uniform(-0.1, 0.1), now)
    assert 0.07 < lateness.seconds(now) < 0.12
    assert lateness.seconds(now + 300.0) < 0.001
    early = Lateness()
    for _ in range(100):
        early.observe(1.0, 0.5, 0.0)
    assert early.seconds(0.0) == 0.0


# Everything at once


def test_whatever_happens_nothing_is_lost_or_counted_twice() -> None:
    for seed in range(20):
        random = Random(seed)
        held = Held()
        queue = AdmissionQueue(
            Limits(requests_max=12, bytes_max=60, quantum_tokens=50), lambda t: 1.0 + ord(t) % 3, held
        )
        waiting: set[Ticket] = set()
        now = 0.0
        for _ in range(400):
            now += random.expovariate(10.0)
            act = random.random()
            if act < 0.6:
                one = Ticket(
                    random.choice("abcd"),
                    random.choice([1.0, 40.0, 400.0]),
                    random.randrange(20),
                    now + random.uniform(-0.1, 3.0),
                    now + random.choice([0.0, 5.0]),
                    random.choice(["", "x"]),
                )
                answer = queue.offer(one, now)
                if not isinstance(answer, Refusal):
                    assert set(answer) <= waiting
                    waiting -= set(answer)
                    waiting.add(one)
            elif act < 0.8:
                room = {group: random.random() < 0.7 for group in ("", "x")}
                found = queue.take(now, lambda tenant, group, room=room: room[group])
                assert (found is not None) == any(room[one.group] for one in waiting)
                if found is not None:
                    assert room[found.group]
                    waiting.remove(found)
                    if random.random() < 0.2:
                        queue.refund(found)
            elif act < 0.9 and waiting:
                gone = random.choice(sorted(waiting, key=lambda one: one.order))
                queue.leave(gone)
                waiting.remove(gone)
            else:
                expired = queue.expire(now)
                assert set(expired) == {one for one in waiting if one.start_by <= now}
                waiting -= set(expired)
            assert queue.count == held.requests == len(waiting) <= 12
            assert held.bytes == sum(one.size_bytes for one in waiting) <= 60
            totals = Counter()
            for one in waiting:
                assert one.waiting
                totals[one.tenant] += one.tokens
            assert queue.waiting_tokens() == pytest.approx(totals)
        assert set(queue.empty()) == waiting
        assert held.requests == held.bytes == 0
