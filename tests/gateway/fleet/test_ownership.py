"""Event streams among gateways: each followed once, and by somebody else when its follower is gone.

Real publishers, a real server; gateways are their parts in one process.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Collection, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import pytest

from cachecore.blocks import Chain, pack_tokens, split_chain
from cachecore.events import BlockRemoved, BlockStored, EventBatch
from cachecore.holders import Epoch, Place, Tier, Worker, WorkerName
from cachecore.index.contract import Match
from cachecore.index.leases import Leases
from cachecore.index.mirror import MirrorIndex
from cachecore.index.publisher import Publisher
from cachecore.index.redis import RedisIndex, SharedIndex, read_snapshot
from cachecore.index.schema import Schema
from cachecore.scope import DEFAULT_TENANT, Fidelity, IdentityScope, Keyring, Naming, Salt
from cachecore.store import RedisStore, parse_address
from gateway.config import WorkerConfig
from gateway.fleet.engines.contract import Discovery, EventEndpoints
from gateway.fleet.ownership import LeasedStreams, rendezvous
from gateway.fleet.streams import Intakes
from gateway.fleet.trust import TrustLevel
from gateway.fleet.worker import ModelPool, WorkerRecord
from tests.cachecore.store.servers import Server
from workers.publisher import EventPublisher

LEASE_SECONDS = 0.4
BLOCK = 4
KEYRING = Keyring.generate()
NAMING = Naming.of(IdentityScope("m", KEYRING.key_id(DEFAULT_TENANT), BLOCK), KEYRING)


class Engine:
    """A worker as far as its events go: chains of blocks whose tokens are all one number."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.publisher = EventPublisher()
        self.holder = Worker(WorkerName(name), Epoch(5), 0)
        self.now: Callable[[], float] = lambda: 0.0
        """What its batches say when they were made; 0 where they do not."""

    def record(self) -> WorkerRecord:
        """As one more gateway has it."""
        record = WorkerRecord.of(WorkerConfig(url="http://127.0.0.1:1", name=self.name))
        record.epoch, record.holders = self.holder.epoch, (self.holder,)
        endpoint, replay, topic = self.publisher.endpoint, self.publisher.replay_endpoint, self.publisher.config.topic
        record.discovery = Discovery({}, events=EventEndpoints.at(endpoint, replay, topic))
        return record

    def store(self, *blocks: int) -> None:
        tokens = [block for block in blocks for _ in range(BLOCK)]
        self._publish(BlockStored(blocks, None, tuple(tokens), BLOCK))

    def store_quantized(self, parent: int, *blocks: int) -> None:
        """Their handles are a hundred above their numbers."""
        tokens = [block for block in blocks for _ in range(BLOCK)]
        salt = KEYRING.mint_salt(Salt(KEYRING.key_id(DEFAULT_TENANT), Fidelity.QUANTIZED))
        handles = tuple(block + 100 for block in blocks)
        self._publish(BlockStored(handles, parent, tuple(tokens), BLOCK, cache_salt=salt))

    def remove(self, *blocks: int) -> None:
        self._publish(BlockRemoved(blocks))

    def _publish(self, event: Any) -> None:
        self.publisher.publish(EventBatch(self.now(), (event,), rank=0))


def chain_of(*blocks: int) -> Chain:
    return NAMING.hasher.chain(NAMING.root, pack_tokens([block for block in blocks for _ in range(BLOCK)]))


