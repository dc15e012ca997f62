"""KV moves: a gateway, two workers that can pull from each other, and prompts that are warm at the busy one."""

import base64
import json
import socket
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.cachecore.store.servers import start_server
from tests.gateway.end_to_end.processes import (
    BLOCK_TOKENS,
    HOST,
    Fleet,
    Gateway,
    cached_tokens,
    candidate,
    chat,
    eventually,
    full_hit,
    matched_tokens,
    new_keyring,
    worker_of,
)
from tests.gateway.end_to_end.sharing import SharingStack

WORKERS = ("--profile", "llama-3-70b-tp8", "--kv-link", "400")
CONFIG = {"policy_header_allowed": True}


class Stack:
    """The texts of its prompts are never the same twice."""

    def __init__(self, fleet: Fleet, gateways: Sequence[Gateway], keyring: str) -> None:
        self.keyring = keyring
        self.fleet = fleet
        self.gateways = gateways
        self.gateway = gateways[0]
        self._texts = 0

    def prompt(self, times: int = 120, **fields: Any) -> dict[str, Any]:
        self._texts += 1
        return chat(
            f"{self._texts} {id(self)} " + "the cabin leaves the valley and rises to the ridge " * times, **fields
        )

    def warm(self, body: dict[str, Any]) -> str:
        """Have it computed, and every gateway know that. Where it is warm."""
        worker = worker_of(self.gateway.post(body))
        for gateway in self.gateways:
            gateway.wait_confirmed(body, worker, full_hit(body))
            gateway.wait_idle()
        return worker

    def other(self, worker: str) -> str:
        (other,) = [name for name in self.fleet.names if name != worker]
        return other

    @contextmanager
    def busy(self, worker: str, by: Gateway | None = None) -> Iterator[None]:
        """Long prompts wait at the worker, sent by one gateway: it was told not to answer them."""
        with ExitStack() as connections:
            for _ in range(2):
                connections.enter_context(self._hung_request(by or self.gateway, worker))
            for gateway in self.gateways:
                eventually(lambda gateway=gateway: gateway.worker(worker)["waiting"] >= 2, f"{worker} is busy")
            yield
        for gateway in self.gateways:
            gateway.wait_idle()

    def _hung_request(self, gateway: Gateway, worker: str) -> socket.socket:
        body = self.prompt(times=1200)
        sessions = ({"x-ropeway-policy": "session", "x-ropeway-session": str(number)} for number in range(100))
        session = next(one for one in sessions if gateway.explain(body, one)["worker"] == worker)
        headers = {**session, "x-simulate": '{"hang": true}', "host": "gateway"}
        content = json.dumps(body).encode()
        head = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        connection = socket.create_connection((HOST, int(gateway.url.rpartition(":")[2])))
        request = f"POST /v1/chat/completions HTTP/1.1\r\n{head}content-length: {len(content)}\r\n\r\n"
        connection.sendall(request.encode() + content)
        return connection


def metric(gateway: Gateway, name: str) -> float:
    text = gateway.http.get("/metrics").text
    return sum(float(line.rpartition(" ")[2]) for line in text.splitlines() if line.startswith(name))


def report_of(answer: Any) -> dict[str, str]:
    return dict(part.strip().split("=") for part in answer.headers["x-ropeway-transfer"].split(";"))


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    directory = tmp_path_factory.mktemp("transfer")
    keyring = str(new_keyring(directory))
    with (
        Fleet(directory, *WORKERS, "--keyring", keyring) as fleet,
        Gateway(directory, fleet.urls, {**CONFIG, "keyring": keyring}) as gateway,
    ):
        yield Stack(fleet, [gateway], keyring)


def test_what_is_warm_at_a_busy_worker_is_pulled_by_the_other(stack: Stack) -> None:
    gateway, body = stack.gateway, stack.prompt()
    warm = stack.warm(body)
    idle = stack.other(warm)
    with stack.busy(warm):
        told = gateway.explain(body)
        answer = gateway.post(body)
    assert told["worker"] == worker_of(answer) == idle
    assert told["pull"]["source"] == warm
    assert told["pull"]["tokens"] == full_hit(body)
    assert f"; pull {full_hit(body):,} tokens from {warm} as i8, " in told["reason"]
    assert matched_tokens(answer) == 0
    assert cached_tokens(answer) == full_hit(body)
    assert answer.headers["x-ropeway-fidelity"] == "quantized"
    report = report_of(answer)
    assert (report["outcome"], report["tokens"]) == ("fetched", str(full_hit(body)))
    receipt = gateway.status()["receipts"][0]
    assert receipt["pull"]["outcome"] == "fetched"
    assert receipt["pull"]["seen_ms"] == pytest.approx(float(report["seconds"]) * 1e3)
    assert metric(gateway, 'ropeway_transfer_plans_total{codec="i8",source="worker"}') == 1
    assert metric(gateway, 'ropeway_transfer_outcomes_total{outcome="fetched"') == 1
    assert metric(gateway, "ropeway_transfer_pulled_tokens_total") == full_hit(body)
    assert gateway.status()["estimates"]["links"][f"{warm}>{idle}"]["observations"] == 1


def test_the_clients_own_transfer_parameters_are_replaced(stack: Stack) -> None:
    body = stack.prompt(kv_transfer_params={"ropeway": ["mine"], "remote_host": "10.0.0.1"})
    warm = stack.warm(body)
    with stack.busy(warm):
        echoed = stack.gateway.post(body, {"x-simulate": '{"echo": true}'})
    sent = json.loads(base64.b64decode(echoed.json()["body_base64"]))
    (plan,) = sent["kv_transfer_params"]["ropeway"]
    assert plan["blocks"] * BLOCK_TOKENS == full_hit(body)
    assert "remote_host" not in sent["kv_transfer_params"]
    headers = dict(echoed.json()["headers"])
    assert headers["x-ropeway-fidelity"] == "quantized"


