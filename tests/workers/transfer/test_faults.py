"""Whatever a peer or a plan does, the answer is the one that computing alone gives, and nothing stays behind."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import pytest

from cachecore.holders import Epoch
from cachecore.scope import Keyring
from cachecore.transfer.tcp.client import ClientSettings
from tests.workers.transfer.world import (
    HELD,
    LAYER_BYTES,
    LAYERS,
    PROMPT,
    RIVAL,
    Link,
    answer,
    at_rest,
    generation,
    holder_of,
    pair,
    plan_of,
    salt_of,
    signed,
    until,
    warm,
    worker,
)
from workers.engine import StepOutput, TransferOutcome
from workers.reference.engine import ReferenceEngine

MIDWAY = LAYERS // 2 * LAYER_BYTES + LAYER_BYTES // 2
"""Within a layer's payload, some layers having come."""
GREETING_BYTES = 24


@contextlib.asynccontextmanager
async def linked(**options: Any) -> AsyncIterator[tuple[ReferenceEngine, ReferenceEngine, Link]]:
    """Source and target with a link between them."""
    async with pair(**options) as (source, target):
        assert source.info.transfer is not None
        async with Link(source.info.transfer.addresses[0]).open() as link:
            yield source, target, link


async def computed_all_the_same(
    source: ReferenceEngine, target: ReferenceEngine, *documents: object, **fields: Any
) -> StepOutput:
    """The first output of an answer that is as cold compute gives it, with nothing taken from elsewhere."""
    expected = await warm(source)
    tokens, first = await answer(target, generation(PROMPT, *documents, **fields))
    assert tokens == expected
    assert first.cached_tokens == 0
    assert first.transfer is not None
    assert first.transfer.tokens == 0
    await until(lambda: at_rest(source) and at_rest(target))
    return first


async def outcome_over(link: Link, source: ReferenceEngine, target: ReferenceEngine, **plan: Any) -> tuple[str, str]:
    document = signed(plan_of(source, addresses=(link.address,), **plan), target)
    report = (await computed_all_the_same(source, target, document)).transfer
    assert report is not None
    assert target.metrics.transfer is not None
    assert target.metrics.transfer.pulls == {(report.outcome, report.reason): 1}
    return report.outcome.value, report.reason


# ---- on the way ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("codec", ["raw", "i8"])
async def test_a_source_that_is_cut_off_within_a_layer(codec: str) -> None:
    async with linked() as (source, target, link):
        link.cut_at = MIDWAY if codec == "raw" else MIDWAY // 4
        # A quantized plan needs a request that takes quantized KV; the answer is exact all the same.
        document = signed(plan_of(source, addresses=(link.address,), codec=codec), target)
        first = await computed_all_the_same(source, target, document, fidelity=1)
        assert first.transfer is not None
        assert (first.transfer.outcome, first.transfer.reason) == (TransferOutcome.FAILED, "closed")
        assert first.fidelity == 0


async def test_a_source_that_stops_within_a_layer() -> None:
    async with linked() as (source, target, link):
        expected = await warm(source)
        link.hold_at = MIDWAY
        document = signed(plan_of(source, addresses=(link.address,)), target)
        asking = asyncio.create_task(answer(target, generation(PROMPT, document)))
        await until(lambda: link.sent and target._core.scheduler.loading)
        await source.stop()
        link.cut_at = MIDWAY + 8192  # what it had sent by then may have been all
        link.opened.set()
        tokens, first = await asking
        assert tokens == expected
        assert first.transfer is not None
        assert (first.transfer.outcome, first.cached_tokens) == (TransferOutcome.FAILED, 0)


async def test_a_source_that_hangs_until_the_deadline() -> None:
    async with linked() as (source, target, link):
        link.hold_at = MIDWAY
        assert await outcome_over(link, source, target, deadline_seconds=0.3) == ("failed", "deadline")


async def test_a_source_that_hangs_before_the_deadline_is_given_up() -> None:
    impatient = {"client": ClientSettings(stall_seconds=0.2, connect_seconds=20)}
    async with linked(transfer=impatient) as (source, target, link):
        link.hold_at = MIDWAY
        assert await outcome_over(link, source, target) == ("failed", "stalled")


@pytest.mark.parametrize(
    ("at", "reason"),
    [
        (GREETING_BYTES + 8 + 40, "forged"),  # within the first frame's header
        (GREETING_BYTES + 8, "malformed"),  # its magic
        (MIDWAY, "forged"),  # a payload
    ],
)
async def test_a_flipped_bit(at: int, reason: str) -> None:
    async with linked() as (source, target, link):
        link.flip_at = at
        assert await outcome_over(link, source, target) == ("failed", reason)


async def test_a_truncated_frame() -> None:
    async with linked() as (source, target, link):
        link.flip_at = GREETING_BYTES + 5  # of the message's length: it ends within the frame's payload
        assert (await outcome_over(link, source, target))[0] == "failed"


