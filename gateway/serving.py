"""uvicorn as the gateway runs it: on sockets of ours, leaving when told and in the gateway's own way."""

import asyncio
import socket
from collections.abc import Callable, Sequence
from typing import Any

import uvicorn

from gateway.errors import StartupError

Task = asyncio.Task[None]

LAST_WORDS_SECONDS = 1.0
"""For errors on their way to clients whose requests were not waited for."""


class QuietServer(uvicorn.Server):
    """One listener, or one for each address of a name. Signals are the gateway's."""

    def __init__(self, config: uvicorn.Config, listeners: Sequence[socket.socket]) -> None:
        super().__init__(config)
        self._listeners = list(listeners)
        self._leaving = asyncio.Event()

    async def run_until_left(self) -> None:
        """Raises StartupError."""
        try:
            await self._serve(self._listeners)
        except OSError as error:
            where = ", ".join(f"{name[0]}:{name[1]}" for name in map(socket.socket.getsockname, self._listeners))
            raise StartupError(f"cannot listen on {where}: {error.strerror or error}") from error

    async def main_loop(self) -> None:
        # uvicorn's own wakes ten times a second, for headers that we do not send.
        await self._leaving.wait()

    def leave(self) -> None:
        """Accept nothing more, and end once every connection has."""
        self.should_exit = True
        self._leaving.set()

    def hurry(self) -> None:
        """Wait for no connection any longer."""
        self.force_exit = True
        for task in self.server_state.tasks:
            task.cancel()
        for connection in tuple(self.server_state.connections):
            transport = getattr(connection, "transport", None) or getattr(connection, "_transport", None)
            if transport is not None:
                transport.abort()


class Stop:
    """How a gateway ends. Nobody who has begun is hurried before time; after that nobody is left hanging."""

    def __init__(self, announce_seconds: float, finish_seconds: float) -> None:
        self._announce_seconds = announce_seconds
        self._finish_seconds = finish_seconds
        self._wanted = asyncio.Event()
        self._hurried = asyncio.Event()

    def wanted(self) -> None:
        """The operator wants the end; the second time at once."""
        (self._hurried if self._wanted.is_set() else self._wanted).set()

    async def wait(self) -> None:
        """Until it is wanted."""
        await self._wanted.wait()

    async def run(self, servers: Sequence[QuietServer], running: Sequence[Task], break_off: Callable[[], None]) -> None:
        """`running` serve `servers`; `break_off` ends the requests that were not finished in time."""
        hurried = asyncio.create_task(self._hurried.wait(), name="second stop signal")
        await asyncio.wait([hurried], timeout=self._announce_seconds)
        for server in servers:
            server.leave()
        finished = asyncio.gather(*running, return_exceptions=True)
        either: list[asyncio.Future[Any]] = [hurried, finished]
        await asyncio.wait(either, timeout=self._finish_seconds, return_when=asyncio.FIRST_COMPLETED)
        hurried.cancel()
        if not finished.done():
            break_off()
            await asyncio.wait([finished], timeout=LAST_WORDS_SECONDS)
            for server in servers:
                server.hurry()
            await finished
