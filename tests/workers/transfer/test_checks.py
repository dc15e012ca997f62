"""Answers from quantized KV are compared with exact KV while the engine is idle; and codecs are measured then."""

import random
from pathlib import Path

import pytest

from cachecore.kv.calibration import KL_BUDGETS
from cachecore.kv.codecs import registry
from cachecore.kv.codecs.contract import Encoded, KvFacts, Origin
from cachecore.kv.layout import LayerKv
from cachecore.kv.rope import RopeTable
from cachecore.scope import Fidelity
from policies.state.guard import GuardSettings, QualityGuard, Sample, Trip
from tests.workers.reference.test_quality import OneTokenPerByte
from tests.workers.transfer.world import PROMPT, answer, generation, pair, plan_of, signed, until, warm
from workers.engine import TransferOutcome
from workers.kv_quality import Approximation, QualityJournal
from workers.reference.engine import ReferenceEngine
from workers.reference.guard import GuardOptions

EVERY = GuardOptions(share=1.0, answer_tokens_max=6, step_tokens=32)


class Careless:
    """A codec that forgets which scale was whose."""

    name = "i8"

    def __init__(self) -> None:
        self._inner = registry.CODECS["i8"]

    def payload_bytes(self, facts: KvFacts) -> int:
        return self._inner.payload_bytes(facts)

    def encode(self, kv: LayerKv, origin: Origin, rope: RopeTable | None) -> Encoded:
        return self._inner.encode(kv, origin, rope)

    def decode(self, payload: memoryview, facts: KvFacts, position: int, rope: RopeTable | None) -> LayerKv:
        keys, values = self._inner.decode(payload, facts, position, rope)
        return LayerKv(keys * 2.5, values.flip(0).contiguous())


def journal_of(engine: ReferenceEngine) -> QualityJournal:
    assert engine.quality is not None
    return engine.quality


def prompt_of(seed: int) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(97) for _ in range(41)]


async def pull(source: ReferenceEngine, target: ReferenceEngine, prompt: list[int], codec: str = "i8") -> Fidelity:
    await warm(source, prompt)
    plan = signed(plan_of(source, prompt, codec=codec), target)
    _, first = await answer(target, generation(prompt, plan, fidelity=Fidelity.QUANTIZED))
    return first.fidelity


async def test_answers_from_quantized_kv_are_checked_when_the_engine_is_idle() -> None:
    async with pair(guard=EVERY) as (source, target):
        assert await pull(source, target, PROMPT) is Fidelity.QUANTIZED
        journal = journal_of(target)
        await until(lambda: journal.since(0).next == 1)
        (sample,) = journal.since(0).samples
        assert sample.used == Approximation("default", "i8", Fidelity.QUANTIZED)
        assert 0 < sample.kl < 0.01
        # Neither computed KV nor exact KV from elsewhere is looked at; and the cache is what it was.
        assert await pull(source, target, prompt_of(1), "raw") is Fidelity.EXACT
        assert (journal.since(0).next, journal_of(source).since(0).next, journal.skipped) == (1, 0, 0)


async def test_a_bad_codec_trips_its_budget_within_two_hundred_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "CODECS", {**registry.CODECS, "i8": Careless()})
    budgets, trip, answers = QualityGuard(GuardSettings(KL_BUDGETS)), None, 0
    async with pair(guard=EVERY) as (source, target):
        while trip is None and answers < 200:
            await pull(source, target, prompt_of(100 + answers))
            trip = feed(budgets, await samples_of(target, answers))
            answers += 1
    assert trip is not None
    assert (trip.way, trip.recompute_fraction) == (("tiny", "default", "i8"), None)
    assert trip.kl_mean > 10 * trip.budget
    assert answers <= 20
    assert not budgets.allows("tiny", "default", "i8", 0.0)


async def samples_of(engine: ReferenceEngine, since: int) -> list[Sample]:
    await until(lambda: journal_of(engine).since(0).next > since)
    return [Sample(**sample.document()) for sample in journal_of(engine).since(since).samples]


def feed(budgets: QualityGuard, samples: list[Sample]) -> Trip | None:
    trips = [budgets.record("tiny", sample, 0.0) for sample in samples]
    return next((trip for trip in trips if trip is not None), None)


async def test_a_codec_that_is_not_measured_good_enough_is_no_longer_taken(tmp_path: Path) -> None:
    """The tiny model's context does not hold the canary prompts: nothing is known of it, so KV travels as it is."""
    async with pair() as (source, target):
        assert target.info.transfer is not None
        assert target.info.transfer.codecs == ("raw", "i8")
        target.renderer = OneTokenPerByte()
        target.calibrate(tmp_path)
        await pull(source, target, PROMPT)  # something that wakes the engine
        await until(lambda: target.info.transfer is not None and target.info.transfer.codecs == ("raw",))
        await warm(source, prompt_of(1))
        plan = signed(plan_of(source, prompt_of(1), codec="i8"), target)
        _, first = await answer(target, generation(prompt_of(1), plan, fidelity=Fidelity.QUANTIZED))
        assert first.transfer is not None
        assert (first.transfer.outcome, first.transfer.reason) == (TransferOutcome.REFUSED, "incompatible")
        assert first.fidelity is Fidelity.EXACT


async def test_without_a_guard_nothing_is_kept() -> None:
    async with pair() as (source, target):
        await pull(source, target, PROMPT)
        assert target.quality is None
