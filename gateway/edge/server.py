"""The edge's hot path: an asyncio protocol that uvicorn runs as its `http=` class.

Inference requests are served in callbacks: no ASGI scope, no task, no stream objects. Everything else on the same
connection (admin, status, models, documentation) is handed, message by message, to an inner uvicorn protocol and the
ASGI app behind it. Rules of the file:

* A connection is in one state: between messages or reading a head (`IDLE`), reading a hot body (`READING`), busy with
  an exchange (`BUSY`), or its current message belongs to the inner protocol (`INNER`).
* Messages are delimited here, for both kinds, so that hand-over happens only at a message boundary; what follows a
  message waits in `_buffer` until the answer is complete (pipelining), and reading stops when much of it waits.
* The end of a client's input is not its departure: a half-closed client still gets its answer (RFC 9293, 3.6). Whether
  it is gone altogether shows when something is written to it: a closed socket answers with a reset. So it is sent
  `102 Processing`, or a comment between two events, and the state of its connection is looked at a round trip later.
* What is kept for a client is bounded: while it takes nothing its worker is not read (at most one read of it lies here
  above asyncio's mark of 64 KiB) and no further message is begun; who takes nothing for too long is reset.
* A refused message may still be arriving: its sender reads our answer only if we read on (`DRAINING`).
"""

import asyncio
import logging
import socket
import struct
from collections.abc import Callable, Coroutine
from enum import Enum, auto
from types import CoroutineType
from typing import Any, NamedTuple, Protocol, cast

import msgspec

from gateway.api.errors import error_body, error_event
from gateway.api.translated import Translated, TranslatedExchange
from gateway.edge.contract import Deadlines, Listener
from gateway.edge.exchange import Exchange
from gateway.edge.http1 import (
    CHUNKED,
    HEADER_BYTES_MAX,
    BodyEnd,
    FramingError,
    HeadReader,
    RequestHead,
    dechunk,
    parse_request_head,
)
from gateway.edge.inner import InnerProtocol
from gateway.edge.refusing import TurnedAway, error_answer
from gateway.edge.targets import normalize_target
from gateway.errors import (
    BadRequest,
    HeaderTooLarge,
    InternalError,
    Overloaded,
    PayloadTooLarge,
    RequestTimeout,
    ServiceError,
    ShuttingDown,
    Unavailable,
)

logger = logging.getLogger("ropeway.edge")

_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
_PROCESSING = b"HTTP/1.1 102 Processing\r\n\r\n"
# By then a closed peer's reset has come, from this machine or this town; from farther away by the next probe.
_LOOKS_SECONDS = (0.01, 0.04)
_PROBE_SECONDS = 0.1
_PROBES_SPREAD = 20
"""A twentieth of what a client has waited is what it may be gone before that is found out, within these bounds."""
_TCP_CLOSED = 7
_DRAINING_SECONDS_MAX = 5.0
_PARTING_SECONDS = 0.5
"""An idle connection is closed so long after the gateway was told to stop: a request may be on its way."""
_RESET_ON_CLOSE = struct.pack("ii", 1, 0)
_CAN_LOOK = hasattr(socket, "TCP_INFO")
"""Elsewhere than on Linux a reset is met by the next write."""


class Inbound(msgspec.Struct, frozen=True, gc=False):
    """A complete request, as the edge hands it to the pipeline."""

    head: RequestHead
    path: str
    """Normalized: percent-decoded, one slash between segments, none at the end, no query."""
    body: bytes
    client: str


class Handler(Protocol):
    """What the edge asks of the gateway (`gateway.pipeline.Pipeline`)."""

    def owns(self, method: str, path: str) -> bool:
        """Whether requests for this path are served on the hot path."""
        ...

    def admit(self, head: RequestHead) -> None:
        """Refuse a request on its head alone. Raises ServiceError. Equal heads of one connection are admitted once."""
        ...

    def begin(self, inbound: Inbound) -> "Listener | Translated | Coroutine[Any, Any, Listener | Translated]":
        """Decide. Raises ServiceError; a coroutine may raise it too."""
        ...

    def answer_headers(self, head: RequestHead | None) -> bytes:
        """Header lines for answers that no worker gave (errors)."""
        ...


