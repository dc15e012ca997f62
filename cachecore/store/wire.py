"""One connection: requests go out in a block, answers come back in order. One exchange at a time, by one user.

What bites: after a timeout or a cancellation an answer is still under way, and the next user would take it for its own.
So whatever ends an exchange early also ends the connection.
"""

import asyncio
import os
import socket
import ssl
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar, cast

import hiredis

from cachecore.store.errors import Endpoint, StoreError, Unavailable, error_of
from cachecore.store.script import Call

T = TypeVar("T")
Part = bytes | str | int
Command = tuple[Part, ...]

MORE = object()


class Question(NamedTuple):
    request: Call | Command
    by_text: bool = False
    """A script goes as its text although this connection has run it before."""
    asking: bool = False
    """In a cluster: of a node that is taking the slot over."""


@dataclass(frozen=True)
class Credentials:
    username: str | None = None
    password: str | None = field(default=None, repr=False)


async def within(future: asyncio.Future[T], deadline: float, message: str) -> T:
    """The future's result, or Unavailable(message) at `deadline` (loop time).

    A result that is there first wins, also in a loop that comes late to both: it reads its sockets before its clock.
    """
    timer = future.get_loop().call_at(deadline, _fail, future, message)
    try:
        return await future
    finally:
        timer.cancel()


def _fail(future: asyncio.Future[Any], message: str) -> None:
    if not future.done():
        future.set_exception(Unavailable(message))


class Wire(asyncio.Protocol):
    def __init__(self, name: str) -> None:
        self.name = name
        self._closed = False
        self.facts: dict[bytes, Any] = {}
        """What the server said of itself: server, version, mode, role."""
        self._reader = hiredis.Reader(replyError=cast(Any, error_of), notEnoughData=MORE)
        self._transport: asyncio.Transport | None = None
        self._answers: list[Any] = []
        self._expected = 0
        self._waiting: asyncio.Future[list[Any]] | None = None
        self._scripts: set[str] = set()

    @property
    def lost(self) -> bool:
        """Not to be used any more, whether or not its end was seen yet."""
        return self._closed or self._transport is None or self._transport.is_closing()

    async def exchange(self, questions: Sequence[Question], deadline: float) -> list[Any]:
        """One answer for each question: bytes, int, list, None or StoreError. Raises Unavailable, and is lost then."""
        if self.lost or self._transport is None:
            raise Unavailable(f"{self.name}: connection lost")
        payload, self._expected = self._encode(questions)
        self._answers = []
        waiting = self._waiting = asyncio.get_running_loop().create_future()
        self._transport.write(payload)
        try:
            answers = await within(waiting, deadline, f"{self.name}: no answer in time")
        except BaseException:
            self.close()
            raise
        return answers if len(answers) == len(questions) else _without_asking(questions, answers)

    def close(self) -> None:
        """At once: what is still to be written or answered is lost."""
        self._closed = True
        self._waiting = None
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        if self._waiting is None:
            self.close()  # nobody asked: a farewell of the server's
            return
        try:
            self._reader.feed(data)
            while len(self._answers) < self._expected:
                answer = self._reader.gets()
                if answer is MORE:
                    return
                self._answers.append(answer)
        except hiredis.HiredisError as error:
            self.abort(f"{self.name}: not the protocol of Redis: {error}")
            return
        if self._reader.has_data():
            self.abort(f"{self.name}: more answers than questions")
            return
        waiting, self._waiting = self._waiting, None
        if not waiting.done():
            waiting.set_result(self._answers)

    def connection_lost(self, error: Exception | None) -> None:
        self.abort(f"{self.name}: connection lost{f': {error}' if error else ''}")

    def abort(self, message: str) -> None:
        """Close it; whoever waits for answers gets Unavailable(message)."""
        waiting = self._waiting
        self.close()
        if waiting is not None:
            _fail(waiting, message)

    def _encode(self, questions: Sequence[Question]) -> tuple[bytes, int]:
        packed: list[bytes] = []
        for request, by_text, asking in questions:
            if asking:
                packed.append(hiredis.pack_command((b"ASKING",)))
            packed.append(hiredis.pack_command(self._command(request, by_text)))
        return b"".join(packed), len(packed)

    def _command(self, request: Call | Command, by_text: bool) -> tuple[Any, ...]:
        if not isinstance(request, Call):
            return request
        script, keys, arguments = request
        if by_text or script.sha1 not in self._scripts:
            # The first time on each connection: a restarted or promoted server learns its scripts without a round trip.
            self._scripts.add(script.sha1)
            return (b"EVAL", script.text, len(keys), *keys, *arguments)
        return (b"EVALSHA", script.sha1, len(keys), *keys, *arguments)


def _without_asking(questions: Sequence[Question], answers: list[Any]) -> list[Any]:
    rest = iter(answers)
    kept = []
    for question in questions:
        if question.asking:
            next(rest)
        kept.append(next(rest))
    return kept


async def dial(
    place: Endpoint | str,
    credentials: Credentials,
    *,
    seconds: float,
    tls: ssl.SSLContext | None = None,
    database: int = 0,
) -> Wire:
    """A connection that has introduced itself. Raises Unavailable, or Refused when this user may not."""
    wire = Wire(str(place))
    try:
        async with asyncio.timeout(seconds):
            await _connect(wire, place, tls)
            await _introduce(wire, credentials, database, seconds)
    except TimeoutError:
        wire.close()
        raise Unavailable(f"{place}: no connection within {seconds:g} s") from None
    except OSError as error:
        raise Unavailable(f"{place}: {_reason(error)}") from None
    except BaseException:
        wire.close()
        raise
    return wire


def _reason(error: OSError) -> str:
    """In the system's words, for which asyncio puts addresses. Errors of TLS and of name look-ups have their own."""
    if isinstance(error, ssl.SSLError | socket.gaierror) or error.errno is None:
        return error.strerror or str(error)
    return os.strerror(error.errno)


async def _connect(wire: Wire, place: Endpoint | str, tls: ssl.SSLContext | None) -> None:
    loop = asyncio.get_running_loop()
    if isinstance(place, str):
        await loop.create_unix_connection(lambda: wire, place)
    else:
        await loop.create_connection(lambda: wire, place.host, place.port, ssl=tls)


async def _introduce(wire: Wire, credentials: Credentials, database: int, seconds: float) -> None:
    hello: list[Part] = ["HELLO", 2]
    if credentials.password is not None:
        hello += ["AUTH", credentials.username or "default", credentials.password]
    questions = [Question((*hello, "SETNAME", "ropeway"))]
    if database:
        questions.append(Question(("SELECT", database)))
    answers = await wire.exchange(questions, asyncio.get_running_loop().time() + seconds)
    for answer in answers:
        if isinstance(answer, StoreError):
            raise answer
    facts = answers[0]
    if not isinstance(facts, list):
        raise Unavailable(f"{wire.name}: a greeting that is none: {facts!r}")
    wire.facts = dict(zip(facts[::2], facts[1::2], strict=False))
