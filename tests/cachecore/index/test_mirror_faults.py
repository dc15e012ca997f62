"""What a mirror does while it loads, when the server is away or has lost something, and when holders change hands."""

import asyncio
import inspect
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from cachecore.blocks import Chain
from cachecore.holders import Holder, Tier
from cachecore.index import feed
from cachecore.index.contract import Match, Removed, Stored
from cachecore.index.leases import claim
from cachecore.index.mirror import MirrorIndex
from cachecore.index.redis import read_records, read_snapshot
from cachecore.index.schema import HolderSnapshot, Schema, shard_of
from cachecore.store import Unavailable
from tests.cachecore.index.behaviour import A0, B0, TEN, A, B
from tests.cachecore.index.gateways import Gateway, agree, gateways, until
from tests.cachecore.index.histories import ROOT, History, chain_of, cut, name_at, worker
from tests.cachecore.index.remote import fresh_schema
from tests.cachecore.store.servers import Server, start_server

FIVE = cut(TEN, 0, 5)


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """For tests that leave the server as it was."""
    with start_server(tmp_path_factory.mktemp("shared"), persist=False) as server:
        yield server


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    with start_server(tmp_path, persist=False) as server:
        yield server


@pytest.fixture
def schema() -> Schema:
    return fresh_schema()


@pytest.fixture
async def pair(shared: Server, schema: Schema) -> AsyncIterator[list[Gateway]]:
    async with gateways(shared.url, schema, 2) as pair:
        yield pair


def store(gateway: Gateway, holder: Holder, sequence: int, chain: Chain, start: int = 0) -> None:
    assert gateway.mirror.apply(holder, sequence, [Stored(name_at(chain, start), cut(chain, start))])


def holdings(gateway: Gateway, holder: Holder) -> dict[Tier, list[bytes]]:
    return {tier: sorted(gateway.mirror.holdings(holder, tier)) for tier in Tier}


def depths(gateway: Gateway, chain: Chain = TEN) -> dict[object, int]:
    return dict(gateway.match(chain).depths)


async def in_the_middle(gateway: Gateway) -> None:
    """Of a batch of 500: the gateway's mirror has just been started, and applies it turn by turn of the loop."""
    async with asyncio.timeout(20):
        while not 0 < gateway.copy.stats().holdings < 500:
            await asyncio.sleep(0)


async def equal(writer: Gateway, *readers: Gateway, holders: tuple[Holder, ...] = (A, B)) -> None:
    """The readers come to have what the writer has, and their indexes are sound."""
    await until(lambda: all(holdings(writer, one) == holdings(reader, one) for one in holders for reader in readers))
    for gateway in (writer, *readers):
        gateway.copy.check_invariants()


