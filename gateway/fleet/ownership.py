"""Event streams divided among the gateways of a fleet: each has one follower at a time, which holds its lease.

The follower decodes and names a stream's events once, for everybody: what it applies goes to the shared index and from
there to every gateway's mirror. In each turn a gateway renews the leases it holds, asks for those that should be its
own, and looks at the others:

* A stream should be followed by the gateway that rendezvous hashing picks among those alive, so that the work spreads.
* Whoever finds a stream without a lease in two turns in a row takes it, whosever it should be.
* A new follower goes on where the last one stopped: the blocks, the engine's handles for them and the last sequence
  number lie beside the lease, and the engine replays what came after.
* A follower whose lease has passed to somebody else is fenced: the server takes nothing more from it, and it stops.
* While the server cannot be reached, followers go on for themselves, and after a while the others begin to follow as
  well. Once it is back the lease decides who writes, and the rest read.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b

from cachecore.blocks import split_chain
from cachecore.holders import Holder, Worker
from cachecore.index.leases import Claim, Leases
from cachecore.index.redis import SharedIndex
from cachecore.index.schema import NO_NAMING, HolderSnapshot, Record
from cachecore.ledgers import RestoredRun
from cachecore.store import StoreError
from gateway.fleet.engines.contract import EventEndpoints
from gateway.fleet.intake import Intake
from gateway.fleet.streams import Intakes, Resume, stop_intake
from gateway.fleet.worker import ModelPool, WorkerRecord

logger = logging.getLogger("ropeway.ownership")

TURNS_PER_LEASE = 4
_UNOWNED_TURNS = 2
_ALONE_LEASES = 3
"""Leases without a word from the server before a gateway follows everything by itself."""
_KEPT_LEASES = 5
"""How long a stream is kept at least before it is handed to the gateway that should have it."""


@dataclass(slots=True, eq=False)
class _Stream:
    """One rank's events, and what this gateway has to do with them."""

    record: WorkerRecord
    holder: Worker
    endpoints: EventEndpoints
    pool: ModelPool
    intake: Intake | None = None
    since: float = 0.0
    """When the intake was opened."""
    alone: bool = False
    """Followed without a lease."""
    unowned_turns: int = 0
    owner: str = ""
    said: Record | None = None
    """What the server last said of the holder."""
    change: asyncio.Task[None] | None = None
    """A take-over or a hand-over under way."""


