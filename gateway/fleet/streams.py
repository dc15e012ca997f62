"""The workers' event streams: how to reach them, and a gateway that follows all of them by itself.

With a shared index the gateways divide the streams among them instead: `gateway/fleet/ownership.py`.
"""

import asyncio
import logging
import ssl
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import NamedTuple, Protocol

import zmq
import zmq.asyncio

from cachecore.holders import Worker
from cachecore.index.content_feed import ContentFeed
from cachecore.index.contract import PrefixIndex
from cachecore.ledgers import RestoredRun
from cachecore.rekey import Rekeyer
from cachecore.scope import Naming
from cachecore.trtllm_events import TrtllmEvents
from gateway.fleet.engines.contract import EventEndpoints
from gateway.fleet.intake import EventIntake, EventSource, Intake
from gateway.fleet.polling import PolledIntake
from gateway.fleet.worker import ModelPool, WorkerRecord

logger = logging.getLogger("ropeway.events")

NamingFor = Callable[[ModelPool, str | None, str | None], Naming | None]
"""(pool, salt, adapter) -> how blocks under that salt are named; None when they cannot be."""


class EventStreams(Protocol):
    """Keeps the index true about the workers it is told of. Tells the records' `trust` whether their streams
    are followed."""

    async def follow(self, record: WorkerRecord, pool: ModelPool) -> None:
        """A life of a worker has begun, or its blocks are named anew: follow the events of all its ranks."""
        ...

    async def leave(self, record: WorkerRecord) -> None:
        """No longer follow the worker. What the index knows of it is the caller's to keep or to forget."""
        ...

    async def stop(self) -> None: ...


class Resume(NamedTuple):
    """Where another follower of a stream had come to."""

    sequence: int
    """The last batch that is in the index."""
    runs: Iterable[RestoredRun]


class Intakes:
    """Opens event intakes that write to one index, and tell `contents` what blocks say, where that is looked up. Owns
    their sockets' context."""

    def __init__(
        self,
        index: PrefixIndex,
        naming_for: NamingFor,
        contents: ContentFeed | None = None,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        """`tls`: as the fleet's, for events that are asked for."""
        self._tls = tls
        self._index = index
        self._naming_for = naming_for
        self._contents = contents
        self._context = zmq.asyncio.Context()

    async def open(
        self, holder: Worker, endpoints: EventEndpoints, pool: ModelPool, resume: Resume | None = None
    ) -> Intake | None:
        """An intake that runs; None, and a line in the log, when the endpoint cannot be used.

        Raises ValueError when it cannot be gone on from `resume`.
        """
        contents = self._contents
        rekeyer = Rekeyer(
            pool.block_size_tokens,
            lambda salt, adapter: self._naming_for(pool, salt, adapter),
            with_texts=contents is not None,
        )
        if resume is not None:
            await asyncio.to_thread(rekeyer.restore, resume.runs)  # a microsecond a block
        if not endpoints.block_size_tokens:
            endpoints = replace(endpoints, block_size_tokens=pool.block_size_tokens)
        intake = self._intake(holder, endpoints, rekeyer, resume.sequence if resume is not None else None)
        source = intake.source
        try:
            await intake.start()
        except zmq.ZMQError as error:
            logger.warning("worker %s: no KV events from %s: %s", holder.name, source.live_endpoint, error)
            return None
        return intake

    def close(self) -> None:
        self._context.destroy(linger=0)

    def _intake(self, holder: Worker, endpoints: EventEndpoints, rekeyer: Rekeyer, resume_from: int | None) -> Intake:
        source, contents = event_source(endpoints, holder.rank), self._contents
        if endpoints.told_once:
            decoder = TrtllmEvents(endpoints.block_size_tokens, rank=holder.rank)
            return PolledIntake(
                holder, source, self._index, rekeyer, decoder, resume_from=resume_from, contents=contents, tls=self._tls
            )
        return EventIntake(
            holder, source, self._index, rekeyer, self._context, resume_from=resume_from, contents=contents
        )


class OwnStreams:
    """Follows every stream itself. Implements `EventStreams`."""

    def __init__(self, intakes: Intakes) -> None:
        self._intakes = intakes

    async def follow(self, record: WorkerRecord, pool: ModelPool) -> None:
        endpoints = record.discovery.events if record.discovery else None
        if endpoints is None:
            return
        for holder in record.holders:
            intake = await self._intakes.open(holder, endpoints, pool)
            if intake is None:
                return
            record.intakes.append(intake)
            record.trust.follow(True)

    async def leave(self, record: WorkerRecord) -> None:
        record.trust.follow(False)
        intakes, record.intakes = record.intakes, []
        for intake in intakes:
            await stop_intake(intake)

    async def stop(self) -> None:
        self._intakes.close()


async def stop_intake(intake: Intake) -> None:
    try:
        await intake.stop()
    except Exception:
        logger.exception("the event intake of worker %s had failed", intake.holder.name)


def event_source(endpoints: EventEndpoints, rank: int) -> EventSource:
    socket = endpoints.sockets[rank]
    return EventSource(
        socket.endpoint, socket.replay_endpoint, socket.topic, bind=socket.bind, not_before=endpoints.not_before
    )
