"""Blocking reads of streams, on connections of their own.

In a cluster one XREAD takes streams of one slot, so there is a read for each slot, all under way at once. The first
that ends also ends the call; the others stay under way and are taken over by the next call that asks for the same
streams from the same positions. A read that nobody takes over ends by itself, and what it brought is thrown away:
positions belong to the caller, so nothing is lost by that. A read that fails does so after a pause, or a dead node
would be asked again with every entry that the others bring.
"""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from cachecore.store.errors import Moved, StoreError, Unavailable
from cachecore.store.server import CONNECT_SECONDS, Server
from cachecore.store.topology import Topology
from cachecore.store.wire import Question

# What a sound server may take beyond the blocking time that it was given.
PATIENCE_SECONDS = 1.0
PAUSE_SECONDS = 0.1
REDIRECTIONS_MAX = 4


class StreamEntry(NamedTuple):
    stream: bytes
    id: bytes
    fields: dict[bytes, bytes]


Positions = tuple[tuple[bytes, bytes], ...]
"""(stream, id) of streams that lie in one slot."""


class StreamReader:
    def __init__(self, topology: Topology) -> None:
        self._topology = topology
        self._under_way: dict[Positions, asyncio.Task[list[StreamEntry]]] = {}
        """Reads that no call waits for at the moment."""
        self._tasks: set[asyncio.Task[list[StreamEntry]]] = set()

    async def read(self, positions: Mapping[bytes, bytes], block_seconds: float, count: int) -> list[StreamEntry]:
        reads = {group: self._take(group, block_seconds, count) for group in self._groups(positions)}
        if not reads:
            await asyncio.sleep(block_seconds)
            return []
        try:
            await asyncio.wait(reads.values(), timeout=None, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for group, task in reads.items():
                if not task.done():
                    self._park(group, task)
        ended = [task for task in reads.values() if task.done()]
        if any(task.cancelled() for task in ended):
            raise Unavailable("the store is closed")
        entries = [entry for task in ended if task.exception() is None for entry in task.result()]
        return entries or [entry for task in ended for entry in task.result()]

    async def close(self) -> None:
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _groups(self, positions: Mapping[bytes, bytes]) -> list[Positions]:
        streams = list(positions.items())
        groups = self._topology.group([stream for stream, _ in streams])
        return [tuple(streams[index] for index in indices) for indices in groups]

    def _take(self, group: Positions, block_seconds: float, count: int) -> asyncio.Task[list[StreamEntry]]:
        if (task := self._under_way.pop(group, None)) is not None:
            return task
        task = asyncio.create_task(self._read(group, block_seconds, count))
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    def _park(self, group: Positions, task: asyncio.Task[list[StreamEntry]]) -> None:
        self._under_way[group] = task
        task.add_done_callback(
            lambda done: self._under_way.pop(group, None) if self._under_way.get(group) is done else None
        )

    def _done(self, task: asyncio.Task[list[StreamEntry]]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # seen: nobody may be waiting for it

    async def _read(self, group: Positions, block_seconds: float, count: int) -> list[StreamEntry]:
        try:
            return await self._read_once(group, block_seconds, count)
        except StoreError:
            await asyncio.sleep(min(block_seconds, PAUSE_SECONDS))
            raise

    async def _read_once(self, group: Positions, block_seconds: float, count: int) -> list[StreamEntry]:
        streams, ids = zip(*group, strict=True)
        block_ms = max(1, round(block_seconds * 1000))
        question = Question(("XREAD", "COUNT", count, "BLOCK", block_ms, "STREAMS", *streams, *ids))
        server = self._topology.server_for(streams)
        for _ in range(REDIRECTIONS_MAX):
            answer = await _ask(server, question, block_seconds + PATIENCE_SECONDS)
            if not isinstance(answer, Moved) or (target := self._topology.follow(answer)) is None:
                break
            server, question = target, question._replace(asking=answer.asking)
        if isinstance(answer, StoreError):
            raise answer
        return _entries(answer or ())


async def _ask(server: Server, question: Question, seconds: float) -> Any:
    loop = asyncio.get_running_loop()
    wire = await server.streams.acquire(loop.time() + CONNECT_SECONDS)
    try:
        return (await wire.exchange([question], loop.time() + seconds))[0]
    finally:
        server.streams.release(wire)


def _entries(answer: Sequence[Any]) -> list[StreamEntry]:
    return [
        StreamEntry(stream, entry, dict(zip(fields[::2], fields[1::2], strict=True)))
        for stream, entries in answer
        for entry, fields in entries
    ]
