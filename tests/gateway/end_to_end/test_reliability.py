"""Workers that live and fail: circuits, ejection, budgets, deadlines, hedges, over real sockets."""

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.gateway.end_to_end.faulty import FaultyWorker, completion
from tests.gateway.end_to_end.processes import Gateway, eventually, worker_of

pytestmark = pytest.mark.stacks

PATH = "/v1/completions"
CONFIG: dict[str, Any] = {
    "policy": "round-robin",
    "breakers": {"failures_in_a_row": 3, "requests_min": 1000, "open_seconds_min": 0.3, "open_seconds_max": 0.6},
    "ejection": {"requests_min": 1000},
}


class Fleet:
    def __init__(self, gateway: Gateway, workers: list[FaultyWorker]) -> None:
        self.gateway = gateway
        self.workers = workers

    def ask(self, **headers: str) -> Any:
        return self.gateway.post(completion(), {name.replace("_", "-"): v for name, v in headers.items()}, PATH)

    def statuses(self, count: int) -> set[int]:
        return {self.ask().status_code for _ in range(count)}

    def ask_until(self, condition: Callable[[], Any], what: str) -> Any:
        def asked() -> Any:
            self.ask()
            return condition()

        return eventually(asked, what)

    def worker(self, number: int) -> dict[str, Any]:
        return self.gateway.worker(self.workers[number].name)

    def circuit(self, number: int) -> Any:
        return self.worker(number)["circuit"]

    def failures(self, name: str) -> int:
        return int(self.gateway.status()["reliability"]["failures"].get(name, 0))

    def metric(self, line: str) -> float:
        lines = [found for found in self.gateway.operator.get("/metrics").text.splitlines() if found.startswith(line)]
        return sum(float(found.rsplit(" ", 1)[1]) for found in lines)

    def heal(self) -> None:
        for worker in self.workers:
            worker.mode, worker.every = "ok", 1
        closed = lambda: {w["circuit"] for w in self.gateway.status()["workers"] if w["healthy"]} == {"closed"}  # noqa: E731
        self.ask_until(closed, "all circuits closed")
        eventually(lambda: self.gateway.healthy() == len(self.workers), "all workers healthy")


def start(directory: Path, count: int, stack: ExitStack, **config: Any) -> Fleet:
    workers = [stack.enter_context(FaultyWorker()) for _ in range(count)]
    gateway = Gateway(directory, [worker.url for worker in workers], {**CONFIG, **config})
    stack.callback(gateway.stop)
    return Fleet(gateway, workers)


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    with ExitStack() as stack:
        yield start(tmp_path_factory.mktemp("reliability"), 3, stack)


@pytest.fixture
def fleet(started: Fleet) -> Iterator[Fleet]:
    yield started
    started.heal()
    started.gateway.wait_idle()


def trials_max(began: float) -> float:
    """Of a circuit since then: the shortest pause lasts 0.3 s, less a fifth."""
    return 1 + (time.monotonic() - began) / 0.24


# Circuits


def test_a_worker_that_fails_is_left_alone_and_comes_back(fleet: Fleet) -> None:
    bad = fleet.workers[0]
    bad.mode = 500
    fleet.ask_until(lambda: fleet.circuit(0) != "closed", "the circuit opens")
    assert fleet.metric(f'ropeway_worker_circuit_opened_total{{worker="{bad.name}"}}') >= 1
    asked, began = bad.asked, time.monotonic()
    answers = [fleet.ask() for _ in range(60)]
    # But for trials, one a pause.
    assert [answer.status_code for answer in answers].count(500) == bad.asked - asked <= trials_max(began)
    assert fleet.worker(0)["healthy"]
    bad.mode = "ok"
    fleet.ask_until(lambda: fleet.circuit(0) == "closed", "a trial succeeds")
    assert bad.name in {worker_of(fleet.ask()) for _ in range(6)}


@pytest.mark.parametrize("status", [400, 404, 422, 429, 501])
def test_what_blames_the_client_opens_nothing(fleet: Fleet, status: int) -> None:
    for worker in fleet.workers:
        worker.mode = status
    assert fleet.statuses(30) == {status}
    assert [fleet.circuit(number) for number in range(3)] == ["closed"] * 3
    fleet.heal()
    assert fleet.statuses(6) == {200}


