"""A second worker for one exchange, asked when the first is slow to say anything.

    timer ─► Exchange.second ─► connection, request ─► first byte of a body ─► the exchange is its, the first is dropped
                           └► nobody: no hedge      └► anything else        ─► it is dropped, the first goes on

An answer's head is no first byte: engines send it before they compute. So while a second worker may still win, the head
of the first one's answer is held back. Each of the two legs has its own listener, whose accounts are settled as its leg
ends.
"""

import asyncio
import logging
from typing import TYPE_CHECKING

from gateway.edge.http1 import ResponseHead
from gateway.reliability.failures import (
    CONNECT_REFUSED,
    CONNECT_TIMED_OUT,
    FAILED_STATUS_MIN,
    GATEWAY_FAULT,
    Failure,
    of_status,
)

if TYPE_CHECKING:
    from gateway.edge.contract import Listener
    from gateway.edge.exchange import Exchange
    from gateway.edge.upstream import UpstreamConnection

logger = logging.getLogger("ropeway.edge")


class Hedge:
    """The second leg, from the moment it is thought of. Implements `upstream.Receiver` until it wins."""

    __slots__ = ("_connecting", "_connection", "_exchange", "_timer", "head", "listener")

    def __init__(self, exchange: "Exchange", seconds: float) -> None:
        self._exchange = exchange
        self._timer = asyncio.get_running_loop().call_later(seconds, self._begin)
        self._connecting: asyncio.Task[None] | None = None
        self._connection: UpstreamConnection | None = None
        self.listener: Listener | None = None
        """Of the second leg; None until it has begun."""
        self.head: ResponseHead | None = None
        """Of an answer of which nothing else has come yet."""

    @property
    def running(self) -> bool:
        return self.listener is not None

    def drop(self) -> None:
        """Nobody waits for it any more."""
        self._timer.cancel()
        connection = self.part()
        if connection is not None:
            connection.abort()

    def part(self) -> "UpstreamConnection | None":
        """Leave the connection to the exchange; None where there is none yet."""
        connecting, self._connecting = self._connecting, None
        if connecting is not None:
            connecting.cancel()
        connection, self._connection = self._connection, None
        return connection

    # Steps

    def _begin(self) -> None:
        listener = self.listener = self._exchange.second()
        if listener is None:
            self._exchange.hedge_over()
            return
        connection = listener.attempt.connections.acquire()
        if connection is not None:
            self._send(connection)
        else:
            self._connecting = asyncio.ensure_future(self._connect(listener))

    async def _connect(self, listener: "Listener") -> None:
        try:
            connection = await listener.attempt.connections.connect(self._exchange.connect_seconds)
        except OSError as error:
            self._connecting = None
            self._exchange.hedge_over(CONNECT_TIMED_OUT if isinstance(error, TimeoutError) else CONNECT_REFUSED)
            return
        except Exception:
            logger.exception("cannot connect to a worker")
            self._connecting = None
            self._exchange.hedge_over(GATEWAY_FAULT)
            return
        self._connecting = None
        self._send(connection)

    def _send(self, connection: "UpstreamConnection") -> None:
        assert self.listener is not None  # noqa: S101
        self._connection = connection
        connection.send(self, self.listener.attempt.request_parts)

    def _failed(self, failure: Failure) -> None:
        connection = self.part()
        if connection is not None and connection.is_busy:
            connection.abort()
        self._exchange.hedge_over(failure)

    # upstream.Receiver

    def response_complete(self, head: ResponseHead, body: bytes) -> None:
        failure = of_status(head.status) if head.status >= FAILED_STATUS_MIN else None
        if failure is not None:
            self._failed(failure)
        else:
            self._exchange.hedge_answers(self)
            self._exchange.response_complete(head, body)

    def response_started(self, head: ResponseHead, body_follows: bool) -> None:
        failure = of_status(head.status) if head.status >= FAILED_STATUS_MIN else None
        if failure is not None:
            self._failed(failure)
        elif body_follows:
            self._exchange.hedge_answers(self)
            self._exchange.response_started(head, True)
        else:
            self.head = head

    def response_body(self, data: bytes, done: bool) -> None:
        self._exchange.hedge_answers(self)
        self._exchange.response_body(data, done)

    def upstream_failed(self, failure: Failure, reason: str) -> None:
        self._connection = None
        self._exchange.hedge_over(failure)