class TestLoading:
    async def test_a_late_gateway_loads_everything(self, pair: list[Gateway], shared: Server, schema: Schema) -> None:
        writer, _ = pair
        history = History(7)
        for _ in range(120):
            holder, sequence, events = history.batch()
            writer.mirror.apply(holder, sequence, events)
        await writer.publisher.flush()
        async with gateways(shared.url, schema, 1) as (late,):
            for holder in history.holders:
                assert holdings(late, holder) == holdings(writer, holder)
                assert late.mirror.sequence(holder) == writer.mirror.sequence(holder)
            for chain in history.queries():
                assert late.match(chain) == writer.match(chain)
            for holder in history.holders:  # removals count the copies that were loaded
                for mirror in (late.copy, writer.copy):
                    mirror.apply(holder, 1 << 40, [Removed(chain) for chain in history.chains])
                assert holdings(late, holder) == holdings(writer, holder)

    async def test_holders_of_nothing_are_loaded_too(self, pair: list[Gateway], shared: Server, schema: Schema) -> None:
        writer, _ = pair
        writer.mirror.apply(A, 5, [])
        await writer.publisher.flush()
        async with gateways(shared.url, schema, 1) as (late,):
            assert late.mirror.sequence(A) == 5
            assert late.mirror.stats().holders == 1

    async def test_a_snapshot_that_fails_is_asked_for_again(
        self, pair: list[Gateway], shared: Server, schema: Schema, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        writer, _ = pair
        store(writer, A, 0, TEN)
        await writer.publisher.flush()
        failures = iter([Unavailable("no answer in time")] * 3)

        async def read(*arguments: Any) -> HolderSnapshot | None:
            for failure in failures:
                raise failure
            return await read_snapshot(*arguments)

        monkeypatch.setattr(feed, "read_snapshot", read)
        async with gateways(shared.url, schema, 1) as (late,):
            assert depths(late) == {A0: 10}
            assert list(failures) == []

    async def test_what_is_written_while_it_loads_is_not_missed(
        self, pair: list[Gateway], shared: Server, schema: Schema
    ) -> None:
        writer, reader = pair
        history = History(8, conversations=20)
        for _ in range(100):
            writer.mirror.apply(*history.batch())
        await writer.publisher.flush()
        late = Gateway(shared.url, schema)
        await late.start()
        while not late.mirror.ready:
            writer.mirror.apply(*history.batch())
            await asyncio.sleep(0)
        await agree(writer, reader, late)
        for holder in history.holders:
            assert holdings(late, holder) == holdings(writer, holder) == holdings(reader, holder)
        await late.stop()

    async def test_the_server_is_asked_until_the_copy_is_there(self, pair: list[Gateway], schema: Schema) -> None:
        writer, _ = pair
        store(writer, A, 0, TEN)
        await writer.publisher.flush()
        unstarted = MirrorIndex(writer.store, schema, writer.publisher, writer.direct)
        answer = unstarted.match(TEN)
        assert inspect.isawaitable(answer)
        assert await answer == Match(10, {A0: 10})

    async def test_without_a_server_what_is_here_is_believed(self, tmp_path: Path, schema: Schema) -> None:
        gateway = Gateway(f"unix://{tmp_path}/nothing", schema)
        await gateway.start()
        store(gateway, A, 0, TEN)
        answer = gateway.mirror.match(TEN)
        assert inspect.isawaitable(answer)
        assert await answer == Match(10, {A0: 10})
        assert not gateway.mirror.ready
        assert gateway.mirror.progress().lag_seconds is None
        assert (gateway.mirror.fresh(A), gateway.mirror.fresh(B)) == (True, False)
        await gateway.stop()

    async def test_a_server_that_comes_late_is_found(self, tmp_path: Path, schema: Schema) -> None:
        with start_server(tmp_path, persist=False) as server:
            async with gateways(server.url, schema, 1) as (writer,):
                store(writer, A, 0, TEN)
                await writer.publisher.flush()
                server.stop()
                late = Gateway(server.url, schema)
                await late.start()
                store(late, B, 0, FIVE)
                assert not late.mirror.ready
                server.restart()
                await late.ready()
                await equal(writer, late, holders=(A,))
                await equal(late, writer, holders=(B,))
                await late.stop()

    async def test_the_loop_goes_on_while_a_big_holder_is_loaded(
        self, pair: list[Gateway], shared: Server, schema: Schema, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Nothing is timed here: with no time at all to a turn, others run between any two pieces."""
        monkeypatch.setattr(feed, "TURN_SECONDS", 0.0)
        writer, _ = pair
        for number in range(100):
            store(writer, A, number, chain_of(number, number + 1))
        await writer.publisher.flush()
        late = Gateway(shared.url, schema)
        seen = set()
        await late.start()
        while not late.mirror.ready:
            seen.add(late.copy.stats().holdings)
            await asyncio.sleep(0)
        assert len(seen) > 50
        assert late.copy.stats().holdings == writer.copy.stats().holdings
        await late.stop()


class TestFollowing:
    async def test_what_one_applies_the_other_sees(self, pair: list[Gateway]) -> None:
        ours, others = pair
        store(ours, A, 0, TEN)
        store(others, B, 3, FIVE)
        assert depths(ours) == {A0: 10}, "its own at once"
        await agree(ours, others)
        await agree(others, ours)
        assert depths(ours) == depths(others) == {A0: 10, B0: 5}
        assert (ours.mirror.sequence(B), others.mirror.sequence(A)) == (3, 0)
        progress = ours.mirror.progress()
        assert (progress.ready, progress.holders, progress.holders_awaited, progress.blocks) == (True, 1, 0, 10)
        assert progress.lag_seconds is not None
        assert progress.resyncs == 0, "the stream has told everything"

    async def test_a_big_batch_is_applied_in_turns(self, pair: list[Gateway], monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(feed, "TURN_SECONDS", 0.0)
        writer, reader = pair
        writer.mirror.apply(A, 0, [Stored(ROOT, chain_of(number)) for number in range(500)])
        await agree(writer, reader)
        assert reader.copy.stats().holdings == 500

    async def test_stopped_in_the_middle_of_a_big_batch(
        self, pair: list[Gateway], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(feed, "TURN_SECONDS", 0.0)
        writer, reader = pair
        await reader.mirror.stop()
        writer.mirror.apply(A, 0, [Stored(ROOT, chain_of(number)) for number in range(500)])
        await writer.publisher.flush()
        reader.mirror.start()
        await in_the_middle(reader)
        await reader.mirror.stop()
        assert reader.copy.stats().holdings < 500
        reader.mirror.start()
        await agree(writer, reader)
        assert reader.copy.stats().holdings == 500

    async def test_a_stopped_reader_catches_up(self, pair: list[Gateway]) -> None:
        writer, reader = pair
        store(writer, A, 0, FIVE)
        await agree(writer, reader)
        await reader.mirror.stop()
        store(writer, A, 1, TEN, 5)
        await writer.publisher.flush()
        reader.mirror.start()
        await agree(writer, reader)
        assert depths(reader) == {A0: 10}
        assert reader.mirror.progress().resyncs == 0

    async def test_a_backlog_is_not_taken_for_a_loss(
        self, pair: list[Gateway], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """However often the records say that there is more than was read."""
        monkeypatch.setattr(feed, "READ_ENTRIES_MAX", 1)
        monkeypatch.setattr(feed, "SURVEY_SECONDS", 0.0)
        writer, reader = pair
        await reader.mirror.stop()
        for number in range(200):
            store(writer, A, number, chain_of(number))
            await writer.publisher.flush()
        reader.mirror.start()
        await agree(writer, reader)
        assert (reader.copy.stats().holdings, reader.mirror.progress().resyncs) == (200, 0)

    async def test_a_trimmed_stream_is_made_up_for(self, pair: list[Gateway], shared: Server, schema: Schema) -> None:
        """Both where more comes of the holder and where nothing does."""
        writer, reader = pair
        store(writer, A, 0, FIVE)
        store(writer, B, 0, FIVE)
        await agree(writer, reader)
        await reader.mirror.stop()
        for holder in (A, B):
            store(writer, holder, 1, TEN, 5)
            await writer.publisher.flush()
            shared.command("XTRIM", schema.stream(shard_of(holder)), "MAXLEN", 0)
        reader.mirror.start()
        writer.mirror.apply(A, 2, [Removed(cut(TEN, 9))])
        await equal(writer, reader)
        assert depths(reader) == {A0: 9, B0: 10}

    async def test_a_short_stream_under_load_loses_nothing(self, shared: Server, schema: Schema) -> None:
        async with gateways(shared.url, schema, 2, stream_length_max=1) as (writer, reader):
            history = History(11, conversations=12)
            for _ in range(400):
                writer.mirror.apply(*history.batch())
                if history.rng.random() < 0.1:
                    await writer.publisher.flush()
            await writer.publisher.flush()
            await equal(writer, reader, holders=tuple(history.holders))

    async def test_a_strange_entry_harms_nobody(self, pair: list[Gateway], shared: Server, schema: Schema) -> None:
        writer, reader = pair
        store(writer, A, 0, FIVE)
        await agree(writer, reader)
        stream, version = schema.stream(shard_of(A)), writer.publisher.version(A)
        assert version is not None
        shared.command("XADD", stream, "*", "h", "w/a/0/0", "f", version.fence, "r", "?", "q", 0, "k", "z", "e", "")
        shared.command("XADD", stream, "*", "nonsense", "1")
        fields = ("f", version.fence, "r", version.revision + 1, "q", 7, "k", "a", "e", "torn")
        shared.command("XADD", stream, "*", "h", "w/a/0/0", *fields)
        shared.command("HSET", schema.holders(shard_of(A)), "x/strange", "record")
        await reader.mirror.caught_up()
        assert depths(reader) == {A0: 5}
        assert reader.mirror.progress().resyncs == 1, "the torn one had to be made up for"
        store(writer, A, 1, TEN, 5)
        await agree(writer, reader)
        assert depths(reader) == {A0: 10}


class TestForgetting:
    async def test_the_owner_forgets_for_all(self, pair: list[Gateway]) -> None:
        owner, other = pair
        store(owner, A, 0, TEN)
        await agree(owner, other)
        owner.mirror.forget(A)
        assert depths(owner) == {}
        await agree(owner, other)
        assert depths(other) == {}
        assert other.mirror.progress().holders == 0

    async def test_what_was_written_of_the_dead_does_not_revive_them(
        self, pair: list[Gateway], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The owner reads its own entries when the holder is its own no more."""
        monkeypatch.setattr(feed, "TURN_SECONDS", 0.0)
        owner, _ = pair
        await owner.mirror.stop()
        store(owner, A, 0, TEN)
        await owner.publisher.flush()
        owner.mirror.forget(A)
        await owner.publisher.flush()
        assert not owner.publisher.owns(A)
        owner.mirror.start()
        reading = asyncio.create_task(owner.mirror.caught_up())
        while not reading.done():
            assert depths(owner) == {}
            await asyncio.sleep(0)
        await reading

    async def test_others_forget_for_themselves(self, pair: list[Gateway]) -> None:
        owner, other = pair
        store(owner, A, 0, FIVE)
        await agree(owner, other)
        other.mirror.forget(A)
        store(owner, A, 1, TEN, 5)
        await agree(owner, other)
        assert depths(other) == {}
        assert not other.mirror.fresh(A)
        owner.mirror.forget(A)
        await agree(owner, other)
        store(owner, A, 0, FIVE)
        await agree(owner, other)
        assert depths(other) == {A0: 5}, "another life"

    async def test_a_record_that_disappears_is_forgotten(
        self, pair: list[Gateway], shared: Server, schema: Schema
    ) -> None:
        owner, other = pair
        store(owner, A, 0, FIVE)
        await agree(owner, other)
        await owner.stop()
        shared.command("DEL", schema.holders(shard_of(A)), schema.stream(shard_of(A)))
        await until(lambda: not depths(other))
        assert other.mirror.progress().holders == 0

    async def test_memory_comes_back_without_traffic(self, pair: list[Gateway]) -> None:
        owner, other = pair
        for number in range(200):
            store(owner, A, number, chain_of(number, number))
        await agree(owner, other)
        assert other.copy.stats().runs == 200
        owner.mirror.forget(A)
        await until(lambda: other.copy.stats().runs == owner.copy.stats().runs == 0)

    async def test_a_bound_shortens_the_copy_alone(self, shared: Server, schema: Schema) -> None:
        async with (
            gateways(shared.url, schema, 1) as (writer,),
            gateways(shared.url, schema, 1, blocks_max=100) as (small,),
        ):
            chains = [chain_of(*([number] * 10)) for number in range(1, 31)]
            for number, chain in enumerate(chains):
                store(writer, A, number, chain)
            await agree(writer, small)
            assert small.copy.stats().blocks <= 100 < writer.copy.stats().blocks
            for chain in chains:
                assert depths(small, chain).get(A0, 0) <= depths(writer, chain)[A0]
            async with gateways(shared.url, schema, 1, blocks_max=100) as (late,):
                assert late.copy.stats().blocks <= 100


class TestOwnership:
    async def test_another_goes_on_where_the_owner_died(
        self, pair: list[Gateway], shared: Server, schema: Schema
    ) -> None:
        owner, heir = pair
        async with gateways(shared.url, schema, 1) as (witness,):
            store(owner, A, 4, FIVE)
            await agree(owner, heir, witness)
            await owner.stop()
            granted = await claim(heir.store, schema, A, "heir", 10.0)
            snapshot = await read_snapshot(heir.store, schema, A)
            assert granted.granted
            assert snapshot is not None
            heir.mirror.adopt(A, granted.fence, snapshot)
            assert depths(heir) == {A0: 5}
            assert heir.mirror.sequence(A) == 4
            assert not heir.mirror.apply(A, 4, [Stored(ROOT, TEN)])
            store(heir, A, 5, TEN, 5)
            await agree(heir, witness)
            assert depths(heir) == depths(witness) == {A0: 10}
            assert witness.mirror.progress().resyncs == 0, "it goes on as if nothing had been"

    async def test_an_adopted_holder_is_what_its_snapshot_says(self, pair: list[Gateway], schema: Schema) -> None:
        """Whatever the copy had: here it had missed something."""
        owner, heir = pair
        store(owner, A, 0, TEN)
        await agree(owner, heir)
        await heir.mirror.stop()
        owner.mirror.apply(A, 1, [Stored(ROOT, cut(TEN, 0, 3)), Removed(cut(TEN, 7))])
        await owner.publisher.flush()
        snapshot = await read_snapshot(heir.store, schema, A)
        assert snapshot is not None
        granted = await claim(heir.store, schema, A, "heir", 10.0)
        heir.mirror.adopt(A, granted.fence, snapshot)
        assert depths(heir) == {A0: 7}
        heir.mirror.apply(A, 2, [Removed(cut(TEN, 0, 7))])
        assert depths(heir) == {A0: 3}, "with its copies"

    async def test_adopted_in_the_middle_of_a_big_batch(
        self, pair: list[Gateway], schema: Schema, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(feed, "TURN_SECONDS", 0.0)
        owner, heir = pair
        await heir.mirror.stop()
        owner.mirror.apply(A, 0, [Stored(ROOT, chain_of(number)) for number in range(500)])
        await owner.publisher.flush()
        snapshot = await read_snapshot(owner.store, schema, A)
        heir.mirror.start()
        await in_the_middle(heir)
        heir.mirror.adopt(A, 1 << 50, snapshot)
        assert heir.copy.stats().holdings == 500
        await heir.mirror.caught_up()
        assert heir.copy.stats().holdings == 500
        heir.mirror.apply(A, 1, [Removed(chain_of(number)) for number in range(500)])
        assert heir.copy.stats().holdings == 0, "each once"

    async def test_what_others_had_is_void_when_nobody_handed_it_over(self, pair: list[Gateway]) -> None:
        """The publisher starts from nothing, and so does the copy."""
        owner, other = pair
        store(owner, A, 0, TEN)
        await agree(owner, other)
        await owner.stop()
        store(other, A, 9, FIVE)
        assert depths(other) == {A0: 5}

    async def test_a_deposed_owner_believes_the_new_one(self, pair: list[Gateway], schema: Schema) -> None:
        deposed, heir = pair
        fenced: list[Holder] = []
        deposed.publisher.on_fenced = fenced.append
        store(deposed, A, 0, FIVE)
        await agree(deposed, heir)
        granted = await claim(heir.store, schema, A, "heir", 10.0)
        heir.mirror.adopt(A, granted.fence, await read_snapshot(heir.store, schema, A))
        store(heir, A, 1, TEN, 5)
        deposed.mirror.apply(A, 1, [Removed(cut(TEN, 0, 2))])
        await heir.publisher.flush()
        await until(lambda: fenced == [A])
        await equal(heir, deposed, holders=(A,))
        assert depths(deposed) == {A0: 10}

    async def test_a_dropped_holder_is_read_anew(self, pair: list[Gateway]) -> None:
        """What had not been written when it was dropped is not believed."""
        owner, other = pair
        store(owner, A, 0, FIVE)
        await agree(owner, other)
        store(owner, A, 1, TEN, 5)
        owner.mirror.drop(A)
        await owner.mirror.caught_up()
        assert depths(owner) == depths(other) == {A0: 5}


class TestLosses:
    async def fill(self, writer: Gateway, *readers: Gateway) -> None:
        store(writer, A, 0, TEN)
        store(writer, B, 0, FIVE)
        await agree(writer, *readers)

    async def test_everything_is_flushed(self, server: Server, schema: Schema) -> None:
        async with gateways(server.url, schema, 3) as (writer, reader, other):
            await self.fill(writer, reader)
            store(other, worker("c"), 0, TEN)
            server.command("FLUSHALL")
            await until(lambda: server.command("EXISTS", schema.holders(shard_of(A))))
            store(writer, A, 1, chain_of(77))
            await equal(writer, reader, other)
            await equal(other, writer, reader, holders=(worker("c"),))

    async def test_killed_and_started_empty(self, server: Server, schema: Schema) -> None:
        async with gateways(server.url, schema, 2) as (writer, reader):
            await self.fill(writer, reader)
            server.restart(empty=True, crash=True)
            writer.mirror.apply(A, 1, [Removed(cut(TEN, 8))])
            await equal(writer, reader)
            assert depths(reader) == {A0: 8, B0: 5}

    async def test_frozen_for_a_while(self, server: Server, schema: Schema) -> None:
        async with gateways(server.url, schema, 2) as (writer, reader):
            await self.fill(writer, reader)
            server.freeze()
            await until(lambda: not reader.mirror.fresh(A))
            writer.mirror.apply(A, 1, [Removed(cut(TEN, 8))])
            assert reader.mirror.match(TEN) == Match(10, {A0: 10, B0: 5}), "still at once, from the copy"
            server.thaw()
            await equal(writer, reader)
            await until(lambda: reader.mirror.fresh(A))
            assert depths(reader) == {A0: 8, B0: 5}

    async def test_who_comes_while_there_is_no_memory_knows_that_it_has_less(
        self, server: Server, schema: Schema
    ) -> None:
        async with gateways(server.url, schema, 2) as (writer, reader):
            await self.fill(writer, reader)
            server.command("CONFIG", "SET", "maxmemory", "1")
            store(writer, A, 1, chain_of(77))
            await equal(writer, reader)
            async with gateways(server.url, schema, 1) as (late,):
                assert (depths(late), depths(late, chain_of(77))) == ({A0: 10, B0: 5}, {})
                await until(lambda: late.mirror.fresh(B))  # of which the server lacks nothing
                assert [gateway.mirror.fresh(A) for gateway in (writer, reader, late)] == [True, True, False]
                assert reader.mirror.progress().resyncs == 0, "the stream alone has told it"
                said = (await read_records(late.store, schema))[A]
                assert not late.direct.fresh(A, said)
                assert reader.mirror.fresh(A, said)
                server.command("CONFIG", "SET", "maxmemory", "0")
                await until(lambda: late.mirror.fresh(A))
                await equal(writer, late)
                assert late.direct.fresh(A, (await read_records(late.store, schema))[A])

    async def test_a_promoted_replica_that_lacks_the_last_writes(self, tmp_path: Path, schema: Schema) -> None:
        """The server comes back with an older state, and nobody is left who knows more."""
        with start_server(tmp_path, persist=True, options={"appendfsync": "always"}) as server:
            async with gateways(server.url, schema, 2) as (writer, reader):
                await self.fill(writer, reader)
                saved = {key: server.command("DUMP", key) for key in server.command("KEYS", "*")}
                store(writer, A, 1, chain_of(77))
                store(writer, B, 1, TEN, 5)
                await agree(writer, reader)
                await writer.stop()
                server.command("FLUSHALL")
                for key, value in saved.items():
                    server.command("RESTORE", key, 0, value)
                await until(lambda: depths(reader) == {A0: 10, B0: 5})
                assert depths(reader, chain_of(77)) == {}
                assert [reader.mirror.sequence(holder) for holder in (A, B)] == [0, 0]
