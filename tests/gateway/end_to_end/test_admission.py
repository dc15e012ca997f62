"""More than the workers can do: who waits at the gateway, who is refused and how, and that nobody hangs.

Answers are held back by the worker for longer than this machine could mistake. A worker of which two first tokens are
due is sent no more, so the rest waits here. How long anything took is measured by tests/bench/bench_admission.py.
"""

import asyncio
import json
import signal
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest

from gateway.api_keys import add_api_key
from tests.cachecore.store.servers import start_server
from tests.gateway.end_to_end.processes import Fleet, Gateway, chat, eventually, new_keyring
from tests.gateway.end_to_end.sharing import sharing_config

pytestmark = pytest.mark.stacks

BUDGET = "x-ropeway-ttft-budget-ms"
PROMPT = "The cabin rises to the ridge at noon. " * 100
TENANTS = ("flood", "quiet")
texts = count()
"""No two prompts are alike: what is cached takes no time."""
HELD = {"delay_first_ms": 500.0}


class Line(NamedTuple):
    gateway: Gateway
    fleet: Fleet
    keys: dict[str, str]


@pytest.fixture(scope="module")
def line(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Line]:
    directory = tmp_path_factory.mktemp("line")
    keys_file = directory / "keys.jsonl"
    keys = {tenant: add_api_key(keys_file, tenant) for tenant in TENANTS}
    config = {
        "tenants": {"api_keys_file": str(keys_file)},
        "admission": {"requests_max": 12, "backlog_ms_max": 50, "quantum_tokens": 1},
    }
    with Fleet(directory, count=1) as fleet, Gateway(directory, fleet.urls, config) as gateway:
        fleet.simulate(fleet.names[0], HELD)
        yield Line(gateway, fleet, keys)


class Got(NamedTuple):
    tenant: str
    number: int
    status: int
    headers: httpx.Headers
    body: bytes
    order: int


async def ask(http: httpx.AsyncClient, line: Line, tenant: str, number: int, got: list[Got], **headers: str) -> None:
    body = chat(f"{next(texts)}: {PROMPT}", max_tokens=2, stream=True)
    all_headers = {"authorization": f"Bearer {line.keys[tenant]}", **headers}
    answer = await http.post("/v1/chat/completions", json=body, headers=all_headers)
    got.append(Got(tenant, number, answer.status_code, answer.headers, answer.content, len(got)))


def client(line: Line) -> httpx.AsyncClient:
    limits = httpx.Limits(max_connections=None)
    return httpx.AsyncClient(base_url=line.gateway.url, timeout=60, trust_env=False, limits=limits)


async def flooded(line: Line, flood: int, quiet: int, **headers: str) -> list[Got]:
    got: list[Got] = []
    async with client(line) as http:
        tasks = [asyncio.create_task(ask(http, line, "flood", n, got, **headers)) for n in range(flood)]
        await asyncio.sleep(0.05)
        tasks += [asyncio.create_task(ask(http, line, "quiet", n, got, **headers)) for n in range(quiet)]
        await asyncio.gather(*tasks)
    return got


def assert_refused(got: Got) -> dict[str, Any]:
    assert int(got.headers["retry-after"]) >= 1
    assert got.headers["x-request-id"]
    error: dict[str, Any] = json.loads(got.body)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error


def test_a_flood_is_told_so_and_the_quiet_tenant_is_served(line: Line) -> None:
    got = asyncio.run(flooded(line, 40, 3))
    assert Counter(one.status for one in got if one.tenant == "quiet") == {200: 3}
    statuses = Counter(one.status for one in got if one.tenant == "flood")
    assert set(statuses) == {200, 429}
    assert statuses[200] >= 9
    for one in got:
        if one.status == 429:
            error = assert_refused(one)
            assert (error["type"], error["code"] in ("over_share", "queue_full")) == ("rate_limit_error", True)
    # It takes turns with the flood: not all that came before it is served before it.
    served = sorted((one for one in got if one.status == 200), key=lambda one: one.order)
    last_quiet = max(place for place, one in enumerate(served) if one.tenant == "quiet")
    assert last_quiet < len(served) - 3
    assert any("x-ropeway-queued-ms" in one.headers for one in served)
    admission = line.gateway.status()["admission"]
    assert (admission["waiting"], admission["waiting_bytes"]) == (0, 0)
    line.gateway.wait_idle()


def test_a_budget_that_cannot_be_kept_is_refused_with_503(line: Line) -> None:
    got = asyncio.run(flooded(line, 10, 0, **{BUDGET: "900"}))
    statuses = Counter(one.status for one in got)
    assert set(statuses) == {200, 503}
    assert statuses[200] >= 1
    for one in got:
        if one.status == 503:
            assert assert_refused(one)["code"] == "overloaded"
    hopeless = line.gateway.post(
        chat(f"hopeless {PROMPT}"), {BUDGET: "1", "authorization": f"Bearer {line.keys['quiet']}"}
    )
    assert hopeless.status_code == 503
    line.gateway.wait_idle()


