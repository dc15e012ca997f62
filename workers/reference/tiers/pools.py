"""What the engine has computed goes into pools, in the background; what pools have comes back as plans say.

    engine's thread ── offer(run) ──► queue ──► lend, gather, encode, seal ──► put       (transfers' loop and threads)

The engine's thread does arithmetic on block numbers and appends to a queue that is bounded: when the writer does not
keep up, what is offered last is dropped and counted, since the beginning of a prompt is worth more than its end. A run
is referenced while it is read, a few blocks at a time. One that was evicted before its turn came is lost, and counted.

Runs are long where a prompt goes on, and short behind its last long one (`cachecore.store.pools.run_ends`). As an
answer grows, short ones are followed by the long one that holds them too; nobody asks for them any more, so they are
evicted first.

Only exact KV is stored: nothing is ever quantized twice, and what is repaired belongs to one prompt. What prompts have
in common may also be kept as a mean (`means`).
"""

import asyncio
import contextlib
import logging
import math
from collections import Counter, deque
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import replace
from enum import StrEnum
from typing import Any, NamedTuple

from cachecore.blocks import HASH_BYTES, Chain, PrefixHash
from cachecore.kv.calibration import DEFAULT_CODEC, RAW
from cachecore.scope import Fidelity, KeyId, Keyring, Naming
from cachecore.store.pools import Accepted, Extent, KvPool, RunKey, run_ends
from cachecore.store.pools.journal import Journal
from cachecore.store.pools.transport import PoolTransport, to_store
from cachecore.transfer.capability import Capability, Run
from cachecore.transfer.errors import TransferError
from cachecore.transfer.frames import FrameWriter
from cachecore.transfer.header import Span
from cachecore.transfer.transport import Draft, Request, Sealed, Wanted
from workers.pools import OpenPools
from workers.reference.kv_pool import NamedRun
from workers.reference.tiers.means import MeanKeeper
from workers.transfer.loader import POOL_SCHEME
from workers.transfer.means import MeanReader, MeanStore
from workers.transfer.runs import HeldRun
from workers.transfer.service import TransferService
from workers.transfer.source import KvSource

logger = logging.getLogger("ropeway.pools")

OFFERS_MAX = 1024
"""Runs that wait to be stored."""
FRAME_BYTES = 2 << 20
"""Of raw KV, that the layers of a run share a frame up to: a pool's runs are short, and each frame costs as much again
in handling as some ten thousand bytes."""
_CLOSE_SECONDS = 2.0
"""What is left of the queue when the worker stops has so long to be stored."""


class WriteOutcome(StrEnum):
    STORED = "stored"
    PRESENT = "present"
    DROPPED = "dropped"
    """The queue was full."""
    LOST = "lost"
    """It was evicted before it was read."""
    AWAY = "away"
    """No pool was there."""
    DECLINED = "declined"
    """By the pool: see its own metrics."""
    FAILED = "failed"


class Offer(NamedTuple):
    """A run that has been computed."""

    naming: Naming
    tail: PrefixHash
    blocks: int


