"""Which prompts are compared again, and what comes of it."""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest

from cachecore.holders import Epoch
from cachecore.prompts.plain import PlainRenderer
from gateway.config import WorkerConfig
from gateway.fleet import parity
from gateway.fleet.engines.contract import Discovery, EngineTraits, Lack
from gateway.fleet.engines.generic import GenericAdapter
from gateway.fleet.engines.questions import ProbeError, Questions
from gateway.fleet.scrutiny import SAMPLES_AT_ONCE, SAMPLES_PER_SECOND, UNSALTED, Sample, SampleBudget, Scrutiny
from gateway.fleet.worker import ModelPool, Parity, WorkerRecord

QUESTION = {"model": "m", "messages": [{"role": "user", "content": "hello"}]}
POOL = ModelPool("m", PlainRenderer())
LACK = Lack("--flag", "it costs", "set it")


class Engine(GenericAdapter):
    """Tokenizes as we do; a test may have it tell otherwise, once or always."""

    def __init__(self) -> None:
        self.asked = 0
        self.answers: list[Any] = []
        self.busy = 0

    async def tokenize(self, ask: Questions, request: Mapping[str, Any]) -> Sequence[int] | None:
        self.asked += 1
        answer = self.answers.pop(0) if self.answers else None
        if isinstance(answer, Exception):
            raise answer
        return answer or parity.rendered_tokens(PlainRenderer(), request)

    async def lacks(self, ask: Questions, discovery: Discovery) -> Sequence[Lack]:
        if self.busy:
            self.busy -= 1
            raise ProbeError("busy")
        return (LACK,)


@asynccontextmanager
async def scrutiny_of(engine: Engine, divided: bool = False) -> AsyncIterator[tuple[WorkerRecord, Scrutiny]]:
    record = WorkerRecord.of(WorkerConfig(url="http://127.0.0.1:1", name="w"))
    record.adapter, record.discovery, record.epoch, record.parity = engine, Discovery({}), Epoch(5), Parity.PROVEN
    async with httpx.AsyncClient() as http:
        scrutiny = Scrutiny(record, http, SampleBudget(), divided)
        task = asyncio.create_task(scrutiny.run())
        yield record, scrutiny
        task.cancel()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(5):
        while not condition():
            await asyncio.sleep(0)


async def test_a_life_is_asked_once_what_it_lacks(caplog: pytest.LogCaptureFixture) -> None:
    async with scrutiny_of(Engine()) as (record, scrutiny):
        scrutiny.life_begun()
        await until(lambda: record.lacks == (LACK,))
        scrutiny.sample(Sample(POOL, QUESTION))
        await until(lambda: record.adapter.asked == 1)  # type: ignore[attr-defined]
    assert caplog.text.count("worker w lacks --flag: it costs; set it") == 1


@pytest.mark.parametrize("salts", [False, True])
async def test_an_engine_that_keeps_nobody_apart_is_named_where_there_are_tenants(salts: bool) -> None:
    async with scrutiny_of(Engine(), divided=True) as (record, scrutiny):
        record.traits = EngineTraits(salts=salts)
        scrutiny.life_begun()
        await until(lambda: record.lacks == ((LACK,) if salts else (LACK, UNSALTED)))


async def test_a_busy_engine_is_asked_again_what_it_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.fleet.scrutiny._AGAIN_SECONDS", 0.001)
    engine = Engine()
    engine.busy = 2
    async with scrutiny_of(engine) as (record, scrutiny):
        scrutiny.life_begun()
        await until(lambda: record.lacks == (LACK,))


async def test_a_difference_counts_when_it_is_there_twice() -> None:
    engine = Engine()
    async with scrutiny_of(engine) as (record, scrutiny):
        engine.answers = [[1, 2, 3]]
        scrutiny.sample(Sample(POOL, QUESTION))
        await until(lambda: engine.asked == 2)
        await asyncio.sleep(0)
        assert record.parity is Parity.PROVEN
        engine.answers = [[1, 2, 3], [1, 2, 3]]
        scrutiny.sample(Sample(POOL, QUESTION))
        await until(lambda: record.parity is Parity.FAILED)
        assert record.parity_reason == "token 0 of a prompt that it was sent is 60 here and 1 at the worker"


async def test_what_another_worker_has_told_is_compared_where_there_is_no_renderer() -> None:
    engine, pool = Engine(), ModelPool("m")
    async with scrutiny_of(engine) as (record, scrutiny):
        scrutiny.sample(Sample(pool, QUESTION))
        told = parity.rendered_tokens(PlainRenderer(), QUESTION)
        await asyncio.sleep(0.01)
        scrutiny.sample(Sample(pool, QUESTION, told))
        await until(lambda: engine.asked == 1)
        scrutiny.sample(Sample(pool, QUESTION, told[1:]))
        await until(lambda: record.parity is Parity.FAILED)
        assert "at another worker and" in record.parity_reason


async def test_a_worker_that_does_not_answer_keeps_what_it_has() -> None:
    engine = Engine()
    async with scrutiny_of(engine) as (record, scrutiny):
        engine.answers = [ProbeError("busy"), RuntimeError("bug")]
        for asked in (1, 2):
            scrutiny.sample(Sample(POOL, QUESTION))
            await until(lambda asked=asked: engine.asked == asked)  # type: ignore[misc]
            await asyncio.sleep(0)
        assert record.parity is Parity.PROVEN
        scrutiny.sample(Sample(POOL, QUESTION))
        await until(lambda: engine.asked == 3)


async def test_one_that_has_failed_is_proven_again_after_enough_answers_that_match() -> None:
    engine = Engine()
    async with scrutiny_of(engine) as (record, scrutiny):
        parity.settle(record, Parity.FAILED, "it differed")
        for _ in range(parity.ANSWERS_REMEMBERED - 1):
            parity.observe(record, 5, 5)
        scrutiny.sample(Sample(POOL, QUESTION))
        await asyncio.sleep(0.01)
        assert (record.parity, engine.asked) == (Parity.FAILED, 0)
        parity.observe(record, 5, 5)
        scrutiny.sample(Sample(POOL, QUESTION))
        await until(lambda: record.parity is Parity.PROVEN)
        assert record.parity_reason == ""


def test_samples_of_a_fleet_are_bounded() -> None:
    now = 0.0
    budget = SampleBudget(lambda: now)
    assert [budget.take() for _ in range(SAMPLES_AT_ONCE + 1)] == [True] * SAMPLES_AT_ONCE + [False]
    now = 1 / SAMPLES_PER_SECOND
    assert [budget.take(), budget.take()] == [True, False]
    now = 1000.0
    assert sum(budget.take() for _ in range(100)) == SAMPLES_AT_ONCE
