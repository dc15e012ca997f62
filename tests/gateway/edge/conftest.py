"""An edge with scripted workers behind it and raw sockets before it.

Fakes are scripts: a worker's answer is a list of bytes to write, seconds to pause, and `CLOSE`, `RESET` or `HANG`. When
a test ends, whatever it did, nothing may be left: no connection, no exchange unaccounted for, no task.
"""

import asyncio
import contextlib
import socket
import struct
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping
from functools import partial
from typing import Any, NamedTuple

import pytest
import uvicorn
import uvloop

from gateway.edge.contract import Deadlines, Ending, Patience
from gateway.edge.http1 import HOP_BY_HOP, RequestHead, forwardable
from gateway.edge.server import Edge, EdgeLimits, Inbound
from gateway.edge.upstream import UpstreamPool
from gateway.errors import BadRequest, Unauthorized
from gateway.reliability.failures import Failure, Retry

CLOSE = "close"
RESET = "reset"
HANG = "hang"
LoopFactory = Callable[[], asyncio.AbstractEventLoop]
Script = list[bytes | float | str]
_RESET_ON_CLOSE = struct.pack("ii", 1, 0)
BODY_BYTES_MAX = 1_000_000
ATTEMPTS_MAX = 3


def pytest_asyncio_loop_factories(config: pytest.Config, item: pytest.Item) -> Mapping[str, LoopFactory]:
    """The loop that the gateway runs on."""
    return {"uvloop": uvloop.new_event_loop}


async def eventually(condition: Callable[[], bool], seconds_max: float = 10.0) -> None:
    """Wait for a condition; fail when it does not come true."""
    loop = asyncio.get_running_loop()
    limit = loop.time() + seconds_max
    while not condition():
        assert loop.time() < limit, "it did not come true"
        await asyncio.sleep(0.005)


# Workers


class WorkerRequest(NamedTuple):
    line: bytes
    headers: list[tuple[bytes, bytes]]
    body: bytes


class Worker:
    """A server that reads requests and plays one script for each, the last one for ever."""

    def __init__(self) -> None:
        self.scripts: list[Script] = []
        self.requests: list[WorkerRequest] = []
        self.connections: list[WorkerConnection] = []
        self._server: asyncio.AbstractServer | None = None

    async def start(self) -> UpstreamPool:
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(lambda: WorkerConnection(self), "127.0.0.1", 0, backlog=1024)
        return UpstreamPool("127.0.0.1", self._server.sockets[0].getsockname()[1])

    @property
    def open(self) -> int:
        return sum(not connection.lost for connection in self.connections)

    def next_script(self) -> Script:
        return self.scripts.pop(0) if len(self.scripts) > 1 else self.scripts[0]

    async def stop(self) -> None:
        assert self._server is not None
        self._server.close()
        await self._server.wait_closed()
        for connection in self.connections:
            await connection.stop()


class WorkerConnection(asyncio.Protocol):
    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._buffer = b""
        self._writable = asyncio.Event()
        self._writable.set()
        self._playing: asyncio.Task[None] | None = None
        self.transport: asyncio.Transport
        self.lost = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport  # type: ignore[assignment]
        self._worker.connections.append(self)

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        head, blank, rest = self._buffer.partition(b"\r\n\r\n")
        if not blank:
            return
        line, *lines = head.split(b"\r\n")
        headers = [(name, value) for name, _, value in (field.partition(b": ") for field in lines)]
        length = int(dict(headers).get(b"content-length", b"0"))
        if len(rest) < length:
            return
        assert len(rest) == length, "more than one request at a time"
        self._buffer = b""
        self._worker.requests.append(WorkerRequest(line, headers, rest))
        self._playing = asyncio.ensure_future(self._play(self._worker.next_script()))

    def pause_writing(self) -> None:
        self._writable.clear()

    def resume_writing(self) -> None:
        self._writable.set()

    def connection_lost(self, exc: Exception | None) -> None:
        self.lost = True
        self._writable.set()

    async def _play(self, script: Script) -> None:
        for step in script:
            if self.lost:
                return
            if isinstance(step, bytes):
                self.transport.write(step)
                await self._writable.wait()
            elif isinstance(step, float):
                await asyncio.sleep(step)
            elif step == CLOSE:
                self.transport.close()
            elif step == RESET:
                opened = self.transport.get_extra_info("socket")
                opened.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)
                self.transport.abort()
            else:
                await asyncio.Event().wait()

    async def stop(self) -> None:
        if self._playing is not None:
            self._playing.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._playing
        if not self.lost:
            self.transport.abort()
            await eventually(lambda: self.lost)


