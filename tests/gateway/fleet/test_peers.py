"""Gateways that tell each other what they dispatch, over a real server."""

import asyncio
import contextlib
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest

from cachecore.holders import Epoch, Worker, WorkerName
from cachecore.index.memory import MemoryIndex
from cachecore.store import RedisStore, parse_address
from gateway.fleet.knowledge import Knowledge
from gateway.fleet.notes import encode
from gateway.fleet.peers import Peers
from tests.cachecore.store.servers import Server, start_cluster, start_server

WORKERS = ("w0", "w1", "w2", "w3")


def holders_of(name: str) -> list[Worker]:
    return [Worker(WorkerName(name), Epoch(5), 0)] if name in WORKERS else []


class Gateway:
    def __init__(self, name: str, url: str) -> None:
        self.knowledge = Knowledge(MemoryIndex())
        self.store = RedisStore(parse_address(url))
        self.directory_changes = 0
        self.peers = Peers(self.store, "test", name, self.knowledge, holders_of, self._directory_changed)
        self._task: asyncio.Task[None] | None = None

    def _directory_changed(self) -> None:
        self.directory_changes += 1

    async def start(self) -> None:
        await self.store.start()
        self._task = asyncio.create_task(self.peers.run())

    async def stop(self) -> None:
        assert self._task is not None
        self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._task
        await self.store.close()

    async def vanish(self) -> None:
        """Without a word, as a killed process does."""
        await self.store.close()
        await self.stop()

    def dispatch(self, request_id: str, worker: str = "w0") -> None:
        self.knowledge.accounting.dispatch(request_id, worker, 0, time.monotonic(), 1000, 0.25, 64, 0.2)

    def finish(self, request_id: str) -> None:
        self.knowledge.accounting.finish(request_id, time.monotonic(), 20, True)

    def load(self) -> list[tuple[int, int, int, float]]:
        accounts = [self.knowledge.accounting.account(worker) for worker in WORKERS]
        return [(a.inflight, a.waiting, a.inflight_tokens, a.outstanding_prefill_seconds) for a in accounts]

    @property
    def total(self) -> int:
        return sum(inflight for inflight, *_ in self.load())


async def until(condition: Callable[[], bool], seconds: float = 5.0) -> None:
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.002)


def acquainted(*gateways: Gateway) -> bool:
    return all(
        len(g.peers.alive()) == len(gateways) - 1 and all(peer.complete for peer in g.peers.stats().peers)
        for g in gateways
    )


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with start_server(tmp_path_factory.mktemp("valkey")) as started:
        yield started


@contextlib.asynccontextmanager
async def running(url: str, count: int) -> AsyncIterator[list[Gateway]]:
    gateways = [Gateway(f"gw{number}", url) for number in range(count)]
    for gateway in gateways:
        await gateway.start()
    try:
        await until(lambda: acquainted(*gateways))
        yield gateways
    finally:
        for gateway in gateways:
            await gateway.stop()


@pytest.fixture
async def pair(server: Server) -> AsyncIterator[list[Gateway]]:
    server.command("FLUSHALL")
    async with running(server.url, 2) as gateways:
        yield gateways


async def test_load_is_seen_by_the_other_and_ends_there(pair):
    a, b = pair
    a.dispatch("r1")
    await until(lambda: b.total == 1)
    assert b.load() == a.load()
    a.knowledge.accounting.first_token("r1", time.monotonic())
    await until(lambda: b.load()[0][1] == 0)
    a.finish("r1")
    await until(lambda: b.total == 0)
    assert b.load() == a.load() == [(0, 0, 0, 0.0)] * 4
    assert b.knowledge.accounting.output_tokens_mean == a.knowledge.accounting.output_tokens_mean


async def test_predictions_are_seen_by_the_other(pair):
    a, b = pair
    chain = bytes(range(64)) * 4
    a.knowledge.predictions.predict("r1", ("w1", 0), chain, time.monotonic())
    await until(lambda: b.knowledge.predictions.depths(chain, time.monotonic()) == {("w1", 0): 16})
    a.knowledge.predictions.cancel("r1")
    await until(lambda: b.knowledge.predictions.depths(chain, time.monotonic()) == {})


