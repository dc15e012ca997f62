"""A worker pulls what a peer has computed: the same tokens follow, and nothing of it is computed again."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest

from cachecore.scope import Fidelity
from tests.workers.transfer.world import (
    BLOCKS,
    HELD,
    LAYER_BYTES,
    LAYERS,
    PROMPT,
    RIVAL,
    SIZE,
    Link,
    answer,
    at_rest,
    generation,
    pair,
    plan_of,
    salt_of,
    signed,
    until,
    warm,
    worker,
)
from workers.engine import StepOutput, TransferOutcome, TransferReport
from workers.reference.engine import ReferenceEngine


def report_of(first: StepOutput) -> TransferReport:
    assert first.transfer is not None
    return first.transfer


@pytest.mark.parametrize("codec", ["raw", "i8"])
async def test_what_follows_pulled_kv_is_what_follows_computed_kv(codec: str) -> None:
    async with pair() as (source, target):
        expected = await warm(source)
        plan = signed(plan_of(source, codec=codec), target)
        tokens, first = await answer(target, generation(PROMPT, plan, fidelity=Fidelity.QUANTIZED))
        report = report_of(first)
        assert (report.outcome, report.reason, report.sources) == (TransferOutcome.FETCHED, "", 1)
        assert report.tokens == first.cached_tokens == HELD
        assert first.fidelity == (Fidelity.EXACT if codec == "raw" else Fidelity.QUANTIZED)
        if codec == "raw":
            assert tokens == expected
            assert target.info.transfer is not None
            assert report.payload_bytes == LAYER_BYTES * LAYERS == HELD * target.info.transfer.bytes_per_token
        else:
            # bf16 scales and a byte for each of 8 numbers, where four bytes a number are raw.
            assert report.payload_bytes == LAYER_BYTES * LAYERS * 10 // 32
        await until(lambda: at_rest(source) and at_rest(target))
        # It is the target's own now.
        again, first = await answer(target, generation(PROMPT, fidelity=Fidelity.QUANTIZED))
        assert (again, first.cached_tokens, first.transfer) == (tokens, HELD, None)


async def test_what_was_done_is_counted_on_both_sides() -> None:
    async with pair() as (source, target):
        await warm(source)
        await answer(target, generation(PROMPT, signed(plan_of(source), target)))
        served, pulled = source.metrics.transfer, target.metrics.transfer
        assert served is not None
        assert pulled is not None
        assert (served.served, served.served_bytes) == (1, LAYER_BYTES * LAYERS)
        assert pulled.pulls == {("fetched", ""): 1}
        assert (pulled.pulled_tokens, pulled.pulled_bytes) == (HELD, LAYER_BYTES * LAYERS)
        assert 0 < pulled.pull_seconds < 60
        assert pulled.loading == 0


async def test_a_pulled_prompt_is_served_to_the_next() -> None:
    async with pair() as (first, second), worker() as third:
        expected = await warm(first)
        await answer(second, generation(PROMPT, signed(plan_of(first), second)))
        await first.stop()
        tokens, output = await answer(third, generation(PROMPT, signed(plan_of(second), third)))
        assert (tokens, output.cached_tokens) == (expected, HELD)


async def test_tenants_pull_their_own() -> None:
    async with pair() as (source, target):
        expected = await warm(source, cache_salt=salt_of(RIVAL))
        plan = signed(plan_of(source, key_id=RIVAL), target, key_id=RIVAL)
        tokens, first = await answer(target, generation(PROMPT, plan, cache_salt=salt_of(RIVAL)))
        assert (tokens, first.cached_tokens) == (expected, HELD)
        _, first = await answer(target, generation(PROMPT))
        assert first.cached_tokens == 0


async def test_an_engine_that_moves_nothing_leaves_plans_alone() -> None:
    async with worker() as source, worker() as target:
        expected = await warm(source)
        plan = signed(plan_of(source), target)
        target._plans = None
        tokens, first = await answer(target, generation(PROMPT, plan))
        assert (tokens, first.cached_tokens, first.transfer) == (expected, 0, None)


# ---- runs that are a part of the prompt ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("held", "runs", "cached"),
    [
        (0, [(0, 10)], 10),  # the beginning
        (0, [(6, 16)], 10),  # the middle: what comes before is computed
        (3, [(6, 16)], 13),  # with a hole after what is held
        (9, [(6, 16)], 16),  # begins with what is held
        (16, [(6, 16)], 16),  # all of it is held
        (0, [(0, 8), (8, 22)], 22),
        (2, [(4, 8), (12, 20)], 14),
        (0, [(4, 12), (8, 20)], 16),  # overlapping ones
    ],
)
async def test_runs_fill_what_is_missing(held: int, runs: Sequence[tuple[int, int]], cached: int) -> None:
    async with pair(batched_tokens_max=24) as (source, target):
        expected = await warm(source)
        if held:
            await answer(target, generation(PROMPT[: held * SIZE + 1], request_id="before", tokens=1))
        plans = [signed(plan_of(source, first=first, end=end), target) for first, end in runs]
        tokens, first = await answer(target, generation(PROMPT, *plans))
        assert tokens == expected
        assert first.cached_tokens == cached * SIZE
        outcome = TransferOutcome.FETCHED if cached > held else TransferOutcome.HELD
        assert (report_of(first).outcome, report_of(first).tokens) == (outcome, (cached - held) * SIZE)
        await until(lambda: at_rest(source) and at_rest(target))
        assert sorted(await target.cached_blocks()) == sorted(await source.cached_blocks())


async def test_the_last_token_is_always_computed() -> None:
    prompt = PROMPT[:HELD]
    async with pair() as (source, target):
        expected = await warm(source, prompt)
        tokens, first = await answer(target, generation(prompt, signed(plan_of(source, prompt), target)))
        assert (tokens, first.cached_tokens) == (expected, HELD - SIZE)


async def test_two_sources_give_a_part_each() -> None:
    async with pair() as (one, two), worker() as target:
        expected = await warm(one)
        await warm(two)
        plans = [signed(plan_of(one, end=9), target), signed(plan_of(two, first=9), target)]
        tokens, first = await answer(target, generation(PROMPT, *plans))
        assert (tokens, first.cached_tokens, report_of(first).sources) == (expected, HELD, 2)


@pytest.mark.parametrize("lost", [0, 1, 2])
async def test_what_did_not_come_is_computed_and_the_rest_is_kept(lost: int) -> None:
    async with pair(batched_tokens_max=16) as (source, target):
        expected = await warm(source)
        plans = [plan_of(source, first=first, end=end) for first, end in ((0, 6), (6, 12), (12, 20))]
        plans[lost] = plans[lost]._replace(addresses=("tcp://127.0.0.1:1",))
        tokens, first = await answer(target, generation(PROMPT, *(signed(plan, target) for plan in plans)))
        assert tokens == expected
        assert first.cached_tokens == report_of(first).tokens == (20 - plans[lost].run.blocks) * SIZE
        assert (report_of(first).outcome, report_of(first).reason) == (TransferOutcome.FAILED, "unreachable")
        await until(lambda: at_rest(target))
        assert sorted(await target.cached_blocks()) == sorted(await source.cached_blocks())


# ---- computing while it comes ----------------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def half_way(
    prompt: Sequence[int], cut: bool = False, **options: Any
) -> AsyncIterator[tuple[ReferenceEngine, Any, list[int]]]:
    """A target that has had half of the layers, and then gets the others or (`cut`) half of the next one: with the task
    that waits for its answer, and what that should be."""
    async with pair(**options) as (source, target):
        assert source.info.transfer is not None
        async with Link(source.info.transfer.addresses[0]).open() as link:
            expected = await warm(source, prompt)
            link.hold_at = LAYERS // 2 * (LAYER_BYTES + 512)
            link.cut_at = link.hold_at + LAYER_BYTES // 2 if cut else None
            plan = signed(plan_of(source, end=BLOCKS, addresses=(link.address,)), target)
            asking = asyncio.create_task(answer(target, generation(prompt, plan)))
            await until(lambda: any(ahead.forward.layer >= 2 for ahead in target._core._ahead.values()))
            assert not asking.done()
            link.opened.set()
            yield target, asking, expected


LONGER = [*PROMPT, *PROMPT[::-1][:51]]


@pytest.mark.parametrize(("prompt", "budget"), [(PROMPT, 512), (LONGER, 512), (LONGER, 16), (LONGER, 8)])
async def test_a_prompts_own_tokens_follow_layer_by_layer(prompt: list[int], budget: int) -> None:
    async with half_way(prompt, batched_tokens_max=budget) as (target, asking, expected):
        tokens, first = await asking
        assert (tokens, first.cached_tokens) == (expected, HELD)
        assert target._core._ahead == {}


async def test_a_run_that_fails_half_way_spoils_nothing() -> None:
    async with half_way(LONGER, cut=True) as (target, asking, expected):
        tokens, first = await asking
        assert (tokens, first.cached_tokens) == (expected, 0)
        assert report_of(first).outcome is TransferOutcome.FAILED
        assert target._core._ahead == {}
