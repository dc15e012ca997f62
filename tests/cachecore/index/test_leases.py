"""Leases and fences on a real server."""

import asyncio
from collections import Counter

from cachecore.blocks import split_chain
from cachecore.index.contract import Removed
from cachecore.index.leases import Leases, claim, release
from cachecore.index.publisher import Publisher
from cachecore.index.redis import read_records
from cachecore.index.schema import Kind, Schema, shard_of
from cachecore.store import RedisStore
from tests.cachecore.index.histories import cut
from tests.cachecore.index.publishing import (
    TEN,
    A,
    B,
    contents,
    entries,
    stored,
)


class TestLeases:
    async def test_claim_renew_and_release(self, store: RedisStore, schema: Schema) -> None:
        first = await claim(store, schema, A, "one", 5.0)
        assert (first.granted, first.owner, first.fence) == (True, "one", first.record.version.fence)
        assert (first.record.sequence, first.record.places) == (None, b"")
        assert (await read_records(store, schema))[A] == first.record
        again = await claim(store, schema, A, "one", 5.0, first.fence)
        assert again == first
        other = await claim(store, schema, A, "two", 5.0)
        assert (other.granted, other.owner, other.fence) == (False, "one", first.fence)
        assert not await release(store, schema, A, "two")
        assert await release(store, schema, A, "one")
        heir = await claim(store, schema, A, "two", 5.0)
        assert (heir.granted, heir.owner) == (True, "two")
        assert heir.fence > first.fence
        assert heir.record.version.revision == first.record.version.revision

    async def test_leases_expire_and_a_late_owner_keeps_its_fence_if_nobody_came(
        self, store: RedisStore, schema: Schema
    ) -> None:
        first = await claim(store, schema, A, "one", 0.05)
        await asyncio.sleep(0.1)
        late = await claim(store, schema, A, "one", 0.05, first.fence)
        assert (late.granted, late.fence) == (True, first.fence)
        await asyncio.sleep(0.1)
        heir = await claim(store, schema, A, "two", 0.05)
        await asyncio.sleep(0.1)
        assert (await claim(store, schema, A, "one", 5.0, first.fence)).fence > heir.fence > first.fence

    async def test_fences_grow_across_a_loss_of_data(self, store: RedisStore, schema: Schema) -> None:
        first = await claim(store, schema, A, "one", 5.0)
        await asyncio.sleep(0.005)
        await store.command("FLUSHALL")
        second = await claim(store, schema, A, "two", 5.0)
        assert second.fence > first.fence
        assert second.record.version.revision > first.record.version.revision

    async def test_a_lease_got_again_after_a_loss_goes_on(self, store: RedisStore, schema: Schema) -> None:
        publisher, leases = Publisher(store, schema), Leases(store, schema, "one")
        (first,) = await leases.ask([A], [True])
        publisher.adopt(A, first.fence, await leases.snapshot(A))
        publisher.apply(A, 0, [stored(TEN)])
        await publisher.flush()
        await asyncio.sleep(0.005)
        await store.command("FLUSHALL")
        publisher.apply(A, 1, [Removed(cut(TEN, 9))])
        (second,) = await leases.ask([A], [True])
        publisher.renew(A, second.fence)
        await publisher.flush()
        assert publisher.version(A).fence == second.fence > first.fence
        assert await contents(store, schema, A) == {b"a": Counter(split_chain(cut(TEN, 0, 9)))}

    async def test_many_at_once_some_only_looked_at(self, store: RedisStore, schema: Schema) -> None:
        one, two = Leases(store, schema, "one", 5.0), Leases(store, schema, "two", 5.0)
        assert [(c.granted, c.owner) for c in await one.ask([A, B], [True, False])] == [(True, "one"), (False, "")]
        assert [(c.granted, c.owner) for c in await two.ask([A, B], [True, True])] == [(False, "one"), (True, "two")]
        assert [(c.granted, c.owner) for c in await one.ask([A, B], [False, True])] == [(True, "one"), (False, "two")]
        await one.release([A])
        assert [c.granted for c in await two.ask([A], [True])] == [True]
        assert B not in await read_records(store, schema, [(shard_of(B) + 1) % 16])

    async def test_a_claimed_holder_that_is_new_begins_with_its_first_batch(
        self, store: RedisStore, schema: Schema
    ) -> None:
        publisher = Publisher(store, schema)
        lease = await claim(store, schema, A, "one", 5.0)
        publisher.adopt(A, lease.fence, None)
        publisher.apply(A, 0, [stored(TEN)])
        await publisher.flush()
        (entry,) = await entries(store, schema, A)
        assert entry.kind == Kind.NEW
        assert entry.version.fence == lease.fence
        assert entry.version.revision > lease.record.version.revision
