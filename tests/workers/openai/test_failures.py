"""Engines that refuse or fail, before the first token and after it."""

import json
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest

from cachecore.prompts.plain import PlainRenderer
from workers.engine import EngineError, EngineInfo, EngineMetrics, Generation, StepOutput
from workers.openai.app import build_app
from workers.openai.server import WorkerServer

EOS = 0


class ScriptedEngine:
    """Yields what it is given and raises what it is given."""

    def __init__(self, script: Sequence[StepOutput | Exception]) -> None:
        self.info = EngineInfo("scripted", 1, 16, 100, 1000)
        self.renderer = PlainRenderer()
        self.metrics = EngineMetrics()
        self.seen: list[Generation] = []
        self.closed = 0
        self._script = script

    async def start(self) -> None: ...

    async def stop(self) -> None: ...

    async def reset_prefix_cache(self) -> None:
        raise EngineError("not now", 503)

    async def cached_blocks(self) -> Mapping[int, int]:
        raise EngineError("not now", 503)

    def stop_token_ids(self) -> Sequence[int]:
        return (EOS,)

    async def generate(self, generation: Generation) -> AsyncIterator[StepOutput]:
        self.seen.append(generation)
        try:
            for item in self._script:
                if isinstance(item, Exception):
                    raise item
                yield item
        finally:
            self.closed += 1


@asynccontextmanager
async def serving(engine: ScriptedEngine) -> AsyncIterator[httpx.AsyncClient]:
    server = WorkerServer(build_app(engine))
    await server.start()
    try:
        async with httpx.AsyncClient(base_url=server.url) as http:
            yield http
    finally:
        await server.stop()


def said(text: str, finish_reason: str | None = None) -> StepOutput:
    return StepOutput(tuple(text.encode()), finish_reason=finish_reason)


@pytest.mark.parametrize("body", [{}, {"stream": True}, {"n": 2}, {"n": 2, "stream": True}])
async def test_a_refusal_keeps_its_status(body: dict[str, Any]) -> None:
    engine = ScriptedEngine([EngineError("no room", 429)])
    async with serving(engine) as http:
        answer = await http.post("/v1/completions", json={"prompt": "x", **body})
    assert (answer.status_code, answer.json()["error"]["message"]) == (429, "no room")
    assert engine.closed == len(engine.seen)


async def test_an_unforeseen_failure_tells_nothing(caplog: pytest.LogCaptureFixture) -> None:
    async with serving(ScriptedEngine([said("a"), RuntimeError("a secret")])) as http:
        answer = await http.post("/v1/completions", json={"prompt": "x"})
    assert answer.status_code == 500
    assert answer.json()["error"] == {"message": "internal error", "type": "server_error", "param": None, "code": None}
    assert "a secret" in caplog.text


async def test_a_failure_in_mid_stream_is_an_event() -> None:
    async with serving(ScriptedEngine([said("a"), EngineError("lost", 500)])) as http:
        answer = await http.post("/v1/completions", json={"prompt": "x", "stream": True})
    events = [line.removeprefix("data: ") for line in answer.text.splitlines() if line]
    assert answer.status_code == 200
    assert json.loads(events[0])["choices"][0]["text"] == "a"
    assert json.loads(events[1])["error"]["message"] == "lost"
    assert events[2] == "[DONE]"


async def test_an_end_token_is_counted_and_not_shown() -> None:
    async with serving(ScriptedEngine([said("hi"), StepOutput((EOS,), finish_reason="stop")])) as http:
        choice = (await http.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": "x"}]})).json()
    assert choice["choices"][0]["message"]["content"] == "hi"
    assert choice["choices"][0]["finish_reason"] == "stop"
    assert choice["choices"][0]["stop_reason"] is None
    assert choice["usage"]["completion_tokens"] == 3


async def test_half_a_character_at_the_end_is_not_lost() -> None:
    script = [StepOutput(tuple("é".encode()[:1])), StepOutput((), finish_reason="length")]
    async with serving(ScriptedEngine(script)) as http:
        answer = (await http.post("/v1/completions", json={"prompt": "x"})).json()
    assert answer["choices"][0]["text"] == "\ufffd"


async def test_a_stop_string_closes_the_generation() -> None:
    engine = ScriptedEngine([said("one S"), said("TOP two"), RuntimeError("must not be reached")])
    async with serving(engine) as http:
        answer = (await http.post("/v1/completions", json={"prompt": "x", "stop": ["STOP"]})).json()
    assert answer["choices"][0]["text"] == "one "
    assert engine.closed == 1


async def test_every_parameter_reaches_the_engine() -> None:
    engine = ScriptedEngine([said("a", "length")])
    body = {
        "prompt": [7, 8],
        "max_tokens": 9,
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 4,
        "min_p": 0.1,
        "seed": 11,
        "n": 2,
        "logprobs": 3,
        "prompt_logprobs": 2,
        "ignore_eos": True,
        "stop_token_ids": [5],
        "priority": -2,
        "cache_salt": "salt",
        "kv_transfer_params": {"a": [1, {"b": None}]},
    }
    async with serving(engine) as http:
        assert (await http.post("/v1/completions", json=body)).status_code == 200
    first, second = sorted(engine.seen, key=lambda generation: generation.request_id)
    assert list(first.token_ids) == [7, 8]
    sampling = first.sampling
    assert (sampling.max_tokens, sampling.temperature, sampling.top_p, sampling.top_k) == (9, 0.5, 0.9, 4)
    assert (sampling.min_p, sampling.seed, sampling.logprobs, sampling.prompt_logprobs) == (0.1, 11, 3, 2)
    assert (sampling.ignore_eos, sampling.stop_token_ids) == (True, (5,))
    assert (first.priority, first.cache_salt, first.kv_transfer_params) == (-2, "salt", {"a": [1, {"b": None}]})
    assert second.sampling.seed == 12
    assert first.request_id != second.request_id


async def test_defaults_are_openais() -> None:
    engine = ScriptedEngine([said("a", "length")])
    chat = {"messages": [{"role": "user", "content": "x"}]}
    async with serving(engine) as http:
        await http.post("/v1/completions", json={"prompt": "x"})
        answer = await http.post("/v1/chat/completions", json=chat)
        await http.post("/v1/chat/completions", json={**chat, "max_completion_tokens": 5})
    prompt_tokens = answer.json()["usage"]["prompt_tokens"]
    assert [one.sampling.max_tokens for one in engine.seen] == [16, 1000 - prompt_tokens, 5]
    assert engine.seen[0].sampling.temperature == 1.0
    assert engine.seen[0].sampling.logprobs is None


async def test_a_refused_reset_says_so() -> None:
    async with serving(ScriptedEngine([])) as http:
        assert (await http.post("/reset_prefix_cache")).status_code == 503
