"""A server that is away, silent, slow or restarted: no call outlives its budget or gets another's answer."""

import asyncio
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from cachecore.store import Call, RedisStore, Refused, Script, StoreError, Unavailable, parse_address
from tests.cachecore.store.conftest import Open
from tests.cachecore.store.proxy import FaultProxy
from tests.cachecore.store.servers import Server, start_server

NAME = Script("name", "return ARGV[1]")
BUDGET_SECONDS = 0.05
# A loaded machine may wake us late; a call without a budget would take forever.
GENEROUS_SECONDS = 3.0


def call(index: int) -> Call:
    return Call(NAME, [b"k"], [index])


async def eventually(condition: Callable[[], object], seconds: float = 10.0) -> None:
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.01)


async def failure(awaitable: Awaitable[object]) -> StoreError:
    started = time.monotonic()
    with pytest.raises(StoreError) as caught:
        await awaitable
    assert time.monotonic() - started < GENEROUS_SECONDS
    return caught.value


async def test_a_frozen_server(own_server: Server, open_store: Open) -> None:
    store = await open_store(own_server.url, BUDGET_SECONDS)
    assert await store.run(call(1)) == b"1"
    own_server.freeze()
    for failures in (1, 2, 3):
        assert store.up
        assert "no answer in time" in str(await failure(store.run(call(2)))) or failures > 1
        assert store.health().failures == failures
    assert not store.up
    started = time.monotonic()
    for _ in range(1000):
        assert isinstance((await store.run_many([call(3)]))[0], Unavailable)
    assert time.monotonic() - started < 1000 * BUDGET_SECONDS / 4  # not asked: no call waits for its budget
    health = store.health()
    assert (health.up, "not asked" in str(await failure(store.run(call(3))))) == (False, True)
    assert "in time" in health.reason
    own_server.thaw()
    await eventually(lambda: store.up)
    assert (store.health().failures, store.health().reason) == (0, "")
    assert store.health().since >= health.since
    assert [await store.run(call(index)) for index in range(20)] == [b"%d" % index for index in range(20)]


async def test_late_answers_reach_nobody(own_server: Server, open_store: Open) -> None:
    async with FaultProxy(own_server.port) as proxy:
        store = await open_store(proxy.url, BUDGET_SECONDS)
        await store.run(call(0))
        proxy.latency_seconds = 0.2
        await asyncio.gather(*(failure(store.run(call(index))) for index in range(2)))
        proxy.latency_seconds = 0.0
        for index in range(100, 150):
            assert await store.run(call(index), budget_seconds=2.0) == b"%d" % index


async def test_a_slow_network_keeps_the_breaker_open_until_it_is_fast_again(
    own_server: Server, open_store: Open
) -> None:
    async with FaultProxy(own_server.port) as proxy:
        store = await open_store(proxy.url, BUDGET_SECONDS)
        proxy.latency_seconds = 0.1
        for _ in range(3):
            await failure(store.run(call(1)))
        assert not store.up
        await asyncio.sleep(0.8)  # several probes, each answered after the budget
        assert not store.up
        proxy.latency_seconds = 0.0
        await eventually(lambda: store.up)
        assert await store.run(call(7), budget_seconds=2.0) == b"7"


async def test_a_handshake_slower_than_the_budget_is_still_made(own_server: Server, open_store: Open) -> None:
    async with FaultProxy(own_server.port) as proxy:
        proxy.latency_seconds = 0.05
        store = await open_store(proxy.url, 0.15)  # connect and HELLO: two trips of 0.1 s each
        assert store.up
        assert await store.run(call(1)) == b"1"


async def test_a_network_that_swallows_everything(own_server: Server, open_store: Open) -> None:
    async with FaultProxy(own_server.port) as proxy:
        store = await open_store(proxy.url, BUDGET_SECONDS)
        proxy.silent = True
        for _ in range(3):
            await failure(store.run(call(1)))
        assert not store.up
        proxy.silent = False
        await eventually(lambda: store.up)
        for index in range(20):
            assert await store.run(call(index), budget_seconds=2.0) == b"%d" % index


