"""What a worker serves: from blocks that stay as they are while they are sent."""

import asyncio
import random
from typing import Any

import pytest

from cachecore.blocks import pack_tokens
from cachecore.scope import Fidelity
from cachecore.transfer.errors import Reason, Unserved
from cachecore.transfer.header import Span
from cachecore.transfer.plan import read_plan
from cachecore.transfer.transport import Draft, Request, Wanted
from tests.workers.reference.support import KEYRING
from tests.workers.transfer.world import (
    BLOCKS,
    HELD,
    LAYER_BYTES,
    LAYERS,
    PROMPT,
    SIZE,
    Link,
    answer,
    at_rest,
    generation,
    holder_of,
    plan_of,
    run_of,
    signed,
    until,
    warm,
    worker,
)
from workers.reference.engine import ReferenceEngine
from workers.transfer.service import TransferService


def service_of(engine: ReferenceEngine) -> TransferService:
    assert engine._transfer is not None
    return engine._transfer


def request_for(engine: ReferenceEngine, wanted: dict[str, Any] | None = None, **plan: Any) -> Request:
    shape = service_of(engine).destination.shape
    asked = Wanted(shape.compatibility, Span.all(LAYERS), 1, Span.all(shape.kv_heads), False)
    document = signed(plan_of(engine, **plan), engine)
    capability = read_plan(document, KEYRING, holder_of(engine), 0.0).capability
    return Request(capability, asked._replace(**(wanted or {})))


async def drafts_of(engine: ReferenceEngine, request: Request) -> list[Draft]:
    drafts = [draft async for draft in service_of(engine).source.serve(request)]
    assert all(isinstance(draft, Draft) for draft in drafts)
    return drafts  # type: ignore[return-value]


async def test_raw_frames_are_views_of_the_engines_memory() -> None:
    async with worker() as engine:
        await warm(engine)
        drafts = await drafts_of(engine, request_for(engine))
        assert [draft.header.layers.first for draft in drafts] == list(range(LAYERS))
        assert [draft.header.layer_bytes for draft in drafts] == [(LAYER_BYTES,)] * LAYERS
        # A prompt's blocks follow each other here: keys and values are one piece each.
        assert [len(draft.parts) for draft in drafts] == [2] * LAYERS
        keys = memoryview(drafts[1].parts[0])
        first = engine._core.pool.find(request_for(engine).capability.run.tail, 1)
        assert first is not None
        engine._core.kv.keys[1, first.blocks[0], -1, -1, -1] = 123.5
        assert keys.cast("f")[-1] == 123.5
        assert at_rest(engine)


async def test_short_layers_share_frames_and_strides_do_not() -> None:
    async with worker(transfer={"frame_bytes": 3 * LAYER_BYTES}) as engine:
        await warm(engine)
        together = await drafts_of(engine, request_for(engine))
        assert [draft.header.layers[:2] for draft in together] == [(0, 3), (3, 1)]
        apart = await drafts_of(engine, request_for(engine, {"layers": Span(1, 3, LAYERS), "stride": 2}))
        assert [draft.header.layers[:2] for draft in apart] == [(1, 1), (3, 1)]


async def test_token_ids_come_with_the_first_frame() -> None:
    async with worker() as engine:
        await warm(engine)
        drafts = await drafts_of(engine, request_for(engine, {"with_tokens": True}, first=3, end=9))
        assert [draft.header.with_tokens for draft in drafts] == [True, False, False, False]
        assert drafts[0].parts[-1] == pack_tokens(PROMPT[3 * SIZE : 9 * SIZE])
        assert drafts[0].header.position == 3 * SIZE


@pytest.mark.parametrize(
    ("wanted", "plan", "reason"),
    [
        ({"compatibility": bytes(16)}, {}, Reason.INCOMPATIBLE),
        ({"layers": Span(0, 4, 5)}, {}, Reason.INCOMPATIBLE),
        ({"kv_heads": Span(0, 1, 2)}, {}, Reason.INCOMPATIBLE),
        ({}, {"codec": "lm3h"}, Reason.INCOMPATIBLE),
        ({}, {"prompt": [*PROMPT[:-6], 1, 2, 3, 4, 5, 6]}, Reason.STALE),
    ],
)
async def test_what_is_not_served(wanted: dict[str, Any], plan: dict[str, Any], reason: Reason) -> None:
    async with worker() as engine:
        await warm(engine)
        with pytest.raises(Unserved) as refusal:
            await drafts_of(engine, request_for(engine, wanted, **plan))
        assert refusal.value.reason is reason
        assert at_rest(engine)


