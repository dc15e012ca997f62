from dataclasses import replace
from math import sqrt

import pytest

from policies import create
from policies.contract import Evidence, FleetRates, Query
from policies.estimates import Calibration, PrefillModel

POLICY = create("kv-aware")


def test_ties_of_short_prompts_spread(fleet):
    workers = fleet("abc")
    chosen = workers.burst(POLICY, Query(9), 300, finish=True)
    assert all(60 <= chosen[name] <= 141 for name in "abc"), chosen


def test_calibration_noise_does_not_unbalance_an_idle_fleet(fleet):
    workers = fleet("ab")
    snapshot = workers.snapshot()
    faster = replace(snapshot.workers[0], prefill=PrefillModel(None, Calibration(0.98, 0.98)))
    snapshot = snapshot._replace(workers=[faster, snapshot.workers[1]])
    chosen = [POLICY.decide(Query(30), snapshot, workers.random).worker.name for _ in range(200)]
    assert 60 <= chosen.count("a") <= 140


def test_short_prompts_spread_by_load(fleet):
    workers = fleet("abcd")
    chosen = workers.burst(POLICY, Query(9), 40)
    assert chosen == {"a": 10, "b": 10, "c": 10, "d": 10}


def test_a_burst_over_warm_workers_is_shared(fleet):
    workers = fleet("abcdefgh")
    workers.matched = dict.fromkeys("abcdefgh", 1888)
    chosen = workers.burst(POLICY, Query(1904), 64)
    assert sum(chosen.values()) == 64
    assert max(chosen.values()) <= 12, chosen


def test_longest_match_wins_when_loads_are_equal(fleet):
    workers = fleet("abc")
    workers.matched = {"a": 64, "b": 576, "c": 560}
    assert POLICY.decide(Query(640), workers.snapshot(), workers.random).worker.name == "b"


def test_a_tie_never_costs_a_cached_block(fleet):
    """16 tokens of 32,000 are far below the tolerance for equal costs."""
    workers = fleet("ab")
    workers.matched = {"a": 1600, "b": 1616}
    chosen = {POLICY.decide(Query(32_000), workers.snapshot(), workers.random).worker.name for _ in range(20)}
    assert chosen == {"b"}


def test_a_miss_goes_to_the_least_loaded(fleet):
    workers = fleet("abc")
    workers.busy("a", 50)
    workers.busy("b", 2)
    assert POLICY.decide(Query(5000), workers.snapshot(), workers.random).worker.name == "c"


def test_cost_is_wait_plus_priced_work(fleet):
    workers = fleet("ab")
    workers.matched = {"a": 1600}
    workers.busy("a", 1, prefill_seconds=0.2)
    rates = FleetRates(arrivals_per_second=2.0, utilisation=0.5, arrivals_in_window=60.0)
    decision = POLICY.decide(Query(2000), workers.snapshot(0.05, rates), workers.random)
    price = 0.25 / (0.5 + 1 / 60)  # the floor; b has no wait, so nothing is congested
    work_a = workers.model.prefill_seconds(400, 1600)
    work_b = workers.model.prefill_seconds(2000, 0)
    crowding = (0.25 + 0.2) / 0.25  # a was given 0.2 s of work and b none; a mean request has 0.25 s
    assert decision.costs == pytest.approx([0.15 + (1 + price) * crowding * work_a, (1 + price) * work_b])
    assert decision.worker.name == "b"
    assert decision.predicted_ttft_ms == pytest.approx(work_b * 1e3)


def test_work_is_dear_near_saturation(fleet):
    """The same choice between a queue with a match and an idle worker without one, at two loads."""
    workers = fleet("ab")
    workers.matched = {"a": 1984}
    workers.busy("a", 1, prefill_seconds=0.12)
    query = Query(2000)
    idle = POLICY.decide(query, workers.snapshot(0.0, FleetRates()), workers.random)
    busy = POLICY.decide(query, workers.snapshot(0.0, FleetRates(10.0, 0.9, 300.0)), workers.random)
    assert (idle.worker.name, busy.worker.name) == ("b", "a")


def test_full_slots_make_work_dear(fleet):
    """Prefill is next to nothing; what the engines have no more of is slots."""
    workers = fleet("ab")
    workers.matched = {"a": 1600}
    for name in "ab":
        for number in range(7):
            workers.inflight.dispatch(f"{name}{number}", name, 0, 0.0, 2000, 0.0)
            workers.inflight.first_token(f"{name}{number}", 0.0)
    snapshot = workers.snapshot(1.0, FleetRates())
    snapshot = snapshot._replace(workers=[replace(view, capacity_requests=8) for view in snapshot.workers])
    decision = POLICY.decide(Query(2000), snapshot, workers.random)
    price = (14 / 16) ** sqrt(18) / (2 / 16 + 1 / 16)
    work = workers.model.prefill_seconds(400, 1600, workers.inflight.account("a").running_context_tokens)
    assert decision.costs[0] == pytest.approx((1 + price) * work)


