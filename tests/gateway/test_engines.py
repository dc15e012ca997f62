"""What different engines are sent of one and the same request."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

import pytest

from cachecore.prompts.plain import PlainRenderer
from gateway.config import GatewayConfig, PrioritiesConfig, PromptsConfig, WorkerConfig
from gateway.edge.http1 import RequestHead
from gateway.edge.server import Inbound
from gateway.fleet import parity
from gateway.fleet.worker import Parity, WorkerRecord
from gateway.journey import Journey
from gateway.server import Gateway
from tests.gateway.fleet.scripted_engine import ScriptedEngine, running

CHAT = {"model": "m", "messages": [{"role": "user", "content": "Hello, who are you?"}], "priority": -5}
TEXT = {"model": "m", "prompt": "Once upon a time", "priority": 7}


def tokens_of(document: Any) -> list[int]:
    return parity.rendered_tokens(PlainRenderer(), document)


def script(owner: str, **further: Any) -> dict[str, Any]:
    return {
        "/health": {},
        "/v1/models": {"data": [{"id": "m", "owned_by": owner, "root": "r"}]},
        "/metrics": "process_start_time_seconds 1000\n",
        "/tokenize": lambda document: {"tokens": tokens_of(document)},
        **further,
    }


Start = Callable[..., Coroutine[Any, Any, tuple[Gateway, WorkerRecord]]]


@pytest.fixture
async def start() -> AsyncIterator[Start]:
    """A gateway that serves nobody, with one scripted worker."""
    ending: list[Any] = []

    async def begin(engine_script: dict[str, Any], renders: bool = True, **config: Any) -> tuple[Gateway, WorkerRecord]:
        context = running(ScriptedEngine(engine_script))
        engine = await context.__aenter__()
        gateway = Gateway(GatewayConfig(**config))
        gateway.fleet._renderers = {"m": PlainRenderer()} if renders else {}
        record = await gateway.fleet.register(WorkerConfig(url=engine.url, name="w"))
        ending.extend((gateway.fleet.stop, lambda: context.__aexit__(None, None, None)))
        async with asyncio.timeout(10):
            while not record.healthy:
                await asyncio.sleep(0.01)
        return gateway, record

    yield begin
    for end in ending:
        await end()


async def begin_journey(gateway: Gateway, body: dict[str, Any]) -> Journey:
    path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    head = RequestHead(b"POST", path.encode(), [], 0, True, False, False, {})
    begun = gateway.pipeline.begin(Inbound(head, path, json.dumps(body).encode(), "127.0.0.1"))
    return begun if isinstance(begun, Journey) else await begun


async def sent(gateway: Gateway, body: dict[str, Any]) -> tuple[bytes, dict[str, Any]]:
    """The head and the body that a worker gets."""
    whole = b"".join((await begin_journey(gateway, body)).request_parts)
    start, _, content = whole.partition(b"\r\n\r\n")
    return start, json.loads(content)


async def test_priorities_are_taken_out_unless_they_are_wanted(start: Start) -> None:
    gateway, _ = await start(script("vllm"))
    for body in (CHAT, TEXT):
        _, got = await sent(gateway, body)
        assert got.pop("cache_salt").startswith("rw1.")
        assert got == {key: value for key, value in body.items() if key != "priority"}


@pytest.mark.parametrize(("stated", "told"), [(-5, 0), (7, 7), (999, 50), ("high", 0)])
async def test_priorities_are_clamped(start: Start, stated: Any, told: int) -> None:
    gateway, _ = await start(script("vllm"), priorities=PrioritiesConfig(forwarded=True, lowest=0, highest=50))
    assert (await sent(gateway, {**TEXT, "priority": stated}))[1]["priority"] == told
    assert "priority" not in (await sent(gateway, {"model": "m", "prompt": "a"}))[1]


async def test_engines_that_do_not_know_salts_and_priorities_get_none(start: Start) -> None:
    gateway, _ = await start(script("me"), priorities=PrioritiesConfig(forwarded=True))
    assert (await sent(gateway, CHAT))[1] == {"model": "m", "messages": CHAT["messages"]}


FORWARDED = PromptsConfig(token_ids_forwarded=True)


async def test_token_ids_take_the_place_of_text_where_parity_is_proven(start: Start) -> None:
    gateway, record = await start(script("vllm"), prompts=FORWARDED)
    assert record.parity is Parity.PROVEN
    _, got = await sent(gateway, TEXT)
    assert got["prompt"] == tokens_of(TEXT)
    _, got = await sent(gateway, {**CHAT, "kv_transfer_params": {"prompt_token_ids": [1], "mine": 1}})
    assert got["kv_transfer_params"] == {"prompt_token_ids": tokens_of(CHAT)}
    assert got["messages"] == CHAT["messages"]


@pytest.mark.parametrize(
    "body",
    [
        {**TEXT, "echo": True},
        {**TEXT, "prompt": [1, 2, 3]},
        {**TEXT, "prompt": ["a", "b"]},
        {**TEXT, "truncate_prompt_tokens": 3},
        {**CHAT, "messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}]},
        {**CHAT, "add_special_tokens": True},
    ],
)
async def test_text_stays_text_where_it_is_not_known_to_the_end(start: Start, body: dict[str, Any]) -> None:
    gateway, _ = await start(script("vllm"), prompts=FORWARDED)
    _, got = await sent(gateway, body)
    del got["cache_salt"]
    assert got == {key: value for key, value in body.items() if key != "priority"}


async def test_nothing_is_forwarded_to_engines_that_are_unproven_or_take_none(start: Start) -> None:
    gateway, record = await start(script("vllm", **{"/tokenize": 404}), prompts=FORWARDED)
    assert record.parity is Parity.UNVERIFIED
    assert (await sent(gateway, TEXT))[1]["prompt"] == TEXT["prompt"]
    gateway, _ = await start(script("sglang"), prompts=FORWARDED)
    assert (await sent(gateway, TEXT))[1]["prompt"] == tokens_of(TEXT)
    assert "kv_transfer_params" not in (await sent(gateway, CHAT))[1]


async def test_the_rank_that_was_decided_for_is_named_where_there_are_several(start: Start) -> None:
    sources = {"sources": [{"data_parallel_rank": r, "endpoint": f"tcp://127.0.0.1:{r + 1}"} for r in range(2)]}
    gateway, record = await start(script("vllm", **{"/kv_event_sources": sources}))
    assert len(record.holders) == 2
    heads = [(await sent(gateway, TEXT))[0] for _ in range(8)]
    ranks = {line for head in heads for line in head.split(b"\r\n") if line.startswith(b"x-data-parallel-rank")}
    assert ranks <= {b"x-data-parallel-rank: 0", b"x-data-parallel-rank: 1"}
    assert ranks
    gateway, _ = await start(script("vllm"))
    assert b"x-data-parallel-rank" not in (await sent(gateway, TEXT))[0]


# Prompts that only their engine can render


def rendered(document: Any) -> Any:
    """As an engine that renders otherwise than any template of ours."""
    return {"token_ids": [7, *tokens_of({**document, "messages": document["messages"] * 3})]}


RENDERS = {"/v1/chat/completions/render": rendered}


async def test_a_prompt_is_named_by_what_its_engine_renders(start: Start) -> None:
    gateway, record = await start(script("vllm", **RENDERS), renders=False)
    assert (record.parity, record.tokenizes) == (Parity.PROVEN, True)
    body = {**CHAT, "reasoning_effort": "low"}
    count = len(rendered(body)["token_ids"])
    receipts = [(await begin_journey(gateway, body))._receipt for _ in range(2)]
    assert [receipt.query.prompt_tokens for receipt in receipts] == [count, count]
    assert [receipt.decision.worker.matched_tokens for receipt in receipts][1] == (count - 1) // 16 * 16
    assert gateway.prompts.statistics()["remote"]["asked"] == 1


async def test_a_prompt_whose_engine_is_slow_to_render_is_placed_by_load(start: Start) -> None:
    late = {"/v1/chat/completions/render": 500, "/tokenize": lambda document: {"tokens": tokens_of(document)}}
    gateway, _ = await start(script("vllm"), renders=False, prompts=PromptsConfig(remote_seconds_max=0.000001))
    receipt = (await begin_journey(gateway, CHAT))._receipt
    assert receipt.decision.worker.matched_tokens == 0
    assert gateway.prompts.statistics()["remote"]["late"] == 1
    gateway, _ = await start(script("vllm", **late), renders=False)
    assert (await begin_journey(gateway, CHAT))._receipt.decision.worker.name == "w"


async def test_images_leave_such_a_prompt_without_a_name(start: Start) -> None:
    gateway, _ = await start(script("vllm", **RENDERS), renders=False)
    image = {"type": "image_url", "image_url": {"url": "data:,"}}
    journey = await begin_journey(gateway, {**CHAT, "messages": [{"role": "user", "content": [image]}]})
    assert (journey.named.complete, journey.named.chain) == (False, b"")
    assert gateway.prompts.statistics()["remote"]["asked"] == 0
