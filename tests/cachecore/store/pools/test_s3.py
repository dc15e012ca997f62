"""A pool in a bucket: the contract against a server that speaks S3, and what is particular to objects."""

import asyncio
import dataclasses
import sys
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("obstore")
pytest.importorskip("moto")

import obstore

from cachecore.store import StoreError
from cachecore.store.pools import (
    Accepted,
    Bucket,
    BucketPool,
    Declined,
    DeclineReason,
    Extent,
    Found,
    Missed,
    MissReason,
    PoolBounds,
    PoolRun,
)
from tests.cachecore.store.pools.buckets import S3Server, contents, start_s3
from tests.cachecore.store.pools.contract_suite import ROOMY, PoolBehaviour
from tests.cachecore.store.pools.runs import content, make_frames, make_run, payload
from tests.cachecore.store.servers import make_certificates


class BucketLab:
    tick_seconds = 1.05
    """Objects carry their time in whole seconds."""

    def __init__(self, server: S3Server) -> None:
        self.server = server
        self.prefix = uuid.uuid4().hex
        self.store = server.store(self.prefix)
        self.pools: list[BucketPool] = []

    async def open(
        self,
        bounds: PoolBounds = ROOMY,
        announce: Callable[..., None] = lambda announcement: None,
        budget_seconds: float = 20.0,
        **settings: Any,
    ) -> BucketPool:
        bucket = self.server.bucket(self.prefix)
        pool = BucketPool("pool", bucket, bounds, announce, budget_seconds=budget_seconds, **settings)
        self.pools.append(pool)
        await pool.start()
        return pool

    def paths(self) -> dict[str, str]:
        found = (path for path in contents(self.store) if path.endswith(".hckv"))
        return {path.rpartition("/")[2].removesuffix(".hckv"): path for path in found}

    def stored(self) -> dict[str, int]:
        return {
            path.rpartition("/")[2].removesuffix(".hckv"): size
            for path, size in contents(self.store).items()
            if path.endswith(".hckv")
        }

    def damage(self, name: str, change: Callable[[bytes], bytes]) -> None:
        path = self.paths()[name]
        obstore.put(self.store, path, change(bytes(obstore.get(self.store, path).bytes())))

    def swap(self, name: str, other: str) -> None:
        paths = self.paths()
        obstore.put(self.store, paths[name], bytes(obstore.get(self.store, paths[other]).bytes()))

    def empty(self) -> None:
        for path in contents(self.store):
            obstore.delete(self.store, path)

    def take_away(self) -> None:
        self.server.freeze()

    def bring_back(self) -> None:
        self.server.thaw()


@pytest.fixture(scope="module")
def s3_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    with start_s3(tmp_path_factory.mktemp("s3")) as server:
        yield server


@pytest.fixture
async def lab(s3_server: S3Server) -> AsyncIterator[BucketLab]:
    lab = BucketLab(s3_server)
    yield lab
    for pool in lab.pools:
        await pool.close()


class TestBucketPool(PoolBehaviour):
    @pytest.fixture
    def lab(self, lab: BucketLab) -> BucketLab:
        return lab


# ---- what is particular to objects -----------------------------------------------------------------------------------


async def put(pool: BucketPool, run: PoolRun) -> Accepted | Declined:
    return await pool.put(run, make_frames(run, 5000))


async def test_a_use_is_noted_once_in_a_while_and_counts(lab: BucketLab) -> None:
    clock = Clock()
    pool = await lab.open(PoolBounds(bytes_max=64 << 20, reuse_credit_seconds=60.0), clock=clock)
    run = make_run(1)
    await put(pool, run)
    generation = pool.holder.generation  # type: ignore[union-attr]
    path = f"{generation}/used/ann/{run.key.name}"
    for elapsed, credits in ((0, 1), (10, 1), (31, 1), (31, 2), (29, 2), (31, 2)):
        clock.now += elapsed
        assert isinstance(await pool.get(run.key), Found)
        await quiet(pool)
        assert contents(lab.store)[path] == credits
    await pool.evict(run.key)
    assert path not in contents(lab.store)