async def test_nobody_serves_there() -> None:
    async with pair() as (source, target):
        document = signed(plan_of(source, addresses=("tcp://127.0.0.1:1",)), target)
        first = await computed_all_the_same(source, target, document)
        assert first.transfer is not None
        assert (first.transfer.outcome, first.transfer.reason) == (TransferOutcome.FAILED, "unreachable")


async def test_no_transport_of_that_kind() -> None:
    async with pair() as (source, target):
        document = signed(plan_of(source, addresses=("pigeon://coop:1",)), target)
        first = await computed_all_the_same(source, target, document)
        assert first.transfer is not None
        assert (first.transfer.outcome, first.transfer.reason) == (TransferOutcome.REFUSED, "unreachable")


# ---- what the source says no to --------------------------------------------------------------------------------------


async def refusal_of(source: ReferenceEngine, target: ReferenceEngine, document: object, **fields: Any) -> str:
    first = await computed_all_the_same(source, target, document, **fields)
    assert first.transfer is not None
    assert first.transfer.outcome is TransferOutcome.REFUSED
    return first.transfer.reason


async def test_a_source_of_another_class() -> None:
    async with worker(seed=1) as source, worker() as target:
        expected = await warm(target)
        await target.reset_prefix_cache()
        await warm(source)
        tokens, first = await answer(target, generation(PROMPT, signed(plan_of(source), target)))
        assert tokens == expected
        assert first.transfer is not None
        assert (first.transfer.outcome, first.transfer.reason) == (TransferOutcome.REFUSED, "incompatible")
        assert source.metrics.transfer is not None
        assert source.metrics.transfer.refused == {"incompatible": 1}


async def test_a_stale_index() -> None:
    async with pair() as (source, target):
        expected = await warm(source)
        await source.reset_prefix_cache()
        tokens, first = await answer(target, generation(PROMPT, signed(plan_of(source), target)))
        assert tokens == expected
        assert first.transfer is not None
        assert (first.transfer.outcome, first.transfer.reason) == (TransferOutcome.REFUSED, "stale")


async def test_a_source_that_has_restarted_since() -> None:
    async with pair() as (source, target):
        before = holder_of(source)._replace(epoch=Epoch(source.info.epoch - 1))
        assert (
            await refusal_of(source, target, signed(plan_of(source)._replace(source=before), target)) == "other_epoch"
        )


# ---- what the worker itself says no to -------------------------------------------------------------------------------


async def test_an_expired_capability() -> None:
    async with pair() as (source, target):
        assert await refusal_of(source, target, signed(plan_of(source), target, seconds=-1)) == "expired"


async def test_a_forged_capability() -> None:
    async with pair() as (source, target):
        document = signed(plan_of(source), target, keyring=Keyring({0: bytes(32)}, 0))
        assert await refusal_of(source, target, document) == "forged"


async def test_a_plan_that_was_changed() -> None:
    async with pair() as (source, target):
        document = {**signed(plan_of(source), target), "addresses": ["tcp://127.0.0.1:1"]}
        assert await refusal_of(source, target, document) == "forged"


async def test_a_plan_for_somebody_else() -> None:
    async with pair() as (source, target):
        assert await refusal_of(source, target, signed(plan_of(source), source)) == "other_target"


async def test_a_capability_of_another_tenant() -> None:
    async with pair() as (source, target):
        await warm(source, cache_salt=salt_of(RIVAL))
        document = signed(plan_of(source, key_id=RIVAL), target, key_id=RIVAL)
        assert await refusal_of(source, target, document) == "other_tenant"


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"prompt": PROMPT[::-1]}, "unexpected"),
        ({"source_position": 8}, "unexpected"),
        ({"codec": "i8"}, "unexpected"),  # the request takes exact KV only
        ({"codec": "lm3h"}, "incompatible"),
    ],
)
async def test_a_plan_that_does_not_fit_the_request(changes: dict[str, Any], reason: str) -> None:
    async with pair() as (source, target):
        assert await refusal_of(source, target, signed(plan_of(source, **changes), target)) == reason


@pytest.mark.parametrize("document", [None, 7, "plan", [], {}, {"version": 1}, {"version": 2, "source": "x"}])
async def test_what_is_no_plan(document: object) -> None:
    async with pair() as (source, target):
        assert await refusal_of(source, target, document) == "malformed"


# ---- while it loads --------------------------------------------------------------------------------------------------


async def test_a_client_that_leaves_gives_everything_back() -> None:
    async with linked() as (source, target, link):
        expected = await warm(source)
        link.hold_at = MIDWAY
        document = signed(plan_of(source, addresses=(link.address,)), target)
        asking = asyncio.create_task(answer(target, generation(PROMPT, document)))
        await until(lambda: target._core.scheduler.loading)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        await until(lambda: at_rest(target))
        assert target.metrics.requests_finished == {"abort": 1}
        link.opened.set()
        await until(lambda: at_rest(source))
        assert await target.cached_blocks() == {}
        assert await warm(target) == expected


