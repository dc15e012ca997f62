"""A pool in a directory: the contract, and what only a file system can do to it."""

import asyncio
import errno
import gc
import os
import shutil
import stat
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from cachecore.store.pools import (
    Accepted,
    Declined,
    DeclineReason,
    DirectoryPool,
    Found,
    Missed,
    MissReason,
    PoolBounds,
    PoolRun,
    front,
)
from cachecore.store.pools.directory import _Files
from cachecore.store.pools.shelf import Place
from tests.cachecore.store.pools.contract_suite import ROOMY, PoolBehaviour
from tests.cachecore.store.pools.runs import make_frames, make_run


class DirectoryLab:
    tick_seconds = 0.01

    def __init__(self, root: Path) -> None:
        self.root = root
        self.pools: list[DirectoryPool] = []

    async def open(
        self,
        bounds: PoolBounds = ROOMY,
        announce: Callable[..., None] = lambda announcement: None,
        budget_seconds: float = 20.0,
    ) -> DirectoryPool:
        pool = DirectoryPool("pool", self.root, bounds, announce, budget_seconds=budget_seconds)
        self.pools.append(pool)
        await pool.start()
        return pool

    def files(self) -> dict[str, Path]:
        return {path.stem: path for path in self.root.glob("*/runs/*/*/*.hckv")}

    def stored(self) -> dict[str, int]:
        found = {}
        for name, path in self.files().items():
            try:
                found[name] = path.stat().st_size
            except FileNotFoundError:
                continue
        return found

    def damage(self, name: str, change: Callable[[bytes], bytes]) -> None:
        path = self.files()[name]
        path.write_bytes(change(path.read_bytes()))

    def swap(self, name: str, other: str) -> None:
        files = self.files()
        files[name].write_bytes(files[other].read_bytes())

    def empty(self) -> None:
        for entry in self.root.iterdir():
            shutil.rmtree(entry) if entry.is_dir() else entry.unlink()

    def take_away(self) -> None:
        self.root.rename(self.root.with_name("elsewhere"))

    def bring_back(self) -> None:
        self.root.with_name("elsewhere").rename(self.root)


@pytest.fixture
async def lab(tmp_path: Path) -> AsyncIterator[DirectoryLab]:
    root = tmp_path / "pool"
    root.mkdir()
    lab = DirectoryLab(root)
    yield lab
    for pool in lab.pools:
        await pool.close()


class TestDirectoryPool(PoolBehaviour):
    @pytest.fixture
    def lab(self, lab: DirectoryLab) -> DirectoryLab:
        return lab


# ---- what only a file system does ------------------------------------------------------------------------------------


async def put(pool: DirectoryPool, run: PoolRun) -> Accepted | Declined:
    return await pool.put(run, make_frames(run, 5000))


def files_below(root: Path) -> list[str]:
    return sorted(path.relative_to(root).as_posix() for path in root.rglob("*") if path.is_file())


def failing(number: int) -> Callable[..., object]:
    def fail(*arguments: object) -> object:
        raise OSError(number, os.strerror(number))

    return fail


async def test_nobody_else_may_read_it(lab: DirectoryLab) -> None:
    pool = await lab.open()
    await put(pool, make_run(1))
    home = lab.root / str(pool.holder.generation)  # type: ignore[union-attr]
    below = [path for path in home.rglob("*") if path.name != "generation"]
    assert any(path.suffix == ".hckv" for path in below)
    assert {stat.S_IMODE(path.stat().st_mode) & 0o077 for path in [home, *below]} == {0}


async def test_a_put_leaves_nothing_but_the_run(lab: DirectoryLab) -> None:
    pool = await lab.open(PoolBounds(bytes_max=64 << 20))
    run = make_run(1)
    await put(pool, run)
    await put(pool, run)
    await pool.close()
    generation = pool.holder.generation  # type: ignore[union-attr]
    name = run.key.name
    assert files_below(lab.root) == [f"{generation}/runs/ann/{name[-2:]}/{name}.hckv", "generation"]


