"""What operators steer while requests flow: drains, the policy, pins, warming."""

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.gateway.end_to_end.processes import (
    BLOCK_TOKENS,
    Fleet,
    Gateway,
    cached_tokens,
    chat,
    eventually,
    full_hit,
    worker_of,
)

ADMIN_KEY = "an-operator-key-0123456789"
LONG = "A long beginning that many prompts have in common, worth being computed once. " * 8


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    with Fleet(tmp_path_factory.mktemp("fleet"), "--speed", "50", count=2) as fleet:
        yield fleet


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory, fleet: Fleet) -> Iterator[Gateway]:
    directory = tmp_path_factory.mktemp("steering")
    (directory / "admin-key").write_text(f"{ADMIN_KEY}\n")
    config = {"admin": {"key_file": str(directory / "admin-key")}, "samples": {"per_second_max": 1000}}
    with Gateway(directory, fleet.urls, config, admin_key=ADMIN_KEY) as gateway:
        yield gateway


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/admin/workers/x/drain"),
        ("POST", "/admin/workers/x/undrain"),
        ("POST", "/admin/workers/x/warm"),
        ("GET", "/admin/policy"),
        ("PUT", "/admin/policy"),
        ("GET", "/admin/prefixes"),
        ("GET", "/admin/pins"),
        ("PUT", "/admin/pins"),
        ("DELETE", "/admin/pins"),
    ],
)
def test_steering_needs_the_operators_key(gateway: Gateway, method: str, path: str) -> None:
    for headers in ({}, {"authorization": "Bearer another-key-0123456789"}):
        assert gateway.http.request(method, path, headers=headers).status_code == 401


def test_a_drained_worker_keeps_what_it_serves_and_gets_nothing_new(gateway: Gateway, fleet: Fleet) -> None:
    drained, other = fleet.names
    gateway.operator.put("/admin/pins", json={"worker": drained, "session": "long"}).raise_for_status()
    body = chat("a long answer", user="long", max_tokens=4000, stream=True)
    answers: list[str] = []

    def read() -> None:
        with gateway.http.stream("POST", "/v1/chat/completions", json=body) as answer:
            answers.extend(answer.iter_lines())

    reader = threading.Thread(target=read)
    reader.start()
    eventually(lambda: gateway.worker(drained)["inflight"] == 1, "the long answer is under way")
    said = gateway.operator.post(f"/admin/workers/{drained}/drain").raise_for_status().json()
    assert said == {"worker": drained, "draining": True, "inflight": 1, "gateways": "this one"}
    assert gateway.worker(drained)["draining"] is True
    assert {worker_of(gateway.post(chat(f"{number} drained"))) for number in range(8)} == {other}
    waited = gateway.operator.post(f"/admin/workers/{drained}/drain?wait_seconds=30").raise_for_status().json()
    assert waited["inflight"] == 0
    reader.join()
    assert answers[-2] == "data: [DONE]"
    gateway.operator.delete("/admin/pins?session=long").raise_for_status()
    back = gateway.operator.post(f"/admin/workers/{drained}/undrain").json()
    assert (back["draining"], gateway.worker(drained)["draining"]) == (False, False)
    eventually(lambda: worker_of(gateway.post(chat("is it back?"))) == drained, "it gets requests again")


def test_the_policy_changes_from_one_request_to_the_next(gateway: Gateway) -> None:
    before = gateway.operator.get("/admin/policy").json()
    assert (before["policy"], before["weights"]) == ("kv-aware", {})
    assert "round-robin" in before["policies"]
    changed = gateway.operator.put("/admin/policy", json={"policy": "round-robin", "weights": {"acme": 3}})
    assert changed.json() == {**before, "policy": "round-robin", "weights": {"acme": 3.0}}
    body = chat("the same prompt, in turns")
    workers = [worker_of(gateway.post(body)) for _ in range(4)]
    assert workers[0] != workers[1]
    assert workers[:2] == workers[2:]
    status = gateway.status()
    assert (status["policy"], status["receipts"][0]["policy"]) == ("round-robin", "round-robin")
    assert gateway.operator.put("/admin/policy", json={"policy": "kv-aware", "weights": {}}).json() == before


