"""A client that asks at a steady rate, gives some questions up, and accounts for every one of them.

Nothing is asked twice. A question is due at its time, however slow earlier answers are; connections are kept alive, and
made as needed. What a connection carries beyond one answer is seen as soon as it is used again.
"""

import asyncio
import json
import socket
import struct
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import NamedTuple, Self
from urllib.parse import urlsplit

from tests.faults.accounts import Answer, End, Verdict, judged
from tests.faults.questions import Abort, Moment, Question, Sent

READ_BYTES = 65_536
IDLE_SECONDS_MAX = 3.0
WAIT_SECONDS_MAX = 0.4
"""That a client waits before it gives up."""
_RESET_ON_CLOSE = struct.pack("ii", 1, 0)


class Asked(NamedTuple):
    question: Question
    verdict: Verdict
    sent_at: float
    """On the wall clock."""
    seconds: float
    own_tokens: int
    """What its tenant itself had sent of its text, beside this question."""


class Connection:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer
        self.idle_since = 0.0

    @classmethod
    async def open(cls, host: str, port: int) -> Self:
        return cls(*await asyncio.open_connection(host, port))

    async def leave(self, resets: bool) -> None:
        if resets:
            opened = self.writer.get_extra_info("socket")
            opened.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)
            self.writer.transport.abort()
        self.writer.close()
        with suppress(OSError):
            await self.writer.wait_closed()


class Asker:
    """Asks one gateway. `hung_after_seconds` is what any request may take."""

    def __init__(self, url: str, keys: Mapping[str, str], hung_after_seconds: float) -> None:
        parts = urlsplit(url)
        self._host, self._port = str(parts.hostname), int(parts.port or 80)
        self._keys = keys
        self._hung_after_seconds = hung_after_seconds
        self._idle: list[Connection] = []
        self.sent = Sent()
        self.asked: list[Asked] = []
        self.under_way = 0

    async def ask_all(self, questions: Iterable[Question], rate: float) -> None:
        """Returns when each has come to an end."""
        started = time.monotonic()
        async with asyncio.TaskGroup() as group:
            for number, question in enumerate(questions):
                await asyncio.sleep(max(started + number / rate - time.monotonic(), 0.0))
                group.create_task(self._ask(question))

    async def close(self) -> None:
        while self._idle:
            await self._idle.pop().leave(resets=False)

    def count(self, end: End) -> int:
        return sum(each.verdict.end is end for each in self.asked)

    def details(self, end: End) -> Counter[str]:
        return Counter(each.verdict.detail for each in self.asked if each.verdict.end is end)

    async def _ask(self, question: Question) -> None:
        sent_at, began, answer = time.time(), time.monotonic(), Answer()
        self.sent.add(question)
        self.under_way += 1
        try:
            async with asyncio.timeout(self._hung_after_seconds):
                verdict = await self._verdict(question, answer)
        except TimeoutError:
            verdict = Verdict(End.VIOLATION, f"hung, after {answer.received_bytes} bytes")
        except (OSError, ValueError) as error:
            verdict = Verdict(End.VIOLATION, f"{type(error).__name__}: {error}")
        finally:
            self.under_way -= 1
        own_tokens = self.sent.own_tokens(question) if verdict.end is End.COMPLETE else 0
        self.asked.append(Asked(question, verdict, sent_at, time.monotonic() - began, own_tokens))

    def _take_idle(self) -> Connection | None:
        """One that the gateway is not about to close for having been idle for too long."""
        while self._idle:
            connection = self._idle.pop()
            if time.monotonic() - connection.idle_since < IDLE_SECONDS_MAX:
                return connection
            connection.writer.close()
        return None

    async def _verdict(self, question: Question, answer: Answer) -> Verdict:
        connection = self._take_idle() or await Connection.open(self._host, self._port)
        try:
            given_up = await self._exchange(connection, question, answer)
        except BaseException:
            await connection.leave(resets=True)
            raise
        verdict = judged(question, answer)
        if given_up:
            # What had come of an answer must have been right.
            wrong = answer.status == 200 and verdict.end is End.VIOLATION
            return verdict if wrong else Verdict(End.GIVEN_UP, question.abort.moment if question.abort else "")
        if answer.keeps_alive:
            connection.idle_since = time.monotonic()
            self._idle.append(connection)
        else:
            await connection.leave(resets=False)
        return verdict

    async def _exchange(self, connection: Connection, question: Question, answer: Answer) -> bool:
        """True when the client gave up."""
        head, body = self._written(question)
        abort = question.abort
        if abort is not None and abort.moment in (Moment.IN_HEAD, Moment.IN_BODY):
            in_head = abort.moment is Moment.IN_HEAD
            part = head[: 1 + int(abort.share * (len(head) - 2))] if in_head else body[: int(abort.share * len(body))]
            connection.writer.write(part if in_head else head + part)
            await asyncio.sleep(0.02)
            await connection.leave(abort.resets)
            return True
        connection.writer.write(head + body)
        return await self._read(connection, question, answer, abort)

    async def _read(self, connection: Connection, question: Question, answer: Answer, abort: Abort | None) -> bool:
        patience = None if abort is None or abort.moment is not Moment.WAITING else abort.share * WAIT_SECONDS_MAX
        bytes_max = _bytes_until(abort, question)
        with suppress(TimeoutError):
            async with asyncio.timeout(patience):
                while not answer.complete and not answer.malformed and answer.received_bytes < bytes_max:
                    try:
                        data = await connection.reader.read(READ_BYTES)
                    except ConnectionError:
                        return False
                    if not data:
                        return False
                    answer.feed(data)
        if abort is None or answer.complete or answer.malformed:
            return False
        await connection.leave(abort.resets)
        return True

    def _written(self, question: Question) -> tuple[bytes, bytes]:
        body = json.dumps(question.body).encode()
        lines = [
            "POST /v1/chat/completions HTTP/1.1",
            "host: gateway",
            f"authorization: Bearer {self._keys[question.tenant]}",
            f"x-request-id: {question.id}",
            "content-type: application/json",
            f"content-length: {len(body)}",
        ]
        return ("\r\n".join(lines) + "\r\n\r\n").encode(), body


def _bytes_until(abort: Abort | None, question: Question) -> float:
    """How much of an answer a client reads that gives up in the middle of it."""
    if abort is None or abort.moment is not Moment.IN_ANSWER:
        return float("inf")
    # What comes with each token of a stream, about; what a whole answer has around its text.
    return 1 + abort.share * (300 + 200 * len(question.expected) if question.streams else 700)
