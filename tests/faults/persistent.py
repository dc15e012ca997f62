"""A client that asks at a steady rate and tries again as the openai client does, though only where that is sure to be
right: when a connection is refused, or ends before any byte of an answer. An error that is answered is a failure.
"""

import asyncio
import json
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from random import Random
from typing import NamedTuple
from urllib.parse import urlsplit

from openai import APIError, AsyncOpenAI

from tests.faults.accounts import Answer, End, Verdict, judged
from tests.faults.asker import IDLE_SECONDS_MAX, READ_BYTES, Connection
from tests.faults.questions import Question, question

RETRIES_MAX = 2
RETRY_SECONDS = 0.5
HUNG_AFTER_SECONDS = 60.0
PATH = "/v1/chat/completions"


class Asked(NamedTuple):
    question: Question
    verdict: Verdict
    tries: int
    sent_at: float
    seconds: float

    def __str__(self) -> str:
        return (
            f"{self.question.id}, {self.tries} tries, {self.seconds:.2f} s: {self.verdict.end}, {self.verdict.detail}"
        )


def small_questions(seed: int) -> Iterator[Question]:
    """Half of them streams; a few documents that many share."""
    random = Random(seed)
    number = 0
    while True:
        document = random.randrange(40)
        text = f"{document:04d} {'what is known of it, '[: random.randrange(20)] * 12} {number}?"
        yield question(f"r{number:06d}", "", document, text, number % 2 == 0, random.randint(2, 24))
        number += 1


class PersistentClient:
    """Knows all gateways, asks each in turn, and the next one when it has to try again."""

    def __init__(self, urls: Sequence[str]) -> None:
        self.asked: list[Asked] = []
        self._places = [(str(parts.hostname), int(parts.port or 80)) for parts in map(urlsplit, urls)]
        self._idle: dict[tuple[str, int], list[Connection]] = {place: [] for place in self._places}
        self._random = Random(0)

    async def ask(self, questions: Iterator[Question], rate: float, ended: Callable[[], bool]) -> None:
        """Open loop: a question is due at its time, however slow earlier answers are."""
        started = time.monotonic()
        async with asyncio.TaskGroup() as group:
            for number, each in enumerate(questions):
                await asyncio.sleep(max(started + number / rate - time.monotonic(), 0.0))
                if ended():
                    break
                group.create_task(self._ask(number, each))
        for connections in self._idle.values():
            while connections:
                await connections.pop().leave(resets=False)

    @property
    def failures(self) -> list[Asked]:
        return [each for each in self.asked if each.verdict.end is not End.COMPLETE]

    @property
    def tries(self) -> Counter[int]:
        return Counter(each.tries for each in self.asked)

    async def _ask(self, number: int, question: Question) -> None:
        sent_at, tries = time.monotonic(), 0
        verdict = Verdict(End.VIOLATION, "not asked")
        try:
            async with asyncio.timeout(HUNG_AFTER_SECONDS):
                while tries <= RETRIES_MAX:
                    place = self._places[(number + tries) % len(self._places)]
                    tries += 1
                    verdict, begun = await self._try(place, question)
                    if verdict.end is End.COMPLETE or begun:
                        break
                    await asyncio.sleep(RETRY_SECONDS * 2 ** (tries - 1) * (1 - 0.25 * self._random.random()))
        except TimeoutError:
            verdict = Verdict(End.VIOLATION, "hung")
        self.asked.append(Asked(question, verdict, tries, sent_at, time.monotonic() - sent_at))

    async def _try(self, place: tuple[str, int], question: Question) -> tuple[Verdict, bool]:
        """What came of it, and whether any byte of an answer did."""
        try:
            connection = self._take_idle(place) or await Connection.open(*place)
        except OSError as error:
            return Verdict(End.VIOLATION, f"connecting: {error}"), False
        answer = Answer()
        with suppress(ConnectionError):
            connection.writer.write(_written(question))
            while not answer.complete and not answer.malformed and (data := await connection.reader.read(READ_BYTES)):
                answer.feed(data)
        if answer.keeps_alive:
            connection.idle_since = time.monotonic()
            self._idle[place].append(connection)
        else:
            await connection.leave(resets=False)
        return judged(question, answer), answer.received_bytes > 0

    def _take_idle(self, place: tuple[str, int]) -> Connection | None:
        while self._idle[place]:
            connection = self._idle[place].pop()
            if time.monotonic() - connection.idle_since < IDLE_SECONDS_MAX and not connection.reader.at_eof():
                return connection
            connection.writer.close()
        return None


def _written(question: Question) -> bytes:
    body = json.dumps(question.body).encode()
    head = (
        f"POST {PATH} HTTP/1.1\r\nhost: gateway\r\nx-request-id: {question.id}\r\ncontent-length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


class OpenAiClient:
    """The real one, as it comes, at one address. It would also try again where it is refused with a 503; that this did
    not happen is checked by whoever asks the gateway how often it refused."""

    def __init__(self, url: str) -> None:
        self._client = AsyncOpenAI(base_url=f"{url}/v1", api_key="none", timeout=HUNG_AFTER_SECONDS)
        self.answered = 0
        self.failures: list[str] = []

    async def ask(self, questions: Iterator[Question], rate: float, ended: Callable[[], bool]) -> None:
        async with self._client, asyncio.TaskGroup() as group:
            while not ended():
                group.create_task(self._ask(next(questions)))
                await asyncio.sleep(1 / rate)

    async def _ask(self, question: Question) -> None:
        try:
            said = await self._said(question)
        except APIError as error:
            self.failures.append(repr(error))
            return
        if said != question.expected:
            self.failures.append(f"{said!r} was said, and not {question.expected!r}")
        self.answered += 1

    async def _said(self, question: Question) -> str:
        answer = await self._client.chat.completions.create(**question.body)
        if not question.streams:
            return str(answer.choices[0].message.content)
        return "".join([chunk.choices[0].delta.content or "" async for chunk in answer if chunk.choices])
