"""Requests of the gateway's own making, that go the way of a client's and come back as one answer."""

import asyncio
from collections.abc import Coroutine
from types import CoroutineType
from typing import Any, NamedTuple

from gateway.api.answers import AnswerReader
from gateway.api.errors import error_event
from gateway.api.translated import Translated, TranslatedExchange
from gateway.edge.contract import Deadlines, Listener
from gateway.edge.exchange import Exchange
from gateway.errors import ServiceError, UpstreamFailed

ANSWER_BYTES_MAX = 32 * 1024 * 1024


class Answer(NamedTuple):
    status: int
    request_id: str
    body: bytes
    """JSON, mostly."""


class Call:
    """One request. Implements `exchange.Client`, of HTTP/1.0, whose body comes as it is. Run once."""

    http10 = True

    def __init__(self, deadlines: Deadlines) -> None:
        self._deadlines = deadlines
        self._reader = AnswerReader()
        self._parts: list[bytes] = []
        self._bytes = 0
        self._answered: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._exchange: Exchange | TranslatedExchange | None = None

    async def run(self, begun: "Listener | Translated | Coroutine[Any, Any, Listener | Translated]") -> Answer:
        """The answer, whatever its status. Raises ServiceError where there is none. Whoever cancels this leaves, as a
        client does that closes its connection."""
        listener = await begun if isinstance(begun, CoroutineType) else begun
        kind = TranslatedExchange if isinstance(listener, Translated) else Exchange
        exchange = self._exchange = kind(self, listener, self._deadlines)  # type: ignore[arg-type]  # each its own
        exchange.start()
        try:
            return await self._answered
        except asyncio.CancelledError:
            exchange.client_gone()
            raise

    def check(self, now: float) -> None:
        """Called about once a second."""
        if self._exchange is not None:
            self._exchange.check(now)

    # exchange.Client

    def connection_header(self) -> bytes:
        return b""

    def write(self, data: bytes) -> None:
        body = self._reader.feed(data)
        self._parts.append(body)
        self._bytes += len(body)
        if self._bytes > ANSWER_BYTES_MAX and not self._answered.done() and self._exchange is not None:
            self._fail(UpstreamFailed("The answer is too long."))
            self._exchange.client_gone()

    def answer_complete(self, keep_alive: bool) -> None:
        head = self._reader.head
        if head is None:
            self._fail(UpstreamFailed("The worker did not answer."))
        elif not self._answered.done():
            request_id = self._reader.value(b"x-request-id").decode("latin-1")
            self._answered.set_result(Answer(head.status, request_id, b"".join(self._parts)))

    def answer_error(self, error: ServiceError) -> None:
        self._fail(error)

    def error_event(self, error: ServiceError) -> bytes:
        return error_event("/v1/chat/completions", error)

    def abort(self, reset: bool) -> None:
        self._fail(UpstreamFailed("The worker broke off before the end of its answer."))

    def _fail(self, error: ServiceError) -> None:
        if not self._answered.done():
            self._answered.set_exception(error)