async def test_cut_connections_are_made_again(own_server: Server, open_store: Open) -> None:
    async with FaultProxy(own_server.port) as proxy:
        store = await open_store(proxy.url)
        for index in range(5):
            assert await store.run(call(index)) == b"%d" % index
            proxy.cut()
            await asyncio.sleep(0.02)  # the reset is seen before the next call
        assert store.health().failures == 0


async def test_a_connection_cut_in_the_middle_of_a_call(own_server: Server, open_store: Open) -> None:
    async with FaultProxy(own_server.port) as proxy:
        store = await open_store(proxy.url)
        proxy.silent = True
        waiting = asyncio.create_task(store.run(call(1)))
        await asyncio.sleep(0.05)
        proxy.cut()
        assert "connection lost" in str(await failure(waiting))
        proxy.silent = False
        assert await store.run(call(2)) == b"2"


async def test_closing_the_store_ends_what_is_under_way_with_an_error(own_server: Server) -> None:
    async with FaultProxy(own_server.port) as proxy:
        store = RedisStore(parse_address(proxy.url), budget_seconds=30.0)
        await store.start()
        proxy.silent = True
        waiting = [asyncio.create_task(store.run(call(index))) for index in range(40)]
        reading = asyncio.create_task(store.read_streams({b"s": b"$"}, 30.0, 1))
        await asyncio.sleep(0.05)
        await store.close()
        for task in [*waiting, reading]:
            assert isinstance(await failure(task), Unavailable)


async def test_down_at_the_start_and_up_later(own_server: Server, open_store: Open) -> None:
    own_server.stop()
    started = time.monotonic()
    store = await open_store(own_server.url, BUDGET_SECONDS)
    assert time.monotonic() - started < GENEROUS_SECONDS
    assert not store.up
    assert "refused" in str(await failure(store.run(call(1))))
    own_server.restart()
    await eventually(lambda: store.up)
    assert await store.run(call(1), budget_seconds=2.0) == b"1"


async def test_a_refused_connection_is_no_wait(own_server: Server, open_store: Open) -> None:
    store = await open_store(own_server.url, 60.0)
    own_server.kill()
    await asyncio.sleep(0.02)
    for _ in range(3):
        assert "Connection refused" in str(await failure(store.run(call(1))))
    assert not store.up


async def test_a_store_that_was_not_started_works_while_the_server_does(own_server: Server) -> None:
    store = RedisStore(parse_address(own_server.url), budget_seconds=2.0)
    assert await store.run(call(1)) == b"1"
    await store.close()


@pytest.mark.parametrize("crash", [False, True])
async def test_a_restart(own_server: Server, open_store: Open, crash: bool) -> None:
    store = await open_store(own_server.url, BUDGET_SECONDS)
    assert await store.run(call(1)) == b"1"
    own_server.restart(empty=True, crash=crash)
    await asyncio.sleep(0.02)  # the end of the connection is seen before the next call
    answers = await store.run_many([call(index) for index in range(5)], budget_seconds=2.0)
    assert answers == [b"0", b"1", b"2", b"3", b"4"]


async def test_a_server_that_loads_is_away(own_server: Server, open_store: Open) -> None:
    store = await open_store(own_server.url, 0.5)
    own_server.command("DEBUG", "POPULATE", 20_000, "key", 20)
    own_server.command("BGREWRITEAOF")
    own_server.command("CONFIG", "SET", "key-load-delay", 200)
    loading = asyncio.create_task(asyncio.to_thread(own_server.command, "DEBUG", "LOADAOF", seconds=60.0))
    seen = set()
    while not loading.done():
        (answer,) = await store.run_many([call(1)])
        seen.add(type(answer))
        await asyncio.sleep(0.01)
    await loading
    own_server.command("CONFIG", "SET", "key-load-delay", 0)
    assert seen <= {bytes, Unavailable}
    await eventually(lambda: store.up)
    assert await store.run(call(2)) == b"2"


