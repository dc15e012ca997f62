"""One client request and the one upstream request it causes, from the decision to the last byte.

The rules of the file:

* The client's status line is written when the worker's has been read, never before.
* Until then a failed attempt may be repeated, on this worker or another; afterwards never. What follows from which
  failure stands in one table (`gateway.reliability.failures`), and the listener goes by it.
* What the worker sends is what the client gets. If the worker dies midway the client sees its bytes, then (in an event
  stream, between two chunks) an error event, then an aborted body: never a normal end.
* When the client leaves, the worker's connection is dropped in the same turn of the loop.
"""

import asyncio
import logging

from gateway.edge.answer_head import brings_events, forwarded_lines
from gateway.edge.contract import Attempt, Client, Deadlines, Ending, Listener, Patience
from gateway.edge.hedge import Hedge
from gateway.edge.http1 import (
    CHUNKED,
    UNTIL_CLOSE,
    FramingError,
    ResponseHead,
    take_chunks,
)
from gateway.edge.upstream import UpstreamConnection
from gateway.errors import InternalError, ServiceError
from gateway.first_token import FirstToken
from gateway.reliability.failures import (
    BODY_CUT,
    BODY_MALFORMED,
    CONNECT_REFUSED,
    CONNECT_TIMED_OUT,
    CONNECTION_LOST,
    FAILED_STATUS_MIN,
    FIRST_BYTE_TIMEOUT,
    GATEWAY_FAULT,
    HEAD_MALFORMED,
    IDLE_TIMEOUT,
    SHUTTING_DOWN,
    STOPPED_MIDWAY,
    TIME_OVER,
    TIME_OVER_MIDWAY,
    Blame,
    Failure,
    Retry,
    of_status,
)
from gateway.usage import UsageStripper

logger = logging.getLogger("ropeway.edge")

CHUNK_BYTES_MAX = 64 * 1024 * 1024
"""Of a worker's chunks where these are made anew, and so come to the client whole."""
_TAIL_BYTES = 4096
_LAST_CHUNK = b"0\r\n\r\n"
_COMMENT = b":\n\n"
# As it stands on the wire: bare where we chunk the body ourselves, before a chunk's line end where the worker does.
_EVENT_ENDS = (b"\n\n", b"\r\n\r\n", b"\r\r", b"\n\n\r\n", b"\r\n\r\n\r\n", b"\r\r\r\n")


# Members of enumerations are looked up by a slow path.
_COMPLETE = Ending.COMPLETE
_NO, _SAME, _SUSPECT = Retry.NO, Retry.SAME, Blame.SUSPECT
_FINAL = (TIME_OVER, SHUTTING_DOWN)
"""Nobody may answer after these."""

_BEFORE_BODY = {
    BODY_CUT: CONNECTION_LOST,
    BODY_MALFORMED: HEAD_MALFORMED,
    IDLE_TIMEOUT: FIRST_BYTE_TIMEOUT,
    TIME_OVER_MIDWAY: TIME_OVER,
    STOPPED_MIDWAY: SHUTTING_DOWN,
}
"""What ends an answer that has begun is something else where the client has got nothing of it."""


