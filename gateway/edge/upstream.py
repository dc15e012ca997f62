"""Connections to workers: one request at a time on each, kept open, response bytes handed on as they come.

No client library stands between a worker's socket and the client's: an `UpstreamConnection` is a protocol whose
`data_received` finds where the response's body ends and gives its bytes to the request's `Receiver`.
"""

import asyncio
import ssl
from typing import Protocol, cast

from gateway.edge.http1 import (
    UNTIL_CLOSE,
    BodyEnd,
    FramingError,
    HeadReader,
    ResponseHead,
    chunk_start,
    parse_response_head,
)
from gateway.reliability.failures import (
    BODY_CUT,
    BODY_MALFORMED,
    CONNECTION_LOST,
    CONNECTION_STALE,
    HEAD_MALFORMED,
    Failure,
)

RESPONSE_HEAD_BYTES_MAX = 65_536


class Receiver(Protocol):
    """Who gets a response. It comes as a whole, or it is started and goes on until `response_body(..., done=True)`;
    `upstream_failed` ends it, too."""

    def response_complete(self, head: ResponseHead, body: bytes) -> None:
        """All of a response whose head states its length, come in one read."""
        ...

    def response_started(self, head: ResponseHead, body_follows: bool) -> None:
        """`body_follows`: bytes of the body have come with the head, and are delivered next."""
        ...

    def response_body(self, data: bytes, done: bool) -> None:
        """Bytes of the body as they stand on the wire, chunk headers included where the head says CHUNKED."""
        ...

    def upstream_failed(self, failure: Failure, reason: str) -> None:
        """The connection was lost or broke HTTP; `reason` is for logs."""
        ...


class UpstreamConnection(asyncio.Protocol):
    __slots__ = ("_end", "_head", "_head_bytes", "_heads", "_paused", "_pool", "_receiver", "requests", "transport")

    def __init__(self, pool: "UpstreamPool") -> None:
        self._pool = pool
        self._receiver: Receiver | None = None
        self._heads = HeadReader(parse_response_head)
        self._head_bytes = b""
        self._head: ResponseHead | None = None
        self._end: BodyEnd | None = None
        self._paused = False
        self.requests = 0
        self.transport: asyncio.Transport | None = None

    def send(self, receiver: Receiver, parts: list[bytes]) -> None:
        """Send one request and have its response delivered to `receiver`."""
        assert self._receiver is None  # noqa: S101  a connection carries one request at a time
        assert self.transport is not None  # noqa: S101
        self._receiver = receiver
        self._head = self._end = None
        self._head_bytes = b""
        self.requests += 1
        # One buffer: uvloop's writelines costs three times as much as a write and the copy it spares.
        self._pool.write_soon(self.transport, b"".join(parts))

    def hand_over(self, receiver: Receiver) -> None:
        """Have the rest of the response delivered to another."""
        self._receiver = receiver

    def abort(self) -> None:
        """Drop the connection at once: the worker learns that nobody waits for the answer."""
        self._receiver = None
        if self.transport is not None:
            self.transport.abort()

    def pause(self) -> None:
        if self.transport is not None and not self.transport.is_closing():
            self._paused = True
            self.transport.pause_reading()

    def resume(self) -> None:
        if self._paused and self.transport is not None and not self.transport.is_closing():
            self._paused = False
            self.transport.resume_reading()

    @property
    def is_busy(self) -> bool:
        """Whether somebody waits for the rest of a response."""
        return self._receiver is not None

    @property
    def at_chunk_boundary(self) -> bool:
        return self._end is not None and self._end.at_chunk_boundary

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self._pool.opened(self)

    def data_received(self, data: bytes) -> None:
        receiver, end = self._receiver, self._end
        if receiver is None:
            # A worker that speaks unasked (a late 408, say) is about to close.
            self.abort()
            return
        if end is not None and end.at_chunk_boundary and data.startswith(chunk_start(len(data))):
            # One chunk with one read, as most tokens of a stream come: nothing to be found out about it.
            receiver.response_body(data, False)
            return
        try:
            if end is None:
                data = self._receive_head(data)
                head = self._head
                if head is None:
                    return
                if head.status == 408 and not head.keep_alive and self.requests > 1:
                    # Its farewell to an idle connection, which has crossed our request.
                    self._head, self._head_bytes = None, b""
                    self._fail("closed while idle")
                    return
                if head.length == len(data):
                    self._release(head.keep_alive)
                    receiver.response_complete(head, data)
                    return
                end = self._end = BodyEnd(head.length)
                receiver.response_started(head, bool(data))
                receiver = self._receiver  # its answer may be wanted no longer, or by another
                if receiver is None or not data:
                    return
            taken = end.feed(data)
        except FramingError as error:
            # What of `data` is sound has not been handed on: the receiver is not at a chunk's end, wherever we are.
            self._end = None
            self._fail(str(error), malformed=True)
            return
        if not end.done:
            receiver.response_body(data, False)
            return
        surplus = taken < len(data)
        self._release(self._head is not None and self._head.keep_alive and not surplus)
        receiver.response_body(data[:taken] if surplus else data, True)

    def eof_received(self) -> bool:
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        self._pool.closed(self)
        receiver = self._receiver
        if receiver is None:
            return
        if self._head is not None and self._head.length == UNTIL_CLOSE and exc is None:
            self._receiver = None
            receiver.response_body(b"", True)
            return
        self._fail("connection lost" if exc is None else f"connection lost: {type(exc).__name__}")

    # Steps

    def _receive_head(self, data: bytes) -> bytes:
        """Collect the head; returns what follows it. `_head` is set when it is complete."""
        buffer = self._head_bytes + data if self._head_bytes else data
        while True:
            end = buffer.find(b"\r\n\r\n")
            if end < 0:
                if len(buffer) > RESPONSE_HEAD_BYTES_MAX:
                    raise FramingError("response head too large")
                self._head_bytes = buffer
                return b""
            head = self._heads.read(buffer[:end])
            buffer = buffer[end + 4 :]
            if head.status >= 200:
                break
            if head.status == 101:
                raise FramingError("the worker switched protocols unasked")
        self._head = head
        self._head_bytes = b""
        return buffer

    def _release(self, keep: bool) -> None:
        """The response has come: the connection is for others, if it can be kept."""
        self._receiver = None
        if self._paused:
            self.resume()
        transport = self.transport
        assert transport is not None  # noqa: S101
        if keep and not transport.is_closing():
            self._pool.release(self)
        else:
            transport.close()

    def _fail(self, reason: str, malformed: bool = False) -> None:
        receiver, self._receiver = self._receiver, None
        if self.transport is not None:
            self.transport.abort()
        if receiver is not None:
            receiver.upstream_failed(self._failure(malformed), reason)

    def _failure(self, malformed: bool) -> Failure:
        if self._head is not None:
            return BODY_MALFORMED if malformed else BODY_CUT
        if malformed or self._head_bytes:
            return HEAD_MALFORMED
        # One that was kept open may have been closed under our request; that says nothing about the worker.
        return CONNECTION_STALE if self.requests > 1 else CONNECTION_LOST


