"""A real engine's text is the same in two legs as in one: reference workers with a small model of random weights."""

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from random import Random
from typing import Any

import httpx
import pytest

from cachecore.events import EventBatch, KvEvent
from cachecore.prompts.plain import PlainRenderer
from cachecore.scope import Keyring
from tests.gateway.end_to_end.processes import BLOCK_TOKENS, Gateway

pytest.importorskip("torch")

from tests.workers.reference.support import TINY
from workers.openai.app import build_app
from workers.openai.server import WorkerServer
from workers.publisher import EventPublisher
from workers.reference.config import ModelConfig
from workers.reference.engine import EngineOptions, ReferenceEngine
from workers.reference.weights import random_weights
from workers.transfer.service import TransferOptions

MODEL = "tiny"
PROMPTS = 50
SHAPE = {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 4, "head_dim": 32}
"""Large enough that a prompt takes longer to compute than its KV takes to come."""
MODEL_CONFIG = ModelConfig.parse({**TINY, **SHAPE, "vocab_size": 256, "max_position_embeddings": 1024})
CONFIG = {"transfer": {"codecs": ["raw"], "fidelity": "exact", "deadline_seconds_min": 20.0}}

pytestmark = [pytest.mark.model, pytest.mark.moving]


async def start_worker(stack: AsyncExitStack, keyring: Keyring, name: str) -> str:
    """The URL of a worker in this process; all have the same weights."""
    publisher = EventPublisher()
    stack.callback(publisher.close)

    def announce(events: Sequence[KvEvent]) -> None:
        publisher.publish(EventBatch(time.time(), tuple(events)))

    options = EngineOptions(MODEL, blocks=4096, transfer=TransferOptions(name=name))
    engine = ReferenceEngine(MODEL_CONFIG, random_weights(MODEL_CONFIG, 0), PlainRenderer(), options, keyring, announce)
    engine.listen()
    server = WorkerServer(build_app(engine, publisher=publisher), before_stop=engine.stop)
    await server.start()
    stack.push_async_callback(server.stop)
    return server.url


@pytest.fixture
async def workers(tmp_path: Path) -> AsyncIterator[dict[str, str]]:
    """URLs by role. `whole` serves as a fleet without roles does."""
    keyring = Keyring.generate()
    keyring.save(tmp_path / "keyring.json")
    async with AsyncExitStack() as stack:
        yield {name: await start_worker(stack, keyring, name) for name in ("prefill", "decode", "whole")}


def bodies() -> Iterator[dict[str, Any]]:
    random = Random(11)
    for _ in range(PROMPTS):
        text = "".join(random.choices("abcdefgh ", k=random.randrange(400, 800)))
        yield {"model": MODEL, "messages": [{"role": "user", "content": text}], "max_tokens": 6, "temperature": 0}


async def test_a_hundred_requests_say_what_they_say_in_one_leg(workers: dict[str, str], tmp_path: Path) -> None:
    """Each prompt twice: cold, and then warm at the decode worker."""
    configured = [{"url": workers[role], "name": role, "role": role} for role in ("prefill", "decode")]
    config = {**CONFIG, "keyring": str(tmp_path / "keyring.json")}
    outcomes: Counter[tuple[str, str]] = Counter()
    async with AsyncExitStack() as stack:
        # The workers that it waits for live in this thread.
        gateway = await asyncio.to_thread(Gateway, tmp_path, configured, config)  # type: ignore[arg-type]
        stack.push_async_callback(asyncio.to_thread, gateway.stop)
        http = await stack.enter_async_context(httpx.AsyncClient(timeout=60, trust_env=False))
        for body in bodies():
            whole = (await http.post(f"{workers['whole']}/v1/chat/completions", json=body)).json()
            for state in ("cold", "warm"):
                answer = await http.post(f"{gateway.url}/v1/chat/completions", json=body)
                assert answer.json()["choices"] == whole["choices"]
                assert answer.headers["x-ropeway-worker"] == "decode"
                outcome = answer.headers["x-ropeway-legs"].partition(";")[0].removeprefix("outcome=")
                outcomes[state, outcome] += 1
                if outcome == "two_legs":
                    # All but the last block, whose last token is computed anyway, has come.
                    tokens = (whole["usage"]["prompt_tokens"] - 1) // BLOCK_TOKENS * BLOCK_TOKENS
                    assert answer.headers["x-ropeway-transfer"].startswith(f"outcome=fetched; tokens={tokens}; ")
    assert outcomes["warm", "bypass"] == PROMPTS
    # How many are worth two legs is for the estimates to say, on a machine that has other things to do.
    assert outcomes["cold", "two_legs"] >= PROMPTS // 2, outcomes
