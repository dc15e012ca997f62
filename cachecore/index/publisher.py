"""Writes what this process knows of its holders into the shared index.

`apply` and `forget` change shadows and return at once; `run` brings the server to the same state, a step for each
holder that has news and all of these steps in one round trip. When the server is away the steps wait and the batches
behind them become one; what is too much to tell the mirrors is dropped, and they read those holders anew.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress

import numpy as np

from cachecore.blocks import HASH_BYTES, PrefixHash
from cachecore.holders import Holder, Tier
from cachecore.index.contract import IndexEvent, IndexStats
from cachecore.index.schema import HolderSnapshot, Schema, Version
from cachecore.index.shadow import Shadow, ShadowCounts
from cachecore.index.writer import HolderWriter, Mode
from cachecore.store import RedisStore, StoreError, Unavailable

logger = logging.getLogger("ropeway.index")

STEPS_MAX = 64
"""In one round trip."""
BUDGET_SECONDS = 2.0
"""For a round trip. Nobody waits for it; a step that was in truth taken is not taken twice."""
LINGER_SECONDS = 0.005
"""Between news and the round trip that tells it, so that it tells more."""
PAUSE_SECONDS = 0.05
"""After the server could not be reached."""
CHECK_SECONDS = 1.0
"""Between two looks at whether the server still has what was written."""


class Publisher:
    """One process's writers.

    `blocks_max` bounds the holdings of a holder (0: no bound), `queue_max_blocks` those in events that wait.
    `on_fenced` hears of a holder that somebody else writes now: it is not ours any more when it is called.
    """

    def __init__(
        self,
        store: RedisStore,
        schema: Schema,
        *,
        blocks_max: int = 0,
        queue_max_blocks: int = 1 << 20,
        stream_length_max: int = 10_000,
        on_fenced: Callable[[Holder], None] = lambda holder: None,
        clock_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        self.on_fenced = on_fenced
        self._store = store
        self._schema = schema
        self._blocks_max = blocks_max
        self._queue_max_blocks = queue_max_blocks
        self._stream_length_max = stream_length_max
        self._clock_ns = clock_ns
        self._counts = ShadowCounts()
        self._writers: dict[Holder, HolderWriter] = {}
        self._due: dict[Holder, None] = {}
        self._resting: dict[Holder, None] = {}
        self._wake = asyncio.Event()
        self._turn = asyncio.Lock()
        self._check_at = 0.0
        self._stale_batches = 0
        self._steps = 0
        self._restatements = 0
        self._reason = ""

    # Holders

    def adopt(self, holder: Holder, fence: int, snapshot: HolderSnapshot | None) -> None:
        """This process writes the holder from now on: from where `snapshot` is, or anew.

        Raises ValueError when the snapshot contradicts itself.
        """
        if snapshot is None:
            shadow, revision = Shadow(self._blocks_max, self._counts), None
        else:
            shadow, revision = Shadow.load(snapshot, self._blocks_max, self._counts), snapshot.version.revision
        self._writers[holder] = HolderWriter(
            self._schema, holder, fence, shadow, revision, stream_length_max=self._stream_length_max
        )

    def renew(self, holder: Holder, fence: int) -> None:
        """The holder's lease was lost with the server's data, and is ours again under another fence."""
        if (writer := self._writers.get(holder)) is not None:
            writer.renew(fence)
            self._wake_for(holder)

    def drop(self, holder: Holder) -> None:
        """Nothing more of the holder is written by this process."""
        self._writers.pop(holder, None)
        self._due.pop(holder, None)
        self._resting.pop(holder, None)

    def owns(self, holder: Holder) -> bool:
        return holder in self._writers

    def owned(self) -> list[Holder]:
        return list(self._writers)

    def version(self, holder: Holder) -> Version | None:
        """Of what was written last, or is about to be; None for a holder that this process does not write."""
        writer = self._writers.get(holder)
        return writer.version if writer is not None else None

    def sequence(self, holder: Holder) -> int | None:
        writer = self._writers.get(holder)
        return writer.shadow.sequence if writer is not None else None

    def holdings(self, holder: Holder, tier: Tier) -> Iterator[PrefixHash]:
        writer = self._writers.get(holder)
        seen: set[PrefixHash] = set()
        for pieces in writer.shadow.places(tier) if writer is not None else ():
            seen.update(pieces.names())
        yield from seen

    def distinct_blocks(self) -> int:
        """Of the holders this process writes. Looks at every block."""
        places = [pieces for writer in self._writers.values() for pieces in writer.shadow.places()]
        packed = b"".join(pieces.packed_names() for pieces in places)
        return len(np.unique(np.frombuffer(packed, dtype=np.dtype((np.void, HASH_BYTES)))))

    def stats(self) -> IndexStats:
        """Of the holders this process writes; `blocks` is left out."""
        shadows = [writer.shadow for writer in self._writers.values()]
        places = [pieces for shadow in shadows for pieces in shadow.places()]
        return IndexStats(
            holdings=sum(pieces.blocks for pieces in places),
            runs=sum(len(pieces) for pieces in places),
            holders=sum(shadow.sequence is not None for shadow in shadows),
            evicted_blocks=self._counts.evicted_blocks,
            stale_batches=self._stale_batches,
            unknown_removals=self._counts.unknown_removals,
            extra={
                "malformed_events": self._counts.malformed_events,
                "queued_blocks": sum(writer.queued_blocks for writer in self._writers.values()),
                "unwritten_holders": sum(not writer.settled for writer in self._writers.values()),
                "written_steps": self._steps,
                "restatements": self._restatements,
            },
        )

    # Writing

    def apply(self, holder: Holder, sequence: int, events: Sequence[IndexEvent]) -> bool:
        """As the index contract has it. A holder that nobody has adopted is written anew, fenced by the clock."""
        writer = self._writers.get(holder)
        if writer is None:
            self.adopt(holder, self._clock_ns() // 1_000_000, None)
            writer = self._writers[holder]
        shadow = writer.shadow
        if shadow.sequence is not None and sequence <= shadow.sequence:
            self._stale_batches += 1
            return False
        writer.queue(shadow.apply(sequence, events))
        if writer.queued_blocks > self._queue_max_blocks // len(self._writers):
            writer.drop_events()
        self._wake_for(holder)
        return True

    def forget(self, holder: Holder) -> None:
        """The holder is gone. One that this process does not write is its writer's to forget."""
        writer = self._writers.get(holder)
        if writer is not None:
            writer.forget(Shadow(self._blocks_max, self._counts))
            self._wake_for(holder)

    def restate(self, holder: Holder) -> None:
        """The server may have lost something of the holder: write everything anew."""
        if (writer := self._writers.get(holder)) is not None:
            writer.restate()
            self._wake_for(holder)

    async def run(self) -> None:
        """Write until cancelled."""
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(CHECK_SECONDS / 4):
                    await self._wake.wait()
                    await asyncio.sleep(LINGER_SECONDS)
            self._wake.clear()
            try:
                error = await self._write_due()
                if error is None and time.monotonic() >= self._check_at:
                    self._check_at = time.monotonic() + CHECK_SECONDS
                    error = await self._check()
            except Exception:
                logger.exception("a turn of the shared index's writer failed")
                error = Unavailable("internal error")
            self._report(error)
            if error is not None:
                await asyncio.sleep(PAUSE_SECONDS)
            self._due |= self._resting
            self._resting.clear()
            if error is not None and self._due:
                self._wake.set()

    async def flush(self) -> None:
        """Until what was queued is written, or its holder is written by somebody else. Raises StoreError when the
        server cannot be reached or refuses to take it."""
        while self._due:
            error = await self._write_due()
            if error is not None:
                raise error
        if any(not self._writers[holder].idle for holder in self._resting):
            raise Unavailable(self._reason or "the server has refused to take it, and is asked again later")

    def _wake_for(self, holder: Holder) -> None:
        self._resting.pop(holder, None)
        self._due[holder] = None
        self._wake.set()

    async def _write_due(self) -> StoreError | None:
        """A step of each holder that has news, until none has. The first error stops it."""
        async with self._turn:
            while self._due:
                error = await self._write_some()
                if error is not None:
                    return error
        return None

    async def _write_some(self) -> StoreError | None:
        writers, calls = [], []
        for holder in list(self._due):
            writer = self._writers[holder]
            call = writer.next_call(time.monotonic(), self._clock_ns() // 1000)
            if call is None:
                self._put_aside(holder, writer)
                continue
            writers.append(writer)
            calls.append(call)
            if len(calls) == STEPS_MAX:
                break
        answers = await self._store.run_many(calls, BUDGET_SECONDS) if calls else []
        now, errors = time.monotonic(), []
        for writer, answer in zip(writers, answers, strict=True):
            if self._writers.get(writer.holder) is writer:
                writer.settle(answer, now)
                self._settle(writer)
            if isinstance(answer, StoreError):
                errors.append(answer)
        self._steps += len(calls) - len(errors)
        return next((error for error in errors if isinstance(error, Unavailable)), errors[0] if errors else None)

    def _put_aside(self, holder: Holder, writer: HolderWriter) -> None:
        """Nothing can be written of the holder now: there is no news, or the server wants none."""
        del self._due[holder]
        if not writer.settled:
            self._resting[holder] = None

    def _settle(self, writer: HolderWriter) -> None:
        holder = writer.holder
        if writer.mode is Mode.FENCED:
            logger.info("%s is written by somebody else now", holder)
            self.drop(holder)
            self.on_fenced(holder)
        elif writer.mode is Mode.NEW and writer.idle and not writer.touched:
            self.drop(holder)  # forgotten, and nothing has come since
        elif writer.mode is Mode.RESTART:
            self._restatements += 1
            self._due[holder] = None
        elif writer.idle:
            self._put_aside(holder, writer)

    async def _check(self) -> StoreError | None:
        """Look whether the server has lost anything that nothing else would bring to light."""
        async with self._turn:
            asked = [(writer, call) for writer in self._writers.values() if (call := writer.check()) is not None]
            for start in range(0, len(asked), STEPS_MAX):
                some = asked[start : start + STEPS_MAX]
                answers = await self._store.run_many([call for _, call in some], BUDGET_SECONDS)
                for (writer, _), answer in zip(some, answers, strict=True):
                    if isinstance(answer, Unavailable):
                        return answer
                    if self._writers.get(writer.holder) is writer:
                        writer.settle_check(answer)
                        if writer.mode is not Mode.LIVE:
                            self._settle(writer)
                            self._wake.set()
        return None

    def _report(self, error: StoreError | None) -> None:
        reason = "" if error is None else str(error)
        if reason and not self._reason:
            logger.warning("the shared index cannot be written: %s", reason)
        elif self._reason and not reason:
            logger.info("the shared index can be written again")
        self._reason = reason