def test_a_budget_is_for_the_gateway_alone_and_must_be_one(line: Line) -> None:
    key = {"authorization": f"Bearer {line.keys['quiet']}"}
    wrong = line.gateway.post(chat("hi"), {BUDGET: "soon", **key})
    assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, BUDGET)
    echo = line.gateway.post(chat("hi"), {BUDGET: "60000", "x-simulate": '{"echo": true}', **key})
    assert echo.status_code == 200, echo.text
    assert BUDGET not in echo.text
    line.gateway.wait_idle()


def test_clients_that_leave_while_they_wait_leave_nothing(line: Line) -> None:
    left = line.gateway.status()["admission"]["left"]

    async def leave() -> None:
        got: list[Got] = []
        async with client(line) as http:
            tasks = [asyncio.create_task(ask(http, line, "flood", n, got)) for n in range(10)]
            await asyncio.to_thread(
                eventually, lambda: line.gateway.status()["admission"]["waiting"] >= 8, "most of them wait"
            )
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    asyncio.run(leave())
    eventually(lambda: not line.gateway.status()["admission"]["waiting"], "nobody waits")
    assert line.gateway.status()["admission"]["left"] >= left + 4
    line.gateway.wait_idle()


def test_metrics_name_models_tenants_and_reasons(line: Line) -> None:
    text = line.gateway.http.get("/metrics").text
    assert 'ropeway_admission_waiting{model="simulated"} 0.0' in text
    assert 'ropeway_admission_refused_total{reason="over_share",when="arrival"}' in text
    assert 'ropeway_admission_tokens_total{model="simulated",tenant="quiet"}' in text
    assert "ropeway_admission_wait_seconds_bucket" in text


@pytest.mark.parametrize("patience", [20.0, 0.7])
def test_who_waits_while_the_gateway_stops_is_served_if_there_is_time_and_told_if_not(
    line: Line, tmp_path: Path, patience: float
) -> None:
    config = {"admission": {"backlog_ms_max": 50}, "timeouts": {"shutdown_seconds": patience}}
    with Gateway(tmp_path, line.fleet.urls, config) as gateway:
        line = line._replace(gateway=gateway)

        def stop() -> None:
            eventually(lambda: gateway.status()["admission"]["waiting"] >= 8, "most wait")
            gateway.process.send_signal(signal.SIGTERM)

        stopping = threading.Thread(target=stop)
        stopping.start()
        got = asyncio.run(flooded(line, 10, 0))
        stopping.join()
        statuses = Counter(one.status for one in got)
        if patience > 10:
            assert statuses == {200: 10}
        else:
            assert set(statuses) <= {200, 503}
            assert statuses[503] >= 4
            assert {assert_refused(one)["code"] for one in got if one.status == 503} == {"shutting_down"}
        assert gateway.process.wait(20) == 0


def test_without_admission_everything_is_sent_at_once(line: Line, tmp_path: Path) -> None:
    with Gateway(tmp_path, line.fleet.urls, {"admission": {"enabled": False}}) as gateway:
        got = asyncio.run(flooded(line._replace(gateway=gateway), 12, 2))
        assert {one.status for one in got} == {200}
        assert not any("x-ropeway-queued-ms" in one.headers for one in got)
        assert gateway.status()["admission"] is None


def test_a_share_is_one_over_gateways_and_they_work_on_without_the_server(line: Line, tmp_path: Path) -> None:
    keyring, keys_file = new_keyring(tmp_path), tmp_path / "keys.jsonl"
    keys = {tenant: add_api_key(keys_file, tenant) for tenant in TENANTS}
    with ExitStack() as stack:
        server = stack.enter_context(start_server(tmp_path))
        config = {
            "tenants": {"api_keys_file": str(keys_file)},
            "admission": {"backlog_ms_max": 50, "quantum_tokens": 1},
        }
        one, two = (
            stack.enter_context(
                Gateway(tmp_path, line.fleet.urls, {**config, **sharing_config(server.url, keyring, name)}, name)
            )
            for name in ("one", "two")
        )
        eventually(lambda: one.status()["sharing"]["peers"]["peers"], "they know of each other")
        held_back: set[str] = set()

        def watch() -> None:
            def narrow_waits_for_flood() -> bool:
                held_back.update(one.status()["admission"]["models"].get("simulated", {}).get("held_back", ()))
                return bool(held_back)

            eventually(narrow_waits_for_flood, "the flood is held back", 20.0)

        async def flood_one_and_ask_two() -> list[Got]:
            got: list[Got] = []
            lines = [Line(gateway, line.fleet, keys) for gateway in (one, two)]
            async with client(lines[0]) as first, client(lines[1]) as second:
                tasks = [asyncio.create_task(ask(first, lines[0], "flood", n, got)) for n in range(24)]
                watching = asyncio.create_task(asyncio.to_thread(watch))
                await asyncio.sleep(0.5)
                tasks += [asyncio.create_task(ask(second, lines[1], "quiet", n, got)) for n in range(8)]
                await asyncio.gather(*tasks, watching)
            return got

        got = asyncio.run(flood_one_and_ask_two())
        assert {one_got.status for one_got in got} == {200}
        assert held_back == {"flood"}

        server.kill()
        for gateway in (one, two):
            again = asyncio.run(flooded(Line(gateway, line.fleet, keys), 3, 1))
            assert {one_got.status for one_got in again} == {200}
        eventually(lambda: not one.status()["admission"]["models"]["simulated"]["held_back"], "nobody is held back")
