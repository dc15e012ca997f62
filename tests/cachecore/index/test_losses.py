"""What becomes of the shared index when the server loses data, is away, or has no memory."""

from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from cachecore.blocks import Chain, split_chain
from cachecore.holders import Holder, Tier
from cachecore.index import writer as writer_module
from cachecore.index.contract import Removed, Stored
from cachecore.index.leases import claim, release
from cachecore.index.publisher import Publisher
from cachecore.index.redis import RedisIndex, read_snapshot
from cachecore.index.schema import Kind, Schema, decode_events, shard_of
from cachecore.store import RedisStore, Refused, StoreError, Unavailable
from tests.cachecore.index.histories import ROOT, chain_of, cut, name_at
from tests.cachecore.index.publishing import (
    TEN,
    A,
    B,
    contents,
    entries,
    opened,
    record_of,
    running,
    stored,
    until,
)
from tests.cachecore.store.servers import BINARIES, Server, start_server


class TestLosses:
    async def is_whole(self, store: RedisStore, schema: Schema, holder: Holder = A) -> bool:
        with suppress(StoreError):
            return await contents(store, schema, holder) == {b"a": Counter(split_chain(TEN)), b"e": Counter([TEN[:16]])}
        return False

    async def publish(self, publisher: Publisher, *holders: Holder) -> None:
        for holder in holders:
            publisher.apply(holder, 0, [stored(TEN, 0, 9), stored(TEN, 0, 1, tier=Tier.L1)])
        await publisher.flush()
        for holder in holders:
            publisher.apply(holder, 1, [stored(TEN, 9)])
        await publisher.flush()

    async def test_an_emptied_server_is_written_anew(
        self, store: RedisStore, schema: Schema, publisher: Publisher
    ) -> None:
        async with running(publisher):
            await self.publish(publisher, A, B)
            before = publisher.version(A)
            await store.command("FLUSHALL")
            await until(lambda: self.is_whole(store, schema, A))
            await until(lambda: self.is_whole(store, schema, B))
            (entry,) = await entries(store, schema, A)
            assert entry.kind == Kind.RESTATED
            assert entry.version > before

    @pytest.mark.parametrize("lost", ["runs", "holders", "copies", "piece"])
    async def test_a_key_that_was_evicted_is_found_missing(
        self, store: RedisStore, schema: Schema, publisher: Publisher, lost: str
    ) -> None:
        await self.publish(publisher, A)
        publisher.apply(A, 2, [stored(TEN, 0, 1)])
        await publisher.flush()
        keys = {"runs": schema.runs(A, b"a"), "holders": schema.holders(shard_of(A)), "copies": schema.copies(A, b"a")}
        if lost == "piece":
            assert await store.command("HDEL", schema.runs(A, b"a"), TEN[:16], TEN[:16] + b"\0") == 2
        else:
            assert await store.command("UNLINK", keys[lost]) == 1
        whole = {b"a": Counter(split_chain(TEN)) + Counter([TEN[:16]]), b"e": Counter([TEN[:16]])}
        if lost != "holders":
            with pytest.raises(ValueError, match="the server has lost a part of it"):
                await contents(store, schema, A)
        async with running(publisher):

            async def is_whole() -> bool:
                try:
                    return await contents(store, schema, A) == whole
                except ValueError:
                    return False

            await until(is_whole)

    async def test_a_server_that_went_back_is_written_anew(
        self, store: RedisStore, schema: Schema, publisher: Publisher
    ) -> None:
        """As a replica that was promoted before it had everything."""
        publisher.apply(A, 0, [stored(TEN, 0, 9), stored(TEN, 0, 1, tier=Tier.L1)])
        await publisher.flush()
        keys = [schema.holders(shard_of(A)), schema.runs(A, b"a")]
        old = [await store.command("DUMP", key) for key in keys]
        publisher.apply(A, 1, [stored(TEN, 9), Removed(cut(TEN, 0, 1), Tier.L1)])
        await publisher.flush()
        for key, value in zip(keys, old, strict=True):
            await store.command("RESTORE", key, 0, value, "REPLACE")
        publisher.apply(A, 2, [stored(TEN, 0, 1, tier=Tier.L1)])
        await publisher.flush()
        assert await self.is_whole(store, schema)
        assert (await record_of(store, schema, A)).version == publisher.version(A)

    async def test_a_long_restatement_says_that_it_is_one(
        self, store: RedisStore, schema: Schema, publisher: Publisher, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(writer_module, "RESTATED_BLOCKS_MAX", 20)
        chains = [chain_of(number, *range(20)) for number in range(10)]
        publisher.apply(A, 0, [stored(chain) for chain in chains])
        await publisher.flush()
        publisher.restate(A)
        writer = publisher._writers[A]
        revisions = []
        while (call := writer.next_call(0.0, 0)) is not None:
            writer.settle(await store.run(call), 0.0)
            revisions.append((await record_of(store, schema, A)).version.revision)
            if len(revisions) == 3:
                assert await read_snapshot(store, schema, A) is None
                publisher.apply(A, 1, [Removed(chains[0]), stored(chain_of(77))])
        assert revisions[:9] == [-1] * 9
        assert revisions[-1] == publisher.version(A).revision
        held = Counter(name for chain in [*chains[1:], chain_of(77)] for name in split_chain(chain))
        assert await contents(store, schema, A) == {b"a": held}
        assert [entry.kind for entry in await entries(store, schema, A)] == [Kind.NEW, Kind.RESTATED]

    async def test_what_comes_with_the_last_step_of_a_restatement_is_told(
        self, store: RedisStore, schema: Schema, publisher: Publisher
    ) -> None:
        await self.publish(publisher, A)
        publisher.restate(A)
        writer = publisher._writers[A]
        call = writer.next_call(0.0, 0)
        publisher.apply(A, 2, [Removed(cut(TEN, 9))])
        writer.settle(await store.run(call), 0.0)
        await publisher.flush()
        last = (await entries(store, schema, A))[-1]
        assert (last.kind, decode_events(last.events)) == (Kind.APPLY, [Removed(cut(TEN, 9))])

    async def test_a_holder_written_by_an_earlier_process_is_written_over(
        self, store: RedisStore, schema: Schema, publisher: Publisher
    ) -> None:
        publisher.apply(A, 0, [stored(chain_of(55, 66)), stored(TEN, tier=Tier.L2)])
        await publisher.flush()
        later = Publisher(store, schema)
        later.apply(A, 0, [stored(TEN), stored(TEN, 0, 1, tier=Tier.L1)])
        await later.flush()
        assert await self.is_whole(store, schema)
        assert [entry.kind for entry in await entries(store, schema, A)] == [Kind.NEW, Kind.RESTATED]

    async def test_keys_of_another_type_are_replaced(
        self, store: RedisStore, schema: Schema, publisher: Publisher
    ) -> None:
        await self.publish(publisher, A)
        await store.command("UNLINK", schema.runs(A, b"a"))
        await store.command("SET", schema.runs(A, b"a"), "noise")
        async with running(publisher):
            await until(lambda: self.is_whole(store, schema, A))

    async def test_too_much_for_the_queue_is_told_without_events(self, store: RedisStore, schema: Schema) -> None:
        publisher = Publisher(store, schema, queue_max_blocks=20)
        publisher.apply(A, 0, [stored(TEN)])
        await publisher.flush()
        for sequence in range(1, 10):
            publisher.apply(A, sequence, [Removed(cut(TEN, 5)), stored(TEN, 5)])
        assert publisher.stats().extra["queued_blocks"] <= 20
        await publisher.flush()
        publisher.apply(A, 10, [Removed(cut(TEN, 9))])
        await publisher.flush()
        told = await entries(store, schema, A)
        assert [entry.kind for entry in told] == [Kind.NEW, Kind.RESTATED, Kind.APPLY]
        assert told[1].version.revision + 1 == told[2].version.revision
        assert await contents(store, schema, A) == {b"a": Counter(split_chain(cut(TEN, 0, 9)))}


class TestAway:
    async def test_what_was_applied_meanwhile_is_written_when_the_server_is_back(
        self, schema: Schema, tmp_path: Path
    ) -> None:
        with start_server(tmp_path) as server:
            async with opened(server.url, 0.2) as store:
                publisher = Publisher(store, schema)
                async with running(publisher):
                    publisher.apply(A, 0, [stored(TEN, 0, 5)])
                    await publisher.flush()
                    server.kill()
                    publisher.apply(A, 1, [stored(TEN, 5)])
                    with pytest.raises(StoreError):
                        await publisher.flush()
                    with pytest.raises(StoreError):
                        await RedisIndex(store, schema, publisher).match(TEN)
                    server.restart(empty=True)

                    async def is_whole() -> bool:
                        with suppress(StoreError):
                            return await contents(store, schema, A) == {b"a": Counter(split_chain(TEN))}
                        return False

                    await until(is_whole)
                    publisher.apply(A, 2, [Removed(cut(TEN, 9))])
                    await publisher.flush()
                assert await contents(store, schema, A) == {b"a": Counter(split_chain(cut(TEN, 0, 9)))}


@pytest.fixture(scope="module", params=sorted(BINARIES))
def small_server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    directory = tmp_path_factory.mktemp("small")
    with start_server(directory, binary=BINARIES[request.param], persist=False, maxmemory="0") as server:
        yield server


class TestWithoutMemory:
    """`maxmemory` is below what is used: the server refuses whatever may take memory."""

    @pytest.fixture
    async def store(self, small_server: Server) -> AsyncIterator[RedisStore]:
        small_server.command("CONFIG", "SET", "maxmemory", "0")
        small_server.command("FLUSHALL")
        async with opened(small_server.url) as store:
            yield store
        small_server.command("CONFIG", "SET", "maxmemory", "0")

    async def test_losses_and_events_go_through_and_the_rest_when_there_is_memory(
        self, store, schema, publisher
    ) -> None:
        publisher.apply(A, 0, [stored(TEN, 0, 8)])
        await publisher.flush()
        await store.command("CONFIG", "SET", "maxmemory", "1")
        publisher.apply(A, 1, [stored(TEN, 8), Removed(cut(TEN, 4, 5))])
        with pytest.raises(StoreError, match="OOM"):
            await publisher.flush()
        assert await contents(store, schema, A) == {b"a": Counter(split_chain(cut(TEN, 0, 8)))}
        await publisher.flush()
        assert await contents(store, schema, A) == {b"a": Counter(split_chain(cut(TEN, 0, 4)))}
        publisher.apply(A, 2, [Removed(cut(TEN, 3, 4))])
        await publisher.flush()
        told = await entries(store, schema, A)
        assert [entry.kind for entry in told] == [Kind.NEW, Kind.APPLY, Kind.APPLY]
        assert decode_events(told[1].events) == [Stored(name_at(TEN, 8), cut(TEN, 8)), Removed(cut(TEN, 4, 5))]
        await store.command("CONFIG", "SET", "maxmemory", "0")
        held = {b"a": Counter(split_chain(Chain(cut(TEN, 0, 3) + cut(TEN, 5))))}
        async with running(publisher):

            async def is_whole() -> bool:
                return await contents(store, schema, A) == held

            await until(is_whole)
            await until(lambda: self.is_settled(publisher))
        assert [entry.kind for entry in await entries(store, schema, A)][3:] == [Kind.RESTATED]

    @pytest.mark.parametrize("first_answer", [None, Unavailable("no answer")])
    async def test_a_revision_is_used_again_unless_somebody_may_have_seen_it(
        self, store: RedisStore, schema: Schema, publisher: Publisher, first_answer: Unavailable | None
    ) -> None:
        """Without an answer it may have been taken by a master whose replica knows nothing of it."""
        publisher.apply(A, 0, [stored(TEN, 0, 8)])
        await publisher.flush()
        writer = publisher._writers[A]
        before = writer.version.revision
        refused = Refused("OOM command not allowed", "OOM")
        publisher.apply(A, 1, [stored(TEN, 8)])
        assert writer.next_call(0.0, 0) is not None
        if first_answer is not None:
            writer.settle(first_answer, 0.0)
        writer.settle(refused, 0.0)
        call = writer.next_call(0.0, 0)
        assert call is not None
        assert writer.version.revision == before + (1 if first_answer is None else 2)
        # And the next one starts with a clean slate.
        writer.settle(await store.run(call), 0.0)
        taken = writer.version.revision
        assert writer.next_call(1.0, 0) is not None
        writer.settle(refused, 1.0)
        assert writer.next_call(1.0, 0) is not None
        assert writer.version.revision == taken + 1

    async def is_settled(self, publisher: Publisher) -> bool:
        return not publisher.stats().extra["unwritten_holders"]

    async def test_a_new_holder_is_told_of_and_a_gone_one_forgotten(
        self, store: RedisStore, schema: Schema, publisher: Publisher
    ) -> None:
        publisher.apply(A, 0, [stored(TEN)])
        await publisher.flush()
        await store.command("CONFIG", "SET", "maxmemory", "1")
        publisher.apply(B, 0, [stored(TEN)])
        with pytest.raises(StoreError, match="OOM"):
            await publisher.flush()
        publisher.forget(A)
        await publisher.flush()
        assert await read_snapshot(store, schema, A) is None
        assert [entry.kind for entry in await entries(store, schema, A)] == [Kind.NEW, Kind.FORGET]
        (told,) = await entries(store, schema, B)
        assert (told.kind, decode_events(told.events)) == (Kind.NEW, [Stored(ROOT, TEN)])

    async def test_leases_live_on(self, store: RedisStore, schema: Schema) -> None:
        first = await claim(store, schema, A, "one", 5.0)
        await store.command("CONFIG", "SET", "maxmemory", "1")
        assert await claim(store, schema, A, "one", 5.0, first.fence) == first
        assert (await claim(store, schema, B, "one", 5.0)).granted
        assert await release(store, schema, A, "one")
        assert (await claim(store, schema, A, "two", 5.0)).fence > first.fence

    async def test_a_restatement_that_is_refused_is_cut_short(
        self, store: RedisStore, schema: Schema, publisher: Publisher, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(writer_module, "RESTATED_BLOCKS_MAX", 20)
        chains = [chain_of(number, *range(20)) for number in range(6)]
        publisher.apply(A, 0, [stored(chain) for chain in chains])
        await publisher.flush()
        publisher.restate(A)
        await store.command("CONFIG", "SET", "maxmemory", "1")
        async with running(publisher):

            async def is_short() -> bool:
                kinds = [entry.kind for entry in await entries(store, schema, A)]
                return kinds == [Kind.NEW, Kind.RESTATED]

            await until(is_short)
            held = (await contents(store, schema, A))[b"a"]
            assert 0 < len(held) < 126
            assert held.keys() <= {name for chain in chains for name in split_chain(chain)}
            await store.command("CONFIG", "SET", "maxmemory", "0")
            await until(lambda: self.is_settled(publisher))
        assert len((await contents(store, schema, A))[b"a"]) == 126
