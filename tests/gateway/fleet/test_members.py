"""Many workers in one fleet: what they serve together, who waits for whom, and what those leave that have gone."""

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from cachecore.index.memory import MemoryIndex
from cachecore.scope import DEFAULT_TENANT, IdentityScope, Keyring, Naming
from gateway.config import ProbesConfig, WorkerConfig
from gateway.fleet.knowledge import Knowledge
from gateway.fleet.registry import Fleet
from gateway.fleet.streams import Intakes, OwnStreams

KEYRING = Keyring({0: bytes(32)}, 0)
NAMING = Naming.of(IdentityScope("m", KEYRING.key_id(DEFAULT_TENANT), 16), KEYRING)
BASE = {
    "id": "org/base",
    "object": "model",
    "created": 1_700_000_000,
    "owned_by": "org",
    "root": "/models/base",
    "parent": None,
    "permission": [{"id": "p", "allow_sampling": True}],
    "max_model_len": 8192,
}
ADAPTER = {"id": "org/sql", "object": "model", "created": 7, "owned_by": "org", "parent": "org/base", "root": "/sql"}
HANGING = 110


def script(*entries: dict[str, Any]) -> dict[str, Any]:
    return {"/health": {}, "/v1/models": {"data": list(entries)}}


@pytest.fixture
async def fleet() -> AsyncIterator[Fleet]:
    knowledge = Knowledge(MemoryIndex())
    streams = OwnStreams(Intakes(knowledge.index, lambda *_: NAMING))
    # Whoever waits for others' time-outs waits too long for these tests.
    fleet = Fleet(ProbesConfig(interval_seconds=0.03, timeout_seconds=30.0), {}, knowledge, streams)
    yield fleet
    await fleet.stop()


class Hanging:
    """Servers that take requests and never answer."""

    def __init__(self) -> None:
        self.urls: list[str] = []
        self.asked: list[asyncio.StreamWriter] = []
        self._servers: list[asyncio.Server] = []

    async def start(self, count: int) -> None:
        for _ in range(count):
            server = await asyncio.start_server(lambda _, writer: self.asked.append(writer), "127.0.0.1", 0)
            self._servers.append(server)
            self.urls.append(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")

    async def stop(self) -> None:
        for server in self._servers:
            server.close()
        for writer in self.asked:
            writer.close()
            await writer.wait_closed()


@pytest.fixture
async def hanging() -> AsyncIterator[Hanging]:
    hanging = Hanging()
    await hanging.start(HANGING)
    yield hanging
    await hanging.stop()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.005)


async def join(fleet: Fleet, url: str, name: str) -> None:
    record = await fleet.register(WorkerConfig(url=url, name=name))
    await until(lambda: record.healthy)


async def test_models_are_the_union_of_the_workers_with_every_field(scripted: Any, fleet: Fleet) -> None:
    short = {**BASE, "max_model_len": 4096}
    other = {"id": "other", "object": "model", "owned_by": "org"}
    served: list[list[dict[str, Any]]] = [[BASE, ADAPTER], [short], [other]]
    for number, entries in enumerate(served):
        await join(fleet, (await scripted(script(*entries))).engine.url, f"w{number}")
    listed = {entry["id"]: entry for entry in fleet.models()}
    # What a client may send to any of them is what the shortest takes.
    assert listed == {"org/base": short, "org/sql": ADAPTER, "other": other}
    assert [*listed] == ["org/base", "org/sql", "other"]
    await fleet.remove("w1")
    assert {entry["id"]: entry for entry in fleet.models()}["org/base"] == BASE


async def test_a_name_registered_again_is_at_its_new_address(scripted: Any, fleet: Fleet) -> None:
    urls = [(await scripted(script(BASE))).engine.url for _ in range(2)]
    for url in urls:
        await join(fleet, url, "w")
    (record,) = fleet.pool("org/base")[0].workers
    assert fleet.candidates(fleet.pool("org/base")[0]) == [record]
    assert (record.url, [*fleet.workers.values()]) == (urls[1], [record])


async def test_a_worker_is_probed_however_many_do_not_answer(hanging: Hanging, scripted: Any, fleet: Fleet) -> None:
    for number, url in enumerate(hanging.urls):
        await fleet.register(WorkerConfig(url=url, name=f"hanging-{number}"))
    await until(lambda: len(hanging.asked) == HANGING)
    await join(fleet, (await scripted(script(BASE))).engine.url, "well")
    assert [record.name for record in fleet.workers.values() if record.healthy] == ["well"]
    assert len(hanging.asked) == HANGING


async def test_workers_that_come_and_go_leave_nothing(scripted: Any, fleet: Fleet) -> None:
    url = (await scripted(script(BASE, ADAPTER))).engine.url
    await join(fleet, url, "first")
    tasks = len(asyncio.all_tasks())
    for number in range(25):
        await join(fleet, url, f"life-{number}")
        assert [*fleet.workers] == [f"life-{number}"]
        assert len(fleet.pool("org/sql")[0].workers) == 1
    assert len(asyncio.all_tasks()) <= tasks + 1
    await fleet.remove("life-24")
    assert (fleet.workers, fleet.models(), fleet._tasks, fleet._scrutinies, fleet._adapters) == ({}, [], {}, {}, {})
