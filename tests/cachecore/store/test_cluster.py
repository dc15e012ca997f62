"""Three nodes and the ways in which their slots move."""

import asyncio
from pathlib import Path

import pytest

from cachecore.store import Call, Refused, Script, StoreError, Unavailable
from cachecore.store.slots import key_slot
from tests.cachecore.store.conftest import Open
from tests.cachecore.store.servers import Cluster, start_cluster
from tests.cachecore.store.test_faults import eventually

pytestmark = pytest.mark.stacks

SET = Script("set", "redis.call('SET', KEYS[1], ARGV[1]) return redis.call('GET', KEYS[1])")
KEYS = [b"k:{%d}" % index for index in range(32)]


def served(cluster: Cluster, key: bytes) -> int:
    return cluster.node_of(key).port


async def test_one_call_of_many_reaches_every_node(cluster: Cluster, open_store: Open) -> None:
    store = await open_store(cluster.url)
    assert store.clustered
    assert store.up
    assert store.health().kind == "cluster"
    assert len({served(cluster, key) for key in KEYS}) == 3
    calls = [Call(SET, [key], [index]) for index, key in enumerate(KEYS)]
    for _ in range(2):
        assert await store.run_many(calls) == [b"%d" % index for index in range(32)]
    assert await asyncio.gather(*(store.command("GET", key) for key in KEYS)) == [b"%d" % i for i in range(32)]


async def test_keys_are_grouped_by_slot(cluster: Cluster, open_store: Open) -> None:
    store = await open_store(cluster.url)
    keys = [b"a{x}", b"b{y}", b"c{x}", b"x", b"z"]
    assert store.group(keys) == [[0, 2, 3], [1], [4]]
    for indices in store.group(keys):
        assert len({key_slot(keys[index]) for index in indices}) == 1


async def test_keys_of_several_slots_are_refused_each_time(cluster: Cluster, open_store: Open) -> None:
    store = await open_store(cluster.url)
    for _ in range(5):
        crossing, fine = await store.run_many([Call(SET, [b"a", b"b"], [1]), Call(SET, [b"a"], [2])])
        assert isinstance(crossing, Refused)
        assert crossing.code == "CROSSSLOT"
        assert fine == b"2"
        with pytest.raises(Refused) as caught:
            await store.command("MGET", "a", "b")  # the server's own word: only the first key is known here
        assert caught.value.code == "CROSSSLOT"
    assert store.up
    assert store.health().failures == 0


async def test_a_single_servers_url_does_not_do_for_a_cluster(cluster: Cluster, open_store: Open) -> None:
    store = await open_store(cluster.nodes[0].url)
    answers = await store.run_many([Call(SET, [key], [1]) for key in KEYS])
    refusals = [answer for answer in answers if answer != b"1"]
    assert refusals
    assert all(isinstance(answer, Refused) and "redis+cluster://" in str(answer) for answer in refusals)
    assert store.up


@pytest.fixture
def own_cluster(tmp_path: Path):
    with start_cluster(tmp_path, replicas=1) as cluster:
        yield cluster


async def test_a_slot_that_moves_is_followed(own_cluster: Cluster, open_store: Open) -> None:
    cluster = own_cluster
    store = await open_store(cluster.url)
    keys = [b"m{moving}", b"n{moving}"]
    slot = key_slot(keys[0])
    source = cluster.node_of(keys[0])
    target = next(node for node in cluster.nodes if node is not source)
    await store.run_many([Call(SET, [key], ["old"]) for key in keys])
    identities = {node.port: node.command("CLUSTER", "MYID").decode() for node in cluster.nodes}

    # Half-way: one key has moved, which the source answers with ASK.
    target.command("CLUSTER", "SETSLOT", slot, "IMPORTING", identities[source.port])
    source.command("CLUSTER", "SETSLOT", slot, "MIGRATING", identities[target.port])
    source.command("MIGRATE", "127.0.0.1", target.port, keys[0].decode(), 0, 5000)
    assert await store.command("GET", keys[0]) == b"old"
    assert await store.run_many([Call(SET, [keys[0]], ["new"]), Call(SET, [keys[1]], ["own"])]) == [b"new", b"own"]
    assert target.command("CLUSTER", "COUNTKEYSINSLOT", slot) == 1

    source.command("MIGRATE", "127.0.0.1", target.port, keys[1].decode(), 0, 5000)
    for node in (target, source, *cluster.nodes):
        node.command("CLUSTER", "SETSLOT", slot, "NODE", identities[target.port])
    assert await store.run_many([Call(SET, [key], ["moved"]) for key in keys]) == [b"moved", b"moved"]
    before = source.commands_processed()
    for _ in range(50):
        assert await store.command("GET", keys[1]) == b"moved"
    assert source.commands_processed() - before < 40  # asked of the new owner straight away
    assert store.up


