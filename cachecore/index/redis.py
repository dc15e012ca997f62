"""The shared index on a Redis or Valkey server: others' holders are read there, ours are written by a publisher.

A match is one round trip, and the server does the walking: one call on a single server, one for each shard in a
cluster. `MirrorIndex` answers without any; this one serves while a mirror loads, and whoever has no use for a mirror.
"""

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any, Protocol

from cachecore.blocks import HASH_BYTES, Chain, PrefixHash
from cachecore.holders import Holder, Place, Tier
from cachecore.index import lua
from cachecore.index.contract import IndexEvent, IndexStats, Match, PrefixIndex
from cachecore.index.publisher import Publisher
from cachecore.index.schema import (
    HOLDERS_CACHED,
    RESTATING,
    SHARDS,
    HolderSnapshot,
    Record,
    Schema,
    decode_snapshot,
    holder_id,
    layer_of,
    parse_holder,
    shard_of,
)
from cachecore.store import Call, RedisStore, Script, StoreError

QUERY_BLOCKS_MAX = 16_384
"""A longer query is matched as far as this: the server walks it while everybody else waits."""
READ_SECONDS = 2.0
"""Budget for snapshots and records, which no request waits for."""

_MATCH, _SNAPSHOT, _RECORDS, _MEASURE = map(lua.load, ("match", "snapshot", "records", "measure"))


class SharedIndex(PrefixIndex, Protocol):
    """A prefix index of which this process writes some holders, and reads what others write of theirs."""

    @property
    def local(self) -> bool:
        """Whether matches of holders of our own are answered here, whatever the server has of them."""
        ...

    def adopt(self, holder: Holder, fence: int, snapshot: HolderSnapshot | None) -> None:
        """This process owns the holder from now on, and goes on from the snapshot; from nothing when there is none.

        Raises ValueError when the snapshot contradicts itself.
        """
        ...

    def drop(self, holder: Holder) -> None:
        """Somebody else owns the holder from now on: nothing more of it is written by this process."""
        ...

    def renew(self, holder: Holder, fence: int) -> None:
        """The holder is ours as before, from now on under this fence."""
        ...

    def restate(self, holder: Holder) -> None:
        """Make the server say of a holder of ours what is known here, whatever it says now."""
        ...

    async def flush(self) -> None:
        """Until the server has what was applied. Raises StoreError when it does not take it."""
        ...

    def fresh(self, holder: Holder, said: Record | None = None) -> bool:
        """Whether matches of this holder are all of its owner's word, as of a few seconds ago at most. `said` is what
        the server last said of it."""
        ...


class RedisIndex:
    """A `SharedIndex` whose matches are awaited, and raise StoreError when the server does not answer in time.

    What `apply` and `forget` change is seen by matches once the publisher has written it. `sequence`, `holdings` and
    `stats` are of the holders that this process writes.
    """

    local = False

    def __init__(self, store: RedisStore, schema: Schema, publisher: Publisher) -> None:
        self._store = store
        self._schema = schema
        self._publisher = publisher
        self._asked = _by_slot(store, schema, _MATCH)

    def apply(self, holder: Holder, sequence: int, events: Sequence[IndexEvent]) -> bool:
        return self._publisher.apply(holder, sequence, events)

    async def match(self, chain: Chain) -> Match:
        query = chain[: min(len(chain) // HASH_BYTES, QUERY_BLOCKS_MAX) * HASH_BYTES]
        depths: dict[Place, int] = {}
        if query:
            calls = [call._replace(args=(query,)) for call in self._asked]
            for answer in await _answers(self._store, calls, None):
                _add_depths(answer, depths)
        return Match(len(chain) // HASH_BYTES, depths)

    def forget(self, holder: Holder) -> None:
        self._publisher.forget(holder)

    def adopt(self, holder: Holder, fence: int, snapshot: HolderSnapshot | None) -> None:
        self._publisher.adopt(holder, fence, snapshot)

    def drop(self, holder: Holder) -> None:
        self._publisher.drop(holder)

    def renew(self, holder: Holder, fence: int) -> None:
        self._publisher.renew(holder, fence)

    def restate(self, holder: Holder) -> None:
        self._publisher.restate(holder)

    async def flush(self) -> None:
        await self._publisher.flush()

    def fresh(self, holder: Holder, said: Record | None = None) -> bool:
        return self._store.up and (said is None or said.whole)

    def sequence(self, holder: Holder) -> int | None:
        return self._publisher.sequence(holder)

    def holdings(self, holder: Holder, tier: Tier) -> Iterator[PrefixHash]:
        return self._publisher.holdings(holder, tier)

    def stats(self) -> IndexStats:
        return replace(self._publisher.stats(), blocks=self._publisher.distinct_blocks())


async def read_records(
    store: RedisStore, schema: Schema, shards: Sequence[int] = range(SHARDS)
) -> dict[Holder, Record]:
    """What the server says of every holder of these shards. What does not parse is left out.

    Raises StoreError.
    """
    records: dict[Holder, Record] = {}
    for answer in await _answers(store, _by_slot(store, schema, _RECORDS, shards=shards), READ_SECONDS):
        for listed in answer:
            for text, record in zip(listed[::2], listed[1::2], strict=True):
                try:
                    records[parse_holder(text)] = Record.decode(record)
                except ValueError:
                    continue
    return records


async def read_snapshot(store: RedisStore, schema: Schema, holder: Holder) -> HolderSnapshot | None:
    """Everything the server has of a holder at one moment. None where it has nothing, or where the holder is being
    restated (its record's revision is RESTATING): then an entry of the stream says when that is done.

    Raises StoreError, and ValueError for what does not parse.
    """
    shard = shard_of(holder)
    keys = [schema.holders(shard), schema.namings(holder)]
    answer = await store.run(Call(_SNAPSHOT, keys, [holder_id(holder)]), READ_SECONDS)
    if answer is None:
        return None
    record, places, namings = answer
    if Record.decode(record).version.revision == RESTATING:
        return None
    if len(places) + len(namings) < 1024:
        return decode_snapshot(record, places, namings)
    return await asyncio.to_thread(decode_snapshot, record, places, namings)


async def memory_bytes(store: RedisStore, schema: Schema, holder: Holder) -> int:
    """What a holder's runs, copies and namings take of the server's memory, by a sample of each. Raises StoreError."""
    return int(await store.run(Call(_MEASURE, schema.contents(holder)), READ_SECONDS))


def _by_slot(store: RedisStore, schema: Schema, script: Script, shards: Sequence[int] = range(SHARDS)) -> list[Call]:
    """Calls that ask about all holders of these shards between them."""
    keys = [schema.holders(shard) for shard in shards]
    return [Call(script, [keys[index] for index in group]) for group in store.group(keys)]


async def _answers(store: RedisStore, calls: Sequence[Call], budget_seconds: float | None) -> list[Any]:
    answers = await store.run_many(calls, budget_seconds)
    for answer in answers:
        if isinstance(answer, StoreError):
            raise answer
    return answers


def _add_depths(answer: list[Any], depths: dict[Place, int]) -> None:
    depths.update(zip(map(_place, answer[::3], answer[1::3]), answer[2::3], strict=True))


@lru_cache(maxsize=HOLDERS_CACHED)
def _place(text: bytes, code: bytes) -> Place:
    return Place(parse_holder(text), *layer_of(code))