class EdgeLimits(NamedTuple):
    body_bytes_max: int
    connections_max: int
    receive_seconds_max: float
    """How long a client may take to send one request."""
    keep_alive_seconds: float
    header_bytes_max: int = HEADER_BYTES_MAX
    """Of a request's head; no more than that, and one read, waits behind a message that is being answered."""
    write_seconds_max: float = 60.0
    """How long a client may take nothing of what is written to it."""
    requests_bytes_max: int = 2**30
    """Of the bodies of all requests under way, from their first byte until they are answered."""


class Edge:
    """What the connections of one gateway share."""

    def __init__(self, handler: Handler, limits: EdgeLimits, deadlines: Deadlines) -> None:
        self.handler = handler
        self.limits = limits
        self.deadlines = deadlines
        self.connections: set[EdgeProtocol] = set()
        self.turned_away: set[TurnedAway] = set()
        self.on_error: Callable[[RequestHead | None, str, ServiceError, str], None] | None = None
        """Told of each answer that is an error, of whose request and path, by which client."""
        self.turned_away_count = 0
        self.requests_bytes = 0
        """Of the bodies of requests under way."""
        self.stalled_count = 0
        """Clients that were reset because they took nothing for too long."""

    def protocol(self, **uvicorn_arguments: Any) -> "EdgeProtocol | TurnedAway":
        """A factory in the shape of uvicorn's protocol classes."""
        if len(self.connections) < self.limits.connections_max:
            return self.connection(uvicorn_arguments)
        self.turned_away_count += 1
        refusal = Unavailable("The gateway has as many connections as it takes.")
        headers = self.handler.answer_headers(None) + b"connection: close\r\n"
        return TurnedAway(self.turned_away, error_answer(refusal, headers))

    def connection(self, uvicorn_arguments: dict[str, Any]) -> "EdgeProtocol":
        return EdgeProtocol(self, uvicorn_arguments)

    def stop(self) -> None:
        """Wait for nobody any longer: refuse what is unanswered, break off what has begun."""
        for connection in tuple(self.connections):
            connection.stop()
        for refused in tuple(self.turned_away):
            refused.stop()

    async def sweep(self, interval_seconds: float = 1.0) -> None:
        """Check every connection's deadlines, forever. One timer for all of them costs a request nothing."""
        loop = asyncio.get_running_loop()
        while True:
            now = self.deadlines.now = loop.time()
            for connection in tuple(self.connections):
                try:
                    connection.check(now)
                except Exception:
                    logger.exception("cannot check %r", connection)
            await asyncio.sleep(interval_seconds)


class State(Enum):
    IDLE = auto()
    READING = auto()
    BUSY = auto()
    INNER = auto()
    DRAINING = auto()


# Looked up for every message, and members of enumerations are looked up by a slow path.
_IDLE, _READING, _BUSY, _INNER, _DRAINING = State


