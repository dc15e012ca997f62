"""A request of the gateway's own to a worker, over the connections that clients' requests take. Its answer is read to
the end and dropped.

Whoever waits for it and is cancelled drops the connection with it, so that the worker learns that nobody waits.
"""

import asyncio
from collections.abc import Sequence

from gateway.edge.http1 import ResponseHead
from gateway.edge.upstream import UpstreamConnection, UpstreamPool
from gateway.reliability.failures import (
    BODY_CUT,
    CONNECT_REFUSED,
    CONNECT_TIMED_OUT,
    CONNECTION_LOST,
    CONNECTION_STALE,
    Failure,
)

_TAIL_BYTES = 4096


class ErrandFailed(Exception):
    """The worker could not be reached, or broke off. The message says which."""

    def __init__(self, message: str, failure: Failure) -> None:
        super().__init__(message)
        self.failure = failure


class Errand:
    """Implements `upstream.Receiver`. Run once."""

    def __init__(self, connections: UpstreamPool, parts: Sequence[bytes]) -> None:
        self._connections = connections
        self._parts = list(parts)
        self._connection: UpstreamConnection | None = None
        self._head: ResponseHead | None = None
        self._done: asyncio.Future[ResponseHead] | None = None
        self._stale = False
        """A kept-alive connection was closed under the request, which says nothing about the worker."""
        self.tail = b""
        """The end of the answer's body."""

    async def run(self, connect_seconds: float) -> ResponseHead:
        """The head of the answer, once all of it has come. Raises ErrandFailed."""
        head = await self._attempt(self._connections.acquire(), connect_seconds)
        if head is None:
            head = await self._attempt(None, connect_seconds)
        if head is None:
            raise ErrandFailed("closed the connection", CONNECTION_LOST)
        return head

    async def _attempt(self, kept: UpstreamConnection | None, connect_seconds: float) -> ResponseHead | None:
        """None where the connection had gone stale."""
        connection = self._connection = kept or await self._connect(connect_seconds)
        self._stale = False
        done: asyncio.Future[ResponseHead] = asyncio.get_running_loop().create_future()
        self._done = done
        connection.send(self, self._parts)
        try:
            return await done
        except ErrandFailed:
            if self._stale:
                return None
            raise
        finally:
            if self._connection is not None:
                self._connection.abort()

    async def _connect(self, connect_seconds: float) -> UpstreamConnection:
        try:
            return await self._connections.connect(connect_seconds)
        except OSError as error:
            late = isinstance(error, TimeoutError)
            kind, failure = ("timed out", CONNECT_TIMED_OUT) if late else ("was refused", CONNECT_REFUSED)
            raise ErrandFailed(f"could not be reached: the connection {kind}", failure) from None

    # upstream.Receiver

    def response_complete(self, head: ResponseHead, body: bytes) -> None:
        self._head = head
        self.response_body(body, True)

    def response_started(self, head: ResponseHead, body_follows: bool) -> None:
        self._head = head

    def response_body(self, data: bytes, done: bool) -> None:
        self.tail = (self.tail + data)[-_TAIL_BYTES:]
        if done:
            self._connection = None  # it may be serving another request already
            assert self._head is not None  # noqa: S101
            if self._done is not None and not self._done.done():
                self._done.set_result(self._head)

    def upstream_failed(self, failure: Failure, reason: str) -> None:
        self._connection = None
        self._stale = failure is CONNECTION_STALE
        if self._done is not None and not self._done.done():
            # Of an answer that nobody gets a part of, nothing has come.
            failure = CONNECTION_LOST if failure is BODY_CUT else failure
            self._done.set_exception(ErrandFailed(f"broke off: {reason}", failure))
