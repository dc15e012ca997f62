"""API keys that come and go while a gateway runs: in a file, in a server, and with both in trouble."""

import asyncio
import json
import os
from collections.abc import AsyncIterator, Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest

import ropeway
from cachecore.store import RedisStore, parse_address
from gateway.api_keys import KeyShelf, add_api_key, new_api_key, new_record, read_key_file
from gateway.errors import ConfigError, Unauthorized, Unavailable
from gateway.tenants import READ_SECONDS, KeyWatch, Roster, Tenants
from policies.state.limits import Rates
from tests.cachecore.store.servers import Server, start_server


class Clock:
    now = datetime(2027, 1, 31, 12, tzinfo=UTC).timestamp()

    def __call__(self) -> float:
        return self.now


class Watched:
    """Tenants as a watch keeps them."""

    def __init__(self, file: Path | None, shelf: KeyShelf | None = None, public: bool = False) -> None:
        self.clock = Clock()
        self.tenants = Tenants(Roster({}), public)
        self.told = 0
        self.watch = KeyWatch(self.tenants, file, shelf, self._changed, self.clock)

    def _changed(self) -> None:
        self.told += 1

    async def knows(self, key: str) -> str | None:
        await self.watch.look()
        try:
            return self.tenants.authenticate(f"Bearer {key}".encode()).id
        except Unauthorized:
            return None


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "keys.jsonl"


async def test_a_changed_file_is_read_again(file: Path) -> None:
    first = add_api_key(file, "acme")
    watched = Watched(file)
    roster = watched.tenants.roster
    assert await watched.knows(first) == "acme"
    assert watched.tenants.roster is roster
    second = add_api_key(file, "globex")
    assert await watched.knows(second) == "globex"
    assert watched.tenants.roster is not roster
    assert (watched.told, watched.watch.changes) == (2, 2)


async def test_a_revoked_key_is_refused_and_its_line_alone_is_gone(file: Path) -> None:
    first, second = add_api_key(file, "acme"), add_api_key(file, "acme")
    file.write_text("# ours\n\n" + file.read_text())
    watched = Watched(file)
    (revoked,) = [key.record.id for key in read_key_file(file).values() if key.record.id == _id(first)]
    assert ropeway.main(["keys", "revoke", revoked, "--file", str(file)]) == 0
    assert await watched.knows(first) is None
    assert await watched.knows(second) == "acme"
    assert file.read_text().splitlines()[:2] == ["# ours", ""]
    assert oct(file.stat().st_mode)[-3:] == "600"


def _id(key: str) -> str:
    return new_record(key, "acme", "").id