@pytest.mark.parametrize(
    ("number", "reason"),
    [
        (errno.ENOSPC, DeclineReason.FULL),
        (errno.EDQUOT, DeclineReason.FULL),
        (errno.EIO, DeclineReason.AWAY),
        (errno.EROFS, DeclineReason.AWAY),
    ],
)
@pytest.mark.parametrize("call", ["writev", "fsync", "link"])
async def test_a_disk_that_fails_is_a_refusal(
    lab: DirectoryLab, monkeypatch: pytest.MonkeyPatch, number: int, reason: DeclineReason, call: str
) -> None:
    pool = await lab.open()
    run = make_run(1)
    await put(pool, run)
    with monkeypatch.context() as patched:
        patched.setattr(os, call, failing(number))
        outcome = await put(pool, make_run(2))
    assert isinstance(outcome, Declined)
    assert outcome.reason is reason
    assert os.strerror(number) in outcome.detail
    assert not [path for path in files_below(lab.root) if "drafts" in path]
    assert await put(pool, make_run(3)) == Accepted(new=True)


async def test_a_disk_that_is_full_before_the_bound_loses_what_is_worth_least(
    lab: DirectoryLab, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = await lab.open()
    runs = [make_run(seed) for seed in range(3)]
    for run in runs:
        await put(pool, run)
        await asyncio.sleep(0.01)
    with monkeypatch.context() as patched:
        patched.setattr(os, "writev", failing(errno.ENOSPC))
        assert isinstance(await put(pool, make_run(9)), Declined)
    assert sorted(lab.stored()) == sorted(run.key.name for run in runs[1:])


@pytest.mark.parametrize(("number", "reason"), [(errno.EIO, MissReason.AWAY), (errno.ESTALE, MissReason.GONE)])
async def test_a_disk_that_fails_is_a_miss(
    lab: DirectoryLab, monkeypatch: pytest.MonkeyPatch, number: int, reason: MissReason
) -> None:
    pool = await lab.open()
    run = make_run(1)
    await put(pool, run)
    pread, calls = os.pread, []

    def fail_later(*arguments: int) -> bytes:
        calls.append(arguments)
        if len(calls) > 1:
            raise OSError(number, os.strerror(number))
        return pread(*arguments)

    with monkeypatch.context() as patched:
        patched.setattr(os, "pread", fail_later)
        answer = await pool.get(run.key)
    assert isinstance(answer, Missed)
    assert answer.reason is reason
    assert isinstance(await pool.get(run.key), Found)


async def test_a_mount_that_hangs_costs_a_budget_and_then_nothing(
    lab: DirectoryLab, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = await lab.open(budget_seconds=0.1)
    going_on = threading.Event()
    exists = _Files.exists

    def hang(files: _Files, place: Place) -> bool:
        going_on.wait(10)
        return exists(files, place)

    monkeypatch.setattr(_Files, "exists", hang)
    outcomes = [await put(pool, make_run(seed)) for seed in range(20)]
    assert {outcome.reason for outcome in outcomes if isinstance(outcome, Declined)} == {DeclineReason.AWAY}
    waited = [outcome for outcome in outcomes if isinstance(outcome, Declined) and "not asked" not in outcome.detail]
    assert 3 <= len(waited) <= 5
    going_on.set()
    async with asyncio.timeout(5):
        while isinstance(await put(pool, make_run(1)), Declined):
            await asyncio.sleep(0.05)


async def test_a_write_that_was_given_up_is_not_published_later(
    lab: DirectoryLab, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = await lab.open(budget_seconds=0.1)
    going_on, reached = threading.Event(), threading.Event()
    monkeypatch.setattr(os, "fsync", lambda descriptor: (reached.set(), going_on.wait(10)))
    outcome = await put(pool, make_run(1))
    assert isinstance(outcome, Declined)
    assert reached.is_set()
    going_on.set()
    await asyncio.sleep(0.1)
    assert lab.stored() == {}


async def test_where_there_are_no_hard_links_runs_are_renamed(
    lab: DirectoryLab, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "link", failing(errno.EPERM))
    pool, other = await lab.open(), await lab.open()
    run = make_run(1)
    assert other.holder == pool.holder
    assert await put(pool, run) == Accepted(new=True)
    assert await put(other, run) == Accepted(new=False)
    assert isinstance(await other.get(run.key), Found)


async def test_a_link_whose_answer_was_lost_is_our_own(lab: DirectoryLab, monkeypatch: pytest.MonkeyPatch) -> None:
    pool = await lab.open()
    link = os.link

    def link_twice(source: Path, target: Path) -> None:
        link(source, target)
        link(source, target)

    monkeypatch.setattr(os, "link", link_twice)
    assert await put(pool, make_run(1)) == Accepted(new=True)


async def test_a_directory_that_is_missing_is_not_made(tmp_path: Path) -> None:
    lab = DirectoryLab(tmp_path / "mount" / "pool")
    pool = await lab.open()
    assert isinstance(await put(pool, make_run(1)), Declined)
    await pool.close()
    assert list(tmp_path.iterdir()) == []


async def test_a_directory_of_something_else_is_left_alone(lab: DirectoryLab) -> None:
    (lab.root / "thesis.txt").write_text("precious")
    pool = await lab.open()
    outcome = await put(pool, make_run(1))
    assert isinstance(outcome, Declined)
    assert "thesis.txt" in outcome.detail
    assert files_below(lab.root) == ["thesis.txt"]


async def test_an_empty_mount_point_is_not_a_wiped_pool(lab: DirectoryLab) -> None:
    pool = await lab.open()
    lab.empty()
    pool._shelf._files._device = -1  # type: ignore[attr-defined]  # the pool was on another file system than this one
    outcome = await put(pool, make_run(1))
    assert isinstance(outcome, Declined)
    assert "what was mounted there is gone" in outcome.detail
    assert list(lab.root.iterdir()) == []


async def test_what_is_no_regular_file_is_broken_and_unlinked(lab: DirectoryLab, tmp_path: Path) -> None:
    pool = await lab.open()
    target = tmp_path / "target"
    target.write_bytes(b"not a run")
    for make in (lambda path: path.symlink_to(target), os.mkfifo, lambda path: path.write_bytes(b"")):
        run = make_run(1)
        await put(pool, run)
        path = lab.files()[run.key.name]
        path.unlink()
        make(path)
        answer = await pool.get(run.key)
        assert isinstance(answer, Missed)
        assert answer.reason is MissReason.BROKEN
        assert not path.is_symlink()
        assert not path.exists()
    assert target.read_bytes() == b"not a run"


async def test_what_dead_writers_left_is_swept(lab: DirectoryLab) -> None:
    pool = await lab.open()
    home = lab.root / str(pool.holder.generation)  # type: ignore[union-attr]
    for age, name in ((200, "dead"), (100, "alive")):
        for path in (home / "drafts" / f"{name}-1", home / "claims" / f"{name.encode().hex()}-1-4096"):
            path.touch()
            os.utime(path, (path.stat().st_atime - age, path.stat().st_mtime - age))
    (lab.root / "1700000000000000").mkdir()
    (lab.root / "9999999999999999").mkdir()
    await pool.collect()
    assert sorted(path.name for path in home.glob("*/*-*")) == ["616c697665-1-4096", "alive-1"]
    assert {path.name for path in lab.root.iterdir()} == {home.name, "generation", "9999999999999999"}


async def test_a_dead_writers_claim_holds_its_room_until_it_is_swept(lab: DirectoryLab) -> None:
    bounds = PoolBounds(bytes_max=100_000)
    pool = await lab.open(bounds)
    claim = lab.root / str(pool.holder.generation) / "claims" / "dead-1-90000"  # type: ignore[union-attr]
    claim.touch()
    outcome = await put(pool, make_run(1))
    assert isinstance(outcome, Declined)
    assert outcome.reason is DeclineReason.FULL
    os.utime(claim, (0, 0))
    await pool.collect()
    assert await put(pool, make_run(1)) == Accepted(new=True)


async def test_many_that_begin_at_once_begin_one_generation(lab: DirectoryLab) -> None:
    pools = await asyncio.gather(*(lab.open() for _ in range(12)))
    assert len({pool.holder for pool in pools}) == 1
    assert sorted(path.name for path in lab.root.iterdir()) == [str(pools[0].holder.generation), "generation"]  # type: ignore[union-attr]


async def test_no_descriptor_is_left_open(lab: DirectoryLab, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(front, "READ_BYTES", 5000)
    pool = await lab.open()
    run, broken = make_run(1), make_run(2)
    await put(pool, run)

    async def everything() -> None:
        await put(pool, broken)
        lab.damage(broken.key.name, lambda file: file[:-1])
        await pool.get(broken.key)
        await pool.get(make_run(3).key)
        reading = pool.stream(run.key)
        await anext(reading)
        await reading.aclose()
        task = asyncio.create_task(pool.get(run.key))
        await asyncio.sleep(0.0005)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    await everything()
    await asyncio.sleep(0.05)
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(20):
        await everything()
    await asyncio.sleep(0.05)
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == before
