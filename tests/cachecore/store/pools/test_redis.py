"""A pool in a Redis or Valkey: the contract on each of them and on a cluster, and what only a server can do to it."""

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest

from cachecore.index.contract import Stored
from cachecore.store import RedisStore, parse_address
from cachecore.store.pools import (
    Accepted,
    Declined,
    DeclineReason,
    Found,
    Missed,
    MissReason,
    PoolBounds,
    PoolRun,
    RedisPool,
    RemovalReason,
    hckv,
)
from cachecore.store.pools import redis as pool_redis
from cachecore.store.pools.redis import _WRITE, CHUNK_BYTES, DEAD_SECONDS, _Verdict, _Writing
from tests.cachecore.store.pools.contract_suite import ROOMY, PoolBehaviour
from tests.cachecore.store.pools.runs import ANN, BOB, Ear, make_frames, make_run
from tests.cachecore.store.servers import Cluster, Server, start_cluster, start_server

PREFIX = b"ropeway:pool:pool:"


class RedisLab:
    tick_seconds = 0.01

    def __init__(self, url: str, nodes: list[Server]) -> None:
        self.url = url
        self.nodes = nodes
        self.pools: list[RedisPool] = []
        self.stores: list[RedisStore] = []

    async def open(
        self,
        bounds: PoolBounds = ROOMY,
        announce: Callable[..., None] = lambda announcement: None,
        budget_seconds: float = 20.0,
    ) -> RedisPool:
        store = RedisStore(parse_address(self.url), budget_seconds=budget_seconds)
        self.stores.append(store)
        await store.start()
        pool = RedisPool("pool", store, bounds, announce, budget_seconds=budget_seconds)
        self.pools.append(pool)
        await pool.start()
        return pool

    def values(self) -> dict[str, tuple[Server, bytes]]:
        return {
            key.rpartition(b":")[2].decode(): (node, key)
            for node in self.nodes
            for key in node.command("KEYS", PREFIX + b"*")
        }

    def stored(self) -> dict[str, int]:
        """With what every chunk takes, and the end of the file once it is there."""
        found = {}
        for name, (node, key) in self.values().items():
            flat = node.command("HGETALL", key)
            found[name] = sum(
                len(value) for field, value in zip(flat[::2], flat[1::2], strict=True) if field != b"token"
            )
        return found

    def damage(self, name: str, change: Callable[[bytes], bytes]) -> None:
        node, key = self.values()[name]
        flat = node.command("HGETALL", key)
        fields = dict(zip(flat[::2], flat[1::2], strict=True))
        frames = b"".join(fields[b"%d" % number] for number in range(len(fields) - 2))
        changed = change(frames + fields[b"tail"])
        frames, tail = changed[: len(frames)], changed[len(frames) :]
        node.command("HSET", key, "tail", tail)
        for number, start in enumerate(range(0, len(frames), CHUNK_BYTES)):
            node.command("HSET", key, number, frames[start : start + CHUNK_BYTES])

    def swap(self, name: str, other: str) -> None:
        values = self.values()
        (node, key), (source, other_key) = values[name], values[other]
        flat = source.command("HGETALL", other_key)
        node.command("DEL", key)
        node.command("HSET", key, *flat)

    def empty(self) -> None:
        for node in self.nodes:
            node.command("FLUSHALL")

    def take_away(self) -> None:
        for node in self.nodes:
            node.freeze()

    def bring_back(self) -> None:
        for node in self.nodes:
            node.thaw()

    async def close(self) -> None:
        for pool in self.pools:
            await pool.close()
        for store in self.stores:
            await store.close()


