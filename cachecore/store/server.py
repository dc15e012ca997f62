"""One server as its callers see it: a pool, and a breaker that spares them the wait for one that is away."""

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from cachecore.store.breaker import Breaker
from cachecore.store.errors import Moved, StoreError, Unavailable
from cachecore.store.pool import Pool
from cachecore.store.wire import Question, Wire

logger = logging.getLogger("ropeway.store")

CONNECTIONS_MAX = 32
STREAM_CONNECTIONS_MAX = 256
CONNECT_SECONDS = 1.0


class Server:
    def __init__(
        self, name: str, connect: Callable[[], Coroutine[Any, Any, Wire]], breaker: Breaker, alarm: Callable[[], None]
    ) -> None:
        self.name = name
        self.breaker = breaker
        self.latency_seconds = 0.0
        """Of the last answer."""
        self.facts: dict[bytes, Any] = {}
        self._alarm = alarm
        """Called when this server stops answering."""
        self._pool = Pool(name, connect, CONNECTIONS_MAX)
        self.streams = Pool(name, connect, STREAM_CONNECTIONS_MAX)

    async def ask(self, questions: Sequence[Question], deadline: float) -> list[Any]:
        """One round trip: an answer or StoreError for each question. Raises StoreError when there was no round trip."""
        if self.breaker.opened:
            raise Unavailable(f"{self.name}: not asked while it is away ({self.breaker.reason})")
        try:
            answers = await self._exchange(questions, deadline)
        except StoreError as error:
            self._failed(str(error))
            raise
        self._judge(answers)
        return answers

    async def probe(self, budget_seconds: float) -> None:
        """Look whether an answer comes within the budget, past the breaker, and tell the breaker."""
        loop = asyncio.get_running_loop()
        try:
            wire = await self._pool.acquire(loop.time() + CONNECT_SECONDS)
            self._pool.release(wire)
            answers = await self._exchange([Question(("PING",))], loop.time() + budget_seconds)
        except StoreError as error:
            self._failed(str(error))
        else:
            self._judge(answers)

    def distrust(self, reason: str) -> None:
        """Open the breaker without waiting for three callers to suffer."""
        while not self.breaker.opened:
            self._failed(reason)

    def sever(self) -> None:
        """Leave it at once: a master no longer."""
        self._pool.sever()
        self.streams.sever()

    async def close(self) -> None:
        await self._pool.close()
        await self.streams.close()

    async def _exchange(self, questions: Sequence[Question], deadline: float) -> list[Any]:
        wire = await self._pool.acquire(deadline)
        self.facts = wire.facts
        started = time.perf_counter()
        try:
            answers = await wire.exchange(questions, deadline)
        finally:
            self._pool.release(wire)
        self.latency_seconds = time.perf_counter() - started
        return answers

    def _judge(self, answers: list[Any]) -> None:
        away = [answer for answer in answers if isinstance(answer, Unavailable) and not isinstance(answer, Moved)]
        if any(str(answer).startswith("READONLY") for answer in away):
            self._pool.drop()  # a master no longer: the next connection asks anew who is
        if away and len(away) == len(answers):
            self._failed(str(away[0]))
        else:
            if self.breaker.opened:
                logger.info("%s is back", self.name)
            self.breaker.succeeded(time.time())

    def _failed(self, reason: str) -> None:
        if self.breaker.failed(reason, time.time()):
            logger.warning("%s is away: %s", self.name, reason)
            self._pool.drop()
            self._alarm()
