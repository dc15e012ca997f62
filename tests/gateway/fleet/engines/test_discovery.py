"""Which engine a worker is taken for, and how leniently answers are read."""

from typing import Any

import httpx
import pytest

from gateway.fleet.engines.contract import EventEndpoint, EventEndpoints
from gateway.fleet.engines.discovery import ADAPTERS
from gateway.fleet.engines.questions import Metrics, ProbeError, Questions

BARE = {"data": [{"id": "m"}]}


def owned(owner: str) -> Any:
    return {"data": [{"id": "m", "owned_by": owner}]}


@pytest.mark.parametrize(
    ("script", "server", "engine"),
    [
        ({"/v1/models": owned("vllm")}, "uvicorn", "vllm"),
        ({"/v1/models": owned("sglang")}, "", "sglang"),
        ({"/v1/models": owned("tensorrt_llm")}, "uvicorn", "trtllm"),
        ({"/v1/models": owned("llamacpp")}, "", "llamacpp"),
        ({"/v1/models": owned("ropeway")}, "", "ropeway"),
        ({"/v1/models": owned("system")}, "llama.cpp", "llamacpp"),
        ({"/v1/models": BARE, "/server_info": {"engine": "ropeway-simulated"}}, "", "ropeway"),
        ({"/v1/models": BARE, "/server_info": {"page_size": 1, "tp_size": 8}}, "", "sglang"),
        ({"/v1/models": BARE, "/props": {"default_generation_settings": {}}}, "", "llamacpp"),
        ({"/v1/models": owned("me"), "/metrics": 'vllm:cache_config_info{block_size="16"} 1.0\n'}, "", "vllm"),
        ({"/v1/models": BARE}, "", "openai"),
        ({"/v1/models": BARE, "/server_info": "<html>", "/metrics": 500}, "", "openai"),
    ],
)
async def test_which_engine_it_is(scripted: Any, script: Any, server: str, engine: str) -> None:
    assert (await (await scripted(script, server)).discover()).adapter is ADAPTERS[engine]


async def test_what_is_configured_is_not_found_out(scripted: Any) -> None:
    worker = await scripted({"/v1/models": owned("vllm")})
    assert (await worker.discover(engine="openai")).adapter is ADAPTERS["openai"]


async def test_configured_events_take_the_place_of_what_it_says(scripted: Any) -> None:
    events = {"endpoint": "tcp://127.0.0.1:6001", "topic": "t", "bind": True}
    info = {"epoch": 1, "kv_events": {"endpoint": "tcp://*:5557", "dp_size": 2, "block_size": 16}}
    worker = await scripted({"/v1/models": owned("ropeway"), "/server_info": info})
    from gateway.config import EventsConfig

    found = (await worker.discover(events=EventsConfig(**events))).discovery.events
    assert found == EventEndpoints(
        (EventEndpoint("tcp://127.0.0.1:6001", None, "t", True), EventEndpoint("tcp://127.0.0.1:6002", None, "t", True))
    )


@pytest.mark.parametrize("answer", [404, (200, "{"), {"data": []}, {"data": [{"name": "m"}]}, {"data": 3}, [1]])
async def test_a_server_without_models_is_no_worker(scripted: Any, answer: Any) -> None:
    worker = await scripted({"/v1/models": answer})
    with pytest.raises(ProbeError, match="/v1/models"):
        await worker.discover()


async def test_a_generic_server_is_known_by_its_models_and_its_start(scripted: Any) -> None:
    script = {
        "/v1/models": {"data": [{"id": "m", "max_model_len": 100}, {"id": "n", "max_model_len": 50}]},
        "/metrics": "process_start_time_seconds 1000.5\n",
    }
    discovery = (await (await scripted(script)).discover()).discovery
    assert (discovery.epoch, discovery.max_model_len) == (1_000_500, 50)
    assert await ADAPTERS["openai"].load((await scripted(script)).ask) is None


async def test_health(scripted: Any) -> None:
    adapter = ADAPTERS["openai"]
    await adapter.health((await scripted({"/health": {}})).ask)
    await adapter.health((await scripted({"/v1/models": BARE})).ask)
    with pytest.raises(ProbeError, match="/health answers 503"):
        await adapter.health((await scripted({"/health": 503})).ask)
    async with httpx.AsyncClient(trust_env=False) as http:
        with pytest.raises(ProbeError, match="/health: ConnectError"):
            await adapter.health(Questions(http, "http://127.0.0.1:9"))


METRICS = """# TYPE a gauge
a{engine="0",name="x \\"y\\""} 1.5
a{engine="1"} 2
a_total 7
b{} NaN
c{oops
d 1e3 1700000000
"""


def test_samples_are_found_by_their_whole_names() -> None:
    metrics = Metrics(METRICS)
    assert metrics.total("a") == 3.5
    assert metrics.total("a", "a_total") == 10.5
    assert metrics.total("d") == 1000
    assert metrics.total("c") is None
    assert metrics.labels("a")[0] == {"engine": "0", "name": 'x \\"y\\"'}
    assert metrics.labelled("a", "engine", "1") == 2
    assert metrics.labelled("a", "engine", "9") is None


@pytest.mark.parametrize(
    ("url", "endpoint", "reached"),
    [
        ("http://10.0.0.7:8000", "tcp://*:5557", "tcp://10.0.0.7:5557"),
        ("http://10.0.0.7:8000", "tcp://0.0.0.0:5557", "tcp://10.0.0.7:5557"),
        ("http://[fd00::7]:8000", "tcp://[::]:5557", "tcp://[fd00::7]:5557"),
        ("http://10.0.0.7:8000", "tcp://10.0.0.9:5557", "tcp://10.0.0.9:5557"),
        ("http://10.0.0.7:8000", "ipc:///tmp/events", "ipc:///tmp/events"),
    ],
)
def test_wildcards_are_reached_at_the_workers_host(url: str, endpoint: str, reached: str) -> None:
    assert Questions(httpx.AsyncClient(), url).reachable(endpoint) == reached