async def test_a_run_that_begins_elsewhere_than_it_says() -> None:
    async with worker() as engine:
        await warm(engine)
        request = request_for(engine, first=3)
        for change in ({"first_block": 4}, {"parent": request.capability.run.tail}, {"blocks": 30}):
            run = request.capability.run._replace(**change)  # type: ignore[arg-type]
            capability = type(request.capability)(
                **{name: getattr(request.capability, name) for name in request.capability.__slots__} | {"run": run}
            )
            with pytest.raises(Unserved) as refusal:
                await drafts_of(engine, request._replace(capability=capability))
            assert refusal.value.reason is Reason.STALE


async def test_what_is_being_sent_is_not_evicted() -> None:
    async with worker(blocks=60) as source, worker() as target:
        expected = await warm(source)
        rng = random.Random(3)
        with source._core.lend(run_of(PROMPT, 0, BLOCKS).tail, BLOCKS, Fidelity.EXACT) as lent:
            assert lent is not None
            for number in range(4):
                await answer(
                    source, generation([rng.randrange(97) for _ in range(120)], request_id=f"{number}", tokens=1)
                )
            tokens, first = await answer(target, generation(PROMPT, signed(plan_of(source), target)))
            assert (tokens, first.cached_tokens) == (expected, HELD)
        await until(lambda: at_rest(source))


async def test_a_full_source_waits_for_what_it_is_sending() -> None:
    async with worker(blocks=40) as source:
        await warm(source)
        with source._core.lend(run_of(PROMPT, 0, BLOCKS).tail, BLOCKS, Fidelity.EXACT):
            waiting = asyncio.create_task(answer(source, generation(PROMPT[::-1], request_id="waits")))
            await until(lambda: source._core.idle and source._core.scheduler.waiting)
            assert not waiting.done()
        assert len((await waiting)[0]) == 10


@pytest.mark.parametrize("seed", range(3))
async def test_many_pull_from_each_other_while_everything_is_evicted(seed: int) -> None:
    """Random prompts of a few families on three workers that are far too small, with links that break now and then."""
    rng = random.Random(seed)
    stems = [[rng.randrange(97) for _ in range(length)] for length in (30, 61, 80)]
    prompts = [[*rng.choice(stems), *(rng.randrange(97) for _ in range(rng.randrange(1, 30)))] for _ in range(18)]
    async with worker(blocks=400) as reference:
        expected = [(await answer(reference, generation(prompt, tokens=4)))[0] for prompt in prompts]
    async with worker(blocks=50) as one, worker(blocks=50) as two, worker(blocks=50) as three:
        workers = [one, two, three]

        async def ask(number: int) -> list[int]:
            await asyncio.sleep(rng.random() * 0.5)
            prompt, target = prompts[number], rng.choice(workers)
            source = rng.choice([each for each in workers if each is not target])
            assert source.info.transfer is not None
            if rng.random() < 0.7:  # else it holds the run by chance only
                await answer(source, generation(prompt, request_id=f"before-{number}", tokens=1))
            async with Link(source.info.transfer.addresses[0]).open() as link:
                link.cut_at = rng.choice([None, None, rng.randrange(40_000)])
                end = rng.randrange(1, len(prompt) // SIZE + 1)
                plan = signed(plan_of(source, prompt, end=end, addresses=(link.address,)), target)
                return (await answer(target, generation(prompt, plan, request_id=f"{number}", tokens=4)))[0]

        answers = await asyncio.gather(*map(ask, range(len(prompts))))
        assert answers == expected
        await until(lambda: all(map(at_rest, workers)))
        pulled = sum(each.metrics.transfer.pulled_tokens for each in workers if each.metrics.transfer is not None)
        assert pulled > 0
