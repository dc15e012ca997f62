"""Sources in processes of their own, for `SeparateSuite`: one that serves one script after another, and mortal ones."""

import asyncio
import contextlib
import multiprocessing
import os
import signal
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

from cachecore.scope import Keyring
from cachecore.transfer.tcp.channel import TcpWire, Wire
from cachecore.transfer.tcp.client import ClientSettings, TcpTransport
from cachecore.transfer.tcp.server import TcpServer
from cachecore.transfer.transport import Request, Transport
from tests.cachecore.transfer.world import KEYRING, Script, ScriptedSource

MakeWire = Callable[[], Wire]
_ANSWER_SECONDS = 30


def run_source(pipe: Connection, make_wire: MakeWire) -> None:
    """What the other process does: as it is told, until the pipe ends."""

    async def obey() -> None:
        loop = asyncio.get_running_loop()
        wire = make_wire()
        server, source = None, ScriptedSource(Script())
        pipe.send("ready")
        while (order := await loop.run_in_executor(None, _receive, pipe)) is not None:
            command, *arguments = order
            if command == "serve":
                script, ahead = arguments
                source = script.source()
                server = TcpServer(source, KEYRING, wire=wire, clock=lambda ahead=ahead: time.time() + ahead)
                await server.start()
                pipe.send(server.address)
            elif command == "report":
                pipe.send((source.requests, source.closed))
            elif server is not None:
                await server.close()
                pipe.send("stopped")

    asyncio.run(obey())


def _receive(pipe: Connection) -> Any:
    with contextlib.suppress(EOFError):
        return pipe.recv()


@dataclass
class SourceProcess:
    process: BaseProcess
    pipe: Connection

    async def tell(self, *order: object) -> Any:
        self.pipe.send(order)
        return await asyncio.to_thread(self._answer)

    def _answer(self) -> Any:
        if not self.pipe.poll(_ANSWER_SECONDS):
            raise TimeoutError("a source's process does not answer")
        return self.pipe.recv()


@contextlib.contextmanager
def source_process(make_wire: MakeWire) -> Iterator[SourceProcess]:
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=run_source, args=(theirs, make_wire), daemon=True)
    process.start()
    theirs.close()
    one = SourceProcess(process, ours)
    try:
        assert one._answer() == "ready"
        yield one
    finally:
        ours.close()
        process.join(5)
        if process.is_alive():
            process.kill()
            process.join()
        process.close()


@dataclass
class RemoteServed:
    address: str
    source: SourceProcess

    async def requests(self) -> list[Request]:
        return list((await self.source.tell("report"))[0])

    async def freed(self) -> int:
        return int((await self.source.tell("report"))[1])

    async def stop(self) -> None:
        await self.source.tell("stop")

    def kill(self) -> None:
        self._signal(signal.SIGKILL)
        self.source.process.join()

    def freeze(self) -> None:
        self._signal(signal.SIGSTOP)

    def _signal(self, number: signal.Signals) -> None:
        assert self.source.process.pid is not None
        os.kill(self.source.process.pid, number)


class SeparateCarrier:
    """Pulls in this process from sources in others."""

    def __init__(self, source: SourceProcess, make_wire: MakeWire, wire: Wire) -> None:
        self._source = source
        self._make_wire = make_wire
        self._wire = wire

    @contextlib.asynccontextmanager
    async def serve(self, script: Script, *, clock_ahead_seconds: float = 0.0) -> AsyncIterator[RemoteServed]:
        served = RemoteServed(await self._source.tell("serve", script, clock_ahead_seconds), self._source)
        try:
            yield served
        finally:
            await served.stop()

    @contextlib.asynccontextmanager
    async def serve_alone(self, script: Script) -> AsyncIterator[RemoteServed]:
        with source_process(self._make_wire) as source:
            try:
                yield RemoteServed(await source.tell("serve", script, 0.0), source)
            finally:
                source.process.kill()

    @contextlib.asynccontextmanager
    async def transport(
        self, keyring: Keyring = KEYRING, *, streams: int = 1, stall_seconds: float = 10.0
    ) -> AsyncIterator[Transport]:
        settings = ClientSettings(streams=streams, stall_seconds=stall_seconds, connect_seconds=10)
        transport = TcpTransport(keyring, settings, wires=[self._wire])
        yield transport
        transport.close()


@contextlib.contextmanager
def separate_carrier(make_wire: MakeWire = TcpWire) -> Iterator[SeparateCarrier]:
    with source_process(make_wire) as source:
        yield SeparateCarrier(source, make_wire, make_wire())