def test_where_all_fail_they_are_asked_all_the_same(fleet: Fleet) -> None:
    for worker in fleet.workers:
        worker.mode = 500
    eventually(lambda: fleet.statuses(5) and fleet.gateway.status()["reliability"]["panics"], "nobody else is left")
    answers = [fleet.ask() for _ in range(20)]
    assert {answer.status_code for answer in answers} == {500}
    assert len({worker_of(answer) for answer in answers}) == 3


# Further attempts


@pytest.mark.parametrize(
    ("mode", "failure"), [(503, "worker_unavailable"), (429, "worker_busy"), ("reset", "connection_")]
)
def test_what_one_cannot_do_another_does(fleet: Fleet, mode: str | int, failure: str) -> None:
    fleet.workers[1].mode = mode
    retries = fleet.metric(f'ropeway_retries_total{{reason="{failure}')
    assert fleet.statuses(12) == {200}
    assert fleet.metric(f'ropeway_retries_total{{reason="{failure}') > retries


def test_a_flapping_worker_costs_no_request_and_is_left_alone(fleet: Fleet) -> None:
    """Every probe succeeds and takes it in again, and its next request shows that it does nothing."""
    flapping = fleet.workers[2]
    flapping.mode = "reset"
    statuses: set[int] = set()

    def opened() -> bool:
        statuses.update(fleet.statuses(3))
        return bool(fleet.worker(2)["circuit"] != "closed")

    eventually(opened, "the circuit opens, though it was healthy in between")
    asked, began = flapping.asked, time.monotonic()
    assert statuses | fleet.statuses(30) == {200}
    assert flapping.asked - asked <= trials_max(began)
    eventually(lambda: fleet.worker(2)["healthy"], "its probes succeed")


def test_under_whom_two_workers_have_died_no_third_is_asked(fleet: Fleet) -> None:
    for worker in fleet.workers:
        worker.mode = "reset"
    asked = sum(worker.asked for worker in fleet.workers)
    answer = fleet.ask()
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "upstream_unavailable")
    # On a new connection each, and perhaps on one that was kept open before.
    assert fleet.failures("connection_lost") >= 2
    assert sum(worker.asked for worker in fleet.workers) - asked <= 4


def test_without_a_budget_nothing_is_tried_elsewhere(tmp_path: Path) -> None:
    with ExitStack() as stack:
        fleet = start(tmp_path, 2, stack, retries={"budget_share": 0.0, "budget_per_second_min": 0.2})
        fleet.workers[0].mode = 429
        answers = [fleet.ask().status_code for _ in range(20)]
        assert set(answers) == {200, 429}
        refused = fleet.workers[0].asked - 2  # in the first ten seconds
        assert answers.count(429) == refused == fleet.metric("ropeway_retry_budget_denied_total")
        assert fleet.metric("ropeway_retry_budget_left") == 0
        fleet.gateway.wait_idle()


# Ejection


def test_a_worker_that_fails_more_than_the_others_is_ejected(tmp_path: Path) -> None:
    with ExitStack() as stack:
        fleet = start(tmp_path, 3, stack, ejection={"requests_min": 6, "seconds": 1.0})
        bad = fleet.workers[0]
        bad.mode, bad.every = 500, 3  # never so many in a row that its circuit would open
        reason = fleet.ask_until(lambda: fleet.worker(0)["ejected"], "it is ejected")
        assert reason.startswith("fails ")
        assert reason.endswith("% of its requests, the others 0%")
        assert fleet.circuit(0) == "closed"
        asked = bad.asked
        assert fleet.statuses(12) == {200}
        assert bad.asked == asked
        assert fleet.metric(f'ropeway_worker_ejected{{worker="{bad.name}"}}') == 1
        bad.every, bad.mode = 1, "ok"
        fleet.ask_until(lambda: bad.asked > asked, "it is back")
        assert fleet.metric("ropeway_ejections_total") == 1


