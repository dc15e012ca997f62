"""What a gateway forgets of an engine whose process goes on: reloads, sleep, and questions that were left open."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import pytest

from cachecore.blocks import Chain, pack_tokens
from cachecore.events import BlockStored, EventBatch
from cachecore.holders import Tier
from cachecore.index.contract import NO_MATCH, Match, Stored
from cachecore.index.memory import MemoryIndex
from cachecore.prompts.plain import PlainRenderer
from cachecore.scope import DEFAULT_TENANT, IdentityScope, Keyring, Naming
from gateway.config import ProbesConfig, WorkerConfig
from gateway.fleet import parity
from gateway.fleet.engines.discovery import ADAPTERS
from gateway.fleet.engines.vllm import NO_EVENTS
from gateway.fleet.knowledge import Knowledge
from gateway.fleet.registry import Fleet
from gateway.fleet.streams import Intakes, OwnStreams
from gateway.fleet.worker import ModelPool, Parity, WorkerRecord
from tests.gateway.fleet.scripted_engine import ScriptedEngine
from workers.publisher import EventPublisher

KEYRING = Keyring({0: bytes(32)}, 0)
NAMING = Naming.of(IdentityScope("m", KEYRING.key_id(DEFAULT_TENANT), 16), KEYRING)
CHAIN = Chain(bytes(16))
METRICS = """process_start_time_seconds 1000.5
vllm:cache_config_info{block_size="16",enable_prefix_caching="True"} 1.0
vllm:engine_sleep_state{sleep_state="awake"} 1.0
"""
MODEL = {"id": "m", "owned_by": "vllm", "root": "/models/one", "max_model_len": 4096}
ADAPTER = {"id": "sql", "owned_by": "vllm", "root": "/adapters/one", "parent": "m"}


def tokenize(document: Any) -> Any:
    return {"tokens": parity.rendered_tokens(PlainRenderer(), document)}


def script(**changes: Any) -> dict[str, Any]:
    paths = {key.replace("__", "/"): value for key, value in changes.items()}
    return {
        "/health": {},
        "/v1/models": {"data": [MODEL, ADAPTER]},
        "/metrics": METRICS,
        "/tokenize": tokenize,
        "/v1/chat/completions/render": 403,
        **paths,
    }


@pytest.fixture
def publisher() -> Iterator[EventPublisher]:
    publisher = EventPublisher()
    yield publisher
    publisher.close()


@asynccontextmanager
async def fleet_of(url: str) -> AsyncIterator[tuple[Fleet, Knowledge, WorkerRecord]]:
    knowledge = Knowledge(MemoryIndex())
    streams = OwnStreams(Intakes(knowledge.index, lambda *_: NAMING))
    probes = ProbesConfig(interval_seconds=0.03, timeout_seconds=5.0)
    fleet = Fleet(probes, {"m": PlainRenderer()}, knowledge, streams)
    record = await fleet.register(WorkerConfig(url=url, name="w"))
    try:
        await until(lambda: record.healthy)
        yield fleet, knowledge, record
    finally:
        await fleet.stop()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.005)


def remember(knowledge: Knowledge) -> Callable[[], bool]:
    """Let the gateway guess that the worker holds a block. Returns whether it still does."""
    knowledge.history.record(("w", 0), CHAIN)
    return lambda: ("w", 0) in knowledge.history.depths(CHAIN)


def models(**changes: str) -> Any:
    return {"data": [{**MODEL, "root": changes.get("m", MODEL["root"])}, {**ADAPTER, "root": changes.get("sql", "")}]}


async def test_who_has_let_go_of_its_port_is_not_taken_for_who_has_it_now() -> None:
    """A process that cannot end answers on as long as a connection is open; it would be found well for ever."""
    old, new = ScriptedEngine(script()), ScriptedEngine(script(__metrics=METRICS.replace("1000.5", "2000.5")))
    old.keeps_alive = new.keeps_alive = True
    async with AsyncExitStack() as stack:
        stack.push_async_callback(until, lambda: not old.connections and not new.connections)
        listening = await asyncio.start_server(old.serve, "127.0.0.1", 0)
        port = listening.sockets[0].getsockname()[1]
        _, _, record = await stack.enter_async_context(fleet_of(f"http://127.0.0.1:{port}"))
        epoch = record.epoch
        listening.close()
        stack.callback((await asyncio.start_server(new.serve, "127.0.0.1", port)).close)
        await until(lambda: record.epoch != epoch)
        assert record.healthy
        await asyncio.sleep(0.1)
        asked = len(old.asked)
        await until(lambda: len(new.asked) > 50)
        assert len(old.asked) == asked


@pytest.mark.parametrize("changed", ["m", "sql"])
async def test_what_was_loaded_in_place_of_another_under_its_name_begins_with_nothing(
    scripted: Any, changed: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "ropeway.fleet")
    vllm = await scripted(script())
    async with fleet_of(vllm.engine.url) as (_, knowledge, record):
        remembered, epoch = remember(knowledge), record.epoch
        assert remembered()
        first = {"m": "/models/one", "sql": "/adapters/one"}
        vllm.engine.script["/v1/models"] = models(**{**first, changed: "/two"})
        await until(lambda: not remembered())
        assert f"something else is loaded as {changed}: /two" in caplog.text
        assert (record.epoch, record.healthy) == (epoch, True)


async def test_parity_is_proven_anew_with_other_weights(scripted: Any) -> None:
    vllm = await scripted(script())
    async with fleet_of(vllm.engine.url) as (_, _, record):
        assert record.parity is Parity.PROVEN
        vllm.engine.script["/tokenize"] = {"tokens": [1, 2, 3]}
        vllm.engine.script["/v1/models"] = models(m="/models/two", sql="/adapters/one")
        await until(lambda: record.parity is Parity.FAILED)
        assert "is 60 here and 1 at the worker" in record.parity_reason


async def test_a_sleeping_engine_gets_nothing_and_wakes_with_nothing(scripted: Any) -> None:
    vllm = await scripted(script())
    async with fleet_of(vllm.engine.url) as (_, knowledge, record):
        remembered, epoch = remember(knowledge), record.epoch
        vllm.engine.script["/metrics"] = METRICS.replace('"awake"} 1.0', '"awake"} 0.0')
        await until(lambda: not record.healthy)
        assert (record.reason, remembered()) == ("asleep", False)
        knowledge.history.record(("w", 0), CHAIN)
        vllm.engine.script["/metrics"] = METRICS
        await until(lambda: record.healthy)
        assert not remembered()
        assert (record.epoch, record.reason) == (epoch, "")


async def test_an_engine_that_wakes_by_itself_stays_in_service(scripted: Any) -> None:
    props = {"default_generation_settings": {"n_ctx": 64}, "is_sleeping": False, "model_path": "/a.gguf"}
    llama = await scripted(
        {"/health": {}, "/v1/models": {"data": [{"id": "m", "owned_by": "llamacpp"}]}, "/props": props}
    )
    async with fleet_of(llama.engine.url) as (_, knowledge, record):
        remembered = remember(knowledge)
        llama.engine.script["/props"] = {**props, "is_sleeping": True}
        await until(lambda: not remembered())
        assert record.healthy


async def test_another_process_is_another_life(scripted: Any) -> None:
    vllm = await scripted(script())
    async with fleet_of(vllm.engine.url) as (_, knowledge, record):
        remembered = remember(knowledge)
        vllm.engine.script["/metrics"] = METRICS.replace("1000.5", "2000.5")
        await until(lambda: record.epoch == 2_000_500)
        assert not remembered()


async def test_metrics_that_are_left_unanswered_end_no_life(scripted: Any) -> None:
    vllm = await scripted(script())
    async with fleet_of(vllm.engine.url) as (_, knowledge, record):
        remembered, epoch = remember(knowledge), record.epoch
        vllm.engine.script["/metrics"] = 500
        asked = len(vllm.engine.questions("/v1/models"))
        await until(lambda: len(vllm.engine.questions("/v1/models")) > asked + 4)
        assert (record.epoch, record.block_size_tokens, record.healthy) == (epoch, 16, True)
        assert remembered()


async def test_what_was_announced_before_a_reload_is_not_believed_again(
    scripted: Any, publisher: EventPublisher
) -> None:
    """The publisher goes on, and its replay still tells of the cache that was emptied."""
    source = {"data_parallel_rank": 0, "endpoint": publisher.endpoint, "replay_endpoint": publisher.replay_endpoint}
    vllm = await scripted(script(__kv_event_sources={"sources": [source]}))
    async with fleet_of(vllm.engine.url) as (_, knowledge, record):

        def held() -> int:
            return sum(1 for _ in knowledge.index.holdings(record.holder(), Tier.L0))

        def announce(handle: int) -> None:
            block = BlockStored((handle,), None, [handle] * 16, 16)
            publisher.publish(EventBatch(time.time(), (block,), 0))

        announce(1)
        await until(lambda: held() == 1)
        vllm.engine.script["/v1/models"] = models(m="/models/two", sql="/adapters/one")
        await until(lambda: held() == 0)
        # Its replay has been read once more when what comes after it is there.
        announce(2)
        await until(lambda: held() == 1)
        assert next(iter(knowledge.index.holdings(record.holder(), Tier.L0))) == name_of(2)


def name_of(token: int) -> bytes:
    return bytes(NAMING.hasher.chain(NAMING.root, pack_tokens([token] * 16)))


async def test_a_worker_that_was_too_busy_to_tokenize_is_asked_again(scripted: Any) -> None:
    vllm = await scripted(script(__tokenize=500))
    async with fleet_of(vllm.engine.url) as (_, _, record):
        assert (record.parity, record.tokenizes) == (Parity.UNVERIFIED, False)
        assert "/tokenize answers 500" in record.parity_reason
        vllm.engine.script["/tokenize"] = tokenize
        await until(lambda: record.parity is Parity.PROVEN)
        assert record.tokenizes


async def test_registration_says_what_an_engine_lacks(scripted: Any, caplog: pytest.LogCaptureFixture) -> None:
    vllm = await scripted(script())
    async with fleet_of(vllm.engine.url) as (_, _, record):
        await until(lambda: bool(record.lacks))
        assert NO_EVENTS in record.lacks
        assert "worker w lacks --kv-events-config: it says nothing of its cache" in caplog.text


def test_an_engine_of_larger_blocks_hits_whole_ones_of_its_own() -> None:
    """Prompts are named by 16 tokens. A whole hit of 192 leaves 176 to one engine, 128 to another, and 191 to one that
    has no blocks; of 112 that a longer prompt shares, the second has 64."""
    knowledge = Knowledge(MemoryIndex())
    fine, coarse, single = (
        WorkerRecord.of(WorkerConfig(url=f"http://127.0.0.1:{port}", name=f"w{port}", block_size_tokens=size))
        for port, size in ((1, 16), (2, 64), (3, 0))
    )
    single.traits = ADAPTERS["llamacpp"].traits
    pool = ModelPool("m", workers=[fine])
    pool.refresh_block_size()
    assert not pool.caps_differ
    pool.workers += [coarse, single]
    pool.refresh_block_size()
    assert (pool.block_size_tokens, pool.caps_differ) == (16, True)
    chain = NAMING.hasher.chain(NAMING.root, pack_tokens(list(range(192))))
    for record in pool.workers:
        record.holders = (record.holder(),)
        knowledge.history.record((record.name, 0), chain)
    snapshot = knowledge.snapshot(pool, pool.workers, NO_MATCH, chain, 192, 0.0, True)
    assert [view.matched_tokens for view in snapshot.workers] == [176, 128, 191]
    longer = NAMING.hasher.chain(NAMING.root, pack_tokens([*range(112), *range(1000, 1200)]))
    snapshot = knowledge.snapshot(pool, pool.workers, NO_MATCH, longer, 312, 0.0, True)
    assert [view.matched_tokens for view in snapshot.workers] == [112, 64, 112]


def test_what_an_engine_of_larger_blocks_is_known_to_have_is_whole_ones_of_its_own() -> None:
    index = MemoryIndex()
    knowledge = Knowledge(index)
    fine, coarse = (
        WorkerRecord.of(WorkerConfig(url=f"http://127.0.0.1:{size}", name=f"w{size}", block_size_tokens=size))
        for size in (16, 64)
    )
    pool = ModelPool("m", workers=[fine, coarse])
    pool.refresh_block_size()
    chain = NAMING.hasher.chain(NAMING.root, pack_tokens(list(range(192))))
    for record in pool.workers:
        record.holders = (record.holder(),)
        record.trust.follow(followed=True)
        index.apply(record.holder(), 1, [Stored(NAMING.root, chain)])
    longer = NAMING.hasher.chain(NAMING.root, pack_tokens([*range(112), *range(1000, 1200)]))
    match = index.match(longer)
    assert isinstance(match, Match)
    snapshot = knowledge.snapshot(pool, pool.workers, match, longer, 312, 0.0, False)
    assert [view.confirmed_tokens for view in snapshot.workers] == [112, 64]
    assert [view.matched_tokens for view in snapshot.workers] == [112, 64]
    assert [view.tier_tokens for view in snapshot.workers] == [(112,) * 3, (64,) * 3]
    assert [knowledge.confirmed_tokens(match, record, 0, 312, 16) for record in pool.workers] == [112, 64]
