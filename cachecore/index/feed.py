"""What keeps a mirror's copy equal to the shared index: the streams, surveys of the records, and snapshots.

`Follower` decides, this carries it out. One task reads the streams (in a cluster one for each slot), one compares the
records every second, and a few fetch snapshots. All of them put into one local index, in turns: none holds the event
loop for longer than TURN_SECONDS at a time, so requests go on being answered while a million blocks are loaded.
"""

import asyncio
import itertools
import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from cachecore.blocks import HASH_BYTES, Chain, PrefixHash
from cachecore.holders import Holder
from cachecore.index import lua
from cachecore.index.contract import IndexEvent, Stored
from cachecore.index.following import Follower, Mark, Resync, StreamId, Verdict
from cachecore.index.memory import MemoryIndex
from cachecore.index.publisher import Publisher
from cachecore.index.redis import read_snapshot
from cachecore.index.schema import (
    SHARDS,
    Entry,
    HolderSnapshot,
    PieceRecord,
    Record,
    Schema,
    decode_events,
    layer_of,
    parse_holder,
    shard_of,
)
from cachecore.store import Call, RedisStore, StoreError, StreamEntry, Unavailable

READ_BLOCK_SECONDS = 0.25
READ_ENTRIES_MAX = 256
"""Of each stream at once."""
SURVEY_SECONDS = 1.0
SURVEY_BUDGET_SECONDS = 2.0
SNAPSHOTS_AT_ONCE = 4
TURN_SECONDS = 0.001
TURN_EVENTS = 32
"""Applied without looking at the clock."""
COMPLAINT_SECONDS = 10.0
"""Between two lines in the log."""
RETRY_SECONDS_MIN = 0.05
RETRY_SECONDS_MAX = 1.0

logger = logging.getLogger("ropeway.index")
_SURVEY = lua.load("survey")


@dataclass(slots=True)
class Shard:
    stream: bytes
    holders: bytes
    follower: Follower
    surveyed: bool = False
    ended_at: float | None = None
    """When (`time.monotonic`) reading last came to the stream's end."""