@pytest.fixture(scope="module")
def pool_server(binary: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with start_server(tmp_path_factory.mktemp("pool"), binary=binary, persist=False) as server:
        yield server


@pytest.fixture(scope="module")
def pool_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    options = {"cluster-node-timeout": "60000", "appendonly": "no"}  # frozen nodes are not to be voted out
    with start_cluster(tmp_path_factory.mktemp("cluster"), options=options) as cluster:
        yield cluster


async def opened(url: str, nodes: list[Server]) -> AsyncIterator[RedisLab]:
    for node in nodes:
        node.command("FLUSHALL")
    lab = RedisLab(url, nodes)
    yield lab
    await lab.close()


class TestRedisPool(PoolBehaviour):
    @pytest.fixture
    async def lab(self, pool_server: Server) -> AsyncIterator[RedisLab]:
        async for lab in opened(pool_server.url, [pool_server]):
            yield lab


class TestRedisPoolInACluster(PoolBehaviour):
    @pytest.fixture
    async def lab(self, pool_cluster: Cluster) -> AsyncIterator[RedisLab]:
        async for lab in opened(pool_cluster.url, pool_cluster.nodes):
            yield lab


# ---- what only a server does -----------------------------------------------------------------------------------------


@pytest.fixture
async def lab(pool_server: Server) -> AsyncIterator[RedisLab]:
    async for lab in opened(pool_server.url, [pool_server]):
        yield lab


async def put(pool: RedisPool, run: PoolRun, frame_bytes: int = 5000) -> Accepted | Declined:
    return await pool.put(run, make_frames(run, frame_bytes))


def counted(server: Server) -> dict[str, int]:
    """What the server counts, but for the generation."""
    flat = server.command("HGETALL", "{ropeway:pool:pool}:bytes")
    fields = dict(zip(flat[::2], flat[1::2], strict=True))
    return {name.decode(): int(value) for name, value in fields.items() if name != b"generation" and value != b"0"}


async def quiet(pool: RedisPool) -> None:
    """What goes on beside is done."""
    while pool._tasks:
        await asyncio.gather(*pool._tasks)


async def test_what_the_server_evicts_by_itself_is_noticed(lab: RedisLab) -> None:
    ear = Ear()
    pool, other = await lab.open(), await lab.open(announce=ear)
    run, kept = make_run(1), make_run(2)
    await put(pool, run)
    await put(pool, kept)
    node, key = lab.values()[run.key.name]
    node.command("DEL", key)
    assert await other.get(run.key) == Missed(MissReason.ABSENT)
    await quiet(other)
    assert ear.events == [run.removed()]
    assert counted(node) == {"total": lab.stored()[kept.key.name], "tenant:ann": lab.stored()[kept.key.name]}
    assert await put(pool, run) == Accepted(new=True)


async def test_a_server_without_memory_is_a_refusal(tmp_path: Path) -> None:
    with start_server(tmp_path, persist=False, maxmemory="12mb", policy="noeviction") as server:
        async for lab in opened(server.url, [server]):
            pool = await lab.open(PoolBounds(bytes_max=1 << 30))
            outcomes = [await put(pool, make_run(seed), 700_000) for seed in range(10)]
            full = [outcome for outcome in outcomes if isinstance(outcome, Declined)]
            assert {outcome.reason for outcome in full} == {DeclineReason.FULL}
            assert 3 <= len(outcomes) - len(full) <= 6
            await quiet(pool)
            assert counted(server)["total"] == sum(lab.stored().values())
            assert not server.command("ZCARD", "{ropeway:pool:pool}:pending")
            assert await pool.evict(make_run(0).key)
            assert await put(pool, make_run(20), 500_000) == Accepted(new=True)


async def begin_and_die(pool: RedisPool, run: PoolRun) -> None:
    """As a writer that is killed after its first chunk."""
    encoded = hckv.encode(run, make_frames(run, 5000))
    writing = _Writing(pool._generation, run.key.name, encoded.index.identity.hex())
    assert await pool._admit(run.key, writing, encoded.size) is _Verdict.ADMITTED
    chunk = b"".join(bytes(buffer) for buffer in encoded.buffers[:-1])
    await pool._run(_WRITE, [pool._value(run.key.name)], writing.token, 0, chunk, DEAD_SECONDS * 1000)


async def test_what_a_dead_writer_began_is_invisible_counts_and_goes(
    lab: RedisLab, pool_server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    ear = Ear()
    pool = await lab.open(announce=ear)
    run, other = make_run(1), make_run(2)
    for begun in (run, other):
        await begin_and_die(pool, begun)
    assert await pool.get(run.key) == Missed(MissReason.ABSENT)
    assert not await pool.contains(run.key)
    assert [found async for found in pool.runs()] == []
    outcome = await put(pool, run)
    assert isinstance(outcome, Declined)
    assert outcome.reason is DeclineReason.BUSY
    await pool.collect()
    assert counted(pool_server)["total"] == 2 * hckv.encode(run, make_frames(run, 5000)).size
    monkeypatch.setattr(pool_redis, "DEAD_SECONDS", 1)
    await asyncio.sleep(2.1)
    assert await put(pool, run) == Accepted(new=True)  # taken over at once
    await pool.collect()
    assert list(lab.stored()) == [run.key.name]
    assert counted(pool_server)["total"] == lab.stored()[run.key.name]
    assert ear.events == [run.stored()]


async def test_a_late_step_does_not_hit_the_next_writing(lab: RedisLab, pool_server: Server) -> None:
    pool, ear = await lab.open(), Ear()
    other = await lab.open(announce=ear)
    run = make_run(1)
    await put(pool, run)
    before = counted(pool_server)
    stale = _Writing(pool._generation, run.key.name, "00" * 8)
    await other._undo(stale)
    assert await other._end([(stale, RemovalReason.BOUND)]) == 0
    value = pool._value(run.key.name)
    assert await pool._run(_WRITE, [value], stale.token, 1, b"late chunk", 1000) == 0
    assert counted(pool_server) == before
    assert isinstance(await pool.get(run.key), Found)
    assert ear.events == []


async def test_every_value_expires_when_nobody_is_left_to_collect(lab: RedisLab) -> None:
    bounds = PoolBounds(bytes_max=64 << 20, idle_seconds_max=1000, reuse_credit_seconds=1)
    pool = await lab.open(bounds)
    run = make_run(1)
    await put(pool, run)
    node, key = lab.values()[run.key.name]
    assert 1_000_000 < node.command("PTTL", key) <= 1_120_000
    node.command("PEXPIRE", key, 5000)
    await pool.get(run.key)
    await quiet(pool)
    assert node.command("PTTL", key) > 1_000_000


async def test_counts_are_what_is_there_after_a_long_mess(
    lab: RedisLab, pool_server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Many steps of several pools at once, some cancelled, under bound and quota."""
    rng = random.Random(3)
    bounds = PoolBounds(bytes_max=200_000, quotas={BOB: 60_000})
    ear = Ear()
    pools = [await lab.open(bounds, ear) for _ in range(3)]

    async def step(pool: RedisPool) -> None:
        run = make_run(rng.randrange(30), tenant=rng.choice([ANN, BOB]))
        match rng.randrange(6):
            case 0:
                await pool.evict(run.key)
            case 1:
                await pool.get(run.key)
            case 2:
                task = asyncio.create_task(put(pool, run, rng.randrange(100, 6000)))
                await asyncio.sleep(rng.random() * 0.01)
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
            case _:
                await put(pool, run, rng.randrange(100, 6000))

    for _ in range(60):
        await asyncio.gather(*(step(pool) for pool in pools for _ in range(2)))
    for pool in pools:
        await quiet(pool)
    monkeypatch.setattr(pool_redis, "DEAD_SECONDS", 1)
    await asyncio.sleep(2.1)  # a step that was cancelled on its way may have been taken: that is found like the dead
    await pools[0].collect()
    stored = lab.stored()
    assert counted(pool_server)["total"] == sum(stored.values()) <= bounds.bytes_max
    assert pool_server.command("ZCARD", "{ropeway:pool:pool}:worths") == len(stored) > 5
    assert pool_server.command("HLEN", "{ropeway:pool:pool}:tails") == len(stored)
    held: Counter[bytes] = Counter()
    for event in ear.events:
        names = event.chain  # type: ignore[attr-defined]
        held[names] += 1 if isinstance(event, Stored) else -1
    announced = {names for names, count in held.items() if count}
    assert set(held.values()) <= {0, 1, 2}  # two tenants' runs of one seed have one chain here
    assert announced == {run.chain async for run in pools[0].runs()}


async def test_a_cluster_shares_the_bytes(pool_cluster: Cluster) -> None:
    async for lab in opened(pool_cluster.url, pool_cluster.nodes):
        pool = await lab.open()
        for seed in range(12):
            assert await put(pool, make_run(seed)) == Accepted(new=True)
        assert len({node.port for node, _ in lab.values().values()}) == 3
