"""Simulated workers on free loopback ports."""

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import httpx
import pytest

from workers.simulated.engine import SimulatedConfig
from workers.simulated.fleet import SimulatedWorker, WorkerOptions

StartWorker = Callable[..., Awaitable[SimulatedWorker]]


@pytest.fixture
async def start_worker() -> AsyncIterator[StartWorker]:
    """Starts workers that do not wait (`speed` inf) unless told; stops them all in the end."""
    started: list[SimulatedWorker] = []

    async def start(options: WorkerOptions | None = None, **config: Any) -> SimulatedWorker:
        worker = SimulatedWorker(SimulatedConfig(**{"speed": float("inf"), "blocks_total": 4096, **config}), options)
        started.append(worker)
        await worker.start()
        return worker

    yield start
    for worker in started:
        await worker.stop()


@pytest.fixture
async def worker(start_worker: StartWorker) -> SimulatedWorker:
    return await start_worker()


@pytest.fixture
async def http(worker: SimulatedWorker) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=worker.url, timeout=20) as client:
        yield client