class Feed:
    def __init__(self, store: RedisStore, schema: Schema, publisher: Publisher, copy: MemoryIndex) -> None:
        self._store = store
        self._schema = schema
        self._publisher = publisher
        self._copy = copy
        self._batches = itertools.count()
        self._work = asyncio.Event()
        self._progressed = asyncio.Event()
        self._turns = _Turns()
        self._complain_at = 0.0
        self._fetching = 0
        self._unfinished: set[Holder] = set()
        """Holders whose copy lags behind the version it has been given, in the middle of a big entry."""
        self.shards = [
            Shard(schema.stream(number), schema.holders(number), Follower(publisher.owns)) for number in range(SHARDS)
        ]
        self.loaded = False
        """Whether everything that was there at the start has been here."""
        self.entries = 0

    def shard(self, holder: Holder) -> Shard:
        return self.shards[shard_of(holder)]

    def follower(self, holder: Holder) -> Follower:
        return self.shard(holder).follower

    def put(self, holder: Holder, events: Sequence[IndexEvent]) -> None:
        """Apply to the copy, whose batches are numbered by arrival."""
        self._copy.apply(holder, next(self._batches), events)

    def own(self, holder: Holder, snapshot: HolderSnapshot | None) -> None:
        """This process writes the holder from now on: its copy is what the snapshot says, at once."""
        follower = self.follower(holder)
        if snapshot is None or holder in self._unfinished or not follower.is_copy(holder, snapshot.version):
            self._replace(holder, snapshot)
        follower.own(holder)

    def release(self, holder: Holder) -> None:
        """The holder is written by others from now on."""
        self.follower(holder).release(holder)
        self._work.set()

    async def run(self) -> None:
        """Until cancelled."""
        streams = [shard.stream for shard in self.shards]
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._survey_often(), name="mirror surveys")
            for group in self._store.group(streams):
                tasks.create_task(self._read([self.shards[index] for index in group]), name="mirror reads")
            for _ in range(SNAPSHOTS_AT_ONCE):
                tasks.create_task(self._fetch_wanted(), name="mirror snapshots")

    async def caught_up(self) -> None:
        """Until everything that is in the streams now has been applied. Raises StoreError."""
        marks: list[Mark] = []
        for shard, answer in zip(self.shards, await self._ask_all(), strict=True):
            if isinstance(answer, StoreError):
                raise answer
            marks.append(shard.follower.mark(StreamId.parse(answer[0])))
        while not all(map(_has_caught_up, self.shards, marks)):
            self._progressed.clear()
            await self._progressed.wait()

    # Streams

    async def _read(self, shards: list[Shard]) -> None:
        by_stream = {shard.stream: shard for shard in shards}
        retry = _Backoff()
        while True:
            positions = {shard.stream: shard.follower.position.encode() for shard in shards if shard.surveyed}
            if not positions:
                await asyncio.sleep(RETRY_SECONDS_MIN)
                continue
            try:
                entries = await self._store.read_streams(positions, READ_BLOCK_SECONDS, READ_ENTRIES_MAX)
            except StoreError:
                await retry.wait()
                continue
            retry.reset()
            for entry in entries:
                await self._turns.take()
                await self._take(by_stream[entry.stream], entry)
            self._note_ends(positions, by_stream, entries)

    async def _take(self, shard: Shard, arrived: StreamEntry) -> None:
        self.entries += 1
        try:
            entry = Entry.decode(arrived.fields)
        except ValueError as error:
            self._complain("skipped an entry of %s: %s", shard.stream.decode(), error)
        else:
            await self._carry_out(shard.follower, entry, shard.follower.take(entry))
        shard.follower.position = StreamId.parse(arrived.id)

    async def _carry_out(self, follower: Follower, entry: Entry, verdict: Verdict) -> None:
        if verdict in (Verdict.REPLACE, Verdict.FORGET):
            self._copy.forget(entry.holder)
        if verdict in (Verdict.REPLACE, Verdict.APPLY):
            try:
                events = decode_events(entry.events)
            except ValueError as error:
                self._complain("%s must be copied anew: %s", entry.holder, error)
                follower.doubt(entry.holder)
            else:
                await self._put_in_turns(follower, entry.holder, events)
        if follower.wanted:
            self._work.set()

    async def _put_in_turns(self, follower: Follower, holder: Holder, events: Sequence[IndexEvent]) -> None:
        self.put(holder, events[:TURN_EVENTS])
        standing = follower.standing(holder)
        self._unfinished.add(holder)
        try:
            for start in range(TURN_EVENTS, len(events), TURN_EVENTS):
                await self._turns.take()
                if follower.standing(holder) != standing:
                    return  # forgotten, adopted, or to be copied anew
                self.put(holder, events[start : start + TURN_EVENTS])
        except BaseException:
            follower.doubt(holder)  # stopped halfway through an entry that counts as taken
            raise
        finally:
            self._unfinished.discard(holder)

    def _note_ends(
        self, positions: Mapping[bytes, bytes], shards: Mapping[bytes, Shard], entries: Sequence[StreamEntry]
    ) -> None:
        counts = dict.fromkeys(positions, 0)
        for entry in entries:
            counts[entry.stream] += 1
        now = time.monotonic()
        for stream, count in counts.items():
            if count < READ_ENTRIES_MAX:
                shards[stream].follower.read_to_the_end()
                shards[stream].ended_at = now
        self._progressed.set()

    # Surveys

    async def _survey_often(self) -> None:
        retry = _Backoff()
        while True:
            complete = await self._survey()
            while self._copy.sweep(64):
                await self._turns.take()
            if complete:
                retry.reset()
                await asyncio.sleep(SURVEY_SECONDS)
            else:
                await retry.wait()

    async def _survey(self) -> bool:
        complete = True
        for shard, answer in zip(self.shards, await self._ask_all(), strict=True):
            if isinstance(answer, StoreError):
                complete = False
                continue
            await self._turns.take()
            self._compare(shard, StreamId.parse(answer[0]), self._records(answer[1]))
        self._look_whether_loaded()
        return complete

    def _records(self, listed: Sequence[bytes]) -> dict[Holder, Record]:
        """What does not parse is some other version's, or nobody's: nothing here can follow it."""
        records = {}
        for name, value in zip(listed[::2], listed[1::2], strict=True):
            try:
                records[parse_holder(name)] = Record.decode(value)
            except ValueError as error:
                self._complain("ignored a holder's record: %s", error)
        return records

    async def _ask_all(self) -> list[Any]:
        calls = [Call(_SURVEY, (shard.stream, shard.holders)) for shard in self.shards]
        return await self._store.run_many(calls, SURVEY_BUDGET_SECONDS)

    def _compare(self, shard: Shard, last: StreamId, records: Mapping[Holder, Record]) -> None:
        for holder in shard.follower.survey(last, records):
            self._copy.forget(holder)
        shard.surveyed = True
        if shard.follower.wanted:
            self._work.set()

    # Snapshots

    async def _fetch_wanted(self) -> None:
        retry = _Backoff()
        while True:
            await self._work.wait()
            follower = next((shard.follower for shard in self.shards if shard.follower.wanted), None)
            if follower is None:
                self._work.clear()
                continue
            holder = next(iter(follower.wanted))
            resync = follower.ask(holder)
            if resync is None:
                continue
            self._fetching += 1
            try:
                fetched = await self._fetch(follower, holder, resync)
            finally:
                self._fetching -= 1
                follower.fail(holder, resync)  # if nothing has come of it
            if fetched:
                retry.reset()
                self._look_whether_loaded()
            else:
                await retry.wait()

    async def _fetch(self, follower: Follower, holder: Holder, resync: Resync) -> bool:
        """Copy the holder anew. False when the server is away."""
        try:
            snapshot = await read_snapshot(self._store, self._schema, holder)
        except Unavailable:
            return False
        except (StoreError, ValueError) as error:
            self._complain("%s cannot be copied: %s", holder, error)
            follower.shelve(holder, resync)
            return True
        if snapshot is None:
            follower.shelve(holder, resync)
        else:
            await self._load(follower, holder, resync, snapshot)
        return True

    async def _load(self, follower: Follower, holder: Holder, resync: Resync, snapshot: HolderSnapshot) -> None:
        if follower.expects(holder, resync):
            self._copy.forget(holder)
        for events in snapshot_events(snapshot):
            await self._turns.take()
            if not follower.expects(holder, resync):
                return
            self.put(holder, events)
        if follower.expects(holder, resync):
            follower.settle(holder, snapshot.version, snapshot.sequence, snapshot.whole)
        for entry, verdict in follower.replay(holder, resync):
            await self._turns.take()
            await self._carry_out(follower, entry, verdict)

    def _replace(self, holder: Holder, snapshot: HolderSnapshot | None) -> None:
        self._copy.forget(holder)
        for events in snapshot_events(snapshot) if snapshot else ():
            self.put(holder, events)

    def _complain(self, message: str, *arguments: object) -> None:
        """What is wrong is wrong for all holders, and again at the next survey: one of them is enough for a while."""
        now = time.monotonic()
        if now >= self._complain_at:
            self._complain_at = now + COMPLAINT_SECONDS
            logger.warning(message, *arguments)

    def _look_whether_loaded(self) -> None:
        self.loaded = self.loaded or (
            not self._fetching and all(shard.surveyed and not shard.follower.wanted for shard in self.shards)
        )
        self._progressed.set()


