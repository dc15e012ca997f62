"""Stands before a store that may be slow, hang or fail: every question within its budget, and none while it is away."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

from cachecore.store.breaker import Breaker
from cachecore.store.errors import Unavailable

T = TypeVar("T")


class Gate:
    """After three failures in a row only a probe at a time gets through, until one is answered."""

    def __init__(self, name: str, breaker: Breaker | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self.name = name
        self._breaker = breaker or Breaker()
        self._clock = clock
        self._probe_at = 0.0

    async def ask(self, question: Callable[[], Awaitable[T]], budget_seconds: float) -> T:
        """The answer. Raises Unavailable when there is none in time, or when nobody is asked. Whatever else it raises
        is an answer too."""
        breaker = self._breaker
        if breaker.opened:
            if self._clock() < self._probe_at:
                raise Unavailable(f"{self.name}: not asked while it is away ({breaker.reason})")
            self._probe_at = self._clock() + budget_seconds + breaker.probe_delay_seconds
        try:
            async with asyncio.timeout(budget_seconds):
                answer = await question()
        except TimeoutError:
            self._failed(f"no answer within {budget_seconds:g} s")
            raise Unavailable(f"{self.name}: no answer within {budget_seconds:g} s") from None
        except Unavailable as error:
            self._failed(str(error))
            raise
        except Exception:
            breaker.succeeded(self._clock())
            raise
        breaker.succeeded(self._clock())
        return answer

    def _failed(self, reason: str) -> None:
        self._breaker.failed(reason, self._clock())
        self._probe_at = self._clock() + self._breaker.probe_delay_seconds
