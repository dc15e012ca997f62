"""KV between memories as vLLM lays them out, and between those and a reference worker, over real sockets."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
import torch

from cachecore.index.schema import holder_id
from cachecore.kv.layout import LayerKv
from cachecore.scope import Fidelity, Salt
from cachecore.transfer.errors import Reason
from tests.workers.reference.support import KEYRING, BytesRenderer
from tests.workers.transfer.world import (
    Link,
    answer,
    generation,
    holder_of,
    plan_of,
    signed,
    transfer_options,
    until,
    warm,
)
from tests.workers.vllm.engine import FakeVllm, fake_vllm
from tests.workers.vllm.support import PROMPT, RIVAL, SIZE, TENANT
from workers.reference.engine import EngineOptions, ReferenceEngine
from workers.vllm.requests import Scheduled
from workers.vllm.settings import SettingsError

LAYER_BYTES = 40 * 2 * 8 * 2 * 4
"""Of the prompt's full blocks."""


@contextlib.asynccontextmanager
async def two(directory: Path, dtype: torch.dtype = torch.float32) -> AsyncIterator[tuple[FakeVllm, FakeVllm]]:
    async with fake_vllm(directory, dtype) as source, fake_vllm(directory, dtype) as target:
        target.take(7)  # so that no block has its number at the source
        yield source, target


@contextlib.asynccontextmanager
async def reference_worker(directory: Path, dtype: str = "float32") -> AsyncIterator[ReferenceEngine]:
    """Of the model in `directory`, with blocks of the same size."""
    options = EngineOptions("tiny", dtype=dtype, block_size_tokens=SIZE, blocks=64, transfer=transfer_options())
    engine = ReferenceEngine.load(directory, BytesRenderer(), options, KEYRING)
    await engine.start()
    try:
        yield engine
    finally:
        await engine.stop()


def same(first: list[LayerKv], second: list[LayerKv]) -> bool:
    pairs = zip(first, second, strict=True)
    return all(torch.equal(*parts) for one, other in pairs for parts in zip(one, other, strict=True))


# ---- between two of vLLM's -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
async def test_every_layer_comes_bit_for_bit(tmp_path: Path, dtype: torch.dtype) -> None:
    async with two(tmp_path, dtype) as (source, target):
        held = source.compute(PROMPT)
        good, table = await target.pull(PROMPT, source.plan(PROMPT))
        assert good
        assert same(target.read(table[:10]), source.read(held[:10]))
        assert not any(part[40:].any() for layer in target.read(table) for part in layer)
        assert target.mover.metrics.pulls == {("fetched", ""): 1}
        assert target.mover.metrics.pulled_tokens == 40


async def test_the_end_of_a_run_comes_behind_what_is_there(tmp_path: Path) -> None:
    async with two(tmp_path) as (source, target):
        held = source.compute(PROMPT)
        good, table = await target.pull(PROMPT, source.plan(PROMPT), computed=3 * SIZE)
        assert good
        assert same(target.read(table[3:10]), source.read(held[3:10]))
        assert not any(part.any() for layer in target.read(table[:3]) for part in layer)


async def test_what_was_pulled_is_served_on(tmp_path: Path) -> None:
    async with two(tmp_path) as (source, target), fake_vllm(tmp_path) as third:
        held = source.compute(PROMPT)
        request_id, table = target.begin(PROMPT, source.plan(PROMPT))
        assert await target.ended(request_id)
        plan = target.plan(PROMPT)
        assert await third.pull(PROMPT, plan) == (False, [*range(11)])  # not before its request has run
        target.step(Scheduled(request_id, table, True, 40))
        target.step(Scheduled(request_id, [], False, 42), table=table)
        good, blocks = await third.pull(PROMPT, plan)
        assert good
        assert same(third.read(blocks[:10]), source.read(held[:10]))


