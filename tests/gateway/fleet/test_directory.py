"""Gateways that share their directory of workers, over a real server; the fleets are dictionaries."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import msgspec
import pytest

from cachecore.store import RedisStore, parse_address
from gateway.config import EventsConfig, WorkerConfig
from gateway.errors import NotFound, NoWorker
from gateway.fleet.directory import Directory
from gateway.fleet.worker import WorkerRecord
from tests.cachecore.store.servers import Server, start_server

KEY = "test:{fleet}:workers"
ONE = WorkerConfig(url="http://127.0.0.1:9001", name="one")
TWO = WorkerConfig(url="http://127.0.0.1:9002", model="m", block_size_tokens=16)


class Fleet:
    """As `gateway.fleet.registry.Fleet` treats its members, without probing them."""

    def __init__(self) -> None:
        self.workers: dict[str, WorkerRecord] = {}
        self.workers_max = 100
        self.registrations = 0

    async def register(self, config: WorkerConfig) -> WorkerRecord:
        record = WorkerRecord.of(config)
        if len(self.workers) >= self.workers_max:
            raise NoWorker("the fleet is full")
        for other in [w for w in self.workers.values() if w.name == record.name or w.url == record.url]:
            del self.workers[other.name]
        self.workers[record.name] = record
        record.healthy = True
        self.registrations += 1
        return record

    async def remove(self, name: str) -> None:
        if name not in self.workers:
            raise NotFound(name)
        del self.workers[name]

    async def drain(self, name: str, draining: bool) -> bool:
        if name not in self.workers:
            raise NotFound(name)
        record = self.workers[name]
        record.config = msgspec.structs.replace(record.config, draining=draining)
        record.draining = draining
        return False

    @property
    def urls(self) -> dict[str, str]:
        return {name: record.url for name, record in sorted(self.workers.items())}


class Gateway:
    def __init__(self, url: str, group: "list[Gateway]", configured: tuple[WorkerConfig, ...], lease: float) -> None:
        self.fleet = Fleet()
        self.store = RedisStore(parse_address(url))
        self.group = group
        self.configured = configured
        self.directory = Directory(self.store, "test", self.fleet, configured, self._announce, lease)
        self._task: asyncio.Task[None] | None = None

    def _announce(self) -> None:
        for other in self.group:
            if other is not self:
                other.directory.changed()

    async def start(self) -> None:
        await self.store.start()
        for config in self.configured:
            await self.fleet.register(config)
        self._task = asyncio.create_task(self.directory.run())

    async def pause(self) -> None:
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
            self._task = None

    def resume(self) -> None:
        self._task = asyncio.create_task(self.directory.run())


@contextlib.asynccontextmanager
async def gateways(
    server: Server, *configured: tuple[WorkerConfig, ...], lease: float = 600.0, notes: bool = True
) -> AsyncIterator[list[Gateway]]:
    group: list[Gateway] = []
    made = [Gateway(server.url, group, own, lease) for own in configured]
    if notes:
        group.extend(made)
    for gateway in made:
        await gateway.start()
    try:
        yield made
    finally:
        for gateway in made:
            await gateway.pause()
            await gateway.store.close()


async def until(condition: Callable[[], bool], seconds: float = 5.0) -> None:
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.005)


def entries(server: Server) -> dict[str, Any]:
    raw = server.command("HGETALL", KEY)
    return {name.decode(): json.loads(value) for name, value in zip(raw[::2], raw[1::2], strict=True)}


@pytest.fixture(scope="module")
def shared_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with start_server(tmp_path_factory.mktemp("valkey"), persist=False) as started:
        yield started


@pytest.fixture
def server(shared_server: Server) -> Server:
    shared_server.command("FLUSHALL")
    return shared_server


async def test_a_worker_registered_with_one_is_known_to_all_and_removed_from_all(server):
    async with gateways(server, (), (), ()) as [a, b, c]:
        record = await a.directory.register(TWO)
        assert record.name == "127.0.0.1:9002"
        await until(lambda: a.fleet.urls == b.fleet.urls == c.fleet.urls == {record.name: TWO.url})
        assert b.fleet.workers[record.name].config == WorkerConfig(
            url=TWO.url, name=record.name, model="m", block_size_tokens=16
        )
        await b.directory.remove(record.name)
        await until(lambda: a.fleet.urls == b.fleet.urls == c.fleet.urls == {})
        assert entries(server)[record.name]["removed"] is True


async def test_a_drained_worker_is_drained_at_all_and_stays_what_it_was(server):
    async with gateways(server, (), (), ()) as [a, b, c]:
        name = (await a.directory.register(TWO)).name
        await until(lambda: a.fleet.urls == b.fleet.urls == c.fleet.urls)
        records = [gateway.fleet.workers[name] for gateway in (a, b, c)]
        assert await b.directory.drain(name, True) is True
        await until(lambda: all(record.draining for record in records))
        await c.directory.drain(name, False)
        await until(lambda: not any(record.draining for record in records))
        # Nobody has registered it anew, which would forget what is known of its cache.
        assert [gateway.fleet.workers[name] for gateway in (a, b, c)] == records
        assert [gateway.fleet.registrations for gateway in (a, b, c)] == [1, 1, 1]


async def test_a_gateway_that_comes_later_finds_a_worker_draining(server):
    async with gateways(server, ()) as [a]:
        name = (await a.directory.register(TWO)).name
        await a.directory.drain(name, True)
        async with gateways(server, ()) as [late]:
            await until(lambda: name in late.fleet.workers)
            assert late.fleet.workers[name].draining is True


async def test_a_configured_worker_is_drained_by_each_gateway_for_itself(server):
    async with gateways(server, (ONE,), (ONE,)) as [a, b]:
        assert await a.directory.drain("one", True) is False
        assert (a.fleet.workers["one"].draining, b.fleet.workers["one"].draining) == (True, False)
        with pytest.raises(NotFound):
            await a.directory.drain("nobody", True)


async def test_all_that_is_said_of_a_worker_travels_and_what_a_later_version_says_is_left_out(server):
    said = WorkerConfig(
        url="http://127.0.0.1:9003/",
        name="three",
        engine="vllm",
        sidecar="http://127.0.0.1:9103",
        events=EventsConfig(endpoint="tcp://127.0.0.1:5557", topic="kv", bind=True),
    )
    async with gateways(server, (), ()) as [a, b]:
        await a.directory.register(said)
        await until(lambda: "three" in b.fleet.workers)
        assert b.fleet.workers["three"].config == msgspec.structs.replace(said, url="http://127.0.0.1:9003")
        entry = entries(server)["three"]
        assert set(entry) == {"url", "engine", "sidecar", "events", "until_ms"}
        server.command("HSET", KEY, "four", json.dumps({**entry, "url": "http://127.0.0.1:9004", "colour": "red"}))
        await until(lambda: "four" in b.fleet.workers)
        assert b.fleet.registrations == 2


async def test_it_is_found_without_a_note_as_well(server):
    async with gateways(server, (), (), notes=False) as [a, b]:
        await a.directory.register(ONE)
        await until(lambda: b.fleet.urls == {"one": ONE.url}, 3.0)
        await a.directory.remove("one")
        await until(lambda: b.fleet.urls == {}, 3.0)


async def test_a_gateway_that_starts_later_finds_what_is_listed(server):
    async with gateways(server, ()) as [a]:
        await a.directory.register(ONE)
        async with gateways(server, ()) as [late]:
            await until(lambda: late.fleet.urls == {"one": ONE.url})


async def test_a_worker_that_nobody_knows_cannot_be_removed(server):
    async with gateways(server, ()) as [a]:
        with pytest.raises(NotFound):
            await a.directory.remove("nobody")
        assert entries(server) == {}


async def test_configured_workers_are_not_listed_and_stay(server):
    async with gateways(server, (ONE,), ()) as [a, b]:
        await b.directory.register(TWO)
        await until(lambda: len(a.fleet.urls) == 2)
        assert list(entries(server)) == ["127.0.0.1:9002"]
        with pytest.raises(NotFound):
            await b.directory.remove("one")
        server.command("HSET", KEY, "one", json.dumps({"removed": True, "until_ms": 9e15}))
        b.directory.changed()
        a.directory.changed()
        await b.directory.register(WorkerConfig(url="http://127.0.0.1:9003", name="three"))
        await until(lambda: "three" in a.fleet.urls)
        assert a.fleet.urls["one"] == ONE.url


async def test_a_configured_worker_that_was_listed_too_goes_with_its_removal(server):
    async with gateways(server, (ONE,), ()) as [a, b]:
        await b.directory.register(ONE)
        await until(lambda: a.directory.stats().shared == 1)
        await b.directory.remove("one")
        await until(lambda: a.fleet.urls == {})


async def test_a_configured_worker_wins_over_an_entry_of_its_name_or_url(server):
    async with gateways(server, (ONE,), ()) as [a, b]:
        await b.directory.register(WorkerConfig(url="http://127.0.0.1:9009", name="one"))
        await b.directory.register(WorkerConfig(url=ONE.url, name="other"))
        await until(lambda: a.directory.stats().refused >= 2)
        assert a.fleet.urls == {"one": ONE.url}
        assert a.fleet.registrations == 1


async def test_a_worker_registered_anew_is_replaced_everywhere(server):
    async with gateways(server, (), ()) as [a, b]:
        await a.directory.register(ONE)
        await until(lambda: b.fleet.urls == {"one": ONE.url})
        await b.directory.register(WorkerConfig(url="http://127.0.0.1:9009", name="one"))
        await until(lambda: a.fleet.urls == {"one": "http://127.0.0.1:9009"})
        await b.directory.register(WorkerConfig(url="http://127.0.0.1:9009", name="renamed"))
        await until(lambda: a.fleet.urls == b.fleet.urls == {"renamed": "http://127.0.0.1:9009"})
        assert entries(server)["one"]["removed"] is True


async def test_leases_are_renewed_by_whoever_finds_the_worker_well(server):
    async with gateways(server, (), (), lease=0.5) as [a, b]:
        await a.directory.register(ONE)
        await until(lambda: b.fleet.urls == {"one": ONE.url})
        a.fleet.workers["one"].healthy = False
        await asyncio.sleep(1.2)
        assert a.fleet.urls == b.fleet.urls == {"one": ONE.url}
        b.fleet.workers["one"].healthy = False
        await until(lambda: a.fleet.urls == b.fleet.urls == {})
        assert entries(server)["one"].get("expired") is True
        await until(lambda: entries(server) == {})  # the removal is forgotten in its turn


async def test_a_configured_worker_outlives_its_lease(server):
    async with gateways(server, (ONE,), (), lease=0.3) as [a, b]:
        await b.directory.register(ONE)
        await until(lambda: a.directory.stats().shared == 1)
        for gateway in (a, b):
            gateway.fleet.workers["one"].healthy = False
        await until(lambda: b.fleet.urls == {})
        await until(lambda: a.directory.stats().shared == 0)
        assert a.fleet.urls == {"one": ONE.url}


async def test_an_emptied_server_is_filled_again_and_nobody_is_removed(server):
    async with gateways(server, (), ()) as [a, b]:
        await a.directory.register(ONE)
        await b.directory.register(TWO)
        await until(lambda: len(a.fleet.urls) == len(b.fleet.urls) == 2)
        server.command("FLUSHALL")
        await until(lambda: set(entries(server)) == {"one", "127.0.0.1:9002"})
        assert a.fleet.registrations == b.fleet.registrations == 2
        assert len(a.fleet.urls) == len(b.fleet.urls) == 2


async def test_changes_made_while_the_server_is_away_are_passed_on(tmp_path):
    with start_server(tmp_path, persist=False) as server:
        async with gateways(server, (), ()) as [a, b]:
            await a.directory.register(ONE)
            await until(lambda: b.fleet.urls == {"one": ONE.url})
            server.kill()
            await a.directory.register(TWO)
            await b.directory.remove("one")
            assert (set(a.fleet.urls), set(b.fleet.urls)) == ({"one", "127.0.0.1:9002"}, set())
            assert a.directory.stats().pending == 1
            assert a.directory.stats().problem
            server.restart(empty=True)
            await until(lambda: a.fleet.urls == b.fleet.urls == {"127.0.0.1:9002": TWO.url})
            assert a.directory.stats().problem == ""


async def test_who_was_away_longer_than_removals_are_kept_believes_the_directory(server):
    async with gateways(server, (), (), lease=0.3) as [a, b]:
        await a.directory.register(ONE)
        await a.directory.register(TWO)
        await until(lambda: len(b.fleet.urls) == 2)
        await b.pause()
        await a.directory.remove("one")
        await until(lambda: set(entries(server)) == {"127.0.0.1:9002"})
        b.resume()
        await until(lambda: set(b.fleet.urls) == {"127.0.0.1:9002"})
        await asyncio.sleep(0.2)
        assert set(a.fleet.urls) == {"127.0.0.1:9002"}


async def test_what_an_emptied_server_lost_is_listed_again_even_after_a_long_absence(server):
    async with gateways(server, (), lease=0.3) as [a]:
        await a.directory.register(ONE)
        await until(lambda: a.directory.stats().pending == 0)
        await a.pause()
        server.command("FLUSHALL")
        await asyncio.sleep(0.4)
        a.resume()
        await until(lambda: "one" in entries(server))
        assert a.fleet.urls == {"one": ONE.url}


async def test_entries_that_make_no_sense_are_counted_and_left_alone(server):
    for number, value in enumerate(["", "{", "[]", "3", '{"url": 5}', '{"url": "ftp://x"}', '{"url": "http://h:1/p"}']):
        server.command("HSET", KEY, f"bad{number}", value)
    server.command("HSET", KEY, b"\xff\xfe", '{"url": "http://127.0.0.1:9001"}')
    async with gateways(server, ()) as [a]:
        await until(lambda: a.directory.stats().malformed >= 7)
        await a.directory.register(ONE)
        assert a.fleet.urls == {"one": ONE.url}
        assert server.command("HLEN", KEY) == 9


async def test_a_fleet_that_is_full_refuses_and_goes_on(server):
    async with gateways(server, (), ()) as [a, b]:
        b.fleet.workers_max = 1
        await a.directory.register(ONE)
        await a.directory.register(TWO)
        await until(lambda: b.directory.stats().refused >= 1)
        assert len(b.fleet.urls) == 1
        b.fleet.workers_max = 2
        await a.directory.register(WorkerConfig(url=TWO.url, name="127.0.0.1:9002", model="changed"))
        await until(lambda: len(b.fleet.urls) == 2)
