"""Means of text that prompts share: averaged over what came before it, kept in a pool, and repaired from."""

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from cachecore.blocks import HASH_BYTES, Chain, PrefixHash, pack_tokens
from cachecore.chunks import Chunker
from cachecore.kv.means import CONTEXTS_MAX, MeanKv
from cachecore.scope import Fidelity, KeyId
from cachecore.store.pools import PoolBounds
from cachecore.store.pools.journal import ListingReader, RunStored
from tests.workers.transfer.world import (
    RIVAL,
    SIZE,
    TENANT,
    answer,
    chain_of,
    generation,
    naming_of,
    plan_of,
    salt_of,
    signed,
    until,
    warm,
)
from tests.workers.transfer.world import worker as plain_worker
from workers.pools import OpenPools, PoolSettings
from workers.reference.engine import ReferenceEngine
from workers.reference.fusing import Found, Repair
from workers.reference.kv_pool import NamedRun
from workers.reference.tiers.means import MeanKeeper, Sighting, Sightings
from workers.reference.tiers.pools import PoolTier
from workers.transfer.means import Known
from workers.transfer.passages import PassageLoad

_rng = random.Random(4)


def text(count: int) -> list[int]:
    return [_rng.randrange(97) for _ in range(count)]


PASSAGE = text(110)
PROMPTS = [[*text(before), *PASSAGE, *text(30)] for before in (20, 37, 51)]
"""The passage behind three others, at other offsets."""
WANTED = [*text(29), *PASSAGE, *text(9)]
ANCHOR = next(Chunker(naming_of()).cut(pack_tokens(PASSAGE)))
"""The first chunk that is the passage's wherever it stands, counted from its beginning."""


@contextlib.asynccontextmanager
async def worker(
    root: Path, codec: str = "raw", means: bool = True, **options: Any
) -> AsyncIterator[tuple[ReferenceEngine, PoolTier]]:
    settings = PoolSettings(PoolBounds(1 << 26), 4, codec, means)
    tier = PoolTier(OpenPools([f"shared=dir:{root}"], settings), ("raw", "i8"))
    transfer = {"attachments": (tier.attach,)}
    async with plain_worker(transfer, on_named=tier.offer, batched_tokens_max=512, blocks=256, **options) as engine:
        yield engine, tier


def keeper(tier: PoolTier) -> MeanKeeper:
    assert tier.keeper is not None
    return tier.keeper


async def known(tier: PoolTier, key_id: KeyId = TENANT) -> Known | None:
    """What the pool has of the passage."""
    return await on_loop(tier, keeper(tier)._store.find(naming_of(key_id), ANCHOR.name, pool(tier)))


def pool(tier: PoolTier) -> Any:
    return tier.pools["shared"]


async def on_loop(tier: PoolTier, work: Any) -> Any:
    """The pools belong to the transfers' loop."""
    return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, keeper(tier)._loop))


async def contexts(tier: PoolTier) -> int:
    found = await known(tier)
    return found.contexts.number if found else 0


async def seen(tier: PoolTier, engine: ReferenceEngine, prompts: Sequence[Sequence[int]] = PROMPTS) -> None:
    for prompt in prompts:
        await warm(engine, prompt)
    await until(lambda: not keeper(tier)._runs)


