"""One client request and the one upstream request it causes, from the decision to the last byte.

The rules of the file:

* The client's status line is written when the worker's has been read, never before.
* Until then a failed attempt may be repeated, on this worker or another; afterwards never.
* What the worker sends is what the client gets. If the worker dies midway the client sees its bytes, then (in an event
  stream, between two chunks) an error event, then an aborted body: never a normal end.
* When the client leaves, the worker's connection is dropped in the same turn of the loop.
"""

import asyncio
import logging
from enum import StrEnum
from typing import Protocol

import orjson

from gateway.edge.http1 import (
    CHUNKED,
    HOP_BY_HOP,
    UNTIL_CLOSE,
    FramingError,
    Headers,
    ResponseHead,
    forwardable,
    status_line,
    take_chunks,
)
from gateway.edge.upstream import UpstreamConnection, UpstreamPool
from gateway.errors import InternalError, ServiceError, UpstreamFailed, UpstreamTimeout, UpstreamUnavailable
from gateway.first_token import FirstToken
from gateway.usage import UsageStripper

logger = logging.getLogger("ropeway.edge")

ATTEMPTS_MAX = 3
_TAIL_BYTES = 4096
_LAST_CHUNK = b"0\r\n\r\n"
_COMMENT = b":\n\n"
# As it stands on the wire: bare where we chunk the body ourselves, before a chunk's line end where the worker does.
_EVENT_ENDS = (b"\n\n", b"\r\n\r\n", b"\r\r", b"\n\n\r\n", b"\r\n\r\n\r\n", b"\r\r\r\n")

# The gateway writes framing itself; `x-request-id` of the worker is the id we gave it, not the client's.
_DROPPED_FROM_ANSWERS = HOP_BY_HOP | {b"content-length", b"x-request-id"}


class Ending(StrEnum):
    """How an exchange ended."""

    COMPLETE = "complete"
    CLIENT_GONE = "client_gone"
    UPSTREAM_BROKE = "upstream_broke"
    """After the first byte: the client got an error event or an aborted body."""
    REFUSED = "refused"
    """Before the first byte: the client got an error object."""

    # Enum's own hash is a Python function, and endings are counted by key.
    __hash__ = str.__hash__


# Members of enumerations are looked up by a slow path.
_COMPLETE = Ending.COMPLETE


class Attempt(Protocol):
    """A decision to act upon: where to send which bytes, and what to add to the answer."""

    connections: UpstreamPool
    request_parts: list[bytes]
    answer_headers: bytes
    """Complete header lines."""
    reads_head: bool
    """Whether `Listener.answered` is to be called."""
    strips_usage: bool
    """Whether the client did not ask for the usage that its event stream will bring."""


class Listener(Protocol):
    """Who accounts for an exchange (`gateway.journey.Journey`)."""

    @property
    def attempt(self) -> Attempt: ...

    def answered(self, head: ResponseHead) -> None:
        """The head of the answer that the client gets has come."""
        ...

    def first_byte(self) -> None:
        """The answer has begun: with its first byte, or in an event stream with the first event that says something."""
        ...

    def retry(self, reason: str, elsewhere: bool) -> bool:
        """Prepare another attempt in `attempt`; False when there is none left to make."""
        ...

    def ended(self, ending: Ending, status: int, body_bytes: int, tail: bytes) -> None:
        """Called exactly once. `tail` is the end of the body as it stood on the wire, or what was taken out of it."""
        ...


class Client(Protocol):
    """The client's side of the connection (`gateway.edge.server.EdgeProtocol`)."""

    http10: bool

    def connection_header(self) -> bytes:
        """The header line that says whether the connection stays open; empty where that goes without saying."""
        ...

    def write(self, data: bytes) -> None: ...
    def answer_complete(self, keep_alive: bool) -> None: ...
    def answer_error(self, error: ServiceError) -> None: ...

    def abort(self, reset: bool) -> None:
        """Close without ending the body. `reset`: where the end of the connection would be taken for the body's."""
        ...


