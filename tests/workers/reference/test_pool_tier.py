"""L2 of a worker: what it computes comes to lie in a pool, and another worker, or its own next life, starts from it."""

import argparse
import asyncio
import contextlib
import errno
import os
import subprocess
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from cachecore.blocks import HASH_BYTES
from cachecore.scope import Fidelity
from cachecore.store.pools import KvPool, PoolBounds, run_ends
from cachecore.transfer.plan import Plan
from tests.workers.reference.support import run, tokens_of
from tests.workers.transfer.world import (
    BLOCKS,
    PROMPT,
    SIZE,
    answer,
    chain_of,
    generation,
    run_of,
    signed,
    until,
    warm,
)
from tests.workers.transfer.world import worker as plain_worker
from workers.engine import TransferOutcome
from workers.pools import OpenPools, PoolSettings
from workers.reference.cli import add_reference_parser
from workers.reference.engine import ReferenceEngine
from workers.reference.kv_pool import NamedRun
from workers.reference.tiers.pools import PoolTier, WriteOutcome, codec_for

RUN_BLOCKS = 4
ENDS = list(run_ends(0, BLOCKS, RUN_BLOCKS))
RUNS = len(ENDS)
DEPTH = ENDS[-1][0] * SIZE
"""Tokens of the prompt that its runs hold."""
SMALL_DISK_BYTES = 40 << 10
"""Some of the runs, of 9 kB each."""


@contextlib.asynccontextmanager
async def worker(
    root: Path, codec: str = "raw", run_blocks: int = RUN_BLOCKS, **options: Any
) -> AsyncIterator[tuple[ReferenceEngine, PoolTier]]:
    settings = PoolSettings(PoolBounds(1 << 26), run_blocks, codec)
    tier = PoolTier(OpenPools([f"shared=dir:{root}"], settings), ("raw", "i8"))
    transfer = {"attachments": (tier.attach,)}
    async with plain_worker(transfer, on_named=tier.offer, **options) as engine:
        yield engine, tier


def pool_of(tier: PoolTier) -> KvPool:
    return tier.pools["shared"]


def counts(tier: PoolTier) -> dict[str, int]:
    assert tier.writer is not None
    return {str(outcome): count for outcome, count in tier.writer.counts.items()}


async def first_token(engine: ReferenceEngine) -> list[int]:
    """With no block after those of the prompt."""
    return tokens_of(await run(engine, generation(PROMPT, tokens=1)))


async def stored(tier: PoolTier, runs: int) -> None:
    await until(lambda: counts(tier).get("stored", 0) >= runs)


