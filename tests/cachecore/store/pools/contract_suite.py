"""What every pool does, whatever it is made of. A pool's test file is a subclass with a `lab` fixture.

A lab opens pools on one store (as many processes would), and does to the store what a test must do behind their backs.
"""

import asyncio
import dataclasses
from collections.abc import Callable
from typing import Protocol

import pytest

from cachecore.blocks import HASH_BYTES, Chain, PrefixHash
from cachecore.holders import Pool, Tier
from cachecore.index.contract import Cleared, Removed, Stored
from cachecore.scope import Fidelity, KeyId, TenantId
from cachecore.store.pools import (
    Accepted,
    Declined,
    DeclineReason,
    Extent,
    Found,
    KvPool,
    Missed,
    MissReason,
    PoolBounds,
    PoolRun,
    RemovalReason,
    SealedFrame,
    front,
    hckv,
)
from cachecore.transfer.frames import open_frame
from tests.cachecore.store.pools.means import KEYRING, NAME, SHAPE, contexts, sealed
from tests.cachecore.store.pools.runs import ANN, BOB, Ear, content, make_frames, make_run, payload

ROOMY = PoolBounds(bytes_max=64 << 20)
FRAME = 20_000
SIZE = hckv.encode(make_run(0), make_frames(make_run(0), FRAME)).size
"""Of a run with three frames of FRAME bytes."""


class Lab(Protocol):
    tick_seconds: float
    """What the store's clock can tell apart."""

    async def open(
        self, bounds: PoolBounds = ROOMY, announce: Callable[..., None] = ..., budget_seconds: float = 20.0
    ) -> KvPool: ...

    def stored(self) -> dict[str, int]:
        """Runs by name, with their sizes, as the store itself has them (of every generation)."""
        ...

    def damage(self, name: str, change: Callable[[bytes], bytes]) -> None:
        """Change a run's file."""
        ...

    def swap(self, name: str, other: str) -> None:
        """Put the file of `other` where that of `name` is."""
        ...

    def empty(self) -> None:
        """Everything in the store is gone."""
        ...

    def take_away(self) -> None: ...

    def bring_back(self) -> None: ...


async def put(pool: KvPool, run: PoolRun, frame_bytes: int = FRAME) -> Accepted | Declined:
    return await pool.put(run, make_frames(run, frame_bytes))


async def holds(pool: KvPool, run: PoolRun, frame_bytes: int = FRAME) -> bool:
    """True when all of it comes back right, False when it is absent; anything else fails the test."""
    answer = await pool.get(run.key)
    if isinstance(answer, Missed):
        assert answer.reason is MissReason.ABSENT, answer
        return False
    assert [content(frame) for frame in answer.frames] == [
        payload(run, frame.layers, frame_bytes) for frame in answer.frames
    ]
    assert [frame.layers for frame in answer.frames] == [Extent(0, 2), Extent(2, 4), Extent(4, 6)]
    return True


