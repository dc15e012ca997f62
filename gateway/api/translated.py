"""An exchange whose client speaks another form than its worker.

It stands between the two: towards the exchange that does the work it is a client of HTTP/1.0, whose body comes as it
is; towards the client it writes the answer in the client's form. Whatever concerns the worker (attempts, deadlines, the
accounts) stays with the exchange within.
"""

import orjson

from gateway.api.answers import AnswerReader
from gateway.api.chats import ChatEvents, json_object
from gateway.api.errors import error_event, message_of
from gateway.api.forms import Asked, Stream
from gateway.edge.contract import Client, Deadlines, Listener
from gateway.edge.exchange import Exchange
from gateway.edge.http1 import HOP_BY_HOP, forwardable, status_line
from gateway.errors import ServiceError, UpstreamFailed

ANSWER_BYTES_MAX = 32 * 1024 * 1024
"""Of an answer that comes as a whole."""

_WRITTEN_ANEW = HOP_BY_HOP | {b"content-length", b"content-type"}


class Translated:
    """The journey of a request that was asked in another form."""

    __slots__ = ("asked", "input_tokens", "listener")

    def __init__(self, listener: Listener, asked: Asked, input_tokens: int) -> None:
        """`input_tokens`: as far as they are known before the worker says so."""
        self.listener = listener
        self.asked = asked
        self.input_tokens = input_tokens


class TranslatedExchange:
    """As `Exchange`, which it has within. Implements `exchange.Client` for it."""

    http10 = True

    def __init__(self, client: Client, translated: Translated, deadlines: Deadlines) -> None:
        self._client = client
        self._translated = translated
        self._form, self._request = translated.asked
        self._exchange = Exchange(self, translated.listener, deadlines)
        self._answer = AnswerReader()
        self._body: list[bytes] = []
        self._body_bytes = 0
        self._events: ChatEvents | None = None
        self._stream: Stream | None = None
        self._over = False
        self.start, self.pause, self.resume = self._exchange.start, self._exchange.pause, self._exchange.resume
        self.check, self.client_gone, self.stop = (
            self._exchange.check,
            self._exchange.client_gone,
            self._exchange.stop,
        )

    @property
    def unanswered(self) -> bool:
        return self._stream is None

    def probe(self) -> None:
        """Between two events there is room for a comment, always: only whole ones are written."""
        if self._stream is not None:
            self._write(b":\n\n")

    # exchange.Client

    def connection_header(self) -> bytes:
        return b""

    def write(self, data: bytes) -> None:
        begun = self._answer.head is not None
        body = self._answer.feed(data)
        if not begun and self._answer.head is not None:
            self._begin()
        if self._over or not body:
            return
        if self._stream is None:
            self._collect(body)
        elif self._events is not None:
            self._write(b"".join(map(self._stream.feed, self._events.feed(body))))

    def answer_complete(self, keep_alive: bool) -> None:
        if self._over:
            return
        self._over = True
        if self._stream is None or self._events is None:
            self._answer_whole()
            return
        self._write(b"".join(map(self._stream.feed, self._events.end())) + self._stream.end())
        if not self._client.http10:
            self._client.write(b"0\r\n\r\n")
        self._client.answer_complete(not self._client.http10)

    def answer_error(self, error: ServiceError) -> None:
        if not self._over:
            self._over = True
            self._client.answer_error(error)

    def error_event(self, error: ServiceError) -> bytes:
        return error_event("/v1/chat/completions", error)

    def abort(self, reset: bool) -> None:
        if self._over:
            return
        self._over = True
        message = "The worker broke off before the end of its answer."
        if self._stream is None:
            self._client.answer_error(UpstreamFailed(message))
        else:
            self._write(self._stream.failed(502, message))
            self._client.abort(reset=False)

    # Steps

    def _begin(self) -> None:
        head = self._answer.head
        events = self._answer.value(b"content-type").startswith(b"text/event-stream")
        if head is None or head.status != 200 or not events or self._form.stream is None:
            return
        self._stream = self._form.stream(self._request, self._translated.input_tokens)
        self._events = ChatEvents()
        framing = b"" if self._client.http10 else b"transfer-encoding: chunked\r\n"
        framing = framing or b"connection: close\r\n"
        stated = b"content-type: text/event-stream; charset=utf-8\r\n" + framing
        if not self._client.http10:
            stated += self._client.connection_header()
        self._client.write(self._head(head.status, stated))

    def _head(self, status: int, stated: bytes) -> bytes:
        """The worker's header lines, but for what is of the body; then `stated` and the empty line."""
        assert self._answer.head is not None  # noqa: S101
        lines = [status_line(status)]
        for name, value in forwardable(self._answer.head.headers, _WRITTEN_ANEW):
            lines.append(b"%b: %b\r\n" % (name, value))
            if name == b"x-request-id" and self._form.id_header:
                lines.append(b"%b: %b\r\n" % (self._form.id_header, value))
        return b"".join((*lines, stated, b"\r\n"))

    def _write(self, events: bytes) -> None:
        if events:
            self._client.write(events if self._client.http10 else b"%x\r\n%b\r\n" % (len(events), events))

    def _collect(self, body: bytes) -> None:
        self._body.append(body)
        self._body_bytes += len(body)
        if self._body_bytes > ANSWER_BYTES_MAX:
            self._over = True
            self._exchange.client_gone()
            self._client.answer_error(UpstreamFailed("The worker's answer is longer than can be translated."))

    def _answer_whole(self) -> None:
        head = self._answer.head
        document = json_object(b"".join(self._body))
        status = head.status if head is not None else 502
        try:
            if status == 200 and document is not None:
                answer = self._form.answer(document, self._request)
            elif status == 200:
                raise UpstreamFailed("The worker's answer could not be read.")
            else:
                answer = self._form.error(status, message_of(document, "The worker refused the request."))
        except UpstreamFailed as error:
            self._client.answer_error(error)
            return
        self._write_whole(status, answer)
        self._client.answer_complete(True)

    def _write_whole(self, status: int, answer: dict[str, object]) -> None:
        body = orjson.dumps(answer)
        stated = b"content-type: application/json\r\ncontent-length: %d\r\n" % len(body)
        self._client.write(self._head(status, stated + self._client.connection_header()) + body)
