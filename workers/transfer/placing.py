"""Frames put in place on another thread, while the next one is received."""

import asyncio
import contextlib
from collections.abc import Callable
from concurrent.futures import Executor

from cachecore.transfer.frames import Frame


class PlacingSink:
    """What sinks have in common: one frame at a time is in another thread's hands."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self._placing: asyncio.Future[None] | None = None

    async def hand_over(self, place: Callable[[Frame], None], frame: Frame) -> None:
        """Raises what placing the frame before raised."""
        await self.finish()
        self._placing = asyncio.get_running_loop().run_in_executor(self._executor, place, frame)
        self._placing.add_done_callback(_look_at)

    async def finish(self) -> None:
        """Wait until all that was taken is in place. Raises what that raised."""
        if self._placing is not None:
            placing, self._placing = self._placing, None
            await asyncio.shield(placing)

    async def rest(self) -> None:
        """Wait until nothing is being put in place any more, whatever came of it."""
        with contextlib.suppress(Exception):
            await self.finish()


def _look_at(placing: "asyncio.Future[None]") -> None:
    """A failure that nobody waits for any more is nobody's."""
    if not placing.cancelled():
        placing.exception()