async def test_runs_of_two_sources_make_one_prefix(tmp_path: Path) -> None:
    async with two(tmp_path) as (first, target), fake_vllm(tmp_path) as second:
        blocks, others = first.compute(PROMPT, seed=1), second.compute(PROMPT, seed=2)
        good, table = await target.pull(PROMPT, first.plan(PROMPT, 0, 4), second.plan(PROMPT, 4, 10))
        assert good
        assert same(target.read(table[:4]), first.read(blocks[:4]))
        assert same(target.read(table[4:10]), second.read(others[4:10]))
        # One of them is gone: the other's part goes with it.
        first.requests.clear()
        first.step()
        good, _ = await target.pull(PROMPT, first.plan(PROMPT, 0, 4), second.plan(PROMPT, 4, 10))
        assert not good


async def test_blocks_that_were_given_away_are_not_served(tmp_path: Path) -> None:
    async with two(tmp_path) as (source, target):
        held = source.compute(PROMPT)
        source.step(Scheduled("another", held[4:6], True, 0))
        good, _ = await target.pull(PROMPT, source.plan(PROMPT))
        assert not good
        assert target.mover.metrics.pulls == {("refused", Reason.STALE.value): 1}
        good, table = await target.pull(PROMPT, source.plan(PROMPT, 0, 4))
        assert good
        assert same(target.read(table[:4]), source.read(held[:4]))


