"""What all pools do alike: measure, read ahead, announce, and turn whatever goes wrong into a reason.

A store behind it is a `Backend`: it opens runs, stores them and removes them, and raises StoreError (and nothing else)
when it cannot. `PooledRuns` never lets one through.
"""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Any, Protocol, TypeVar

from cachecore.blocks import Chain
from cachecore.holders import Pool, Tier
from cachecore.index.contract import Cleared, IndexEvent, Removed
from cachecore.scope import Fidelity
from cachecore.store.errors import StoreError
from cachecore.store.pools import hckv
from cachecore.store.pools.contract import (
    Accepted,
    Announce,
    Announcement,
    Buffer,
    Declined,
    DeclineReason,
    Extent,
    Found,
    Missed,
    MissReason,
    PoolBounds,
    PoolRun,
    PoolStats,
    RemovalReason,
    RunKey,
    SealedFrame,
)

logger = logging.getLogger("ropeway.pools")

T = TypeVar("T")

READ_BYTES = 8 << 20
"""Frames are read together up to this many bytes; the next read is under way while these are used. The first read is
an eighth of it, and each that follows twice the one before, so that the first layers do not wait for many others."""
COLLECT_SECONDS = 60.0
CLOSE_SECONDS = 1.0


class Gone(StoreError):
    """What was being read is not there any more."""


class Opened(Protocol):
    """A run found in the store. What it reads is of one writing, also when the run is replaced meanwhile."""

    index: hckv.RunIndex

    async def read(self, offset: int, size: int) -> Buffer:
        """Bytes of the file. Raises StoreError; Gone when the run was removed."""
        ...

    async def close(self) -> None: ...


