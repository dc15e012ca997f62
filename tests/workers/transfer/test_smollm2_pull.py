"""The real model: a long prompt that a peer has computed, pulled as raw bytes and quantized."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import torch

from cachecore.blocks import HASH_BYTES, PrefixHash, pack_tokens
from cachecore.prompts.huggingface import HuggingFaceRenderer
from cachecore.scope import Fidelity, IdentityScope, Naming
from cachecore.transfer.capability import Run
from cachecore.transfer.plan import Plan
from tests.workers.reference.support import KEYRING
from tests.workers.transfer.world import TENANT, answer, generation, holder_of, signed, transfer_options
from workers.reference import fetch, quality
from workers.reference.config import ModelConfig
from workers.reference.engine import EngineOptions, ReferenceEngine
from workers.reference.weights import load_weights

pytestmark = [pytest.mark.model, pytest.mark.moving]

BLOCK = 16
PROMPT_TOKENS = 1_900
SAMPLES = Path(quality.__file__).with_name("samples")


@pytest.fixture
async def workers() -> AsyncIterator[list[ReferenceEngine]]:
    directory = fetch.fetch_smollm2(fetch.default_cache_dir()).directory
    config, renderer = ModelConfig.load(directory), HuggingFaceRenderer.load(directory)
    weights = load_weights(directory, config, torch.float32, torch.device("cpu"))
    options = EngineOptions(
        "smollm2", dtype="float32", device="cpu", blocks=160, max_model_len=2_048, transfer=transfer_options()
    )
    engines = [ReferenceEngine(config, weights, renderer, options, KEYRING) for _ in range(2)]
    for engine in engines:
        await engine.start()
    yield engines
    for engine in engines:
        await engine.stop()


def long_prompt(engine: ReferenceEngine) -> list[int]:
    """A chat about a document: 1,900 tokens, of which no two passages are alike."""
    document = (SAMPLES / "prose.txt").read_text(encoding="utf-8")
    question = "What is told here? Answer in a few sentences of your own."

    def tokens(characters: int) -> list[int]:
        content = f"{document[:characters]}\n\n{question}"
        rendered = engine.renderer.chat({"messages": [{"role": "user", "content": content}]})
        return [token for segment in rendered.segments for token in engine.renderer.encode(segment)]

    characters = next(length for length in range(6_000, len(document), 50) if len(tokens(length)) >= PROMPT_TOKENS)
    return tokens(characters)[:PROMPT_TOKENS]


def plan_for(prompt: list[int], source: ReferenceEngine, codec: str) -> Plan:
    scope = IdentityScope("smollm2", TENANT, BLOCK, tokenizer=source.renderer.fingerprint)
    naming = Naming.of(scope, KEYRING)
    chain = naming.hasher.chain(naming.root, pack_tokens(prompt))
    run = Run(naming.root, PrefixHash(chain[-HASH_BYTES:]), 0, len(chain) // HASH_BYTES)
    assert source.info.transfer is not None
    return Plan(holder_of(source), tuple(source.info.transfer.addresses), run, 0, 0, codec, 60.0)


async def test_a_long_prompt_is_pulled_and_answered_as_if_computed(workers: list[ReferenceEngine]) -> None:
    source, target = workers
    prompt = long_prompt(source)
    assert len(prompt) == PROMPT_TOKENS
    expected, first = await answer(source, generation(prompt, tokens=64))
    assert first.cached_tokens == 0
    assert len(set(expected)) > 8  # a model that repeats itself proves nothing
    for codec, same in (("raw", 64), ("i8", 24)):
        await target.reset_prefix_cache()
        plan = signed(plan_for(prompt, source, codec), target)
        tokens, first = await answer(target, generation(prompt, plan, tokens=64, fidelity=Fidelity.QUANTIZED))
        assert first.cached_tokens == 1_888 >= 0.95 * len(prompt)
        assert first.fidelity == (Fidelity.EXACT if codec == "raw" else Fidelity.QUANTIZED)
        assert first.transfer is not None
        raw_bytes = 1_888 * 46_080
        assert first.transfer.payload_bytes == (raw_bytes if codec == "raw" else raw_bytes * 66 // 256)
        # Quantized KV promises logits that are close, not equal ones.
        assert tokens[:same] == expected[:same], codec