async def test_a_node_that_dies_takes_only_its_slots_and_its_replica_takes_them_over(
    own_cluster: Cluster, open_store: Open
) -> None:
    cluster = own_cluster
    store = await open_store(cluster.url, 0.2)
    dead = cluster.nodes[0]  # the one with a replica
    lost = [key for key in KEYS if served(cluster, key) == dead.port]
    kept = [key for key in KEYS if key not in lost]
    calls = [Call(SET, [key], ["x"]) for key in [*kept, *lost]]
    assert await store.run_many(calls) == [b"x"] * 32
    dead.kill()
    for _ in range(5):
        answers = await store.run_many(calls)
        assert all(isinstance(answer, Unavailable | bytes) for answer in answers)
    assert store.up
    assert store.health().reason != ""

    async def all_answer() -> bool:
        return await store.run_many(calls) == [b"x"] * 32

    async with asyncio.timeout(20):
        while not await all_answer():
            await asyncio.sleep(0.05)
    assert served_without(cluster, lost[0], dead.port) == cluster.replicas[0].port
    await eventually(lambda: store.health().failures == 0)
    assert store.up


def served_without(cluster: Cluster, key: bytes, dead_port: int) -> int:
    alive = next(server for server in cluster.servers if server.port != dead_port)
    slot = key_slot(key)
    ranges = alive.command("CLUSTER", "SLOTS")
    return int(next(owner[1] for first, last, owner, *_ in ranges if first <= slot <= last))


async def test_a_frozen_node_is_skipped_after_three_failures(own_cluster: Cluster, open_store: Open) -> None:
    cluster = own_cluster
    store = await open_store(cluster.url, 0.1)
    frozen = cluster.nodes[2]  # it has no replica
    stuck = next(key for key in KEYS if served(cluster, key) == frozen.port)
    other = next(key for key in KEYS if served(cluster, key) != frozen.port)
    frozen.freeze()
    for _ in range(3):
        assert isinstance((await store.run_many([Call(SET, [stuck], [1])]))[0], Unavailable)
    assert store.up  # the others are
    frozen.thaw()

    async def back() -> bool:
        try:
            return await store.run(Call(SET, [stuck], [1])) == b"1" and await store.run(Call(SET, [other], [1])) == b"1"
        except StoreError:
            return False

    async with asyncio.timeout(20):
        while not await back():
            await asyncio.sleep(0.02)


async def test_all_nodes_down_at_the_start(tmp_path: Path, open_store: Open) -> None:
    with start_cluster(tmp_path) as cluster:
        for node in cluster.nodes:
            node.stop()
        store = await open_store(cluster.url, 0.1)
        assert not store.up
        with pytest.raises(Unavailable, match="nobody serves slot"):
            await store.command("GET", "a")
        for node in cluster.nodes:
            node.restart()

        async with asyncio.timeout(20):
            while True:
                answers = await store.run_many([Call(SET, [key], [1]) for key in KEYS], budget_seconds=1.0)
                if answers == [b"1"] * 32:
                    break
                await asyncio.sleep(0.05)
        assert store.up