def test_a_dry_run_changes_nothing_and_says_what_would(gateway: Gateway) -> None:
    body = chat(LONG + "for a dry run")
    for _ in range(6):
        gateway.post(body)
    gateway.wait_confirmed(body, worker_of(gateway.post(body)), full_hit(body))
    for _ in range(20):
        gateway.post(body)
    same = gateway.operator.put("/admin/policy?dry_run=true", json={}).json()
    assert (same["elsewhere"], same["predicted_start_ms_mean_change"]) == (0, 0.0)
    assert same["decisions"] >= 27
    blind = gateway.operator.put("/admin/policy?dry_run=true", json={"policy": "round-robin"}).json()
    assert blind["elsewhere"] >= 8
    assert (blind["present"]["policy"], blind["proposed"]["policy"]) == ("kv-aware", "round-robin")
    assert blind["predicted_start_ms_mean_change"] > 0
    assert gateway.operator.get("/admin/policy").json()["policy"] == "kv-aware"


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        ("/admin/policy", {"policy": "best"}, "there is no policy 'best'; there are kv-aware, "),
        ("/admin/policy", {"weights": {"acme": 0}}, "not a policy: Expected `float` >= 0.001"),
        ("/admin/policy", {"colour": 1}, "not a policy: Object contains unknown field `colour`"),
        ("/admin/pins", {"worker": "127.0.0.1:1"}, "there is no worker "),
        ("/admin/pins", {"session": "s"}, "not a pin: Object missing required field `worker`"),
        ("/admin/pins", {"worker": "x", "prefix": "nothex"}, "not a pin: Expected `str` matching regex"),
    ],
)
def test_mistakes_are_told(gateway: Gateway, path: str, body: dict[str, object], message: str) -> None:
    answer = gateway.operator.put(path, json=body)
    assert answer.status_code in (400, 404)
    assert answer.json()["error"]["message"].startswith(message)


def test_a_bad_parameter_is_told_in_openais_form(gateway: Gateway, fleet: Fleet) -> None:
    answer = gateway.operator.post(f"/admin/workers/{fleet.names[0]}/drain?wait_seconds=-1")
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "wait_seconds"
    assert gateway.worker(fleet.names[0])["draining"] is False


def test_pins_hold_until_they_are_taken_out(gateway: Gateway, fleet: Fleet) -> None:
    pinned = fleet.names[1]
    put = gateway.operator.put("/admin/pins", json={"worker": pinned, "session": "s-1"}).json()
    assert put == {"pins": [{"tenant": "", "session": "s-1", "prefix": "", "worker": pinned}]}
    headers = {"x-ropeway-session": "s-1"}
    assert {worker_of(gateway.post(chat(f"{n} pinned"), headers)) for n in range(8)} == {pinned}
    assert len({worker_of(gateway.post(chat(f"{n} free"))) for n in range(16)}) == 2
    gateway.operator.put("/admin/pins", json={"worker": pinned, "tenant": "default"}).raise_for_status()
    assert {worker_of(gateway.post(chat(f"{n} a tenant's"))) for n in range(8)} == {pinned}
    assert gateway.operator.delete("/admin/pins?session=s-1").json()["pins"][0]["tenant"] == "default"
    assert gateway.operator.delete("/admin/pins?session=s-1").status_code == 404
    gateway.operator.delete("/admin/pins?tenant=default").raise_for_status()
    assert gateway.operator.get("/admin/pins").json() == {"pins": []}


def test_a_pin_steers_and_never_refuses(gateway: Gateway, fleet: Fleet) -> None:
    pinned, other = fleet.names
    gateway.operator.put("/admin/pins", json={"worker": pinned, "session": "s-2"}).raise_for_status()
    gateway.operator.post(f"/admin/workers/{pinned}/drain").raise_for_status()
    assert worker_of(gateway.post(chat("pinned to whom does not serve", user="s-2"))) == other
    gateway.operator.post(f"/admin/workers/{pinned}/undrain").raise_for_status()
    assert worker_of(gateway.post(chat("pinned to whom serves again", user="s-2"))) == pinned
    gateway.operator.delete("/admin/pins?session=s-2").raise_for_status()


