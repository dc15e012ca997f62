"""Quantized KV beside exact KV of the same name: who gets which, what is announced, and what is passed on."""

from collections.abc import Sequence

from cachecore.events import BlockStored, KvEvent
from cachecore.index.contract import Stored
from cachecore.rekey import Rekeyer
from cachecore.scope import Fidelity, Naming
from tests.workers.reference.support import KEYRING
from tests.workers.transfer.world import (
    BLOCKS,
    HELD,
    PROMPT,
    RIVAL,
    SIZE,
    answer,
    at_rest,
    chain_of,
    generation,
    naming_of,
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
from workers.reference.kv_pool import handle_of

QUANTIZED = Fidelity.QUANTIZED


def said(first: StepOutput) -> tuple[str, str]:
    assert first.transfer is not None
    return first.transfer.outcome.value, first.transfer.reason


async def pull_quantized(
    source: ReferenceEngine, target: ReferenceEngine, prompt: Sequence[int] = PROMPT, **plan: object
) -> list[int]:
    document = signed(plan_of(source, prompt, codec="i8", **plan), target)
    tokens, first = await answer(target, generation(prompt, document, request_id="quantized", fidelity=QUANTIZED))
    assert first.fidelity is QUANTIZED
    return tokens


async def test_who_takes_nothing_but_exact_kv_gets_it() -> None:
    async with pair() as (source, target):
        expected = await warm(source)
        await pull_quantized(source, target)
        tokens, first = await answer(target, generation(PROMPT))
        assert (tokens, first.cached_tokens, first.fidelity) == (expected, 0, Fidelity.EXACT)
        # Both are held now, and whoever takes either gets the better one.
        tokens, first = await answer(target, generation(PROMPT, fidelity=QUANTIZED))
        assert (tokens, first.cached_tokens, first.fidelity) == (expected, HELD, Fidelity.EXACT)
        handles = await target.cached_blocks()
        names = [chain_of(PROMPT)[at : at + 16] for at in range(0, BLOCKS * 16, 16)]
        assert {handle_of(name) for name in names} <= handles.keys()  # type: ignore[arg-type]
        assert {handle_of(name, QUANTIZED) for name in names} <= handles.keys()  # type: ignore[arg-type]
        assert len(handles) >= 2 * BLOCKS


async def test_what_is_computed_after_quantized_kv_is_as_bad() -> None:
    longer = [*PROMPT, *PROMPT[::-1]]
    async with pair() as (source, target):
        await warm(source)
        await pull_quantized(source, target)
        _, first = await answer(target, generation(longer, fidelity=QUANTIZED))
        assert (first.cached_tokens, first.fidelity) == (HELD, QUANTIZED)
        assert all(held is None or held.fidelity is QUANTIZED for held in target._core.pool._held)
        _, first = await answer(target, generation(longer, fidelity=QUANTIZED, request_id="again"))
        assert (first.cached_tokens, first.fidelity) == (2 * len(PROMPT) // SIZE * SIZE - SIZE, QUANTIZED)


async def test_an_exact_beginning_stays_exact() -> None:
    async with pair() as (source, target):
        await warm(source)
        await answer(target, generation(PROMPT[: 8 * SIZE + 1], request_id="before", tokens=1))
        await pull_quantized(source, target)
        held = [held for held in target._core.pool._held if held is not None]
        by_number = {one.number: one.fidelity for one in held}
        assert [by_number[number] for number in (0, 7, 8, BLOCKS - 1)] == [0, 0, 1, 1]


async def test_quantized_kv_is_passed_on_as_it_is_and_never_quantized_again() -> None:
    async with pair() as (source, middle), worker() as target:
        await warm(source)
        tokens = await pull_quantized(source, middle)
        for fidelity, codec, outcome in (
            (QUANTIZED, "i8", ("refused", "stale")),
            (Fidelity.EXACT, "raw", ("refused", "stale")),
            (QUANTIZED, "raw", ("fetched", "")),
        ):
            plan = signed(plan_of(middle, codec=codec), target, fidelity=fidelity)
            await target.reset_prefix_cache()
            again, first = await answer(target, generation(PROMPT, plan, fidelity=QUANTIZED))
            assert said(first) == outcome
        assert first.fidelity is QUANTIZED
        assert again == tokens


async def test_a_request_that_takes_exact_kv_only_leaves_quantized_frames() -> None:
    async with pair() as (source, middle), worker() as target:
        expected = await warm(source)
        await pull_quantized(source, middle)
        plan = signed(plan_of(middle, codec="raw"), target, fidelity=QUANTIZED)
        tokens, first = await answer(target, generation(PROMPT, plan))
        assert said(first) == (TransferOutcome.FAILED, "unexpected")
        assert (tokens, first.cached_tokens) == (expected, 0)
        await until(lambda: at_rest(target))


async def test_events_say_where_fidelity_gets_worse() -> None:
    events: list[KvEvent] = []
    salt = salt_of(RIVAL)
    async with worker() as source, worker(on_kv_events=events.extend) as target:
        await warm(source, cache_salt=salt)
        before = generation(PROMPT[: 8 * SIZE + 1], request_id="before", tokens=1, cache_salt=salt)
        await answer(target, before)
        plan = signed(plan_of(source, codec="i8", key_id=RIVAL), target, key_id=RIVAL)
        await answer(target, generation(PROMPT, plan, fidelity=QUANTIZED, cache_salt=salt))
        await answer(target, generation(PROMPT, request_id="exact", cache_salt=salt))
        held = await target.cached_blocks()
    stored = [event for event in events if isinstance(event, BlockStored)]
    said_salts = [KEYRING.read_salt(event.cache_salt) for event in stored if event.cache_salt is not None]
    assert [salt.fidelity for salt in said_salts if salt is not None] == [Fidelity.EXACT, QUANTIZED]

    def naming_for(text: str | None, adapter: str | None) -> Naming | None:
        return naming_of(RIVAL) if text and KEYRING.read_salt(text) else None

    rekeyer = Rekeyer(SIZE, naming_for)
    followed = [event for event in rekeyer.rekey(events) if isinstance(event, Stored)]
    chain = chain_of(PROMPT, naming_of(RIVAL))
    exact = b"".join(event.chain for event in followed if event.fidelity is Fidelity.EXACT)
    quantized = b"".join(event.chain for event in followed if event.fidelity is QUANTIZED)
    assert exact[: len(chain)] == chain
    assert quantized[: len(chain) - 8 * 16] == chain[8 * 16 :]
    assert {record.handle for record in rekeyer.handles()} == held.keys()


async def test_a_prompt_that_is_quantized_from_its_first_block() -> None:
    events: list[KvEvent] = []
    async with worker() as source, worker(on_kv_events=events.extend) as target:
        await warm(source)
        await pull_quantized(source, target)
    first = events[0]
    assert isinstance(first, BlockStored)
    assert first.parent_block_hash is None
    assert first.cache_salt is not None
    salt = KEYRING.read_salt(first.cache_salt)
    assert salt is not None
    assert (salt.fidelity, salt.key_id, salt.client_salt) == (QUANTIZED, naming_of().scope.key_id, b"")
    assert all(event.cache_salt is None for event in events[1:] if isinstance(event, BlockStored))