class LeasedStreams:
    """Implements `EventStreams`. `run` has to run for anything to be followed.

    `peers` names the gateways that are alive, this one left out or not.
    """

    def __init__(
        self,
        leases: Leases,
        index: SharedIndex,
        intakes: Intakes,
        peers: Callable[[], Collection[str]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._leases = leases
        self._index = index
        self._intakes = intakes
        self._peers = peers
        self._clock = clock
        self._streams: dict[Worker, _Stream] = {}
        self._turn_seconds = leases.lease_seconds / TURNS_PER_LEASE
        self._heard_at = clock()
        self._hurry = asyncio.Event()

    # EventStreams

    async def follow(self, record: WorkerRecord, pool: ModelPool) -> None:
        endpoints = record.discovery.events if record.discovery else None
        if endpoints is None:
            return
        for holder in record.holders:
            self._streams[holder] = _Stream(record, holder, endpoints, pool)
        self._set_trust()  # another gateway may have told of all of it already
        self._hurry.set()

    async def leave(self, record: WorkerRecord) -> None:
        streams = [stream for stream in self._streams.values() if stream.record is record]
        for stream in streams:
            del self._streams[stream.holder]
        record.intakes = []
        record.trust.follow(False)
        for stream in streams:
            await self._end_change(stream)
        await self._hand_over(streams)

    async def stop(self) -> None:
        streams = list(self._streams.values())
        self._streams.clear()
        for stream in streams:
            await self._end_change(stream)
        await self._hand_over(streams)
        self._intakes.close()

    # Turns

    async def run(self) -> None:
        """Take turns until cancelled."""
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(self._turn_seconds):
                    await self._hurry.wait()
            self._hurry.clear()
            try:
                await self._turn()
            except Exception:
                logger.exception("a turn of the event streams' ownership failed")

    def fenced(self, holder: Holder) -> None:
        """The server takes nothing more of a holder from us: somebody else follows it."""
        stream = self._streams.get(holder) if isinstance(holder, Worker) else None
        if stream is not None and stream.intake is not None:
            stream.intake.halt()
            if stream.change is None:
                self._change(stream, partial(self._let_go, stream))

    def owned(self) -> list[Worker]:
        return [stream.holder for stream in self._streams.values() if stream.intake is not None and not stream.alone]

    async def _turn(self) -> None:
        streams = [stream for stream in self._streams.values() if stream.change is None]
        gateways = {*self._peers(), self._leases.gateway}
        ours = {stream.holder: rendezvous(stream.holder, gateways) == self._leases.gateway for stream in streams}
        wanted = [s.intake is not None or ours[s.holder] or s.unowned_turns >= _UNOWNED_TURNS for s in streams]
        try:
            claims = await self._leases.ask([stream.holder for stream in streams], wanted)
        except StoreError as error:
            self._without_server(streams, str(error))
        else:
            self._heard_at = self._clock()
            for stream, claim in zip(streams, claims, strict=True):
                if self._streams.get(stream.holder) is stream and stream.change is None:
                    self._settle(stream, claim)
            await self._hand_over_one(ours, gateways)
        self._set_trust()

    def _settle(self, stream: _Stream, claim: Claim) -> None:
        stream.owner, stream.said = claim.owner, claim.record
        stream.unowned_turns = 0 if claim.owner else stream.unowned_turns + 1
        if not claim.granted:
            if stream.intake is not None and claim.owner:
                stream.intake.halt()
                self._change(stream, partial(self._let_go, stream))
        elif stream.intake is None:
            self._change(stream, partial(self._take_over, stream, claim.fence))
        else:
            self._index.renew(stream.holder, claim.fence)
            stream.alone = False

    def _without_server(self, streams: Iterable[_Stream], reason: str) -> None:
        if self._clock() - self._heard_at < _ALONE_LEASES * self._leases.lease_seconds:
            return
        for stream in streams:
            if stream.intake is None:
                logger.warning("worker %s: following its events alone: %s", stream.holder.name, reason)
                self._change(stream, partial(self._follow_alone, stream))

    async def _hand_over_one(self, ours: Mapping[Worker, bool], gateways: Collection[str]) -> None:
        """Give back a stream that another gateway should follow: one a turn, and none that was just taken."""
        old = self._clock() - _KEPT_LEASES * self._leases.lease_seconds
        for stream in self._streams.values():
            settled = stream.intake is not None and stream.change is None and stream.since < old
            if settled and len(gateways) > 1 and not ours.get(stream.holder, True):
                self._change(stream, partial(self._hand_over, [stream]))
                return

    def _set_trust(self) -> None:
        by_record: dict[int, list[_Stream]] = {}
        for stream in self._streams.values():
            by_record.setdefault(id(stream.record), []).append(stream)
        for streams in by_record.values():
            record = streams[0].record
            record.intakes = [stream.intake for stream in streams if stream.intake is not None]
            record.trust.follow(all(map(self._speaks_for, streams)))

    def _speaks_for(self, stream: _Stream) -> bool:
        """Whether the index has all that whoever follows the stream knows: a server without memory has less."""
        ours = stream.intake is not None and self._index.local
        return ours or self._index.fresh(stream.holder, stream.said)

    # Changes of hands

    def _change(self, stream: _Stream, change: Callable[[], Awaitable[None]]) -> None:
        async def guarded() -> None:
            try:
                await change()
            except StoreError as error:
                logger.info("worker %s: its event stream was not taken: %s", stream.holder.name, error)
            except Exception:
                logger.exception("worker %s: its event stream did not change hands", stream.holder.name)
            finally:
                stream.change = None
                self._set_trust()

        stream.change = asyncio.create_task(guarded(), name=f"event stream of {stream.holder.name}")

    async def _end_change(self, stream: _Stream) -> None:
        if stream.change is not None:
            stream.change.cancel()
            with suppress(asyncio.CancelledError):
                await stream.change
            stream.change = None  # one that was cancelled before its first step could not say so

    async def _take_over(self, stream: _Stream, fence: int) -> None:
        """Go on where the last follower stopped, or begin with what the engine can replay."""
        try:
            snapshot = await self._leases.snapshot(stream.holder)
            if snapshot is not None and snapshot.persistable and snapshot.sequence is not None:
                await self._open(stream, fence, snapshot, Resume(snapshot.sequence, restored_runs(snapshot)))
                return
        except ValueError as error:
            logger.warning("worker %s: nobody can go on with its events: %s", stream.holder.name, error)
        await self._open(stream, fence, None, None)
        # Whatever is there was its last follower's, and its removals would mean nothing to us.
        self._index.restate(stream.holder)

    async def _follow_alone(self, stream: _Stream) -> None:
        stream.alone = True
        await self._open(stream, 0, None, None)

    async def _open(self, stream: _Stream, fence: int, snapshot: HolderSnapshot | None, resume: Resume | None) -> None:
        """Raises ValueError for a snapshot that cannot be gone on with."""
        self._index.adopt(stream.holder, fence, snapshot)
        try:
            stream.intake = await self._intakes.open(stream.holder, stream.endpoints, stream.pool, resume)
        finally:
            if stream.intake is None:
                self._index.drop(stream.holder)
        stream.since = self._clock()

    async def _let_go(self, stream: _Stream) -> None:
        """Somebody else follows the stream: what we wrote last does not count any more."""
        intake, stream.intake, stream.alone = stream.intake, None, False
        if intake is not None:
            await stop_intake(intake)
        self._index.drop(stream.holder)

    async def _hand_over(self, streams: Sequence[_Stream]) -> None:
        """Stop at a batch, see it written, and let the next follower begin at once."""
        owned = [stream for stream in streams if stream.intake is not None]
        for stream in owned:
            intake, stream.intake = stream.intake, None
            if intake is not None:
                await stop_intake(intake)
        if not owned:
            return
        with suppress(StoreError, TimeoutError):
            async with asyncio.timeout(self._leases.lease_seconds):
                await self._index.flush()
        for stream in owned:
            self._index.drop(stream.holder)
        with suppress(StoreError):
            await self._leases.release([stream.holder for stream in owned if not stream.alone])


def rendezvous(holder: Worker, gateways: Iterable[str]) -> str:
    """The gateway that should follow a stream: highest random weight, so that a change moves only its own share."""
    key = f"{holder.name}/{holder.rank}".encode()
    return max(gateways, key=lambda gateway: (blake2b(gateway.encode(), key=key[:64], digest_size=8).digest(), gateway))


def restored_runs(snapshot: HolderSnapshot) -> Iterator[RestoredRun]:
    """What a rekeyer goes on from: the pieces that have handles, with the copies of their blocks."""
    for piece in snapshot.pieces:
        if piece.naming != NO_NAMING:
            further = snapshot.copies.get(piece.code)
            copies = [1 + further.get(name, 0) for name in split_chain(piece.names)] if further else ()
            origin = snapshot.namings[piece.naming]
            yield RestoredRun(piece.names, piece.handles, origin, piece.tier, copies, piece.fidelity)
