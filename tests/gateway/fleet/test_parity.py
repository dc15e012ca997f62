"""Proof by probe prompts, and the window of answers' counts."""

from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from cachecore.prompts.contract import PromptError, Rendered
from cachecore.prompts.plain import PlainRenderer
from gateway.config import WorkerConfig
from gateway.fleet import parity
from gateway.fleet.engines.generic import GenericAdapter
from gateway.fleet.engines.questions import Questions
from gateway.fleet.worker import ModelPool, Parity, WorkerRecord


class Engine(GenericAdapter):
    """Tokenizes as a renderer does, but for what a test changes."""

    def __init__(self, change: Any = None) -> None:
        self._change = change or (lambda request, tokens: tokens)

    async def tokenize(self, ask: Questions, request: Mapping[str, Any]) -> Sequence[int] | None:
        return self._change(request, parity.rendered_tokens(PlainRenderer(), request))  # type: ignore[no-any-return]


ASK: Any = None


async def verdict(change: Any = None, pool: ModelPool | None = None) -> parity.Verdict:
    return await parity.prove(Engine(change), ASK, pool or ModelPool("m", PlainRenderer()))


async def test_equal_tokens_are_proof() -> None:
    assert await verdict() == (Parity.PROVEN, "", True)


async def test_tools_that_are_left_out_are_noticed() -> None:
    def without_tools(request: Mapping[str, Any], tokens: list[int]) -> list[int]:
        kept = {key: value for key, value in request.items() if key != "tools"}
        return parity.rendered_tokens(PlainRenderer(), kept)

    found = await verdict(without_tools)
    assert found.parity is Parity.FAILED
    assert "of a probe prompt is" in found.reason


async def test_what_surrounds_a_plain_prompt_is_noticed() -> None:
    found = await verdict(lambda request, tokens: tokens if "messages" in request else [1, *tokens])
    assert found.parity is Parity.FAILED


async def test_truncation_is_noticed() -> None:
    found = await verdict(lambda _, tokens: tokens[:30])
    assert (found.parity, found.reason.endswith("tokens here and 30 at the worker")) == (Parity.FAILED, True)


async def test_an_engine_that_renders_no_chats_is_not_proven() -> None:
    found = await verdict(lambda request, tokens: None if "messages" in request else tokens)
    assert found == (Parity.UNVERIFIED, "it does not render chats for us", False)
    assert await verdict(lambda *_: None) == (Parity.UNVERIFIED, "no /tokenize", False)


async def test_a_prompt_that_both_refuse_says_nothing() -> None:
    class Strict(PlainRenderer):
        def chat(self, request: Mapping[str, Any]) -> Rendered:
            if any(message["role"] == "system" for message in request["messages"]):
                raise PromptError("System role not supported")
            return super().chat(request)

    def refuse_system(request: Mapping[str, Any], tokens: list[int]) -> list[int] | None:
        return None if any(m["role"] == "system" for m in request.get("messages", ())) else tokens

    assert (await verdict(refuse_system, ModelPool("m", Strict()))).parity is Parity.PROVEN
    found = await verdict(None, ModelPool("m", Strict()))
    assert found == (Parity.FAILED, "our template refuses a probe prompt: System role not supported", True)


async def test_without_a_renderer_all_workers_must_say_the_same() -> None:
    pool = ModelPool("m")
    assert (await verdict(None, pool)).parity is Parity.PROVEN
    assert (await verdict(None, pool)).parity is Parity.PROVEN
    found = await verdict(lambda _, tokens: [7, *tokens[1:]], pool)
    assert found == (Parity.FAILED, "token 0 of a probe prompt is 60 at the first worker and 7 at the worker", True)


@pytest.fixture
def record() -> WorkerRecord:
    record = WorkerRecord.of(WorkerConfig(url="http://127.0.0.1:1", name="w"))
    record.parity = Parity.PROVEN
    return record


def observe(record: WorkerRecord, *matches: bool) -> None:
    for match in matches:
        parity.observe(record, 100, 100 if match else 40)


def test_the_third_of_the_last_answers_costs_a_worker_its_affinity(record: WorkerRecord) -> None:
    observe(record, False, *[True] * 30, False, *[True] * 31)
    assert record.parity is Parity.PROVEN
    observe(record, False)
    assert record.parity is Parity.FAILED
    assert record.parity_reason == (
        "3 of its last 64 prompts were counted differently, the last 100 tokens here and 40 at the worker"
    )


def test_answers_long_ago_are_forgotten(record: WorkerRecord) -> None:
    observe(record, False, False, *[True] * 63, False)
    assert record.parity is Parity.PROVEN
    observe(record, False)
    assert record.parity is Parity.PROVEN
    observe(record, False)
    assert record.parity is Parity.FAILED


def test_matches_in_a_row_are_counted_from_the_last_mismatch(record: WorkerRecord) -> None:
    observe(record, False, False, False, True, True)
    assert (record.parity, record.parity_matches_in_a_row) == (Parity.FAILED, 2)
    observe(record, False, True)
    assert record.parity_matches_in_a_row == 1
