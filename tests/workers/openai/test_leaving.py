"""A worker that is told to stop: who is told what, and when, until it is gone."""

import asyncio
from typing import Any

import httpx
import pytest

from workers.openai.leaving import Patience
from workers.simulated.fleet import SimulatedWorker, WorkerOptions

BODY = {"model": "simulated", "prompt": "x", "max_tokens": 40}


@pytest.fixture
async def leaving(start_worker: Any) -> SimulatedWorker:
    """Patient, and slow enough for an answer to take a second or two."""
    patience = Patience(announce_seconds=0.6, finish_seconds=20.0)
    worker: SimulatedWorker = await start_worker(WorkerOptions(patience=patience), speed=0.3)
    return worker


def client_of(worker: SimulatedWorker) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=worker.url, timeout=30, trust_env=False)


async def under_way(worker: SimulatedWorker, count: int) -> None:
    async with asyncio.timeout(10):
        while worker.engine.metrics.requests_running < count:
            await asyncio.sleep(0.005)


async def test_it_says_so_then_refuses_then_finishes(leaving: SimulatedWorker) -> None:
    url = leaving.url
    async with client_of(leaving) as http:
        assert (await http.get("/health")).status_code == 200
        running = asyncio.create_task(http.post("/v1/completions", json={**BODY, "max_tokens": 150}))
        await under_way(leaving, 1)
        stopping = asyncio.create_task(leaving.server.stop())
        await asyncio.sleep(0.05)
        health = await http.get("/health")
        assert (health.status_code, health.json()) == (503, {"status": "draining"})
        assert "ropeway_worker_leaving 1.0" in (await http.get("/metrics")).text
        accepted = await http.post("/v1/completions", json={**BODY, "max_tokens": 2})
        assert accepted.status_code == 200, "whoever sends requests has not noticed yet"
        await asyncio.sleep(0.8)
        refused = await http.post("/v1/completions", json=BODY)
        assert (refused.status_code, refused.headers["retry-after"], refused.headers["connection"]) == (
            503,
            "1",
            "close",
        )
        assert refused.json()["error"]["code"] == "draining"
        assert not running.done()
        answer = await running
        assert answer.json()["usage"]["completion_tokens"] == 150
        assert answer.json()["choices"][0]["finish_reason"] == "length"
        await asyncio.wait_for(stopping, 5)
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{url}/health", trust_env=False)


async def test_nobody_who_asks_for_its_health_means_no_announcement(leaving: SimulatedWorker) -> None:
    async with client_of(leaving) as http:
        running = asyncio.create_task(http.post("/v1/completions", json=BODY))
        await under_way(leaving, 1)
        stopping = asyncio.create_task(leaving.server.stop())
        await asyncio.sleep(0.05)
        assert (await http.post("/v1/completions", json=BODY)).status_code == 503
        assert (await running).status_code == 200
        await asyncio.wait_for(stopping, 5)


async def test_nobody_is_connected_and_nothing_to_wait_for(start_worker: Any) -> None:
    worker = await start_worker(WorkerOptions(patience=Patience(600.0, 600.0)))
    async with client_of(worker) as http:
        assert (await http.get("/health")).status_code == 200
    await asyncio.wait_for(worker.server.stop(), 10)


async def test_a_second_signal_ends_the_wait(leaving: SimulatedWorker) -> None:
    async with client_of(leaving) as http:
        running = asyncio.create_task(http.post("/v1/completions", json={**BODY, "max_tokens": 10_000}))
        await under_way(leaving, 1)
        stopping = asyncio.create_task(leaving.server.stop())
        await asyncio.sleep(0.1)
        leaving.server.hurry()
        await asyncio.wait_for(stopping, 8)
        assert (await running).json()["choices"][0]["finish_reason"] == "abort"


async def test_time_that_is_up_ends_what_runs(start_worker: Any) -> None:
    worker = await start_worker(WorkerOptions(patience=Patience(0.0, 0.3)), speed=0.3)
    async with client_of(worker) as http:
        running = asyncio.create_task(http.post("/v1/completions", json={**BODY, "max_tokens": 10_000}))
        await under_way(worker, 1)
        await asyncio.wait_for(worker.server.stop(), 8)
        assert (await running).json()["choices"][0]["finish_reason"] == "abort"


async def test_what_is_under_way_is_counted_down_however_it_ends(leaving: SimulatedWorker) -> None:
    async with client_of(leaving) as http:
        assert (await http.post("/v1/completions", content=b"{")).status_code == 400
        with pytest.raises(httpx.ReadTimeout):
            await http.post("/v1/completions", json={**BODY, "max_tokens": 10_000}, timeout=0.3)
        async with asyncio.timeout(5):
            while "ropeway_worker_requests 0.0" not in (await http.get("/metrics")).text:
                await asyncio.sleep(0.02)