def test_short_kv_memory_makes_work_dear(fleet):
    """Twelve decoding requests need almost all of it on either worker: whoever has the prompt gets it, queue or not."""
    workers = fleet("ab")
    workers.matched = {"a": 1600}
    for name in "ab":
        for number in range(12):
            workers.inflight.dispatch(f"{name}{number}", name, 0, 0.0, 2000, 0.0)
            workers.inflight.first_token(f"{name}{number}", 0.0)
    workers.busy("a", 1, prefill_seconds=0.3)
    snapshot = workers.snapshot(0.0, FleetRates())
    ample = POLICY.decide(Query(2000), snapshot, workers.random)
    for name in "ab":
        workers.inflight.account(name).new_life(0, 30_000)
    short = POLICY.decide(Query(2000), snapshot, workers.random)
    assert (ample.worker.name, short.worker.name) == ("b", "a")
    pressure = workers.inflight.account("b").kv_pressure()
    assert pressure < workers.inflight.account("a").kv_pressure()
    assert short.costs[1] / ample.costs[1] == pytest.approx(1 + pressure)


def test_a_fleet_that_leans_to_one_side_is_set_upright(fleet):
    """Everything cached is on one worker, and it never has a queue: the copies are made all the same."""
    workers = fleet("abcd")
    workers.matched = {"a": 1000}
    chosen = []
    for number in range(40):
        view = POLICY.decide(Query(1230), workers.snapshot(0.1 * number), workers.random).worker
        workers.inflight.dispatch(f"r{number}", view.name, 0, 0.1 * number, 1230, 0.01)
        workers.inflight.first_token(f"r{number}", 0.1 * number + 0.01)
        workers.matched[view.name] = 1000
        chosen.append(view.name)
    assert chosen[:2] == ["a", "a"]
    assert all(8 <= chosen.count(name) <= 12 for name in "abcd"), chosen


def test_decode_slows_prefill(fleet):
    workers = fleet("ab")
    for number in range(40):
        workers.inflight.dispatch(f"d{number}", "a", 0, 0.0, 100_000, 0.1)
        workers.inflight.first_token(f"d{number}", 0.0)
    decision = POLICY.decide(Query(2000), workers.snapshot(1.0), workers.random)
    assert decision.worker.name == "b"
    assert decision.costs[0] / decision.costs[1] > 1.5


@pytest.mark.parametrize(
    ("evidence", "credit"), [(Evidence.PREDICTED, 0.98), (Evidence.HISTORY, 0.95), (Evidence.NONE, 0)]
)
def test_a_guess_counts_less_than_a_confirmed_match(fleet, evidence, credit):
    workers = fleet("ab")
    workers.evidence = evidence
    workers.matched = {"a": 2000}
    decision = POLICY.decide(Query(4000), workers.snapshot(0.0, FleetRates()), workers.random)
    counted = int(credit * 2000)
    assert decision.costs[0] == pytest.approx(workers.model.prefill_seconds(4000 - counted, counted))


def test_a_session_sticks_among_equals_only(fleet):
    workers = fleet("abcdef")
    query = Query(9, session="alice")
    chosen = {POLICY.decide(query, workers.snapshot(), workers.random).worker.name for _ in range(50)}
    assert len(chosen) == 1
    home = chosen.pop()
    sessions = {
        POLICY.decide(Query(9, session=f"s{number}"), workers.snapshot(), workers.random).worker.name
        for number in range(100)
    }
    assert sessions == set("abcdef")
    workers.busy(home, 3)
    assert POLICY.decide(query, workers.snapshot(), workers.random).worker.name != home


def test_a_fleet_change_moves_only_the_sessions_of_the_worker_that_left(fleet):
    before, after = fleet("abcdef"), fleet("abcde")

    def homes(workers):
        return {
            number: POLICY.decide(Query(9, session=f"s{number}"), workers.snapshot(), workers.random).worker.name
            for number in range(300)
        }

    old, new = homes(before), homes(after)
    assert {number for number in old if old[number] != new[number]} == {n for n in old if old[n] == "f"}


def test_the_reason_reads_like_a_sentence(fleet):
    workers = fleet(["worker-0", "worker-1"])
    workers.matched = {"worker-0": 1872}
    workers.busy("worker-1", 10, prefill_seconds=0.07)
    decision = POLICY.decide(Query(1904), workers.snapshot(), workers.random)
    assert decision.reason == "1,872 of 1,904 tokens cached, starts in 5.2 ms; next best worker-1: 773 ms"


def test_one_candidate_needs_no_rival(fleet):
    decision = POLICY.decide(Query(100), fleet("a").snapshot(), fleet("a").random)
    assert decision.worker.name == "a"
    assert decision.reason == "0 of 100 tokens cached, starts in 7.5 ms"


def test_deciding_changes_nothing(fleet):
    workers = fleet("abc")
    workers.busy("a", 3)
    workers.snapshot()
    before = repr(workers.inflight)
    for _ in range(100):
        POLICY.decide(Query(100, session="x"), workers.snapshot(), workers.random)
    assert repr(workers.inflight) == before
