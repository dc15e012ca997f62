"""vLLM's answers, as 0.32 writes them."""

from typing import Any

import pytest

from gateway.config import EventsConfig, WorkerConfig
from gateway.fleet.engines.contract import EventEndpoint
from gateway.fleet.engines.discovery import discover
from gateway.fleet.engines.vllm import NO_DETAILS, NO_EVENTS, NO_REPLAY, NO_SCALE_OUT, RENDER_PATH, VllmAdapter

MODELS = {
    "object": "list",
    "data": [
        {
            "id": "smollm2",
            "object": "model",
            "created": 1796000000,
            "owned_by": "vllm",
            "root": "/models/smollm2",
            "parent": None,
            "max_model_len": 8192,
            "permission": [{"id": "modelperm-1"}],
        },
        {"id": "sql", "owned_by": "vllm", "root": "/adapters/sql-1", "parent": "smollm2", "max_model_len": None},
    ],
}
METRICS = """# HELP process_start_time_seconds Start time of the process since unix epoch in seconds.
process_start_time_seconds 1.79600012345e+09
vllm:cache_config_info{block_size="32",enable_prefix_caching="True",engine="0",num_gpu_blocks="728"} 1.0
vllm:num_requests_running{engine="0",model_name="smollm2"} 3.0
vllm:num_requests_waiting{engine="0",model_name="smollm2"} 2.0
vllm:prefix_cache_queries_total{engine="0",model_name="smollm2"} 2150.0
vllm:prefix_cache_hits_total{engine="0",model_name="smollm2"} 640.0
vllm:engine_sleep_state{engine="0",model_name="smollm2",sleep_state="awake"} 1.0
vllm:engine_sleep_state{engine="0",model_name="smollm2",sleep_state="discard_all"} 0.0
"""


def source(endpoint: str, **fields: Any) -> dict[str, Any]:
    return {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "endpoint": endpoint,
        "replay_endpoint": None,
        "buffer_steps": 10000,
        "hwm": 100000,
        "max_queue_size": 100000,
        "topic": "kv",
        **fields,
    }


USAGE = {"usage": {"prompt_tokens": 1, "prompt_tokens_details": {"cached_tokens": 0}}}
WHOLE = {
    "/v1/models": MODELS,
    "/version": {"version": "0.32.0"},
    "/metrics": METRICS,
    "/kv_event_sources": {"0": source("tcp://*:5557", replay_endpoint="tcp://*:5558")},
    "/v1/completions": USAGE,
    RENDER_PATH: (400, {"error": {"message": "messages"}}),
}


async def test_what_it_says_of_itself(scripted: Any) -> None:
    adapter, discovery = await (await scripted(WHOLE)).discover()
    assert adapter.name == "vllm"
    assert discovery.version == "0.32.0"
    assert discovery.epoch == 1_796_000_123_450
    assert (discovery.block_size_tokens, discovery.max_model_len, discovery.asleep) == (32, 8192, False)
    assert discovery.revisions == {"smollm2": "/models/smollm2", "sql": "/adapters/sql-1"}
    assert discovery.events is not None
    # A wildcard is reached where the worker itself is.
    assert discovery.events.sockets == (EventEndpoint("tcp://127.0.0.1:5557", "tcp://127.0.0.1:5558", "kv"),)


async def test_its_queue_and_its_cache(scripted: Any) -> None:
    load = await VllmAdapter().load((await scripted(WHOLE)).ask)
    assert load is not None
    assert (load.running, load.waiting, load.queried_tokens, load.hit_tokens) == (3, 2, 2150, 640)


async def test_nothing_is_lacking(scripted: Any) -> None:
    vllm = await scripted(WHOLE)
    assert await VllmAdapter().lacks(vllm.ask, (await vllm.discover()).discovery) == []
    assert vllm.engine.questions("/v1/completions") == [
        {"model": "smollm2", "prompt": "a", "max_tokens": 1, "temperature": 0}
    ]


async def test_what_it_was_started_without(scripted: Any) -> None:
    bare = {
        **WHOLE,
        "/kv_event_sources": {},
        "/v1/completions": {"usage": {"prompt_tokens": 1, "prompt_tokens_details": None}},
        RENDER_PATH: 403,
    }
    vllm = await scripted(bare)
    lacks = await VllmAdapter().lacks(vllm.ask, (await vllm.discover()).discovery)
    assert lacks == [NO_EVENTS, NO_SCALE_OUT, NO_DETAILS]
    assert "--enable-prompt-tokens-details" in str(lacks[2])


async def test_events_that_are_configured_are_not_lacking(scripted: Any) -> None:
    vllm = await scripted({**WHOLE, "/kv_event_sources": 404})
    discovery = (await vllm.discover(events=EventsConfig(endpoint="tcp://127.0.0.1:5557"))).discovery
    assert await VllmAdapter().lacks(vllm.ask, discovery) == []
    assert await VllmAdapter().lacks(vllm.ask, (await vllm.discover()).discovery) == [NO_EVENTS]


async def test_a_publisher_that_connects_is_bound_for_and_named(scripted: Any) -> None:
    vllm = await scripted({**WHOLE, "/kv_event_sources": {"0": source("tcp://127.0.0.1:5557")}})
    discovery = (await vllm.discover()).discovery
    assert discovery.events is not None
    assert discovery.events.sockets == (EventEndpoint("tcp://127.0.0.1:5557", None, "kv", bind=True),)
    first, second = await VllmAdapter().lacks(vllm.ask, discovery)
    assert first.name == "kv events endpoint"
    assert "connects to tcp://127.0.0.1:5557" in first.cost
    assert second == NO_REPLAY


