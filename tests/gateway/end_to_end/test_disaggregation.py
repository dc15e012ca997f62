"""A prefill worker and a decode worker: whose leg a request takes, and what is left of it when one of them fails."""

import base64
import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.gateway.end_to_end.processes import (
    BLOCK_TOKENS,
    HOST,
    Fleet,
    Gateway,
    cached_tokens,
    chat,
    eventually,
    full_hit,
    matched_tokens,
    new_keyring,
    worker_of,
)

FLAGS = ("--profile", "llama-3-70b-tp8", "--kv-link", "400")
DEADLINE_SECONDS = 2.0
CONFIG = {
    "policy_header_allowed": True,
    "disaggregation": {"deadline_seconds_min": DEADLINE_SECONDS, "deadline_seconds_max": DEADLINE_SECONDS},
    # A request is the first to find a worker dead.
    "probes": {"interval_seconds": 1.0},
}


class Pair:
    """Two workers, each a process of its own. The texts of its prompts are never the same twice."""

    def __init__(self, directory: Path) -> None:
        keyring, self.directory = str(new_keyring(directory)), directory
        self.flags = (*FLAGS, "--keyring", keyring)
        self.prefill, self.decode = (Fleet(directory, *self.flags, count=1) for _ in range(2))
        workers = [
            {"url": self.prefill.urls[0], "name": "prefill", "role": "prefill"},
            {"url": self.decode.urls[0], "name": "decode", "role": "decode"},
        ]
        self.gateway = Gateway(directory, workers, {**CONFIG, "keyring": keyring})
        self._texts = 0

    def prompt(self, times: int = 120, **fields: Any) -> dict[str, Any]:
        self._texts += 1
        return chat(
            f"{self._texts} {id(self)} " + "the cabin leaves the valley and rises to the ridge " * times, **fields
        )

    def fail(self, **faults: Any) -> None:
        """Of the prefill worker."""
        self.prefill.simulate(self.prefill.names[0], faults)

    def rested(self) -> None:
        """Until nobody is left alone for what it did."""
        eventually(lambda: self.gateway.status()["disaggregation"]["paused"] == {}, "nobody is left alone", 30.0)

    def register(self, name: str, fleet: Fleet, role: str) -> None:
        worker = {"url": fleet.urls[0], "name": name, "role": role}
        self.gateway.operator.post("/admin/workers", json=worker).raise_for_status()
        eventually(lambda: self.gateway.worker(name)["healthy"], f"{name} is well")

    def restart_prefill(self) -> None:
        name = f"{self.prefill.name}-again"
        self.prefill = Fleet(self.directory, *self.flags, ports=self.prefill.ports, name=name)
        eventually(lambda: self.gateway.healthy() == 2, "it is back")

    def kill_prefill_under_way(self) -> None:
        eventually(lambda: self.asked("prefill"), "it is computing")
        self.prefill.kill()

    def asked(self, role: str) -> list[dict[str, Any]]:
        fleet = self.prefill if role == "prefill" else self.decode
        return fleet.requests(fleet.names[0])

    def legs(self) -> dict[str, Any]:
        """Of the last request."""
        return self.gateway.status()["receipts"][0]["legs"]  # type: ignore[no-any-return]

    def counted(self) -> dict[str, int]:
        """Requests by outcome."""
        counts: dict[str, int] = {}
        for line in self.gateway.http.get("/metrics").text.splitlines():
            if line.startswith("ropeway_disaggregated_total{"):
                label, _, value = line.partition(" ")
                counts[label.split('"')[1]] = int(float(value))
        return counts

    @contextmanager
    def outcome(self, expected: str) -> Iterator[None]:
        before = self.counted()
        yield
        after = self.counted()
        changes = {outcome: count - before.get(outcome, 0) for outcome, count in after.items()}
        assert {outcome: change for outcome, change in changes.items() if change} == {expected: 1}

    def stop(self) -> None:
        for process in (self.gateway, self.prefill, self.decode):
            process.stop()


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    pair = Pair(tmp_path_factory.mktemp("disaggregation"))
    yield pair
    pair.stop()


@pytest.fixture
def pair(shared: Pair) -> Iterator[Pair]:
    """Without faults, and idle, before and afterwards."""
    yield shared
    shared.fail()
    shared.gateway.wait_idle()
    eventually(lambda: shared.gateway.healthy() == 2, "both are well")


def report_of(answer: Any) -> dict[str, str]:
    return dict(part.strip().split("=") for part in answer.headers["x-ropeway-transfer"].split(";"))


