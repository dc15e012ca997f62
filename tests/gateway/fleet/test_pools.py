"""What a gateway knows of pools: the rules of `PoolKnowledge` beside a naive model, and real workers followed."""

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import pytest
from fastapi import FastAPI
from prometheus_client import CollectorRegistry, generate_latest

from cachecore.blocks import HASH_BYTES, Chain, PrefixHash
from cachecore.holders import Epoch, Pool, Worker, WorkerName
from cachecore.scope import Fidelity, KeyId, TenantId
from cachecore.store.pools import Accepted, DirectoryPool, Extent, PoolBounds, PoolRun, RunKey, SealedFrame
from cachecore.store.pools.journal import Journal, PoolCleared, RunDocument, RunRemoved, RunStored
from cachecore.transfer.capability import Run
from gateway.config import WorkerConfig
from gateway.fleet.engines.contract import Discovery, OpenPool, TransferAbility
from gateway.fleet.pools import PoolFollower, PoolKnowledge, PoolMatch
from gateway.fleet.worker import WorkerRecord
from gateway.views.pools import PoolCollector
from workers.openai.pools import mount_pools
from workers.openai.server import WorkerServer
from workers.pools import list_runs

RUN_BLOCKS = 4
SHARED = Pool("shared", 3)
ROOT = PrefixHash(b"r" * HASH_BYTES)
LAYERS, HEADS = Extent(0, 6), Extent(0, 3)
CLASS = b"c" * 16


def chain_of(blocks: int, seed: int = 0) -> Chain:
    return Chain(random.Random(f"chain {seed}").randbytes(HASH_BYTES * blocks))


