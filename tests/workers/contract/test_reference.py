"""The contract of a worker, kept by the reference worker: a tiny model of random weights."""

import time
from collections.abc import AsyncIterator, Sequence

import httpx
import pytest

from cachecore.events import EventBatch, KvEvent
from cachecore.prompts.plain import PlainRenderer
from tests.workers.contract.lab import Lab
from tests.workers.contract.suite import WorkerBehaviour
from tests.workers.reference.support import KEYRING, TINY
from workers.openai.app import build_app
from workers.openai.server import WorkerServer
from workers.publisher import EventPublisher
from workers.reference.config import ModelConfig
from workers.reference.engine import EngineOptions, ReferenceEngine
from workers.reference.weights import random_weights

BLOCK_TOKENS = 16
BLOCKS = 80


class TestReferenceWorker(WorkerBehaviour):
    @pytest.fixture
    async def lab(self) -> AsyncIterator[Lab]:
        publisher = EventPublisher()
        assert publisher.replay_endpoint is not None

        def announce(events: Sequence[KvEvent]) -> None:
            publisher.publish(EventBatch(time.time(), tuple(events)))

        config = ModelConfig.parse({**TINY, "vocab_size": 256, "max_position_embeddings": BLOCKS * BLOCK_TOKENS})
        options = EngineOptions("tiny", block_size_tokens=BLOCK_TOKENS, blocks=BLOCKS)
        engine = ReferenceEngine(config, random_weights(config, 0), PlainRenderer(), options, KEYRING, announce)
        server = WorkerServer(build_app(engine, publisher=publisher), before_stop=engine.stop)
        await server.start()
        try:
            async with httpx.AsyncClient(base_url=server.url, timeout=30, trust_env=False) as http:
                yield Lab(
                    http,
                    "tiny",
                    PlainRenderer(),
                    BLOCK_TOKENS,
                    publisher.endpoint,
                    False,
                    publisher.replay_endpoint,
                    "kv-events",
                    2 * BLOCKS * BLOCK_TOKENS,
                )
        finally:
            await server.stop()
            publisher.close()