class PoolWriter:
    """See the module's opening. `offer` is for the engine's thread, all else for the transfers' loop."""

    def __init__(
        self,
        pools: Mapping[str, KvPool],
        source: KvSource,
        keyring: Keyring,
        run_blocks: int,
        codec: str,
        offers_max: int = OFFERS_MAX,
    ) -> None:
        self._pools = pools
        self._source = source
        self._frames = FrameWriter(keyring.frame_key)
        self._run_blocks = run_blocks
        self._codec = codec
        self._offers_max = offers_max
        self._offers: deque[Offer] = deque()
        self._filled = asyncio.Event()
        self._idle = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self.counts: Counter[WriteOutcome] = Counter()

    def __repr__(self) -> str:
        return f"PoolWriter({len(self._offers)} waiting, {dict(self.counts)})"

    @property
    def waiting(self) -> int:
        return len(self._offers)

    def offer(self, run: NamedRun) -> None:
        """Blocks that were just named. Runs that end among them are stored, unless there are too many."""
        if run.naming is None or run.fidelity is not Fidelity.EXACT:
            return
        first = run.first_block
        for end, blocks in run_ends(first, first + len(run.chain) // HASH_BYTES, self._run_blocks):
            if len(self._offers) >= self._offers_max:
                self.counts[WriteOutcome.DROPPED] += 1
                continue
            tail = PrefixHash(run.chain[(end - first - 1) * HASH_BYTES : (end - first) * HASH_BYTES])
            self._offers.append(Offer(run.naming, tail, blocks))
            if not self._filled.is_set():
                with contextlib.suppress(RuntimeError):  # the loop has ended
                    self._loop.call_soon_threadsafe(self._filled.set)

    async def run(self) -> None:
        """Store what is offered, until cancelled."""
        while True:
            self._filled.clear()
            while self._offers:
                self._idle.clear()
                outcome = await self._write(self._offers.popleft())
                self.counts[outcome] += 1
            self._idle.set()
            await self._filled.wait()

    async def drain(self, seconds: float) -> None:
        """Wait until nothing is left to store, at most so long."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while self._offers or not self._idle.is_set():
                    await self._idle.wait()
                    await asyncio.sleep(0)

    async def _write(self, offer: Offer) -> WriteOutcome:
        try:
            return await self._store(offer)
        except TransferError as error:  # the source does not serve it
            logger.info("a run was not stored: %s", error)
            return WriteOutcome.LOST
        except Exception:
            logger.exception("a run was not stored")
            return WriteOutcome.FAILED

    async def _store(self, offer: Offer) -> WriteOutcome:
        key = self._key_of(offer)
        absent = [pool for pool in self._pools.values() if not await pool.contains(key)]
        if not absent:
            return WriteOutcome.PRESENT
        absent = [pool for pool in absent if pool.stats().up]
        if not absent:
            return WriteOutcome.AWAY
        with self._source.lender.lend(offer.tail, offer.blocks, Fidelity.EXACT) as run:
            if run is None:
                return WriteOutcome.LOST
            frames = await self._sealed_frames(run)
            chain = Chain(b"".join(held.name for held in run.held))
        outcomes = [await pool.put(*to_store(frames, chain)) for pool in absent]
        stored = any(isinstance(outcome, Accepted) for outcome in outcomes)
        return WriteOutcome.STORED if stored else WriteOutcome.DECLINED

    async def _sealed_frames(self, run: HeldRun) -> list[Sealed]:
        """As the worker would serve the run to a peer."""
        loop, frames = asyncio.get_running_loop(), []
        async with contextlib.aclosing(self._source.serve(self._request_for(run))) as drafts:
            async for draft in drafts:
                if isinstance(draft, Draft):
                    frames.append(await loop.run_in_executor(self._source.executor, self._seal, draft))
        return frames

    def _seal(self, draft: Draft) -> Sealed:
        """In memory of its own: the blocks will be another run's."""
        return Sealed(draft.header, [b"".join(self._frames.seal(draft.header, draft.parts))])

    def _request_for(self, run: HeldRun) -> Request:
        """What a peer would ask for, to store the run under its own name."""
        first, naming, shape = run.held[0], run.held[0].naming, self._source.shape
        if naming is None:
            raise ValueError("a run of which nobody knows whose it is")
        wanted_run = Run(first.parent or naming.root, run.held[-1].name, first.number, len(run.held))
        holder = self._source.holder
        capability = Capability(
            naming.scope.key_id, holder, holder, wanted_run, self._codec, _fidelity_in(self._codec), math.inf, b""
        )
        layers, heads = Span.all(shape.layers), Span.all(shape.kv_heads)
        return Request(capability, Wanted(shape.compatibility, layers, 1, heads, with_tokens=True))

    def _key_of(self, offer: Offer) -> RunKey:
        shape, key_id = self._source.shape, _key_id_of(offer.naming)
        layers, heads = Extent(0, shape.layers), Extent(0, shape.kv_heads)
        form = (offer.tail, offer.blocks, layers, heads, self._codec, _fidelity_in(self._codec))
        return RunKey(shape.compatibility, offer.naming.root, key_id, *form)


def _key_id_of(naming: Naming) -> KeyId:
    return naming.scope.key_id


def _fidelity_in(codec: str) -> Fidelity:
    return Fidelity.EXACT if codec == RAW else Fidelity.QUANTIZED


def codec_for(pools: OpenPools, codecs: Sequence[str]) -> str:
    """In which a worker stores. Raises ValueError for one that it may not use."""
    codec = pools.settings.codec or (DEFAULT_CODEC if DEFAULT_CODEC in codecs else RAW)
    if codec not in codecs:
        raise ValueError(f"--pool-codec {codec}: KV of this model may be stored as {', '.join(codecs)}")
    return codec


class PoolTier:
    """L2 of one worker: its pools, a writer, and the transport that plans with a pool as their source go by.

    Also a `workers.openai.pools.PoolDesk`."""

    def __init__(self, opened: OpenPools, codecs: Sequence[str]) -> None:
        """Raises ValueError for a codec that KV may not be stored in; `codecs` are those that it may."""
        self._opened = opened
        self.codec = codec_for(opened, codecs)
        self.writer: PoolWriter | None = None
        self.keeper: MeanKeeper | None = None

    @property
    def pools(self) -> Mapping[str, KvPool]:
        return self._opened.pools

    @property
    def journal(self) -> Journal:
        return self._opened.journal

    @property
    def offers(self) -> Mapping[str, int]:
        return {outcome.value: count for outcome, count in self.writer.counts.copy().items()} if self.writer else {}

    @property
    def means(self) -> Mapping[str, int]:
        return self.keeper.counts.copy() if self.keeper else {}

    @property
    def waiting(self) -> int:
        return self.writer.waiting if self.writer else 0

    def listing(self, name: str) -> AsyncIterator[bytes]:
        return self._opened.listing(name)

    def describe(self) -> list[dict[str, Any]]:
        return self._opened.describe(self.codec)

    def offer(self, run: NamedRun) -> None:
        """On the engine's thread. Nothing is stored before the worker listens."""
        if self.writer is not None:
            self.writer.offer(run)
        if self.keeper is not None:
            self.keeper.note(run)

    @contextlib.asynccontextmanager
    async def attach(self, service: TransferService) -> AsyncIterator[None]:
        """An `Attachment` of the transfers' loop."""
        await self._opened.start()
        service.loader.transports[POOL_SCHEME] = PoolTransport(self.pools, service.keyring)
        run_blocks, source = self._opened.settings.run_blocks, replace(service.source, frame_bytes=FRAME_BYTES)
        self.writer = PoolWriter(self.pools, source, service.keyring, run_blocks, self.codec)
        writing = [asyncio.create_task(self.writer.run(), name="pool writer"), *self._keep_means(service)]
        try:
            yield
        finally:
            self.journal.close()
            await self.writer.drain(_CLOSE_SECONDS)
            for task in writing:
                task.cancel()
            await asyncio.gather(*writing, return_exceptions=True)
            await self._opened.close()

    def _keep_means(self, service: TransferService) -> "list[asyncio.Task[None]]":
        """Use those that there are, and add to them, where it is configured and keys can be turned."""
        rope, source = service.destination.rope, service.source
        if not self._opened.settings.means or rope is None:
            return []
        store = MeanStore(self.pools, source.shape, rope, service.keyring, self.codec, service.executor)
        service.loader.improve = MeanReader(store).improve
        self.keeper = MeanKeeper(store, source)
        return [asyncio.create_task(self.keeper.run(), name="mean keeper")]
