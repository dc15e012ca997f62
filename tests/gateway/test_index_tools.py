"""`ropeway index`: what it prints, and what it finds wrong."""

import asyncio
import json
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest

from cachecore.blocks import split_chain
from cachecore.holders import Epoch, Worker, WorkerName
from cachecore.index.contract import Removed
from cachecore.index.leases import Leases
from cachecore.index.publisher import Publisher
from cachecore.index.schema import Schema
from cachecore.store import RedisStore, parse_address
from gateway import index_tools
from gateway.errors import StartupError
from gateway.index_tools import Place
from tests.cachecore.index.histories import chain_of, cut
from tests.cachecore.index.publishing import handle_of, stored
from tests.cachecore.store.servers import Server, free_port, start_server

SCHEMA = Schema("tools")
ONE, TWO = Worker(WorkerName("one"), Epoch(7), 0), Worker(WorkerName("two"), Epoch(1), 0)
CHAIN = chain_of(*range(6))
HANDLES = [handle_of(name) for name in split_chain(CHAIN)]


@pytest.fixture(scope="module")
def valkey(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with start_server(tmp_path_factory.mktemp("valkey"), persist=False) as server:
        yield server


@pytest.fixture
async def place(valkey: Server) -> AsyncIterator[Place]:
    """Worker `one` holds six blocks, the first two of them twice; `two` held some and lost them."""
    valkey.command("FLUSHALL")
    store = RedisStore(parse_address(valkey.url), budget_seconds=1.0)
    await store.start()
    publisher = Publisher(store, SCHEMA)
    publisher.apply(ONE, 0, [stored(CHAIN), stored(CHAIN, 0, 2)])
    publisher.apply(TWO, 3, [stored(CHAIN), Removed(cut(CHAIN, 3))])
    await publisher.flush()
    await Leases(store, SCHEMA, "gateway-a", 60.0).ask([ONE], [True])
    yield Place(valkey.url, "tools")
    await store.close()


@asynccontextmanager
async def serving(documents: Mapping[str, Any]) -> AsyncIterator[str]:
    """A worker or a gateway, as far as the tool asks it."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        document = documents.get(head.split()[1].decode())
        status, body = ("200 OK", json.dumps(document)) if document is not None else ("404 Not Found", "")
        writer.write(f"HTTP/1.1 {status}\r\nconnection: close\r\ncontent-length: {len(body)}\r\n\r\n{body}".encode())
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


def listing(epoch: int, handles: Sequence[int]) -> dict[str, Any]:
    return {"/cached_blocks": {"epoch": epoch, "blocks": [[handle, 1] for handle in handles]}}


async def test_stats_say_who_has_what_and_who_follows_it(place: Place, capsys: pytest.CaptureFixture[str]) -> None:
    assert await index_tools.stats(place, as_json=True) == 0
    document = json.loads(capsys.readouterr().out)
    one, two = document["holders"]
    assert (one["holder"], one["owner"], one["state"], one["sequence"]) == ("w/one/7/0", "gateway-a", "followed", 0)
    assert (one["blocks"], one["blocks_by_tier"], one["pieces"]) == (6, {"L0": 6}, 1)
    assert (two["holder"], two["blocks"], two["state"], two["sequence"]) == ("w/two/1/0", 3, "nobody follows it", 3)
    assert one["bytes"] > two["bytes"] > 3 * 16
    assert document["total"]["blocks"] == 9
    assert await index_tools.stats(place, as_json=False) == 0
    assert "2 holders, 9 blocks in 2 pieces" in capsys.readouterr().out


async def test_dump_is_every_run_with_its_handles(place: Place, capsys: pytest.CaptureFixture[str]) -> None:
    assert await index_tools.dump(place, "one") == 0
    (line,) = capsys.readouterr().out.splitlines()
    document = json.loads(line)
    assert document["names"] == [name.hex() for name in split_chain(CHAIN)]
    assert document["handles"] == [f"{handle:016x}" for handle in HANDLES]
    assert document["further_copies"] == {name.hex(): 1 for name in split_chain(cut(CHAIN, 0, 2))}
    assert await index_tools.dump(place, None) == 0
    assert len(capsys.readouterr().out.splitlines()) == 2


async def test_check_of_a_true_index(place: Place, capsys: pytest.CaptureFixture[str]) -> None:
    async with serving(listing(7, HANDLES)) as one, serving(listing(1, HANDLES[:3])) as two:
        assert await index_tools.check(place, {"one": one, "two": two}, "", as_json=False) == 0
    said = capsys.readouterr().out
    assert "one: 6 indexed, 6 held: equal" in said
    assert "two: 3 indexed, 3 held: equal" in said


async def test_check_names_phantoms_missing_blocks_and_dead_lives(
    place: Place, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(index_tools, "ROUND_SECONDS", 0.01)
    async with serving(listing(7, [*HANDLES[:5], 99])) as one, serving(listing(2, [])) as two:
        status = {"/status": {"workers": [{"name": "one", "url": one}, {"name": "two", "url": two}]}}
        async with serving(status) as gateway:
            assert await index_tools.check(place, {}, gateway, as_json=False) == 1
            said = capsys.readouterr().out
            assert await index_tools.check(place, {}, gateway, as_json=True) == 1
    assert "one: 6 indexed, 6 held: differs" in said
    assert f"1 phantom: {HANDLES[5]:016x}" in said
    assert f"1 missing: {99:016x}" in said
    assert "two: 3 indexed, 0 held: of an earlier life" in said
    one_found, two_found = json.loads(capsys.readouterr().out)["workers"]
    assert (one_found["verdict"], one_found["phantom"], one_found["missing"]) == ("differs", 1, 1)
    assert two_found["verdict"] == "dead"


async def test_check_of_workers_that_do_not_say(place: Place, capsys: pytest.CaptureFixture[str]) -> None:
    async with serving({}) as one:
        workers = {"one": one, "two": f"http://127.0.0.1:{free_port()}"}
        assert await index_tools.check(place, workers, "", as_json=True) == 0
    assert [found["verdict"] for found in json.loads(capsys.readouterr().out)["workers"]] == ["unknown", "gone"]


async def test_what_cannot_be_looked_at_is_one_line(place: Place) -> None:
    with pytest.raises(StartupError, match="Connection refused"):
        await index_tools.stats(Place(f"redis://127.0.0.1:{free_port()}", "tools"), as_json=True)
    with pytest.raises(StartupError, match="http"):
        await index_tools.stats(Place("http://127.0.0.1", "tools"), as_json=True)
    with pytest.raises(StartupError, match="prefix"):
        await index_tools.stats(Place(place.redis, "{x}"), as_json=True)
    with pytest.raises(StartupError, match="does not list the workers"):
        await index_tools.check(place, {}, f"http://127.0.0.1:{free_port()}", as_json=True)