class PoolBehaviour:
    @pytest.fixture
    def lab(self) -> Lab:
        raise NotImplementedError

    # Storing and reading

    async def test_what_was_put_comes_back(self, lab: Lab) -> None:
        ear = Ear()
        pool = await lab.open(announce=ear)
        run = make_run(1)
        assert await put(pool, run) == Accepted(new=True)
        assert await holds(pool, run)
        assert await pool.contains(run.key)
        assert isinstance(pool.holder, Pool)
        assert pool.holder.name == "pool"
        assert [(heard.holder, heard.event, heard.key) for heard in ear.heard] == [
            (pool.holder, Stored(run.parent, run.chain, Tier.L2, Fidelity.EXACT), run.key)
        ]

    async def test_some_layers_are_read_alone(self, lab: Lab) -> None:
        pool = await lab.open()
        run = make_run(1)
        await put(pool, run)
        before = pool.stats().read_bytes
        answer = await pool.get(run.key, Extent(3, 5))
        assert isinstance(answer, Found)
        assert [frame.layers for frame in answer.frames] == [Extent(2, 4), Extent(4, 6)]
        assert content(answer.frames[0]) == payload(run, Extent(2, 4), FRAME)
        assert pool.stats().read_bytes - before == 2 * FRAME
        assert isinstance(await pool.get(run.key, Extent(0, 1)), Found)

    async def test_another_process_reads_it_and_outlives_the_writer(self, lab: Lab) -> None:
        writer, reader = await lab.open(), await lab.open()
        run = make_run(1)
        await put(writer, run)
        await writer.close()
        assert await holds(reader, run)
        assert reader.holder == writer.holder

    async def test_a_mean_is_kept_like_a_run_and_grows(self, lab: Lab) -> None:
        writer, reader = await lab.open(), await lab.open()
        key = SHAPE.key(NAME)
        for number in (2, 3):
            of = contexts(number)
            assert await writer.evict(key) is (number > 2)
            assert await writer.put(SHAPE.run(NAME, of), [sealed(of)]) == Accepted(new=True)
            for pool in (writer, reader):
                answer = await pool.get(key)
                assert isinstance(answer, Found)
                frame = open_frame(content(answer.frames[0]), KEYRING.frame_key)
                assert SHAPE.contexts_of(frame.header, NAME) == of
                assert bytes(frame.payload) == content(sealed(of))[-16 - frame.header.payload_bytes : -16]
        await writer.close()
        assert await (await lab.open()).contains(key)

    async def test_large_frames_in_unlike_pieces(self, lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
        """Over the sizes in which stores and readers cut."""
        monkeypatch.setattr(front, "READ_BYTES", 700_000)
        pool = await lab.open()
        run = make_run(1, layers=Extent(2, 7))
        sizes = [1, 1_500_000, 699_999, 700_001, 2 << 20]
        frames = []
        for layer, size in enumerate(sizes, start=2):
            data = payload(run, Extent(layer, layer + 1), size)
            frames.append(SealedFrame(Extent(layer, layer + 1), [data[: size // 3], bytearray(data[size // 3 :])]))
        assert await pool.put(run, frames) == Accepted(new=True)
        answer = await pool.get(run.key)
        assert isinstance(answer, Found)
        assert [frame.size_bytes for frame in answer.frames] == sizes
        assert [content(frame) for frame in answer.frames] == [content(frame) for frame in frames]

    async def test_what_was_never_put_is_absent(self, lab: Lab) -> None:
        pool = await lab.open()
        assert await pool.get(make_run(1).key) == Missed(MissReason.ABSENT)
        assert not await pool.contains(make_run(1).key)
        assert not await pool.evict(make_run(1).key)
        assert pool.stats().misses == {MissReason.ABSENT: 1}

    @pytest.mark.parametrize(
        "change",
        [
            {"compatibility": b"d" * 16},
            {"scope": b"t" * 16},
            {"key_id": KeyId(ANN, 8)},
            {"key_id": KeyId(BOB, 7)},
            {"blocks": 3},
            {"layers": Extent(0, 5)},
            {"heads": Extent(3, 6)},
            {"codec": "i8"},
            {"fidelity": Fidelity.QUANTIZED},
            {"tail": PrefixHash(b"t" * 16)},
        ],
        ids=lambda change: "-".join(change),
    )
    async def test_a_key_that_differs_in_anything_is_another_run(self, lab: Lab, change: dict[str, object]) -> None:
        pool = await lab.open()
        run = make_run(1)
        await put(pool, run)
        other = dataclasses.replace(run.key, **change)
        assert other.name != run.key.name
        assert await pool.get(other) == Missed(MissReason.ABSENT)

    async def test_a_run_is_stored_once(self, lab: Lab) -> None:
        ear = Ear()
        pool, other = await lab.open(announce=ear), await lab.open(announce=ear)
        run = make_run(1)
        await put(pool, run)
        again = [SealedFrame(Extent(0, 6), [b"another frame"])]
        assert await pool.put(run, again) == Accepted(new=False)
        assert await other.put(run, again) == Accepted(new=False)
        assert await holds(other, run)
        assert len(ear.heard) == 1
        assert (pool.stats().stored, pool.stats().present) == (1, 1)

    async def test_of_many_writers_at_once_one_is_first(self, lab: Lab) -> None:
        ear = Ear()
        pools = [await lab.open(announce=ear) for _ in range(4)]
        run = make_run(1)
        outcomes = await asyncio.gather(*(put(pool, run) for pool in pools for _ in range(2)))
        assert outcomes.count(Accepted(new=True)) == 1
        assert {
            outcome.reason if isinstance(outcome, Declined) else outcome.new for outcome in outcomes
        } <= {True, False, DeclineReason.BUSY}  # fmt: skip
        assert len(ear.heard) == 1
        assert await holds(pools[0], run)
        assert list(lab.stored()) == [run.key.name]

    async def test_a_put_whose_caller_leaves_comes_to_its_end(self, lab: Lab) -> None:
        ear = Ear()
        pool = await lab.open(announce=ear)
        for seed in range(5):
            task = asyncio.create_task(put(pool, make_run(seed)))
            await asyncio.sleep(0.01 * seed)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        await pool.close()
        assert lab.stored()
        assert {heard.key.name for heard in ear.heard if heard.key} == set(lab.stored())

    async def test_a_pool_that_closes_in_the_middle_leaves_no_half_run(self, lab: Lab) -> None:
        pool, other = await lab.open(), await lab.open()
        tasks = [asyncio.create_task(put(pool, make_run(seed), 300_000)) for seed in range(8)]
        await asyncio.sleep(0.03)
        await pool.close()
        await asyncio.gather(*tasks, return_exceptions=True)
        for seed in range(8):
            await holds(other, make_run(seed), 300_000)

    async def test_frames_must_cover_the_run(self, lab: Lab) -> None:
        pool = await lab.open()
        run = make_run(1)
        frames = make_frames(run)
        for wrong in (
            [],
            frames[:-1],
            frames[1:],
            frames[::-1],
            [*frames, frames[-1]],
            [SealedFrame(Extent(0, 6), [])],
        ):
            with pytest.raises(ValueError, match="layer"):
                await pool.put(run, wrong)
        assert not await pool.contains(run.key)

    async def test_runs_are_told_to_whom_asks(self, lab: Lab) -> None:
        writer, reader = await lab.open(), await lab.open()
        runs = [make_run(seed, tenant=tenant) for seed in range(3) for tenant in (ANN, BOB)]
        for run in runs:
            await put(writer, run, 100)
        assert {run.key.name: run async for run in reader.runs()} == {run.key.name: run for run in runs}

    # Removing

    async def test_an_evicted_run_is_gone_and_announced_once(self, lab: Lab) -> None:
        ear = Ear()
        pool, other = await lab.open(announce=ear), await lab.open(announce=ear)
        run = make_run(1, fidelity=Fidelity.QUANTIZED, codec="i8")
        await put(pool, run)
        assert await asyncio.gather(other.evict(run.key), other.evict(make_run(2).key)) == [True, False]
        assert not await pool.evict(run.key)
        assert not await holds(pool, run)
        assert ear.events[1:] == [Removed(run.chain, Tier.L2, Fidelity.QUANTIZED)]
        assert lab.stored() == {}
        assert await put(pool, run) == Accepted(new=True)
        assert await holds(other, run)

    async def test_a_reader_is_never_given_another_writing(self, lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
        """While it reads, the run is evicted and written anew, with other sizes."""
        monkeypatch.setattr(front, "READ_BYTES", FRAME)
        pool, other = await lab.open(), await lab.open()
        run = make_run(1)
        await put(pool, run)
        got, ending = [], None
        async for item in pool.stream(run.key):
            if isinstance(item, Missed):
                ending = item.reason
                break
            got.append(item)
            if len(got) == 1:
                assert await other.evict(run.key)
                assert await put(other, run, FRAME + 1) == Accepted(new=True)
        assert [content(frame) for frame in got] == [payload(run, frame.layers, FRAME) for frame in got]
        assert (len(got), ending) == (3, None) or (ending is MissReason.GONE and len(got) >= 1)
        assert await holds(other, run, FRAME + 1)

    async def test_a_reader_may_leave_early(self, lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(front, "READ_BYTES", FRAME)
        pool = await lab.open()
        run = make_run(1)
        await put(pool, run)
        reading = pool.stream(run.key)
        assert isinstance(await anext(reading), SealedFrame)
        await reading.aclose()
        assert await holds(pool, run)

    # Bounds

    async def test_the_bound_is_kept_and_the_oldest_go_first(self, lab: Lab) -> None:
        ear = Ear()
        bounds = PoolBounds(bytes_max=int(3.5 * SIZE))
        pool = await lab.open(bounds, ear)
        runs = [make_run(seed) for seed in range(5)]
        for run in runs:
            assert await put(pool, run) == Accepted(new=True)
            assert sum(lab.stored().values()) <= bounds.bytes_max
            await asyncio.sleep(lab.tick_seconds)
        kept = [run for run in runs if await holds(pool, run)]
        assert kept == runs[-len(kept) :]
        assert 2 <= len(kept) <= 3
        gone = [event for event in ear.events if isinstance(event, Removed)]
        assert gone == [run.removed() for run in runs[: -len(kept)]]
        assert pool.stats().removed == {RemovalReason.BOUND: len(gone)}

    async def test_what_is_read_stays(self, lab: Lab) -> None:
        pool, reader = await lab.open(PoolBounds(bytes_max=int(3.1 * SIZE))), await lab.open()
        dear = make_run(100)
        await put(pool, dear)
        for seed in range(4):
            await asyncio.sleep(lab.tick_seconds)
            assert await holds(reader, dear)
            await asyncio.sleep(0.05)  # the reader's note of it goes on beside
            await put(pool, make_run(seed))
        assert await holds(pool, dear)

    async def test_a_quota_costs_its_tenant_alone(self, lab: Lab) -> None:
        bounds = PoolBounds(bytes_max=100 * SIZE, quotas={BOB: int(2.5 * SIZE)})
        pool = await lab.open(bounds)
        anns = [make_run(seed) for seed in range(4)]
        bobs = [make_run(seed, tenant=BOB) for seed in range(4)]
        for run in anns:
            assert await put(pool, run) == Accepted(new=True)
        for run in bobs:
            assert await put(pool, run) == Accepted(new=True)
            await asyncio.sleep(lab.tick_seconds)
        assert [await holds(pool, run) for run in anns] == [True] * 4
        assert [await holds(pool, run) for run in bobs] == [False, False, True, True]
        assert pool.stats().removed == {RemovalReason.QUOTA: 2}

    async def test_a_default_quota_is_every_tenants(self, lab: Lab) -> None:
        pool = await lab.open(PoolBounds(bytes_max=100 * SIZE, tenant_bytes_max=int(1.5 * SIZE)))
        for seed in range(2):
            for tenant in (ANN, BOB):
                assert await put(pool, make_run(seed, tenant=tenant)) == Accepted(new=True)
            await asyncio.sleep(lab.tick_seconds)
        assert sorted(lab.stored()) == sorted(make_run(1, tenant=tenant).key.name for tenant in (ANN, BOB))

    async def test_what_never_fits_is_declined_and_costs_nothing(self, lab: Lab) -> None:
        bounds = PoolBounds(bytes_max=4 * SIZE, quotas={BOB: SIZE // 2}, run_bytes_max=2 * SIZE)
        pool = await lab.open(bounds)
        small = make_run(1)
        await put(pool, small)
        for outcome in (await put(pool, make_run(2), 3 * FRAME), await put(pool, make_run(3, tenant=BOB))):
            assert isinstance(outcome, Declined)
            assert outcome.reason is DeclineReason.LARGE
        assert await holds(pool, small)
        assert pool.stats().declined == {DeclineReason.LARGE: 2}

    async def test_several_writers_keep_one_bound(self, lab: Lab) -> None:
        bounds = PoolBounds(bytes_max=10 * SIZE)
        pools = [await lab.open(bounds) for _ in range(3)]
        most, writing = 0, True

        async def watch() -> None:
            nonlocal most
            while writing:
                most = max(most, sum((await asyncio.to_thread(lab.stored)).values()))
                await asyncio.sleep(0.002)

        async def write(number: int) -> None:
            for seed in range(12):
                await put(pools[number], make_run(100 * number + seed))

        watcher = asyncio.create_task(watch())
        await asyncio.gather(*(write(number) for number in range(3)))
        writing = False
        await watcher
        assert 5 * SIZE < most <= bounds.bytes_max

    async def test_what_nobody_reads_is_collected(self, lab: Lab) -> None:
        ear = Ear()
        pool = await lab.open(PoolBounds(bytes_max=64 << 20, idle_seconds_max=1.0, reuse_credit_seconds=30.0), ear)
        idle, read = make_run(1), make_run(2)
        await put(pool, idle)
        await put(pool, read)
        assert await holds(pool, read)
        await asyncio.sleep(2.1)
        await pool.collect()
        assert list(lab.stored()) == [read.key.name]
        assert ear.events[2:] == [idle.removed()]
        assert pool.stats().removed == {RemovalReason.IDLE: 1}

    # Generations

    async def test_a_wiped_pool_is_another_generation(self, lab: Lab) -> None:
        ear = Ear()
        pool, other = await lab.open(), await lab.open(announce=ear)
        run = make_run(1)
        await put(pool, run)
        before = other.holder
        assert await pool.wipe()
        assert pool.holder != before
        assert not await holds(pool, run)
        assert lab.stored() == {}
        await other.collect()
        assert other.holder == pool.holder
        assert [(heard.holder, heard.event) for heard in ear.heard] == [(before, Cleared())]
        assert await put(other, run) == Accepted(new=True)
        assert await holds(pool, run)

    async def test_a_writer_that_does_not_know_of_a_wipe_writes_to_the_new_generation(self, lab: Lab) -> None:
        pool, other = await lab.open(), await lab.open()
        await put(other, make_run(1))
        await pool.wipe()
        assert await put(other, make_run(2)) == Accepted(new=True)
        assert other.holder == pool.holder
        assert await holds(pool, make_run(2))

    async def test_a_store_that_was_emptied_is_another_generation(self, lab: Lab) -> None:
        ear = Ear()
        pool = await lab.open(announce=ear)
        run = make_run(1)
        await put(pool, run)
        before = pool.holder
        lab.empty()
        assert not await holds(pool, run)
        assert await put(pool, run) == Accepted(new=True)
        assert pool.holder != before
        assert ear.events == [run.stored(), Cleared(), run.stored()]
        assert await holds(pool, run)

    # Accidents

    @pytest.mark.parametrize(
        "change",
        [
            lambda file: file[:300] + bytes([file[300] ^ 1]) + file[301:],
            lambda file: file[:-30] + bytes([file[-30] ^ 128]) + file[-29:],
            lambda file: file[:-1] + b"\xff",
        ],
        ids=["a bit in a frame", "a bit in the index", "the last byte"],
    )
    async def test_what_is_broken_is_a_miss_and_removed(self, lab: Lab, change: Callable[[bytes], bytes]) -> None:
        ear = Ear()
        pool = await lab.open(announce=ear)
        run = make_run(1)
        await put(pool, run)
        lab.damage(run.key.name, change)
        answer = await pool.get(run.key)
        assert isinstance(answer, Missed)
        assert answer.reason is MissReason.BROKEN
        assert lab.stored() == {}
        event = ear.events[-1]
        assert isinstance(event, Removed)
        assert event.chain in (run.chain, Chain(run.chain[-HASH_BYTES:]))
        assert pool.stats().removed == {RemovalReason.BROKEN: 1}
        assert await put(pool, run) == Accepted(new=True)
        assert await holds(pool, run)

    async def test_another_run_under_its_name_is_a_miss(self, lab: Lab) -> None:
        pool = await lab.open()
        run, other = make_run(1), make_run(2)
        await put(pool, run)
        await put(pool, other)
        lab.swap(run.key.name, other.key.name)
        answer = await pool.get(run.key)
        assert isinstance(answer, Missed)
        assert answer.reason is MissReason.BROKEN
        assert await holds(pool, other)

    async def test_a_pool_that_is_away_is_a_miss_and_comes_back(self, lab: Lab) -> None:
        patient, pool = await lab.open(), await lab.open(budget_seconds=0.5)
        run = make_run(1)
        assert await put(patient, run) == Accepted(new=True)
        lab.take_away()
        try:
            for _ in range(5):
                outcome, answer = await put(pool, make_run(2)), await pool.get(run.key)
                assert isinstance(outcome, Declined)
                assert outcome.reason is DeclineReason.AWAY
                assert isinstance(answer, Missed)
                assert answer.reason in (MissReason.AWAY, MissReason.ABSENT)
            assert not await pool.contains(run.key)
            assert not await pool.evict(run.key)
            assert not await pool.wipe()
            await pool.collect()
            assert [found async for found in pool.runs()] == []
            stats = pool.stats()
            assert not stats.up
            assert stats.reason
        finally:
            lab.bring_back()
        async with asyncio.timeout(30):
            while isinstance(await pool.get(run.key), Missed):
                await asyncio.sleep(0.1)
        assert pool.stats().up
        assert await holds(patient, run)

    async def test_a_pool_that_is_away_at_the_start_is_found_later(self, lab: Lab) -> None:
        lab.take_away()
        try:
            pool = await lab.open(budget_seconds=0.5)
            assert pool.holder is None
            assert isinstance(await put(pool, make_run(1)), Declined)
        finally:
            lab.bring_back()
        async with asyncio.timeout(30):
            while isinstance(await put(pool, make_run(1)), Declined):
                await asyncio.sleep(0.1)
        assert await holds(pool, make_run(1))

    async def test_occupancy_and_latency_are_counted(self, lab: Lab) -> None:
        writer, reader = await lab.open(), await lab.open()
        for seed in range(3):
            await put(writer, make_run(seed, tenant=TenantId(f"tenant-{seed % 2}")))
        assert await holds(reader, make_run(0, tenant=TenantId("tenant-0")))
        await reader.collect()
        stats = reader.stats()
        assert (stats.runs, stats.bytes, stats.bytes_max) == (3, sum(lab.stored().values()), ROOMY.bytes_max)
        assert stats.tenant_bytes == {
            "tenant-0": sum(hckv_size(make_run(seed, tenant=TenantId("tenant-0"))) for seed in (0, 2)),
            "tenant-1": hckv_size(make_run(1, tenant=TenantId("tenant-1"))),
        }
        assert (stats.hits, stats.read_bytes, sum(stats.first_frame.counts)) == (1, 3 * FRAME, 1)
        assert writer.stats().written_bytes == stats.bytes
        assert sum(writer.stats().write.counts) == 3
        assert writer.stats().write.seconds > 0


def hckv_size(run: PoolRun) -> int:
    return hckv.encode(run, make_frames(run, FRAME)).size
