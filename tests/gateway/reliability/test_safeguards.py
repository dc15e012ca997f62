"""Breakers, ejection and budgets, where they meet a fleet. The clock is a number, and chance is seeded."""

from random import Random
from typing import Any

import pytest

from gateway.config import BreakersConfig, EjectionConfig, RetriesConfig, WorkerConfig
from gateway.fleet.worker import ModelPool, WorkerRecord
from gateway.reliability.failures import BODY_CUT, CLIENT_GONE, CONNECT_REFUSED, WORKER_BUSY, WORKER_ERROR, Failure
from gateway.reliability.safeguards import Safeguards
from policies.estimates import FleetEstimates
from policies.state.breakers import Circuit
from policies.state.inflight import PrefillSample

BREAKERS = BreakersConfig(failures_in_a_row=3, requests_min=1000, open_seconds_min=1.0, open_seconds_max=8.0)
EJECTION = EjectionConfig(requests_min=10, seconds=30.0)


class World:
    def __init__(self, count: int, **config: Any) -> None:
        self.now = 1000.0
        config = {"breakers": BREAKERS, "ejection": EJECTION, **config}
        self.safeguards = Safeguards(**config, clock=lambda: self.now, random=Random(1))
        self.workers = [WorkerRecord.of(WorkerConfig(url=f"http://127.0.0.1:{9000 + n}")) for n in range(count)]
        self.pool = ModelPool("m", workers=list(self.workers))
        self.pools = {"m": self.pool}
        for worker in self.workers:
            worker.healthy = True
            self.safeguards.joined(worker)

    def fail(self, worker: WorkerRecord, times: int = 1, failure: Failure = WORKER_ERROR, request: str = "r") -> None:
        for _ in range(times):
            self.safeguards.failed(worker, request, failure)

    def answer(self, worker: WorkerRecord, times: int = 1) -> None:
        for _ in range(times):
            worker.breaker.succeeded("r", self.now)

    def turn(self, seconds: float = 1.0, estimates: FleetEstimates | None = None) -> None:
        self.now += seconds
        self.safeguards.turn(self.pools.values(), estimates)

    @property
    def admitted(self) -> list[WorkerRecord]:
        return self.safeguards.admitted(list(self.workers)) if self.safeguards.impaired else list(self.workers)


def test_nobody_is_asked_while_all_do_their_work() -> None:
    world = World(3)
    world.fail(world.workers[0], 2)
    world.turn()
    assert world.safeguards.impaired == set()


def test_a_failing_worker_is_impaired_at_once_and_until_a_trial_succeeds() -> None:
    world = World(3)
    bad, *good = world.workers
    world.fail(bad, 3, BODY_CUT)
    assert world.safeguards.impaired == {bad}
    assert world.admitted == good
    world.now += 1.0
    assert world.admitted == world.workers
    bad.breaker.sent("trial", world.now)
    assert world.admitted == good
    bad.breaker.succeeded("trial", world.now)
    world.turn()
    assert (world.safeguards.impaired, world.admitted) == (set(), world.workers)


@pytest.mark.parametrize("failure", [WORKER_BUSY, CLIENT_GONE])
def test_what_is_not_its_fault_opens_nothing(failure: Failure) -> None:
    world = World(2)
    world.fail(world.workers[0], 100, failure)
    assert (world.safeguards.impaired, world.workers[0].failures) == (set(), 0)
    assert world.safeguards.failures[failure.name] == 100


def test_what_is_not_its_fault_makes_room_for_another_trial() -> None:
    world = World(2)
    bad, good = world.workers
    world.fail(bad, 3)
    world.now += 1.0
    assert world.admitted == [bad, good]
    bad.breaker.sent("trial", world.now)
    world.fail(bad, failure=CLIENT_GONE, request="trial")
    assert world.admitted == [bad, good]


def test_all_are_used_where_all_should_be_left_alone() -> None:
    world = World(3)
    for worker in world.workers:
        world.fail(worker, 3, CONNECT_REFUSED)
    assert world.admitted == world.workers
    assert world.safeguards.panics == 1


def test_without_breakers_nothing_opens() -> None:
    world = World(2, breakers=BreakersConfig(enabled=False))
    world.fail(world.workers[0], 100)
    assert world.safeguards.impaired == set()
    assert world.safeguards.failures["worker_error"] == 100


def test_an_ejected_worker_returns_with_a_clean_slate() -> None:
    world = World(3)
    bad, *good = world.workers
    world.turn()
    for worker in good:
        world.answer(worker, 20)
    for _ in range(10):
        world.fail(bad)
        world.answer(bad, 2)
    world.turn()
    assert bad.ejected == "fails 33% of its requests, the others 0%"
    assert world.admitted == good
    for worker in good:
        world.answer(worker, 20)
    world.turn(29.0)
    assert bad.ejected
    world.turn(1.0)
    assert (bad.ejected, bad.breaker.outcomes(world.now), world.admitted) == ("", (0, 0), world.workers)
    assert world.safeguards.ejections.total == 1


def test_the_slow_are_ejected_where_that_is_wanted() -> None:
    world = World(3, ejection=EjectionConfig(failure_margin=None, slowness_factor=3.0))
    estimates = FleetEstimates()
    for worker in world.workers:
        worker.holders = (worker.holder(),)
        for _ in range(20):
            slow = worker is world.workers[0]
            estimates.observe_prefill(PrefillSample(worker.name, 0, 1, 0.1, 1.0 if slow else 0.1))
    world.turn(estimates=estimates)
    assert world.workers[0].ejected.endswith(" times as slow as the others")
    assert world.safeguards.impaired == {world.workers[0]}
    plain = World(3)
    plain.turn(estimates=estimates)
    assert plain.safeguards.impaired == set()


def test_a_worker_that_leaves_takes_its_state_with_it() -> None:
    world = World(2)
    world.fail(world.workers[0], 3)
    world.safeguards.left(world.workers[0])
    assert world.safeguards.impaired == set()


def test_a_new_life_is_tried_at_once() -> None:
    world = World(2)
    bad, good = world.workers
    world.fail(bad, 3)
    assert world.admitted == [good]
    world.safeguards.reborn(bad)
    assert bad.breaker.circuit is Circuit.HALF_OPEN
    assert world.admitted == [bad, good]


def test_retries_are_a_share_of_the_requests() -> None:
    world = World(1, retries=RetriesConfig(budget_share=0.1, budget_per_second_min=0.0))
    budget = world.safeguards.budget
    world.turn()
    budget.requests += 50
    assert sum(budget.spend(world.now) for _ in range(20)) == 5
    assert world.safeguards.document()["retries"] == {"spent": 5, "denied": 15, "left": 0.0}
