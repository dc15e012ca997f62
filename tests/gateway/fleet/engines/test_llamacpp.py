"""llama.cpp's answers, by the README of its server."""

from typing import Any

import pytest

from gateway.fleet.engines.llamacpp import NO_EVENTS, NO_METRICS, LlamaCppAdapter
from gateway.fleet.engines.questions import ProbeError

PROPS = {
    "default_generation_settings": {"n_ctx": 4096, "id": 0},
    "total_slots": 4,
    "model_path": "/models/a.gguf",
    "build_info": "b9000-1234567",
    "is_sleeping": False,
}
WHOLE = {
    "/v1/models": {"data": [{"id": "a", "owned_by": "llamacpp", "meta": {"n_ctx_train": 131072}}]},
    "/props": PROPS,
    "/slots": [{"id": 0, "is_processing": True}, {"id": 1, "is_processing": False}],
    "/metrics": (501, {"error": {"message": "This server does not support metrics endpoint."}}),
}
CHAT = {"model": "a", "messages": [{"role": "user", "content": "hi"}]}


async def test_what_it_says_of_itself(scripted: Any) -> None:
    adapter, discovery = await (await scripted(WHOLE)).discover()
    assert adapter.name == "llamacpp"
    assert not adapter.traits.hits_whole_blocks
    assert (discovery.max_model_len, discovery.capacity_requests) == (4096, 4)
    assert (discovery.version, discovery.revisions) == ("b9000-1234567", {"a": "/models/a.gguf"})
    assert (discovery.events, discovery.epoch, discovery.asleep) == (None, None, False)


async def test_one_that_sleeps_and_another_model_under_the_same_alias(scripted: Any) -> None:
    llama = await scripted(WHOLE)
    first = (await llama.discover()).discovery
    llama.engine.script["/props"] = {**PROPS, "is_sleeping": True, "model_path": "/models/b.gguf"}
    second = (await llama.discover()).discovery
    assert second.asleep
    assert second.reloaded(first) == "a"


async def test_its_queue_by_metrics_or_by_slots(scripted: Any) -> None:
    llama = await scripted(WHOLE)
    load = await LlamaCppAdapter().load(llama.ask)
    assert load is not None
    assert (load.running, load.waiting) == (1, 0)
    llama.engine.script["/metrics"] = "llamacpp:requests_processing 4\nllamacpp:requests_deferred 46\n"
    load = await LlamaCppAdapter().load(llama.ask)
    assert load is not None
    assert (load.running, load.waiting) == (4, 46)
    llama.engine.script |= {"/metrics": 501, "/slots": 501}
    assert await LlamaCppAdapter().load(llama.ask) is None


async def test_what_it_lacks(scripted: Any) -> None:
    llama = await scripted(WHOLE)
    discovery = (await llama.discover()).discovery
    assert list(await LlamaCppAdapter().lacks(llama.ask, discovery)) == [NO_EVENTS, NO_METRICS]
    llama.engine.script["/metrics"] = "llamacpp:requests_processing 0\n"
    assert list(await LlamaCppAdapter().lacks(llama.ask, discovery)) == [NO_EVENTS]


async def test_a_chat_becomes_text_and_then_tokens(scripted: Any) -> None:
    script = {**WHOLE, "/apply-template": {"prompt": "<|user|>hi"}, "/tokenize": {"tokens": [1, 2]}}
    llama = await scripted(script)
    assert await LlamaCppAdapter().tokenize(llama.ask, CHAT) == [1, 2]
    assert llama.engine.questions("/apply-template") == [CHAT]
    assert llama.engine.questions("/tokenize") == [
        {"content": "<|user|>hi", "add_special": True, "parse_special": True}
    ]
    llama.engine.script["/apply-template"] = 404
    assert await LlamaCppAdapter().tokenize(llama.ask, CHAT) is None
    llama.engine.script["/apply-template"] = 500
    with pytest.raises(ProbeError, match="/apply-template answers 500"):
        await LlamaCppAdapter().tokenize(llama.ask, CHAT)
