"""The policies that do not price: round robin, least loaded, prefix-aware, session; and the table of all."""

from collections import Counter
from dataclasses import replace

import pytest

from policies import POLICIES, create
from policies.contract import Evidence, Query
from policies.filters import long_enough, with_room
from policies.session import HashRing, load_limit


def test_the_table_names_every_policy():
    assert list(POLICIES) == ["kv-aware", "prefix-aware", "round-robin", "least-loaded", "session"]
    assert [create(name).name for name in POLICIES] == list(POLICIES)
    assert create("session") is not create("session")
    with pytest.raises(ValueError, match=r"'fastest'.*kv-aware, prefix-aware, round-robin, least-loaded, session"):
        create("fastest")


@pytest.mark.parametrize("name", ["kv-aware", "prefix-aware", "least-loaded", "session"])
def test_ties_spread(fleet, name):
    workers = fleet("abc")
    chosen = workers.burst(create(name), Query(9), 300, finish=True)
    assert all(60 <= chosen[worker] <= 141 for worker in "abc"), chosen


@pytest.mark.parametrize("name", list(POLICIES))
def test_load_counts_at_dispatch(fleet, name):
    """Thirty prompts before the first answer's first byte: an even spread."""
    workers = fleet("abc")
    assert workers.burst(create(name), Query(2000), 30) == {"a": 10, "b": 10, "c": 10}


@pytest.mark.parametrize("name", ["kv-aware", "prefix-aware", "least-loaded"])
def test_a_busy_worker_draws_no_new_prompts(fleet, name):
    """One worker runs fifty unique prompts: twenty new ones go elsewhere."""
    workers = fleet("abc")
    workers.busy("a", 50)
    assert set(workers.burst(create(name), Query(1000), 20)) == {"b", "c"}


@pytest.mark.parametrize("name", list(POLICIES))
def test_every_decision_explains_itself(fleet, name):
    workers = fleet("ab")
    decision = create(name).decide(Query(100, session="s"), workers.snapshot(), workers.random)
    assert decision.worker.name in workers.names
    assert len(decision.reason) > 10
    assert len(decision.costs) in (0, 2)


class TestRoundRobin:
    def test_exact_turns(self, fleet):
        workers, policy = fleet("abc"), create("round-robin")
        names = [policy.decide(Query(1), workers.snapshot(), workers.random).worker.name for _ in range(9)]
        assert sorted(names[:3]) == ["a", "b", "c"]
        assert names[:3] == names[3:6] == names[6:]

    def test_a_worker_that_was_away_gets_one_turn_not_a_flood(self, fleet):
        workers, policy = fleet("abc"), create("round-robin")
        workers.burst(policy, Query(1), 3)
        workers.names = ["a", "b"]
        assert workers.burst(policy, Query(1), 10) == {"a": 5, "b": 5}
        workers.names = ["a", "b", "c"]
        assert workers.burst(policy, Query(1), 9) == {"a": 3, "b": 3, "c": 3}

    def test_memory_is_bounded_under_churn(self, fleet):
        workers, policy = fleet("a"), create("round-robin")
        for number in range(2000):
            workers.names = [f"pod-{number}", f"pod-{number + 1}"]
            workers.burst(policy, Query(1), 1, finish=True)
        assert len(policy._turns) <= 300


class TestLeastLoaded:
    def test_tokens_count_not_requests(self, fleet):
        workers = fleet("ab")
        workers.busy("a", 1, prompt_tokens=10_000)
        workers.busy("b", 5, prompt_tokens=1000)
        decision = create("least-loaded").decide(Query(10), workers.snapshot(), workers.random)
        assert decision.worker.name == "b"
        assert decision.costs == [10_000, 5000]
        assert decision.reason == "5,000 tokens in 5 requests outstanding, the least of the fleet"

    def test_prompts_of_unknown_length_are_counted_as_requests(self, fleet):
        workers = fleet("abcd")
        assert workers.burst(create("least-loaded"), Query(0), 40) == dict.fromkeys("abcd", 10)


class TestPrefixAware:
    @pytest.fixture
    def workers(self, fleet):
        workers = fleet("abcd")
        workers.evidence = Evidence.HISTORY
        return workers

    def test_longest_match(self, workers):
        workers.matched = {"a": 64, "b": 576, "c": 400}
        workers.busy("b", 2)
        decision = create("prefix-aware").decide(Query(640), workers.snapshot(), workers.random)
        assert decision.worker.name == "b"
        assert decision.reason == "576 of 640 tokens went there before"

    def test_equal_matches_go_by_load(self, workers):
        workers.matched = {"a": 512, "b": 512}
        workers.busy("a", 1)
        assert create("prefix-aware").decide(Query(640), workers.snapshot(), workers.random).worker.name == "b"

    def test_an_overloaded_worker_is_passed_over_for_the_next_longest(self, workers):
        workers.matched = {"a": 576, "b": 512, "c": 320}
        workers.busy("a", 7)  # above 1.5 x 7/4 + 4
        decision = create("prefix-aware").decide(Query(640), workers.snapshot(), workers.random)
        assert decision.worker.name == "b"
        assert decision.reason.endswith("1 overloaded passed over")

    def test_all_holders_overloaded_is_a_miss(self, workers):
        workers.matched = {"a": 576}
        workers.busy("a", 20)
        workers.busy("b", 1)
        decision = create("prefix-aware").decide(Query(640), workers.snapshot(), workers.random)
        assert decision.worker.name in "cd"
        assert decision.reason.startswith("every worker with a match is overloaded")

    def test_a_first_block_that_all_prompts_share_does_not_draw_them_together(self, workers):
        workers.matched = {"a": 16}
        chosen = workers.burst(create("prefix-aware"), Query(640), 400, finish=True)
        assert all(70 <= chosen[name] <= 130 for name in "abcd"), chosen

    def test_a_burst_of_siblings_is_bounded(self, workers):
        workers.matched = {"a": 576}
        chosen = workers.burst(create("prefix-aware"), Query(640), 64)
        assert chosen["a"] == max(chosen.values()) <= 1.5 * 16 + 4 + 1

    def test_a_burst_over_warm_workers_is_shared(self, fleet):
        workers = fleet("abcdefgh")
        workers.matched = dict.fromkeys("abcdefgh", 1888)
        assert workers.burst(create("prefix-aware"), Query(1904), 64) == dict.fromkeys("abcdefgh", 8)