class Exchange:
    """Implements `upstream.Receiver`."""

    __slots__ = (
        "_answer_head",
        "_attempt",
        "_attempts",
        "_begun",
        "_body_bytes",
        "_checked_bytes",
        "_client",
        "_connecting",
        "_connection",
        "_deadlines",
        "_ended",
        "_first_token",
        "_flowing",
        "_head",
        "_last_chunk",
        "_listener",
        "_paused",
        "_previous_chunk",
        "_probed_bytes",
        "_rechunk",
        "_silent_since",
        "_stripper",
        "_undelivered",
    )

    def __init__(self, client: Client, listener: Listener, deadlines: "Deadlines") -> None:
        self._client = client
        self._listener = listener
        self._attempt: Attempt = listener.attempt
        self._deadlines = deadlines
        self._connection: UpstreamConnection | None = None
        self._connecting: asyncio.Task[None] | None = None
        self._head: ResponseHead | None = None
        self._attempts = self._body_bytes = self._checked_bytes = 0
        self._previous_chunk = self._last_chunk = b""
        self._flowing = False
        """The head and the first token are out, and the rest is passed on as it is."""
        self._begun = False
        """The listener knows that the answer has begun."""
        self._first_token: FirstToken | None = None
        """Where that is not its first byte."""
        self._rechunk = False
        self._answer_head = b""
        """Held back until the first bytes of the body, which follow at once."""
        self._undelivered: bytes | None = None
        """The incomplete chunk, where chunks must be unpacked (chunked upstream, HTTP/1.0 client)."""
        self._stripper: UsageStripper | None = None
        """Where events are taken out of the answer."""
        self._probed_bytes = -1
        self._paused = False
        self._ended = False
        self._silent_since = 0.0

    def start(self, fresh: bool = False) -> None:
        """Make an attempt, on a new connection if `fresh`."""
        self._attempts += 1
        connection = None if fresh else self._attempt.connections.acquire()
        if connection is not None:
            self._send(connection)
        else:
            self._connecting = asyncio.ensure_future(self._connect())

    def _send(self, connection: UpstreamConnection) -> None:
        self._connection = connection
        self._silent_since = self._deadlines.now
        connection.send(self, self._attempt.request_parts)
        if self._paused:
            connection.pause()

    async def _connect(self) -> None:
        try:
            connection = await self._attempt.connections.connect(self._deadlines.connect_seconds)
        except OSError as error:
            self._connecting = None
            kind = "timed out" if isinstance(error, TimeoutError) else "refused"
            self._failed_before_answer(f"connection {kind}", elsewhere=True)
            return
        except Exception:
            logger.exception("cannot connect to a worker")
            self._connecting = None
            self._refuse(InternalError())
            return
        self._connecting = None
        if self._ended:
            connection.abort()
        else:
            self._send(connection)

    # upstream.Receiver

    def response_complete(self, head: ResponseHead, body: bytes) -> None:
        self._head, self._last_chunk, self._body_bytes = head, body, len(body)
        # It may be serving another request already: what the client does from here on is not its concern.
        self._connection = None
        if body:
            self._report_first_byte()
        self._client.write(self._head_to_send(head) + body)
        self._end(_COMPLETE)
        self._client.answer_complete(True)

    def response_started(self, head: ResponseHead, body_follows: bool) -> None:
        self._head = head
        if head.status == 200 and self._is_event_stream():
            self._first_token = FirstToken(head.length == CHUNKED)
        answer = self._head_to_send(head)
        if body_follows and not self._rechunk and self._undelivered is None:
            # One write for an answer that came in one read.
            self._answer_head = answer
        else:
            self._client.write(answer)

    def _head_to_send(self, head: ResponseHead) -> bytes:
        forwarded = head.notes.get("forwarded")
        if forwarded is None:
            forwarded = head.notes["forwarded"] = _forwarded(head)
        attempt = self._attempt
        if attempt.reads_head:
            self._report_answer(head)
        return b"".join((forwarded, attempt.answer_headers, self._framing(head), b"\r\n"))

    def _framing(self, head: ResponseHead) -> bytes:
        """The headers that say where our answer's body ends, and whether the connection does."""
        client, length = self._client, head.length
        if self._attempt.strips_usage and length < 0 and head.status == 200 and self._is_event_stream():
            return self._framing_of_stripped(length)
        if length >= 0:
            # These statuses have no body, and 204 must not state a length (RFC 9110 8.6).
            stated = b"" if head.status in (204, 304) else b"content-length: %d\r\n" % length
            return stated + client.connection_header()
        if client.http10:
            self._undelivered = b"" if length == CHUNKED else None
            return b"connection: close\r\n"
        self._rechunk = length == UNTIL_CLOSE
        return b"transfer-encoding: chunked\r\n" + client.connection_header()

    def _framing_of_stripped(self, length: int) -> bytes:
        """What is taken out changes the framing: chunks are unpacked, and made anew for those who know them."""
        self._stripper = UsageStripper()
        self._undelivered = b"" if length == CHUNKED else None
        if self._client.http10:
            return b"connection: close\r\n"
        self._rechunk = True
        return b"transfer-encoding: chunked\r\n" + self._client.connection_header()

    def response_body(self, data: bytes, done: bool) -> None:
        if self._flowing and not done:
            # A chunk in the middle of a stream: what costs here is paid for every token.
            self._body_bytes += len(data)
            self._previous_chunk, self._last_chunk = self._last_chunk, data
            self._client.write(data)
            return
        if not self._begun and data:
            self._look_for_the_beginning(data)
        self._body_bytes += len(data)
        if done:
            self._connection = None
            if not data and self._is_cut_off():
                self._broke_midway(None)
                return
            # Engines write usage, `[DONE]` and the end of the chunks one by one: all three are the tail.
            self._last_chunk += data
        else:
            self._previous_chunk, self._last_chunk = self._last_chunk, data
        if self._rechunk or self._undelivered is not None or self._stripper is not None:
            try:
                self._write_reframed(data, done)
            except FramingError:
                self._fail_midway(self._connection)
                return
        elif self._answer_head:
            answer_head, self._answer_head = self._answer_head, b""
            self._client.write(answer_head + data)
        elif data:
            self._client.write(data)
            self._flowing = self._begun
        if done:
            self._end(_COMPLETE)
            self._client.answer_complete(not (self._client.http10 and self._head_length() < 0))

    def _is_cut_off(self) -> bool:
        """Whether an answer whose end is that of the connection has not come to its own: nothing, or half of something.

        Where the end is that of an event or a document nobody can tell.
        """
        head = self._head
        if head is None or head.length != UNTIL_CLOSE or head.status != 200:
            return False
        if not self._body_bytes:
            return True
        if self._is_event_stream():
            incomplete = not self._ends_event() if self._stripper is None else self._stripper.holds
            return incomplete and not self._tail().rstrip().endswith(b"[DONE]")
        fields = dict(head.headers)
        is_json = fields.get(b"content-type", b"").lower().startswith(b"application/json")
        return is_json and b"content-encoding" not in fields and not self._tail().rstrip().endswith((b"}", b"]"))

    def _head_length(self) -> int:
        return self._head.length if self._head is not None else 0

    def _write_reframed(self, data: bytes, done: bool) -> None:
        if self._undelivered is not None:
            data, self._undelivered = take_chunks(self._undelivered + data)
        if self._stripper is not None:
            data = self._stripper.feed(data)
            data += self._stripper.end() if done else b""
        if not self._rechunk:
            if data:
                self._client.write(data)
            return
        if data:
            self._client.write(b"%x\r\n%b\r\n" % (len(data), data))
        if done:
            self._client.write(_LAST_CHUNK)

    def upstream_failed(self, reason: str, response_begun: bool, reused: bool) -> None:
        connection, self._connection = self._connection, None
        if self._head is not None and not self._answer_head:
            self._broke_midway(connection)
        elif response_begun:
            self._refuse(UpstreamFailed("The worker's answer was not valid HTTP."))
        else:
            # A kept-alive connection may have been closed under our request; that says nothing about the worker.
            self._failed_before_answer(reason, elsewhere=not reused)

    def _failed_before_answer(self, reason: str, elsewhere: bool) -> None:
        if self._ended:
            return
        try:
            again = self._attempts < ATTEMPTS_MAX and self._listener.retry(reason, elsewhere)
        except Exception:
            logger.exception("cannot decide on another attempt")
            self._refuse(InternalError())
            return
        if again:
            self._attempt = self._listener.attempt
            # Where one kept-alive connection was stale, so may be its neighbours.
            self.start(fresh=not elsewhere)
        else:
            self._refuse(UpstreamUnavailable("No worker could be reached for this request."))

    def _broke_midway(self, connection: UpstreamConnection | None) -> None:
        told = self._event_may_follow(connection)
        if told:
            message = "The worker broke off before the end of its answer."
            error = {"error": {"message": message, "type": "server_error", "param": None, "code": "upstream_failed"}}
            self._write_event(b"data: %b\n\n" % orjson.dumps(error))
        self._end(Ending.UPSTREAM_BROKE)
        self._client.abort(reset=self._unframed and not told)

    @property
    def _unframed(self) -> bool:
        """Whether the client takes the connection's end for the body's."""
        return self._client.http10 and self._head_length() < 0

    def _event_may_follow(self, connection: UpstreamConnection | None) -> bool:
        """Whether the client stands between two events, so that one of ours would not be read as a part of theirs."""
        between_chunks = self._rechunk or self._unframed or (connection is not None and connection.at_chunk_boundary)
        return between_chunks and self._is_event_stream() and self._ends_event()

    def _write_event(self, event: bytes) -> None:
        self._client.write(event if self._unframed else b"%x\r\n%b\r\n" % (len(event), event))

    def _is_event_stream(self) -> bool:
        """Whether the body is events that can be read: not where a worker compresses them, unasked."""
        assert self._head is not None  # noqa: S101
        notes = self._head.notes
        readable: bool | None = notes.get("events")
        if readable is None:
            readable, plain = False, True
            for name, value in self._head.headers:  # of every answer: cheaper than a dictionary of them
                if name == b"content-type":
                    readable = value[:17].lower() == b"text/event-stream"
                elif name == b"content-encoding":
                    plain = value == b"identity"
            notes["events"] = readable = readable and plain
        return readable

    def _ends_event(self) -> bool:
        """Whether the last event that the client got is complete."""
        tail = self._tail()
        return self._stripper is not None or not tail or tail.endswith(_EVENT_ENDS)

    # The client's side

    @property
    def unanswered(self) -> bool:
        """Whether nothing has been written to the client yet."""
        return self._head is None

    def client_gone(self) -> None:
        """The client closed its connection."""
        self._drop_upstream()
        self._end(Ending.CLIENT_GONE)

    def probe(self) -> None:
        """Write to a client that may be gone, if the answer has not done so since the last time.

        In an event stream that is a comment; other answers leave no room for one.
        """
        if self._paused or self._body_bytes != self._probed_bytes:
            self._probed_bytes = self._body_bytes
        elif self._connection is not None and self._event_may_follow(self._connection):
            self._write_event(_COMMENT)

    def pause(self) -> None:
        """The client reads slowly: stop reading from the worker."""
        self._paused = True
        if self._connection is not None:
            self._connection.pause()

    def resume(self) -> None:
        self._paused = False
        if self._connection is not None:
            self._connection.resume()

    # Deadlines

    def check(self, now: float) -> None:
        """Called about once a second: has the worker been silent for too long?"""
        if self._connection is None or self._paused or self._body_bytes != self._checked_bytes:
            # Chunks only add to the count: most of them come and go between two sweeps.
            self._silent_since, self._checked_bytes = now, self._body_bytes
            return
        limit = self._deadlines.first_byte_seconds if self._head is None else self._deadlines.idle_seconds
        if limit is None or now - self._silent_since < limit:
            return
        connection = self._connection
        if self._head is None:
            self._drop_upstream()
            self._refuse(UpstreamTimeout("The worker did not answer in time."))
        else:
            self._fail_midway(connection)

    # Ends

    def _fail_midway(self, connection: UpstreamConnection | None) -> None:
        """Give a begun answer up."""
        self._connection = None
        if connection is not None:
            connection.abort()
        self._broke_midway(connection)

    def _drop_upstream(self) -> None:
        connecting, self._connecting = self._connecting, None
        connection, self._connection = self._connection, None
        if connecting is not None:
            connecting.cancel()
        if connection is not None:
            connection.abort()

    def _refuse(self, error: ServiceError) -> None:
        if self._ended:
            return
        self._end(Ending.REFUSED, error.status)
        self._client.answer_error(error)

    def _tail(self) -> bytes:
        last = self._last_chunk
        if len(last) < _TAIL_BYTES:
            last = self._previous_chunk + last
        return last[-_TAIL_BYTES:]

    def _end(self, ending: Ending, status: int | None = None) -> None:
        if self._ended:
            return
        self._ended = True
        head_status = self._head.status if self._head is not None else 0
        try:
            tail = self._tail() if self._stripper is None else self._stripper.stripped or self._tail()
            self._listener.ended(ending, status or head_status, self._body_bytes, tail)
        except Exception:
            # A fault in the accounts must not cost the client its answer.
            logger.exception("cannot account for an exchange")

    def _report_answer(self, head: ResponseHead) -> None:
        try:
            self._listener.answered(head)
        except Exception:
            logger.exception("cannot account for an answer")

    def _look_for_the_beginning(self, data: bytes) -> None:
        if self._first_token is None or self._first_token.comes_with(data):
            self._begun = True
            self._report_first_byte()

    def _report_first_byte(self) -> None:
        try:
            self._listener.first_byte()
        except Exception:
            logger.exception("cannot account for a first byte")


