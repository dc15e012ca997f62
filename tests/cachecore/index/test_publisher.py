"""What the publisher leaves on a real server: contents, the stream, hand-overs, and nothing of what is gone."""

import asyncio
import random
from collections import Counter

import pytest

from cachecore.blocks import EMPTY_CHAIN, Chain, split_chain
from cachecore.holders import Holder, Place, Tier
from cachecore.index.contract import Cleared, Origin, Removed, Stored
from cachecore.index.leases import claim
from cachecore.index.memory import MemoryIndex
from cachecore.index.naive import NaiveIndex
from cachecore.index.publisher import Publisher
from cachecore.index.redis import RedisIndex, read_records, read_snapshot
from cachecore.index.schema import Entry, Kind, Record, Schema, Version, decode_events
from cachecore.store import RedisStore
from tests.cachecore.index.histories import ROOT, History, chain_of, cut, name_at, worker
from tests.cachecore.index.publishing import (
    ORIGIN,
    OTHER,
    TEN,
    A,
    B,
    Clock,
    contents,
    entries,
    naive_contents,
    record_of,
    stored,
    with_handles,
)
from tests.cachecore.store.servers import Server


class TestContents:
    @pytest.mark.parametrize("seed", range(4))
    async def test_random_histories(self, store: RedisStore, schema: Schema, seed: int) -> None:
        """However many batches a step has, the server has what was applied, and its stream tells it from the start."""
        publisher, history, rng = Publisher(store, schema, clock_ns=Clock()), History(seed), random.Random(seed)
        naive, mirror = NaiveIndex(), MemoryIndex()
        for _ in range(200):
            holder, sequence, events = history.batch()
            events = [with_handles(event) for event in events]
            assert publisher.apply(holder, sequence, events) == naive.apply(holder, sequence, events)
            if rng.random() < 0.02:
                publisher.forget(holder)
                naive.forget(holder)
                history.sequences.pop(holder, None)
            if rng.random() < 0.3:
                await publisher.flush()
                assert await contents(store, schema, holder) == naive_contents(naive, holder)
        await publisher.flush()
        records = await read_records(store, schema)
        for holder in history.holders:
            assert await contents(store, schema, holder) == naive_contents(naive, holder)
            assert (records[holder].sequence if holder in records else None) == naive.sequence(holder)
            await self.follow(mirror, await entries(store, schema, holder), records.get(holder))
        mirror._stats.stale_batches, mirror._stats.unknown_removals = naive._stats.stale_batches, 0
        for query in history.queries():
            assert mirror.match(query) == naive.match(query)
        await RedisIndex(store, schema, publisher).match(TEN)

    async def follow(self, mirror: MemoryIndex, told: list[Entry], record: Record | None) -> None:
        version: Version | None = None
        for number, entry in enumerate(told):
            if entry.kind == Kind.FORGET:
                version = None
                mirror.forget(entry.holder)
                continue
            if version is None:
                assert entry.kind == Kind.NEW
            else:
                assert (entry.kind, entry.version.revision) == (Kind.APPLY, version.revision + 1)
            version = entry.version
            mirror.apply(entry.holder, number, decode_events(entry.events))
        assert version == (record.version if record else None)

    async def test_one_piece_grows_and_a_place_in_use_is_named(
        self, store: RedisStore, schema: Schema, publisher: Publisher
    ) -> None:
        publisher.apply(A, 7, [stored(TEN, 0, 4)])
        await publisher.flush()
        publisher.apply(A, 9, [stored(TEN, 4), stored(TEN, 0, 2, tier=Tier.L1)])
        await publisher.flush()
        assert await store.command("HLEN", schema.runs(A, b"a")) == 2
        record = await record_of(store, schema, A)
        assert (record.sequence, record.places, record.persistable) == (9, b"ae", True)
        assert record.version == publisher.version(A)
        publisher.apply(A, 10, [Removed(TEN)])
        await publisher.flush()
        assert (await record_of(store, schema, A)).places == b"e"
        assert await store.command("EXISTS", schema.runs(A, b"a")) == 0

    async def test_batches_of_one_holder_become_one_step(
        self, store: RedisStore, schema: Schema, publisher: Publisher
    ) -> None:
        for position in range(10):
            publisher.apply(A, position, [stored(TEN, position, position + 1)])
        await publisher.flush()
        (entry,) = await entries(store, schema, A)
        assert (entry.kind, entry.sequence, len(decode_events(entry.events))) == (Kind.NEW, 9, 10)

    async def test_a_step_is_taken_once_however_often_it_is_sent(
        self, store: RedisStore, schema: Schema, publisher: Publisher
    ) -> None:
        publisher.apply(A, 0, [stored(TEN, 0, 5)])
        await publisher.flush()
        publisher.apply(A, 1, [stored(TEN, 5), stored(TEN, 0, 1)])
        call = publisher._writers[A].next_call(0.0, 0)
        assert call is not None
        assert [await store.run(call) for _ in range(3)] == [[b"ok"]] * 3
        await publisher.flush()
        assert len(await entries(store, schema, A)) == 2
        assert await contents(store, schema, A) == {b"a": Counter({**dict.fromkeys(split_chain(TEN), 1), TEN[:16]: 2})}

    async def test_bounded_holders_keep_what_was_stored_last(self, store: RedisStore, schema: Schema) -> None:
        publisher = Publisher(store, schema, blocks_max=12)
        left, right = chain_of(*range(100, 108)), chain_of(*range(200, 208))
        publisher.apply(A, 0, [stored(left)])
        publisher.apply(A, 1, [stored(right)])
        await publisher.flush()
        assert publisher.stats().evicted_blocks == 4
        match = RedisIndex(store, schema, publisher).match
        assert (await match(left)).depths == {Place(A, Tier.L0): 4}
        assert (await match(right)).depths == {Place(A, Tier.L0): 8}

    async def test_a_match_is_one_round_trip(
        self, server: Server, store: RedisStore, schema: Schema, publisher: Publisher
    ) -> None:
        for number in range(20):
            publisher.apply(worker(f"w{number}"), 0, [stored(TEN)])
        await publisher.flush()
        index = RedisIndex(store, schema, publisher)
        assert len((await index.match(TEN)).depths) == 20
        calls = [int(line.split("calls=")[1].split(",")[0]) for line in await evalshas(store)]
        await index.match(TEN)
        assert [int(line.split("calls=")[1].split(",")[0]) for line in await evalshas(store)] == [calls[0] + 1]