@pytest.mark.parametrize(
    ("document", "sockets"),
    [
        ({}, None),
        ({"0": source("tcp://*:1", publisher="null")}, None),
        ({"0": source("tcp://*:1", enable_kv_cache_events=False)}, None),
        ({"0": 3}, None),
        ({"1": source("tcp://*:2")}, None),
        ({"1": source("tcp://*:2"), "0": source("tcp://*:1")}, ["tcp://127.0.0.1:1", "tcp://127.0.0.1:2"]),
        (
            {"sources": [{"data_parallel_rank": 0, "endpoint": "tcp://10.0.0.1:41001", "topic": "kv"}]},
            ["tcp://10.0.0.1:41001"],
        ),
        ({"sources": []}, None),
    ],
)
async def test_event_sources_by_rank(scripted: Any, document: Any, sockets: list[str] | None) -> None:
    events = (await (await scripted({**WHOLE, "/kv_event_sources": document})).discover()).discovery.events
    assert (events and [socket.endpoint for socket in events.sockets]) == sockets
    assert events is None or not any(socket.bind for socket in events.sockets)


async def test_a_sleeping_one(scripted: Any) -> None:
    asleep = METRICS.replace('sleep_state="awake"} 1.0', 'sleep_state="awake"} 0.0')
    assert (await (await scripted({**WHOLE, "/metrics": asleep})).discover()).discovery.asleep


async def test_other_weights_under_the_same_name_are_another_revision(scripted: Any) -> None:
    vllm = await scripted({**WHOLE, "/weight_info": {"weight_version": "7"}})
    first = (await vllm.discover()).discovery
    vllm.engine.script["/weight_info"] = {"weight_version": "8"}
    second = (await vllm.discover()).discovery
    assert first.revisions["smollm2"] == "/models/smollm2 weights 7"
    assert second.reloaded(first) == "smollm2"
    assert not first.reloaded(first)


async def test_what_cannot_change_in_a_life_is_asked_once(scripted: Any) -> None:
    vllm = await scripted(WHOLE)
    found = await vllm.discover()
    again = await discover(vllm.ask, WorkerConfig(url=vllm.engine.url), found)
    paths = [asked.path for asked in vllm.engine.asked]
    assert paths[-2:] == ["/v1/models", "/metrics"]
    assert again.discovery.completed(found.discovery).events == found.discovery.events
    vllm.engine.script["/metrics"] = METRICS.replace("1.79600012345e+09", "1.79700012345e+09")
    reborn = await discover(vllm.ask, WorkerConfig(url=vllm.engine.url), found)
    assert reborn.discovery.version == "0.32.0"


async def test_metrics_that_fail_leave_open_what_an_earlier_probe_knew(scripted: Any) -> None:
    vllm = await scripted(WHOLE)
    first = (await vllm.discover()).discovery
    vllm.engine.script["/metrics"] = 500
    vllm.engine.script["/kv_event_sources"] = 500
    second = (await vllm.discover()).discovery
    assert (second.epoch, second.block_size_tokens, second.events) == (None, 0, None)
    completed = second.completed(first)
    assert (completed.epoch, completed.block_size_tokens) == (first.epoch, 32)
    assert completed.events == first.events


CHAT = {"model": "smollm2", "messages": [{"role": "user", "content": "hi"}]}


async def test_chats_are_rendered_by_the_render_route_and_else_tokenized(scripted: Any) -> None:
    vllm = await scripted({**WHOLE, RENDER_PATH: {"token_ids": [1, 2, 3]}, "/tokenize": {"tokens": [4, 5]}})
    request = {**CHAT, "reasoning_effort": "low"}
    assert await VllmAdapter().tokenize(vllm.ask, request) == [1, 2, 3]
    assert vllm.engine.questions(RENDER_PATH) == [request]
    vllm.engine.script[RENDER_PATH] = 403
    assert await VllmAdapter().tokenize(vllm.ask, CHAT) == [4, 5]
    # `/tokenize` would leave the effort out, and tell ids of another prompt.
    assert await VllmAdapter().tokenize(vllm.ask, request) is None
    assert await VllmAdapter().tokenize(vllm.ask, {"model": "smollm2", "prompt": "a"}) == [4, 5]


async def test_a_sidecar_says_what_the_engine_cannot(scripted: Any) -> None:
    transfer = {
        "holder": "w/vllm-a/5/0",
        "addresses": ["tcp://0.0.0.0:7001"],
        "compatibility": "0123456789abcdef" * 2,
        "codecs": ["raw"],
        "bytes_per_token": 46_080,
    }
    sidecar = await scripted({"/server_info": {"transfer": transfer, "block_size": 16, "epoch": 9}})
    vllm = await scripted(WHOLE)
    discovery = (await vllm.discover(sidecar=sidecar.engine.url)).discovery
    assert discovery.transfer is not None
    assert discovery.transfer.addresses == ("tcp://127.0.0.1:7001",)
    # What the engine says itself stands.
    assert (discovery.epoch, discovery.block_size_tokens) == (1_796_000_123_450, 32)
    gone = (await vllm.discover(sidecar="http://127.0.0.1:9")).discovery
    assert gone.transfer is None
    assert "does not answer" in gone.transfer_problem
