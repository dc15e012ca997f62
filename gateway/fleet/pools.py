"""What lies in the pools that workers share: every gateway follows all who change them, by itself.

    worker with pools ── GET /kv_pools/<name>/runs ─────► all that is there ──┐
                      └─ GET /kv_pools/changes?since=N ─► what it has changed ─┴─► PoolKnowledge ─► match

Whoever stores or removes a run in a pool tells of it once, in its own journal. So a gateway hears of a pool from many
tellers, in no common order. The rules that make this safe:

* A run is known or not: to hear of it twice changes nothing.
* A newer generation voids the older ones, also for those who still speak of these.
* After a listing that was whole, what it did not name and nobody has told of since it began is forgotten.
* Two tellers may be heard in the wrong order, and a process may die before it tells. What is then wrongly known costs a
  pull that is refused and a recomputation; `PoolKnowledge.doubt` ends it.
"""

import asyncio
import logging
import ssl
from collections import OrderedDict
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple, Protocol
from urllib.parse import quote

import httpx

from cachecore.blocks import HASH_BYTES, Chain, PrefixHash
from cachecore.holders import Pool
from cachecore.scope import Fidelity
from cachecore.store.pools import Extent
from cachecore.store.pools.journal import (
    Change,
    ListingReader,
    PoolCleared,
    RunDocument,
    RunRemoved,
    RunStored,
    read_changes,
)
from cachecore.transfer.capability import Run
from gateway.fleet.worker import WorkerRecord

logger = logging.getLogger("ropeway.pools")

RUNS_MAX = 1_000_000
"""Known of all pools together; some 150 bytes each."""
RECONCILE_SECONDS = 1.0
RETRY_SECONDS = 0.5
RETRY_SECONDS_MAX = 10.0
POLL_SECONDS = 20.0
"""Twice what a teller takes to say that nothing has changed."""
ANSWER_BYTES_MAX = 32 << 20
_NOWHERE = -1
"""Older than every journal."""


class PoolKind(NamedTuple):
    """What the runs that one puller can use together have in common."""

    holder: Pool
    compatibility: str
    """As a worker says it of itself: in hex."""
    codec: str
    fidelity: Fidelity
    run_blocks: int
    layers: Extent
    heads: Extent