def runs_of(chain: Chain, compatibility: bytes = CLASS, codec: str = "i8", size: int = RUN_BLOCKS) -> list[PoolRun]:
    names, runs = ROOT + chain, []
    for first in range(0, len(chain) // HASH_BYTES - size + 1, size):
        part = Chain(chain[first * HASH_BYTES : (first + size) * HASH_BYTES])
        tail = PrefixHash(part[-HASH_BYTES:])
        key_id = KeyId(TenantId("ann"), 0)
        fidelity = Fidelity.EXACT if codec == "raw" else Fidelity.QUANTIZED
        key = RunKey(compatibility, b"s" * 16, key_id, tail, size, LAYERS, HEADS, codec, fidelity)
        runs.append(PoolRun(key, PrefixHash(names[first * HASH_BYTES :][:HASH_BYTES]), part, first))
    return runs


def documents_of(chain: Chain, holder: Pool = SHARED, **form: object) -> list[RunDocument]:
    return [RunDocument.of(holder, run) for run in runs_of(chain, **form)]  # type: ignore[arg-type]


def removal_of(document: RunDocument) -> RunRemoved:
    return RunRemoved(document.pool, document.generation, document.chain[-HASH_BYTES:], document.fidelity, document)


def known(documents: list[RunDocument], **options: int) -> PoolKnowledge:
    knowledge = PoolKnowledge(**options)
    for document in documents:
        knowledge.store(document)
    return knowledge


def only(matches: list[PoolMatch]) -> PoolMatch:
    (match,) = matches
    return match


def mask(match: PoolMatch) -> int:
    """Of runs that are all of one size."""
    (size,) = match.sizes
    return size.present


# ---- matching --------------------------------------------------------------------------------------------------------


def test_a_match_is_as_deep_as_whole_runs_follow_each_other() -> None:
    chain = chain_of(19)
    documents = documents_of(chain)
    assert len(documents) == 4
    knowledge = known(documents)
    match = only(knowledge.match(chain))
    assert (match.kind.holder, match.kind.codec, match.kind.run_blocks) == (SHARED, "i8", RUN_BLOCKS)
    assert match.kind.compatibility == CLASS.hex()
    assert match.depth == 16
    assert only(knowledge.match(Chain(chain[: 7 * HASH_BYTES]))).depth == 4
    assert knowledge.match(Chain(chain[: 3 * HASH_BYTES])) == []
    assert knowledge.match(chain_of(19, seed=1)) == []


def test_a_hole_ends_a_match_and_whoever_has_what_lies_before_it_goes_on_behind() -> None:
    chain = chain_of(20)
    documents = documents_of(chain)
    knowledge = known([document for number, document in enumerate(documents) if number != 1])
    match = only(knowledge.match(chain))
    assert match.depth == 4
    assert [match.reach(block) for block in (0, 3, 4, 7, 8, 11, 19, 20, 25)] == [4, 4, 4, 7, 20, 20, 20, 20, 25]


def test_the_runs_to_pull_are_whole_and_name_what_lies_before_them() -> None:
    chain = chain_of(20)
    match = only(known(documents_of(chain)).match(chain))
    names = [PrefixHash((ROOT + chain)[at * HASH_BYTES :][:HASH_BYTES]) for at in range(21)]
    assert match.runs(chain, ROOT, 6, 13) == [
        Run(names[start], names[start + 4], start, 4) for start in (4, 8, 12)
    ]  # the last one is wanted for one block of it
    assert match.runs(chain, ROOT, 0, 4) == [Run(ROOT, names[4], 0, 4)]
    with pytest.raises(ValueError, match="not all"):
        match.runs(chain, ROOT, 6, 21)


def test_classes_and_codecs_are_kept_apart() -> None:
    chain = chain_of(12)
    knowledge = known(
        documents_of(chain) + documents_of(chain, compatibility=b"d" * 16)[:2] + documents_of(chain, codec="raw")[:1]
    )
    found = {(match.kind.compatibility[:2], match.kind.codec): match.depth for match in knowledge.match(chain)}
    assert found == {("63", "i8"): 12, ("64", "i8"): 8, ("63", "raw"): 4}


def test_long_runs_are_preferred_and_short_ones_go_on_behind_them() -> None:
    chain = chain_of(30)
    names = [PrefixHash((ROOT + chain)[at * HASH_BYTES :][:HASH_BYTES]) for at in range(31)]
    long, short = documents_of(chain, size=8), documents_of(chain, size=2)
    # Blocks 0-8 as both, 8-16 as short ones, one of which is missing, 16-24 as a long one, 24-28 as short ones.
    match = only(known([long[0], long[2], *short[:6], short[7], *short[12:14]]).match(chain))
    assert (match.kind.run_blocks, match.end) == (2, 28)
    assert [match.reach(block) for block in (0, 7, 12, 13, 14, 17, 27, 28)] == [12, 12, 12, 13, 28, 28, 28, 28]
    assert match.runs(chain, ROOT, 3, 11) == [
        Run(ROOT, names[8], 0, 8),
        Run(names[8], names[10], 8, 2),
        Run(names[10], names[12], 10, 2),
    ]
    assert [(run.first_block, run.blocks) for run in match.runs(chain, ROOT, 14, 27)] == [
        (14, 2),
        (16, 8),
        (24, 2),
        (26, 2),
    ]
    with pytest.raises(ValueError, match="not all"):
        match.runs(chain, ROOT, 3, 13)


def test_runs_of_sizes_that_do_not_fit_each_other_are_not_mixed() -> None:
    chain = chain_of(12)
    match = only(known(documents_of(chain, size=4)[:2] + documents_of(chain, size=6)[:1]).match(chain))
    assert (match.kind.run_blocks, match.depth, match.end) == (6, 6, 6)


# ---- what changes ----------------------------------------------------------------------------------------------------


def test_to_hear_of_a_run_twice_changes_nothing() -> None:
    chain = chain_of(8)
    first, second = documents_of(chain)
    knowledge = known([first, second, first, first])
    assert knowledge.runs_by_pool() == {SHARED: 2}
    knowledge.apply(removal_of(first))
    assert knowledge.match(Chain(chain[: 4 * HASH_BYTES])) == []
    assert only(knowledge.match(chain)).reach(4) == 8
    knowledge.apply(removal_of(first))
    assert knowledge.runs_by_pool() == {SHARED: 1}


def test_a_run_that_could_not_be_described_any_more_goes_by_its_last_name() -> None:
    chain = chain_of(4)
    knowledge = known(documents_of(chain) + documents_of(chain, codec="raw"))
    knowledge.apply(RunRemoved("shared", 3, chain[-HASH_BYTES:], int(Fidelity.QUANTIZED)))
    assert [match.kind.codec for match in knowledge.match(chain)] == ["raw"]


def test_a_newer_generation_voids_the_older_also_for_those_who_speak_of_it_late() -> None:
    chain = chain_of(8)
    knowledge = known(documents_of(chain) + documents_of(chain, Pool("other", 1)))
    newer = documents_of(chain, Pool("shared", 4))[0]
    knowledge.apply(RunStored(newer))
    for late in documents_of(chain):
        knowledge.apply(RunStored(late))
    depths = {match.kind.holder: match.depth for match in knowledge.match(chain)}
    assert depths == {Pool("shared", 4): 4, Pool("other", 1): 8}
    assert not knowledge.enter(SHARED)


def test_a_wiped_pool_is_forgotten_at_once() -> None:
    chain = chain_of(8)
    knowledge = known(documents_of(chain))
    knowledge.apply(PoolCleared("shared", 3))
    assert not knowledge
    knowledge.apply(RunStored(documents_of(chain)[0]))
    assert knowledge.match(chain) == []
    knowledge.apply(RunStored(documents_of(chain, Pool("shared", 4))[0]))
    knowledge.apply(PoolCleared("shared", 3))
    assert only(knowledge.match(chain)).depth == 4


def test_a_whole_listing_ends_what_it_does_not_name() -> None:
    chain = chain_of(16)
    first, second, third, fourth = documents_of(chain)
    elsewhere = documents_of(chain, Pool("other", 1))[0]
    knowledge = known([first, second, elsewhere])
    mark = knowledge.begin_listing()
    knowledge.store(first)
    knowledge.apply(RunStored(third))  # by another teller, meanwhile
    knowledge.end_listing("shared", mark)
    knowledge.store(fourth)
    found = {match.kind.holder: mask(match) for match in knowledge.match(chain)}
    assert found == {SHARED: 0b1101, Pool("other", 1): 0b1}
    assert knowledge.stats.swept == 1


def test_what_a_puller_did_not_find_is_not_offered_again() -> None:
    chain = chain_of(8)
    knowledge = known(documents_of(chain))
    knowledge.doubt(SHARED, PrefixHash(chain[-HASH_BYTES:]))
    assert only(knowledge.match(chain)).depth == 4
    assert knowledge.stats.doubted == 1


def test_pools_that_nobody_has_are_forgotten() -> None:
    chain = chain_of(8)
    knowledge = known(documents_of(chain) + documents_of(chain, Pool("other", 1)))
    knowledge.retain({"other"})
    assert knowledge.holders == {Pool("other", 1)}
    knowledge.retain(())
    assert not knowledge


def test_what_is_known_is_bounded_and_what_is_used_stays() -> None:
    chains = [chain_of(4, seed) for seed in range(6)]
    knowledge = known(documents_of(chains[0]) + documents_of(chains[1]), runs_max=3)
    knowledge.match(chains[0])
    for chain in chains[2:]:
        knowledge.store(documents_of(chain)[0])
        knowledge.match(chains[0])
    assert knowledge.runs_by_pool() == {SHARED: 3}
    assert [bool(knowledge.match(chain)) for chain in chains] == [True, False, False, False, True, True]
    assert knowledge.stats.forgotten == 3


@pytest.mark.parametrize("change", [{"first_block": 2}, {"chain": b"x" * 17}, {"chain": b""}])
def test_runs_that_no_match_could_find_are_counted(change: dict[str, object]) -> None:
    knowledge = PoolKnowledge()
    knowledge.store(msgspec.structs.replace(documents_of(chain_of(4))[0], **change))
    assert (bool(knowledge), knowledge.stats.odd) == (False, 1)


def test_knowledge_beside_a_naive_model() -> None:
    rng = random.Random(5)
    chain = chain_of(48)
    documents = [
        document
        for generation in (3, 4, 5)
        for codec in ("raw", "i8")
        for document in documents_of(chain, Pool("shared", generation), codec=codec)
    ]
    knowledge, naive, oldest = PoolKnowledge(), set[RunDocument](), 0
    for step in range(3000):
        document = rng.choice(documents[: 24 + step // 60])
        event = rng.random()
        if event < 0.6:
            knowledge.store(document)
            if document.generation >= oldest:
                oldest = document.generation
                naive.add(document)
        elif event < 0.99:
            knowledge.apply(removal_of(document))
            naive.discard(document)
        elif document.generation >= oldest:
            knowledge.apply(PoolCleared("shared", document.generation))
            oldest = document.generation + 1 if document.generation < 5 else oldest
            if document.generation == 5:
                break
        naive = {each for each in naive if each.generation >= oldest}
        expected: dict[str, int] = {}
        for each in naive:
            expected[each.codec] = expected.get(each.codec, 0) | 1 << each.first_block // RUN_BLOCKS
        assert {match.kind.codec: mask(match) for match in knowledge.match(chain)} == expected
    assert step > 100


# ---- following -------------------------------------------------------------------------------------------------------


@dataclass
class Teller:
    """A worker as far as pools go: real ones in a directory, its journal, and its two routes."""

    root: Path
    names: tuple[str, ...] = ("shared",)
    journal: Journal = field(default_factory=Journal)
    pools: dict[str, DirectoryPool] = field(default_factory=dict)
    port: int = 0

    async def start(self) -> None:
        for name in self.names:
            (self.root / name).mkdir(exist_ok=True)
            pool = DirectoryPool(name, self.root / name, PoolBounds(bytes_max=1 << 24), self.journal)
            await pool.start()
            self.pools[name] = pool
        await self.listen()

    async def listen(self) -> None:
        app = FastAPI()
        mount_pools(app, self, poll_seconds=0.2)
        self.server = WorkerServer(app, port=self.port)
        self.port = self.server.port
        await self.server.start()

    @property
    def offers(self) -> dict[str, int]:
        return {}

    @property
    def waiting(self) -> int:
        return 0

    def listing(self, name: str) -> AsyncIterator[bytes]:
        return list_runs(self.pools[name])

    def describe(self) -> list[dict[str, Any]]:
        return []

    async def put(self, run: PoolRun, pool: str = "shared") -> None:
        frames = [SealedFrame(LAYERS, [b"frame" * 100])]
        assert await self.pools[pool].put(run, frames) == Accepted(new=True)

    async def stop(self) -> None:
        self.journal.close()
        await self.server.stop()
        for pool in self.pools.values():
            await pool.close()

    def record(self, epoch: int = 1) -> WorkerRecord:
        record = WorkerRecord.of(WorkerConfig(url=f"http://127.0.0.1:{self.port}"))
        record.epoch, record.healthy = Epoch(epoch), True
        pools = tuple(
            OpenPool(pool.holder.name, pool.holder.generation, RUN_BLOCKS, "i8")
            for pool in self.pools.values()
            if pool.holder
        )
        holder = Worker(WorkerName("w"), Epoch(epoch))
        ability = TransferAbility(holder, (), CLASS.hex(), frozenset({"raw", "i8"}), 1000, pools=pools)
        record.discovery = Discovery({}, transfer=ability)
        return record


@dataclass
class Members:
    workers: dict[str, WorkerRecord] = field(default_factory=dict)

    def add(self, record: WorkerRecord) -> None:
        self.workers[record.name] = record


@pytest.fixture
async def start_teller(tmp_path: Path) -> AsyncIterator[Callable[..., "asyncio.Future[Teller]"]]:
    tellers: list[Teller] = []

    async def start(*names: str) -> Teller:
        teller = Teller(tmp_path, names or ("shared",))
        await teller.start()
        tellers.append(teller)
        return teller

    yield start  # type: ignore[misc]
    for teller in tellers:
        await teller.stop()


@pytest.fixture
async def members() -> Members:
    return Members()


@pytest.fixture
async def follower(members: Members) -> AsyncIterator[PoolFollower]:
    follower = PoolFollower(members, retry_seconds=0.05, reconcile_seconds=0.05)
    await follower.start()
    yield follower
    await follower.stop()


async def until(condition: Callable[[], object], what: object = "") -> None:
    for _ in range(400):
        if condition():
            return
        await asyncio.sleep(0.02)
    raise AssertionError(f"it did not come true: {what}")


def depth(follower: PoolFollower, chain: Chain) -> int:
    return max((match.depth for match in follower.knowledge.match(chain)), default=0)


async def test_what_is_there_is_listed_and_what_follows_is_heard(start_teller, members, follower) -> None:  # type: ignore[no-untyped-def]
    teller, chain = await start_teller(), chain_of(12)
    first, second, third = runs_of(chain)
    await teller.put(first)
    members.add(teller.record())
    await until(lambda: depth(follower, chain) == 4)
    await teller.put(second)
    await until(lambda: depth(follower, chain) == 8)
    await teller.pools["shared"].evict(first.key)
    await teller.put(third)
    await until(lambda: [mask(match) for match in follower.knowledge.match(chain)] == [0b110])
    (state,) = follower.tellers.values()
    assert (state.listings, state.failures, state.reason) == (1, 0, "")
    assert state.changes == 3
    registry = CollectorRegistry()
    registry.register(PoolCollector(follower))
    lines = generate_latest(registry).decode().splitlines()
    name = f'worker="127.0.0.1:{teller.port}"'
    assert 'ropeway_pool_runs{pool="shared"} 2.0' in lines
    assert "ropeway_pool_runs_stored_total 3.0" in lines
    assert f"ropeway_pool_teller_up{{{name}}} 1.0" in lines
    assert f"ropeway_pool_teller_changes_total{{{name}}} 3.0" in lines


async def test_of_a_pool_that_two_workers_share_both_tell(start_teller, members, follower) -> None:  # type: ignore[no-untyped-def]
    one, two, chain = await start_teller(), await start_teller(), chain_of(12)
    first, second, third = runs_of(chain)
    members.add(one.record())
    members.add(two.record())
    await one.put(first)
    await two.put(second)
    await until(lambda: depth(follower, chain) == 8)
    await two.pools["shared"].evict(first.key)
    await one.put(third)
    await until(lambda: [mask(match) for match in follower.knowledge.match(chain)] == [0b110])
    del members.workers[next(iter(members.workers))]
    await until(lambda: len(follower.tellers) == 1)
    assert follower.knowledge.runs_by_pool() == {two.pools["shared"].holder: 2}
    members.workers.clear()
    await until(lambda: not follower.knowledge)


async def test_a_worker_that_was_away_goes_on_where_it_was(start_teller, members, follower) -> None:  # type: ignore[no-untyped-def]
    teller, chain = await start_teller(), chain_of(8)
    first, second = runs_of(chain)
    members.add(teller.record())
    await teller.put(first)
    await until(lambda: depth(follower, chain) == 4)
    await teller.server.stop()
    (state,) = follower.tellers.values()
    await until(lambda: state.failures and state.reason)
    assert depth(follower, chain) == 4
    await teller.put(second)
    await teller.listen()
    await until(lambda: depth(follower, chain) == 8)
    assert (state.listings, state.reason) == (1, "")


async def test_a_restarted_worker_is_listed_anew(start_teller, members, follower) -> None:  # type: ignore[no-untyped-def]
    teller, chain = await start_teller(), chain_of(12)
    first, second, third = runs_of(chain)
    members.add(teller.record())
    await teller.put(first)
    await teller.put(second)
    await until(lambda: depth(follower, chain) == 8)
    await teller.stop()
    silent = DirectoryPool("shared", teller.root / "shared", PoolBounds(bytes_max=1 << 24))
    await silent.start()  # and dies without a word
    await silent.evict(first.key)
    await silent.put(third, [SealedFrame(LAYERS, [b"frame"])])
    await silent.close()
    teller.journal, teller.port = Journal(), teller.port
    await teller.start()
    members.workers.clear()
    members.add(teller.record(epoch=2))
    await until(lambda: [mask(match) for match in follower.knowledge.match(chain)] == [0b110])
    assert follower.knowledge.stats.swept == 1


async def test_a_lost_journal_leads_to_another_listing(start_teller, members, follower) -> None:  # type: ignore[no-untyped-def]
    teller, chain = await start_teller(), chain_of(8)
    first, second = runs_of(chain)
    members.add(teller.record())
    await teller.put(first)
    await until(lambda: depth(follower, chain) == 4)
    journal = teller.journal
    teller.journal = Journal(first=journal.next + 10)  # as if ten changes had been too many for it
    journal.close()
    teller.pools["shared"]._announce_to = teller.journal
    await teller.put(second)
    await until(lambda: depth(follower, chain) == 8)
    assert next(iter(follower.tellers.values())).listings == 2


async def test_a_wiped_pool_begins_anew(start_teller, members, follower) -> None:  # type: ignore[no-untyped-def]
    teller, chain = await start_teller(), chain_of(4)
    (run,) = runs_of(chain)
    members.add(teller.record())
    await teller.put(run)
    await until(lambda: depth(follower, chain) == 4)
    before = teller.pools["shared"].holder
    assert await teller.pools["shared"].wipe()
    await until(lambda: not follower.knowledge)
    await teller.put(run)
    await until(lambda: depth(follower, chain) == 4)
    assert before not in follower.knowledge.holders


async def test_a_pool_that_is_away_is_listed_when_it_is_back(start_teller, members, follower) -> None:  # type: ignore[no-untyped-def]
    teller, chain = await start_teller("shared", "other"), chain_of(8)
    first, second = runs_of(chain)
    await teller.put(first)
    await teller.put(second, "other")
    record = teller.record()
    (teller.root / "shared").rename(teller.root / "hidden")
    members.add(record)
    await until(lambda: [mask(match) for match in follower.knowledge.match(chain)] == [0b10])
    (teller.root / "hidden").rename(teller.root / "shared")
    await until(lambda: sorted(mask(match) for match in follower.knowledge.match(chain)) == [0b1, 0b10])
    await until(lambda: next(iter(follower.tellers.values())).listings == 2)


async def test_a_teller_that_talks_nonsense_is_given_up_and_asked_again(members, follower) -> None:  # type: ignore[no-untyped-def]
    from starlette.responses import Response

    app, answers = FastAPI(), [b"nonsense", b'{"next": 5, "reset": true, "changes": []}']

    async def changes(_http: object) -> Response:
        return Response(answers[0])

    async def runs(_http: object) -> Response:
        return Response(b"\xff" * 100)

    app.add_route("/kv_pools/changes", changes)
    app.add_route("/kv_pools/{name}/runs", runs)
    server = WorkerServer(app)
    await server.start()
    try:
        record = Teller(Path(), port=server.port).record()
        pool = OpenPool("shared", 3, RUN_BLOCKS, "i8")
        record.discovery = Discovery(
            {}, transfer=TransferAbility(record.holder(), (), "", frozenset(), 1, pools=(pool,))
        )
        members.add(record)
        await until(lambda: follower.tellers and next(iter(follower.tellers.values())).failures)
        answers.pop(0)
        await until(lambda: "bytes" in next(iter(follower.tellers.values())).reason)
        assert not follower.knowledge
    finally:
        await server.stop()
