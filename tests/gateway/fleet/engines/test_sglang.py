"""SGLang's answers, by its published interface."""

from typing import Any

import pytest

from gateway.fleet.engines.contract import EventEndpoint
from gateway.fleet.engines.sglang import NO_CACHE_REPORT, NO_EVENTS, NO_METRICS, NO_PREFIX_CACHE, SglangAdapter

MODELS = {"data": [{"id": "qwen", "owned_by": "sglang", "root": "qwen", "max_model_len": 32768}]}
CONFIG = '{"publisher":"zmq","topic":"kv","endpoint":"tcp://*:5557","replay_endpoint":"tcp://*:5657"}'
INFO = {
    "version": "0.5.21",
    "page_size": 64,
    "dp_size": 2,
    "dcp_size": 1,
    "context_length": None,
    "max_running_requests": 48,
    "enable_metrics": True,
    "enable_cache_report": True,
    "disable_radix_cache": False,
    "kv_events_config": CONFIG,
    "kv_events": {
        "publisher": "zmq",
        "endpoint_host": "*",
        "endpoint_port_base": 5557,
        "topic": "kv",
        "block_size": 64,
        "dp_size": 2,
    },
}
METRICS = """process_start_time_seconds 1.8e+09
sglang:num_running_reqs{model_name="qwen"} 7.0
sglang:num_queue_reqs{model_name="qwen"} 1.0
sglang:prompt_tokens_total{model_name="qwen"} 900.0
sglang:cached_tokens_total{model_name="qwen"} 300.0
"""
WHOLE = {
    "/v1/models": MODELS,
    "/server_info": INFO,
    "/metrics": METRICS,
    "/model_info": {"model_path": "/models/qwen", "weight_version": "default"},
}
SOCKETS = (
    EventEndpoint("tcp://127.0.0.1:5557", "tcp://127.0.0.1:5657", "kv"),
    EventEndpoint("tcp://127.0.0.1:5558", "tcp://127.0.0.1:5658", "kv"),
)


async def test_what_it_says_of_itself(scripted: Any) -> None:
    adapter, discovery = await (await scripted(WHOLE)).discover()
    assert adapter.name == "sglang"
    assert (discovery.version, discovery.epoch) == ("0.5.21", 1_800_000_000_000)
    assert (discovery.block_size_tokens, discovery.capacity_requests, discovery.max_model_len) == (64, 48, 32768)
    assert discovery.events is not None
    assert discovery.events.sockets == SOCKETS
    assert discovery.revisions == {"qwen": "/models/qwen@default"}


async def test_earlier_versions_say_it_by_other_routes_and_their_arguments_alone(scripted: Any) -> None:
    script = {
        "/v1/models": {"data": [{"id": "qwen"}]},
        "/get_server_info": {**INFO, "kv_events": None, "internal_states": [{}]},
        "/get_model_info": {"model_path": "/models/qwen", "weight_version": "2"},
    }
    adapter, discovery = await (await scripted(script)).discover()
    assert adapter.name == "sglang"
    assert discovery.events is not None
    assert discovery.events.sockets == SOCKETS
    assert discovery.revisions == {"qwen": "/models/qwen@2"}


async def test_pages_of_contexts_that_are_split_are_longer(scripted: Any) -> None:
    discovery = (await (await scripted({**WHOLE, "/server_info": {**INFO, "dcp_size": 4}})).discover()).discovery
    assert discovery.block_size_tokens == 256


async def test_a_weights_update_is_another_revision(scripted: Any) -> None:
    sglang = await scripted(WHOLE)
    first = (await sglang.discover()).discovery
    sglang.engine.script["/model_info"] = {"model_path": "/models/qwen", "weight_version": "step-2"}
    assert (await sglang.discover()).discovery.reloaded(first) == "qwen"


async def test_its_queue_and_its_cache(scripted: Any) -> None:
    load = await SglangAdapter().load((await scripted(WHOLE)).ask)
    assert load is not None
    assert (load.running, load.waiting, load.queried_tokens, load.hit_tokens) == (7, 1, 900, 300)


@pytest.mark.parametrize(
    ("change", "lacks"),
    [
        ({}, []),
        ({"kv_events": None, "kv_events_config": None}, [NO_EVENTS]),
        ({"kv_events": {"publisher": "null"}}, [NO_EVENTS]),
        ({"kv_events": 3, "kv_events_config": "{"}, [NO_EVENTS]),
        ({"enable_cache_report": False, "enable_metrics": False}, [NO_CACHE_REPORT, NO_METRICS]),
        ({"disable_radix_cache": True}, [NO_PREFIX_CACHE]),
    ],
)
async def test_what_it_was_started_without(scripted: Any, change: dict[str, Any], lacks: list[Any]) -> None:
    sglang = await scripted({**WHOLE, "/server_info": {**INFO, **change}})
    assert await SglangAdapter().lacks(sglang.ask, (await sglang.discover()).discovery) == lacks


async def test_chats_are_not_tokenized_by_versions_that_cannot(scripted: Any) -> None:
    def tokenize(document: Any) -> Any:
        return {"tokens": [5, 6], "count": 2} if "prompt" in document else 400

    ask = (await scripted({**WHOLE, "/tokenize": tokenize})).ask
    assert await SglangAdapter().tokenize(ask, {"model": "qwen", "prompt": "a"}) == [5, 6]
    assert await SglangAdapter().tokenize(ask, {"model": "qwen", "messages": []}) is None
