"""Pages in a pool for callers that are threads: what waits is bounded, and nobody waits for long."""

import asyncio
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest

from cachecore.scope import Keyring, TenantId
from cachecore.store.pools import (
    Accepted,
    Announce,
    Declined,
    DirectoryPool,
    Extent,
    Found,
    Missed,
    PoolBounds,
    PoolRun,
    RunKey,
    SealedFrame,
)
from cachecore.transfer.errors import FrameError
from workers.pools import OpenPools
from workers.sglang.namespaces import Deployment, Namespace
from workers.sglang.store import Page, PageStore

BYTES = 1000


class SlowPool(DirectoryPool):
    """One that holds its answers back until it is told to give them."""

    def __init__(self, root: Path) -> None:
        announce: Announce = lambda announcement: None  # noqa: E731
        super().__init__("slow", root, PoolBounds(bytes_max=1 << 20), announce)
        self.open = threading.Event()
        self.open.set()
        self.under_way = self.most_under_way = 0

    async def _held_back(self) -> None:
        self.under_way += 1
        self.most_under_way = max(self.most_under_way, self.under_way)
        try:
            while not self.open.is_set():
                await asyncio.sleep(0.002)
        finally:
            self.under_way -= 1

    async def get(self, key: RunKey, layers: Extent | None = None) -> Found | Missed:
        await self._held_back()
        return await super().get(key, layers)

    async def put(self, run: PoolRun, frames: Sequence[SealedFrame]) -> Accepted | Declined:
        await self._held_back()
        return await super().put(run, frames)


class World:
    def __init__(self, root: Path, stall_seconds: float) -> None:
        self.pool = SlowPool(root)
        self.keyring = Keyring.generate()
        opened = OpenPools([])
        opened._pools["slow"] = self.pool
        self.store = PageStore(opened, self.keyring, reads=3, writes=2, stall_seconds=stall_seconds)
        one = SimpleNamespace(
            tp_rank=0,
            tp_size=1,
            pp_rank=0,
            pp_size=1,
            attn_cp_rank=0,
            attn_cp_size=1,
            is_mla_model=False,
            model_name="",
        )
        deployment = Deployment(one, "weights", TenantId("default"), "1", {})
        self.names = Namespace(deployment, self.keyring, "kv", {}, 64)

    def pages(self, count: int) -> list[Page]:
        runs = [self.names.run(f"{number:064x}") for number in range(count)]
        return [Page(run, self.names.header(run, BYTES)) for run in runs]

    def save(self, count: int) -> int:
        return self.store.save(self.pages(count), lambda number: [memoryview(bytes([number]) * BYTES)])


def running(world: World) -> Iterator[World]:
    world.store.start()
    yield world
    world.pool.open.set()
    world.store.close()


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    yield from running(World(tmp_path, stall_seconds=20.0))


@pytest.fixture
def impatient(tmp_path: Path) -> Iterator[World]:
    yield from running(World(tmp_path, stall_seconds=0.1))


def test_no_more_is_read_ahead_than_is_allowed(world: World) -> None:
    assert world.save(10) == 10
    taken: list[tuple[int, int]] = []
    world.pool.most_under_way = 0
    world.pool.open.clear()
    threading.Timer(0.03, world.pool.open.set).start()
    assert world.store.load(world.pages(10), lambda number, payload: taken.append((number, payload[0]))) == 10
    assert taken == [(number, number) for number in range(10)]
    assert world.pool.most_under_way == 3


def test_no_more_waits_to_be_stored_than_is_allowed(impatient: World) -> None:
    impatient.pool.open.clear()
    assert impatient.save(10) == 0
    assert impatient.pool.under_way == 2
    assert impatient.store.counts == {"busy": 1, "stalled": 2}
    impatient.pool.open.set()
    assert 10 in (impatient.save(10) for _ in range(100))  # each of which waits a moment
    assert impatient.pool.most_under_way == 2


def test_a_read_that_stalls_is_given_up_and_touches_nothing_later(world: World, impatient: World) -> None:
    assert world.save(4) == 4
    pages, taken = world.pages(4), list[int]()
    impatient.store._keyring = world.keyring
    impatient.pool.open.clear()
    assert impatient.store.load(pages, lambda number, payload: taken.append(number)) == 0
    impatient.pool.open.set()
    assert impatient.store.counts == {"stalled": 1}
    assert taken == []
    assert world.store.load(pages, lambda number, payload: taken.append(number)) == 4
    assert taken == [0, 1, 2, 3]


def test_a_caller_that_fails_leaves_no_read_behind(world: World) -> None:
    world.save(6)

    def fail(number: int, payload: memoryview) -> None:
        raise ValueError("no room")

    with pytest.raises(ValueError, match="no room"):
        world.store.load(world.pages(6), fail)
    assert world.store.load(world.pages(6), lambda number, payload: None) == 6


def test_a_page_that_cannot_be_sealed_leaves_its_room(world: World) -> None:
    for _ in range(5):
        with pytest.raises(FrameError, match="1 bytes short"):
            world.store.save(world.pages(1), lambda number: [memoryview(bytes(BYTES - 1))])
    assert world.save(2) == 2


def test_lookups_go_on_in_batches_until_one_is_missing(world: World) -> None:
    runs = [page.run for page in world.pages(70)]
    world.save(40)
    assert world.store.present(runs) == 40
    assert world.store.present_each(runs) == [True] * 40 + [False] * 30


def test_threads_may_ask_at_once(world: World) -> None:
    world.save(8)
    found: list[int] = []
    threads = [
        threading.Thread(target=lambda: found.append(world.store.load(world.pages(8), lambda number, payload: None)))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(5)
    assert found == [8] * 4
    assert world.store.counts["loaded"] == 32