class Exchange:
    """Implements `upstream.Receiver`."""

    __slots__ = (
        "_answer_head",
        "_attempt",
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
        "_hedge",
        "_last_chunk",
        "_listener",
        "_paused",
        "_previous_chunk",
        "_probed_bytes",
        "_rechunk",
        "_silent_since",
        "_stripper",
        "_timer",
        "_undelivered",
    )

    def __init__(self, client: Client, listener: Listener, deadlines: Deadlines) -> None:
        self._client = client
        self._listener = listener
        self._attempt: Attempt = listener.attempt
        self._deadlines = deadlines
        self._connection: UpstreamConnection | None = None
        self._connecting: asyncio.Task[None] | None = None
        self._head: ResponseHead | None = None
        self._body_bytes = self._checked_bytes = 0
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
        """Of the body, when the client was last probed; none before."""
        self._paused = False
        self._ended = False
        self._silent_since = 0.0
        self._hedge: Hedge | None
        """Another worker that is asked as well, or will be soon."""
        self._timer: asyncio.TimerHandle | None
        """Of the request's own time."""
        self._hedge = self._timer = None
        if listener.patience is not None:
            self._limit(listener.patience())

    def _limit(self, patience: Patience) -> None:
        if patience.total_seconds is not None:
            self._timer = asyncio.get_running_loop().call_later(patience.total_seconds, self._fail, TIME_OVER_MIDWAY)
        if patience.hedge_seconds is not None:
            self._hedge = Hedge(self, patience.hedge_seconds)

    def start(self, fresh: bool = False) -> None:
        """Make an attempt, on a new connection if `fresh`."""
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
            self._failed_before_answer(CONNECT_TIMED_OUT if isinstance(error, TimeoutError) else CONNECT_REFUSED)
            return
        except Exception:
            logger.exception("cannot connect to a worker")
            self._connecting = None
            self._report_broken(GATEWAY_FAULT)
            self._refuse(InternalError())
            return
        self._connecting = None
        if self._ended:
            connection.abort()
        else:
            self._send(connection)

    # upstream.Receiver

    def response_complete(self, head: ResponseHead, body: bytes) -> None:
        if head.status >= FAILED_STATUS_MIN and self._goes_elsewhere(head):
            return
        if self._hedge is not None:
            self._drop_hedge()
        self._head, self._last_chunk, self._body_bytes = head, body, len(body)
        # It may be serving another request already: what the client does from here on is not its concern.
        self._connection = None
        if body:
            self._report_first_byte()
        self._client.write(self._head_to_send(head) + body)
        self._end(_COMPLETE)
        self._client.answer_complete(True)

    def response_started(self, head: ResponseHead, body_follows: bool) -> None:
        if head.status >= FAILED_STATUS_MIN and self._goes_elsewhere(head):
            return
        self._head = head
        if head.status == 200 and self._is_event_stream():
            self._first_token = FirstToken(head.length == CHUNKED)
        answer = self._head_to_send(head)
        if self._hedge is not None or (body_follows and not self._rechunk and self._undelivered is None):
            # One write for an answer that came in one read; and another worker may still be the first to say something.
            self._answer_head = answer
        else:
            self._client.write(answer)

    def _goes_elsewhere(self, head: ResponseHead) -> bool:
        """Whether a worker's error is not passed on, because another attempt is made."""
        failure = of_status(head.status)
        if failure is None:
            return False
        second = self._running_hedge if failure.retry is not _NO else None
        if second is None and not self._prepared(failure):
            return False
        connection, self._connection = self._connection, None
        if connection is not None and connection.is_busy:
            connection.abort()
        if second is not None:
            self._leave_to(second, failure)
        else:
            self._try_again(failure)
        return True

    def _head_to_send(self, head: ResponseHead) -> bytes:
        forwarded = head.notes.get("forwarded")
        if forwarded is None:
            forwarded = head.notes["forwarded"] = forwarded_lines(head)
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
        if self._hedge is not None:
            self._drop_hedge()
        if not self._begun and data:
            self._look_for_the_beginning(data)
        self._body_bytes += len(data)
        if done:
            self._connection = None
            if not data and self._is_cut_off():
                self._fail(BODY_CUT)
                return
            # Engines write usage, `[DONE]` and the end of the chunks one by one: all three are the tail.
            self._last_chunk += data
        else:
            self._previous_chunk, self._last_chunk = self._last_chunk, data
        if self._rechunk or self._undelivered is not None or self._stripper is not None:
            try:
                self._write_reframed(data, done)
            except FramingError:
                self._fail(BODY_MALFORMED)
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
            if len(self._undelivered) > CHUNK_BYTES_MAX:
                raise FramingError("a chunk too large to be made anew")
        if self._stripper is not None:
            data = self._stripper.feed(data)
            data += self._stripper.end() if done else b""
        if self._rechunk:
            data = b"%x\r\n%b\r\n" % (len(data), data) if data else b""
            data += _LAST_CHUNK if done else b""
        if data or done:
            answer_head, self._answer_head = self._answer_head, b""
            if answer_head or data:
                self._client.write(answer_head + data)

    def upstream_failed(self, failure: Failure, reason: str) -> None:
        # The connection is gone, but still says where the client stands.
        self._fail(failure)

    # Failures

    def _fail(self, failure: Failure) -> None:
        """Whatever is under way has failed, or is given up."""
        connection = self._connection
        self._drop_attempt()
        if self.unanswered:
            self._failed_before_answer(_BEFORE_BODY.get(failure, failure))
        elif not self._ended:
            self._broke_midway(failure, connection)

    def _failed_before_answer(self, failure: Failure) -> None:
        if self._ended:
            return
        second = self._running_hedge if failure not in _FINAL else None
        if second is not None:
            self._leave_to(second, failure)
        elif self._prepared(failure):
            self._try_again(failure)
        else:
            self._refuse(failure.error())

    def _prepared(self, failure: Failure) -> bool:
        """Whether another attempt is ready to be made."""
        try:
            return self._listener.failed(failure)
        except Exception:
            logger.exception("cannot decide on another attempt")
            return False

    def _try_again(self, failure: Failure) -> None:
        if self._hedge is not None:
            self._drop_hedge()
        self._forget_answer()
        self._attempt = self._listener.attempt
        # Where one kept-alive connection was stale, so may be others; and this attempt had better tell the truth.
        self.start(fresh=failure.retry is _SAME or failure.blame is _SUSPECT)

    def _forget_answer(self) -> None:
        """Of which the client has got nothing."""
        self._head = self._first_token = self._undelivered = self._stripper = None
        self._answer_head = self._previous_chunk = self._last_chunk = b""
        self._rechunk = self._begun = False
        self._body_bytes = 0

    def _broke_midway(self, failure: Failure, connection: UpstreamConnection | None) -> None:
        self._report_broken(failure)
        told = self._event_may_follow(connection)
        if told:
            self._write_event(self._client.error_event(failure.error()))
        self._end(Ending.STOPPED if failure is STOPPED_MIDWAY else Ending.UPSTREAM_BROKE)
        self._client.abort(reset=self._unframed and not told)

    # Hedging

    @property
    def _running_hedge(self) -> Hedge | None:
        return self._hedge if self._hedge is not None and self._hedge.running else None

    def second(self) -> Listener | None:
        """Whom to ask as well, if the time for it has come and the answer has not."""
        try:
            return None if self._ended else self._listener.hedge()
        except Exception:
            logger.exception("cannot decide on a second worker")
            return None

    @property
    def connect_seconds(self) -> float:
        return self._deadlines.connect_seconds

    def hedge_answers(self, hedge: Hedge) -> None:
        """The second worker is the first to say something."""
        self._drop_attempt()
        self._end_leg(self._listener)
        self._take_over(hedge)

    def _leave_to(self, hedge: Hedge, failure: Failure) -> None:
        """The first worker has failed, and is not missed: the second is at it."""
        self._report_broken(failure)
        self._end_leg(self._listener)
        self._take_over(hedge)

    def hedge_over(self, failure: Failure | None = None) -> None:
        """There is no second worker (any longer)."""
        hedge, self._hedge = self._hedge, None
        if hedge is not None and failure is not None and hedge.listener is not None:
            self._report_broken(failure, hedge.listener)
            self._end_leg(hedge.listener)
        if self._answer_head:
            # Nobody can overtake it any more.
            self._client.write(self._answer_head)
            self._answer_head = b""

    def _take_over(self, hedge: Hedge) -> None:
        """From here on there is one worker again, the second."""
        self._hedge = None
        self._forget_answer()
        assert hedge.listener is not None  # noqa: S101
        self._listener, self._attempt = hedge.listener, hedge.listener.attempt
        self._silent_since = self._deadlines.now
        connection = hedge.part()
        if connection is None:
            self.start(fresh=True)
            return
        self._connection = connection
        if connection.is_busy:
            connection.hand_over(self)
            if self._paused:
                connection.pause()
        if hedge.head is not None:
            self.response_started(hedge.head, False)

    def _drop_hedge(self, ending: Ending = Ending.OVERTAKEN) -> None:
        hedge, self._hedge = self._hedge, None
        if hedge is not None:
            hedge.drop()
            if hedge.listener is not None:
                self._end_leg(hedge.listener, ending)

    def _end_leg(self, listener: Listener, ending: Ending = Ending.OVERTAKEN) -> None:
        try:
            listener.ended(ending, 0, 0, b"")
        except Exception:
            logger.exception("cannot account for an exchange")

    # Where the client stands

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
            readable = notes["events"] = brings_events(self._head.headers)
        return readable

    def _ends_event(self) -> bool:
        """Whether the last event that the client got is complete."""
        tail = self._tail()
        return self._stripper is not None or not tail or tail.endswith(_EVENT_ENDS)

    # The client's side

    @property
    def unanswered(self) -> bool:
        """Whether nothing has been written to the client yet."""
        return self._head is None or bool(self._answer_head)

    def client_gone(self) -> None:
        """The client closed its connection."""
        self._drop_attempt()
        if self._hedge is not None:
            self._drop_hedge(Ending.CLIENT_GONE)
        self._end(Ending.CLIENT_GONE)

    def probe(self) -> None:
        """Write to a client that may be gone, if the answer has not done so since the last time.

        In an event stream that is a comment; other answers leave no room for one.
        """
        spoken = self._paused or self._probed_bytes not in (-1, self._body_bytes)
        self._probed_bytes = self._body_bytes
        if not spoken and self._connection is not None and self._event_may_follow(self._connection):
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
        if limit is not None and now - self._silent_since >= limit:
            self._fail(IDLE_TIMEOUT if self._head is not None else FIRST_BYTE_TIMEOUT)

    # Ends

    def stop(self) -> None:
        """The gateway stops, and waits no longer: what is unanswered is refused, what has begun breaks off."""
        self._fail(STOPPED_MIDWAY)

    def _drop_attempt(self) -> None:
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
        if self._timer is not None:
            self._timer.cancel()
        if self._hedge is not None:
            self._drop_hedge()
        head_status = self._head.status if self._head is not None else 0
        try:
            tail = self._tail() if self._stripper is None else self._stripper.stripped or self._tail()
            self._listener.ended(ending, status or head_status, self._body_bytes, tail)
        except Exception:
            # A fault in the accounts must not cost the client its answer.
            logger.exception("cannot account for an exchange")

    def _report_broken(self, failure: Failure, listener: Listener | None = None) -> None:
        try:
            (listener or self._listener).broke(failure)
        except Exception:
            logger.exception("cannot account for a failure")

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
