"""Real frames through a real pool: stored as a worker stores them, pulled as a plan says."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest

from cachecore.blocks import Chain, PrefixHash
from cachecore.holders import Pool
from cachecore.scope import Fidelity
from cachecore.store.pools import Accepted, DirectoryPool, PoolBounds, hckv
from cachecore.store.pools.transport import PoolTransport, key_of, to_store
from cachecore.transfer.errors import FrameError, Reason
from cachecore.transfer.frames import Frame, FrameWriter
from cachecore.transfer.header import FrameHeader, Span
from cachecore.transfer.plan import Plan, Pull
from cachecore.transfer.transport import Expectation, Failed, Fetched, Refused, Sealed
from tests.cachecore.transfer.world import (
    ACME,
    EXPECTATION,
    HEADER,
    KEYRING,
    LAYERS,
    RIVAL,
    RUN,
    STRANGERS,
    TOKENS,
    ListSink,
    layer_payload,
    make_plan,
    make_pull,
    whole_run,
)

CHAIN = Chain(b"a" * 16 + b"b" * 16 + RUN.tail)


def sealed_layers(header: FrameHeader = HEADER, each: int = 1, with_tokens: bool = False) -> list[Sealed]:
    writer, frames = FrameWriter(KEYRING.frame_key), []
    for layer in range(0, LAYERS, each):
        parts = [layer_payload(number) for number in range(layer, layer + each)]
        tokens = [TOKENS] if with_tokens and layer == 0 else []
        said = header._replace(
            layers=Span(layer, each, LAYERS),
            layer_bytes=tuple(map(len, parts)),
            with_tokens=bool(tokens),
        )
        frames.append(Sealed(said, writer.seal(said, [*parts, *tokens])))
    return frames


@pytest.fixture
async def pool(tmp_path: Path) -> AsyncIterator[DirectoryPool]:
    pool = DirectoryPool("shared", tmp_path, PoolBounds(bytes_max=1 << 24))
    await pool.start()
    yield pool
    await pool.close()


async def store(pool: DirectoryPool, frames: list[Sealed]) -> None:
    assert await pool.put(*to_store(frames, CHAIN)) == Accepted(new=True)


def pull_from(pool: DirectoryPool, key_id=ACME, fidelity: Fidelity = Fidelity.EXACT, **changes: object) -> Pull:  # type: ignore[no-untyped-def]
    plan: Plan = make_plan(**{"source": pool.holder, **changes})._replace(addresses=())  # type: ignore[arg-type]
    return make_pull(plan, key_id=key_id, fidelity=fidelity)


async def fetch(  # type: ignore[no-untyped-def]
    pool: DirectoryPool,
    pull: Pull,
    sink: ListSink,
    expectation: Expectation = EXPECTATION,
    seconds: float = 5.0,
    keyring=KEYRING,
):
    transport = PoolTransport({"shared": pool}, keyring)
    return await transport.fetch(pull, expectation, sink, asyncio.get_running_loop().time() + seconds)


@pytest.mark.parametrize("each", [1, 2, 6])
async def test_a_run_comes_back_layer_by_layer(pool: DirectoryPool, each: int) -> None:
    await store(pool, sealed_layers(each=each))
    sink = ListSink()
    outcome = await fetch(pool, pull_from(pool), sink)
    assert isinstance(outcome, Fetched)
    assert sink.layers == whole_run()
    assert (outcome.frames, outcome.payload_bytes) == (LAYERS // each, sum(map(len, whole_run().values())))


async def test_some_layers_come_alone(pool: DirectoryPool) -> None:
    await store(pool, sealed_layers())
    sink = ListSink()
    assert isinstance(
        await fetch(pool, pull_from(pool), sink, replace(EXPECTATION, layers=Span(2, 3, LAYERS))), Fetched
    )
    assert sink.layers == whole_run(range(2, 5))
    split = await fetch(pool, pull_from(pool), ListSink(), replace(EXPECTATION, layers=Span(2, 9, 12)))
    assert split == Refused(Reason.STALE)


async def test_frames_of_several_layers_are_not_cut(pool: DirectoryPool) -> None:
    await store(pool, sealed_layers(each=2))
    outcome = await fetch(pool, pull_from(pool), ListSink(), replace(EXPECTATION, layers=Span(1, 3, LAYERS)))
    assert isinstance(outcome, Failed)
    assert (outcome.reason, outcome.layer) == (Reason.UNEXPECTED, 1)


async def test_what_was_put_is_announced_by_the_names_of_its_blocks(pool: DirectoryPool) -> None:
    run, frames = to_store(sealed_layers(), CHAIN)
    assert (run.parent, run.chain, run.first_block) == (RUN.parent, CHAIN, RUN.first_block)
    assert run.key == key_of(pull_from(pool), EXPECTATION)
    assert [tuple(frame.layers) for frame in frames] == [(layer, layer + 1) for layer in range(LAYERS)]
    with pytest.raises(ValueError, match="several runs"):
        to_store([*sealed_layers()[:3], *sealed_layers(HEADER._replace(codec="i8"))[3:]], CHAIN)
    with pytest.raises(ValueError, match="another block"):
        to_store(sealed_layers(), Chain(CHAIN[:-16] + b"z" * 16))


async def test_a_lossy_run_is_quantized(pool: DirectoryPool) -> None:
    await store(pool, sealed_layers(HEADER._replace(codec="i8", fidelity=Fidelity.QUANTIZED)))
    sink = ListSink()
    pull = pull_from(pool, codec="i8", fidelity=Fidelity.QUANTIZED)
    assert isinstance(await fetch(pool, pull, sink), Fetched)
    assert sink.layers == whole_run()


async def test_a_shifted_run_comes_with_its_token_ids(pool: DirectoryPool) -> None:
    plan = {"target_position": 400}
    await store(pool, sealed_layers())
    outcome = await fetch(pool, pull_from(pool, fidelity=Fidelity.ROTATED, **plan), ListSink())
    assert isinstance(outcome, Failed)
    assert outcome.reason is Reason.UNEXPECTED
    await pool.evict(key_of(pull_from(pool), EXPECTATION))
    await store(pool, sealed_layers(with_tokens=True))
    sink = ListSink()
    assert isinstance(await fetch(pool, pull_from(pool, fidelity=Fidelity.ROTATED, **plan), sink), Fetched)
    assert bytes(sink.frames[0].token_ids) == TOKENS
    assert isinstance(await fetch(pool, pull_from(pool), ListSink()), Fetched)


async def test_what_is_not_there_is_stale(pool: DirectoryPool) -> None:
    assert await fetch(pool, pull_from(pool), ListSink()) == Refused(Reason.STALE)
    await store(pool, sealed_layers())
    others = (
        (pull_from(pool, key_id=RIVAL), EXPECTATION),
        (pull_from(pool, run=RUN._replace(tail=PrefixHash(b"u" * 16))), EXPECTATION),
        (pull_from(pool, codec="i8", fidelity=Fidelity.QUANTIZED), EXPECTATION),
        (pull_from(pool), replace(EXPECTATION, compatibility=b"D" * 16)),
        (pull_from(pool), replace(EXPECTATION, scope=b"U" * 16)),
    )
    for pull, expectation in others:
        assert await fetch(pool, pull, ListSink(), expectation) == Refused(Reason.STALE)


async def test_a_plan_for_another_pool_or_generation_is_refused(pool: DirectoryPool) -> None:
    await store(pool, sealed_layers())
    assert await fetch(pool, pull_from(pool, source=Pool("other", 1)), ListSink()) == Refused(Reason.OTHER_SOURCE)
    assert await fetch(pool, make_pull(make_plan()), ListSink()) == Refused(Reason.OTHER_SOURCE)
    pull = pull_from(pool)
    await pool.wipe()
    assert await fetch(pool, pull, ListSink()) == Refused(Reason.OTHER_EPOCH)


async def test_what_the_checksum_does_not_find_the_mac_does(pool: DirectoryPool) -> None:
    """A file that somebody has changed, and made right again in all that needs no key."""
    run, frames = to_store(sealed_layers(), CHAIN)
    frame = bytearray(b"".join(bytes(buffer) for buffer in frames[3].buffers))
    frame[len(frame) // 2] ^= 1
    forged = [*frames[:3], frames[3]._replace(buffers=[frame]), *frames[4:]]
    assert await pool.put(run, forged) == Accepted(new=True)
    sink = ListSink()
    outcome = await fetch(pool, pull_from(pool), sink)
    assert isinstance(outcome, Failed)
    assert (outcome.reason, outcome.layer) == (Reason.FORGED, 3)
    assert sink.layers == whole_run(range(3))


async def test_frames_of_another_deployment_or_another_run_are_refused(pool: DirectoryPool) -> None:
    await store(pool, sealed_layers())
    outcome = await fetch(pool, pull_from(pool), ListSink(), keyring=STRANGERS)
    assert isinstance(outcome, Failed)
    assert (outcome.reason, outcome.layer) == (Reason.FORGED, 0)
    run, _ = to_store(sealed_layers(), CHAIN)
    await pool.evict(run.key)
    _, others = to_store(sealed_layers(HEADER._replace(first_block=9)), CHAIN)
    assert await pool.put(run, others) == Accepted(new=True)  # authentic, but not what the file says
    outcome = await fetch(pool, pull_from(pool), ListSink())
    assert isinstance(outcome, Failed)
    assert (outcome.reason, outcome.layer) == (Reason.UNEXPECTED, 0)


async def test_layers_before_a_broken_one_are_delivered(pool: DirectoryPool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cachecore.store.pools.front.READ_BYTES", 1)
    await store(pool, sealed_layers())
    path = next(pool._shelf._files.root.glob("*/runs/*/*/*.hckv"))  # type: ignore[attr-defined]
    file = bytearray(path.read_bytes())
    file[hckv.decode(file)[0].frames[4].offset + 200] ^= 1
    path.write_bytes(file)
    sink = ListSink()
    outcome = await fetch(pool, pull_from(pool), sink)
    assert isinstance(outcome, Failed)
    assert (outcome.reason, outcome.layer) == (Reason.MALFORMED, 4)
    assert sink.layers == whole_run(range(4))


async def test_a_deadline_ends_it(pool: DirectoryPool) -> None:
    await store(pool, sealed_layers())

    async def slowly(frame: Frame) -> None:
        if frame.header.layers.first == 2:
            await asyncio.sleep(10)

    outcome = await fetch(pool, pull_from(pool), ListSink(after=slowly), seconds=0.3)
    assert outcome == Failed(Reason.DEADLINE, 2)


@pytest.mark.parametrize("error", [RuntimeError("full"), TimeoutError("its own")])
async def test_what_a_sink_raises_comes_out(pool: DirectoryPool, error: Exception) -> None:
    await store(pool, sealed_layers())

    def fail(frame: Frame) -> None:
        raise error

    with pytest.raises(type(error), match=str(error)):
        await fetch(pool, pull_from(pool), ListSink(after=fail))


async def test_a_frame_that_the_sink_cannot_use_ends_it(pool: DirectoryPool) -> None:
    await store(pool, sealed_layers())

    def refuse(frame: Frame) -> None:
        raise FrameError("no such codec", Reason.UNUSABLE)

    outcome = await fetch(pool, pull_from(pool), ListSink(after=refuse))
    assert isinstance(outcome, Failed)
    assert (outcome.reason, outcome.layer) == (Reason.UNUSABLE, 0)


async def test_a_pool_that_was_never_reached_is_unreachable(tmp_path: Path) -> None:
    pool = DirectoryPool("shared", tmp_path / "missing", PoolBounds(bytes_max=1 << 20))
    await pool.start()
    pull = make_pull(make_plan(source=Pool("shared", 1)))
    assert await fetch(pool, pull, ListSink()) == Refused(Reason.UNREACHABLE)
    await pool.close()