# The handler


class Ended(NamedTuple):
    ending: Ending
    status: int
    body_bytes: int
    tail: bytes


class Journey:
    """Listener and attempt: sends the request to one worker after another."""

    def __init__(self, pools: list[UpstreamPool], inbound: Inbound) -> None:
        self._pools = list(pools)
        self.inbound = inbound
        self.attempt = self
        self.connections = self._pools.pop(0)
        self.answer_headers = b"x-gateway: yes\r\n"
        self.reads_head = self.strips_usage = False
        head = inbound.head
        fields = forwardable(head.headers, HOP_BY_HOP | {b"content-length", b"host", b"expect"})
        lines = [b"%b %b HTTP/1.1\r\nhost: worker\r\n" % (head.method, head.target)]
        lines += [b"%b: %b\r\n" % field for field in fields]
        lines.append(b"content-length: %d\r\n\r\n" % len(inbound.body))
        self.request_parts = [b"".join(lines), inbound.body]
        self.first_bytes = 0
        self.failures: list[Failure] = []
        self.patience: Callable[[], Patience] | None = None
        self.second: Journey | None = None
        self.ends: list[Ended] = []

    def first_byte(self) -> None:
        self.first_bytes += 1

    def failed(self, failure: Failure) -> bool:
        self.failures.append(failure)
        if failure.retry is Retry.SAME:
            return True
        if failure.retry is Retry.NO or not self._pools or len(self.failures) == ATTEMPTS_MAX:
            return False
        self.connections = self._pools.pop(0)
        return True

    def broke(self, failure: Failure) -> None:
        self.failures.append(failure)

    def hedge(self) -> "Journey | None":
        """Asks the next worker."""
        if not self._pools:
            return None
        self.second = Journey(self._pools, self.inbound)
        self.second.answer_headers = b"x-gateway: second\r\n"
        return self.second

    def ended(self, ending: Ending, status: int, body_bytes: int, tail: bytes) -> None:
        self.ends.append(Ended(ending, status, body_bytes, tail))


class Handler:
    def __init__(self) -> None:
        self.pools: list[UpstreamPool] = []
        self.journeys: list[Journey] = []
        self.decision_seconds: float | None = None
        self.strips_usage = False
        self.patience: Patience | None = None
        self.failure: Exception | None = None

    def owns(self, method: str, path: str) -> bool:
        return path.startswith("/v1/")

    def admit(self, head: RequestHead) -> None:
        if head.get(b"authorization") == b"Bearer unknown":
            raise Unauthorized("the API key is not known here")

    def begin(self, inbound: Inbound) -> Journey | Coroutine[Any, Any, Journey]:
        if self.decision_seconds is not None:
            return self._begin_later(inbound, self.decision_seconds)
        return self._journey(inbound)

    async def _begin_later(self, inbound: Inbound, seconds: float) -> Journey:
        await asyncio.sleep(seconds)
        return self._journey(inbound)

    def _journey(self, inbound: Inbound) -> Journey:
        if self.failure is not None:
            raise self.failure
        if inbound.body == b"refuse":
            raise BadRequest("refused")
        journey = Journey(self.pools, inbound)
        journey.strips_usage = self.strips_usage
        if self.patience is not None:
            journey.patience = partial(lambda patience: patience, self.patience)
        self.journeys.append(journey)
        return journey

    def answer_headers(self, head: RequestHead | None) -> bytes:
        return b"x-request-id: none\r\n" if head is None else b"x-request-id: some\r\n"


# The application for everything else


