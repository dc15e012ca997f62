"""Passages from other positions, repaired into vLLM's memory; what computing gives is told by a reference worker."""

import threading
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from cachecore.scope import Fidelity, Salt
from cachecore.transfer.errors import Reason
from cachecore.transfer.plan import FRACTION_PARAMETER, Grant, Plan, sign
from tests.workers.reference.support import KEYRING
from tests.workers.transfer.world import chain_of, plan_of, warm
from tests.workers.vllm.checkpoints import save_checkpoint
from tests.workers.vllm.engine import FakeVllm, fake_vllm
from tests.workers.vllm.support import SALT, SIZE, TENANT, FakeRequest, params
from tests.workers.vllm.test_moving import reference_worker
from workers.openai.fidelity import FIDELITY_HEADER, TRANSFER_HEADER
from workers.reference.engine import ReferenceEngine
from workers.vllm.reports import key_of
from workers.vllm.requests import Scheduled


def text(seed: int, count: int) -> list[int]:
    return [(index * index * 31 + index * (7 + seed) + seed * 11) % 97 for index in range(count)]


SYSTEM, PASSAGES, QUESTION = text(9, 16), [text(seed, 30) for seed in range(3)], text(5, 9)
SERVED = [*SYSTEM, *PASSAGES[0], *PASSAGES[1], *PASSAGES[2], *text(4, 5)]
PROMPT = [*SYSTEM, *PASSAGES[2], *text(3, 3), *PASSAGES[0], *QUESTION]
"""Passages 2 and 0, three tokens between them, and a question."""
WHERE = {0: (16, 49), 2: (76, 16)}
"""Passage: where it begins in what was served, and in the prompt."""
BEGUN = len(SYSTEM) // SIZE
END = (49 + 28) // SIZE
"""Blocks of the prompt that end within the last passage."""
FUSED = KEYRING.mint_salt(Salt(TENANT, Fidelity.FUSED))