def batches(records: Sequence[hckv.FrameRecord], bytes_max: int) -> list[list[hckv.FrameRecord]]:
    """Consecutive frames that are read together: as many as stay within the bound of that read, and one at least."""
    groups: list[list[hckv.FrameRecord]] = []
    bound = max(1, bytes_max // 8)
    for record in records:
        if groups and record.offset + record.size - groups[-1][0].offset <= bound:
            groups[-1].append(record)
            continue
        bound = min(2 * bound, bytes_max) if groups else bound
        groups.append([record])
    return groups


class PooledRuns:
    """The half of a pool that does not depend on where it keeps things. See KvPool for the contract."""

    def __init__(self, name: str, bounds: PoolBounds, announce: Announce, clock: Callable[[], float]) -> None:
        self.name = name
        self.bounds = bounds
        self._announce_to = announce
        self._clock = clock
        self._holder: Pool | None = None
        self._counts = PoolStats(bytes_max=bounds.bytes_max)
        self._misses: Counter[MissReason] = Counter()
        self._declined: Counter[DeclineReason] = Counter()
        self._removed: Counter[RemovalReason] = Counter()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._collector: asyncio.Task[None] | None = None
        self._reason = "it was not reached yet"

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._holder or self.name}, {self._reason or 'up'})"

    @property
    def holder(self) -> Pool | None:
        return self._holder

    # Backends implement these; they raise StoreError

    async def _find_generation(self) -> int:
        """The present one; made when there is none."""
        raise NotImplementedError

    async def _store(self, run: PoolRun, encoded: hckv.Encoded) -> Accepted | Declined:
        raise NotImplementedError

    async def _open(self, key: RunKey) -> Opened | None:
        """None when it is not there. Raises hckv.Broken for what is no run."""
        raise NotImplementedError

    async def _renew(self, key: RunKey) -> None:
        """It was read."""
        raise NotImplementedError

    async def _present(self, key: RunKey) -> bool:
        raise NotImplementedError

    async def _remove(self, key: RunKey, reason: RemovalReason) -> bool:
        """Remove and announce."""
        raise NotImplementedError

    async def _collect(self) -> None:
        raise NotImplementedError

    async def _wipe(self) -> int:
        """Drop everything; the new generation."""
        raise NotImplementedError

    def _list(self) -> AsyncIterator[PoolRun]:
        raise NotImplementedError

    def _occupancy(self, stats: PoolStats) -> None:
        raise NotImplementedError

    # Life

    async def start(self) -> None:
        await self._attempt(self._meet)
        self._collector = asyncio.create_task(self._keep_collecting(), name=f"collector of pool {self.name}")

    async def close(self) -> None:
        """What is under way has a moment to come to its end."""
        if self._collector is not None:
            self._collector.cancel()
            await asyncio.gather(self._collector, return_exceptions=True)
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=CLOSE_SECONDS)
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    # Runs

    async def put(self, run: PoolRun, frames: Sequence[SealedFrame]) -> Accepted | Declined:
        started = time.perf_counter()
        encoded = await asyncio.to_thread(hckv.encode, run, frames)
        return await self._carry_out(self._put_encoded(run, encoded, started))

    async def stream(self, key: RunKey, layers: Extent | None = None) -> AsyncGenerator[SealedFrame | Missed, None]:
        started: float | None = time.perf_counter()
        async with aclosing(self._stream(key, layers)) as items:
            async for item in items:
                if isinstance(item, Missed):
                    self._misses[item.reason] += 1
                else:
                    self._counts.read_bytes += item.size_bytes
                    if started is not None:
                        self._counts.hits += 1
                        self._counts.first_frame.observe(time.perf_counter() - started)
                        started = None
                yield item

    async def get(self, key: RunKey, layers: Extent | None = None) -> Found | Missed:
        frames = []
        async with aclosing(self.stream(key, layers)) as items:
            async for item in items:
                if isinstance(item, Missed):
                    return item
                frames.append(item)
        return Found(tuple(frames))

    async def contains(self, key: RunKey) -> bool:
        return bool(await self._attempt(self._present, key))

    async def evict(self, key: RunKey) -> bool:
        return bool(await self._carry_out(self._attempt(self._remove, key, RemovalReason.ASKED)))

    async def collect(self) -> None:
        await self._attempt(self._meet)
        if self._holder is not None:
            await self._attempt(self._collect)

    async def wipe(self) -> bool:
        return await self._carry_out(self._wipe_and_enter())

    async def runs(self) -> AsyncIterator[PoolRun]:
        try:
            async for run in self._list():
                yield run
            self._reach("")
        except StoreError as error:
            self._reach(str(error))

    def stats(self) -> PoolStats:
        stats = replace(
            self._counts,
            holder=self._holder,
            up=not self._reason,
            reason=self._reason,
            misses=dict(self._misses),
            declined=dict(self._declined),
            removed=dict(self._removed),
        )
        self._occupancy(stats)
        return stats

    async def _put_encoded(self, run: PoolRun, encoded: hckv.Encoded, started: float) -> Accepted | Declined:
        outcome: Accepted | Declined
        if encoded.size > min(self.bounds.run_bytes_max, self.bounds.quota(run.key.tenant)):
            outcome = Declined(DeclineReason.LARGE, f"{encoded.size} bytes")
        else:
            try:
                outcome = await self._store(run, encoded)
                self._reach("")
            except StoreError as error:
                self._reach(str(error))
                outcome = Declined(DeclineReason.AWAY, str(error))
        self._count_put(outcome, encoded.size, time.perf_counter() - started)
        if isinstance(outcome, Accepted) and outcome.new:
            self._announce(run.stored(), run)
        return outcome

    async def _wipe_and_enter(self) -> bool:
        generation = await self._attempt(self._wipe)
        if generation is not None:
            self._enter(generation)
        return generation is not None

    async def _stream(self, key: RunKey, layers: Extent | None) -> AsyncGenerator[SealedFrame | Missed, None]:
        opened: Opened | None = None
        try:
            opened = await self._open(key)
            self._reach("")
            if opened is None:
                yield Missed(MissReason.ABSENT)
                return
            if opened.index.run.key != key:
                raise hckv.Broken("another run lies under its name")
            async with aclosing(_read_ahead(opened, layers)) as frames:
                async for frame in frames:
                    yield frame
            self._spawn(self._renew, key)
        except hckv.Broken as error:
            logger.warning("%s: run %s is not what was put there: %s", self.name, key.name, error)
            await self._carry_out(self._attempt(self._remove, key, RemovalReason.BROKEN))
            yield Missed(MissReason.BROKEN, str(error))
        except Gone as error:
            yield Missed(MissReason.GONE, str(error))
        except StoreError as error:
            self._reach(str(error))
            yield Missed(MissReason.AWAY, str(error))
        finally:
            if opened is not None:
                await opened.close()

    # For backends

    async def _meet(self) -> None:
        """Learn which generation this is."""
        self._enter(await self._find_generation())

    def _enter(self, generation: int) -> None:
        holder = Pool(self.name, generation)
        if self._holder is not None and self._holder != holder:
            logger.warning("pool %s was wiped: generation %d is over", self.name, self._holder.generation)
            self._announce(Cleared(), None)
        self._holder = holder

    def _announce(self, event: IndexEvent, run: PoolRun | None) -> None:
        if self._holder is not None:
            self._announce_to(Announcement(self._holder, event, run))

    def _announce_removal(self, name: str, run: PoolRun | None, reason: RemovalReason) -> None:
        """`run` is None when its description cannot be read; its name says enough to end matches at its last block."""
        self._removed[reason] += 1
        if run is not None:
            self._announce(run.removed(), run)
        else:
            tail, fidelity, _ = name.split("-")
            self._announce(Removed(Chain(bytes.fromhex(tail)), Tier.L2, Fidelity(int(fidelity))), None)

    def _reach(self, reason: str) -> None:
        """It answered (no reason), or it did not."""
        if reason and not self._reason:
            logger.warning("pool %s is away: %s", self.name, reason)
        elif self._reason and not reason:
            logger.info("pool %s is there", self.name)
        self._reason = reason

    def _spawn(self, step: Callable[..., Awaitable[Any]], *arguments: Any) -> None:
        self._begin_task(self._attempt(step, *arguments))

    async def _carry_out(self, work: Coroutine[Any, Any, T]) -> T:
        """What changes the store goes on to its end, and is announced, also when the caller is cancelled."""
        return await asyncio.shield(self._begin_task(work))

    def _begin_task(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._end_task)
        return task

    def _end_task(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # seen: nobody may be waiting for it

    async def _attempt(self, step: Callable[..., Awaitable[Any]], *arguments: Any) -> Any:
        """The answer, or None when the store has none to give."""
        try:
            answer = await step(*arguments)
        except StoreError as error:
            self._reach(str(error))
            return None
        self._reach("")
        return answer

    async def _keep_collecting(self) -> None:
        while True:
            try:
                await self.collect()
            except Exception:  # the next time may go better, and the pool serves without
                logger.exception("collecting in pool %s failed", self.name)
            await asyncio.sleep(COLLECT_SECONDS if self._holder else 1.0)

    def _count_put(self, outcome: Accepted | Declined, size: int, seconds: float) -> None:
        counts = self._counts
        if isinstance(outcome, Declined):
            self._declined[outcome.reason] += 1
        elif outcome.new:
            counts.stored += 1
            counts.written_bytes += size
            counts.write.observe(seconds)
        else:
            counts.present += 1


async def _read_ahead(opened: Opened, layers: Extent | None) -> AsyncGenerator[SealedFrame, None]:
    """One batch is being read while the frames of the one before it are used."""
    groups = batches(opened.index.overlapping(layers), READ_BYTES)
    coming: asyncio.Task[list[SealedFrame]] | None = None
    try:
        for number, group in enumerate(groups):
            frames = await (coming or _read(opened, group))
            following = groups[number + 1] if number + 1 < len(groups) else None
            coming = asyncio.create_task(_read(opened, following)) if following else None
            for frame in frames:
                yield frame
    finally:
        if coming is not None:
            coming.cancel()
            await asyncio.gather(coming, return_exceptions=True)


async def _read(opened: Opened, records: Sequence[hckv.FrameRecord]) -> list[SealedFrame]:
    start, end = records[0].offset, records[-1].offset + records[-1].size
    data = await opened.read(start, end - start)
    return await asyncio.to_thread(hckv.split, memoryview(data).cast("B"), records)