def test_a_worker_is_warmed_with_what_is_hot(gateway: Gateway, fleet: Fleet) -> None:
    """Its share of a hot prefix is a full hit there afterwards, though no client's request has been there."""
    holds, lacks = fleet.names
    gateway.operator.put("/admin/pins", json={"worker": holds, "session": "hot"}).raise_for_status()
    beginning = "Something that is to be hot, and lies at one worker alone. " * 12
    bodies = [chat(beginning + ending, user="hot") for ending in ("one", "two", "three", "four", "five", "six")]
    for body in bodies:
        gateway.post(body)
    gateway.wait_confirmed(bodies[-1], holds, full_hit(bodies[-1]))
    listed = gateway.operator.get("/admin/prefixes?count=64").json()["prefixes"]
    (prefix,) = [p for p in listed if p["held_tokens"] == {holds: p["tokens"]} and p["prompts"] == 6]
    assert prefix["tokens"] % BLOCK_TOKENS == 0
    assert (prefix["tenant"], prefix["model"]) == ("default", "simulated")
    warmed = gateway.operator.post(f"/admin/workers/{lacks}/warm", json={"prefixes_max": 64}).json()["warmed"]
    (outcome,) = [entry for entry in warmed if entry["prefix"] == prefix["prefix"]]
    assert (outcome["outcome"], outcome["problem"], outcome["rank"]) == ("computed", "", 0)

    def held() -> bool:
        prefixes = gateway.operator.get("/admin/prefixes?count=64").json()["prefixes"]
        (found,) = [p for p in prefixes if p["prefix"] == prefix["prefix"]]
        return bool(found["held_tokens"].get(lacks) == prefix["tokens"])

    eventually(held, "the worker announces what it was warmed with")
    assert gateway.status()["requests"]["inflight"] == 0
    gateway.operator.put("/admin/pins", json={"worker": lacks, "session": "hot"}).raise_for_status()
    assert cached_tokens(gateway.post(chat(beginning + "seven", user="hot"))) == prefix["tokens"]
    again = gateway.operator.post(f"/admin/workers/{lacks}/warm").json()["warmed"]
    assert prefix["prefix"] not in [entry["prefix"] for entry in again]
    gateway.operator.delete("/admin/pins?session=hot").raise_for_status()
    pinned = gateway.operator.put("/admin/pins", json={"worker": holds, "prefix": prefix["prefix"]})
    assert pinned.status_code == 200
    assert worker_of(gateway.post(chat(beginning + "eight"))) == holds
    gateway.operator.delete(f"/admin/pins?prefix={prefix['prefix']}").raise_for_status()


def test_who_is_not_there_is_neither_warmed_nor_drained(gateway: Gateway) -> None:
    for action in ("drain", "undrain", "warm"):
        answer = gateway.operator.post(f"/admin/workers/nobody/{action}")
        assert (answer.status_code, answer.json()["error"]["message"]) == (404, "there is no worker 'nobody'")


def test_without_a_key_pages_of_other_origins_steer_nothing(tmp_path: Path, fleet: Fleet) -> None:
    with Gateway(tmp_path, fleet.urls[:1]) as gateway:
        path = f"/admin/workers/{fleet.names[0]}/drain"
        foreign = gateway.http.post(path, headers={"origin": "https://example.com"})
        assert (foreign.status_code, foreign.json()["error"]["code"]) == (403, "forbidden")
        assert gateway.worker(fleet.names[0])["draining"] is False
        assert gateway.http.get("/admin/policy", headers={"origin": "https://example.com"}).status_code == 200
        assert gateway.http.post(path, headers={"origin": gateway.url}).status_code == 200


def test_without_samples_nothing_is_known_as_hot(tmp_path: Path, fleet: Fleet) -> None:
    with Gateway(tmp_path, fleet.urls, {"samples": {"decisions_max": 0}}) as gateway:
        gateway.post(chat("kept nowhere"))
        assert gateway.operator.get("/admin/prefixes").json() == {"prefixes": []}
        assert gateway.operator.post(f"/admin/workers/{fleet.names[0]}/warm").status_code == 501
        assert gateway.operator.put("/admin/policy?dry_run=true", json={}).json()["decisions"] == 0
