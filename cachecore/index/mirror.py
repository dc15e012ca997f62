"""The index that every gateway of a fleet asks: a local copy of the shared one. A lookup never leaves the process.

What this process owns it writes twice, to the copy at once and to the server through the publisher; what others own
comes to the copy by the server's streams (`Feed`). While the copy is being loaded, lookups ask the server directly, and
if it does not answer, what has been loaded so far.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Iterator, Sequence
from dataclasses import dataclass, replace

from cachecore.blocks import Chain, PrefixHash
from cachecore.holders import Holder, Tier
from cachecore.index.contract import IndexEvent, IndexStats, Match, PrefixIndex
from cachecore.index.feed import Feed
from cachecore.index.memory import MemoryIndex
from cachecore.index.publisher import Publisher
from cachecore.index.schema import HolderSnapshot, Record, Schema
from cachecore.store import RedisStore, StoreError

FRESH_SECONDS = 2.0
RESTART_SECONDS = 1.0

logger = logging.getLogger("ropeway.index")


@dataclass(frozen=True)
class MirrorProgress:
    """How far the copy is, for a status page."""

    ready: bool
    """Lookups are answered here."""
    holders: int
    """That others own, known of."""
    holders_awaited: int
    """Those of them whose snapshot is still to come."""
    blocks: int
    entries: int
    """Read from the streams since the start."""
    resyncs: int
    """Snapshots applied since the start, those of the start included."""
    lag_seconds: float | None
    """Since all streams were last known to be read to their ends: a read that waits for the next entry counts up to a
    quarter of a second here. None before that was so."""


class MirrorIndex:
    """A `PrefixIndex`. `start` and `stop` it in the event loop that uses it. The publisher is its owner's to run.

    `direct` answers while the copy is loaded. `blocks_max` bounds the copy's distinct blocks; 0 means no bound.
    """

    local = True

    def __init__(
        self, store: RedisStore, schema: Schema, publisher: Publisher, direct: PrefixIndex, blocks_max: int = 0
    ) -> None:
        self._publisher = publisher
        self._direct = direct
        self._copy = MemoryIndex(blocks_max)
        self._feed = Feed(store, schema, publisher, self._copy)
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._run(), name="mirror")

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    # A prefix index

    def apply(self, holder: Holder, sequence: int, events: Sequence[IndexEvent]) -> bool:
        """A holder that nobody was told to own is owned from now on, and what was known of it is void."""
        if not self._publisher.owns(holder):
            self._copy.forget(holder)
        self._feed.follower(holder).own(holder)
        applied = self._publisher.apply(holder, sequence, events)
        if applied:
            self._feed.put(holder, events)
        return applied

    def match(self, chain: Chain) -> Match | Awaitable[Match]:
        return self._copy.match(chain) if self._feed.loaded else self._match_directly(chain)

    def forget(self, holder: Holder) -> None:
        """At once, and for the whole fleet if the holder is ours. Otherwise it stays forgotten here, whatever its owner
        says, until the owner agrees or another one gives it a new life."""
        self._copy.forget(holder)
        version = self._publisher.version(holder)
        self._feed.follower(holder).bury(holder, version.fence if version else None)
        self._publisher.forget(holder)

    def sequence(self, holder: Holder) -> int | None:
        if self._publisher.owns(holder):
            return self._publisher.sequence(holder)
        return self._feed.follower(holder).sequence(holder)

    def blocks_held(self, holder: Holder, tier: Tier) -> int:
        return self._copy.blocks_held(holder, tier)

    def holdings(self, holder: Holder, tier: Tier) -> Iterator[PrefixHash]:
        return self._copy.holdings(holder, tier)

    def stats(self) -> IndexStats:
        """Sizes are the copy's; batches and events are counted where this process applied them."""
        copy, written = self._copy.stats(), self._publisher.stats()
        return replace(
            copy,
            stale_batches=written.stale_batches,
            unknown_removals=written.unknown_removals,
            extra=dict(written.extra),
        )

    # Ownership

    def adopt(self, holder: Holder, fence: int, snapshot: HolderSnapshot | None) -> None:
        """This process owns the holder from now on, and goes on from the snapshot; from nothing when there is none."""
        self._publisher.adopt(holder, fence, snapshot)
        self._feed.own(holder, snapshot)

    def drop(self, holder: Holder) -> None:
        """Somebody else owns the holder from now on. Its copy stays, and is soon made what the server has."""
        self._publisher.drop(holder)
        self._feed.release(holder)

    def renew(self, holder: Holder, fence: int) -> None:
        """The holder is ours as before, from now on under this fence."""
        self._publisher.renew(holder, fence)

    def restate(self, holder: Holder) -> None:
        """Make the server say of a holder of ours what is known here, whatever it says now."""
        self._publisher.restate(holder)

    async def flush(self) -> None:
        """Until the server has what was applied. Raises StoreError when it does not take it."""
        await self._publisher.flush()

    # What is known of the copy itself

    @property
    def ready(self) -> bool:
        return self._feed.loaded

    def fresh(self, holder: Holder, said: Record | None = None) -> bool:
        """Whether the copy of this holder is all of its owner's word, as of two seconds ago at most. What the server
        has of it does not matter: it may have less, and a copy that has followed the stream lacks nothing."""
        if self._publisher.owns(holder):
            return True
        shard = self._feed.shard(holder)
        if shard.ended_at is None or time.monotonic() - shard.ended_at > FRESH_SECONDS:
            return False
        return shard.follower.is_whole(holder)

    def progress(self) -> MirrorProgress:
        shards = self._feed.shards
        ends = [shard.ended_at for shard in shards if shard.ended_at is not None]
        return MirrorProgress(
            ready=self.ready,
            holders=sum(shard.follower.followed for shard in shards),
            holders_awaited=sum(shard.follower.unsettled for shard in shards),
            blocks=self._copy.stats().blocks,
            entries=self._feed.entries,
            resyncs=sum(shard.follower.resyncs for shard in shards),
            lag_seconds=time.monotonic() - min(ends) if len(ends) == len(shards) else None,
        )

    async def caught_up(self) -> None:
        """Until everything that is in the streams now has been applied. Raises StoreError."""
        await self._feed.caught_up()

    # Parts

    async def _match_directly(self, chain: Chain) -> Match:
        try:
            answer = self._direct.match(chain)
            return answer if isinstance(answer, Match) else await answer
        except StoreError:
            return self._copy.match(chain)

    async def _run(self) -> None:
        while True:
            try:
                await self._feed.run()
            except Exception:
                logger.exception("the mirror failed, and goes on from where it was")
            await asyncio.sleep(RESTART_SECONDS)