def plans_of(
    tier: PoolTier, target: ReferenceEngine, prompt: Sequence[int] = PROMPT, codec: str = "raw", seconds: float = 30.0
) -> list[dict[str, Any]]:
    """One for each run, as a gateway writes them."""
    holder = pool_of(tier).holder
    assert holder is not None
    plans = []
    for end, blocks in run_ends(0, len(prompt) // SIZE, RUN_BLOCKS):
        first = end - blocks
        one = run_of(prompt, first, end)
        plans.append(signed(Plan(holder, (), one, first * SIZE, first * SIZE, codec, seconds), target))
    return plans


async def restarted(root: Path, codec: str, expected: Sequence[int]) -> None:
    """A worker that has just come up answers from the pool."""
    async with worker(root, codec) as (engine, tier):
        plans = plans_of(tier, engine, codec=codec)
        tokens, first = await answer(engine, generation(PROMPT, *plans, fidelity=Fidelity.QUANTIZED))
        assert first.transfer is not None
        assert (first.transfer.outcome, first.transfer.reason) == (TransferOutcome.FETCHED, "")
        assert first.cached_tokens == first.transfer.tokens == DEPTH
        assert first.fidelity == (Fidelity.EXACT if codec == "raw" else Fidelity.QUANTIZED)
        if codec == "raw":
            assert tokens == expected


@pytest.mark.parametrize("codec", ["raw", "i8"])
async def test_a_worker_starts_from_what_another_life_has_stored(tmp_path: Path, codec: str) -> None:
    async with worker(tmp_path, codec) as (engine, tier):
        expected = await warm(engine)
        await stored(tier, RUNS)
    await restarted(tmp_path, codec, expected)


async def test_runs_lie_under_names_that_follow_from_the_prompt(tmp_path: Path) -> None:
    async with worker(tmp_path) as (engine, tier):
        await run(engine, generation(PROMPT, tokens=1))
        await stored(tier, RUNS)
        transfer = engine.info.transfer
        assert transfer is not None
        found = {each.first_block: each async for each in pool_of(tier).runs()}
        names = chain_of(PROMPT)
        assert {first: each.key.blocks for first, each in found.items()} == {end - size: size for end, size in ENDS}
        for first, each in found.items():
            assert each.chain == names[first * HASH_BYTES : (first + each.key.blocks) * HASH_BYTES]
            assert each.key.compatibility.hex() == transfer.compatibility
            assert (each.key.codec, each.key.fidelity, each.key.layers.start) == ("raw", Fidelity.EXACT, 0)
        (told,) = tier.describe()
        assert (told["name"], told["run_blocks"], told["codec"]) == ("shared", RUN_BLOCKS, "raw")


async def test_an_answer_is_stored_as_it_grows_and_nothing_twice(tmp_path: Path) -> None:
    async with worker(tmp_path) as (engine, tier):
        tokens = tokens_of(await run(engine, generation(PROMPT, tokens=40)))
        blocks = (len(PROMPT) + len(tokens) - 1) // SIZE
        growing = {run for block in range(BLOCKS, blocks) for run in run_ends(block, block + 1, RUN_BLOCKS)}
        runs = len(growing | set(ENDS))
        assert runs > RUNS
        await stored(tier, runs)
        await engine.reset_prefix_cache()
        assert tokens_of(await run(engine, generation(PROMPT, tokens=40, request_id="again"))) == tokens
        await until(lambda: counts(tier) == {"stored": runs, "present": runs})


async def test_what_was_pulled_is_not_stored_again_and_quantized_kv_never(tmp_path: Path) -> None:
    (tmp_path / "raw").mkdir()
    (tmp_path / "i8").mkdir()
    for codec, outcomes in (("raw", {"present": RUNS}), ("i8", {})):
        async with worker(tmp_path / codec, codec) as (engine, tier):
            await first_token(engine)
            await stored(tier, RUNS)
        async with worker(tmp_path / codec, codec) as (engine, tier):
            plans = plans_of(tier, engine, codec=codec)
            _, first = await answer(engine, generation(PROMPT, *plans, tokens=1, fidelity=Fidelity.QUANTIZED))
            assert first.cached_tokens == DEPTH
            await until(lambda tier=tier: tier.writer.waiting == 0)  # type: ignore[misc]
            await tier.writer.drain(5.0)  # type: ignore[union-attr]
            assert counts(tier) == outcomes


async def test_a_writer_that_does_not_keep_up_drops_what_comes_last(tmp_path: Path) -> None:
    ends = list(run_ends(0, BLOCKS, 1))
    async with worker(tmp_path, run_blocks=1) as (engine, tier):
        writer = tier.writer
        assert writer is not None
        loop, gate = asyncio.get_running_loop(), asyncio.Event()
        writer._offers_max = 3
        store = writer._store

        async def held_up(offer: Any) -> WriteOutcome:
            await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(gate.wait(), loop))
            return await store(offer)

        writer._store = held_up  # type: ignore[method-assign]
        await run(engine, generation(PROMPT, tokens=1))
        await until(lambda: counts(tier).get("dropped", 0) >= len(ends) - 4)
        gate.set()
        await until(lambda: sum(counts(tier).values()) == len(ends))
        found = sorted([each.first_block + each.key.blocks async for each in pool_of(tier).runs()])
        assert found[:3] == [end for end, _ in ends[:3]]
        assert len(found) < len(ends)


