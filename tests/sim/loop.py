"""An event loop whose time passes only when nothing is left to do: it jumps to the next timer.

asyncio's own machinery runs on it unchanged (tasks, timeouts, futures, handles in their order). There is no selector,
no socket and no thread: what the world outside would do is done by timers, so a history takes as long as it takes to
compute, and takes the same course each time.
"""

import asyncio
from collections.abc import Callable
from typing import Any, Protocol, TypeVar, TypeVarTuple

Result = TypeVar("Result")
Arguments = TypeVarTuple("Arguments")


class Stuck(Exception):
    """Somebody waits for what will never come: no timer is left, and nothing is ready."""


class Connector(Protocol):
    async def connect(
        self, factory: Callable[[], asyncio.Protocol], host: str, port: int
    ) -> tuple[asyncio.Transport, asyncio.Protocol]: ...


class _Time:
    """In the place of a selector: waiting is passing time."""

    def __init__(self, loop: "SimulatedLoop") -> None:
        self._loop = loop

    def select(self, timeout: float | None) -> list[Any]:
        if timeout is None:
            raise Stuck
        if timeout > 0:
            self._loop.pass_time(timeout)
        return []


class SimulatedLoop(asyncio.BaseEventLoop):
    """`network` is asked for connections; `thread_seconds` is how long work in a thread takes."""

    _scheduled: list[asyncio.TimerHandle]

    def __init__(self, thread_seconds: float = 0.02) -> None:
        super().__init__()
        self._selector = _Time(self)
        self._now = 1000.0
        self._thread_seconds = thread_seconds
        self.network: Connector | None = None

    def time(self) -> float:
        return self._now

    def pass_time(self, seconds: float) -> None:
        due = self._scheduled[0].when() if self._scheduled else None
        # The sum may fall short of the very moment that is waited for.
        self._now = self._now + seconds if due is None else max(self._now, min(due, self._now + seconds + 1e-9))

    def _process_events(self, event_list: list[Any]) -> None:
        """There are none."""

    def _write_to_self(self) -> None:
        """Nobody calls from another thread."""

    async def create_connection(  # type: ignore[override]
        self, protocol_factory: Callable[[], asyncio.Protocol], host: str = "", port: int = 0, **_: Any
    ) -> tuple[asyncio.Transport, asyncio.Protocol]:
        assert self.network is not None
        return await self.network.connect(protocol_factory, host, port)

    def run_in_executor(
        self, executor: object, func: Callable[[*Arguments], Result], *args: *Arguments
    ) -> "asyncio.Future[Result]":
        """The work of a thread is done at once, and its result comes when it would."""
        future: asyncio.Future[Result] = self.create_future()
        try:
            result = func(*args)
        except Exception as error:
            self.call_later(self._thread_seconds, _settle, future, future.set_exception, error)
        else:
            self.call_later(self._thread_seconds, _settle, future, future.set_result, result)
        return future


def _settle(future: "asyncio.Future[Any]", settle: Callable[[Any], None], value: Any) -> None:
    if not future.done():
        settle(value)
