"""What tests of the shared index's writers have in common: events with handles, and what a server has of a holder."""

import asyncio
import struct
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress

from cachecore.blocks import Chain, split_chain
from cachecore.holders import Holder
from cachecore.index.contract import IndexEvent, Origin, Stored
from cachecore.index.naive import NaiveIndex
from cachecore.index.publisher import Publisher
from cachecore.index.redis import read_records, read_snapshot
from cachecore.index.schema import Entry, Record, Schema, place_code, shard_of
from cachecore.store import RedisStore, parse_address
from tests.cachecore.index.histories import ROOT, chain_of, cut, name_at, worker

A, B = worker("a"), worker("b")
TEN = chain_of(*range(10))
ORIGIN = Origin("salt", None, None, ROOT)
OTHER = Origin(None, "adapter", 1, ROOT)


@asynccontextmanager
async def opened(url: str, budget_seconds: float = 5.0) -> AsyncIterator[RedisStore]:
    store = RedisStore(parse_address(url), budget_seconds=budget_seconds)
    await store.start()
    yield store
    await store.close()


class Clock:
    """In nanoseconds; every reading is a little later."""

    def __init__(self) -> None:
        self.now = 1_700_000_000_000_000_000

    def __call__(self) -> int:
        self.now += 1_000_000
        return self.now


def handle_of(name: bytes) -> int:
    return int(struct.unpack("<Q", name[:8])[0])


def stored(chain: Chain, start: int = 0, stop: int | None = None, origin: Origin = ORIGIN, **where: object) -> Stored:
    piece = cut(chain, start, stop)
    handles = tuple(handle_of(name) for name in split_chain(piece))
    return Stored(name_at(chain, start), piece, handles=handles, origin=origin, **where)  # type: ignore[arg-type]


def with_handles(event: IndexEvent) -> IndexEvent:
    if not isinstance(event, Stored):
        return event
    return event._replace(handles=tuple(handle_of(name) for name in split_chain(event.chain)), origin=ORIGIN)


async def contents(store: RedisStore, schema: Schema, holder: Holder) -> dict[bytes, Counter[bytes]]:
    """By place code: how often the server has each block. Each handle is its block's."""
    snapshot = await read_snapshot(store, schema, holder)
    found: dict[bytes, Counter[bytes]] = {}
    for piece in snapshot.pieces if snapshot else ():
        names = list(split_chain(piece.names))
        counts = found.setdefault(piece.code, Counter())
        assert not counts.keys() & set(names)
        counts.update(names)
        counts.update({name: n for name, n in snapshot.copies.get(piece.code, {}).items() if name in names})
        if piece.handles:
            assert piece.handles == tuple(map(handle_of, names))
            assert snapshot.namings[piece.naming] in (ORIGIN, OTHER)
    return found


def naive_contents(naive: NaiveIndex, holder: Holder) -> dict[bytes, Counter[bytes]]:
    return {
        place_code(place.tier, place.fidelity): copies
        for place, copies in naive._copies.items()
        if place.holder == holder and copies
    }


async def entries(store: RedisStore, schema: Schema, holder: Holder) -> list[Entry]:
    listed = await store.command("XRANGE", schema.stream(shard_of(holder)), "-", "+")
    decoded = [Entry.decode(dict(zip(fields[::2], fields[1::2], strict=True))) for _, fields in listed]
    return [entry for entry in decoded if entry.holder == holder]


async def record_of(store: RedisStore, schema: Schema, holder: Holder) -> Record:
    return (await read_records(store, schema, [shard_of(holder)]))[holder]


@asynccontextmanager
async def running(publisher: Publisher) -> AsyncIterator[None]:
    task = asyncio.create_task(publisher.run())
    yield
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task


async def until(condition: Callable[[], Awaitable[bool]], seconds: float = 10.0) -> None:
    async with asyncio.timeout(seconds):
        while not await condition():
            await asyncio.sleep(0.02)