async def test_a_master_made_a_replica_is_away_until_it_is_one_again(
    own_server: Server, tmp_path: Path, open_store: Open
) -> None:
    store = await open_store(own_server.url)
    with start_server(tmp_path / "other") as other:
        own_server.command("REPLICAOF", "127.0.0.1", other.port)
        for _ in range(5):
            error = await failure(store.command("SET", "k", 1))
            assert isinstance(error, Unavailable)
            assert "READONLY" in str(error)
    own_server.command("REPLICAOF", "NO", "ONE")
    await eventually(lambda: store.up)
    assert await store.command("SET", "k", 1) == b"OK"


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", "not the protocol of Redis"),
        (b"*0\r\n+OK\r\n", "more answers than questions"),
        (b"*1\r\n$100\r\nx", "connection lost"),
        (b"-ERR max number of clients reached\r\n", "max number of clients"),
        (b"+OK\r\n", "a greeting that is none"),
    ],
)
async def test_something_that_is_no_server(open_store: Open, answer: bytes, reason: str) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(100)
        writer.write(answer)
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as listener:
        store = await open_store(f"redis://127.0.0.1:{listener.sockets[0].getsockname()[1]}")
        assert not store.up
        assert reason in str(await failure(store.run(call(1))))
        await store.close()


async def test_refusals_do_not_open_the_breaker(own_server: Server, open_store: Open) -> None:
    store = await open_store(own_server.url)
    for _ in range(10):
        assert isinstance(await failure(store.command("NOSUCH", "k")), Refused)
    assert store.up
    assert store.health().failures == 0


async def test_a_busy_loop_is_not_the_servers_fault(own_server: Server, open_store: Open) -> None:
    store = await open_store(own_server.url, BUDGET_SECONDS)
    await store.run(call(0))
    for index in range(5):
        task = asyncio.create_task(store.run(call(index)))
        await asyncio.sleep(0)  # it waits for its answer now, but this turn of the loop is not over
        time.sleep(2 * BUDGET_SECONDS)
        assert await task == b"%d" % index


async def test_more_callers_than_connections(own_server: Server, open_store: Open) -> None:
    store = await open_store(own_server.url, BUDGET_SECONDS)
    own_server.freeze()
    answers = await asyncio.gather(*(store.run_many([call(index)]) for index in range(200)))
    assert all(isinstance(answer, Unavailable) for (answer,) in answers)
    own_server.thaw()
    await eventually(lambda: store.up)
    answers = await asyncio.gather(*(store.run_many([call(index)], budget_seconds=5.0) for index in range(200)))
    assert [answer for (answer,) in answers] == [b"%d" % index for index in range(200)]


@pytest.mark.parametrize("seed", [1, 2])
async def test_a_storm(own_server: Server, open_store: Open, seed: int) -> None:
    """Whatever the network does, an answer is the right one or an error, and in the end all is as it was."""
    dice = random.Random(seed)
    outcomes: Counter[str] = Counter()

    async def ask(name: int) -> None:
        for index in range(80):
            question = name * 1000 + index
            asking = asyncio.create_task(store.run_many([call(question), call(-question)]))
            if dice.random() < 0.1:
                await asyncio.sleep(dice.random() * 0.01)
                asking.cancel()
            try:
                answers = await asking
            except asyncio.CancelledError:
                outcomes["cancelled"] += 1
            else:
                right = answers == [b"%d" % question, b"%d" % -question]
                assert right or all(isinstance(answer, Unavailable) for answer in answers)
                outcomes["right" if right else "unavailable"] += 1
            await asyncio.sleep(dice.random() * 0.05)

    async with FaultProxy(own_server.port) as proxy:
        store = await open_store(proxy.url, BUDGET_SECONDS)
        asking = [asyncio.create_task(ask(name)) for name in range(12)]
        while not all(task.done() for task in asking):
            proxy.latency_seconds = dice.choice([0.0, 0.01, 0.06])
            proxy.silent = dice.random() < 0.3
            if dice.random() < 0.5:
                proxy.cut()
            await asyncio.sleep(0.06)
            proxy.latency_seconds, proxy.silent = 0.0, False  # a lull
            await asyncio.sleep(0.2)
        await asyncio.gather(*asking)
        await eventually(lambda: store.up)
        assert min(outcomes["right"], outcomes["unavailable"]) > 0
        assert await store.run(call(7), budget_seconds=2.0) == b"7"
        assert len(proxy.links) <= 33
