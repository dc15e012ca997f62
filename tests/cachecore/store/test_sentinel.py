import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from cachecore.store import Call, RedisStore, Script, Unavailable
from tests.cachecore.store.conftest import Open
from tests.cachecore.store.servers import SentinelTrio, start_sentinel, wait_until
from tests.cachecore.store.test_faults import eventually

PORT = Script("port", "redis.call('SET', KEYS[1], ARGV[1]) return ARGV[1]")


@pytest.fixture
def trio(tmp_path: Path, binary: str) -> Iterator[SentinelTrio]:
    with start_sentinel(tmp_path, binary=binary, password="pw") as trio:
        yield trio


async def write_until_it_works(store: RedisStore) -> list[str]:
    """What the failures said."""
    reasons = []
    async with asyncio.timeout(20):
        while True:
            try:
                await store.run(Call(PORT, [b"k"], ["after"]))
            except Unavailable as error:
                reasons.append(str(error))
                await asyncio.sleep(0.02)
            else:
                return reasons


@pytest.mark.parametrize("fault", ["kill", "freeze"])
async def test_a_failover_is_followed(trio: SentinelTrio, open_store: Open, fault: str) -> None:
    store = await open_store(trio.url, 0.1)
    assert store.health().kind == "sentinel"
    assert await store.run(Call(PORT, [b"k"], ["before"])) == b"before"
    assert trio.master.command("GET", "k") == b"before"
    getattr(trio.master, fault)()
    assert await write_until_it_works(store)
    assert trio.replica.command("GET", "k") == b"after"
    await eventually(lambda: store.up)


async def test_a_master_demoted_under_way_is_left(trio: SentinelTrio, open_store: Open) -> None:
    store = await open_store(trio.url, 0.5)
    assert await store.run(Call(PORT, [b"k"], ["before"])) == b"before"
    wait_until(lambda: trio.replica.command("GET", "k") == b"before")
    following = asyncio.create_task(store.read_streams({b"s": b"$"}, 60.0, 10))
    trio.sentinels[0].command("SENTINEL", "FAILOVER", trio.service)
    await asyncio.to_thread(wait_until, lambda: trio.master_port() == trio.replica.port)
    # The old one is told to follow eight seconds later.
    assert trio.master.info("replication")["role"] == "master"
    async with asyncio.timeout(5):
        while trio.replica.command("GET", "k") != b"after":
            await write_until_it_works(store)
            await asyncio.sleep(0.02)
    with pytest.raises(Unavailable, match="given up"):
        await following


async def test_no_sentinel_and_no_such_service(trio: SentinelTrio, open_store: Open) -> None:
    unknown = await open_store(trio.url.replace("/shared", "/nothing"), 0.1)
    with pytest.raises(Unavailable, match="no service 'nothing'"):
        await unknown.command("GET", "a")
    trio.sentinels[0].stop()
    store = await open_store(trio.url, 0.1)
    assert not store.up
    with pytest.raises(Unavailable, match="no sentinel knows the master"):
        await store.command("GET", "a")
    trio.sentinels[0].restart()
    await eventually(lambda: store.up)