async def application(scope: Any, receive: Any, send: Any) -> None:
    """`/cold` echoes the body, `/early` answers without reading it, `/large` answers with a lot."""
    body = b""
    more = scope["path"] != "/early"
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            return
        body += message["body"]
        more = message["more_body"]
    if scope["path"] == "/slow":
        await asyncio.sleep(0.2)
    content = b"x" * 500_000 if scope["path"] == "/large" else b"cold:" + body
    headers = [(b"content-length", b"%d" % len(content))]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": content})


# Clients


class Answer(NamedTuple):
    status: int
    headers: list[tuple[bytes, bytes]]
    wire: bytes
    """The body as it stood on the wire."""
    content: bytes
    interim: list[int]
    complete: bool

    def get(self, name: bytes) -> bytes | None:
        values = [value for header, value in self.headers if header == name]
        assert len(values) < 2, f"{name!r} occurs twice"
        return values[0] if values else None


class Client:
    """A raw socket that reads answers by the book, and keeps what it read."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    def send(self, data: bytes) -> None:
        self.writer.write(data)

    def post(self, body: bytes = b"{}", path: bytes = b"/v1/x", *headers: bytes) -> None:
        lines = b"".join(b"%b\r\n" % header for header in headers)
        self.send(b"POST %b HTTP/1.1\r\nHost: h\r\n%bContent-Length: %d\r\n\r\n%b" % (path, lines, len(body), body))

    async def answer(self, head_only: bool = False) -> Answer:
        """The next answer; `complete` is False where the connection ended before the body did."""
        async with asyncio.timeout(5):
            interim: list[int] = []
            while True:
                head = (await self.reader.readuntil(b"\r\n\r\n"))[:-4]
                line, *lines = head.split(b"\r\n")
                status = int(line.split(b" ")[1])
                if status >= 200:
                    break
                interim.append(status)
            headers = [(name, value) for name, _, value in (field.partition(b": ") for field in lines)]
            fields = dict(headers)
            if head_only or status in (204, 304):
                return Answer(status, headers, b"", b"", interim, True)
            wire, content, complete = await self._body(fields)
            return Answer(status, headers, wire, content, interim, complete)

    async def _body(self, fields: dict[bytes, bytes]) -> tuple[bytes, bytes, bool]:
        if fields.get(b"transfer-encoding") == b"chunked":
            assert b"content-length" not in fields
            return await self._chunks()
        if b"content-length" in fields:
            length = int(fields[b"content-length"])
            try:
                data = await self.reader.readexactly(length)
            except asyncio.IncompleteReadError as error:
                return error.partial, error.partial, False
            return data, data, True
        try:
            data = await self.reader.read()
        except ConnectionResetError:
            return b"", b"", False
        return data, data, True

    async def _chunks(self) -> tuple[bytes, bytes, bool]:
        wire: list[bytes] = []
        content: list[bytes] = []
        try:
            size = -1
            while size:
                wire.append(await self.reader.readuntil(b"\r\n"))
                size = int(wire[-1].partition(b";")[0], 16)
                if size:
                    wire.append(await self.reader.readexactly(size + 2))
                    assert wire[-1].endswith(b"\r\n")
                    content.append(wire[-1][:-2])
            while not size and wire[-1] != b"\r\n":
                wire.append(await self.reader.readuntil(b"\r\n"))
        except asyncio.IncompleteReadError as error:
            return b"".join([*wire, error.partial]), b"".join(content), False
        return b"".join(wire), b"".join(content), True

    async def at_end(self) -> bool:
        """Whether the gateway closes the connection without another byte."""
        async with asyncio.timeout(5):
            return await self.reader.read() == b""

    def reset(self) -> None:
        opened = self.writer.get_extra_info("socket")
        opened.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)
        self.writer.transport.abort()

    async def close(self) -> None:
        self.writer.close()
        with contextlib.suppress(ConnectionError):
            await self.writer.wait_closed()


# All together


class Gateway:
    def __init__(self) -> None:
        self.handler = Handler()
        self.deadlines = Deadlines(1.0, None, None)
        self.limits = EdgeLimits(BODY_BYTES_MAX, 100, 60.0, 60.0)
        self.workers: list[Worker] = []
        self.clients: list[Client] = []
        self.edge: Edge
        self.server: uvicorn.Server
        self.port = 0
        self._sweep: asyncio.Task[None] | None = None

    @property
    def journey(self) -> Journey:
        assert len(self.handler.journeys) == 1
        return self.handler.journeys[0]

    @property
    def read_workers(self) -> int:
        """Connections to workers that are being read. What a worker could write does not tell: the system's own
        buffers between two sockets hold 36 MB on one machine and 6 on another."""
        connections = [connection for pool in self.handler.pools for connection in pool._open]
        return sum(connection.transport is not None and connection.transport.is_reading() for connection in connections)

    async def start(self) -> None:
        self.edge = Edge(self.handler, self.limits, self.deadlines)
        config = uvicorn.Config(
            application,
            port=0,
            http=self.edge.protocol,  # type: ignore[arg-type]
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            date_header=False,
        )
        config.load()
        self.server = uvicorn.Server(config)
        self.server.lifespan = config.lifespan_class(config)
        await self.server.startup()
        self.port = self.server.servers[0].sockets[0].getsockname()[1]

    def limit(self, **changes: Any) -> None:
        """Change limits for the connections to come."""
        self.limits = self.edge.limits = self.limits._replace(**changes)

    def sweep(self, interval_seconds: float = 0.02) -> None:
        self._sweep = asyncio.create_task(self.edge.sweep(interval_seconds))

    async def worker(self, *scripts: Script) -> Worker:
        worker = Worker()
        worker.scripts = list(scripts)
        self.workers.append(worker)
        self.handler.pools.append(await worker.start())
        return worker

    def refuse(self) -> None:
        """A worker that nobody listens for."""
        with socket.socket() as closed:
            closed.bind(("127.0.0.1", 0))
            self.handler.pools.append(UpstreamPool("127.0.0.1", closed.getsockname()[1]))

    async def client(self, receive_buffer_bytes: int | None = None) -> Client:
        opened = socket.socket()
        if receive_buffer_bytes is not None:
            # On the gateway's side, too: a system may hold 4 MB and more for a socket by itself.
            listener = self.server.servers[0].sockets[0]
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, receive_buffer_bytes)
            opened.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer_bytes)
        opened.setblocking(False)
        await asyncio.get_running_loop().sock_connect(opened, ("127.0.0.1", self.port))
        reader, writer = await asyncio.open_connection(sock=opened)
        client = Client(reader, writer)
        self.clients.append(client)
        return client

    async def settle(self) -> None:
        """Let everyone leave, and find that nothing is left behind."""
        for client in self.clients:
            await client.close()
        for worker in self.workers:
            for connection in worker.connections:
                if connection._playing is not None and not connection._playing.done():
                    connection._playing.cancel()
        await eventually(lambda: not self.edge.connections)
        await eventually(lambda: not self.server.server_state.connections and not self.server.server_state.tasks)
        for journey in self.handler.journeys:
            assert len(journey.ends) == 1, "an exchange ends exactly once"
            assert journey.second is None or len(journey.second.ends) == 1, "and so does its second leg"
        for pool in self.handler.pools:
            await eventually(lambda pool=pool: len(pool) == pool.idle)
            pool.close_idle()
            await eventually(lambda pool=pool: len(pool) == 0)

    async def stop(self) -> None:
        try:
            await self.settle()
        finally:
            if self._sweep is not None:
                self._sweep.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await self._sweep
            for worker in self.workers:
                await worker.stop()
            for server in self.server.servers:
                server.close()
                await server.wait_closed()


@pytest.fixture
async def gateway(caplog: pytest.LogCaptureFixture) -> AsyncIterator[Gateway]:
    gateway = Gateway()
    await gateway.start()
    yield gateway
    await gateway.stop()
    unexpected = [record for record in caplog.records if record.levelname == "ERROR" and record.exc_info]
    if gateway.handler.failure is None:
        assert not unexpected, "something escaped"


@pytest.fixture
def settled() -> Callable[..., Awaitable[None]]:
    """`eventually`, for tests."""
    return eventually
