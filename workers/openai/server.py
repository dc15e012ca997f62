"""Workers on their sockets: bind, serve, stop. Several may share one process and one event loop."""

import asyncio
import contextlib
import os
import signal
import socket
import stat
import sys
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Any

import uvicorn
import uvloop
from starlette.types import ASGIApp

from workers.engine import Engine
from workers.openai.app import build_app
from workers.openai.leaving import NO_PATIENCE, Patience, Presence
from workers.publisher import EventPublisher

_GRACE_SECONDS = 3
_BACKLOG = 2048
_UNSENT_BYTES_MAX = 128 * 1024
"""Of each connection, in the kernel: beyond what is on its way."""
_KEEP_ALIVE_SECONDS = 75
"""Longer than clients' pools keep connections, so that none is closed under a request on its way."""


class CannotListen(Exception):
    """The address is taken, or is none of this machine's. The message fits one line."""


class _QuietServer(uvicorn.Server):
    """uvicorn without its own signal handling, its banner, and its ten wake-ups a second."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.listening = asyncio.Event()
        self.leaving = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.listening.set()

    async def main_loop(self) -> None:
        while not await self.on_tick(0):
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.leaving.wait(), 1.0)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class WorkerServer:
    """One app on one socket. The socket is bound (and a taken port noticed) when the object is made.

    Raises CannotListen.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        uds: str | None = None,
        http: str | type[asyncio.Protocol] = "httptools",
        before_stop: Callable[[], Awaitable[None]] | None = None,
        presence: Presence | None = None,
        patience: Patience = NO_PATIENCE,
    ) -> None:
        """`before_stop` ends what is not finished within `patience`; `presence` is the app's."""
        self._presence = presence or Presence()
        self._patience = patience
        self._hurried = asyncio.Event()
        self._before_stop = before_stop
        self._uds = uds
        self._socket = _bound_path(uds) if uds is not None else _bound(host, port)
        self._config = uvicorn.Config(
            app,
            http=http,
            ws="none",
            lifespan="on",
            log_config=None,
            access_log=False,
            server_header=False,
            backlog=_BACKLOG,
            timeout_keep_alive=_KEEP_ALIVE_SECONDS,
            timeout_graceful_shutdown=_GRACE_SECONDS,
        )
        self._server: _QuietServer | None = None
        self._task: asyncio.Task[None] | None = None

    @property
    def port(self) -> int:
        """0 on a unix socket."""
        return 0 if self._uds is not None else int(self._socket.getsockname()[1])

    @property
    def url(self) -> str:
        if self._uds is not None:
            return f"unix:{self._uds}"
        host = self._socket.getsockname()[0]
        return f"http://[{host}]:{self.port}" if ":" in host else f"http://{host}:{self.port}"

    async def start(self) -> None:
        """Returns when requests are taken. Raises RuntimeError when the app does not start."""
        server = self._server = _QuietServer(self._config)
        self._task = asyncio.create_task(_served(server, self._socket), name=f"serve {self.url}")
        listening = asyncio.create_task(server.listening.wait())
        await asyncio.wait((self._task, listening), return_when=asyncio.FIRST_COMPLETED)
        if not server.listening.is_set():
            listening.cancel()
            await self._task
            raise RuntimeError(f"the worker for {self.url} did not start")

    async def stop(self) -> None:
        """Wait as patiently as told for what runs, end the rest, answer what can still be answered, close."""
        server = self._server
        if server is None or self._task is None:
            self._socket.close()
            return
        if not self._task.done():
            await self._presence.leave(self._patience, lambda: bool(server.server_state.connections), self._hurried)
        if self._before_stop is not None:
            await self._before_stop()
        server.should_exit = True
        server.leaving.set()
        await self._task
        # One that was accepted in the very last moment: nobody would ever close it.
        for connection in list(server.server_state.connections):
            connection.transport.abort()
        if self._uds is not None:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self._uds)

    def hurry(self) -> None:
        """Do not be patient any longer."""
        self._hurried.set()

    async def wait(self) -> None:
        """Until the server has ended, by `stop` or by itself."""
        if self._task is not None:
            await asyncio.shield(self._task)


def serve(
    engine: Engine,
    host: str = "127.0.0.1",
    port: int = 8101,
    publisher: EventPublisher | None = None,
    *,
    uds: str | None = None,
    patience: Patience = NO_PATIENCE,
    **app_options: Any,
) -> int:
    """Serve one engine until SIGTERM or SIGINT; the exit code. `app_options` are those of `build_app`.

    The publisher is closed in the end.
    """
    presence = Presence()
    app = build_app(engine, publisher=publisher, presence=presence, **app_options)
    where: dict[str, Any] = {"host": host, "port": port, "uds": uds}
    try:
        server = WorkerServer(app, **where, before_stop=engine.stop, presence=presence, patience=patience)
        return run_servers([server])
    except CannotListen as error:
        print(f"ropeway worker: {error}", file=sys.stderr)
        return 1
    finally:
        if publisher is not None:
            publisher.close()


def run_servers(servers: Sequence[WorkerServer]) -> int:
    """Serve all until a signal comes or one of them ends; the exit code. Says `ready` on stderr when all listen.

    A second signal ends the wait for requests under way.
    """
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_run_servers(servers))


async def _run_servers(servers: Sequence[WorkerServer]) -> int:
    signalled = asyncio.Event()
    loop = asyncio.get_running_loop()

    def on_signal() -> None:
        if signalled.is_set():
            for server in servers:
                server.hurry()
        signalled.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, on_signal)
    try:
        await asyncio.gather(*(server.start() for server in servers))
    except RuntimeError as error:
        print(f"ropeway worker: {error}", file=sys.stderr)
        return 1
    # In one write: what threads log must not come between the line and its end.
    sys.stderr.write(f"ready {' '.join(server.url for server in servers)}\n")
    sys.stderr.flush()
    waits = [asyncio.create_task(signalled.wait()), *(asyncio.create_task(server.wait()) for server in servers)]
    await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    await asyncio.gather(*(server.stop() for server in servers))
    for wait in waits:
        wait.cancel()
    return 0 if signalled.is_set() else 1


async def _served(server: _QuietServer, listener: socket.socket) -> None:
    # uvicorn reports a failed start by SystemExit, which must not end the loop that other workers share.
    with contextlib.suppress(SystemExit):
        await server.serve(sockets=[listener])


def _bound(host: str, port: int) -> socket.socket:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise CannotListen(f"cannot listen on {host}:{port}: {error}") from error
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if hasattr(socket, "TCP_NOTSENT_LOWAT"):
            # Connections inherit it: without, the kernel takes megabytes of what nobody reads, token after token.
            listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, _UNSENT_BYTES_MAX)
        listener.bind(address)
        # A second socket may bind the same port until one of them listens.
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        raise CannotListen(f"cannot listen on {host}:{port}: {error.strerror}") from error
    listener.setblocking(False)
    return listener


def _bound_path(path: str) -> socket.socket:
    _clear_stale_socket(path)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.bind(path)
        os.chmod(path, 0o600)
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        raise CannotListen(f"cannot listen on {path}: {error.strerror}") from error
    listener.setblocking(False)
    return listener


def _clear_stale_socket(path: str) -> None:
    """Remove what an earlier life left behind; a socket that still answers stays."""
    with contextlib.suppress(FileNotFoundError):
        if not stat.S_ISSOCK(os.stat(path).st_mode):
            return
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            try:
                probe.connect(path)
            except ConnectionRefusedError:
                os.unlink(path)
