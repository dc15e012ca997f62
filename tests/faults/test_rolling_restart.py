"""Every worker and every gateway is restarted in turn, under load, and nobody who asks notices.

Two gateways, eight workers, each a process. "Nobody notices" is said of clients that try again where a connection ends
before any byte of an answer, as the openai client does: an error that is answered counts as a failure.
"""

import asyncio
import os
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.faults.instances import GatewayInstance, WorkerInstance, until
from tests.faults.persistent import OpenAiClient, PersistentClient, small_questions
from tests.faults.reports import publish
from tests.gateway.end_to_end.processes import free_ports

pytestmark = pytest.mark.faults

WORKERS = int(os.environ.get("ROLLING_WORKERS", "8"))
REQUESTS_PER_SECOND = float(os.environ.get("ROLLING_RATE", "200"))
"""The acceptance takes 8 workers and 200 requests a second, 10 of which are the openai client's."""
OPENAI_PER_SECOND = 10.0
CONFIG = {"probes": {"interval_seconds": 0.5}, "timeouts": {"shutdown_seconds": 20.0}}
FLAGS = ("--speed", "20", "--announce-seconds", "1.5", "--finish-seconds", "20")


class Stage:
    def __init__(self, directory: Path) -> None:
        ports = free_ports(WORKERS + 3)
        self.workers = [WorkerInstance(directory, f"worker-{port}", port, *FLAGS) for port in ports[:WORKERS]]
        self.gateways = [
            GatewayInstance(directory, f"gateway-{port}", port, self.workers, **CONFIG)
            for port in ports[WORKERS : WORKERS + 2]
        ]
        self.shared_port = ports[-1]


@pytest.fixture
async def stage(tmp_path: Path) -> AsyncIterator[Stage]:
    stage = Stage(tmp_path)
    everyone = [*stage.workers, *stage.gateways]
    for instance in everyone:
        instance.start()
    try:
        for instance in everyone:
            await instance.ready()
        for gateway in stage.gateways:
            for worker in stage.workers:
                await gateway.knows(worker)
        yield stage
    finally:
        for instance in reversed(everyone):
            if instance.process is not None:
                instance.process.kill()


@asynccontextmanager
async def load(*clients: tuple[Any, float]) -> AsyncIterator[None]:
    ended = asyncio.Event()
    asking = [
        asyncio.create_task(client.ask(small_questions(seed), rate, ended.is_set))
        for seed, (client, rate) in enumerate(clients)
    ]
    try:
        await asyncio.sleep(2.0)
        yield
        await asyncio.sleep(2.0)
    finally:
        ended.set()
        await asyncio.gather(*asking)


def report_on(client: PersistentClient, openai: OpenAiClient | None, seconds: float) -> dict[str, Any]:
    ms = sorted(each.seconds * 1e3 for each in client.asked)
    return {
        "seconds": round(seconds, 1),
        "requests": len(client.asked),
        "requests_per_second": round(len(client.asked) / seconds, 1),
        "failed": len(client.failures),
        "tries": {str(tries): count for tries, count in sorted(client.tries.items())},
        "p50_ms": round(ms[len(ms) // 2], 1),
        "p99_ms": round(ms[len(ms) * 99 // 100], 1),
        "max_ms": round(ms[-1], 1),
        "openai_requests": openai.answered if openai else 0,
        "openai_failed": len(openai.failures) if openai else 0,
    }


def assert_nobody_noticed(name: str, client: PersistentClient, openai: OpenAiClient | None, seconds: float) -> None:
    publish(name, report_on(client, openai, seconds))
    assert not client.failures, "\n".join(map(str, client.failures[:20]))
    if openai is not None:
        assert not openai.failures, "\n".join(openai.failures[:20])
        assert openai.answered > seconds * OPENAI_PER_SECOND / 2


async def test_workers_are_restarted_in_turn(stage: Stage) -> None:
    client, openai = PersistentClient([gateway.url for gateway in stage.gateways]), OpenAiClient(stage.gateways[0].url)
    began = time.monotonic()
    async with load((client, REQUESTS_PER_SECOND - OPENAI_PER_SECOND), (openai, OPENAI_PER_SECOND)):
        for worker in stage.workers:
            epoch = stage.gateways[0].worker(worker)["epoch"]
            await worker.stop()
            worker.start()
            for gateway in stage.gateways:
                await gateway.knows(worker)
                assert gateway.worker(worker)["epoch"] > epoch, "another life at the same address"
    assert_nobody_noticed("rolling-restart-workers", client, openai, time.monotonic() - began)
    assert [gateway.refusals() for gateway in stage.gateways] == [{}, {}]


async def test_gateways_are_restarted_in_turn(stage: Stage) -> None:
    """In place: each is away for a while, and clients that know both ask the other one. The openai client knows one."""
    client = PersistentClient([gateway.url for gateway in stage.gateways])
    began = time.monotonic()
    async with load((client, REQUESTS_PER_SECOND)):
        for gateway in stage.gateways:
            await gateway.stop()
            gateway.start()
            await gateway.ready()
            assert gateway.refusals() == {}
    assert_nobody_noticed("rolling-restart-gateways", client, None, time.monotonic() - began)


async def test_a_new_gateway_takes_the_address_over(stage: Stage, tmp_path: Path) -> None:
    """With `handover.reuse_port`, at one address that never goes away: the openai client needs no second one."""
    config = {**CONFIG, "handover": {"reuse_port": True}}
    old, new = (
        GatewayInstance(tmp_path, f"{name}-{stage.shared_port}", stage.shared_port, stage.workers, **config)
        for name in ("old", "new")
    )
    old.start()
    await old.ready()
    client, openai = PersistentClient([old.url]), OpenAiClient(old.url)
    began = time.monotonic()
    try:
        async with load((client, REQUESTS_PER_SECOND - OPENAI_PER_SECOND), (openai, OPENAI_PER_SECOND)):
            for _ in range(3):
                new.start()
                assert new.process is not None
                await until(
                    lambda process=new.process: "Started server process" in process.said(), "the new one starts"
                )
                await asyncio.sleep(1.0)
                await old.stop()
                old, new = new, old
                assert old.refusals() == {}
        assert_nobody_noticed("takeover", client, openai, time.monotonic() - began)
    finally:
        for instance in (old, new):
            if instance.process is not None:
                instance.process.kill()
