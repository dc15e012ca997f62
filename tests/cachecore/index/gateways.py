"""Gateways as the shared index sees them: each with a store, a publisher and a mirror of its own."""

import asyncio
import contextlib
import inspect
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from cachecore.blocks import Chain, PrefixHash
from cachecore.holders import Holder, Tier
from cachecore.index.contract import IndexEvent, IndexStats, Match
from cachecore.index.memory import MemoryIndex
from cachecore.index.mirror import MirrorIndex
from cachecore.index.publisher import Publisher
from cachecore.index.redis import RedisIndex
from cachecore.index.schema import Schema
from cachecore.store import RedisStore, parse_address
from tests.cachecore.index.remote import LoopThread


class Gateway:
    """`start` it within the loop that is to have it."""

    def __init__(self, url: str, schema: Schema, *, blocks_max: int = 0, **options: Any) -> None:
        self.store = RedisStore(parse_address(url), budget_seconds=1.0)
        self.publisher = Publisher(self.store, schema, **options)
        self.direct = RedisIndex(self.store, schema, self.publisher)
        self.mirror = MirrorIndex(self.store, schema, self.publisher, self.direct, blocks_max)
        self._writing: asyncio.Task[None] | None = None

    @property
    def copy(self) -> MemoryIndex:
        return self.mirror._copy

    async def start(self) -> None:
        await self.store.start()
        self._writing = asyncio.create_task(self.publisher.run())
        self.mirror.start()

    async def stop(self) -> None:
        """As a crash would: what has not been written never is."""
        await self.mirror.stop()
        if self._writing is not None:
            self._writing.cancel()
            await asyncio.gather(self._writing, return_exceptions=True)
        await self.store.close()

    def match(self, chain: Chain) -> Match:
        """From the copy alone."""
        return self.copy.match(chain)

    async def ready(self) -> None:
        await until(lambda: self.mirror.ready)


@contextlib.asynccontextmanager
async def gateways(url: str, schema: Schema, count: int, **options: Any) -> AsyncIterator[list[Gateway]]:
    started = [Gateway(url, schema, **options) for _ in range(count)]
    try:
        for gateway in started:
            await gateway.start()
        for gateway in started:
            await gateway.ready()
        yield started
    finally:
        for gateway in started:
            await gateway.stop()


async def until(condition: Callable[[], object], seconds: float = 20.0) -> None:
    """Wait for something that other tasks bring about."""
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.01)


async def agree(writer: Gateway, *readers: Gateway) -> None:
    """All that the writer has applied has come to the readers."""
    await writer.publisher.flush()
    for reader in readers:
        await reader.mirror.caught_up()


class TwoGateways:
    """A `PrefixIndex` for suites: written through one gateway's mirror, read from another's."""

    def __init__(self, thread: LoopThread, writer: Gateway, reader: Gateway) -> None:
        self._thread = thread
        self._writer = writer
        self._reader = reader

    def apply(self, holder: Holder, sequence: int, events: Sequence[IndexEvent]) -> bool:
        return self._thread.call(self._writer.mirror.apply, holder, sequence, events)

    def forget(self, holder: Holder) -> None:
        self._thread.call(self._writer.mirror.forget, holder)

    def match(self, chain: Chain) -> Match:
        return self._read(lambda: self._reader.mirror.match(chain))

    def sequence(self, holder: Holder) -> int | None:
        return self._read(lambda: self._reader.mirror.sequence(holder))

    def holdings(self, holder: Holder, tier: Tier) -> Iterator[PrefixHash]:
        return iter(self._read(lambda: list(self._reader.mirror.holdings(holder, tier))))

    def stats(self) -> IndexStats:
        """Events are counted where they were applied."""
        read = self._read(self._reader.mirror.stats)
        written = self._thread.call(self._writer.mirror.stats)
        return replace(
            read,
            stale_batches=written.stale_batches,
            unknown_removals=written.unknown_removals,
            extra=written.extra,
        )

    def _read(self, function: Callable[[], Any]) -> Any:
        async def read() -> Any:
            await agree(self._writer, self._reader)
            answer = function()
            assert not inspect.isawaitable(answer), "a mirror that is ready answers at once"
            return answer

        return self._thread.run(read())