async def evalshas(store: RedisStore) -> list[str]:
    lines = (await store.command("INFO", "commandstats")).decode().splitlines()
    return [line for line in lines if line.startswith("cmdstat_evalsha:")]


class TestHandOver:
    async def test_a_new_owner_goes_on_where_the_last_one_stopped(
        self, store: RedisStore, schema: Schema, publisher: Publisher
    ) -> None:
        publisher.apply(A, 5, [stored(TEN), stored(TEN, 0, 3), stored(TEN, 0, 4, OTHER, tier=Tier.L1)])
        publisher.apply(A, 6, [Removed(cut(TEN, 6, 7))])
        await publisher.flush()
        snapshot = await read_snapshot(store, schema, A)
        assert (snapshot.sequence, snapshot.persistable, set(snapshot.namings.values())) == (6, True, {ORIGIN, OTHER})
        heir = Publisher(store, schema)
        heir.adopt(A, snapshot.version.fence + 1, snapshot)
        assert heir.sequence(A) == 6
        assert not heir.apply(A, 6, [Cleared()])
        assert heir.apply(A, 7, [stored(TEN, 6, 7), Removed(cut(TEN, 0, 1)), Removed(cut(TEN, 0, 2), Tier.L1)])
        await heir.flush()
        (record,) = (await read_records(store, schema)).values()
        assert record.version == (snapshot.version.fence + 1, snapshot.version.revision + 1)
        assert [entry.kind for entry in await entries(store, schema, A)][-1] == Kind.APPLY
        names = list(split_chain(TEN))
        assert await contents(store, schema, A) == {
            b"a": Counter(names) + Counter(names[1:3]),
            b"e": Counter(names[2:4]),
        }

    async def test_a_former_owner_is_fenced_and_says_so(self, store: RedisStore, schema: Schema) -> None:
        fenced: list[Holder] = []
        former = Publisher(store, schema, on_fenced=fenced.append, clock_ns=Clock())
        former.apply(A, 0, [stored(TEN, 0, 4)])
        await former.flush()
        snapshot = await read_snapshot(store, schema, A)
        assert (await claim(store, schema, A, "heir", 5.0)).fence > snapshot.version.fence
        former.apply(A, 1, [stored(TEN, 4)])
        await former.flush()
        assert fenced == [A]
        assert not former.owns(A)
        assert await contents(store, schema, A) == {b"a": Counter(split_chain(cut(TEN, 0, 4)))}

    async def test_a_fenced_owner_cannot_forget_the_holder(
        self, store: RedisStore, schema: Schema, publisher: Publisher
    ) -> None:
        publisher.apply(A, 0, [stored(TEN)])
        await publisher.flush()
        await claim(store, schema, A, "heir", 5.0)
        publisher.forget(A)
        await publisher.flush()
        assert await contents(store, schema, A) == {b"a": Counter(split_chain(TEN))}
        assert Kind.FORGET not in {entry.kind for entry in await entries(store, schema, A)}

    async def test_blocks_without_handles_cannot_be_handed_over(
        self, store: RedisStore, schema: Schema, publisher: Publisher
    ) -> None:
        publisher.apply(A, 0, [stored(TEN, 0, 4)])
        publisher.apply(B, 0, [stored(TEN, 0, 4)])
        publisher.apply(A, 1, [Stored(name_at(TEN, 4), cut(TEN, 4))])
        publisher.apply(B, 1, [stored(TEN, 0, 4)._replace(handles=(1, 2, 3, 4))])
        await publisher.flush()
        records = await read_records(store, schema)
        assert [records[holder].persistable for holder in (A, B)] == [False, False]
        assert await contents(store, schema, A) == {b"a": Counter(split_chain(TEN))}
        publisher.apply(A, 2, [Cleared(), stored(TEN)])
        await publisher.flush()
        assert (await record_of(store, schema, A)).persistable

    async def test_namings_live_as_long_as_pieces_under_them(
        self, store: RedisStore, schema: Schema, publisher: Publisher
    ) -> None:
        for number in range(50):
            origin = Origin(f"salt {number}", None, None, ROOT)
            publisher.apply(A, 2 * number, [stored(chain_of(number), origin=origin)])
            await publisher.flush()
            assert await store.command("HLEN", schema.namings(A)) == 1
            publisher.apply(A, 2 * number + 1, [Removed(chain_of(number))])
            await publisher.flush()
        assert await store.command("EXISTS", schema.namings(A)) == 0

    async def test_several_blocks_a_handle(self, store: RedisStore, schema: Schema, publisher: Publisher) -> None:
        publisher.apply(A, 0, [Stored(ROOT, TEN, handles=(1, 2, 3, 4, 5), origin=ORIGIN)])
        await publisher.flush()
        (piece,) = (await read_snapshot(store, schema, A)).pieces
        assert piece.handles == (1, 1, 2, 2, 3, 3, 4, 4, 5, 5)


