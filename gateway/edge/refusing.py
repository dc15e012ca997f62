"""Refusals: an error as an answer, and connections beyond the gateway's bound, which are told so and closed."""

import asyncio
from typing import cast

from gateway.edge.http1 import status_line
from gateway.errors import ServiceError

SECONDS_MAX = 2.0
AT_ONCE_MAX = 256
"""Beyond these, connections are reset without a word: being told costs a descriptor for a moment, too."""


class TurnedAway(asyncio.Protocol):
    """One connection too many. It is answered once it has asked for something: clients take what comes earlier for
    unsolicited. What it sends is read, as bytes that meet a closed socket destroy the answer on its way, and not kept.
    """

    def __init__(self, others: "set[TurnedAway]", answer: bytes) -> None:
        """`others`: those of the same gateway; whoever is in it holds a descriptor."""
        self._others = others
        self._answer = answer
        self._transport: asyncio.Transport | None = None
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        if len(self._others) >= AT_ONCE_MAX:
            self._transport.abort()
            return
        self._others.add(self)
        self._timer = asyncio.get_running_loop().call_later(SECONDS_MAX, self._transport.abort)

    def data_received(self, data: bytes) -> None:
        answer, self._answer = self._answer, b""
        if answer and self._transport is not None:
            self._transport.write(answer)
            if self._transport.can_write_eof():
                self._transport.write_eof()

    def connection_lost(self, exc: Exception | None) -> None:
        self._others.discard(self)
        if self._timer is not None:
            self._timer.cancel()

    def stop(self) -> None:
        if self._transport is not None:
            self._transport.abort()


def error_answer(error: ServiceError, headers: bytes, body: bytes = b"") -> bytes:
    """A whole answer; `headers` are complete lines, `body` where it is not OpenAI's error object."""
    body = body or error.body()
    lines = [status_line(error.status)]
    lines += [b"%b: %b\r\n" % field for field in error.headers() if field[0] != b"connection"]
    lines += (headers, b"content-length: %d\r\n\r\n%b" % (len(body), body))
    return b"".join(lines)
