import asyncio
import contextlib
import time
from pathlib import Path

import pytest

from cachecore.store import RedisStore, StreamEntry, Unavailable
from tests.cachecore.store.conftest import Open
from tests.cachecore.store.servers import Cluster, Server, start_cluster


async def read_all(store: RedisStore, positions: dict[bytes, bytes], count: int) -> list[StreamEntry]:
    """At least `count` entries, read as a follower does."""
    entries: list[StreamEntry] = []
    while len(entries) < count:
        for entry in await store.read_streams(positions, 0.5, 100):
            positions[entry.stream] = entry.id
            entries.append(entry)
    return entries


async def test_entries_there_already_come_at_once(server: Server, open_store: Open) -> None:
    store = await open_store(server.url)
    await store.command("DEL", "s1", "s2")
    first = await store.command("XADD", "s1", "1-1", "a", b"\x00\xff", "b", "2")
    second = await store.command("XADD", "s2", "5-0", "c", "3")
    entries = await store.read_streams({b"s1": b"0", b"s2": b"0"}, 5.0, 10)
    assert sorted(entries) == [
        StreamEntry(b"s1", first, {b"a": b"\x00\xff", b"b": b"2"}),
        StreamEntry(b"s2", second, {b"c": b"3"}),
    ]


async def test_nothing_comes_after_the_blocking_time(server: Server, open_store: Open) -> None:
    store = await open_store(server.url)
    started = time.monotonic()
    assert await store.read_streams({b"quiet": b"0"}, 0.1, 10) == []
    assert time.monotonic() - started >= 0.09
    assert await store.read_streams({}, 0.01, 10) == []


async def test_a_read_waits_for_what_comes_and_does_not_hold_up_calls(server: Server, open_store: Open) -> None:
    store = await open_store(server.url)
    reading = asyncio.create_task(store.read_streams({b"waited": b"$"}, 5.0, 10))
    await asyncio.sleep(0.1)
    assert not reading.done()
    entry = await store.command("XADD", "waited", "*", "a", "1")
    assert await reading == [StreamEntry(b"waited", entry, {b"a": b"1"})]


async def test_at_most_count_of_each_stream(server: Server, open_store: Open) -> None:
    store = await open_store(server.url)
    await store.command("DEL", "long")
    for index in range(1, 8):
        await store.command("XADD", "long", f"{index}-0", "n", index)
    assert [entry.id for entry in await store.read_streams({b"long": b"2-0"}, 1.0, 3)] == [b"3-0", b"4-0", b"5-0"]


async def test_a_cancelled_read_loses_nothing(server: Server, open_store: Open) -> None:
    store = await open_store(server.url)
    await store.command("DEL", "c")
    await store.command("XADD", "c", "1-0", "n", 0)
    positions = {b"c": b"1-0"}
    for index in range(2, 10):
        reading = asyncio.create_task(store.read_streams(positions, 5.0, 10))
        await asyncio.sleep(0.01)
        reading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reading
        await store.command("XADD", "c", f"{index}-0", "n", index)
        (entry,) = await store.read_streams(positions, 5.0, 10)
        assert (entry.id, entry.fields) == (b"%d-0" % index, {b"n": b"%d" % index})
        positions[b"c"] = entry.id
    assert server.command("CLIENT", "LIST").count(b"cmd=xread") <= 2


async def test_two_readers_of_one_stream_do_not_disturb_each_other(server: Server, open_store: Open) -> None:
    store = await open_store(server.url)
    await store.command("DEL", "shared")
    await store.command("XADD", "shared", "1-0", "n", 1)
    readers = [asyncio.create_task(read_all(store, {b"shared": start}, 4)) for start in (b"0", b"1-0", b"1-0")]
    for index in range(2, 7):
        await asyncio.sleep(0.02)
        await store.command("XADD", "shared", f"{index}-0", "n", index)
    ids = [[entry.id for entry in await reader] for reader in readers]
    assert [some[:4] for some in ids] == [[b"1-0", b"2-0", b"3-0", b"4-0"]] + [[b"2-0", b"3-0", b"4-0", b"5-0"]] * 2


async def test_a_frozen_server_is_noticed(own_server: Server, open_store: Open) -> None:
    store = await open_store(own_server.url)
    own_server.freeze()
    with pytest.raises(Unavailable, match=r"no connection|no answer"):
        await store.read_streams({b"s": b"0"}, 0.1, 10)
    own_server.thaw()
    entry = await store.command("XADD", "s", "*", "a", "1")
    assert [entry.id for entry in await store.read_streams({b"s": b"0"}, 1.0, 10)] == [entry]


async def test_a_killed_server_ends_the_read(own_server: Server, open_store: Open) -> None:
    store = await open_store(own_server.url)
    reading = asyncio.create_task(store.read_streams({b"s": b"$"}, 60.0, 10))
    await asyncio.sleep(0.1)
    own_server.kill()
    with pytest.raises(Unavailable, match="connection lost"):
        await reading
    with pytest.raises(Unavailable, match="refused"):
        await store.read_streams({b"s": b"0"}, 1.0, 10)


async def test_a_dead_node_does_not_silence_the_others(tmp_path: Path, open_store: Open) -> None:
    with start_cluster(tmp_path, options={"cluster-require-full-coverage": "no"}) as cluster:
        store = await open_store(cluster.url)
        dead = cluster.node_of(b"busy:{4}")
        quiet = next(b"s:{%d}" % n for n in range(50) if cluster.node_of(b"s:{%d}" % n) is not dead)
        positions = {b"busy:{4}": b"0", quiet: b"0"}
        dead.kill()
        for index in range(1, 50):
            await store.command("XADD", quiet, f"{index}-0", "n", index)
            entries = []
            while not entries:
                with contextlib.suppress(Unavailable):
                    entries = await store.read_streams(positions, 10.0, 10)
            assert [(entry.stream, entry.id) for entry in entries] == [(quiet, b"%d-0" % index)]
            positions[quiet] = entries[-1].id
        with pytest.raises(Unavailable, match="refused"):
            await read_all(store, positions, 1)


async def test_the_slots_of_a_cluster_are_read_all_at_once(cluster: Cluster, open_store: Open) -> None:
    store = await open_store(cluster.url)
    streams = [b"r:{%d}:stream" % shard for shard in range(16)]
    assert len(store.group(streams)) == 16
    await asyncio.gather(*(store.command("DEL", stream) for stream in streams))
    following = asyncio.create_task(read_all(store, dict.fromkeys(streams, b"0"), 160))
    for index in range(10):
        await asyncio.gather(*(store.command("XADD", stream, f"{index + 1}-0", "n", index) for stream in streams))
        await asyncio.sleep(0.01)
    entries = await following
    assert len(entries) == 160
    for stream in streams:
        mine = [entry.id for entry in entries if entry.stream == stream]
        assert mine == [b"%d-0" % index for index in range(1, 11)]


async def test_a_quiet_slot_does_not_hold_up_a_busy_one(cluster: Cluster, open_store: Open) -> None:
    store = await open_store(cluster.url)
    positions = {b"quiet:{1}": b"0", b"busy:{2}": b"0"}
    await store.command("DEL", b"busy:{2}")
    for index in range(1, 20):
        await store.command("XADD", b"busy:{2}", f"{index}-0", "n", index)
        (entry,) = await store.read_streams(positions, 30.0, 10)
        assert entry.id == b"%d-0" % index
        positions[entry.stream] = entry.id
    readers = sum(node.command("CLIENT", "LIST").count(b"cmd=xread") for node in cluster.nodes)
    assert readers <= 4  # the read of the quiet slot is taken over, not made anew
