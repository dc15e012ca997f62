"""A worker's transfers, on a thread and an event loop of their own: neither the API's loop nor the engine's thread
waits while KV is received, authenticated or sent.

Calls come from the engine's thread (`begin`) and from the API's (`start`, `stop`); the engine is told through `wake`
whenever something has come for it.
"""

import asyncio
import contextlib
import socket
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field, replace

from cachecore.holders import Epoch, Worker, WorkerName
from cachecore.kv.calibration import RAW
from cachecore.scope import Keyring
from cachecore.transfer.tcp.client import ClientSettings, TcpTransport
from cachecore.transfer.tcp.server import ServerCounts, ServerSettings, TcpServer
from cachecore.transfer.tcp.tls import Tls
from cachecore.transfer.wires import make_wire
from workers.transfer.loader import Destination, Loader
from workers.transfer.loads import Load
from workers.transfer.source import KvSource, Lender

_WILDCARDS = ("0.0.0.0", "::")  # noqa: S104 - recognized, not bound to
_WORKERS = 2
"""Threads that gather and encode, decode and put in place."""


@dataclass(frozen=True, slots=True)
class TransferOptions:
    """How a worker moves KV."""

    host: str = "127.0.0.1"
    port: int = 0
    """0 picks a free one."""
    name: str = ""
    """Of this worker among all; by default the address that it serves at."""
    codecs: Sequence[str] = (RAW,)
    """What KV may travel in: those whose effect on this model's answers was measured and is small enough."""
    ahead_steps: int = 4
    """While KV is on its way, a prompt's own tokens are computed layer by layer as it comes, as far as so many steps
    reach; 0 waits for all layers."""
    frame_bytes: int = 256 << 10
    """Short layers share a frame up to this: a frame costs some 0.1 ms at both ends whatever it carries."""
    client: ClientSettings = field(default_factory=lambda: ClientSettings(stall_seconds=1.0, connect_seconds=0.5))
    server: ServerSettings = field(default_factory=ServerSettings)
    tls: Tls | None = None
    """For peers, whom nothing is served to, or pulled from, without it. What engines move it does not cover."""
    wires: Sequence[str] = ()
    """Engines to move KV by as well, where a peer has them too: names of `cachecore.transfer.wires.ENGINES`."""
    attachments: "Sequence[Attachment]" = ()


class TransferService:
    """See the module's opening."""

    def __init__(
        self,
        options: TransferOptions,
        keyring: Keyring,
        epoch: int,
        destination: Destination,
        lender: Lender,
        wake: Callable[[], None],
        rank: int = 0,
    ) -> None:
        self.options = options
        self.keyring = keyring
        self.destination = destination
        self.executor = ThreadPoolExecutor(_WORKERS, "ropeway-kv")
        self.holder = Worker(WorkerName(options.name), Epoch(epoch), rank)
        self.source = KvSource(
            self.holder,
            destination.shape,
            options.codecs,
            lender,
            destination.pages,
            destination.rope,
            self.executor,
            options.frame_bytes,
        )
        self.loader = Loader(destination, self.executor, wake)
        self.address = ""
        self.addresses: tuple[str, ...] = ()
        """All of them, those that peers should try first coming first."""
        self._server: TcpServer | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._stopping: asyncio.Event | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    def allow(self, codecs: Sequence[str]) -> None:
        """What KV may travel in from now on."""
        self.options = replace(self.options, codecs=codecs)
        self.source.codecs = codecs

    @property
    def counts(self) -> ServerCounts:
        """What was served."""
        return ServerCounts() if self._server is None else self._server.counts

    def start(self) -> None:
        """Listen; returns when that is done, and `holder` and `addresses` are known.

        Raises OSError, EngineUnavailable.
        """
        started: Future[None] = Future()
        self._thread = threading.Thread(
            target=lambda: asyncio.run(self._main(started)), name="ropeway-transfers", daemon=True
        )
        self._thread.start()
        started.result()

    def stop(self) -> None:
        """End everything under way; loads that have not settled never will."""
        thread, self._thread = self._thread, None
        if thread is None or self._loop is None or self._stopping is None:
            return
        self._loop.call_soon_threadsafe(self._stopping.set)
        thread.join()
        self.executor.shutdown()

    def begin(self, load: Load) -> None:
        """Carry out a load. Its runs settle, unless it is called off."""
        if self._loop is None:
            raise RuntimeError("not started")
        load.improving = bool(load.passages) and self.loader.improve is not None
        self._loop.call_soon_threadsafe(self._begin, load)

    def _begin(self, load: Load) -> None:
        loop = asyncio.get_running_loop()
        task = loop.create_task(self.loader.carry_out(load))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        load.on_cancel = lambda: _cancel_from_elsewhere(loop, task)
        if load.cancelled:
            task.cancel()

    async def _main(self, started: "Future[None]") -> None:
        self._loop, self._stopping = asyncio.get_running_loop(), asyncio.Event()
        try:
            async with contextlib.AsyncExitStack() as stack:
                await stack.enter_async_context(self._serving())
                for attachment in self.options.attachments:
                    await stack.enter_async_context(attachment(self))
                started.set_result(None)
                await self._stopping.wait()
        except BaseException as error:
            if started.done():
                raise
            started.set_exception(error)

    @contextlib.asynccontextmanager
    async def _serving(self) -> AsyncIterator[None]:
        host = _reachable(self.options.host)
        tls = self.options.tls
        wires = [make_wire(name, self.keyring, host, tls=tls) for name in self.options.wires]
        transport = TcpTransport(self.keyring, self.options.client, tls=tls, wires=wires)
        self.loader.transports.update(dict.fromkeys(transport.schemes, transport))
        server = self._server = TcpServer(self.source, self.keyring, self._server_settings(), tls=tls)
        further = [TcpServer(self.source, self.keyring, self._server_settings(0), wire=wire) for wire in wires]
        for one in (server, *further):
            one.counts = server.counts
            await one.start()
        self.address = server.address
        self.addresses = (*(one.address for one in further), server.address)
        name = self.options.name or _instance_at(self.address)
        self.holder = self.source.holder = self.holder._replace(name=WorkerName(name))
        try:
            yield
        finally:
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
            for one in (server, *further):
                await one.close()
            transport.close()
            for wire in wires:
                wire.close()

    def _server_settings(self, port: int | None = None) -> ServerSettings:
        return replace(self.options.server, host=self.options.host, port=self.options.port if port is None else port)


Attachment = Callable[[TransferService], AbstractAsyncContextManager[None]]
"""Entered on the transfers' loop after the worker listens, left before it stops to: what brings further transports
(`service.loader.transports`), or keeps something of its own there."""


def _instance_at(address: str) -> str:
    """What a worker is called that serves at an address; a wildcard would be every machine's."""
    host, _, port = address.partition("://")[2].rpartition(":")
    return f"{socket.gethostname()}:{port}" if host.strip("[]") in _WILDCARDS else f"{host}:{port}"


def _reachable(host: str) -> str:
    return socket.gethostname() if host in _WILDCARDS else host


def _cancel_from_elsewhere(loop: asyncio.AbstractEventLoop, task: "asyncio.Task[None]") -> None:
    with contextlib.suppress(RuntimeError):  # the loop has ended, and the task with it
        loop.call_soon_threadsafe(task.cancel)
