"""What an operator sees and changes while the gateway runs."""

import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.gateway.end_to_end.processes import (
    HOST,
    MODEL,
    Fleet,
    Gateway,
    cached_tokens,
    chat,
    eventually,
    free_ports,
    full_hit,
    matched_tokens,
    token_count,
    worker_of,
)

ADMIN_KEY = "an-operator-key-0123456789"


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    with Fleet(tmp_path_factory.mktemp("fleet"), "--speed", "50", "--adapter", "lora-a", count=3) as fleet:
        yield fleet


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory, fleet: Fleet) -> Iterator[Gateway]:
    """Two of the three workers; the third is for a test to add. Operators' routes need a key."""
    directory = tmp_path_factory.mktemp("operations")
    (directory / "admin-key").write_text(f"{ADMIN_KEY}\n")
    key_file = str(directory / "admin-key")
    config = {"admin": {"key_file": key_file}, "metrics": {"key_file": key_file}}
    with Gateway(directory, fleet.urls[:2], config, admin_key=ADMIN_KEY) as gateway:
        yield gateway


def test_workers_come_and_go_while_requests_flow(gateway: Gateway, fleet: Fleet) -> None:
    third = fleet.names[2]
    added = gateway.operator.post("/admin/workers", json={"url": fleet.urls[2]})
    assert (added.status_code, added.json()) == (201, {"name": third, "url": fleet.urls[2]})
    eventually(lambda: gateway.worker(third)["healthy"], "the new worker is probed")

    def serves() -> bool:
        return worker_of(gateway.post(chat(f"{time.monotonic()} new"))) == third

    eventually(serves, "the new worker gets requests")
    listed = gateway.operator.get("/admin/workers").json()["workers"]
    assert [worker["name"] for worker in listed] == fleet.names
    removed = gateway.operator.delete(f"/admin/workers/{third}")
    assert (removed.status_code, removed.json()) == (200, {"removed": third})
    assert third not in [worker["name"] for worker in gateway.status()["workers"]]
    assert {worker_of(gateway.post(chat(f"{number} more"))) for number in range(12)} <= set(fleet.names[:2])
    assert gateway.operator.delete(f"/admin/workers/{third}").status_code == 404


def test_a_worker_is_added_under_a_name_of_its_own_and_replaced(gateway: Gateway, fleet: Fleet) -> None:
    for _ in range(2):
        added = gateway.operator.post("/admin/workers", json={"url": fleet.urls[2], "name": "third"})
        assert added.json()["name"] == "third"
    assert [worker["name"] for worker in gateway.status()["workers"]].count("third") == 1
    assert gateway.operator.delete("/admin/workers/third").status_code == 200


@pytest.mark.parametrize("content", [b"", b"{}", b'{"url": "ftp://x"}', b'{"url": "http://x:1", "colour": 1}', b"nope"])
def test_what_is_no_worker_is_refused(gateway: Gateway, content: bytes) -> None:
    answer = gateway.operator.post("/admin/workers", content=content)
    assert answer.status_code == 400
    assert answer.json()["error"]["message"].startswith("not a worker: ")


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/status"),
        ("GET", "/admin/workers"),
        ("POST", "/admin/workers"),
        ("DELETE", "/admin/workers/x"),
        ("GET", "/metrics"),
    ],
)
def test_operators_routes_need_their_key(gateway: Gateway, method: str, path: str) -> None:
    for headers in ({}, {"authorization": "Bearer another-key-0123456789"}):
        answer = gateway.http.request(method, path, headers=headers)
        assert answer.status_code == 401
        assert answer.json()["error"]["code"] == "invalid_api_key"


def test_operators_listener_of_its_own(tmp_path: Path, fleet: Fleet) -> None:
    (port,) = free_ports(1)
    listener = {"host": HOST, "port": port}
    (tmp_path / "key").write_text(ADMIN_KEY)
    config = {"admin": {**listener, "key_file": str(tmp_path / "key")}, "metrics": listener}
    with (
        Gateway(tmp_path, (), config, has_status=False) as gateway,
        httpx.Client(base_url=f"http://{HOST}:{port}", trust_env=False) as operators,
    ):
        gateway.wait_for(lambda: operators.get("/metrics").status_code == 200, "the operators' listener")
        for path in ("/status", "/metrics", "/admin/workers"):
            assert gateway.http.get(path).status_code == 404
        assert operators.get("/status").status_code == 401
        key = {"authorization": f"Bearer {ADMIN_KEY}"}
        assert operators.get("/status", headers=key).json()["workers"] == []
        # Inference is not served there.
        assert operators.post("/v1/chat/completions", json=chat("hi"), headers=key).status_code == 404
        assert gateway.http.get("/readyz").status_code == 503
        operators.post("/admin/workers", json={"url": fleet.urls[0]}, headers=key).raise_for_status()
        eventually(lambda: gateway.http.get("/readyz").status_code == 200, "ready with its first worker")
        assert gateway.post(chat("hi")).status_code == 200


def samples(gateway: Gateway) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    """Every sample of `/metrics`, by name and labels."""
    answer = gateway.operator.get("/metrics").raise_for_status()
    assert answer.headers["content-type"].startswith("text/plain")
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(answer.text)
        for sample in family.samples
    }


def total(found: dict[tuple[str, tuple[tuple[str, str], ...]], float], name: str, **labels: str) -> float:
    wanted = set(labels.items())
    return sum(value for (sample, have), value in found.items() if sample == name and wanted <= set(have))


