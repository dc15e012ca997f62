"""Passages that were computed at another position: turned, repaired, and never taken for exact."""

import asyncio
import contextlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from cachecore.blocks import HASH_BYTES
from cachecore.events import KvEvent
from cachecore.index.contract import Stored
from cachecore.rekey import Rekeyer
from cachecore.scope import Fidelity
from cachecore.transfer.plan import FRACTION_PARAMETER, Plan
from tests.workers.reference.support import greedy, run, run_tokens
from tests.workers.transfer.world import (
    SIZE,
    answer,
    at_rest,
    chain_of,
    generation,
    naming_of,
    pair,
    plan_of,
    signed,
    until,
    warm,
    worker,
)
from workers.engine import StepOutput
from workers.reference import fusing
from workers.reference.engine import ReferenceEngine
from workers.reference.fusing import Repair


def text(seed: int, count: int) -> list[int]:
    return [(index * index * 31 + index * (7 + seed) + seed * 11) % 97 for index in range(count)]


SYSTEM, PASSAGES, QUESTION = text(9, 16), [text(seed, 30) for seed in range(3)], text(5, 9)
SERVED = [*SYSTEM, *PASSAGES[0], *PASSAGES[1], *PASSAGES[2], *text(4, 5)]
PROMPT = [*SYSTEM, *PASSAGES[2], *text(3, 3), *PASSAGES[0], *QUESTION]
"""Passages 2 and 0, three tokens between them, and a question."""
WHERE = {0: (16, 49), 2: (76, 16)}
"""Passage: where it begins in what was served, and in the prompt."""


