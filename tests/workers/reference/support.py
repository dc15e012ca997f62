"""What the reference worker's tests share: tiny models without weights on disk, and a tokenizer-free renderer."""

import asyncio
import hashlib
from array import array
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from cachecore.events import KvEvent
from cachecore.prompts.contract import Rendered
from cachecore.scope import Keyring
from workers.engine import Generation, Sampling, StepOutput
from workers.reference.config import ModelConfig
from workers.reference.engine import EngineOptions, ReferenceEngine
from workers.reference.weights import random_weights

torch.set_num_threads(1)

TINY: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10_000.0,
    "tie_word_embeddings": True,
    "eos_token_id": 1,
}
KEYRING = Keyring({0: bytes(range(32))}, 0)


class BytesRenderer:
    """One token per byte: enough for an engine, which only reads the fingerprint."""

    name = "bytes"
    fingerprint = hashlib.sha256(b"bytes").hexdigest()

    def chat(self, request: Mapping[str, Any]) -> Rendered:
        return Rendered([str(request["messages"])])

    def text(self, prompt: str) -> Rendered:
        return Rendered([prompt])

    def encode(self, segment: str) -> "array[int]":
        return array("I", segment.encode())

    def decode(self, token_ids: Sequence[int]) -> str:
        return bytes(token_ids).decode(errors="replace")


def tiny_engine(
    on_kv_events: Callable[[Sequence[KvEvent]], object] = lambda events: None,
    seed: int = 0,
    layers: int = 2,
    **options: Any,
) -> ReferenceEngine:
    """An engine of random weights with blocks of 4 tokens."""
    config = ModelConfig.parse({**TINY, "num_hidden_layers": layers})
    settings = EngineOptions("tiny", **{"block_size_tokens": 4, "blocks": 64, **options})
    return ReferenceEngine(config, random_weights(config, seed), BytesRenderer(), settings, KEYRING, on_kv_events)


def greedy(max_tokens: int, **fields: Any) -> Sampling:
    return Sampling(max_tokens=max_tokens, temperature=0.0, **{"ignore_eos": True, **fields})


async def run(engine: ReferenceEngine, generation: Generation) -> list[StepOutput]:
    return [output async for output in engine.generate(generation)]


def tokens_of(outputs: Sequence[StepOutput]) -> list[int]:
    return [token for output in outputs for token in output.token_ids]


async def run_tokens(
    engine: ReferenceEngine, prompt: Sequence[int], sampling: Sampling, request_id: str = "one", **fields: Any
) -> tuple[list[int], int]:
    """Tokens generated and prompt tokens found in the cache."""
    outputs = await run(engine, Generation(request_id, prompt, sampling, **fields))
    return tokens_of(outputs), outputs[0].cached_tokens


async def run_together(
    engine: ReferenceEngine, prompts: Sequence[Sequence[int]], sampling: Sampling
) -> list[tuple[list[int], int]]:
    runs = (run_tokens(engine, prompt, sampling, f"together-{index}") for index, prompt in enumerate(prompts))
    return await asyncio.gather(*runs)
