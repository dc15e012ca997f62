"""The contract of a worker, kept by the simulated one."""

from collections.abc import AsyncIterator

import httpx
import pytest

from cachecore.prompts.plain import PlainRenderer
from tests.workers.contract.lab import Lab
from tests.workers.contract.suite import WorkerBehaviour
from workers.simulated.engine import SimulatedConfig
from workers.simulated.fleet import SimulatedWorker

BLOCKS = 80


class TestSimulatedWorker(WorkerBehaviour):
    @pytest.fixture
    async def lab(self) -> AsyncIterator[Lab]:
        config = SimulatedConfig(speed=20.0, blocks_total=BLOCKS)
        worker = SimulatedWorker(config)
        assert worker.publisher is not None
        assert worker.publisher.replay_endpoint is not None
        await worker.start()
        try:
            async with httpx.AsyncClient(base_url=worker.url, timeout=30, trust_env=False) as http:
                yield Lab(
                    http,
                    config.model,
                    PlainRenderer(),
                    config.block_size_tokens,
                    worker.publisher.endpoint,
                    False,
                    worker.publisher.replay_endpoint,
                    "kv-events",
                    2 * BLOCKS * config.block_size_tokens,
                )
        finally:
            await worker.stop()