class TestBaseLine:
    """Keys and memory return to where they were."""

    async def used(self, store: RedisStore) -> tuple[int, int]:
        await asyncio.sleep(0.1)
        lines = (await store.command("INFO", "memory")).decode().splitlines()
        used = next(int(line.split(":")[1]) for line in lines if line.startswith("used_memory_dataset:"))
        return await store.command("DBSIZE"), used

    async def test_lives_that_come_and_go(self, store: RedisStore, schema: Schema) -> None:
        publisher = Publisher(store, schema, stream_length_max=16)
        for epoch in range(16 * 120):
            publisher.forget(worker("a", epoch - 1))
            publisher.apply(worker("a", epoch), 0, [Stored(ROOT, EMPTY_CHAIN)])
            if epoch % 64 == 0:
                await publisher.flush()
        before = await self.used(store)
        for epoch in range(2000, 3000):
            publisher.forget(worker("a", epoch - 1))
            publisher.apply(worker("a", epoch), 0, [stored(TEN), stored(TEN, tier=Tier.L1)])
            if epoch % 10 == 0:
                await publisher.flush()
        for epoch in (1919, 2999):
            publisher.forget(worker("a", epoch))
        publisher.apply(worker("a", 1), 0, [])
        await publisher.flush()
        after = await self.used(store)
        assert after[0] == before[0]
        assert after[1] < before[1] + 60_000
        assert len(publisher.owned()) == 1

    async def test_pieces_that_are_split_and_removed(self, store: RedisStore, schema: Schema) -> None:
        publisher = Publisher(store, schema, stream_length_max=16)
        chain = chain_of(*range(200))
        holes = Chain(b"".join(list(split_chain(chain))[1::2]))
        rest = Chain(b"".join(list(split_chain(chain))[::2]))
        for sequence in range(100):
            publisher.apply(A, 3 * sequence, [stored(chain), Removed(holes)])
            await publisher.flush()
            if sequence == 0:
                assert await store.command("HLEN", schema.runs(A, b"a")) == 200
            publisher.apply(A, 3 * sequence + 1, [Removed(rest)])
            await publisher.flush()
            if sequence == 20:
                before = await self.used(store)
        after = await self.used(store)
        assert after[0] == before[0] == 2
        assert after[1] < before[1] + 60_000
        assert publisher.stats().holdings == 0