def passage(source: ReferenceEngine, number: int, **changes: Any) -> Plan:
    """The blocks that lie within a passage of what was served."""
    served, wanted = WHERE[number]
    first = -(-served // SIZE)
    end = (served + 30) // SIZE
    shift = first * SIZE - served
    return plan_of(source, SERVED, first, end, target_position=wanted + shift, **changes)


def plans(source: ReferenceEngine, target: ReferenceEngine, **changes: Any) -> list[dict[str, Any]]:
    return [signed(passage(source, number, **changes), target, fidelity=Fidelity.FUSED) for number in (0, 2)]


def fused(*documents: object, prompt: Sequence[int] = PROMPT, **fields: Any) -> Any:
    return generation(prompt, *documents, **{"fidelity": Fidelity.FUSED, **fields})


TURNED = 28 + 28


@contextlib.asynccontextmanager
async def served_by(local: bool, **options: Any) -> Any:
    """Who has answered `SERVED`, and who is to answer `PROMPT`, with its beginning in the cache."""
    async with contextlib.AsyncExitStack() as stack:
        target = await stack.enter_async_context(worker(**options))
        source = target if local else await stack.enter_async_context(worker(**options))
        await warm(source, SERVED)
        if not local:
            await warm(target, [*SYSTEM, 1])
        yield source, target


def outcome_of(first: StepOutput) -> tuple[str, str]:
    assert first.transfer is not None
    return first.transfer.outcome.value, first.transfer.reason


@pytest.mark.parametrize("following_max", [512, 0])
@pytest.mark.parametrize("local", [True, False], ids=["its own", "a peer's"])
async def test_recomputed_whole_they_are_what_computing_gives(
    local: bool, following_max: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Everything is where it belongs: with all tokens recomputed, the same tokens follow as cold."""
    monkeypatch.setattr(fusing, "FOLLOWING_TOKENS_MAX", following_max)
    async with served_by(local) as (source, target), worker() as cold:
        target._core.repair = Repair(1.0)
        expected = await warm(cold, PROMPT)
        tokens, first = await answer(target, fused(*plans(source, target)))
        assert tokens == expected
        # Of a passage in its own cache it takes the tokens at the edges, too, which share blocks with others.
        turned = 30 + 30 if local else TURNED
        assert (first.fidelity, first.cached_tokens) == (Fidelity.FUSED, len(SYSTEM) + turned)
        assert outcome_of(first) == ("fetched", "")
        assert first.transfer is not None
        assert first.transfer.tokens == turned
        assert (first.transfer.payload_bytes > 0) is not local
        await until(lambda: at_rest(source) and at_rest(target))


@pytest.mark.parametrize("local", [True, False], ids=["its own", "a peer's"])
async def test_with_nothing_recomputed_every_key_is_where_it_belongs(local: bool) -> None:
    """KV of layer 0 depends on a token and its position alone."""
    async with served_by(local) as (source, target), worker() as cold:
        target._core.repair = Repair(0.0)
        await warm(cold, PROMPT)
        await answer(target, fused(*plans(source, target)))
        held = []
        for engine, worst in ((cold, Fidelity.EXACT), (target, Fidelity.FUSED)):
            blocks = engine._core.pool.match(chain_of(PROMPT), worst)
            assert len(blocks) == len(PROMPT) // SIZE
            held.append([pool[:, blocks].flatten(1, 2) for pool in (engine._core.kv.keys, engine._core.kv.values)])
        for exact, turned in zip(*held, strict=True):
            torch.testing.assert_close(turned[0], exact[0], rtol=1e-4, atol=1e-5)
            assert not torch.allclose(turned[-1], exact[-1], rtol=1e-3)


@pytest.mark.parametrize("codec", ["raw", "i8"])
@pytest.mark.parametrize("local", [True, False], ids=["its own", "a peer's"])
async def test_repaired_kv_never_passes_for_exact(local: bool, codec: str) -> None:
    events: list[KvEvent] = []
    async with served_by(local, on_kv_events=events.extend) as (source, target), worker() as cold:
        expected = await warm(cold, PROMPT)
        rekeyer = Rekeyer(SIZE, lambda salt, adapter: naming_of())
        rekeyer.rekey(events)
        events.clear()
        tokens, first = await answer(target, fused(*plans(source, target, codec=codec)))
        assert (len(tokens), first.fidelity) == (10, Fidelity.FUSED)
        told = [event for event in rekeyer.rekey(events) if isinstance(event, Stored)]
        assert {event.fidelity for event in told} == {Fidelity.FUSED}
        chain = chain_of([*PROMPT, *tokens[:-1]])
        assert b"".join(event.chain for event in told) == chain[len(SYSTEM) // SIZE * HASH_BYTES :]
        # A next turn that accepts it goes on from it, and one that does not computes.
        again, first = await answer(target, fused())
        assert (again, first.fidelity) == (tokens, Fidelity.FUSED)
        assert first.cached_tokens == (len(PROMPT) - 1) // SIZE * SIZE
        for accepted in (Fidelity.EXACT, Fidelity.QUANTIZED, Fidelity.ROTATED):
            exact, first = await answer(target, generation(PROMPT, fidelity=accepted))
            assert (exact, first.fidelity) == (expected, Fidelity.EXACT)
        await until(lambda: at_rest(source) and at_rest(target))


async def test_one_passage_that_does_not_come_costs_itself() -> None:
    async with served_by(local=False) as (source, target), worker() as cold:
        target._core.repair = Repair(1.0)
        expected = await warm(cold, PROMPT)
        lost = passage(source, 0)._replace(addresses=("tcp://127.0.0.1:9",))
        documents = [signed(lost, target, fidelity=Fidelity.FUSED), plans(source, target)[1]]
        tokens, first = await answer(target, fused(*documents))
        assert (tokens, first.fidelity) == (expected, Fidelity.FUSED)
        assert first.cached_tokens == len(SYSTEM) + TURNED // 2
        assert outcome_of(first)[0] == "failed"


async def test_when_none_comes_everything_is_computed() -> None:
    async with served_by(local=False) as (source, target), worker() as cold:
        expected = await warm(cold, PROMPT)
        documents = plans(source, target)
        await source.stop()
        tokens, first = await answer(target, fused(*documents))
        assert (tokens, first.fidelity, first.cached_tokens) == (expected, Fidelity.EXACT, len(SYSTEM))
        assert outcome_of(first)[0] == "failed"
        await until(lambda: at_rest(target))


async def test_its_own_passage_that_is_gone_is_stale() -> None:
    async with served_by(local=True) as (source, target), worker() as cold:
        expected = await warm(cold, PROMPT)
        documents = plans(source, target)
        await target.reset_prefix_cache()
        tokens, first = await answer(target, fused(*documents))
        assert (tokens, first.fidelity, first.cached_tokens) == (expected, Fidelity.EXACT, 0)
        assert outcome_of(first) == ("refused", "stale")


async def test_the_same_position_behind_something_else() -> None:
    """What a chunked corpus does: another passage of the same length came before."""
    prompt = [*SYSTEM, *PASSAGES[2], *PASSAGES[1], *QUESTION]
    async with served_by(local=False) as (source, target), worker() as cold:
        target._core.repair = Repair(1.0)
        expected = await warm(cold, prompt)
        plan = plan_of(source, SERVED, 12, 19)
        assert not plan.is_shifted
        tokens, first = await answer(target, fused(signed(plan, target, fidelity=Fidelity.FUSED), prompt=prompt))
        assert (tokens, first.fidelity, first.cached_tokens) == (expected, Fidelity.FUSED, len(SYSTEM) + 28)


@pytest.mark.parametrize("accepted", [Fidelity.EXACT, Fidelity.QUANTIZED, Fidelity.ROTATED])
async def test_requests_that_accept_no_such_kv_get_none(accepted: Fidelity) -> None:
    async with served_by(local=True) as (source, target), worker() as cold:
        expected = await warm(cold, PROMPT)
        tokens, first = await answer(target, fused(*plans(source, target), fidelity=accepted))
        assert (tokens, first.fidelity, outcome_of(first)) == (expected, Fidelity.EXACT, ("refused", "unexpected"))


async def test_a_capability_for_better_kv_is_no_leave() -> None:
    async with served_by(local=True) as (source, target):
        plan = signed(passage(source, 0), target, fidelity=Fidelity.QUANTIZED)
        _, first = await answer(target, fused(plan))
        assert (first.fidelity, outcome_of(first)) == (Fidelity.EXACT, ("refused", "unexpected"))


@pytest.mark.parametrize("shift", [-1, 1, 40])
async def test_a_run_that_says_something_else_is_refused(shift: int) -> None:
    async with served_by(local=True) as (source, target), worker() as cold:
        expected = await warm(cold, PROMPT)
        plan = passage(source, 0)
        plan = plan._replace(target_position=plan.target_position + shift)
        tokens, first = await answer(target, fused(signed(plan, target, fidelity=Fidelity.FUSED)))
        assert (tokens, first.fidelity, outcome_of(first)) == (expected, Fidelity.EXACT, ("refused", "unexpected"))


async def test_with_an_exact_run_before_it() -> None:
    prompt = [*SERVED[:48], *text(8, 5), *PASSAGES[2], *QUESTION]
    async with pair() as (source, target), worker() as cold:
        target._core.repair = Repair(1.0)
        await warm(source, SERVED)
        expected = await warm(cold, prompt)
        exact = signed(plan_of(source, SERVED, 0, 12), target, fidelity=Fidelity.FUSED)
        turned = passage(source, 2)._replace(target_position=53)
        tokens, first = await answer(
            target, fused(signed(turned, target, fidelity=Fidelity.FUSED), exact, prompt=prompt)
        )
        assert (tokens, first.fidelity, first.cached_tokens) == (expected, Fidelity.FUSED, 48 + 28)


async def test_what_is_cached_exactly_is_not_turned() -> None:
    async with served_by(local=True) as (source, target):
        expected = await warm(target, PROMPT)
        tokens, first = await answer(target, fused(*plans(source, target)))
        assert (tokens, first.fidelity, outcome_of(first)) == (expected, Fidelity.EXACT, ("held", ""))


async def test_many_at_once_and_clients_that_leave() -> None:
    async with served_by(local=True, blocks=96) as (source, target):
        documents = plans(source, target)

        async def leave(number: int) -> None:
            async for _ in target.generate(fused(*documents, request_id=f"leaves-{number}", tokens=150)):
                return

        await asyncio.gather(*(leave(number) for number in range(6)))
        answers = await asyncio.gather(
            *(run(target, fused(*documents, request_id=f"stays-{number}")) for number in range(6))
        )
        assert len({tuple(token for output in outputs for token in output.token_ids) for outputs in answers}) == 1
        await until(lambda: at_rest(target))


async def test_a_full_pool_does_without() -> None:
    """Passages are held in place until they have been read; where there is no room for both, they are given up."""
    async with served_by(local=True, blocks=36) as (source, target), worker() as cold:
        expected = await warm(cold, PROMPT)
        tokens, first = await answer(target, fused(*plans(source, target)))
        assert (first.fidelity is Fidelity.FUSED) or tokens == expected
        await until(lambda: at_rest(target))
        assert (await run_tokens(target, PROMPT, greedy(10), "exact"))[0] == expected


async def test_a_worker_says_that_it_takes_them() -> None:
    async with worker() as engine:
        assert engine.info.transfer is not None
        assert engine.info.transfer.shifted


@pytest.mark.parametrize(("said", "exact"), [(1.0, True), (1, True), (0.15, False), (7.0, False), ("all", False)])
async def test_a_request_says_how_much_of_them_is_recomputed(said: object, exact: bool) -> None:
    async with served_by(local=True) as (source, target), worker() as cold:
        repaired: list[float] = []
        asked = target._core._repair_of
        target._core._repair_of = lambda one: (repaired.append(asked(one).fraction), asked(one))[1]  # type: ignore[method-assign, func-returns-value]
        one = fused(*plans(source, target))
        params = {**one.kv_transfer_params, FRACTION_PARAMETER: said}
        tokens, first = await answer(target, replace(one, kv_transfer_params=params))
        assert first.fidelity is Fidelity.FUSED
        assert repaired == [1.0 if exact else 0.15]
        assert not exact or tokens == await warm(cold, PROMPT)