async def test_what_dead_writers_left_is_swept(lab: BucketLab) -> None:
    pool = await lab.open(dead_seconds=1.0)
    run = make_run(1)
    await put(pool, run)
    generation = pool.holder.generation  # type: ignore[union-attr]
    old = [f"{generation}/claims/{'d' * 16}-1-4096", f"{generation}/used/ann/{make_run(2).key.name}"]
    noted = f"{generation}/used/ann/{run.key.name}"
    for path in (*old, noted, "1700000000000000/runs/ann/x.hckv", "9999999999999999/runs/ann/y.hckv"):
        obstore.put(lab.store, path, b"?")
    await asyncio.sleep(2.1)
    obstore.put(lab.store, f"{generation}/claims/{'e' * 16}-1-4096", b"")
    await pool.collect()
    found = set(contents(lab.store))
    assert not found & {*old, "1700000000000000/runs/ann/x.hckv"}
    assert {noted, f"{generation}/claims/{'e' * 16}-1-4096", "9999999999999999/runs/ann/y.hckv"} <= found
    assert isinstance(await pool.get(run.key), Found)


async def test_an_object_that_is_too_small_to_have_an_end_is_broken(lab: BucketLab) -> None:
    pool = await lab.open()
    for rubbish in (b"", b"short"):
        run = make_run(1)
        await put(pool, run)
        lab.damage(run.key.name, lambda file, rubbish=rubbish: rubbish)  # type: ignore[misc]
        answer = await pool.get(run.key)
        assert isinstance(answer, Missed)
        assert answer.reason is MissReason.BROKEN
    assert lab.stored() == {}


async def test_a_long_index_is_read_in_two_steps(lab: BucketLab) -> None:
    pool = await lab.open()
    run = make_run(1, blocks=2000)
    assert await put(pool, run) == Accepted(new=True)
    answer = await pool.get(run.key)
    assert isinstance(answer, Found)
    assert content(answer.frames[0]) == payload(run, Extent(0, 2), 5000)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"name": "no-such-bucket"}, "NoSuchBucket"),
        ({"endpoint": "http://127.0.0.1:1"}, "error sending request"),
    ],
)
async def test_a_bucket_that_is_not_there_is_away(s3_server: S3Server, change: dict[str, str], reason: str) -> None:
    bucket = dataclasses.replace(s3_server.bucket("x"), **change)
    pool = BucketPool("pool", bucket, ROOMY, budget_seconds=1.0)
    await pool.start()
    outcome = await put(pool, make_run(1))
    assert isinstance(outcome, Declined)
    assert outcome.reason is DeclineReason.AWAY
    assert reason in outcome.detail
    assert "secret" not in repr(bucket)
    await pool.close()


async def test_a_bucket_behind_tls_of_ones_own(tmp_path: Path) -> None:
    certificates = make_certificates(tmp_path / "certificates")
    with start_s3(tmp_path, certificates) as server:
        for bucket, is_there in (
            (dataclasses.replace(server.bucket("x"), ca=str(certificates.ca)), True),
            (server.bucket("x"), False),
        ):
            pool = BucketPool("pool", bucket, ROOMY, budget_seconds=10.0 if is_there else 1.0)
            await pool.start()
            outcome = await put(pool, make_run(1))
            assert isinstance(outcome, Accepted) is is_there, outcome
            await pool.close()


def test_without_the_package_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "obstore.store", None)
    with pytest.raises(StoreError, match=r"pip install 'ropeway\[s3\]'"):
        BucketPool("pool", Bucket("bucket"), ROOMY)


def test_settings_that_make_no_sense_are_told_at_once() -> None:
    with pytest.raises(StoreError, match="bucket my-bucket: Could not parse path"):
        BucketPool("pool", Bucket("my-bucket", prefix="../elsewhere"), ROOMY)


class Clock:
    now = 1_000_000.0

    def __call__(self) -> float:
        return self.now


async def quiet(pool: BucketPool) -> None:
    while pool._tasks:
        await asyncio.gather(*pool._tasks)
