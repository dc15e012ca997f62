"""Pages in a pool, for callers that are threads and know no exceptions.

SGLang has a thread each for looking up, reading and writing; a pool belongs to one loop. So the pool has a loop in a
thread of its own, and whoever asks waits for it, for `stall_seconds` at a time. SGLang's memory is only touched by the
thread that SGLang called: a page is sealed in memory of its own before it is handed over, and the caller copies what
has come, since the memory belongs to somebody else once a call has returned.

Bounded: `reads` pages are fetched ahead of the one that is used, and `writes` wait to be stored, those of calls that
were given up included. A miss of whatever kind ends a call's reading, as the prefix ends there.
"""

import asyncio
import concurrent.futures
import logging
import threading
from collections import Counter, deque
from collections.abc import Callable, Collection, Coroutine, Iterator, Sequence
from enum import StrEnum
from typing import Any, NamedTuple, TypeVar

from cachecore.scope import Keyring
from cachecore.store.pools import Accepted, Declined, Extent, Found, Missed, MissReason, PoolRun, SealedFrame
from cachecore.transfer.errors import FrameError
from cachecore.transfer.frames import FrameLimits, FrameWriter, open_frame
from cachecore.transfer.header import FrameHeader
from workers.pools import OpenPools

logger = logging.getLogger("ropeway.pools")

T = TypeVar("T")

LOOKUPS = 32
"""Pages that are looked for at once."""
REPORT_SECONDS = 60.0
CLEAR_SECONDS = 300.0
_CLOSE_SECONDS = 5.0


class PageOutcome(StrEnum):
    LOADED = "loaded"
    ABSENT = "absent"
    AWAY = "away"
    STALLED = "stalled"
    DAMAGED = "damaged"
    """It was there, and was not what had been put there. It is removed."""
    STORED = "stored"
    PRESENT = "present"
    """Somebody had stored it already."""
    DECLINED = "declined"
    BUSY = "busy"
    """Too much waits to be stored."""


_OUTCOMES = {
    MissReason.ABSENT: PageOutcome.ABSENT,
    MissReason.GONE: PageOutcome.ABSENT,
    MissReason.AWAY: PageOutcome.AWAY,
    MissReason.BROKEN: PageOutcome.DAMAGED,
}


def leading(found: Sequence[bool]) -> int:
    """How many are there before the first that is not."""
    return next((number for number, there in enumerate(found) if not there), len(found))


class Page(NamedTuple):
    run: PoolRun
    header: FrameHeader