def _has_caught_up(shard: Shard, mark: Mark) -> bool:
    return shard.surveyed and shard.follower.passed(mark) and not shard.follower.unsettled


def snapshot_events(snapshot: HolderSnapshot) -> Iterator[list[IndexEvent]]:
    """Batches that turn nothing into the holder: the pieces, and what is held more than once. The first is empty, so
    that a holder of nothing is known as well."""
    yield []
    for piece in snapshot.pieces:
        tier, fidelity = layer_of(piece.code)
        stored: list[IndexEvent] = [Stored(piece.parent, piece.names, tier, fidelity)]
        if copies := snapshot.copies.get(piece.code):
            stored += [Stored(parent, chain, tier, fidelity) for parent, chain in _further_copies(piece, copies)]
        yield stored


def _further_copies(piece: PieceRecord, copies: Mapping[PrefixHash, int]) -> Iterator[tuple[PrefixHash, Chain]]:
    """Stretches of the piece, with the name before each, as often as they must be stored once more."""
    chain = piece.parent + piece.names
    names = [chain[at : at + HASH_BYTES] for at in range(HASH_BYTES, len(chain), HASH_BYTES)]
    further = [copies.get(PrefixHash(name), 0) for name in names]
    for copy in range(max(further)):
        at = 0
        for held, stretch in itertools.groupby(count > copy for count in further):
            stop = at + sum(1 for _ in stretch)
            if held:
                parent = PrefixHash(chain[at * HASH_BYTES : (at + 1) * HASH_BYTES])
                yield parent, Chain(chain[(at + 1) * HASH_BYTES : (stop + 1) * HASH_BYTES])
            at = stop


class _Turns:
    """Shares the event loop: whoever takes a turn too long after the last pause lets others run first. The time of this
    thread counts, so that a machine that is busy with other things makes turns no shorter."""

    def __init__(self) -> None:
        self._lock = asyncio.Lock()
        self._until = 0.0

    async def take(self) -> None:
        if time.thread_time() < self._until:
            return
        async with self._lock:  # those that work on the copy share one turn of the loop between them
            await asyncio.sleep(0)
            self._until = time.thread_time() + TURN_SECONDS


@dataclass(slots=True)
class _Backoff:
    seconds: float = field(default=RETRY_SECONDS_MIN)

    async def wait(self) -> None:
        await asyncio.sleep(self.seconds)
        self.seconds = min(2 * self.seconds, RETRY_SECONDS_MAX)

    def reset(self) -> None:
        self.seconds = RETRY_SECONDS_MIN