async def test_blocks_given_away_while_they_are_read_fail_the_pull(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with two(tmp_path) as (source, target):
        held = source.compute(PROMPT)
        pages = source.info.source.pages
        read = pages.payload

        def overtaken(layer: int, stretches: object) -> object:
            if layer == 1:
                source.step(Scheduled("another", held[4:6], True, 0))
                source.fill(held[4:6], seed=9)
            return read(layer, stretches)

        monkeypatch.setattr(pages, "payload", overtaken)
        good, _ = await target.pull(PROMPT, source.plan(PROMPT))
        assert not good
        assert [key[1] for key in target.mover.metrics.pulls] in ([Reason.STALE.value], [Reason.CLOSED.value])


async def test_another_tenants_kv_is_neither_found_nor_served(tmp_path: Path) -> None:
    async with two(tmp_path) as (source, target):
        source.compute(PROMPT, salt=KEYRING.mint_salt(Salt(RIVAL)))
        good, _ = await target.pull(PROMPT, source.plan(PROMPT))
        assert not good
        assert target.mover.metrics.pulls == {("refused", Reason.STALE.value): 1}


async def test_lossy_kv_stays_under_salts_that_say_so(tmp_path: Path) -> None:
    codecs = ("raw", "i8")
    async with (
        fake_vllm(tmp_path, codecs=codecs) as source,
        fake_vllm(tmp_path, codecs=codecs) as target,
        fake_vllm(tmp_path, codecs=codecs) as third,
    ):
        held = source.compute(PROMPT)
        salt = KEYRING.mint_salt(Salt(TENANT, Fidelity.QUANTIZED))
        request_id, table = target.begin(PROMPT, source.plan(PROMPT, codec="i8"), salt=salt)
        assert await target.ended(request_id)
        for ours, theirs in zip(target.read(table[:10]), source.read(held[:10]), strict=True):
            assert not torch.equal(ours.keys, theirs.keys)
            assert torch.allclose(ours.keys, theirs.keys, atol=0.1)
            assert torch.allclose(ours.values, theirs.values, atol=0.1)
        target.step(Scheduled(request_id, table, True, 40))
        target.step(Scheduled(request_id, [], False, 42), table=table)
        assert not (await third.pull(PROMPT, target.plan(PROMPT)))[0]
        assert third.mover.metrics.pulls == {("failed", Reason.UNEXPECTED.value): 1}
        good, _ = await third.pull(PROMPT, target.plan(PROMPT), salt=salt)
        assert good


async def test_another_model_is_refused(tmp_path: Path) -> None:
    directories = [tmp_path / "one", tmp_path / "other"]
    for directory in directories:
        directory.mkdir()
    async with fake_vllm(directories[0]) as source, fake_vllm(directories[1], seed=1) as target:
        source.compute(PROMPT)
        good, _ = await target.pull(PROMPT, source.plan(PROMPT))
        assert not good
        assert target.mover.metrics.pulls == {("refused", Reason.INCOMPATIBLE.value): 1}


@pytest.mark.parametrize(
    ("fault", "reasons"),
    [
        ({"flip_at": 700}, {"forged", "malformed", "unexpected"}),
        ({"flip_at": LAYER_BYTES}, {"forged", "malformed", "unexpected"}),
        ({"cut_at": 100}, {"closed", "incomplete"}),
        ({"cut_at": LAYER_BYTES + 800}, {"closed", "incomplete"}),
    ],
)
async def test_what_is_damaged_or_breaks_off_fails(tmp_path: Path, fault: dict[str, int], reasons: set[str]) -> None:
    async with two(tmp_path) as (source, target), Link(source.info.address).open() as link:
        source.compute(PROMPT)
        for name, at in fault.items():
            setattr(link, name, at)
        good, _ = await target.pull(PROMPT, source.plan(PROMPT, addresses=(link.address,)))
        assert not good
        ((outcome, reason),) = target.mover.metrics.pulls
        assert outcome == "failed"
        assert reason in reasons
        link.flip_at = link.cut_at = None
        good, _ = await target.pull(PROMPT, source.plan(PROMPT, addresses=(link.address,)))
        assert good


async def test_a_source_that_says_nothing_is_given_up(tmp_path: Path) -> None:
    async with (
        fake_vllm(tmp_path) as source,
        fake_vllm(tmp_path, stall_seconds=0.2) as target,
        Link(source.info.address).open() as link,
    ):
        source.compute(PROMPT)
        link.hold_at = LAYER_BYTES
        good, _ = await target.pull(PROMPT, source.plan(PROMPT, addresses=(link.address,)))
        assert not good
        assert target.mover.metrics.pulls == {("failed", Reason.STALLED.value): 1}


async def test_an_aborted_load_is_answered_at_once_and_writes_nothing_more(tmp_path: Path) -> None:
    async with two(tmp_path) as (source, target), Link(source.info.address).open() as link:
        source.compute(PROMPT)
        link.hold_at = LAYER_BYTES
        request_id, table = target.begin(PROMPT, source.plan(PROMPT, addresses=(link.address,)))
        await until(lambda: link.connections == 1)
        target.requests.finish(request_id, table[:10])
        target.step()
        assert await target.ended(request_id)
        before = target.read(table)
        link.opened.set()
        await asyncio.sleep(0.1)
        assert same(target.read(table), before)
        assert target.mover.settled() == (set(), set())
        assert len(target.mover.index) == 0


async def test_stopping_does_not_wait_for_loads(tmp_path: Path) -> None:
    async with fake_vllm(tmp_path) as source, Link(source.info.address).open() as link:
        source.compute(PROMPT)
        link.hold_at = LAYER_BYTES
        async with fake_vllm(tmp_path) as target:
            target.begin(PROMPT, source.plan(PROMPT, addresses=(link.address,)))
            await until(lambda: link.connections == 1)


# ---- with a reference worker -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
async def test_a_reference_workers_kv_comes_into_vllms_memory(tmp_path: Path, dtype: str) -> None:
    async with fake_vllm(tmp_path, getattr(torch, dtype)) as target, reference_worker(tmp_path, dtype) as source:
        await warm(source, PROMPT)
        good, table = await target.pull(PROMPT, plan_of(source, PROMPT))
        assert good
        held = source._core.pool.find(plan_of(source, PROMPT).run.tail, 10, Fidelity.EXACT)
        assert held is not None
        for layer, kv in enumerate(target.read(table[:10])):
            pools = source._core.kv.keys, source._core.kv.values
            keys, values = (pool[layer][list(held.blocks)].flatten(0, 1) for pool in pools)
            assert torch.equal(kv.keys, keys)
            assert torch.equal(kv.values, values)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
async def test_a_reference_worker_answers_from_vllms_memory(tmp_path: Path, dtype: str) -> None:
    """From KV that went there and back again: what it answers is what it would have answered anyway."""
    async with fake_vllm(tmp_path, getattr(torch, dtype)) as between:
        async with reference_worker(tmp_path, dtype) as first:
            expected = await warm(first, PROMPT)
            request_id, table = between.begin(PROMPT, plan_of(first, PROMPT))
            assert await between.ended(request_id)
            between.step(Scheduled(request_id, table, True, 40))
            between.step(Scheduled(request_id, [], False, 42), table=table)
        async with reference_worker(tmp_path, dtype) as second:
            plan = between.plan(PROMPT)
            tokens, output = await answer(second, generation(PROMPT, signed(plan, second)))
            assert tokens == expected
            assert output.transfer is not None
            assert (output.transfer.outcome, output.transfer.tokens) == ("fetched", 40)
            assert holder_of(second) != between.side.holder


# ---- the sidecar -----------------------------------------------------------------------------------------------------


async def test_the_sidecar_says_who_it_is_and_what_it_moved(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "ropeway.transfer")
    async with two(tmp_path) as (source, target):
        urls = [line.split()[3].removesuffix("/server_info") for line in caplog.messages if "gateways ask" in line]
        source.compute(PROMPT)
        await target.pull(PROMPT, source.plan(PROMPT))
        async with httpx.AsyncClient(trust_env=False) as http:
            ours, theirs = [(await http.get(f"{url}/server_info")).json() for url in urls]
            assert (await http.get(f"{urls[0]}/health")).status_code == 200
            metrics = (await http.get(f"{urls[1]}/metrics")).text
    labels = 'engine="0",model_name="tiny"'
    assert f'ropeway_worker_transfer_pulls_total{{{labels},outcome="fetched",reason=""}} 1.0' in metrics
    assert f"ropeway_worker_transfer_pulled_tokens_total{{{labels}}} 40.0" in metrics
    assert ours["engine"] == "vllm"
    assert (ours["model"], ours["block_size"], ours["dtype"]) == ("tiny", SIZE, "float32")
    assert ours["tokenizer_fingerprint"] == BytesRenderer.fingerprint
    assert ours["transfer"] == {
        "holder": holder_id(source.side.holder).decode(),
        "addresses": list(source.info.addresses),
        "compatibility": source.info.destination.shape.compatibility.hex(),
        "codecs": ["raw"],
        "bytes_per_token": 2 * 2 * 2 * 8 * 4,
        "shifted": False,
        "pools": [],
    }
    assert ours["counts"]["served"] == theirs["counts"]["pulls"]["fetched"] == 1
    assert ours["counts"]["served_bytes"] == theirs["counts"]["pulled_bytes"] == 2 * LAYER_BYTES
    assert ours["epoch"] == source.side.holder.epoch


async def test_the_sidecar_counts_what_was_refused(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "ropeway.transfer")
    async with two(tmp_path) as (source, target):
        url = next(line.split()[3] for line in caplog.messages if "gateways ask" in line)
        assert not (await target.pull(PROMPT, source.plan(PROMPT)))[0]
        async with httpx.AsyncClient(trust_env=False) as http:
            told = (await http.get(url)).raise_for_status().json()
    assert told["counts"]["refused"] == {"stale": 1}


async def test_layers_are_put_in_place_as_they_come(tmp_path: Path) -> None:
    """Though a request is computed once all of them have come."""
    async with two(tmp_path) as (source, target), Link(source.info.address).open() as link:
        source.info.source.frame_bytes = 1
        held = source.compute(PROMPT)
        link.hold_at = LAYER_BYTES + 3 * LAYER_BYTES // 4
        request_id, table = target.begin(PROMPT, source.plan(PROMPT, addresses=(link.address,)))
        first = source.read(held[:10])[0]
        await until(lambda: torch.equal(target.read(table[:10])[0].keys, first.keys))
        assert torch.equal(target.read(table[:10])[0].values, first.values)
        assert not any(part.any() for part in target.read(table[:10])[1])
        assert target.mover.settled() == (set(), set())
        link.opened.set()
        assert await target.ended(request_id)
        assert same(target.read(table[:10]), source.read(held[:10]))


async def test_a_port_that_is_taken_is_one_clear_error(tmp_path: Path) -> None:
    async with fake_vllm(tmp_path) as first:
        port = int(first.info.address.rpartition(":")[2])
        for taken in ({"port": port}, {"sidecar_port": port}):
            with pytest.raises(SettingsError, match="cannot"):
                async with fake_vllm(tmp_path, **taken):
                    pass