class PageStore:
    """See the module's opening. `start` it, ask it from any thread, `close` it: from then on everything is a miss."""

    def __init__(
        self, opened: OpenPools, keyring: Keyring, *, reads: int = 8, writes: int = 4, stall_seconds: float = 2.0
    ) -> None:
        """Of the one pool that is `opened`."""
        (self._pool,) = opened.pools.values()
        self._opened = opened
        self._keyring = keyring
        self._writer = FrameWriter(keyring.frame_key)
        self._reads = reads
        self._stall_seconds = stall_seconds
        self._room = threading.BoundedSemaphore(writes)
        self._counts: Counter[PageOutcome] = Counter()
        self._counting = threading.Lock()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._live, name="ropeway pages", daemon=True)
        self._started = threading.Event()
        self._ending = asyncio.Event()
        self._closed = False

    def __repr__(self) -> str:
        return f"PageStore({self._pool!r}, {self.counts})"

    @property
    def counts(self) -> dict[str, int]:
        with self._counting:
            return {outcome.value: count for outcome, count in sorted(self._counts.items())}

    def start(self) -> None:
        """Reach the pool, or go on trying: one that is away stops nobody."""
        self._thread.start()
        self._started.wait(self._stall_seconds)

    def close(self) -> None:
        """What is being written has a moment to come to its end."""
        if self._closed:
            return
        self._closed = True
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._ending.set)
            self._thread.join(_CLOSE_SECONDS)

    # ---- for SGLang's threads ----------------------------------------------------------------------------------------

    def present(self, runs: Sequence[PoolRun]) -> int:
        """How many of a chain's pages are there before the first that is not."""
        found = 0
        for batch in _batched(runs, LOOKUPS):
            there = self._present_among(batch)
            found += leading(there)
            if not all(there):
                break
        return found

    def present_each(self, runs: Sequence[PoolRun]) -> list[bool]:
        return [there for batch in _batched(runs, LOOKUPS) for there in self._present_among(batch)]

    def load(self, pages: Sequence[Page], take: Callable[[int, memoryview], None]) -> int:
        """Hand the pages' bytes to `take`, by their numbers, in order and up to the first that misses; how many."""
        coming: deque[concurrent.futures.Future[Found | Missed] | None] = deque()
        asked = loaded = 0
        try:
            for page in pages:
                while asked < len(pages) and len(coming) < self._reads:
                    coming.append(self._submit(self._pool.get, pages[asked].run.key))
                    asked += 1
                payload = self._unsealed(page, coming.popleft())
                if payload is None:
                    break
                take(loaded, payload)
                loaded += 1
        finally:
            for future in coming:
                if future is not None:
                    future.cancel()
        return loaded

    def save(self, pages: Sequence[Page], pieces: Callable[[int], Sequence[memoryview]]) -> int:
        """Store the pages, whose bytes `pieces` tells by their numbers; how many are there before the first that is
        not."""
        there = self.present_each([page.run for page in pages])
        going: dict[int, concurrent.futures.Future[Accepted | Declined]] = {}
        for number, page in enumerate(pages):
            if there[number]:
                self._count(PageOutcome.PRESENT)
                continue
            future = self._begin_to_store(page, pieces(number))
            if future is None:
                break
            going[number] = future
        for number, future in going.items():
            there[number] = self._is_stored(future)
        return leading(there)

    def clear(self, classes: Collection[bytes]) -> bool:
        """Remove the pages of these classes; what others have in the pool stays."""
        future = self._submit(self._evict_all, classes)
        if future is None:
            return False
        try:
            return future.result(CLEAR_SECONDS)
        except (TimeoutError, concurrent.futures.CancelledError):
            return False

    # ---- steps -------------------------------------------------------------------------------------------------------

    def _present_among(self, runs: Sequence[PoolRun]) -> list[bool]:
        future = self._submit(self._contained, runs)
        there = self._awaited(future)
        return there if there is not None else [False] * len(runs)

    async def _contained(self, runs: Sequence[PoolRun]) -> list[bool]:
        return list(await asyncio.gather(*(self._pool.contains(run.key) for run in runs)))

    def _unsealed(self, page: Page, future: concurrent.futures.Future[Found | Missed] | None) -> memoryview | None:
        """A page's authentic bytes; None, and counted, when it missed."""
        answer = self._awaited(future)
        if answer is None:
            return None
        if isinstance(answer, Missed):
            self._count(_OUTCOMES[answer.reason])
            return None
        buffers = [buffer for frame in answer.frames for buffer in frame.buffers]
        data = buffers[0] if len(buffers) == 1 else b"".join(buffers)
        try:
            frame = open_frame(data, self._keyring.frame_key, FrameLimits(page.header.payload_bytes))
            if frame.header != page.header:
                raise FrameError("another page lies under its name")
        except FrameError as error:
            self._count(PageOutcome.DAMAGED)
            logger.warning("page %s is not what was put there: %s", page.run.key.name, error)
            self._submit(self._pool.evict, page.run.key)
            return None
        self._count(PageOutcome.LOADED)
        return frame.payload

    def _begin_to_store(
        self, page: Page, pieces: Sequence[memoryview]
    ) -> "concurrent.futures.Future[Accepted | Declined] | None":
        """None, and counted, when there is no room to hold it in."""
        if not self._room.acquire(timeout=self._stall_seconds):
            self._count(PageOutcome.BUSY)
            return None
        future = None
        try:
            sealed = b"".join(self._writer.seal(page.header, pieces))
            future = self._submit(self._pool.put, page.run, [SealedFrame(Extent(0, 1), [sealed])])
        finally:
            if future is None:
                self._room.release()
        if future is not None:
            future.add_done_callback(lambda _: self._room.release())
        return future

    def _is_stored(self, future: "concurrent.futures.Future[Accepted | Declined]") -> bool:
        outcome = self._awaited(future, give_up=False)  # it goes on, and holds its room until it has come to its end
        if outcome is None:
            return False
        if isinstance(outcome, Declined):
            self._count(PageOutcome.DECLINED)
            return False
        self._count(PageOutcome.STORED if outcome.new else PageOutcome.PRESENT)
        return True

    async def _evict_all(self, classes: Collection[bytes]) -> bool:
        async for run in self._pool.runs():
            if run.key.compatibility in classes:
                await self._pool.evict(run.key)
        return self._pool.stats().up

    # ---- between the threads -----------------------------------------------------------------------------------------

    def _submit(
        self, step: Callable[..., Coroutine[Any, Any, T]], *arguments: Any
    ) -> "concurrent.futures.Future[T] | None":
        """None, and counted, once the store was closed."""
        if self._closed or not self._thread.is_alive():
            self._count(PageOutcome.AWAY)
            return None
        return asyncio.run_coroutine_threadsafe(step(*arguments), self._loop)

    def _awaited(self, future: "concurrent.futures.Future[T] | None", give_up: bool = True) -> T | None:
        if future is None:
            return None
        try:
            return future.result(self._stall_seconds)
        except TimeoutError:
            self._count(PageOutcome.STALLED)
        except concurrent.futures.CancelledError:  # the store is being closed
            self._count(PageOutcome.AWAY)
        if give_up:
            future.cancel()
        return None

    def _count(self, outcome: PageOutcome) -> None:
        with self._counting:
            self._counts[outcome] += 1

    def _live(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._serve())

    async def _serve(self) -> None:
        await self._opened.start()
        self._started.set()
        reporting = asyncio.create_task(self._report(), name="report of pages")
        await self._ending.wait()
        reporting.cancel()
        await asyncio.gather(reporting, return_exceptions=True)
        await self._opened.close()

    async def _report(self) -> None:
        said: dict[str, int] = {}
        while True:
            await asyncio.sleep(REPORT_SECONDS)
            if (counts := self.counts) != said:
                said = counts
                logger.info("pages so far: %s", ", ".join(f"{count} {outcome}" for outcome, count in counts.items()))


def _batched(runs: Sequence[PoolRun], size: int) -> Iterator[Sequence[PoolRun]]:
    for start in range(0, len(runs), size):
        yield runs[start : start + size]