async def test_what_was_evicted_before_its_turn_is_lost(tmp_path: Path) -> None:
    async with worker(tmp_path) as (engine, tier):
        offers: list[NamedRun] = []
        engine._core.pool.on_named = offers.append
        await run(engine, generation(PROMPT, tokens=1))
        await engine.reset_prefix_cache()
        for offer in offers:
            tier.offer(offer)
        await until(lambda: counts(tier) == {"lost": RUNS})


def test_a_codec_that_the_model_does_not_bear_is_refused(tmp_path: Path) -> None:
    pools = OpenPools([f"shared=dir:{tmp_path}"], PoolSettings(PoolBounds(1 << 20)))
    assert codec_for(pools, ("raw", "i8")) == "i8"
    assert codec_for(pools, ("raw",)) == "raw"
    picky = OpenPools([f"shared=dir:{tmp_path}"], PoolSettings(PoolBounds(1 << 20), codec="i8"))
    with pytest.raises(ValueError, match="--pool-codec i8: KV of this model may be stored as raw"):
        codec_for(picky, ("raw",))


def test_what_is_wrong_with_a_pool_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    parser = argparse.ArgumentParser()
    add_reference_parser(parser.add_subparsers())
    args = parser.parse_args(["reference", "--pool", "shared=dir:/does/not/exist"])
    assert args.run(args) == 1
    complaint = "/does/not/exist is no directory: make it, or mount it, first"
    assert capsys.readouterr().err == f"ropeway: error: --pool shared=dir:/does/not/exist: {complaint}\n"


# ---- faults ----------------------------------------------------------------------------------------------------------


async def answered_without(
    root: Path, expected: Sequence[int], disaster: Callable[[PoolTier], object], reasons: set[str]
) -> None:
    """A pool fails when it is wanted: the answer is what it would be anyway."""
    async with worker(root) as (engine, tier):
        plans = plans_of(tier, engine)
        disaster(tier)
        tokens, first = await answer(engine, generation(PROMPT, *plans))
        assert tokens == expected
        assert first.transfer is not None
        assert first.transfer.outcome in (TransferOutcome.REFUSED, TransferOutcome.FAILED)
        assert first.transfer.reason in reasons
        assert first.cached_tokens == first.transfer.tokens < DEPTH
        assert engine.metrics.transfer is not None
        refused = {reason for outcome, reason in engine.metrics.transfer.pulls if outcome != "fetched"}
        assert refused <= reasons


@pytest.fixture
async def filled(tmp_path: Path) -> tuple[Path, list[int]]:
    """A pool's directory that holds the prompt, and the tokens that follow it."""
    async with worker(tmp_path) as (engine, tier):
        expected = await warm(engine)
        await stored(tier, RUNS)
    return tmp_path, expected


def files_of(root: Path) -> list[Path]:
    return sorted(root.glob("*/runs/*/*/*.hckv"))


async def test_a_directory_that_vanishes_costs_a_recomputation(filled: tuple[Path, list[int]]) -> None:
    root, expected = filled

    def vanish(tier: PoolTier) -> None:
        root.rename(root.with_name("elsewhere"))

    await answered_without(root, expected, vanish, {"unreachable"})


async def test_runs_that_are_gone_cost_a_recomputation(filled: tuple[Path, list[int]]) -> None:
    root, expected = filled

    def evict(tier: PoolTier) -> None:
        for file in files_of(root):
            file.unlink()

    await answered_without(root, expected, evict, {"stale"})