class TestSession:
    def homes(self, workers, sessions=600):
        policy = create("session")
        return [
            policy.decide(Query(10, session=f"user-{number}"), workers.snapshot(), workers.random).worker.name
            for number in range(sessions)
        ]

    def test_sticks_and_spreads(self, fleet):
        workers = fleet("abcd")
        homes = self.homes(workers)
        assert homes == self.homes(workers)
        assert all(90 <= count <= 210 for count in Counter(homes).values())
        assert len(Counter(homes)) == 4

    def test_placement_is_the_same_in_every_process(self):
        ring = HashRing()
        ring.ensure([("worker-0", 0), ("worker-1", 0), ("worker-2", 0)])
        assert [next(ring.walk(session))[0] for session in ("alice", "bob", "carol", "dave")] == [
            "worker-2",
            "worker-1",
            "worker-1",
            "worker-0",
        ]

    def test_a_worker_that_leaves_moves_only_its_own_sessions(self, fleet):
        before, after = self.homes(fleet("abcd")), self.homes(fleet("abc"))
        moved = {number for number in range(600) if before[number] != after[number]}
        assert moved == {number for number in range(600) if before[number] == "d"}

    def test_a_worker_that_joins_takes_only_what_becomes_its_own(self, fleet):
        workers = fleet("abcd")
        policy = create("session")
        query = [Query(10, session=f"user-{number}") for number in range(600)]
        before = [policy.decide(each, workers.snapshot(), workers.random).worker.name for each in query]
        workers.names.append("e")
        after = [policy.decide(each, workers.snapshot(), workers.random).worker.name for each in query]
        moved = [new for old, new in zip(before, after, strict=True) if old != new]
        assert set(moved) == {"e"}
        assert len(moved) < 200

    def test_a_full_worker_is_stepped_over_until_it_has_room(self, fleet):
        workers, policy, query = fleet("abcd"), create("session"), Query(10, session="alice")
        home = policy.decide(query, workers.snapshot(), workers.random)
        assert home.reason == f"{home.worker.name} is the session's own worker"
        workers.busy(home.worker.name, load_limit(workers.snapshot().workers))
        other = policy.decide(query, workers.snapshot(), workers.random)
        assert other.worker.name != home.worker.name
        assert other.reason == f"{other.worker.name} is next on the ring; 1 before it full"
        workers.inflight.finish("busy-1", 0.0)
        assert policy.decide(query, workers.snapshot(), workers.random).worker.name == home.worker.name

    def test_load_is_bounded(self, fleet):
        workers = fleet("abcdefgh")
        chosen = workers.burst(create("session"), Query(10, session="one user"), 400)
        assert max(chosen.values()) <= 63  # 1.25 x 400 / 8, rounded up

    def test_without_a_key_the_least_loaded(self, fleet):
        workers = fleet("ab")
        workers.busy("a", 1)
        assert create("session").decide(Query(10), workers.snapshot(), workers.random).worker.name == "b"

    def test_the_ring_forgets_workers_long_gone(self):
        ring = HashRing()
        for number in range(1000):
            ring.ensure([(f"pod-{number}", 0), (f"pod-{number}", 1)])
        assert len(ring) <= 68


def test_filter_keeps_those_with_room_and_never_refuses(fleet):
    workers = fleet("abc")
    workers.busy("a", 2)
    workers.busy("b", 1)
    views = [replace(view, capacity_requests=2) for view in workers.snapshot().workers]
    assert [view.name for view in with_room(views)] == ["b", "c"]
    workers.busy("b", 1)
    workers.busy("c", 5)
    assert [view.name for view in with_room(views)] == ["a", "b", "c"]
    assert [view.name for view in with_room(workers.snapshot().workers)] == ["a", "b", "c"]


def test_filter_keeps_those_whose_context_is_long_enough(fleet):
    views = fleet("abc").snapshot().workers
    views[0].context_tokens_max, views[1].context_tokens_max = 1000, 2000
    assert [view.name for view in long_enough(Query(900, output_tokens_max=100), views)] == ["a", "b", "c"]
    assert [view.name for view in long_enough(Query(901, output_tokens_max=100), views)] == ["b", "c"]
    assert [view.name for view in long_enough(Query(5000), views)] == ["c"]
    assert [view.name for view in long_enough(Query(5000), views[:2])] == ["a", "b"]


@pytest.mark.parametrize("name", ["round-robin", "least-loaded", "session", "prefix-aware"])
def test_who_is_full_is_passed_over_by_those_that_price_no_slots(fleet, name):
    workers = fleet("ab")
    workers.matched = {"a": 900}
    workers.busy("a", 2, prompt_tokens=1)
    workers.busy("b", 1, prompt_tokens=9999)
    views = workers.snapshot().workers
    views[0].capacity_requests, views[1].capacity_requests = 2, 2
    snapshot = workers.snapshot()._replace(workers=views)
    policy = create(name)
    sessions = [f"s{number}" for number in range(20)]
    assert {policy.decide(Query(1000, session=s), snapshot, workers.random).worker.name for s in sessions} == {"b"}