async def test_two_that_share_a_loading_prefix_pull_it_once() -> None:
    async with linked() as (source, target, link):
        longer = [*PROMPT, 5, 6, 7, 8, 9]
        expected = [await warm(source), await warm(source, longer)]
        link.hold_at = MIDWAY
        plan = plan_of(source, addresses=(link.address,))
        one = asyncio.create_task(answer(target, generation(PROMPT, signed(plan, target))))
        await until(lambda: target._core.scheduler.loading)
        two = asyncio.create_task(answer(target, generation(longer, signed(plan, target), request_id="two")))
        await until(lambda: target._core.scheduler.waiting)
        link.opened.set()
        answers = await asyncio.gather(one, two)
        assert [tokens for tokens, _ in answers] == expected
        outcomes = [first.transfer.outcome for _, first in answers if first.transfer is not None]
        assert outcomes == [TransferOutcome.FETCHED, TransferOutcome.HELD]
        assert [first.cached_tokens for _, first in answers] == [HELD, HELD]
        assert link.connections == 1
        assert source.metrics.transfer is not None
        assert source.metrics.transfer.served == 1


async def test_when_the_first_of_two_leaves_the_other_pulls() -> None:
    async with linked() as (source, target, link):
        expected = await warm(source)
        link.hold_at = MIDWAY
        plan = plan_of(source, addresses=(link.address,))
        one = asyncio.create_task(answer(target, generation(PROMPT, signed(plan, target))))
        await until(lambda: target._core.scheduler.loading)
        two = asyncio.create_task(answer(target, generation(PROMPT, signed(plan, target), request_id="two")))
        await until(lambda: target._core.scheduler.waiting)
        one.cancel()
        await until(lambda: link.connections == 2)
        link.opened.set()
        tokens, first = await two
        assert tokens == expected
        assert first.cached_tokens == HELD


async def test_preempted_while_it_loads() -> None:
    async with linked(blocks=40, max_model_len=150) as (source, target, link):
        older_prompt = PROMPT[:30][::-1]
        older_expected, _ = await answer(source, generation(older_prompt, tokens=110))
        expected = await warm(source)
        link.hold_at = MIDWAY
        document = signed(plan_of(source, addresses=(link.address,)), target)
        older = asyncio.create_task(answer(target, generation(older_prompt, request_id="older", tokens=110)))
        await until(lambda: target._core.scheduler.running)
        younger = asyncio.create_task(answer(target, generation(PROMPT, document)))
        await until(lambda: target.metrics.preemptions)
        assert (await older)[0] == older_expected
        link.opened.set()
        tokens, first = await younger
        assert tokens == expected
        assert first.transfer is not None
        assert (first.transfer.outcome, first.cached_tokens) == (TransferOutcome.FETCHED, HELD)
        await until(lambda: at_rest(target) and at_rest(source))


async def test_a_preempted_pull_keeps_its_deadline() -> None:
    async with linked(blocks=40, max_model_len=150) as (source, target, link):
        expected = await warm(source)
        link.hold_at = MIDWAY
        document = signed(plan_of(source, addresses=(link.address,), deadline_seconds=0.05), target)
        older = asyncio.create_task(answer(target, generation(PROMPT[:30][::-1], request_id="older", tokens=110)))
        await until(lambda: target._core.scheduler.running)
        tokens, first = await answer(target, generation(PROMPT, document))
        assert tokens == expected
        assert first.transfer is not None
        assert (first.transfer.outcome, first.transfer.reason) == (TransferOutcome.FAILED, "deadline")
        await older


async def test_the_cache_is_cleared_while_it_loads() -> None:
    async with linked() as (source, target, link):
        expected = await warm(source)
        link.hold_at = MIDWAY
        document = signed(plan_of(source, addresses=(link.address,)), target)
        asking = asyncio.create_task(answer(target, generation(PROMPT, document)))
        await until(lambda: target._core.scheduler.loading)
        await target.reset_prefix_cache()
        link.opened.set()
        tokens, _ = await asking
        assert tokens == expected
        assert await target.cached_blocks() == {}
        await until(lambda: at_rest(target))


async def test_a_worker_that_stops_while_it_loads() -> None:
    async with linked() as (source, target, link):
        await warm(source)
        link.hold_at = MIDWAY
        document = signed(plan_of(source, addresses=(link.address,)), target)
        asking = asyncio.create_task(answer(target, generation(PROMPT, document)))
        await until(lambda: target._core.scheduler.loading)
        await target.stop()
        tokens, last = await asking
        assert (tokens, last.finish_reason) == ([], "abort")


async def test_others_run_while_one_waits() -> None:
    async with linked() as (source, target, link):
        expected = await warm(source)
        link.hold_at = MIDWAY
        document = signed(plan_of(source, addresses=(link.address,)), target)
        waiting = asyncio.create_task(answer(target, generation(PROMPT, document)))
        await until(lambda: target._core.scheduler.loading)
        other, _ = await answer(target, generation(PROMPT[::-1], request_id="other", tokens=40))
        assert len(other) == 40
        assert target.metrics.requests_waiting == 1
        link.opened.set()
        assert (await waiting)[0] == expected