async def test_a_broken_file_is_named_by_its_line_and_changes_nothing(
    file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    key = add_api_key(file, "acme")
    watched = Watched(file)
    sound = file.read_text()
    file.write_text(sound + "{broken\n")
    for _ in range(3):
        assert await watched.knows(key) == "acme"
    said = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
    assert len(said) == 1
    assert said[0].startswith(f"{file}: line 2: ")
    assert said[0].endswith("the 1 API keys that were read before stay")
    file.unlink()
    assert await watched.knows(key) == "acme"
    file.write_text("# nobody\n")
    assert await watched.knows(key) is None
    assert watched.watch.problem == ""


async def test_keys_expire_while_nothing_changes(file: Path) -> None:
    by_day = add_api_key(file, "acme", expires="2027-01-31")
    by_hour = add_api_key(file, "acme", expires="2027-01-31T15:00:00+02:00")
    for_ever = add_api_key(file, "acme")
    watched = Watched(file)
    assert [await watched.knows(key) for key in (by_day, by_hour, for_ever)] == ["acme"] * 3
    watched.clock.now += 3600.0
    assert [await watched.knows(key) for key in (by_day, by_hour, for_ever)] == ["acme", None, "acme"]
    watched.clock.now += 11 * 3600.0
    assert [await watched.knows(key) for key in (by_day, by_hour, for_ever)] == [None, None, "acme"]


@pytest.mark.parametrize("expires", ["soon", "2027-13-01", "2027-01-31T15:00:00"])
def test_times_that_are_none(file: Path, expires: str) -> None:
    with pytest.raises(ConfigError):
        add_api_key(file, "acme", expires=expires)
    assert not file.exists()


async def test_a_key_may_have_limits_and_be_public(file: Path) -> None:
    key = add_api_key(file, "acme", requests_per_minute=60.0, public=True)
    plain = add_api_key(file, "acme")
    watched = Watched(file)
    limited = watched.tenants.authenticate(f"Bearer {key}".encode())
    assert (limited.key_rates, limited.public, limited.key_id) == (Rates(60.0, None), True, _id(key))
    other = watched.tenants.authenticate(f"Bearer {plain}".encode())
    assert (other.key_rates, other.public) == (None, False)
    allowed = Watched(file, public=True)
    assert allowed.tenants.authenticate(f"Bearer {plain}".encode()).public


# In a server


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    with start_server(tmp_path) as server:
        yield server


@pytest.fixture
async def shelf(server: Server) -> AsyncIterator[KeyShelf]:
    store = RedisStore(parse_address(server.url))
    await store.start()
    yield KeyShelf(store, "p")
    await store.close()


async def test_keys_in_a_server_come_and_go(server: Server, shelf: KeyShelf, file: Path) -> None:
    in_file = add_api_key(file, "acme")
    key = new_api_key()
    watched = Watched(file, shelf)
    assert await watched.knows(in_file) == "acme"
    assert await watched.knows(key) is None
    record = new_record(key, "globex", "")
    await shelf.add(record)
    assert await watched.knows(key) == "globex"
    assert key.encode() not in b"".join(map(bytes, server.command("HGETALL", "p:{fleet}:api-keys")))
    assert await shelf.remove(lambda found: found.id == record.id) == [record]
    assert await watched.knows(key) is None
    assert await watched.knows(in_file) == "acme"


async def test_a_server_that_loses_its_keys_or_is_away_changes_nothing(server: Server, shelf: KeyShelf) -> None:
    key = new_api_key()
    await shelf.add(new_record(key, "acme", ""))
    watched = Watched(None, shelf)
    assert await watched.knows(key) == "acme"
    server.command("FLUSHALL")
    watched.clock.now += READ_SECONDS
    assert await watched.knows(key) == "acme"
    assert "lost" in watched.watch.problem
    server.stop()
    assert await watched.knows(key) == "acme"
    assert watched.watch.problem.startswith("API keys in the server: ")


async def test_what_is_changed_by_hand_is_seen_in_bounded_time(server: Server, shelf: KeyShelf) -> None:
    key = new_api_key()
    record = new_record(key, "acme", "")
    await shelf.add(record)
    watched = Watched(None, shelf)
    assert await watched.knows(key) == "acme"
    server.command("HDEL", "p:{fleet}:api-keys", record.key_sha256)
    assert await watched.knows(key) == "acme"
    watched.clock.now += READ_SECONDS
    assert await watched.knows(key) is None


async def test_an_entry_that_makes_no_sense_changes_nothing(server: Server, shelf: KeyShelf) -> None:
    key = new_api_key()
    await shelf.add(new_record(key, "acme", ""))
    watched = Watched(None, shelf)
    assert await watched.knows(key) == "acme"
    for name, value in (("ab", "{"), ("cd" * 32, json.dumps({"tenant": "b", "key_sha256": "ef" * 32}))):
        server.command("HSET", "p:{fleet}:api-keys", name, value)
        watched.clock.now += READ_SECONDS
        assert await watched.knows(key) == "acme"
        assert watched.watch.problem.startswith(f"API keys in the server: API key {name[:12]}: ")
        server.command("HDEL", "p:{fleet}:api-keys", name)


async def test_keys_that_could_not_be_read_yet_are_not_called_wrong(server: Server, shelf: KeyShelf) -> None:
    server.stop()
    watched = Watched(None, shelf)
    with pytest.raises(Unavailable):
        await watched.knows(new_api_key())


# The commands


def test_the_commands_in_a_file(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _walk_through(["--file", str(file)], capsys)


def test_the_commands_in_a_server(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    _walk_through(["--redis", server.url], capsys)


def _walk_through(place: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    def run(*words: str) -> tuple[int, str]:
        code = ropeway.main(["keys", *words, *place])
        return code, capsys.readouterr().out

    made = [
        json.loads(run("new", "--tenant", tenant, "--json", "--note", "n", "--expires", "2099-01-01")[1])["key"]
        for tenant in ("acme", "acme", "globex")
    ]
    code, listed = run("list", "--json")
    records = [json.loads(line) for line in listed.splitlines()]
    assert code == 0
    assert [record["tenant"] for record in records] == ["acme", "acme", "globex"]
    assert {record["id"] for record in records} == {_id(key) for key in made}
    assert not any(key in listed for key in made)
    assert run("list")[1].splitlines()[2] == f"{_id(made[2])}  globex  {records[2]['created']}  until 2099-01-01  n"
    assert run("revoke", "0123456789ab")[0] == 1
    assert json.loads(run("revoke", _id(made[0]), "--json")[1])["id"] == _id(made[0])
    assert run("revoke", "--tenant", "acme")[0] == 0
    assert [json.loads(line)["tenant"] for line in run("list", "--json")[1].splitlines()] == ["globex"]
    assert run("revoke")[0] == 1


async def test_the_watch_goes_on(file: Path) -> None:
    watched = Watched(file if file.exists() else _empty(file))
    task = asyncio.create_task(watched.watch.run())
    try:
        await asyncio.sleep(0)
        key = add_api_key(file, "acme")
        os.utime(file)
        while not len(watched.tenants.roster):
            await asyncio.sleep(0.01)
        assert watched.tenants.authenticate(f"Bearer {key}".encode()).id == "acme"
    finally:
        task.cancel()


def _empty(file: Path) -> Path:
    file.write_text("")
    return file
