"""Which engine a worker is, and all that it says of itself, its sidecar included."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import httpx
import orjson

from gateway.config import WorkerConfig
from gateway.fleet.engines.contract import Discovery, EngineAdapter, EventEndpoints, ModelEntry
from gateway.fleet.engines.generic import GenericAdapter
from gateway.fleet.engines.llamacpp import LlamaCppAdapter
from gateway.fleet.engines.questions import ProbeError, Questions
from gateway.fleet.engines.ropeway import RopewayAdapter
from gateway.fleet.engines.server_info import read_events, read_transfer
from gateway.fleet.engines.sglang import SglangAdapter, server_info
from gateway.fleet.engines.trtllm import TrtllmAdapter
from gateway.fleet.engines.vllm import VllmAdapter

logger = logging.getLogger("ropeway.fleet")

GENERIC = GenericAdapter()
ADAPTERS: Mapping[str, EngineAdapter] = {
    adapter.name: adapter
    for adapter in (VllmAdapter(), SglangAdapter(), TrtllmAdapter(), LlamaCppAdapter(), RopewayAdapter(), GENERIC)
}
"""By the names that `engine` of a worker's configuration takes."""
_OWNERS = {
    "vllm": "vllm",
    "sglang": "sglang",
    "tensorrt_llm": "trtllm",
    "llamacpp": "llamacpp",
    "ropeway": "ropeway",
}
"""`owned_by` of a model's entry."""


TRANSLATED_PATHS = ("/v1/messages", "/v1/responses")
"""Routes that the gateway makes chat completions of where an engine does not serve them itself."""
_NO_ROUTE = frozenset({404, 405, 501})


class Found(NamedTuple):
    adapter: EngineAdapter
    discovery: Discovery


async def discover(ask: Questions, config: WorkerConfig, earlier: Found | None = None) -> Found:
    """Ask a worker for all that it says; `earlier`: what it was found to be. Raises ProbeError."""
    answer = await ask.get("/v1/models")
    models = _models(answer)
    if earlier is not None:
        adapter = earlier.adapter
    else:
        adapter = await detect(ask, config.engine, models, answer.headers.get("server", ""))
    discovery = await adapter.discover(ask, models, earlier.discovery if earlier else None)
    if earlier is None or earlier.discovery.routes is None or earlier.discovery.epoch != discovery.epoch:
        discovery.routes = frozenset() if adapter.traits.translated else await _read_routes(ask)
    if config.sidecar:
        await _read_sidecar(Questions(ask.http, config.sidecar), discovery)
    if config.events is not None:
        ranks = discovery.events.ranks if discovery.events else 1
        events = config.events
        discovery.events = EventEndpoints.at(
            events.endpoint, events.replay_endpoint or None, events.topic, ranks, events.bind
        )
    if discovery.events is not None and discovery.events.told_once:
        size = config.block_size_tokens or discovery.block_size_tokens
        discovery.events = replace(discovery.events, block_size_tokens=size)
    return Found(adapter, discovery)


def _models(answer: httpx.Response) -> list[ModelEntry]:
    try:
        models = [ModelEntry(entry) for entry in orjson.loads(answer.content)["data"]]
        names = [str(entry["id"]) for entry in models]
    except (ValueError, KeyError, TypeError):
        raise ProbeError(f"/v1/models answers {answer.status_code} and no list of models") from None
    if not names:
        raise ProbeError("/v1/models lists no model")
    return models


async def detect(ask: Questions, named: str, models: Sequence[ModelEntry], server: str) -> EngineAdapter:
    """As configured, or as its models' owner, its `Server` header or a route that no other engine has say."""
    if named:
        return ADAPTERS[named]
    for entry in models:
        owner = _OWNERS.get(str(entry.get("owned_by")))
        if owner is not None:
            return ADAPTERS[owner]
    if server.startswith("llama.cpp"):
        return ADAPTERS["llamacpp"]
    return await _detect_by_routes(ask)


async def _detect_by_routes(ask: Questions) -> EngineAdapter:
    info = await server_info(ask)
    if _is_ours(info):
        return ADAPTERS["ropeway"]
    if "page_size" in info or "internal_states" in info:
        return ADAPTERS["sglang"]
    if "default_generation_settings" in await ask.document("/props"):
        return ADAPTERS["llamacpp"]
    metrics = await ask.try_metrics()
    return ADAPTERS["vllm"] if metrics.labels("vllm:cache_config_info") else GENERIC


async def _read_routes(ask: Questions) -> frozenset[str] | None:
    """Which routes it serves itself, by how it refuses an empty body; None where it does not answer."""
    try:
        answers = {path: await ask.post(path, {}) for path in TRANSLATED_PATHS}
    except ProbeError:
        return None
    return frozenset(path for path, answer in answers.items() if answer.status_code not in _NO_ROUTE)


def _is_ours(info: Mapping[str, Any]) -> bool:
    return str(info.get("engine", "")).startswith("ropeway") or isinstance(info.get("epoch"), int)


async def _read_sidecar(ask: Questions, discovery: Discovery) -> None:
    """What a connector in the engine says: how KV moves, and whatever the engine has left open."""
    info = await ask.document("/server_info")
    if not info:
        discovery.transfer_problem = f"its sidecar at {ask.url} does not answer"
        return
    if info.get("transfer") is not None:
        read_transfer(info["transfer"], discovery, ask)
    size = info.get("block_size")
    if discovery.events is None:
        block_size = discovery.block_size_tokens
        read_events(info.get("kv_events"), discovery, ask)
        discovery.block_size_tokens = block_size or discovery.block_size_tokens
    if not discovery.block_size_tokens and isinstance(size, int):
        discovery.block_size_tokens = size