class Member:
    """One gateway's share in the matter."""

    def __init__(
        self, url: str, schema: Schema, name: str, peers: Callable[[], Collection[str]], mirrored: bool = True
    ) -> None:
        self.name = name
        self.store = RedisStore(parse_address(url), budget_seconds=0.2)
        self.publisher = Publisher(self.store, schema, on_fenced=lambda holder: self.streams.fenced(holder))
        direct = RedisIndex(self.store, schema, self.publisher)
        self.mirror = MirrorIndex(self.store, schema, self.publisher, direct) if mirrored else None
        self.index: SharedIndex = self.mirror or direct
        leases = Leases(self.store, schema, name, LEASE_SECONDS)
        self.streams = LeasedStreams(leases, self.index, Intakes(self.index, lambda *_: NAMING), peers)
        self.records: list[WorkerRecord] = []
        self._pool = ModelPool("m", block_size_tokens=BLOCK)
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self, engines: Collection[Engine]) -> None:
        await self.store.start()
        if self.mirror is not None:
            self.mirror.start()
        self._tasks = [asyncio.create_task(self.publisher.run()), asyncio.create_task(self.streams.run())]
        for engine in engines:
            record = engine.record()
            self.records.append(record)
            await self.streams.follow(record, self._pool)

    async def stop(self) -> None:
        for record in self.records:
            await self.streams.leave(record)
        await self.crash()

    async def crash(self) -> None:
        """Nothing is given back and nothing is written any more."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self.mirror is not None:
            await self.mirror.stop()
        await self.store.close()
        await self.streams.stop()

    @property
    def owned(self) -> set[str]:
        return {holder.name for holder in self.streams.owned()}

    @property
    def trusted(self) -> bool:
        return all(record.trust.level is TrustLevel.EXACT for record in self.records)

    def holds(self, engine: Engine) -> set[bytes]:
        return set(self.index.holdings(engine.holder, Tier.L0))


async def until(condition: Callable[[], object], what: str = "", seconds: float = 15.0) -> None:
    try:
        async with asyncio.timeout(seconds):
            while not condition():
                await asyncio.sleep(0.01)
    except TimeoutError:
        raise AssertionError(f"it did not come true: {what}") from None


@pytest.fixture
def engines() -> Iterator[list[Engine]]:
    engines = [Engine(f"w{number}") for number in range(4)]
    yield engines
    for engine in engines:
        engine.publisher.close()


@asynccontextmanager
async def fleet(
    url: str, schema: Schema, names: str, engines: Collection[Engine], mirrored: bool = True
) -> AsyncIterator[list[Member]]:
    alive = list(names)
    async with AsyncExitStack() as stack:
        members = [Member(url, schema, name, lambda: alive, mirrored) for name in names]
        for member in members:
            await member.start(engines)
            stack.push_async_callback(member.crash)
        await until(lambda: all(member.trusted for member in members), "all streams are followed")
        yield members


async def test_streams_are_divided_and_each_is_seen_by_all(
    valkey: Server, store: RedisStore, schema: Schema, engines: list[Engine]
) -> None:
    async with fleet(valkey.url, schema, "ab", engines) as members:
        expected = {name: {e.name for e in engines if rendezvous(e.holder, "ab") == name} for name in "ab"}
        await until(lambda: {m.name: m.owned for m in members} == expected, f"{expected}")
        for number, engine in enumerate(engines):
            engine.store(*range(number * 10, number * 10 + 5))
            engine.remove(number * 10 + 4)
        for number, engine in enumerate(engines):
            held = set(split_chain(chain_of(*range(number * 10, number * 10 + 4))))
            await until(lambda held=held, engine=engine: all(m.holds(engine) == held for m in members), engine.name)


@pytest.mark.parametrize("goodbye", [True, False])
async def test_another_goes_on_with_removals_of_what_came_before(
    valkey: Server, store: RedisStore, schema: Schema, engines: list[Engine], goodbye: bool
) -> None:
    engine = engines[0]
    async with fleet(valkey.url, schema, "ab", engines[:1]) as members:
        engine.store(1, 2, 3, 4, 5)
        await until(lambda: all(len(member.holds(engine)) == 5 for member in members), "both know")
        await until(lambda: [m for m in members if m.owned], "one owns it")
        (owner,) = [member for member in members if member.owned]
        (other,) = [member for member in members if member is not owner]
        await owner.publisher.flush()
        await (owner.stop() if goodbye else owner.crash())
        engine.remove(5)
        engine.store(1, 2, 3, 4, 6)
        engine.remove(4)
        # Blocks 1 to 3 were stored twice, so one copy of each is left when it has been removed once.
        engine.remove(3)
        expected = {*split_chain(chain_of(1, 2, 3)), chain_of(1, 2, 3, 4)[-16:], chain_of(1, 2, 3, 4, 6)[-16:]}
        await until(lambda: other.owned == {engine.name}, "the other owns it")
        await until(lambda: other.holds(engine) == expected, "the other knows")
        await other.index.flush()
        snapshot = await read_snapshot(store, schema, engine.holder)
        assert snapshot is not None
        assert snapshot.persistable
        assert {name for piece in snapshot.pieces for name in split_chain(piece.names)} == expected


async def test_another_knows_how_good_it_was(
    valkey: Server, store: RedisStore, schema: Schema, engines: list[Engine]
) -> None:
    engine = engines[0]
    async with fleet(valkey.url, schema, "ab", engines[:1]) as members:
        engine.store(1, 2, 3)
        engine.store_quantized(2, 3, 4, 5)
        await until(lambda: all(len(member.holds(engine)) == 5 for member in members), "both know")
        await until(lambda: [m for m in members if m.owned], "one owns it")
        (owner,) = [member for member in members if member.owned]
        (other,) = [member for member in members if member is not owner]
        await owner.publisher.flush()
        await owner.crash()
        engine.remove(105)
        await until(lambda: other.owned == {engine.name}, "the other owns it")
        await until(lambda: len(other.holds(engine)) == 4, "the other knows")
        places = [Place(engine.holder, Tier.L0, fidelity) for fidelity in (Fidelity.EXACT, Fidelity.QUANTIZED)]
        match = other.index.match(chain_of(1, 2, 3, 4, 5))
        assert isinstance(match, Match)
        assert match.depths == dict(zip(places, (3, 4), strict=True))


async def test_who_was_thought_dead_stops_when_it_wakes(
    valkey: Server, store: RedisStore, schema: Schema, engines: list[Engine]
) -> None:
    engine = engines[0]
    async with fleet(valkey.url, schema, "a", engines[:1]) as (member,):
        engine.store(1, 2, 3)
        await until(lambda: member.owned, "it owns the stream")
        # What a gateway that believed it dead would have done.
        await store.command(b"DEL", schema.lease(engine.holder))
        (claim,) = await Leases(store, schema, "stranger", 30.0).ask([engine.holder], [True])
        assert claim.granted
        await until(lambda: not member.owned, "it has let go")
        engine.store(7, 8)
        await asyncio.sleep(2 * LEASE_SECONDS)
        assert member.owned == set()
        assert chain_of(7)[:16] not in member.holds(engine)


async def test_without_the_server_everybody_listens_and_afterwards_one_writes(
    valkey: Server, store: RedisStore, schema: Schema, engines: list[Engine]
) -> None:
    engine = engines[0]
    async with fleet(valkey.url, schema, "ab", engines[:1]) as members:
        engine.store(1, 2, 3)
        await until(lambda: all(len(member.holds(engine)) == 3 for member in members), "both know")
        valkey.freeze()
        try:
            engine.store(1, 2, 3, 4)
            both = set(split_chain(chain_of(1, 2, 3, 4)))
            await until(lambda: all(m.holds(engine) == both for m in members), "both listen by themselves")
            assert all(member.trusted for member in members)
        finally:
            valkey.thaw()
        await until(lambda: [bool(m.owned) for m in members].count(True) == 1, "one owns it")
        engine.store(20)
        both.add(chain_of(20))
        await until(lambda: all(m.holds(engine) == both for m in members), "both know, by the one that owns it")


async def test_who_asks_a_server_without_memory_does_not_take_its_word(
    valkey: Server, store: RedisStore, schema: Schema, engines: list[Engine]
) -> None:
    """Without mirrors the server is asked, also for what a gateway follows itself."""
    engine = engines[0]
    async with fleet(valkey.url, schema, "ab", engines[:1], mirrored=False) as members:
        engine.store(1, 2, 3)
        await until(lambda: any(len(member.holds(engine)) == 3 for member in members), "its follower knows")
        valkey.command("CONFIG", "SET", "maxmemory", "1")
        try:
            engine.store(1, 2, 3, 4)
            await until(lambda: not any(member.trusted for member in members), "the server has less than there is")
        finally:
            valkey.command("CONFIG", "SET", "maxmemory", "0")
        await until(lambda: all(member.trusted for member in members), "it has everything again")


async def test_a_worker_that_leaves_is_followed_no_more(
    valkey: Server, store: RedisStore, schema: Schema, engines: list[Engine]
) -> None:
    async with fleet(valkey.url, schema, "a", engines[:2]) as (member,):
        await until(lambda: len(member.owned) == 2, "it owns both")
        left, kept = member.records
        await member.streams.leave(left)
        assert (left.trust.level, left.intakes) == (TrustLevel.HISTORY, [])
        assert member.owned == {kept.name}
        assert await store.command(b"GET", schema.lease(left.holders[0])) is None
        assert await store.command(b"GET", schema.lease(kept.holders[0])) == b"a"


def test_a_new_gateway_takes_its_own_share_and_no_other() -> None:
    holders = [Worker(WorkerName(f"w{number}"), Epoch(0), rank) for number in range(200) for rank in range(2)]
    before = {holder: rendezvous(holder, "abc") for holder in holders}
    after = {holder: rendezvous(holder, "abcd") for holder in holders}
    moved = [holder for holder in holders if before[holder] != after[holder]]
    assert {after[holder] for holder in moved} == {"d"}
    assert 60 <= len(moved) <= 140
    assert {holder: rendezvous(holder, "cba") for holder in holders} == before


async def empty(member: Member, record: WorkerRecord) -> None:
    """As a fleet does when a worker's cache was emptied without a word for it (`Fleet._begin_again`)."""
    (holder,) = record.holders
    member.index.forget(holder)
    await member.streams.leave(record)
    member.index.forget(holder)
    assert record.discovery is not None
    assert record.discovery.events is not None
    record.discovery.events = record.discovery.events.since(time.time())
    await member.streams.follow(record, ModelPool("m", block_size_tokens=BLOCK))


@pytest.mark.parametrize("owner_first", [True, False])
async def test_what_all_have_seen_emptied_is_told_by_nobody_again(
    valkey: Server, store: RedisStore, schema: Schema, engines: list[Engine], owner_first: bool
) -> None:
    """Replays and the last follower's state both still hold it."""
    engine = engines[0]
    engine.now = time.time
    async with fleet(valkey.url, schema, "ab", engines[:1]) as members:
        engine.store(1, 2, 3)
        await until(lambda: all(len(m.holds(engine)) == 3 for m in members), "the blocks are known")
        await until(lambda: any(m.owned for m in members), "somebody owns the stream")
        for member in sorted(members, key=lambda m: bool(m.owned) is not owner_first):
            await empty(member, member.records[0])
        await until(lambda: all(m.trusted for m in members) and any(m.owned for m in members), "it is followed again")
        engine.store(7, 8)
        held = set(split_chain(chain_of(7, 8)))
        await until(lambda: all(m.holds(engine) == held for m in members), "what came after is known, and nothing else")