class RunsOfSize(NamedTuple):
    """Which runs of one size lie in a pool, of a chain."""

    blocks: int
    present: int
    """Bit n: whether the run of blocks n * blocks to (n + 1) * blocks is there."""

    def holds(self, block: int) -> bool:
        return bool(self.present >> block // self.blocks & 1)


class PoolMatch(NamedTuple):
    """What of a chain lies in a pool, in one form. There may be runs of several sizes; the larger ones cost less to
    pull, the smaller ones go on to where a prompt ended."""

    kind: PoolKind
    """Of the smallest runs."""
    sizes: tuple[RunsOfSize, ...]
    """Largest first."""

    @property
    def end(self) -> int:
        """Past the last block that can be had."""
        return max(blocks * present.bit_length() for blocks, present in self.sizes)

    @property
    def depth(self) -> int:
        """Leading blocks that can be had."""
        return self.reach(0)

    def reach(self, first_block: int) -> int:
        """Whoever has the blocks before `first_block` can come to have so many: runs are pulled whole, from one on that
        holds that block. `first_block` where none does."""
        block = first_block
        while (run := self._run_at(block)) is not None:
            block = run[1]
        return block

    def runs(self, chain: Chain, root: PrefixHash, first_block: int, end_block: int) -> list[Run]:
        """The runs to pull, as plans name them, to have blocks `first_block` to `end_block` of a chain that begins at
        `root`. Raises ValueError where one of them is not there."""
        names, found, block = root + chain, [], first_block
        while block < end_block:
            run = self._run_at(block)
            if run is None:
                raise ValueError(f"blocks {first_block} to {end_block} are not all in {self.kind.holder}")
            start, block = run
            found.append(Run(_name(names, start), _name(names, block), start, block - start))
        return found

    def _run_at(self, block: int) -> tuple[int, int] | None:
        """The largest run that holds a block: where it begins and ends."""
        for size in self.sizes:
            if size.holds(block):
                start = block // size.blocks * size.blocks
                return start, start + size.blocks
        return None


def _name(names: bytes, blocks: int) -> PrefixHash:
    """The name of a chain's first so many blocks; that of none is the root."""
    return PrefixHash(names[blocks * HASH_BYTES : (blocks + 1) * HASH_BYTES])


@dataclass(slots=True)
class PoolKnowledgeStats:
    """Counters only grow."""

    stored: int = 0
    removed: int = 0
    forgotten: int = 0
    """Runs dropped to stay within the bound."""
    swept: int = 0
    """Runs that a whole listing did not name."""
    doubted: int = 0
    odd: int = 0
    """Runs that no match could find."""


class PoolKnowledge:
    """Which runs lie in which pool. No I/O; for one event loop."""

    def __init__(self, runs_max: int = RUNS_MAX) -> None:
        self._runs_max = runs_max
        self._runs: dict[PoolKind, OrderedDict[bytes, int]] = {}
        """By kind: tails, each with when it was last told of, the least recently told or matched first."""
        self._generations: dict[str, int] = {}
        """The oldest generation of a pool that may still be spoken of."""
        self._count = 0
        self._stamp = 0
        self.stats = PoolKnowledgeStats()

    def __repr__(self) -> str:
        return f"PoolKnowledge({self._count} runs in {len(self.holders)} pools)"

    def __bool__(self) -> bool:
        """Whether there is anything to match."""
        return bool(self._count)

    @property
    def holders(self) -> set[Pool]:
        return {kind.holder for kind in self._runs}

    def runs_by_pool(self) -> dict[Pool, int]:
        counts = dict.fromkeys(self.holders, 0)
        for kind, tails in self._runs.items():
            counts[kind.holder] += len(tails)
        return counts

    # Reading

    def match(self, chain: Chain) -> list[PoolMatch]:
        """Of a chain from block 0 on: one for each form of KV of which some run is there."""
        found: dict[PoolKind, list[RunsOfSize]] = {}
        for kind, tails in self._runs.items():
            present = self._present(kind, tails, chain)
            if present:
                found.setdefault(kind._replace(run_blocks=0), []).append(RunsOfSize(kind.run_blocks, present))
        return [_match_of(form, sizes) for form, sizes in found.items()]

    def _present(self, kind: PoolKind, tails: "OrderedDict[bytes, int]", chain: Chain) -> int:
        step, present = kind.run_blocks * HASH_BYTES, 0
        for number, end in enumerate(range(step, len(chain) + 1, step)):
            tail = chain[end - HASH_BYTES : end]
            if tail in tails:
                present |= 1 << number
                tails.move_to_end(tail)
        return present

    # Writing

    def enter(self, holder: Pool) -> bool:
        """Somebody speaks of a generation. False when it is over; a newer one voids those before it."""
        oldest = self._generations.get(holder.name, 0)
        if holder.generation < oldest:
            return False
        if holder.generation > oldest:
            self._generations[holder.name] = holder.generation
            self._drop(kind for kind in self._runs if kind.holder.name == holder.name and kind.holder != holder)
        return True

    def store(self, document: RunDocument) -> None:
        """Raises ValueError for what no run can be."""
        blocks, odd = divmod(len(document.chain), HASH_BYTES)
        if odd or not blocks or document.first_block % blocks:
            self.stats.odd += 1
            return
        if self.enter(document.holder):
            tails = self._runs.setdefault(_kind_of(document, blocks), OrderedDict())
            tail = document.chain[-HASH_BYTES:]
            new = tail not in tails
            self._stamp += 1
            tails[tail] = self._stamp
            tails.move_to_end(tail)
            self._count += new
            self.stats.stored += new
            if self._count > self._runs_max:
                self._forget_oldest()

    def remove(self, change: RunRemoved) -> None:
        """Raises ValueError as `store`."""
        document = change.run
        if document is not None:
            blocks = len(document.chain) // HASH_BYTES
            self._discard([_kind_of(document, max(blocks, 1))], change.tail)
            return
        holder, fidelity = Pool(change.pool, change.generation), Fidelity(change.fidelity)
        self._discard([kind for kind in self._runs if (kind.holder, kind.fidelity) == (holder, fidelity)], change.tail)

    def clear(self, holder: Pool) -> None:
        """The generation is over."""
        if self.enter(holder):
            self.enter(Pool(holder.name, holder.generation + 1))

    def apply(self, change: Change) -> None:
        """Raises ValueError as `store`."""
        if isinstance(change, RunStored):
            self.store(change.run)
        elif isinstance(change, RunRemoved):
            self.remove(change)
        elif isinstance(change, PoolCleared):
            self.clear(Pool(change.pool, change.generation))

    def doubt(self, holder: Pool, tail: PrefixHash) -> None:
        """A puller did not find the run."""
        self.stats.doubted += self._discard([kind for kind in self._runs if kind.holder == holder], tail)

    def begin_listing(self) -> int:
        """A mark to hand to `end_listing`."""
        return self._stamp

    def end_listing(self, pool: str, mark: int) -> None:
        """Everything that lies in the pool has been told of since the mark: what was not is not there."""
        for kind in [kind for kind in self._runs if kind.holder.name == pool]:
            tails = self._runs[kind]
            gone = [tail for tail, stamp in tails.items() if stamp <= mark]
            self.stats.swept += len(gone)
            for tail in gone:
                self._discard([kind], tail)

    def retain(self, pools: Collection[str]) -> None:
        """No worker has any other pool than these."""
        self._drop(kind for kind in self._runs if kind.holder.name not in pools)
        self._generations = {name: oldest for name, oldest in self._generations.items() if name in pools}

    def _discard(self, kinds: Iterable[PoolKind], tail: bytes) -> int:
        found = 0
        for kind in kinds:
            tails = self._runs.get(kind)
            if tails is not None and tails.pop(tail, None) is not None:
                found += 1
                if not tails:
                    del self._runs[kind]
        self._count -= found
        self.stats.removed += found
        return found

    def _drop(self, kinds: Iterator[PoolKind]) -> None:
        for kind in list(kinds):
            self._count -= len(self._runs.pop(kind))

    def _forget_oldest(self) -> None:
        kind = max(self._runs, key=lambda kind: len(self._runs[kind]))
        self._discard([kind], next(iter(self._runs[kind])))
        self.stats.forgotten += 1


def _match_of(form: PoolKind, sizes: list[RunsOfSize]) -> PoolMatch:
    """Sizes that are no multiples of each other come from workers with other settings: the larger ones count."""
    sizes.sort(reverse=True)
    while any(larger.blocks % smaller.blocks for larger, smaller in pairwise(sizes)):
        del sizes[-1]
    return PoolMatch(form._replace(run_blocks=sizes[-1].blocks), tuple(sizes))


def _kind_of(document: RunDocument, blocks: int) -> PoolKind:
    """Raises ValueError for a fidelity that there is not."""
    fidelity = Fidelity(document.fidelity)
    form = (document.compatibility.hex(), document.codec, fidelity, blocks, document.layers, document.heads)
    return PoolKind(document.holder, *form)


# ---- following -------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class TellerState:
    """What has come of following one worker's pools. Counters only grow."""

    since: int = _NOWHERE
    """The number of the next change to ask for."""
    listings: int = 0
    changes: int = 0
    failures: int = 0
    reason: str = "not asked yet"
    """Why it is not followed now; empty while it is."""


class Workers(Protocol):
    """The fleet, as far as it is of interest here."""

    @property
    def workers(self) -> dict[str, WorkerRecord]: ...


@dataclass(slots=True)
class _Following:
    life: tuple[int, set[str]]
    state: TellerState
    task: asyncio.Task[None] = field(repr=False)


class PoolFollower:
    """Keeps a `PoolKnowledge` true: one task for each worker that has pools. `start` and `stop` own them all."""

    def __init__(
        self,
        fleet: Workers,
        knowledge: PoolKnowledge | None = None,
        *,
        retry_seconds: float = RETRY_SECONDS,
        reconcile_seconds: float = RECONCILE_SECONDS,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        """`tls`: as the fleet's."""
        self.knowledge = knowledge or PoolKnowledge()
        self._fleet = fleet
        self._retry_seconds = retry_seconds
        self._reconcile_seconds = reconcile_seconds
        # Each worker has a question of its own waiting nearly all the time.
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        self._http = httpx.AsyncClient(timeout=POLL_SECONDS, limits=limits, trust_env=False, verify=tls or True)
        self._following: dict[WorkerRecord, _Following] = {}
        self._keeper: asyncio.Task[None] | None = None

    @property
    def tellers(self) -> dict[str, TellerState]:
        return {record.name: following.state for record, following in self._following.items()}

    async def start(self) -> None:
        self._keeper = asyncio.create_task(self._keep(), name="pool follower")

    async def stop(self) -> None:
        tasks = [following.task for following in self._following.values()]
        tasks += [self._keeper] if self._keeper is not None else []
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._following.clear()
        await self._http.aclose()

    async def _keep(self) -> None:
        while True:
            try:
                self.reconcile()
            except Exception:
                logger.exception("looking after pools failed")
            await asyncio.sleep(self._reconcile_seconds)

    def reconcile(self) -> None:
        """Follow those who have pools now, in this life; no longer those who have none, or are another life."""
        wanted = {record: pools for record in self._fleet.workers.values() if (pools := _pools_of(record))}
        for record, following in list(self._following.items()):
            if record not in wanted or following.life != _life_of(record, wanted[record]):
                following.task.cancel()
                del self._following[record]
        for record, pools in wanted.items():
            for pool in pools:
                self.knowledge.enter(pool)
            if record not in self._following:
                self._following[record] = self._follow(record, pools)
        self.knowledge.retain({pool.name for pools in wanted.values() for pool in pools})

    def _follow(self, record: WorkerRecord, pools: Sequence[Pool]) -> _Following:
        state = TellerState()
        teller = _Teller(record.url, tuple(pool.name for pool in pools), self.knowledge, self._http, state)
        task = asyncio.create_task(_persist(teller, self._retry_seconds), name=f"pools of {record.name}")
        return _Following(_life_of(record, pools), state, task)


def _pools_of(record: WorkerRecord) -> Sequence[Pool]:
    """Of a worker, in the generations that it speaks of."""
    ability = record.transfer
    return [Pool(pool.name, pool.generation) for pool in ability.pools] if ability else []


def _life_of(record: WorkerRecord, pools: Sequence[Pool]) -> tuple[int, set[str]]:
    """Another one is to be followed from its beginning."""
    return record.epoch, {pool.name for pool in pools}


async def _persist(teller: "_Teller", retry_seconds: float) -> None:
    """A worker that is away is asked again, ever less often."""
    state, delay = teller.state, retry_seconds
    while True:
        try:
            await teller.follow_once()
            state.reason, delay = "", retry_seconds
            continue
        except (httpx.HTTPError, ValueError) as error:
            if not state.reason:
                logger.warning("pools of %s: %s", teller.url, error or type(error).__name__)
            state.reason = str(error) or type(error).__name__
        except Exception as error:
            logger.exception("following the pools of %s failed", teller.url)
            state.reason = repr(error)
        state.failures += 1
        await asyncio.sleep(delay)
        delay = min(2 * delay, RETRY_SECONDS_MAX)


@dataclass(slots=True)
class _Teller:
    """Asks one worker."""

    url: str
    pools: tuple[str, ...]
    knowledge: PoolKnowledge
    http: httpx.AsyncClient
    state: TellerState
    unlisted: set[str] = field(default_factory=set)

    async def follow_once(self) -> None:
        """Hear the next changes; begin anew where they are not to be had. Raises httpx.HTTPError, ValueError."""
        told = read_changes(await self._get(f"/kv_pools/changes?since={self.state.since}"))
        try:
            for change in told.changes:
                self.knowledge.apply(change)
        except ValueError:
            self.state.since = _NOWHERE  # what else is wrong with what was heard nobody knows
            raise
        self.state.changes += len(told.changes)
        self.state.since = told.next
        if told.reset:
            self.unlisted = set(self.pools)
        for pool in sorted(self.unlisted):
            await self._list(pool)

    async def _list(self, pool: str) -> None:
        """What was not told whole, since the pool is away from this worker now, is listed again the next time."""
        reader, mark = ListingReader(), self.knowledge.begin_listing()
        async with self.http.stream("GET", f"{self.url}/kv_pools/{quote(pool, safe='')}/runs") as answer:
            answer.raise_for_status()
            async for piece in answer.aiter_bytes():
                for document in reader.feed(piece):
                    self.knowledge.store(document)
        if reader.whole:
            self.knowledge.end_listing(pool, mark)
            self.unlisted.discard(pool)
            self.state.listings += 1

    async def _get(self, path: str) -> bytes:
        body = bytearray()
        async with self.http.stream("GET", self.url + path) as answer:
            answer.raise_for_status()
            async for piece in answer.aiter_bytes():
                body += piece
                if len(body) > ANSWER_BYTES_MAX:
                    raise ValueError(f"an answer of more than {ANSWER_BYTES_MAX} bytes")
        return bytes(body)
