"""The engine contract, over the simulated engine in its own event loop."""

import asyncio
import time
from collections import Counter
from contextlib import aclosing
from typing import Any

import pytest

from cachecore.events import AllBlocksCleared, BlockRemoved, BlockStored, Dialect, EventBatch
from cachecore.prompts.plain import PlainRenderer
from cachecore.scope import DEFAULT_TENANT, Keyring, Salt
from workers.engine import EngineError, Generation, Sampling, StepOutput
from workers.simulated.engine import SimulatedConfig, SimulatedEngine

NUMBERS = iter(range(1_000_000))


def engine_of(sink: Any = None, keyring: Keyring | None = None, **config: Any) -> SimulatedEngine:
    options = {"speed": float("inf"), "blocks_total": 256, **config}
    return SimulatedEngine(SimulatedConfig(**options), PlainRenderer(), sink, keyring)


def generation(tokens: Any, max_tokens: int = 5, cache_salt: str = "", **sampling: Any) -> Generation:
    return Generation(f"id-{next(NUMBERS)}", list(tokens), Sampling(max_tokens, **sampling), cache_salt)


async def collect(engine: SimulatedEngine, request: Generation) -> list[StepOutput]:
    return [output async for output in engine.generate(request)]


async def test_the_same_prompt_gets_the_same_answer_on_every_worker() -> None:
    answers = []
    for _ in range(2):
        engine = engine_of()
        await engine.start()
        answers.append([output.token_ids for output in await collect(engine, generation(range(40), 20))])
        other = [output.token_ids for output in await collect(engine, generation(range(40), 20, seed=9))]
        assert other != answers[-1]
        await engine.stop()
    assert answers[0] == answers[1]
    assert bytes(token for tokens in answers[0] for token in tokens).decode().isprintable()


async def test_the_last_output_says_why() -> None:
    engine = engine_of()
    await engine.start()
    outputs = await collect(engine, generation(range(40), 3))
    assert [output.finish_reason for output in outputs] == [None, None, "length"]
    again = await collect(engine, generation(range(40), 3))
    assert [output.cached_tokens for output in again] == [32, 32, 32]
    await engine.stop()


async def test_stop_ends_live_generations() -> None:
    engine = engine_of(speed=1.0)
    await engine.start()
    running = [asyncio.create_task(collect(engine, generation([number] * 20, 5000))) for number in range(3)]
    while engine.metrics.generation_tokens < 3:
        await asyncio.sleep(0.001)
    await engine.stop()
    await engine.stop()
    for outputs in await asyncio.gather(*running):
        assert outputs[-1].finish_reason == "abort"
    with pytest.raises(EngineError, match="not running"):
        await collect(engine, generation([1]))


async def test_closing_the_iterator_aborts() -> None:
    engine = engine_of(speed=1.0)
    await engine.start()
    async with aclosing(engine.generate(generation(range(100), 5000))) as outputs:  # type: ignore[type-var]
        await anext(outputs)
        assert engine.metrics.requests_running == 1
        assert engine.metrics.kv_cache_usage == pytest.approx(7 / 256)
    assert engine.metrics.requests_running == 0
    assert engine.metrics.kv_cache_usage == 0
    assert engine.metrics.requests_finished == {"abort": 1}
    await engine.stop()


async def test_events_precede_the_answer_and_match_the_cache() -> None:
    batches: list[EventBatch] = []
    engine = engine_of(batches.append, blocks_total=40)
    await engine.start()
    seen: Counter[int] = Counter()
    for number in range(30):
        await collect(engine, generation([number % 7] * 100, 20))
        for batch in batches:
            assert batch.rank == 0
            for event in batch.events:
                if isinstance(event, BlockStored):
                    seen.update(event.block_hashes)
                elif isinstance(event, BlockRemoved):
                    seen.subtract(event.block_hashes)
        batches.clear()
        assert +seen == engine.cached_handles()
    await engine.stop()


async def test_reset_waits_for_the_step_and_is_announced() -> None:
    batches: list[EventBatch] = []
    engine = engine_of(batches.append)
    await engine.start()
    await collect(engine, generation(range(100)))
    await engine.reset_prefix_cache()
    assert batches[-1].events == (AllBlocksCleared(),)
    assert not engine.cached_handles()
    busy = asyncio.create_task(collect(engine, generation(range(100), 200)))
    await asyncio.sleep(0)
    await engine.reset_prefix_cache()
    assert len(await busy) == 200
    await engine.stop()


async def test_sglang_says_first_that_it_is_empty() -> None:
    batches: list[EventBatch] = []
    engine = engine_of(batches.append, dialect=Dialect.SGLANG)
    await engine.start()
    assert [batch.events for batch in batches] == [(AllBlocksCleared(),)]
    await engine.stop()


async def test_forged_salts_are_refused_where_there_is_a_keyring() -> None:
    keyring = Keyring.generate()
    engine = engine_of(keyring=keyring)
    await engine.start()
    minted = keyring.mint_salt(Salt(keyring.key_id(DEFAULT_TENANT)))
    assert len(await collect(engine, generation([1], cache_salt=minted))) == 5
    assert len(await collect(engine, generation([1], cache_salt="a client's own"))) == 5
    with pytest.raises(EngineError, match="MAC"):
        await collect(
            engine, generation([1], cache_salt=Keyring.generate().mint_salt(Salt(keyring.key_id(DEFAULT_TENANT))))
        )
    await engine.stop()


async def test_a_failing_sink_ends_the_engine_aloud(caplog: pytest.LogCaptureFixture) -> None:
    def failing(batch: EventBatch) -> None:
        raise RuntimeError("no more room")

    engine = engine_of(failing)
    await engine.start()
    outputs = await collect(engine, generation(range(100), 50))
    assert outputs[-1].finish_reason == "abort"
    assert "the simulated engine has failed" in caplog.text
    with pytest.raises(EngineError) as refused:
        await collect(engine, generation([1]))
    assert refused.value.status == 503
    await engine.stop()


async def test_it_takes_the_time_that_the_profile_says() -> None:
    engine = engine_of(speed=4.0)
    await engine.start()
    expected = engine.config.profile.prompt_seconds(3000) / 4
    began = time.monotonic()
    async with aclosing(engine.generate(generation([1] * 3000, 1))) as outputs:  # type: ignore[type-var]
        await anext(outputs)
    assert time.monotonic() - began >= expected * 0.9
    await engine.stop()


async def test_it_sleeps_when_idle() -> None:
    engine = engine_of()
    await engine.start()
    await collect(engine, generation(range(20)))
    schedules = 0
    original = engine._scheduler.schedule

    def counted() -> Any:
        nonlocal schedules
        schedules += 1
        return original()

    engine._scheduler.schedule = counted  # type: ignore[method-assign]
    await asyncio.sleep(0.1)
    assert schedules <= 1
    await engine.stop()


@pytest.mark.parametrize(
    ("options", "message"), [({"speed": 0.0}, "speed"), ({"blocks_total": -1}, "at least one block")]
)
def test_impossible_configurations_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SimulatedConfig(**options)


def test_the_context_fits_into_memory() -> None:
    assert SimulatedConfig(blocks_total=10, max_model_len=1000).info().max_model_len == 160
    assert SimulatedConfig(blocks_total=100, max_model_len=1000).info().max_model_len == 1000