# A request's own time


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_has_the_time_it_asks_for(fleet: Fleet, stream: bool) -> None:
    for worker in fleet.workers:
        worker.mode = "hang"
    left = sum(worker.left for worker in fleet.workers)
    headers = {"x-ropeway-timeout-ms": "150"}
    answer = fleet.gateway.post(completion(stream=stream), headers, PATH)
    assert (answer.status_code, answer.json()["error"]["code"]) == (504, "deadline_exceeded")
    eventually(lambda: sum(worker.left for worker in fleet.workers) == left + 1, "the worker is told")
    # Whose time is short is the client's affair, not the worker's fault.
    assert {fleet.circuit(number) for number in range(3)} == {"closed"}
    assert fleet.failures("deadline_exceeded") >= 1


@pytest.mark.parametrize("stated", ["0", "-1", "soon", "1.5", "99999999"])
def test_a_time_that_is_none_is_refused(fleet: Fleet, stated: str) -> None:
    answer = fleet.ask(x_ropeway_timeout_ms=stated)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "x-ropeway-timeout-ms")


def test_time_runs_while_a_request_waits_for_its_turn(tmp_path: Path) -> None:
    with ExitStack() as stack:
        fleet = start(tmp_path, 1, stack, admission={"backlog_ms_max": 0.001})
        (worker,) = fleet.workers
        worker.mode = "hang"
        threads = stack.enter_context(ThreadPoolExecutor(2))
        headers = {"x-ropeway-timeout-ms": "3000"}
        before = [threads.submit(fleet.gateway.post, completion(stream=True), headers, PATH) for _ in range(2)]
        eventually(lambda: worker.live == 2, "it has more to do than it would be sent")
        answer = fleet.gateway.post(completion(stream=True), {"x-ropeway-timeout-ms": "200"}, PATH)
        assert (answer.status_code, answer.json()["error"]["code"]) == (504, "deadline_exceeded")
        assert answer.elapsed.total_seconds() < 2
        assert worker.asked == 2
        assert [future.result().status_code for future in before] == [504] * 2
        fleet.gateway.wait_idle()
        assert fleet.failures("deadline_exceeded") == 3


# Hedging


@pytest.fixture(scope="module")
def hedged(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    with ExitStack() as stack:
        yield start(
            tmp_path_factory.mktemp("hedged"),
            2,
            stack,
            hedging={"enabled": True, "after_ms": 60, "budget_share": 0.0, "budget_per_second_min": 0.4},
            timeouts={"total_seconds": 1.0},
        )


def test_a_slow_request_is_put_to_a_second_worker_under_a_budget(hedged: Fleet) -> None:
    slow, other = hedged.workers
    slow.mode = "hang"
    answers = [hedged.ask() for _ in range(12)]
    second = [answer for answer in answers if "x-ropeway-hedge" in answer.headers]
    assert {(answer.status_code, worker_of(answer)) for answer in second} == {(200, other.name)}
    assert {answer.headers["x-ropeway-hedge"] for answer in second} == {slow.name}
    # Four in ten seconds: those that were slow after that had the time of the configuration.
    assert len(second) == 4
    assert [answer.status_code for answer in answers].count(504) == slow.asked - 4 > 0
    assert (slow.live_max, other.live_max) == (1, 1)
    eventually(lambda: slow.left == slow.asked, "the worker is told each time")
    hedged.gateway.wait_idle()
    document = hedged.gateway.status()
    assert document["reliability"]["hedging"]["outcomes"] == {"won": 4, "denied": slow.asked - 4}
    assert hedged.metric('ropeway_hedges_total{outcome="won"}') == 4
    assert hedged.metric('ropeway_requests_total{ending="overtaken"') == 4
    assert [worker["waiting"] for worker in document["workers"]] == [0, 0]


def test_a_header_cannot_ask_for_more_time_than_is_configured(hedged: Fleet) -> None:
    hedged.workers[0].mode = hedged.workers[1].mode = "hang"
    answer = hedged.ask(x_ropeway_timeout_ms="20000")
    assert (answer.status_code, answer.elapsed.total_seconds() < 5) == (504, True)
    hedged.gateway.wait_idle()
