"""The contract of a worker, kept by vLLM as it is."""

from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest

from cachecore.prompts.huggingface import HuggingFaceRenderer
from tests.vllm.conftest import PLAIN, Pair
from tests.vllm.servers import BLOCK_TOKENS, MODEL, TOPIC
from tests.workers.contract.lab import Lab
from tests.workers.contract.suite import WorkerBehaviour

pytestmark = [pytest.mark.vllm, PLAIN]


class TestVllm(WorkerBehaviour):
    @pytest.fixture
    async def lab(self, pair: Pair, model: Path) -> AsyncIterator[Lab]:
        server = pair.a
        async with httpx.AsyncClient(base_url=server.url, timeout=300, trust_env=False) as http:
            yield Lab(
                http,
                MODEL,
                HuggingFaceRenderer.load(model),
                BLOCK_TOKENS,
                server.events_endpoint,
                False,
                server.replay_endpoint,
                TOPIC,
                2 * server.blocks * BLOCK_TOKENS,
            )
