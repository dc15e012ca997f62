"""TensorRT-LLM's answers, by its published interface."""

from typing import Any

import pytest

from gateway.fleet.engines.contract import EventEndpoint, EventEndpoints
from gateway.fleet.engines.discovery import TRANSLATED_PATHS
from gateway.fleet.engines.trtllm import NO_BLOCK_SIZE, NO_START_TIME, TOLD_ONCE, TrtllmAdapter

WHOLE = {
    "/v1/models": {"object": "list", "data": [{"id": "llama", "object": "model", "owned_by": "tensorrt_llm"}]},
    "/version": {"version": "1.2.0"},
    "/health": "",
    "/metrics": [],
    "/kv_cache_events": [],
}


async def test_what_it_says_of_itself(scripted: Any) -> None:
    worker = await scripted(WHOLE)
    adapter, discovery = await worker.discover()
    assert adapter.name == "trtllm"
    assert (discovery.version, discovery.epoch, discovery.max_model_len) == ("1.2.0", None, 0)
    assert list(discovery.models) == ["llama"]
    socket = EventEndpoint(f"{worker.engine.url}/kv_cache_events")
    assert discovery.events == EventEndpoints((socket,), block_size_tokens=32)
    assert discovery.events.told_once


@pytest.mark.parametrize(("configured", "believed"), [(0, 32), (64, 64)])
async def test_its_block_size_is_the_usual_one_unless_it_is_configured(
    scripted: Any, configured: int, believed: int
) -> None:
    found = await (await scripted(WHOLE)).discover(block_size_tokens=configured)
    assert found.discovery.events is not None
    assert found.discovery.events.block_size_tokens == believed


async def test_it_can_be_named(scripted: Any) -> None:
    worker = await scripted({"/v1/models": {"data": [{"id": "llama"}]}})
    assert (await worker.discover(engine="trtllm")).adapter.name == "trtllm"


async def test_nothing_is_asked_that_it_tells_only_once(scripted: Any) -> None:
    worker = await scripted(WHOLE)
    adapter = TrtllmAdapter()
    discovery = (await worker.discover()).discovery
    await adapter.health(worker.ask)
    assert list(await adapter.lacks(worker.ask, discovery)) == [NO_BLOCK_SIZE, TOLD_ONCE, NO_START_TIME]
    assert await adapter.load(worker.ask) is None
    assert await adapter.tokenize(worker.ask, {"model": "llama", "prompt": "a"}) is None
    assert {asked.path for asked in worker.engine.asked} == {
        "/v1/models",
        "/version",
        "/health",
        *TRANSLATED_PATHS,
    }


async def test_its_version_is_asked_for_once(scripted: Any) -> None:
    worker = await scripted(WHOLE)
    earlier = (await worker.discover()).discovery
    later = await TrtllmAdapter().discover(worker.ask, list(earlier.models.values()), earlier)
    assert later.version == "1.2.0"
    assert worker.engine.questions("/version") == [None]
