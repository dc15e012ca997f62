"""An index that lives in an event loop of its own, made synchronous for suites that call indexes so."""

import asyncio
import inspect
import itertools
import threading
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from typing import Any, TypeVar

from cachecore.blocks import Chain, PrefixHash
from cachecore.holders import Holder, Tier
from cachecore.index.contract import IndexEvent, IndexStats, Match, PrefixIndex
from cachecore.index.publisher import Publisher
from cachecore.index.schema import Schema
from cachecore.store import RedisStore, parse_address

T = TypeVar("T")

_prefixes = itertools.count()


def fresh_schema() -> Schema:
    """Keys that no other test of this process has."""
    return Schema(f"t{next(_prefixes)}")


class LoopThread:
    """An event loop in a thread."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, name="remote index", daemon=True)
        self._thread.start()

    def run(self, coroutine: Coroutine[Any, Any, T], seconds: float = 30.0) -> T:
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(seconds)

    def call(self, function: Callable[..., T], *arguments: Any) -> T:
        async def called() -> T:
            return function(*arguments)

        return self.run(called())

    def close(self) -> None:
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()


class Remote:
    """A loop with a store: what a module of tests shares."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.thread = LoopThread()
        self.store = RedisStore(parse_address(url), budget_seconds=5.0)
        self.thread.run(self.store.start())

    def close(self) -> None:
        self.thread.run(self.store.close())
        self.thread.close()

    def publisher(self, schema: Schema, **options: Any) -> Publisher:
        return self.thread.call(lambda: Publisher(self.store, schema, **options))

    def index(self, index: PrefixIndex, settle: Callable[[], Awaitable[None]]) -> "RemoteIndex":
        return RemoteIndex(self.thread, index, settle)


class RemoteIndex:
    """A `PrefixIndex` of the loop's, called from outside. `settle` is awaited before each match: until then nothing
    that was applied need be seen."""

    def __init__(self, thread: LoopThread, index: PrefixIndex, settle: Callable[[], Awaitable[None]]) -> None:
        self._thread = thread
        self._index = index
        self._settle = settle

    def apply(self, holder: Holder, sequence: int, events: Sequence[IndexEvent]) -> bool:
        return self._thread.call(self._index.apply, holder, sequence, events)

    def match(self, chain: Chain) -> Match:
        async def settled() -> Match:
            await self._settle()
            answer = self._index.match(chain)
            return await answer if inspect.isawaitable(answer) else answer

        return self._thread.run(settled())

    def forget(self, holder: Holder) -> None:
        self._thread.call(self._index.forget, holder)

    def sequence(self, holder: Holder) -> int | None:
        return self._thread.call(self._index.sequence, holder)

    def holdings(self, holder: Holder, tier: Tier) -> Iterator[PrefixHash]:
        return iter(self._thread.call(lambda: list(self._index.holdings(holder, tier))))

    def stats(self) -> IndexStats:
        return self._thread.call(self._index.stats)