class Deadlines:
    """How long an exchange may wait for what. `now` is the loop's time, refreshed by the edge's sweep."""

    __slots__ = ("connect_seconds", "first_byte_seconds", "idle_seconds", "now")

    def __init__(self, connect_seconds: float, first_byte_seconds: float | None, idle_seconds: float | None) -> None:
        self.connect_seconds = connect_seconds
        self.first_byte_seconds = first_byte_seconds
        self.idle_seconds = idle_seconds
        self.now = 0.0


def _forwarded(head: ResponseHead) -> bytes:
    """The status line and the header lines of a worker's answer that its client gets."""
    lines = [status_line(head.status)]
    for name, value in forwardable(head.headers, _DROPPED_FROM_ANSWERS):
        lines += (name, b": ", value, b"\r\n")
    if any(name == b"content-type" and value.lower().startswith(b"text/event-stream") for name, value in head.headers):
        lines.append(_stream_headers(head.headers))
    return b"".join(lines)


def _stream_headers(headers: Headers) -> bytes:
    """What keeps proxies in front of us from buffering an event stream, unless the worker has said it."""
    names = {name for name, _ in headers}
    lines = b""
    if b"cache-control" not in names:
        lines += b"cache-control: no-cache\r\n"
    if b"x-accel-buffering" not in names:
        lines += b"x-accel-buffering: no\r\n"
    return lines