def computed(engine: ReferenceEngine, prompt: Sequence[int], start: int, end: int) -> MeanKv:
    """What the engine's cache has of a prompt's tokens, without rotation."""
    core, blocks = engine._core, -(-end // SIZE)
    chain = chain_of(prompt)
    held = core.pool.find(PrefixHash(chain[(blocks - 1) * HASH_BYTES : blocks * HASH_BYTES]), blocks)
    assert held is not None
    kv = core._read(held.blocks, start, end)
    return MeanKv.of(kv.keys, kv.values, start, core.model.rope)


def test_a_chunk_is_averaged_from_its_second_context_on() -> None:
    sightings = Sightings(chunks_max=2)

    def sighting(number: int) -> Sighting:
        return Sighting(NamedRun([1], Chain(bytes([number]) * HASH_BYTES), None, [1, 2, 3, 4]), 2)

    first, second = PrefixHash(b"1" * 16), PrefixHash(b"2" * 16)
    assert sightings.add(first, sighting(0)) == ()
    assert sightings.add(first, sighting(0)) == ()
    assert sightings.add(first, sighting(1)) == [sighting(0), sighting(1)]
    assert sightings.add(first, sighting(1)) == ()
    more = [len(sightings.add(first, sighting(number))) for number in range(2, 12)]
    assert more == [1] * (CONTEXTS_MAX - 2) + [0] * (12 - CONTEXTS_MAX)
    sightings.restart(first, sighting(5))
    assert sightings.add(first, sighting(6)) == [sighting(5), sighting(6)]
    sightings.add(second, sighting(0))
    sightings.add(PrefixHash(b"3" * 16), sighting(0))
    assert len(sightings) == 2
    assert sightings.add(first, sighting(0)) == ()  # forgotten, and seen for the first time


@pytest.mark.parametrize("codec", ["raw", "i8"])
async def test_the_mean_of_what_was_computed_comes_to_lie_in_the_pool(tmp_path: Path, codec: str) -> None:
    async with worker(tmp_path, codec) as (engine, tier):
        await seen(tier, engine)
        one = await known(tier)
        assert one is not None
        assert (one.text.token_ids, one.text.lead, one.contexts.number) == (PASSAGE, ANCHOR.start, 3)
        mean = await on_loop(tier, keeper(tier)._store.mean_of(one))
        starts = [len(prompt) - 30 - len(PASSAGE) for prompt in PROMPTS]
        copies = [
            computed(engine, prompt, start, start + len(PASSAGE)) for prompt, start in zip(PROMPTS, starts, strict=True)
        ]
        tolerance = 1e-5 if codec == "raw" else 0.05
        assert torch.allclose(mean.keys, torch.stack([copy.keys for copy in copies]).mean(0), atol=tolerance)
        assert torch.allclose(mean.values, torch.stack([copy.values for copy in copies]).mean(0), atol=tolerance)
        assert not torch.allclose(mean.values, copies[0].values, atol=1e-3)


async def test_a_context_that_says_less_makes_the_text_shorter(tmp_path: Path) -> None:
    less = [*text(33), *PASSAGE[:70], *text(30)]
    far_less = [*text(12), *PASSAGE[:30], *text(30)]
    async with worker(tmp_path) as (engine, tier):
        await seen(tier, engine, [*PROMPTS[:2], less])
        one = await known(tier)
        assert one is not None
        assert (one.text.token_ids, one.contexts.number) == (PASSAGE[:70], 3)
        mean = await on_loop(tier, keeper(tier)._store.mean_of(one))
        copies = [computed(engine, prompt, len(prompt) - 140, len(prompt) - 70) for prompt in PROMPTS[:2]]
        copies.append(computed(engine, less, 33, 103))
        assert torch.allclose(mean.values, torch.stack([copy.values for copy in copies]).mean(0), atol=1e-5)
        await seen(tier, engine, [far_less])
        assert await contexts(tier) == 3


async def test_what_is_one_context_is_none_more(tmp_path: Path) -> None:
    async with worker(tmp_path) as (engine, tier):
        await seen(tier, engine, PROMPTS[:1])
        await engine.reset_prefix_cache()
        await seen(tier, engine, PROMPTS[:1])
        assert await contexts(tier) == 0
        await warm(engine, PROMPTS[1], cache_salt=salt_of(RIVAL))
        await until(lambda: not keeper(tier)._runs)
        assert await contexts(tier) == 0
        assert await known(tier, RIVAL) is None


async def test_the_first_copy_may_be_gone_by_then(tmp_path: Path) -> None:
    async with worker(tmp_path) as (engine, tier):
        await seen(tier, engine, PROMPTS[:1])
        await engine.reset_prefix_cache()
        await seen(tier, engine, PROMPTS[1:])
        assert await contexts(tier) == 2


async def test_another_life_goes_on_with_it_and_counts_nothing_twice(tmp_path: Path) -> None:
    async with worker(tmp_path) as (engine, tier):
        await seen(tier, engine, PROMPTS[:2])
        assert await contexts(tier) == 2
    async with worker(tmp_path) as (engine, tier):
        await seen(tier, engine, [PROMPTS[1], PROMPTS[0]])
        assert await contexts(tier) == 2
        await seen(tier, engine, PROMPTS[2:])
        assert await contexts(tier) == 3


async def test_no_gateway_hears_of_means(tmp_path: Path) -> None:
    async with worker(tmp_path) as (engine, tier):
        began = tier.journal.next
        await seen(tier, engine)
        assert await contexts(tier) == 3
        told = tier.journal.since(began).changes
        assert {change.run.fidelity for change in told if isinstance(change, RunStored)} == {Fidelity.EXACT}
        assert all(isinstance(change, RunStored) for change in told)
        listed = b"".join([piece async for piece in tier.listing("shared")])
        assert {document.fidelity for document in ListingReader().feed(listed)} == {Fidelity.EXACT}


# ---- what they are for -----------------------------------------------------------------------------------------------


class Repairing:
    """Repairs, and keeps what it was given."""

    def __init__(self) -> None:
        self.fraction = 0.15
        self.given: list[Found] = []

    def __call__(self, model: Any, token_ids: Any, prefix: Any, passages: Sequence[Found]) -> Any:
        self.given += passages
        return Repair(self.fraction)(model, token_ids, prefix, passages)


def passage_plan(source: ReferenceEngine, target: ReferenceEngine, skipped: int = 0, **changes: Any) -> dict[str, Any]:
    """The blocks of the last prompt that lie within the passage, but for the first ones, for where `WANTED` has it."""
    served = len(PROMPTS[-1]) - 30 - len(PASSAGE)
    first, end = -(-served // SIZE) + skipped, (served + len(PASSAGE)) // SIZE
    wanted = 29 + first * SIZE - served
    plan = plan_of(source, PROMPTS[-1], first, end, target_position=wanted, **changes)
    return signed(plan, target, fidelity=Fidelity.FUSED)


async def repaired(engine: ReferenceEngine, plan: dict[str, Any]) -> list[Found]:
    """What the engine was given to repair, for the wanted prompt."""
    engine._core.repair = repairing = Repairing()  # type: ignore[assignment]
    _, first = await answer(engine, generation(WANTED, plan, fidelity=Fidelity.FUSED))
    assert first.transfer is not None
    assert (first.fidelity, first.transfer.outcome) == (Fidelity.FUSED, "fetched")
    return repairing.given


@pytest.mark.parametrize("is_own", [True, False], ids=["its own", "a peer's"])
@pytest.mark.parametrize("skipped", [0, 3])
async def test_a_passage_is_repaired_from_the_mean(tmp_path: Path, is_own: bool, skipped: int) -> None:
    async with worker(tmp_path) as (source, tier):
        await seen(tier, source)
        one = await known(tier)
        assert one is not None
        mean = await on_loop(tier, keeper(tier)._store.mean_of(one))
        async with contextlib.AsyncExitStack() as stack:
            target, used = source, tier
            if not is_own:
                target, used = await stack.enter_async_context(worker(tmp_path))
            [found] = await repaired(target, passage_plan(source, target, skipped))
            assert used.means["used"] == 1
            start, end = max(found.start, 29), min(found.end, 29 + len(PASSAGE))
            part = mean.part(slice(start - 29, end - 29))
            said = slice(start - found.start, end - found.start)
            assert end - start >= 90
            expected = part.keys_at(found.position + start - found.start, target._core.model.rope)
            assert torch.allclose(found.kv.keys[:, said], expected, atol=1e-5)
            assert torch.allclose(found.kv.values[:, said], part.values, atol=1e-6)


async def test_a_mean_of_one_context_is_not_used(tmp_path: Path) -> None:
    async with worker(tmp_path) as (engine, tier):
        await seen(tier, engine, PROMPTS[:1])
        await engine.reset_prefix_cache()
        await seen(tier, engine, PROMPTS[-1:])
        assert await contexts(tier) == 1
        await repaired(engine, passage_plan(engine, engine))
        assert tier.means.get("used", 0) == 0


async def test_a_damaged_mean_is_not_used(tmp_path: Path) -> None:
    async with worker(tmp_path) as (engine, tier):
        await seen(tier, engine)
        for file in tmp_path.rglob("*-3-*.hckv"):
            data = bytearray(file.read_bytes())
            data[len(data) // 3] ^= 1
            file.write_bytes(data)
        await repaired(engine, passage_plan(engine, engine))
        assert tier.means.get("used", 0) == 0


async def test_a_pool_that_hangs_costs_no_more_than_its_patience(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def hang(*_: object) -> None:
        await asyncio.sleep(3600)

    async with worker(tmp_path) as (engine, tier):
        await seen(tier, engine)
        monkeypatch.setattr(type(pool(tier)), "get", hang)
        await repaired(engine, passage_plan(engine, engine, deadline_seconds=0.2))
        assert tier.means.get("used", 0) == 0


async def test_without_the_flag_nothing_is_kept(tmp_path: Path) -> None:
    async with worker(tmp_path, means=False) as (engine, tier):
        for prompt in PROMPTS:
            await warm(engine, prompt)
        assert (tier.keeper, tier.means) == (None, {})
        await repaired(engine, passage_plan(engine, engine))
    assert list(tmp_path.rglob("*-3-*.hckv")) == []


def test_a_passage_says_where_its_keys_stand() -> None:
    passage = PassageLoad.__new__(PassageLoad)
    passage.start, passage.position, passage.borrowed = 100, 40, ()
    assert passage.stands_at(110) == 110
    passage.borrowed = (3, 4)
    assert passage.stands_at(110) == 50
