"""The connections to one server: each in use by one caller at a time, the last one returned is the first one lent.

Connecting is no caller's own affair: it goes on when the caller's budget is used up, and the next caller finds the
connection ready. Otherwise a server whose handshake takes longer than a budget could never be reached.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any

from cachecore.store.errors import StoreError, Unavailable
from cachecore.store.wire import Wire, within


class Pool:
    def __init__(self, name: str, connect: Callable[[], Coroutine[Any, Any, Wire]], limit: int) -> None:
        self.name = name
        self._connect = connect
        self._limit = limit
        self._idle: list[Wire] = []
        self._lent: set[Wire] = set()
        self._stale: set[Wire] = set()
        """Lent before `drop`: closed when they come back."""
        self._waiters: deque[asyncio.Future[Wire]] = deque()
        self._closed = False
        self._dialling: set[asyncio.Task[Wire]] = set()

    async def acquire(self, deadline: float) -> Wire:
        """Raises Unavailable at the deadline, or the StoreError that kept a connection from being made."""
        while self._idle:
            wire = self._idle.pop()
            if not wire.lost:
                self._lent.add(wire)
                return wire
        waiter: asyncio.Future[Wire] = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        self._dial()
        try:
            return await within(waiter, deadline, f"{self.name}: no connection in time")
        except asyncio.CancelledError:
            if waiter.done() and not waiter.cancelled() and waiter.exception() is None:
                self.release(waiter.result())
            raise

    def release(self, wire: Wire) -> None:
        self._lent.discard(wire)
        if wire in self._stale:
            self._stale.discard(wire)
            wire.close()
        if wire.lost:
            self._dial()
        else:
            self._offer(wire)

    def drop(self) -> None:
        """No connection made until now is used again."""
        while self._idle:
            self._idle.pop().close()
        self._stale |= self._lent

    def sever(self) -> None:
        """Nor to its end, where it is in use."""
        self.drop()
        for wire in self._lent:
            wire.abort(f"{self.name}: given up")

    async def close(self) -> None:
        self._closed = True
        self.sever()
        self._disappoint(Unavailable(f"{self.name}: given up"))
        for task in list(self._dialling):
            task.cancel()
        await asyncio.gather(*self._dialling, return_exceptions=True)
        await asyncio.sleep(0)  # a turn of the loop, in which the connections are closed

    def _offer(self, wire: Wire) -> None:
        if self._closed:
            wire.close()
            return
        while self._waiters:
            waiter = self._waiters.popleft()
            if not waiter.done():
                self._lent.add(wire)
                waiter.set_result(wire)
                return
        self._idle.append(wire)

    def _dial(self) -> None:
        """Start a connection for each waiter that has none coming, as far as the limit allows."""
        waiting = sum(not waiter.done() for waiter in self._waiters)
        wanted = min(waiting, self._limit - len(self._lent)) - len(self._dialling)
        for _ in range(wanted):
            task = asyncio.create_task(self._connect())
            self._dialling.add(task)
            task.add_done_callback(self._dialled)

    def _dialled(self, task: asyncio.Task[Wire]) -> None:
        self._dialling.discard(task)
        if task.cancelled():
            return
        error = task.exception()
        if error is None:
            self._offer(task.result())
        else:
            self._disappoint(error if isinstance(error, StoreError) else Unavailable(f"{self.name}: {error!r}"))

    def _disappoint(self, error: StoreError) -> None:
        while self._waiters:
            waiter = self._waiters.popleft()
            if not waiter.done():
                waiter.set_exception(error)