def test_the_prompt_is_computed_by_the_one_and_answered_by_the_other(pair: Pair) -> None:
    body = pair.prompt()
    told = pair.gateway.explain(body)
    with pair.outcome("two_legs"):
        answer = pair.gateway.post(body)
    assert (answer.status_code, worker_of(answer)) == (200, "decode")
    assert (matched_tokens(answer), cached_tokens(answer)) == (0, full_hit(body))
    assert (report_of(answer)["outcome"], report_of(answer)["tokens"]) == ("fetched", str(full_hit(body)))
    assert answer.json()["usage"]["completion_tokens"] == body["max_tokens"]
    assert answer.headers["x-ropeway-legs"].startswith("outcome=two_legs; worker=prefill; seconds=0.")
    assert told["legs"]["outcome"] == "two_legs"
    assert told["legs"]["divided_cost_ms"] < told["legs"]["whole_cost_ms"]
    assert "; two legs: prefill computes the prompt first, " in told["reason"]
    receipt = pair.gateway.status()["receipts"][0]
    assert receipt["legs"]["prefill_worker"] == receipt["pull"]["source"] == "prefill"
    assert 0 < receipt["legs"]["seen_ms"] < DEADLINE_SECONDS * 1e3
    assert receipt["pull"]["tokens"] == full_hit(body)
    assert "; two legs: prefill computed the prompt in " in receipt["reason"]
    # Each worker was asked once, and under ids that tell the legs apart.
    first, second = pair.asked("prefill")[-1], pair.asked("decode")[-1]
    assert first["request_id"] == f"{second['request_id']}-prefill"
    assert (first["status"], second["status"]) == (200, 200)


def test_what_the_decode_worker_has_is_not_computed_elsewhere(pair: Pair) -> None:
    body = pair.prompt()
    pair.gateway.post(body)
    pair.gateway.wait_confirmed(body, "decode", full_hit(body))
    asked = len(pair.asked("prefill"))
    longer = {**body, "messages": [*body["messages"], {"role": "user", "content": "And then?"}]}
    for warm in (body, longer):
        with pair.outcome("bypass"):
            answer = pair.gateway.post(warm)
        assert worker_of(answer) == "decode"
        assert cached_tokens(answer) == matched_tokens(answer) >= full_hit(body) - BLOCK_TOKENS
        assert answer.headers["x-ropeway-legs"] == "outcome=bypass"
        assert "; one leg: computing here costs " in pair.gateway.status()["receipts"][0]["reason"]
    assert len(pair.asked("prefill")) == asked


def test_a_stream_begins_when_the_second_leg_does(pair: Pair) -> None:
    # Long enough to be tokenized off the loop.
    body = pair.prompt(times=400, stream=True, stream_options={"include_usage": True}, max_completion_tokens=5, n=1)
    del body["max_tokens"]
    with pair.outcome("two_legs"):
        answer = pair.gateway.post(body)
    events = [line[6:] for line in answer.text.splitlines() if line.startswith("data: ")]
    assert events[-1] == "[DONE]"
    usage = json.loads(events[-2])["usage"]
    assert (usage["completion_tokens"], usage["prompt_tokens_details"]["cached_tokens"]) == (5, full_hit(body))
    receipt = pair.gateway.status()["receipts"][0]
    legs = receipt["legs"]
    assert receipt["seen_ttft_ms"] >= legs["seen_ms"] + legs["decode_ms"] > legs["seen_ms"]


def test_both_legs_say_the_same_of_the_prompt(pair: Pair) -> None:
    """The second leg's body is the client's own, with a plan; the workers' names for the prompt agree, or nothing would
    have been pulled."""
    body = pair.prompt(tools=[{"type": "function", "function": {"name": "lift"}}], cache_salt="mine", seed=7)
    with pair.outcome("two_legs"):
        answer = pair.gateway.post(body)
    assert report_of(answer)["outcome"] == "fetched"
    with pair.outcome("two_legs"):
        echoed = pair.gateway.post(pair.prompt(seed=7), {"x-simulate": '{"echo": true}'}).json()
    sent = json.loads(base64.b64decode(echoed["body_base64"]))
    (plan,) = sent["kv_transfer_params"]["ropeway"]
    assert plan["source"].startswith("w/")
    assert (sent["seed"], sent["max_tokens"]) == (7, 4)


def test_roles_are_shown(pair: Pair) -> None:
    assert {worker["name"]: worker["role"] for worker in pair.gateway.status()["workers"]} == {
        "prefill": "prefill",
        "decode": "decode",
    }
    metrics = pair.gateway.http.get("/metrics").text
    assert 'ropeway_worker_role{role="prefill",worker="prefill"} 1.0' in metrics


