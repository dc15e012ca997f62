"""How long one waits: for the whole of a transfer, and for the next byte of it."""

import asyncio
from collections.abc import Callable
from types import TracebackType

from cachecore.transfer.errors import Reason, WireError

_LOOKS_PER_STALL = 4


class Patience:
    """An async context that ends in WireError: DEADLINE, STALLED or CLOSED, whichever comes first. No deadline is None.

    Whoever moves something sets `moved`, for every piece of a payload; so this is no call, and no timer is moved for
    it. One that fires a few times in each stall looks whether anything did. A stall is noticed a quarter late at most.
    """

    def __init__(
        self, deadline: float | None, stall_seconds: float, has_ended: Callable[[], bool] = lambda: False
    ) -> None:
        self._deadline = float("inf") if deadline is None else deadline
        self._interval = stall_seconds / _LOOKS_PER_STALL
        self._has_ended = has_ended
        self._loop = asyncio.get_running_loop()
        self._timeout = asyncio.timeout(None)
        self._timer: asyncio.TimerHandle | None = None
        self._verdict = WireError("not done in time", Reason.DEADLINE)
        self._still = 0
        self.moved = True
        self.held = False
        """While one waits for oneself, and not for the other side; but what for, once that has gone away?"""

    async def __aenter__(self) -> "Patience":
        await self._timeout.__aenter__()
        self._look()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._timer is not None:
            self._timer.cancel()
        try:
            await self._timeout.__aexit__(kind, error, traceback)
        except TimeoutError:
            raise self._verdict from None

    def _look(self) -> None:
        now = self._loop.time()
        self._still = 0 if self.moved or self.held else self._still + 1
        self.moved = False
        if now >= self._deadline:
            self._end(WireError("not done in time", Reason.DEADLINE))
        elif self._still >= _LOOKS_PER_STALL:
            self._end(WireError("nothing moved for too long", Reason.STALLED))
        elif self.held and self._has_ended():
            self._end(WireError("the other side has gone away", Reason.CLOSED))
        else:
            self._timer = self._loop.call_at(min(now + self._interval, self._deadline), self._look)

    def _end(self, verdict: WireError) -> None:
        self._verdict = verdict
        self._timeout.reschedule(self._loop.time())
