"""Engines' own word for their queues, over real sockets."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import httpx
import pytest

from cachecore.index.memory import MemoryIndex
from gateway.config import ProbesConfig, WorkerConfig
from gateway.fleet.engines.contract import EngineLoad
from gateway.fleet.engines.discovery import ADAPTERS
from gateway.fleet.engines.questions import ProbeError, Questions
from gateway.fleet.knowledge import Knowledge
from gateway.fleet.registry import Fleet
from gateway.fleet.streams import Intakes, OwnStreams

VLLM = """# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 5.0
vllm:num_requests_running{engine="1",model_name="m"} 3.0
vllm:num_requests_waiting{engine="0",model_name="m"} 2.0
vllm:num_requests_waiting{engine="1",model_name="m"} 0.0
vllm:num_requests_waiting_by_reason{engine="0",model_name="m",reason="capacity"} 2.0
"""
SGLANG = """sglang:num_running_reqs{model_name="m"} 7.0
sglang:num_queue_reqs{model_name="m"} 1.0
"""

Answer = Callable[[str], tuple[int, str] | None]
"""Path to status and body; None never answers."""


@asynccontextmanager
async def serving(answer: Answer) -> AsyncIterator[str]:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = await reader.readuntil(b"\r\n\r\n")
            found = answer(head.split()[1].decode())
            if found is None:
                await reader.read()
                return
            status, body = found
            writer.write(
                f"HTTP/1.1 {status} x\r\nconnection: close\r\ncontent-length: {len(body)}\r\n\r\n{body}".encode()
            )
            await writer.drain()
        finally:
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()


async def ask(status: int, body: str, engine: str = "vllm") -> EngineLoad | None:
    async with serving(lambda _: (status, body)) as url, httpx.AsyncClient(trust_env=False) as http:
        return await ADAPTERS[engine].load(Questions(http, url))


@pytest.mark.parametrize(("engine", "text", "running", "waiting"), [("vllm", VLLM, 8, 2), ("sglang", SGLANG, 7, 1)])
async def test_all_ranks_are_added_up(engine: str, text: str, running: int, waiting: int) -> None:
    load = await ask(200, text, engine)
    assert load is not None
    assert (load.running, load.waiting) == (running, waiting)


@pytest.mark.parametrize(("status", "text"), [(404, VLLM), (200, ""), (200, "process_cpu_seconds_total 3.0\n")])
async def test_a_server_without_such_metrics_says_nothing(status: int, text: str) -> None:
    assert await ask(status, text) is None


async def test_a_server_in_trouble_is_an_error() -> None:
    with pytest.raises(ProbeError, match="/metrics answers 503"):
        await ask(503, "")


def worker(metrics: tuple[int, str] | None, paths: list[str]) -> Answer:
    def answer(path: str) -> tuple[int, str] | None:
        paths.append(path)
        if path == "/metrics":
            return metrics
        documents = {
            "/health": "",
            "/v1/models": '{"data": [{"id": "m"}]}',
            "/server_info": '{"epoch": 5, "max_num_seqs": 4}',
        }
        return (200, documents[path]) if path in documents else (404, "")

    return answer


@asynccontextmanager
async def fleet_of(url: str) -> AsyncIterator[tuple[Fleet, Knowledge]]:
    knowledge = Knowledge(MemoryIndex())
    streams = OwnStreams(Intakes(knowledge.index, lambda *_: None))
    fleet = Fleet(ProbesConfig(interval_seconds=0.05, timeout_seconds=5.0), {}, knowledge, streams)
    await fleet.register(WorkerConfig(url=url, name="w"))
    try:
        yield fleet, knowledge
    finally:
        await fleet.stop()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.01)


async def test_a_report_and_a_declared_capacity_reach_the_account() -> None:
    text = "vllm:num_requests_running 4.0\nvllm:num_requests_waiting 1.0\n"
    async with serving(worker((200, text), [])) as url, fleet_of(url) as (fleet, knowledge):
        account = knowledge.accounting.account("w")
        account.slot_seconds = 2.0
        await until(lambda: "w" in fleet.workers and fleet.workers["w"].load is not None)
        assert account.capacity_requests == 4
        assert account.wait_seconds(asyncio.get_running_loop().time()) == pytest.approx(2.0 * (5 + 1 - 4) / 4)


async def test_metrics_that_hang_do_not_delay_the_health_probe() -> None:
    paths: list[str] = []
    async with serving(worker(None, paths)) as url, fleet_of(url) as (fleet, _):
        await until(lambda: "/metrics" in paths)
        asked = paths.count("/health")
        await until(lambda: paths.count("/health") >= asked + 5)
        assert paths.count("/metrics") == 1
        assert fleet.workers["w"].healthy


async def test_a_worker_without_metrics_is_asked_once() -> None:
    paths: list[str] = []
    async with serving(worker((404, ""), paths)) as url, fleet_of(url) as (fleet, _):
        await until(lambda: paths.count("/health") >= 6)
        assert paths.count("/metrics") == 1
        assert fleet.workers["w"].load is None