class UpstreamPool:
    """Connections to one worker. In use there are as many as requests (the worker queues, not we), which the edge's
    `connections_max` bounds; idle ones have a bound of their own."""

    def __init__(self, host: str, port: int, tls: ssl.SSLContext | None = None, idle_max: int = 256) -> None:
        self.host = host
        self.port = port
        self._tls = tls
        self._idle_max = idle_max
        self._idle: list[UpstreamConnection] = []
        self._open: set[UpstreamConnection] = set()
        self._sent_before = 0
        """Requests on connections that are closed by now."""
        self._unwritten: list[tuple[asyncio.Transport, bytes]] = []
        """At most one for each connection in use."""

    def __len__(self) -> int:
        return len(self._open)

    @property
    def idle(self) -> int:
        return len(self._idle)

    @property
    def sent(self) -> int:
        """Requests written so far."""
        return self._sent_before + sum(connection.requests for connection in self._open)

    def write_soon(self, transport: asyncio.Transport, data: bytes) -> None:
        """Once all that the loop has been woken for is done. A worker on the same machine that is written to at once
        takes the processor in the midst of it, and the requests that came with this one meet cold caches."""
        if not self._unwritten:
            asyncio.get_running_loop().call_soon(self._write)
        self._unwritten.append((transport, data))

    def _write(self) -> None:
        unwritten, self._unwritten = self._unwritten, []
        for transport, data in unwritten:
            if not transport.is_closing():
                transport.write(data)

    def acquire(self) -> UpstreamConnection | None:
        """An idle connection, the most recently used first; None when one must be opened."""
        while self._idle:
            connection = self._idle.pop()
            if connection.transport is not None and not connection.transport.is_closing():
                return connection
        return None

    async def connect(self, timeout_seconds: float) -> UpstreamConnection:
        """Open a connection. Raises OSError (TimeoutError among them)."""
        loop, connection = asyncio.get_running_loop(), UpstreamConnection(self)
        try:
            async with asyncio.timeout(timeout_seconds):
                await loop.create_connection(lambda: connection, self.host, self.port, ssl=self._tls)
        except BaseException:
            # What uvloop was opening it closes without a word to the protocol, though that had been connected.
            connection.abort()
            self.closed(connection)
            raise
        return connection

    def opened(self, connection: UpstreamConnection) -> None:
        self._open.add(connection)

    def closed(self, connection: UpstreamConnection) -> None:
        self._open.discard(connection)
        self._sent_before += connection.requests
        if connection in self._idle:
            self._idle.remove(connection)

    def release(self, connection: UpstreamConnection) -> None:
        if len(self._idle) < self._idle_max:
            self._idle.append(connection)
        elif connection.transport is not None:
            connection.transport.close()

    def close_idle(self) -> None:
        """Close what no request uses: the worker is gone or the gateway stops."""
        idle, self._idle = self._idle, []
        for connection in idle:
            if connection.transport is not None:
                connection.transport.close()