async def test_damaged_runs_cost_a_recomputation(filled: tuple[Path, list[int]]) -> None:
    root, expected = filled

    def damage(tier: PoolTier) -> None:
        for file in files_of(root):
            data = bytearray(file.read_bytes())
            data[len(data) // 3] ^= 4
            file.write_bytes(data)

    await answered_without(root, expected, damage, {"malformed"})
    assert files_of(root) != []  # written anew by whoever computed them


async def test_a_wiped_pool_costs_a_recomputation(filled: tuple[Path, list[int]]) -> None:
    root, expected = filled
    async with worker(root) as (engine, tier):
        plans = plans_of(tier, engine)
        loop = tier.writer._loop  # type: ignore[union-attr]
        assert await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(pool_of(tier).wipe(), loop))  # type: ignore[arg-type]
        tokens, first = await answer(engine, generation(PROMPT, *plans))
        assert tokens == expected
        assert first.transfer is not None
        assert (first.transfer.outcome, first.transfer.reason) == (TransferOutcome.REFUSED, "other_epoch")


async def test_some_runs_missing_in_the_middle_are_computed(filled: tuple[Path, list[int]]) -> None:
    root, expected = filled
    async with worker(root) as (engine, tier):
        plans = plans_of(tier, engine)
        gone = [each async for each in pool_of(tier).runs() if each.first_block == 4 * RUN_BLOCKS]
        next(root.glob(f"*/runs/*/*/{gone[0].key.name}.hckv")).unlink()
        tokens, first = await answer(engine, generation(PROMPT, *plans))
        assert tokens == expected
        assert first.transfer is not None
        assert first.transfer.reason == "stale"
        assert first.cached_tokens == DEPTH - RUN_BLOCKS * SIZE


async def test_a_full_disk_is_declined_and_requests_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*arguments: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("cachecore.store.pools.directory.os.writev", full)
    async with worker(tmp_path) as (engine, tier), plain_worker() as other:
        assert await first_token(engine) == await first_token(other)
        await until(lambda: counts(tier).get("declined", 0) >= RUNS)
        assert pool_of(tier).stats().declined == {"full": RUNS}
        monkeypatch.undo()
        await engine.reset_prefix_cache()
        await run(engine, generation(PROMPT, tokens=1, request_id="again"))
        await stored(tier, RUNS)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of its own, that a few runs fill."""
    where = tmp_path / "disk"
    where.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={SMALL_DISK_BYTES}", "tmpfs", str(where)]
    if os.geteuid() or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("mounting a file system takes privileges that this process lacks")
    try:
        yield where
    finally:
        subprocess.run(["umount", "--lazy", str(where)], check=True)


async def test_a_disk_that_fills_up_costs_no_answer(small_disk: Path) -> None:
    async with worker(small_disk) as (engine, tier), plain_worker() as other:
        expected = await warm(other)
        assert await warm(engine) == expected
        await until(lambda: sum(counts(tier).values()) >= RUNS)
        assert pool_of(tier).stats().declined["full"] > 0
        await engine.reset_prefix_cache()
        plans = plans_of(tier, engine)
        tokens, first = await answer(engine, generation(PROMPT, *plans))
        assert tokens == expected
        assert first.cached_tokens < DEPTH  # what did not fit was computed
        assert sum(path.stat().st_size for path in small_disk.rglob("*") if path.is_file()) <= SMALL_DISK_BYTES


async def test_a_pool_that_is_away_is_not_encoded_for(tmp_path: Path) -> None:
    root, elsewhere = tmp_path / "pool", tmp_path / "elsewhere"
    root.mkdir()
    async with worker(root) as (engine, tier), plain_worker() as other:
        root.rename(elsewhere)
        assert await first_token(engine) == await first_token(other)
        await until(lambda: counts(tier) == {"away": RUNS})
        elsewhere.rename(root)
        for attempt in range(100):  # one in a while is let through to see whether it is back
            await engine.reset_prefix_cache()
            await run(engine, generation(PROMPT, tokens=1, request_id=f"again {attempt}"))
            if counts(tier).get("stored"):
                break
            await asyncio.sleep(0.1)
        await until(lambda: pool_of(tier).stats().up)
