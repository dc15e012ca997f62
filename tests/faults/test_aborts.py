"""Whoever leaves takes the work with it: the worker is told within a fraction of a second, whatever the client did.

Real gateway, simulated workers, raw sockets. A worker notes when its application learned that the client has left, and
that is when it closes the generation. A whole answer that nobody reads has been computed before it is written: there is
nothing left to abort, so only streams are met while everything is full.
"""

import asyncio
import os
import socket
from collections.abc import AsyncIterator, Mapping, Sequence
from itertools import product
from typing import Any, NamedTuple

import pytest

from tests.faults.leavers import How, Leaver, Left, Log, Scenario, When, distribution, written
from tests.faults.reports import publish
from tests.gateway.end_to_end.processes import HOST, Fleet, Gateway, chat, eventually

pytestmark = pytest.mark.faults

TOLD_MS_P99_MAX = 200.0
CLIENTS = int(os.environ.get("ABORTS_CLIENTS", "40"))
"""Of each scenario. The acceptance takes 40."""
CLIENTS_AT_ONCE = 4
LATE = {"delay_first_ms": 600_000, "paths": ["/v1/chat"]}

SCENARIOS = [Scenario(*parts) for parts in product((When.BEFORE, When.AFTER), (True, False), How)]
SCENARIOS += [Scenario(When.PAUSED, True, how) for how in How]
CONTROL = Scenario(When.AFTER, True, How.RESET)


class Stage(NamedTuple):
    fleet: Fleet
    gateway: Gateway
    log: Log

    @property
    def worker(self) -> str:
        return self.fleet.names[0]

    def aborted(self) -> float:
        text = self.log.metrics()
        (line,) = [line for line in text.splitlines() if "request_success_total{" in line and '"abort"' in line]
        return float(line.rpartition(" ")[2])

    def connections(self) -> float:
        text = self.gateway.operator.get("/metrics").text
        (line,) = [line for line in text.splitlines() if line.startswith("ropeway_worker_connections{")]
        return float(line.rpartition(" ")[2])


@pytest.fixture
async def stages(tmp_path: Any) -> AsyncIterator[Mapping[str, Stage]]:
    """A worker that takes its time, and one that soon has written more than anybody takes."""
    config = {"admission": {"enabled": False}}
    with Fleet(tmp_path, "--speed", "1", count=1) as slow, Fleet(tmp_path, "--speed", "20", count=1) as fast:
        stages = {
            name: Stage(fleet, Gateway(tmp_path, fleet.urls, config, name=f"gateway-{name}"), Log(fleet.urls[0]))
            for name, fleet in (("slow", slow), ("fast", fast))
        }
        yield stages
        for stage in stages.values():
            await stage.log.http.aclose()
            stage.gateway.stop()


async def leave(stage: Stage, scenario: Scenario, numbers: Sequence[int], url: str) -> list[Left]:
    turns = asyncio.Semaphore(CLIENTS_AT_ONCE)

    async def one(number: int) -> Left:
        async with turns:
            return await Leaver(url, stage.log, number, scenario).run()

    return list(await asyncio.gather(*map(one, numbers)))


def assert_nothing_is_left(stage: Stage) -> None:
    worker = stage.worker
    eventually(lambda: not stage.fleet.sample(worker, "vllm:num_requests_running"), "the engine stops computing")
    assert stage.fleet.sample(worker, "vllm:num_requests_waiting") == 0
    assert stage.fleet.sample(worker, "vllm:kv_cache_usage_perc") == 0
    assert stage.fleet.sample(worker, "ropeway_worker_requests") == 0
    stage.gateway.wait_idle()
    account = stage.gateway.worker(worker)
    assert (account["waiting"], account["inflight_tokens"], account["outstanding_prefill_ms"]) == (0, 0, 0.0)
    eventually(lambda: stage.connections() <= 1, "no connection to the worker but the one that may be kept")


async def test_the_worker_is_told_in_time(stages: Mapping[str, Stage]) -> None:
    told: dict[Scenario, list[Left]] = {}
    for turn, scenario in enumerate(SCENARIOS):
        stage = stages["fast" if scenario.when is When.PAUSED else "slow"]
        stage.fleet.simulate(stage.worker, LATE if scenario.when is When.BEFORE else {})
        await stage.log.clear()
        aborted = stage.aborted()
        numbers = range(turn * CLIENTS, (turn + 1) * CLIENTS)
        told[scenario] = await leave(stage, scenario, numbers, stage.gateway.url)
        assert_nothing_is_left(stage)
        assert stage.aborted() - aborted == CLIENTS, "each generation was aborted, once"
    # How long the same takes on this machine at this moment with no gateway between.
    slow = stages["slow"]
    control = await leave(slow, CONTROL, range(-CLIENTS, 0), slow.fleet.urls[0])
    report = {"control": distribution(control), **report_on(told)}
    publish("aborts", report)
    for group, figures in report["groups"].items():
        assert figures["p99_ms"] < TOLD_MS_P99_MAX, group
    endings = sum(stage.gateway.status()["requests"]["total"] for stage in stages.values())
    assert endings == CLIENTS * len(SCENARIOS)


def report_on(told: Mapping[Scenario, Sequence[Left]]) -> dict[str, Any]:
    groups = {
        "streamed": [one for scenario, left in told.items() if scenario.streams for one in left],
        "whole": [one for scenario, left in told.items() if not scenario.streams for one in left],
        "before the first token": [
            one for scenario, left in told.items() if scenario.when is When.BEFORE for one in left
        ],
        "while everything is full": [
            one for scenario, left in told.items() if scenario.when is When.PAUSED for one in left
        ],
    }
    return {
        "groups": {name: distribution(left) for name, left in groups.items()},
        "scenarios": {str(scenario): distribution(left) for scenario, left in told.items()},
    }


@pytest.mark.parametrize("streams", [True, False], ids=["streamed", "whole"])
async def test_who_has_only_finished_asking_is_answered(stages: Mapping[str, Stage], streams: bool) -> None:
    """Who closes says that nothing more will be sent, and may go on receiving (RFC 9293, 3.6)."""
    stage = stages["slow"]
    stage.fleet.simulate(stage.worker, {**LATE, "delay_first_ms": 1500})
    reader, writer = await asyncio.open_connection(HOST, int(stage.gateway.url.rpartition(":")[2]))
    writer.write(written(0, chat("Is anybody there?", max_tokens=100, stream=streams)))
    writer.get_extra_info("socket").shutdown(socket.SHUT_WR)
    answer = await asyncio.wait_for(reader.read(), 30)
    writer.close()
    while answer.startswith(b"HTTP/1.1 102 "):
        answer = answer.partition(b"\r\n\r\n")[2]
    assert answer.startswith(b"HTTP/1.1 200 OK\r\n")
    if streams:
        assert answer.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
        assert answer.count(b'"content":"') >= 100
    else:
        assert b'"completion_tokens":100' in answer
    assert_nothing_is_left(stage)
    assert stage.gateway.status()["requests"]["complete"] == 1