def test_metrics_parse_and_move(gateway: Gateway, fleet: Fleet) -> None:
    body = chat("A prompt that is counted in the metrics, and hit the second time. " * 3)
    before = samples(gateway)
    first = gateway.post(body)
    gateway.wait_confirmed(body, worker_of(first), full_hit(body))
    second = gateway.post(body)
    streamed = gateway.post({**body, "stream": True})
    assert gateway.post(b"{").status_code == 400
    gateway.wait_idle()
    after = samples(gateway)

    def moved(name: str, **labels: str) -> float:
        return total(after, name, **labels) - total(before, name, **labels)

    assert moved("ropeway_requests_total", ending="complete", status="200") == 3
    assert moved("ropeway_refusals_total", status="400") == 1
    assert moved("ropeway_decisions_total", policy="kv-aware") == 3
    assert moved("ropeway_decisions_total", worker=worker_of(second), evidence="exact") >= 1
    assert streamed.status_code == 200
    assert moved("ropeway_prompt_tokens_total") == 3 * token_count(body["messages"])
    # A stream says nothing of its usage unless it is asked to.
    assert moved("ropeway_reported_prompt_tokens_total") == 2 * token_count(body["messages"])
    assert moved("ropeway_reported_cached_tokens_total") == cached_tokens(first) + cached_tokens(second)
    assert cached_tokens(second) == full_hit(body)
    assert moved("ropeway_phantom_tokens_total") == 0
    # An answer in one piece hides its first token.
    assert moved("ropeway_ttft_seconds_count") == 1
    assert moved("ropeway_request_duration_seconds_count") == 3
    assert moved("ropeway_decision_seconds_bucket", le="+Inf") == 3
    assert total(after, "ropeway_worker_healthy", worker=fleet.names[0]) == 1
    assert total(after, "ropeway_worker_inflight_requests") == 0
    assert total(after, "ropeway_index_blocks") > 0


def test_status_says_how_the_gateway_is(gateway: Gateway, fleet: Fleet) -> None:
    gateway.post(chat("the newest stream", stream=True))
    answer = gateway.post(chat("the newest request of all"))
    gateway.wait_idle()
    status = gateway.status()
    assert status["ready"] is True
    assert status["policy"] == "kv-aware"
    assert status["uptime_seconds"] > 0
    assert [worker["name"] for worker in status["workers"]] == fleet.names[:2]
    for worker in status["workers"]:
        assert (worker["healthy"], worker["draining"], worker["reason"]) == (True, False, "")
        assert (worker["parity"], worker["parity_reason"]) == ("proven", "")
        assert worker["models"] == [MODEL, "lora-a"]
        assert (worker["block_size_tokens"], worker["max_model_len"], worker["ranks"]) == (16, 131_072, 1)
        assert worker["events_trusted"] is True
        assert worker["epoch"] > 0
        (stream,) = worker["events"]
        assert stream["rank"] == 0
        assert stream["endpoint"].startswith("tcp://127.0.0.1:")
        assert (stream["intake"]["malformed"], stream["intake"]["gaps"]) == (0, 0)
    assert status["models"] == [
        {
            "model": MODEL,
            "renderer": "plain",
            "block_size_tokens": 16,
            "workers": fleet.names[:2],
            "adapters": ["lora-a"],
        }
    ]
    assert status["index"]["blocks"] > 0
    newest, streamed = status["receipts"][:2]
    assert newest["request_id"] == answer.headers["x-request-id"]
    assert newest["worker"] == worker_of(answer)
    assert newest["reported_prompt_tokens"] == newest["prompt_tokens"] == answer.json()["usage"]["prompt_tokens"]
    assert newest["reported_cached_tokens"] == cached_tokens(answer)
    assert newest["seen_ttft_ms"] is None
    assert streamed["seen_ttft_ms"] > 0


def test_an_explanation_sends_nothing_and_comes_true(gateway: Gateway, fleet: Fleet) -> None:
    body = chat("A prompt whose way is explained before it is gone. " * 4)
    gateway.wait_confirmed(body, worker_of(gateway.post(body)), full_hit(body))

    def asked() -> list[int]:
        return [len(fleet.requests(worker)) for worker in fleet.names]

    before, counted = asked(), gateway.status()["requests"]
    receipt = gateway.explain(body)
    assert asked() == before
    assert gateway.status()["requests"] == counted
    assert {entry["worker"] for entry in receipt["candidates"]} == set(fleet.names[:2])
    assert (receipt["model"], receipt["policy"], receipt["renderer"]) == (MODEL, "kv-aware", "plain")
    assert receipt["prompt_tokens"] == token_count(body["messages"])
    assert receipt["evidence"] == "exact"
    assert receipt["reason"]
    answer = gateway.post(body)
    assert worker_of(answer) == receipt["worker"]
    assert matched_tokens(answer) == receipt["confirmed_tokens"] == full_hit(body)


def test_an_adapters_blocks_are_its_own(gateway: Gateway) -> None:
    body = chat("One prompt, to the model and to an adapter of it. " * 4)
    base = gateway.post(body)
    gateway.wait_confirmed(body, worker_of(base), full_hit(body))
    adapted = {**body, "model": "lora-a"}
    first = gateway.post(adapted)
    assert (matched_tokens(first), cached_tokens(first)) == (0, 0)
    gateway.wait_confirmed(adapted, worker_of(first), full_hit(body))
    second = gateway.post(adapted)
    assert worker_of(second) == worker_of(first)
    assert matched_tokens(second) == cached_tokens(second) == full_hit(body)
    assert {model["id"] for model in gateway.http.get("/v1/models").json()["data"]} == {MODEL, "lora-a"}