@pytest.mark.parametrize(
    ("faults", "outcome", "problem"),
    [
        ({"status": 500}, "fallback_refused", "answered 500"),
        ({"hang": True}, "fallback_deadline", "did not answer in time"),
        ({"cut_stream_bytes": 10}, "fallback_unreachable", "broke off: "),
    ],
)
def test_a_first_leg_that_fails_costs_time_and_no_answer(
    pair: Pair, faults: dict[str, Any], outcome: str, problem: str
) -> None:
    body = pair.prompt()
    pair.rested()
    pair.fail(**faults, requests=1, paths=["/v1/chat"])
    with pair.outcome(outcome):
        answer = pair.gateway.post(body)
    assert (answer.status_code, worker_of(answer)) == (200, "decode")
    assert "x-ropeway-transfer" not in answer.headers
    legs = pair.gateway.status()["receipts"][0]["legs"]
    assert legs["problem"].startswith(problem)
    assert pair.gateway.status()["receipts"][0]["pull"] is None
    pair.gateway.wait_idle()
    again = pair.gateway.post(body)
    assert again.json()["choices"] == answer.json()["choices"]


def test_a_client_that_leaves_ends_the_first_leg(pair: Pair) -> None:
    pair.rested()
    pair.fail(hang=True, requests=1, paths=["/v1/chat"])
    asked = len(pair.asked("decode"))
    content = json.dumps(pair.prompt()).encode()
    with pair.outcome("client_gone"):
        with socket.create_connection((HOST, int(pair.gateway.url.rpartition(":")[2]))) as connection:
            head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: gateway\r\ncontent-length: {len(content)}\r\n\r\n"
            connection.sendall(head.encode() + content)
            eventually(lambda: pair.gateway.worker("prefill")["inflight"] == 1, "the first leg is under way")
        pair.gateway.wait_idle()
    eventually(lambda: pair.asked("prefill")[-1]["disconnected_at"], "the prefill worker is told")
    assert len(pair.asked("decode")) == asked
    assert pair.gateway.status()["receipts"][0]["legs"]["outcome"] == "client_gone"


def test_a_decode_worker_that_dies_leaves_the_kv_to_the_next(pair: Pair) -> None:
    gateway, body = pair.gateway, pair.prompt()
    with Fleet(pair.directory, *pair.flags, count=1) as spare:
        pair.register("spare", spare, "decode")
        sessions = ({"x-ropeway-policy": "session", "x-ropeway-session": str(number)} for number in range(100))
        session = next(one for one in sessions if gateway.explain(body, one)["worker"] == "spare")
        spare.kill()
        with pair.outcome("two_legs"):
            answer = gateway.post(body, session)
    assert (answer.status_code, worker_of(answer)) == (200, "decode")
    assert (report_of(answer)["outcome"], cached_tokens(answer)) == ("fetched", full_hit(body))
    gateway.wait_idle()
    gateway.operator.delete("/admin/workers/spare").raise_for_status()


def test_without_a_decode_worker_there_is_no_worker(pair: Pair) -> None:
    gateway = pair.gateway
    gateway.operator.delete("/admin/workers/decode").raise_for_status()
    try:
        assert gateway.http.get("/readyz").status_code == 503
        answer = gateway.post(pair.prompt())
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "no_worker")
    finally:
        pair.register("decode", pair.decode, "decode")
    assert gateway.post(pair.prompt()).status_code == 200


def test_a_prefill_worker_that_dies_is_done_without(pair: Pair) -> None:
    """It is killed while nobody looks, comes back, and is killed over a prompt."""
    pair.prefill.kill()
    with pair.outcome("fallback_unreachable"):
        answer = pair.gateway.post(pair.prompt())
    assert (answer.status_code, worker_of(answer)) == (200, "decode")
    assert pair.legs()["problem"] == "could not be reached: the connection was refused"
    assert not pair.gateway.worker("prefill")["healthy"]
    with pair.outcome("fallback_no_source"):
        assert pair.gateway.post(pair.prompt()).status_code == 200

    pair.restart_prefill()
    pair.fail(hang=True, paths=["/v1/chat"])
    with pair.outcome("fallback_unreachable"):
        killer = threading.Thread(target=pair.kill_prefill_under_way)
        killer.start()
        answer = pair.gateway.post(pair.prompt())
        killer.join()
    assert (answer.status_code, worker_of(answer)) == (200, "decode")
    pair.gateway.wait_idle()
    pair.restart_prefill()