class EdgeProtocol(asyncio.Protocol):
    """One client connection. Implements `exchange.Client`."""

    write: Callable[[bytes], None]
    """The transport's own."""

    def __init__(self, edge: Edge, uvicorn_arguments: dict[str, Any]) -> None:
        self._edge = edge
        self._arguments = uvicorn_arguments
        self._server_state = uvicorn_arguments["server_state"]
        self._transport: asyncio.Transport = None  # type: ignore[assignment]  # set before any other callback
        self._state = _IDLE
        self._buffer = b""
        self._heads = HeadReader(parse_request_head)
        self._head: RequestHead | None = None
        self._path = ""
        self._deadlines = edge.deadlines
        self._header_bytes_max = edge.limits.header_bytes_max
        self._body_bytes_max = edge.limits.body_bytes_max
        self._end: BodyEnd | None = None
        self._parts: list[bytes] = []
        self._received_bytes = 0
        self._held_bytes = 0
        """Of the body of the current message, as all connections together are bounded."""
        self._exchange: Exchange | TranslatedExchange | None = None
        self._deciding: asyncio.Future[Listener] | None = None
        self._inner: InnerProtocol | None = None
        self._inner_answered = False
        self._reading_paused = False
        self._writing_paused = False
        self._unsent_bytes = 0
        """Of what was written, when the sweep last looked."""
        self._taking_since = 0.0
        self._input_ended = False
        self._closing = False
        self._lost = False
        self._since = edge.deadlines.now
        """When the connection last changed state, by the sweep's clock."""
        self._client = ""
        self.http10 = False

    def __repr__(self) -> str:
        return f"<EdgeProtocol {self._client} {self._state.name}>"

    @property
    def state(self) -> State:
        return self._state

    @property
    def unsent_bytes(self) -> int:
        return self._transport.get_write_buffer_size()

    @property
    def received_bytes(self) -> int:
        """Of messages that are not whole, or wait for their turn."""
        return len(self._buffer) + sum(map(len, self._parts))

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self.write = self._transport.write
        peer = transport.get_extra_info("peername")
        self._client = peer[0] if isinstance(peer, tuple) else ""
        self._server_state.connections.add(self)
        self._edge.connections.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._server_state.connections.discard(self)
        self._edge.connections.discard(self)
        self._closing = self._lost = True
        self._let_go()
        if self._deciding is not None:
            self._deciding.cancel()
        if self._exchange is not None:
            self._exchange.client_gone()
            self._exchange = None
        if self._inner is not None:
            self._inner.connection_lost(exc)
            self._inner = None

    def eof_received(self) -> bool:
        self._input_ended = True
        if self._state is _BUSY:
            self._probe(asyncio.get_running_loop().time())
            return True
        return self._state is _INNER and self._end is not None and self._end.done

    def data_received(self, data: bytes) -> None:
        state = self._state
        if state is _READING:
            self._receive_body(data)
        elif state is _INNER and self._end is not None and not self._end.done:
            self._feed_inner(data)
        elif state is not _DRAINING:
            if self._buffer:
                data = self._buffer + data
            elif state is _IDLE:
                self._since = self._deadlines.now
            self._buffer = data
            if state is _IDLE and not self._writing_paused:
                self._next_message()
            if len(self._buffer) > self._header_bytes_max:
                self._reading_paused = True
                self._transport.pause_reading()

    def pause_writing(self) -> None:
        self._writing_paused = True
        if self._exchange is not None:
            self._exchange.pause()
        if self._inner is not None:
            self._inner.pause_writing()

    def resume_writing(self) -> None:
        self._writing_paused = False
        if self._exchange is not None:
            self._exchange.resume()
        if self._inner is not None:
            self._inner.resume_writing()
        if self._buffer and self._state is _IDLE:
            asyncio.get_running_loop().call_soon(self._resume_messages)

    def shutdown(self) -> None:
        """uvicorn stops: finish the current message, or one that is just coming, then close."""
        self._closing = True
        if self._state is _IDLE:
            asyncio.get_running_loop().call_later(_PARTING_SECONDS, self._part)
        elif self._state is _DRAINING:
            self._transport.close()
        elif self._state is _INNER and self._inner is not None:
            self._inner.shutdown()

    def _part(self) -> None:
        if self._state is _IDLE and not self._buffer:
            self._transport.close()

    def stop(self) -> None:
        """The time for finishing is over."""
        self._closing = True
        if self._exchange is not None:
            self._exchange.stop()
        elif self._deciding is not None:
            self._deciding.cancel()
            self.answer_error(ShuttingDown("The gateway is stopping: try again."))
        elif self._state is _READING:
            self._refuse(ShuttingDown("The gateway is stopping: try again."))
        elif self._state is _INNER and self._inner is not None:
            self._refuse_inner(ShuttingDown("The gateway is stopping: try again."))
        else:
            self._transport.close()

    # Receiving

    def _next_message(self) -> None:
        """Read a head from the buffer, if one is there, and choose who serves the message."""
        buffer = self._buffer
        if buffer.startswith(b"\r\n"):
            buffer = self._buffer = buffer.lstrip(b"\r\n")
        end = buffer.find(b"\r\n\r\n")
        if not 0 <= end <= self._header_bytes_max:
            if len(buffer) > self._header_bytes_max:
                self._refuse(HeaderTooLarge(self._header_bytes_max))
            return
        try:
            head = self._head = self._heads.read(buffer[:end])
            route = head.notes.get("route")
            if route is None:
                route = head.notes["route"] = self._route_of(head)
            self._path, target, hot = route
            if target is not None:
                self._head = msgspec.structs.replace(head, target=target)
            self.http10 = head.http10
            self._since = self._deadlines.now
            start, length = end + 4, head.length
            if not hot:
                self._end = BodyEnd(length)
                self._begin_inner(buffer, start)
                return
            if length > self._body_bytes_max:
                raise PayloadTooLarge(self._body_bytes_max)
            if 0 <= length <= len(buffer) - start:
                # The common case: the whole message came with one read.
                stop = start + length
                self._buffer = buffer[stop:]
                self._hold(length)
                self._body_complete(buffer[start:stop])
            else:
                self._buffer = b""
                self._begin_reading(head, buffer[start:])
        except ServiceError as error:
            self._refuse(error)
        except Exception:
            logger.exception("the edge failed")
            self._refuse(InternalError())

    def _route_of(self, head: RequestHead) -> tuple[str, bytes | None, bool]:
        """(path, target where it must be written otherwise, whether the hot path serves it)."""
        target, path = normalize_target(head.target)
        hot = self._edge.handler.owns(head.method.decode("latin-1"), path)
        if hot:
            self._edge.handler.admit(head)
        return path, None if target == head.target else target, hot

    def _begin_reading(self, head: RequestHead, rest: bytes) -> None:
        self._end = BodyEnd(head.length)
        self._state = _READING
        self._parts = []
        self._received_bytes = 0
        if head.expects_continue and head.length and not rest:
            self._transport.write(_CONTINUE)
        self._receive_body(rest)

    def _receive_body(self, data: bytes) -> None:
        assert self._end is not None  # noqa: S101
        try:
            taken = 0 if self._end.done else self._end.feed(data)
        except FramingError as error:
            self._refuse(BadRequest(f"Malformed request body: {error}."))
            return
        self._received_bytes += taken
        if self._received_bytes > self._body_bytes_max:
            self._refuse(PayloadTooLarge(self._body_bytes_max))
            return
        try:
            self._hold(taken)
        except ServiceError as error:
            self._refuse(error)
            return
        if taken:
            self._parts.append(data if taken == len(data) else data[:taken])
        self._buffer = data[taken:]
        if self._end.done:
            parts, self._parts = self._parts, []
            self._body_complete(parts[0] if len(parts) == 1 else b"".join(parts))

    def _hold(self, taken_bytes: int) -> None:
        """Account for a part of a body. Raises Overloaded where there is no room for it."""
        edge = self._edge
        self._held_bytes += taken_bytes
        edge.requests_bytes += taken_bytes
        if edge.requests_bytes > edge.limits.requests_bytes_max:
            raise Overloaded("The gateway holds as many bytes of requests as it takes.")

    def _let_go(self) -> None:
        self._edge.requests_bytes -= self._held_bytes
        self._held_bytes = 0

    def _body_complete(self, body: bytes) -> None:
        head = self._head
        assert head is not None  # noqa: S101
        self._state = _BUSY
        try:
            if head.length == CHUNKED:
                body = dechunk(body)
            listener = self._edge.handler.begin(Inbound(head, self._path, body, self._client))
        except ServiceError as error:
            self.answer_error(error)
            return
        except FramingError:
            # Whoever reads it otherwise has another message behind it.
            self._refuse(BadRequest("Malformed chunked request body."))
            return
        except Exception:
            logger.exception("the pipeline failed")
            self.answer_error(InternalError())
            return
        if isinstance(listener, CoroutineType):
            self._deciding = asyncio.ensure_future(listener)
            self._deciding.add_done_callback(self._decided)
        else:
            self._start(listener)  # type: ignore[arg-type]  # what is no coroutine is a listener

    def _decided(self, deciding: "asyncio.Future[Listener]") -> None:
        self._deciding = None
        if deciding.cancelled():
            return
        error = deciding.exception()
        if error is None:
            self._start(deciding.result())
        elif isinstance(error, ServiceError):
            self.answer_error(error)
        else:
            logger.error("the pipeline failed", exc_info=error)
            self.answer_error(InternalError())

    def _start(self, listener: Listener | Translated) -> None:
        kind = TranslatedExchange if isinstance(listener, Translated) else Exchange
        exchange = kind(self, listener, self._edge.deadlines)  # type: ignore[arg-type]  # each its own
        if self._lost:
            exchange.client_gone()
            return
        self._exchange = exchange
        if self._writing_paused:
            # The client has not read its previous answer yet.
            exchange.pause()
        exchange.start()

    def _probe(self, since: float) -> None:
        """Have a client whose input has ended say whether it still listens: soon, and again and again, but less often
        the longer it waits."""
        if self._transport.is_closing():
            return
        loop = asyncio.get_running_loop()
        gap_seconds = min(max(_PROBE_SECONDS, (loop.time() - since) / _PROBES_SPREAD), 1.0)
        loop.call_later(gap_seconds, self._probe, since)
        self._look()
        self._speak()
        for seconds in _LOOKS_SECONDS:
            loop.call_later(seconds, self._look)

    def _speak(self) -> None:
        if self._state is not _BUSY or self._transport.is_closing():
            return
        if self._exchange is not None and not self._exchange.unanswered:
            self._exchange.probe()
        elif not self.http10:
            self._transport.write(_PROCESSING)

    def _look(self) -> None:
        """Leave a client that has answered with a reset. Nobody else tells: its input is not read any more."""
        if self._state is not _BUSY or self._transport.is_closing():
            return
        if not _CAN_LOOK:
            self._speak()
        elif self._tcp_state() == _TCP_CLOSED:
            self._transport.abort()

    def _tcp_state(self) -> int:
        opened = self._transport.get_extra_info("socket")
        state: int = opened.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0]
        return state

    # exchange.Client

    def connection_header(self) -> bytes:
        if self._head is None or self._closing or not self._head.keep_alive:
            return b"connection: close\r\n"
        return b"connection: keep-alive\r\n" if self.http10 else b""

    def answer_complete(self, keep_alive: bool) -> None:
        self._exchange = None
        assert self._head is not None  # noqa: S101
        self._message_done(keep_alive and self._head.keep_alive)

    def answer_error(self, error: ServiceError) -> None:
        """Answer the current message, whose body has been read, with an error object."""
        self._exchange = None
        keep_alive = self._head is not None and self._head.keep_alive and not error.closes_connection
        self._closing |= not keep_alive
        self._write_error(error)
        self._message_done(keep_alive)

    def error_event(self, error: ServiceError) -> bytes:
        return error_event(self._path, error)

    def abort(self, reset: bool) -> None:
        self._exchange = None
        if reset:
            self._reset()
        else:
            # What has been written (an error event, perhaps) should still arrive. The body's end does not.
            self._transport.close()

    def _reset(self) -> None:
        opened = self._transport.get_extra_info("socket")
        opened.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)
        self._transport.abort()

    def _refuse(self, error: ServiceError) -> None:
        """Answer with an error and close: where the message ends is not known, or not worth reading for."""
        self._parts = []
        self._buffer = b""
        self._closing = True
        self._let_go()
        self._write_error(error)
        self._drain()

    def _drain(self) -> None:
        """Close, but read on for a while: bytes that meet a closed socket destroy the answer on its way."""
        self._state = _DRAINING
        self._since = self._deadlines.now
        self._resume_reading()
        if self._input_ended or self._transport.is_closing():
            self._transport.close()
        elif self._transport.can_write_eof():
            self._transport.write_eof()

    def _write_error(self, error: ServiceError) -> None:
        if self._transport.is_closing():
            return
        headers = self._edge.handler.answer_headers(self._head) + self.connection_header()
        path = self._head.path.decode("latin-1") if self._head is not None else ""
        if self._edge.on_error is not None:
            self._edge.on_error(self._head, path, error, self._client)
        self._transport.write(error_answer(error, headers, error_body(path, error)))

    def _message_done(self, keep_alive: bool) -> None:
        self._head = None
        self._end = None
        self._let_go()
        self._state = _IDLE
        self._since = self._deadlines.now
        if not keep_alive or self._closing or (self._input_ended and not self._buffer):
            self._transport.close()
            return
        if self._reading_paused:
            self._resume_reading()
        if self._buffer and not self._writing_paused:
            # From the loop, not from here: a long pipeline must not become a deep stack.
            asyncio.get_running_loop().call_soon(self._resume_messages)

    def _resume_messages(self) -> None:
        if self._state is _IDLE and not self._writing_paused and not self._transport.is_closing():
            self._next_message()
            self._resume_reading()
            half = self._state is _READING or (self._state is _IDLE and b"\r\n\r\n" not in self._buffer)
            if self._input_ended and half:
                # What follows the last answer is half a message, and its other half will not come.
                self._transport.close()

    def _resume_reading(self) -> None:
        if (
            self._reading_paused
            and len(self._buffer) <= self._edge.limits.header_bytes_max
            and not self._transport.is_closing()
        ):
            self._reading_paused = False
            self._transport.resume_reading()

    # The inner protocol

    def _begin_inner(self, buffer: bytes, head_bytes: int) -> None:
        if self._inner is None:
            self._inner = InnerProtocol(**self._arguments)
            self._inner.answer_sent = self._inner_answer_sent
            self._inner.connection_made(self._transport)
            # uvicorn would otherwise count, and shut down, the connection twice.
            self._server_state.connections.discard(self._inner)
            if self._writing_paused:
                self._inner.pause_writing()
        self._state = _INNER
        self._inner_answered = False
        self._buffer = b""
        self._inner.data_received(buffer[:head_bytes])
        if self._closing and self._inner.cycle is not None:
            self._inner.cycle.keep_alive = False
        self._feed_inner(buffer[head_bytes:])

    def _feed_inner(self, data: bytes) -> None:
        assert self._end is not None  # noqa: S101
        assert self._inner is not None  # noqa: S101
        try:
            taken = 0 if self._end.done else self._end.feed(data)
        except FramingError as error:
            self._refuse_inner(BadRequest(f"Malformed request body: {error}."))
            return
        if taken:
            self._inner.data_received(data[:taken])
        self._buffer = data[taken:]
        self._inner_done()

    def _refuse_inner(self, error: ServiceError) -> None:
        """As `_refuse`, where the application may be answering already."""
        assert self._inner is not None  # noqa: S101
        cycle, self._closing = self._inner.cycle, True
        if cycle is None or not cycle.response_started:
            self._write_error(error)
        if cycle is not None:
            cycle.disconnected = True
            cycle.message_event.set()
        self._drain()

    def _inner_answer_sent(self) -> None:
        self._inner_answered = True
        self._inner_done()

    def _inner_done(self) -> None:
        if self._state is _INNER and self._inner_answered and self._end is not None and self._end.done:
            keep_alive = self._head is not None and self._head.keep_alive and not self._transport.is_closing()
            self._message_done(keep_alive)

    # Deadlines

    def check(self, now: float) -> None:
        """Called by the sweep."""
        limits = self._edge.limits
        if self._is_stalled(now):
            self._edge.stalled_count += 1
            self._reset()
        elif self._exchange is not None:
            self._exchange.check(now)
        elif self._state is _READING or (self._state is _IDLE and self._buffer):
            if now - self._since > limits.receive_seconds_max:
                self._refuse(RequestTimeout("The request did not arrive in time."))
        elif self._state is _INNER and self._end is not None and not self._end.done:
            if now - self._since > limits.receive_seconds_max:
                self._refuse_inner(RequestTimeout("The request did not arrive in time."))
        elif self._state is _IDLE and now - self._since > limits.keep_alive_seconds:
            self._transport.close()
        elif self._state is _DRAINING and now - self._since > _DRAINING_SECONDS_MAX:
            self._transport.abort()
        if self._reading_paused and self._state is _BUSY:
            # What is not read does not tell that it has ended.
            self._look()

    def _is_stalled(self, now: float) -> bool:
        """Whether the client has taken nothing for too long of what it is owed."""
        unsent = self.unsent_bytes
        if unsent != self._unsent_bytes or not unsent:
            self._unsent_bytes, self._taking_since = unsent, now
            return False
        return now - self._taking_since > self._edge.limits.write_seconds_max
