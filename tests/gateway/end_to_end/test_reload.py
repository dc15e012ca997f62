"""A configuration that changes while requests flow."""

import os
import signal
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import httpx
import pytest
import yaml

from tests.gateway.end_to_end.processes import Fleet, Gateway, chat, eventually, worker_of

pytestmark = pytest.mark.stacks

NAME = "reloaded"


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    with Fleet(tmp_path_factory.mktemp("fleet"), "--speed", "50", count=3) as fleet:
        yield fleet


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory, fleet: Fleet) -> Iterator[Gateway]:
    with Gateway(tmp_path_factory.mktemp(NAME), fleet.urls[:2], name=NAME) as gateway:
        yield gateway


@pytest.fixture
def gateway(served: Gateway) -> Iterator[Gateway]:
    """With its configuration as it was, before and after."""
    path = served.log.with_suffix(".yaml")
    right = path.read_text()
    yield served
    before = reloads(served)["reloads"]
    path.write_text(right)
    os.kill(served.process.pid, signal.SIGHUP)
    eventually(lambda: reloads(served)["reloads"] > before and served.healthy() == 2, "it is as it was")


@pytest.fixture
def rewrite(gateway: Gateway) -> Callable[..., None]:
    path = gateway.log.with_suffix(".yaml")

    def rewrite(**keys: Any) -> None:
        document = {**yaml.safe_load(path.read_text()), **keys}
        path.write_text(yaml.safe_dump(document, sort_keys=False))

    return rewrite


def reloads(gateway: Gateway) -> Mapping[str, Any]:
    found: Mapping[str, Any] = gateway.status()["configuration"]
    return found


@contextmanager
def requests_flow(gateway: Gateway) -> Iterator[Counter[tuple[int, str]]]:
    """(status, worker) of whatever four clients get meanwhile."""
    seen: Counter[tuple[int, str]] = Counter()
    over = threading.Event()

    def ask(number: int) -> None:
        with httpx.Client(base_url=gateway.url, timeout=30, trust_env=False) as http:
            turn = 0
            while not over.is_set():
                turn += 1
                answer = http.post("/v1/chat/completions", json=chat(f"{number}: {turn}", stream=turn % 2 == 0))
                seen[answer.status_code, answer.headers.get("x-ropeway-worker", "")] += 1

    clients = [threading.Thread(target=ask, args=(number,)) for number in range(4)]
    for client in clients:
        client.start()
    try:
        yield seen
    finally:
        over.set()
        for client in clients:
            client.join()


def test_policy_and_workers_change_under_load_without_an_error(
    gateway: Gateway, fleet: Fleet, rewrite: Callable[..., None]
) -> None:
    with requests_flow(gateway) as seen:
        rewrite(policy="round-robin", workers=fleet.urls)
        eventually(lambda: gateway.status()["policy"] == "round-robin", "the file is seen to have changed")
        eventually(lambda: seen[200, fleet.names[2]] > 5, "the new worker gets requests")
        rewrite(workers=[{"url": fleet.urls[0], "draining": True}, *fleet.urls[1:]])
        os.kill(gateway.process.pid, signal.SIGHUP)
        eventually(lambda: gateway.worker(fleet.names[0])["draining"], "the worker drains at once")
        rewrite(workers=fleet.urls[1:])
        eventually(lambda: gateway.healthy() == 2, "the worker is gone")
        before = seen.total()
        eventually(lambda: seen.total() > before + 20, "requests flow on")
    assert {status for status, _ in seen} == {200}
    said = reloads(gateway)
    assert said["file"] == str(gateway.log.with_suffix(".yaml"))
    assert (said["refusals"], said["problem"], said["needs_restart"]) == (0, None, [])
    assert said["reloads"] >= 3


def test_a_wrong_file_is_refused_with_its_line_and_the_running_one_kept(
    gateway: Gateway, fleet: Fleet, rewrite: Callable[..., None]
) -> None:
    path = gateway.log.with_suffix(".yaml")
    right = path.read_text()
    path.write_text(f"{right}limits:\n  body_bytes_max: 1\n")
    line = right.count("\n") + 2
    eventually(lambda: reloads(gateway)["refusals"] == 1, "the wrong file is seen")
    problem = reloads(gateway)["problem"]
    assert problem == f"{path}:{line}:3: limits.body_bytes_max: Expected `int` >= 1024"
    assert f"the configuration is refused, and the running one kept: {problem}" in gateway.said()
    assert gateway.status()["policy"] == "kv-aware"
    assert gateway.post(chat("still served")).status_code == 200
    path.write_text(right)
    eventually(lambda: reloads(gateway)["problem"] is None, "the right one is taken again")


def test_what_needs_a_restart_is_said_and_limits_change(gateway: Gateway, rewrite: Callable[..., None]) -> None:
    assert gateway.post(chat("x" * 3000)).status_code == 200
    rewrite(limits={"body_bytes_max": 2048}, probes={"interval_seconds": 5}, log_level="warning")
    eventually(lambda: reloads(gateway)["needs_restart"] == ["probes.interval_seconds"], "it is said")
    assert "needs a restart: probes.interval_seconds: 0.2 -> 5.0" in gateway.said()
    # Connections that are open keep their limits; a new one has the new.
    with httpx.Client(base_url=gateway.url, trust_env=False) as http:
        assert http.post("/v1/chat/completions", json=chat("x" * 3000)).status_code == 413
    rewrite(probes={"interval_seconds": 0.2}, limits={}, log_level="info")
    eventually(lambda: reloads(gateway)["needs_restart"] == [], "it is as it was")


def test_without_a_file_a_hangup_changes_nothing(gateway: Gateway) -> None:
    before = reloads(gateway)["reloads"]
    os.kill(gateway.process.pid, signal.SIGHUP)
    eventually(lambda: reloads(gateway)["reloads"] == before + 1, "it is read again")
    assert "the configuration was read again, and says the same" in gateway.said()
    assert worker_of(gateway.post(chat("still there")))