def passage(source: ReferenceEngine | FakeVllm, number: int, **changes: Any) -> Plan:
    """The blocks that lie within a passage of what was served."""
    served, wanted = WHERE[number]
    first, end = -(-served // SIZE), (served + 30) // SIZE
    wanted += first * SIZE - served
    if isinstance(source, FakeVllm):
        return source.plan(SERVED, first, end, target_position=wanted, **changes)
    return plan_of(source, SERVED, first, end, target_position=wanted, **changes)


def signed(plan: Plan, target: FakeVllm, fidelity: Fidelity = Fidelity.FUSED) -> dict[str, Any]:
    return sign(plan, Grant(TENANT, target.info.holder, fidelity, time.time() + 600), KEYRING)


def all_of(source: ReferenceEngine, target: FakeVllm) -> list[dict[str, Any]]:
    """The prompt's own beginning, and both passages."""
    plans = plan_of(source, PROMPT, 0, BEGUN), passage(source, 0), passage(source, 2)
    return [signed(plan, target) for plan in plans]


def stacked(target: FakeVllm, blocks: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Keys and values: [layers, tokens, kv_heads, head_dim] each."""
    layers = target.read(blocks)
    return torch.stack([layer.keys for layer in layers]), torch.stack([layer.values for layer in layers])


async def computed(source: ReferenceEngine, prompt: Sequence[int]) -> tuple[Tensor, Tensor]:
    """What computing a prompt gives."""
    await warm(source, prompt)
    pool = source._core.kv
    blocks = source._core.pool.match(chain_of(prompt), Fidelity.EXACT)
    assert len(blocks) == len(prompt) // SIZE
    keys, values = (part[:, blocks].flatten(1, 2) for part in (pool.keys, pool.values))
    return keys, values


@pytest.fixture
async def source(tmp_path: Path) -> AsyncIterator[ReferenceEngine]:
    save_checkpoint(tmp_path)
    async with reference_worker(tmp_path) as source:
        await warm(source, SERVED)
        yield source


@pytest.fixture
async def target(tmp_path: Path, source: ReferenceEngine) -> AsyncIterator[FakeVllm]:
    async with fake_vllm(tmp_path, fuser=True, codecs=("raw", "i8")) as target:
        target.take(7)  # so that no block has its number at the source
        yield target


async def fused(target: FakeVllm, *documents: Any, fraction: float | None = None) -> tuple[bool, list[int]]:
    how = {} if fraction is None else {FRACTION_PARAMETER: fraction}
    request_id, table = target.begin(PROMPT, *documents, salt=FUSED, more=how)
    good = await target.ended(request_id)
    target.requests.finish(request_id, ())
    return good, table


async def test_recomputed_whole_they_are_what_computing_gives(
    tmp_path: Path, source: ReferenceEngine, target: FakeVllm
) -> None:
    good, table = await fused(target, *all_of(source, target), fraction=1.0)
    assert good
    async with reference_worker(tmp_path) as cold:
        for expected, ours in zip(await computed(cold, PROMPT), stacked(target, table), strict=True):
            torch.testing.assert_close(ours[:, : END * SIZE], expected[:, : END * SIZE], rtol=1e-3, atol=1e-4)
            assert not ours[:, END * SIZE :].any()
    assert target.mover.metrics.pulls == {("fetched", ""): 3}
    assert target.mover.metrics.pulled_tokens == len(SYSTEM) + 28 + 28


async def test_with_nothing_recomputed_every_key_is_where_it_belongs(
    tmp_path: Path, source: ReferenceEngine, target: FakeVllm
) -> None:
    """KV of layer 0 depends on a token and its position alone; that of others on all that came before."""
    good, table = await fused(target, *all_of(source, target), fraction=0.0)
    assert good
    async with reference_worker(tmp_path) as cold:
        for expected, ours in zip(await computed(cold, PROMPT), stacked(target, table), strict=True):
            torch.testing.assert_close(ours[0, : END * SIZE], expected[0, : END * SIZE], rtol=1e-4, atol=1e-5)
            assert torch.equal(ours[:, : len(SYSTEM)], expected[:, : len(SYSTEM)])
            assert not torch.allclose(ours[-1, : END * SIZE], expected[-1, : END * SIZE], rtol=1e-3)


async def test_they_go_on_from_what_the_engine_has_itself(
    tmp_path: Path, source: ReferenceEngine, target: FakeVllm
) -> None:
    """Its own passages too, which nobody sends."""
    request_id, held = target.begin(SERVED, plan_of(source, SERVED))
    assert await target.ended(request_id)
    target.step(Scheduled(request_id, held, True, len(SERVED)))
    target.requests.finish(request_id, held)
    target.step()
    before = target.mover.metrics.pulled_bytes
    documents = [signed(passage(target, number), target) for number in (0, 2)]
    table = [*held[:BEGUN], *target.take(30)]
    request_id, table = target.begin(
        PROMPT, *documents, salt=FUSED, computed=len(SYSTEM), table=table, more={FRACTION_PARAMETER: 1.0}
    )
    assert await target.ended(request_id)
    assert target.mover.metrics.pulled_bytes == before
    async with reference_worker(tmp_path) as cold:
        for expected, ours in zip(await computed(cold, PROMPT), stacked(target, table[:END]), strict=True):
            torch.testing.assert_close(ours, expected[:, : END * SIZE], rtol=1e-3, atol=1e-4)


async def test_what_was_repaired_is_served_as_that_alone(
    tmp_path: Path, source: ReferenceEngine, target: FakeVllm
) -> None:
    request_id, table = target.begin(PROMPT, *all_of(source, target), salt=FUSED)
    assert await target.ended(request_id)
    target.step(Scheduled(request_id, table, True, END * SIZE))
    target.requests.finish(request_id, table)
    target.step()
    async with fake_vllm(tmp_path, fuser=True) as third:
        plan = target.plan(PROMPT, 0, END)
        request_id, _ = third.begin(PROMPT, signed(plan, third))  # under a salt that wants it exact
        assert not await third.ended(request_id)
        assert [key[0] for key in third.mover.metrics.pulls] in (["failed"], ["refused"])
        good, _ = await fused(third, signed(plan, third))
        assert good


@pytest.mark.parametrize("salt", [SALT, KEYRING.mint_salt(Salt(TENANT, Fidelity.QUANTIZED))])
async def test_who_wants_it_exact_gets_no_passage(source: ReferenceEngine, target: FakeVllm, salt: str) -> None:
    documents = [signed(passage(source, number), target) for number in (0, 2)]
    target.requests.add(FakeRequest("one", list(PROMPT), salt, params(*documents)))
    assert target.requests.match("one", 0) == 0
    target.step(Scheduled("one", target.take(22), True, 0))
    assert target.mover.metrics.pulls == {("refused", Reason.UNEXPECTED.value): 2}


async def test_nor_who_was_granted_no_such_thing(source: ReferenceEngine, target: FakeVllm) -> None:
    document = signed(passage(source, 0), target, Fidelity.QUANTIZED)
    target.requests.add(FakeRequest("one", list(PROMPT), FUSED, params(document)))
    assert target.requests.match("one", 0) == 0


async def test_an_instance_without_a_fuser_takes_none(tmp_path: Path, source: ReferenceEngine) -> None:
    async with fake_vllm(tmp_path) as target:
        document = signed(passage(source, 0), target)
        target.requests.add(FakeRequest("one", list(PROMPT), FUSED, params(document)))
        assert target.requests.match("one", 0) == 0


async def test_a_passage_that_is_another_text_is_refused(source: ReferenceEngine, target: FakeVllm) -> None:
    document = signed(passage(source, 0)._replace(target_position=50), target)
    target.requests.add(FakeRequest("one", list(PROMPT), FUSED, params(document)))
    assert target.requests.match("one", 0) == 0


async def test_a_passage_that_is_gone_fails_the_load(source: ReferenceEngine, target: FakeVllm) -> None:
    """The instance's own, and one of somebody's who does not listen."""
    theirs = passage(source, 0)
    for plan, reason in (
        (theirs._replace(source=target.info.holder), Reason.STALE),
        (theirs._replace(addresses=("tcp://127.0.0.1:9",)), Reason.UNREACHABLE),
    ):
        document = signed(plan, target)
        good, table = await fused(target, document)
        assert not good
        told = target.mover.reports.take(key_of(params(document)))
        assert told[TRANSFER_HEADER].startswith(f"outcome=failed; reason={reason.value};")
        assert told[FIDELITY_HEADER] == "fused"
        assert not any(part.any() for part in stacked(target, table))


async def test_who_leaves_while_it_is_repaired_gets_nothing_written(source: ReferenceEngine, target: FakeVllm) -> None:
    fuser, begun, go_on = target.mover._fuser, threading.Event(), threading.Event()
    fuse = fuser.fuse

    def slowly(*arguments: Any) -> Any:
        begun.set()
        assert go_on.wait(20)
        return fuse(*arguments)

    fuser.fuse = slowly
    request_id, table = target.begin(PROMPT, *all_of(source, target), salt=FUSED)
    while not begun.is_set():
        assert target.mover.settled(0.02) == (set(), set())
    target.requests.finish(request_id, table[:END])
    target.step()
    assert await target.ended(request_id)
    before = [part.clone() for part in stacked(target, table)]
    go_on.set()
    target.mover._fusing.shutdown()
    assert all(torch.equal(*pair) for pair in zip(stacked(target, table), before, strict=True))
