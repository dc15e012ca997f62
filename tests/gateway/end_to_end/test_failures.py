"""Workers that are not there, die, come back, or break off: what a client sees of it."""

import asyncio
import json
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai import APIConnectionError, APIError, OpenAI

from tests.gateway.end_to_end.conftest import Stack
from tests.gateway.end_to_end.processes import (
    HOST,
    MODEL,
    Fleet,
    Gateway,
    candidate,
    chat,
    eventually,
    free_ports,
    full_hit,
    matched_tokens,
    worker_of,
)


@pytest.fixture(scope="module")
def lonely(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    """A gateway without workers."""
    with Gateway(tmp_path_factory.mktemp("lonely")) as gateway:
        yield gateway


def assert_no_worker(answer: httpx.Response) -> None:
    assert answer.status_code == 503, answer.text
    assert int(answer.headers["retry-after"]) >= 1
    assert answer.headers["x-request-id"]
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert (error["type"], error["code"]) == ("service_unavailable_error", "no_worker")


def test_without_a_worker_the_answer_is_503_and_when_to_try_again(lonely: Gateway) -> None:
    assert_no_worker(lonely.post(chat("hi")))
    assert_no_worker(lonely.post({"model": MODEL, "prompt": "hi"}, path="/v1/completions"))
    assert_no_worker(lonely.post(chat("hi"), path="/route/explain"))
    assert lonely.http.get("/v1/models").json() == {"object": "list", "data": []}


def test_alive_is_not_ready(lonely: Gateway) -> None:
    assert lonely.http.get("/healthz").json() == {"status": "ok"}
    ready = lonely.http.get("/readyz")
    assert (ready.status_code, ready.json()) == (503, {"ready": False})
    assert int(ready.headers["retry-after"]) >= 1


def test_a_registered_worker_that_nobody_runs_is_no_worker(lonely: Gateway) -> None:
    (port,) = free_ports(1)
    lonely.operator.post("/admin/workers", json={"url": f"http://{HOST}:{port}"}).raise_for_status()
    try:
        assert_no_worker(lonely.post(chat("hi")))
        eventually(lambda: lonely.worker(f"{HOST}:{port}")["reason"] != "not probed yet", "it is probed")
        worker = lonely.worker(f"{HOST}:{port}")
        assert (worker["healthy"], worker["reason"]) == (False, "/health: ConnectError")
        assert lonely.http.get("/readyz").status_code == 503
    finally:
        lonely.operator.delete(f"/admin/workers/{HOST}:{port}").raise_for_status()


class Pair:
    """Two workers, each a process, and a gateway that probes seldom: a request is the first to find one dead."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.flags = ("--speed", "50")
        self.fleets = {fleet.names[0]: fleet for fleet in (Fleet(directory, *self.flags, count=1) for _ in range(2))}
        urls = [fleet.urls[0] for fleet in self.fleets.values()]
        self.gateway = Gateway(directory, urls, {"probes": {"interval_seconds": 1.0}})

    def other(self, worker: str) -> str:
        (other,) = set(self.fleets) - {worker}
        return other

    def restart(self, worker: str) -> None:
        fleet = self.fleets[worker]
        self.fleets[worker] = Fleet(self.directory, *self.flags, ports=fleet.ports, name=f"{fleet.name}-again")

    def stop(self) -> None:
        self.gateway.stop()
        for fleet in self.fleets.values():
            fleet.stop()


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Pair]:
    pair = Pair(tmp_path)
    yield pair
    pair.stop()


def test_a_dead_workers_requests_go_elsewhere_and_its_next_life_starts_empty(pair: Pair) -> None:
    gateway = pair.gateway
    body = chat("A prompt of some length, so that it fills a few blocks. " * 4)
    victim = worker_of(gateway.post(body))
    gateway.wait_confirmed(body, victim, full_hit(body))
    epoch = gateway.worker(victim)["epoch"]

    pair.fleets[victim].kill()
    answers = [gateway.post(body) for _ in range(10)]
    assert [answer.status_code for answer in answers] == [200] * 10
    assert {worker_of(answer) for answer in answers} == {pair.other(victim)}
    # What was said of the dead one is not said of the one that answered.
    assert matched_tokens(answers[0]) == 0
    assert not gateway.worker(victim)["healthy"]
    gateway.wait_idle()

    pair.restart(victim)
    eventually(lambda: gateway.worker(victim)["healthy"], "the worker is back")
    reborn = gateway.worker(victim)
    assert reborn["epoch"] > epoch
    assert reborn["events_trusted"]
    assert reborn["parity"] == "proven"
    entry = candidate(gateway.explain(body), victim)
    assert (entry["confirmed_tokens"], entry["matched_tokens"]) == (0, 0)

    def serves_again() -> bool:
        return worker_of(gateway.post(chat(f"{time.monotonic()} something new"))) == victim

    eventually(serves_again, "the worker that came back gets requests")


def test_a_worker_that_restarts_between_two_probes_is_found_out(pair: Pair) -> None:
    """No request and no probe sees it away: only its epoch says so."""
    gateway = pair.gateway
    body = chat("Another prompt of some length, for a life that ends soon. " * 4)
    victim = worker_of(gateway.post(body))
    gateway.wait_confirmed(body, victim, full_hit(body))
    epoch = gateway.worker(victim)["epoch"]
    pair.fleets[victim].kill()
    pair.restart(victim)
    eventually(lambda: gateway.worker(victim)["epoch"] > epoch, "the new life is noticed")
    assert candidate(gateway.explain(body), victim)["confirmed_tokens"] == 0
    assert gateway.post(body).status_code == 200


@pytest.fixture(scope="module")
def slow(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Fleet, Gateway]]:
    """One worker at an engine's own speed: a stream of 300 tokens takes three seconds."""
    directory = tmp_path_factory.mktemp("slow")
    with Fleet(directory, count=1) as fleet, Gateway(directory, fleet.urls) as gateway:
        yield fleet, gateway


def read_stream(gateway: Gateway, faults: dict[str, Any], after: Callable[[int], object] = lambda number: None) -> None:
    """Read a stream to its end, saying after each event how many there were before it."""
    with OpenAI(base_url=f"{gateway.url}/v1", api_key="none", max_retries=0, timeout=20) as client:
        stream = client.chat.completions.create(
            **chat("Tell me a long story", max_tokens=300),
            stream=True,
            extra_headers={"x-simulate": json.dumps(faults)} if faults else {},
        )
        with stream:
            for number, _ in enumerate(stream):
                after(number)


def test_a_worker_that_dies_in_a_stream_ends_it_with_an_error(slow: tuple[Fleet, Gateway]) -> None:
    _, gateway = slow
    with pytest.raises(APIError, match="broke off before the end of its answer"):
        read_stream(gateway, {"die_after_chunks": 3})
    gateway.wait_idle()


def test_a_stream_cut_inside_an_event_ends_without_an_end(slow: tuple[Fleet, Gateway]) -> None:
    _, gateway = slow
    with pytest.raises((APIConnectionError, httpx.RemoteProtocolError)):
        read_stream(gateway, {"cut_stream_bytes": 700})
    gateway.wait_idle()


def test_an_answer_that_is_cut_is_not_a_short_answer(slow: tuple[Fleet, Gateway]) -> None:
    _, gateway = slow
    with pytest.raises(httpx.RemoteProtocolError):
        gateway.post(chat("hi"), {"x-simulate": '{"cut_stream_bytes": 20}'})
    gateway.wait_idle()


def test_an_engines_own_error_is_passed_on(slow: tuple[Fleet, Gateway]) -> None:
    fleet, gateway = slow
    answer = gateway.post(chat("hi"), {"x-simulate": '{"status": 429, "body": {"error": {"message": "busy"}}}'})
    assert (answer.status_code, answer.json()) == (429, {"error": {"message": "busy"}})
    assert worker_of(answer) == fleet.names[0]


def test_a_stream_whose_workers_process_is_killed_ends_with_an_error(tmp_path: Path) -> None:
    with Fleet(tmp_path, count=1) as fleet, Gateway(tmp_path, fleet.urls) as gateway:

        def kill(number: int) -> None:
            if number == 5:
                fleet.process.send_signal(signal.SIGKILL)

        with pytest.raises((APIError, httpx.RemoteProtocolError)):
            read_stream(gateway, {}, kill)
        gateway.wait_idle()
        # The dead worker was the only one: now there is none.
        eventually(lambda: gateway.post(chat("hi")).status_code == 503, "the gateway has noticed")


# Clients that leave


def last_request(fleet: Fleet) -> dict[str, Any]:
    return fleet.requests(fleet.names[0])[-1]


@pytest.mark.parametrize("stream", [True, False], ids=["streamed", "whole"])
def test_a_client_that_leaves_is_gone_at_the_worker_too(slow: tuple[Fleet, Gateway], stream: bool) -> None:
    fleet, gateway = slow
    worker = fleet.names[0]
    body = chat("A story that nobody will hear the end of", max_tokens=3000, stream=stream)
    with httpx.Client(base_url=gateway.url, timeout=30, trust_env=False) as client:
        if stream:
            with client.stream("POST", "/v1/chat/completions", json=body) as answer:
                lines = answer.iter_lines()  # left alone, it would close the connection at once
                assert next(lines).startswith("data: {")
                assert gateway.worker(worker)["inflight"] == 1
                left_at = time.time()
        else:
            with pytest.raises(httpx.ReadTimeout):
                client.post("/v1/chat/completions", json=body, timeout=0.5)
            left_at = time.time()
    disconnected_at = eventually(lambda: last_request(fleet)["disconnected_at"], "the worker sees the client leave")
    assert disconnected_at - left_at < 1.0
    assert last_request(fleet)["finished_at"] is None
    eventually(lambda: not fleet.sample(worker, "vllm:num_requests_running"), "the engine stops computing")
    gateway.wait_idle()
    assert gateway.worker(worker)["waiting"] == 0
    assert gateway.worker(worker)["inflight_tokens"] == 0


async def test_impatient_clients_have_one_request_each_at_the_worker(slow: tuple[Fleet, Gateway]) -> None:
    """Each gives up after a while and asks again; by the worker's own log no request outlives its client's patience."""
    fleet, gateway = slow
    clients, tries, patience_seconds = 8, 3, 0.4
    before = len(fleet.requests(fleet.names[0]))

    async def ask(http: httpx.AsyncClient, number: int) -> None:
        for attempt in range(tries):
            body = chat(f"{number} asks for the {attempt}th time", max_tokens=3000, stream=number % 2 == 0)
            with pytest.raises((httpx.ReadTimeout, TimeoutError)):
                async with asyncio.timeout(patience_seconds):
                    await http.post("/v1/chat/completions", json=body)

    async with httpx.AsyncClient(base_url=gateway.url, timeout=30, trust_env=False) as http:
        await asyncio.gather(*(ask(http, number) for number in range(clients)))
    log = fleet.requests(fleet.names[0])[before:]
    assert len(log) <= clients * tries
    eventually(lambda: not fleet.sample(fleet.names[0], "vllm:num_requests_running"), "the engine stops computing")
    gateway.wait_idle()
    for request in fleet.requests(fleet.names[0])[before:]:
        assert request["finished_at"] is None
        assert request["disconnected_at"] - request["arrived_at"] < patience_seconds + 1.0


def test_accounts_return_to_zero_after_a_burst(slow: tuple[Fleet, Gateway]) -> None:
    _, gateway = slow
    before = gateway.status()["requests"]["complete"]
    with httpx.Client(base_url=gateway.url, timeout=30, trust_env=False) as client:
        for number in range(5):
            assert client.post("/v1/chat/completions", json=chat(f"{number}")).status_code == 200
    gateway.wait_idle()
    assert gateway.status()["requests"]["complete"] == before + 5
    worker = gateway.status()["workers"][0]
    assert (worker["inflight_tokens"], worker["outstanding_prefill_ms"]) == (0, 0.0)


def test_of_what_a_worker_refused_nothing_is_expected(stack: Stack) -> None:
    _, gateway = stack
    text = "a prompt of some length that is asked for far too many tokens; " * 4
    assert gateway.post(chat(text, max_tokens=10**8)).status_code == 400
    told = gateway.explain(chat(text))
    assert [candidate["matched_tokens"] for candidate in told["candidates"]] == [0, 0]