def test_a_request_that_accepts_exact_kv_only(stack: Stack) -> None:
    gateway, body = stack.gateway, stack.prompt()
    warm = stack.warm(body)
    with stack.busy(warm):
        quantized = gateway.post(body)
        exact = gateway.post(body, {"x-ropeway-fidelity": "exact"})
    assert report_of(quantized)["outcome"] == "fetched"
    # What the other worker has by now is not exact: it is told to pull the engine's own bytes.
    assert worker_of(exact) == worker_of(quantized)
    assert (report_of(exact)["outcome"], exact.headers["x-ropeway-fidelity"]) == ("fetched", "exact")
    assert int(report_of(exact)["bytes"]) > 1.9 * int(report_of(quantized)["bytes"])
    assert cached_tokens(exact) == full_hit(body)


def test_what_was_pulled_is_known_for_what_it_is(stack: Stack) -> None:
    gateway, body = stack.gateway, stack.prompt()
    warm = stack.warm(body)
    idle = stack.other(warm)
    with stack.busy(warm):
        assert worker_of(gateway.post(body)) == idle
        gateway.wait_confirmed(body, idle, full_hit(body))
        again = gateway.post(body)
        told = gateway.explain(body, {"x-ropeway-fidelity": "exact"})
    assert (worker_of(again), matched_tokens(again), cached_tokens(again)) == (idle, full_hit(body), full_hit(body))
    assert "x-ropeway-transfer" not in again.headers
    assert candidate(told, idle)["confirmed_tokens"] == 0


@pytest.mark.parametrize(
    ("fault", "outcome", "reason"),
    [("refuse", "refused", "busy"), ("hang", "failed", "deadline"), ("fail", "failed", "closed")],
)
def test_a_source_that_disappoints_costs_time_and_no_answer(
    stack: Stack, fault: str, outcome: str, reason: str
) -> None:
    gateway, body = stack.gateway, stack.prompt()
    warm = stack.warm(body)
    idle = stack.other(warm)
    label = f'ropeway_transfer_outcomes_total{{outcome="{outcome}",reason="{reason}"}}'
    before = metric(gateway, label)
    eventually(lambda: gateway.status()["transfers"]["paused"] == {}, "nobody is left alone", 30.0)
    with stack.busy(warm):
        stack.fleet.simulate(warm, {"transfer": fault, "transfer_pulls": 1})
        answer = gateway.post(body)
        paused = gateway.status()["transfers"]["paused"]
    stack.fleet.simulate(warm, {})
    assert worker_of(answer) == idle
    assert (report_of(answer)["outcome"], report_of(answer)["reason"]) == (outcome, reason)
    assert cached_tokens(answer) <= BLOCK_TOKENS  # what all chats begin with
    assert answer.headers["x-ropeway-fidelity"] == "exact"
    assert metric(gateway, label) == before + 1
    assert gateway.status()["receipts"][0]["pull"]["reason"] == reason
    assert list(paused) in ([f"{warm}>{idle}"], []) if fault == "refuse" else list(paused) == [f"{warm}>{idle}"]
    # And the text is that of any other way to it.
    assert answer.json()["choices"] == gateway.post(body).json()["choices"]


def test_an_unknown_fidelity_is_a_mistake(stack: Stack) -> None:
    answer = stack.gateway.post(stack.prompt(), {"x-ropeway-fidelity": "perfect"})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "x-ropeway-fidelity"


def test_nobody_is_told_to_pull_where_it_is_switched_off(stack: Stack, tmp_path: Path) -> None:
    with Gateway(
        tmp_path,
        stack.fleet.urls,
        {**CONFIG, "keyring": stack.keyring, "transfer": {"enabled": False}},
        name="gateway-off",
    ) as gateway:
        off = Stack(stack.fleet, [gateway], stack.keyring)
        body = off.prompt()
        warm = off.warm(body)
        with off.busy(warm):
            answer = gateway.post(body)
        assert worker_of(answer) == off.other(warm)
        assert cached_tokens(answer) <= BLOCK_TOKENS  # what all chats begin with
        assert "x-ropeway-transfer" not in answer.headers
        assert gateway.status()["receipts"][0]["pull"] is None
        assert gateway.status()["transfers"] is None


def test_every_gateway_of_several_plans_alike(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROPEWAY_POLICY_HEADER_ALLOWED", "true")
    keyring = new_keyring(tmp_path)
    with (
        start_server(tmp_path / "valkey", persist=False) as server,
        Fleet(tmp_path, *WORKERS, "--keyring", str(keyring)) as fleet,
        SharingStack(tmp_path, server, keyring, [fleet]) as shared,
    ):
        shared.wait_settled()
        stack = Stack(fleet, shared.gateways, str(keyring))
        for gateway in shared.gateways:
            body = stack.prompt()
            warm = stack.warm(body)
            with stack.busy(warm, by=shared.gateways[0]):
                answer = gateway.post(body)
            assert worker_of(answer) == stack.other(warm)
            assert report_of(answer)["outcome"] == "fetched"
            assert cached_tokens(answer) == full_hit(body)
            for other in shared.gateways:
                other.wait_confirmed(body, stack.other(warm), full_hit(body))