async def test_four_gateways_keep_equal_accounts_that_end_at_zero(server):
    server.command("FLUSHALL")
    async with running(server.url, 4) as gateways:
        for number in range(64):
            gateways[number % 4].dispatch(f"r{number}", WORKERS[number // 4 % 4])
        await until(lambda: all(gateway.total == 64 for gateway in gateways))
        assert [gateway.load() for gateway in gateways] == [[(16, 16, 16_000, 4.0)] * 4] * 4
        for number in range(64):
            gateways[number % 4].knowledge.accounting.first_token(f"r{number}", time.monotonic())
            gateways[number % 4].finish(f"r{number}")
        await until(lambda: all(gateway.total == 0 for gateway in gateways))
        assert [gateway.load() for gateway in gateways] == [[(0, 0, 0, 0.0)] * 4] * 4
        for gateway in gateways:
            assert len(gateway.knowledge.accounting) == gateway.knowledge.accounting.unknown == 0
            counts = gateway.peers.stats().received
            assert counts.malformed == counts.differences == counts.unknown_requests == counts.strange_lives == 0


async def test_a_second_gateway_of_one_name_is_pointed_out(pair, server, caplog):
    a, b = pair
    b.dispatch("r1")
    await until(lambda: a.total == 1)
    assert "is called" not in caplog.text
    namesake = Gateway("gw0", server.url)
    await namesake.start()
    try:
        await until(lambda: "another gateway is called gw0 as well" in caplog.text)
    finally:
        await namesake.stop()


async def test_a_burst_larger_than_a_message_arrives_whole(pair):
    a, b = pair
    for number in range(1500):
        a.dispatch(f"r{number}", WORKERS[number % 4])
    await until(lambda: b.total == 1500)
    for number in range(1500):
        a.finish(f"r{number}")
    await until(lambda: b.total == 0)
    assert b.peers.stats().received.differences == 0


async def test_a_gateway_that_joins_learns_the_present_load(pair, server):
    a, _ = pair
    a.dispatch("r1")
    a.dispatch("r2", "w2")
    a.knowledge.accounting.first_token("r2", time.monotonic())
    late = Gateway("late", server.url)
    late.dispatch("r3", "w3")  # before it knows anybody
    await late.start()
    try:
        await until(lambda: late.total == 3 and a.total == 3)
        assert late.load() == a.load()
        assert [waiting for _, waiting, *_ in late.load()] == [1, 0, 0, 1]
    finally:
        await late.stop()
    await until(lambda: a.total == 2)


async def test_a_gateway_on_its_own_sends_signs_of_life_alone(server):
    server.command("FLUSHALL")
    async with running(server.url, 1) as [alone]:
        await until(lambda: alone.peers.stats().sent_messages >= 1)
        for number in range(100):
            alone.dispatch(f"r{number}")
        await asyncio.sleep(0.6)
        stats = alone.peers.stats()
        assert stats.sent_messages <= 2
        assert stats.sent_bytes < 200
        assert stats.own_requests == 100


async def test_a_killed_gateways_load_is_retired(server, tmp_path):
    server.command("FLUSHALL")
    program = tmp_path / "victim.py"
    program.write_text(
        "import asyncio, sys\n"
        "from tests.gateway.fleet.test_peers import Gateway\n"
        "async def main():\n"
        "    gateway = Gateway('victim', sys.argv[1])\n"
        "    await gateway.start()\n"
        "    for number in range(5):\n"
        "        gateway.dispatch(f'r{number}')\n"
        "    await asyncio.sleep(60)\n"
        "asyncio.run(main())\n"
    )
    async with running(server.url, 1) as [a]:
        victim = subprocess.Popen(
            [sys.executable, str(program), server.url], cwd=Path.cwd(), env={"PYTHONPATH": str(Path.cwd())}
        )
        try:
            await until(lambda: a.total == 5, 20.0)
        finally:
            victim.kill()
            victim.wait()
        await until(lambda: a.total == 0, 6.0)
        assert a.load() == [(0, 0, 0, 0.0)] * 4
        assert a.peers.stats().received.silenced == 1


async def test_a_gateway_that_stops_is_forgotten_at_once(server):
    server.command("FLUSHALL")
    async with running(server.url, 2) as [a, b]:
        b.dispatch("r1")
        await until(lambda: a.total == 1)
        b._task.cancel()
        await until(lambda: a.total == 0, 2.0)
        assert a.peers.stats().received.silenced == 0


async def test_a_restarted_gateway_of_the_same_name_replaces_its_former_run(server):
    server.command("FLUSHALL")
    async with running(server.url, 2) as [a, b]:
        b.dispatch("r1")
        await until(lambda: a.total == 1)
        await b.vanish()
        again = Gateway("gw1", server.url)
        await again.start()
        try:
            await until(lambda: a.total == 0)
            assert a.peers.stats().received.silenced == 0
        finally:
            await again.stop()


async def test_an_emptied_server_changes_nothing(pair, server):
    a, b = pair
    a.dispatch("r1")
    await until(lambda: b.total == 1)
    server.command("FLUSHALL")
    a.dispatch("r2")
    b.dispatch("r3")
    await until(lambda: a.total == b.total == 3)
    a.finish("r1")
    a.finish("r2")
    b.finish("r3")
    await until(lambda: a.total == b.total == 0)


async def test_a_killed_server_is_done_without_and_accounts_are_exact_once_it_is_back(tmp_path):
    with start_server(tmp_path, persist=False) as server:
        async with running(server.url, 2) as [a, b]:
            a.dispatch("r1")
            a.dispatch("r2")
            b.dispatch("r3")
            await until(lambda: a.total == b.total == 3)
            server.kill()
            a.finish("r1")
            a.dispatch("r4", "w1")
            await until(lambda: a.total == 2 and b.total == 1, 6.0)  # each its own
            assert a.peers.stats().failures > 0
            assert a.peers.stats().problem
            server.restart(empty=True)
            await until(lambda: a.total == b.total == 3, 5.0)
            assert a.load() == b.load()
            for gateway, request in ((a, "r2"), (a, "r4"), (b, "r3")):
                gateway.finish(request)
            await until(lambda: a.total == b.total == 0)
            assert a.peers.stats().problem == ""


async def test_a_frozen_server_is_done_without(tmp_path):
    with start_server(tmp_path, persist=False) as server:
        async with running(server.url, 2) as [a, b]:
            server.freeze()
            try:
                for number in range(10):
                    a.dispatch(f"r{number}")
                await until(lambda: a.peers.alive() == b.peers.alive() == [], 6.0)
            finally:
                server.thaw()
            await until(lambda: b.total == 10, 5.0)
            for number in range(10):
                a.finish(f"r{number}")
            await until(lambda: a.total == b.total == 0)


async def test_a_server_that_is_away_at_the_start_is_joined_later(tmp_path):
    with start_server(tmp_path, persist=False) as server:
        server.kill()
        gateways = [Gateway(name, server.url) for name in ("a", "b")]
        for gateway in gateways:
            await gateway.start()
            gateway.dispatch(f"of {gateway.peers.gateway}")
        server.restart()
        await until(lambda: all(gateway.total == 2 for gateway in gateways))
        for gateway in gateways:
            await gateway.stop()


async def test_a_full_server_is_done_without(tmp_path):
    with start_server(tmp_path, persist=False) as server:
        async with running(server.url, 2) as [a, b]:
            server.command("CONFIG", "SET", "maxmemory", "1")
            a.dispatch("r1")
            await until(lambda: "OOM" in a.peers.stats().problem)
            server.command("CONFIG", "SET", "maxmemory", "0")
            await until(lambda: b.total == 1)
            assert a.peers.stats().dropped_notes >= 1


async def test_a_clock_gone_back_does_not_leave_a_gateway_deaf(server):
    server.command("FLUSHALL")
    async with running(server.url, 2) as [a, b]:
        b.peers._position = b"99999999999999-0"  # what a server an age ahead had counted to
        a.dispatch("r1")
        await until(lambda: b.total == 1)


async def test_noise_in_the_stream_does_no_harm(pair, server):
    a, b = pair
    for number in range(50):
        server.command("XADD", "test:{fleet}:notes", "*", "b", bytes([number]) * number)
        server.command("XADD", "test:{fleet}:notes", "*", "something", "else")
    stranger = encode("stranger", "run", 7, 1, [])
    server.command("XADD", "test:{fleet}:notes", "*", "b", stranger)
    a.dispatch("r1")
    await until(lambda: b.total == 1)
    assert b.peers.stats().received.malformed == 100
    await until(lambda: b.peers.alive() == ["gw0"])  # nobody was there


async def test_a_change_of_the_directory_is_announced(pair):
    a, b = pair
    a.peers.announce_directory_change()
    await until(lambda: b.directory_changes == 1)
    assert a.directory_changes == 0


async def test_the_stream_is_capped(pair, server):
    a, b = pair
    for number in range(300):
        a.knowledge.history.record(("w0", 0), number.to_bytes(16, "little") * 1024)
        if number % 10 == 0:
            await asyncio.sleep(0.006)
    await until(lambda: b.knowledge.history.blocks(("w0", 0)) == 65_536)
    for _ in range(5000):
        server.command("XADD", "test:{fleet}:notes", "*", "b", b"")
    a.dispatch("r1")
    await until(lambda: b.total == 1)
    assert server.command("XLEN", "test:{fleet}:notes") <= 4096 + 200


async def test_over_a_cluster(tmp_path):
    with start_cluster(tmp_path) as cluster:
        async with running(cluster.url, 2) as [a, b]:
            a.dispatch("r1")
            await until(lambda: b.total == 1)
            a.finish("r1")
            await until(lambda: b.total == 0)
