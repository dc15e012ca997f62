"""Frames into a pool, and plans whose source is a pool: what joins a `KvPool` to `cachecore.transfer`.

A pool has no address: every worker has opened it by itself, by configuration, so a plan names it alone. The frames it
gives are checked here as those of a peer are: the MAC, what they say they are, and that each layer comes once.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from functools import lru_cache

from cachecore.blocks import Chain
from cachecore.holders import Pool
from cachecore.scope import Fidelity, Keyring
from cachecore.store.pools.contract import Extent, KvPool, Missed, MissReason, PoolRun, RunKey, SealedFrame
from cachecore.transfer.errors import FrameError, Reason, TransferError
from cachecore.transfer.frames import PIECE_BYTES, Frame, FrameLimits, KeyOf, open_frame
from cachecore.transfer.header import FrameHeader
from cachecore.transfer.plan import Pull
from cachecore.transfer.transport import Expectation, Failed, Fetched, Outcome, Refused, Sealed, Sink

LOSSLESS_CODEC = "raw"
_KEYS_MAX = 256
_REASONS = {
    MissReason.ABSENT: Reason.STALE,
    MissReason.GONE: Reason.STALE,
    MissReason.BROKEN: Reason.MALFORMED,
    MissReason.AWAY: Reason.UNREACHABLE,
}
_LIMITS = FrameLimits()


def to_store(frames: Sequence[Sealed], chain: Chain) -> tuple[PoolRun, list[SealedFrame]]:
    """What `KvPool.put` takes, of the frames of one run in the order of their layers. `chain` names the run's blocks.

    Raises ValueError when the frames are of different runs, or the names are those of another one.
    """
    first, last = frames[0].header, frames[-1].header
    layers = Extent(first.layers.first, last.layers.end)
    keys = {_key_of(sealed.header, layers) for sealed in frames}
    if len(keys) != 1:
        raise ValueError("frames of several runs")
    run = PoolRun(keys.pop(), first.parent, chain, first.first_block)
    return run, [
        SealedFrame(Extent(sealed.header.layers.first, sealed.header.layers.end), sealed.buffers) for sealed in frames
    ]


def key_of(pull: Pull, expectation: Expectation) -> RunKey:
    """Under which the run of a plan lies in a pool: all of the model's layers, the puller's own heads."""
    run, heads, codec = pull.plan.run, expectation.kv_heads, pull.plan.codec
    return RunKey(
        expectation.compatibility,
        expectation.scope,
        pull.capability.key_id,
        run.tail,
        run.blocks,
        Extent(0, expectation.layers.total),
        Extent(heads.first, heads.end),
        codec,
        Fidelity.EXACT if codec == LOSSLESS_CODEC else Fidelity.QUANTIZED,
    )


def _key_of(header: FrameHeader, layers: Extent) -> RunKey:
    return RunKey(
        header.compatibility,
        header.scope,
        header.key_id,
        header.tail,
        header.blocks,
        layers,
        Extent(header.kv_heads.first, header.kv_heads.end),
        header.codec,
        header.fidelity,
    )


class PoolTransport:
    """Keeps the promises of `cachecore.transfer.transport` for plans whose source is one of `pools` (by name)."""

    def __init__(self, pools: Mapping[str, KvPool], keyring: Keyring, limits: FrameLimits = _LIMITS) -> None:
        self._pools = pools
        # A pull opens hundreds of frames, and to derive a key costs as much as to open one.
        self._key_of: KeyOf = lru_cache(_KEYS_MAX)(keyring.frame_key)
        self._limits = limits

    async def fetch(self, pull: Pull, expectation: Expectation, sink: Sink, deadline: float) -> Outcome:
        source = pull.plan.source
        pool = self._pools.get(source.name) if isinstance(source, Pool) else None
        if pool is None:
            return Refused(Reason.OTHER_SOURCE)
        if pool.holder != source:
            return Refused(Reason.UNREACHABLE if pool.holder is None else Reason.OTHER_EPOCH)
        reading = _Reading(pool, self._open, pull, expectation, sink)
        try:
            async with asyncio.timeout_at(deadline) as patience:
                return await reading.run()
        except TimeoutError:
            if not patience.expired():
                raise  # the sink's own
            return Failed(Reason.DEADLINE, reading.layer)

    async def _open(self, data: memoryview) -> Frame:
        if len(data) <= PIECE_BYTES:
            return open_frame(data, self._key_of, self._limits)
        return await asyncio.to_thread(open_frame, data, self._key_of, self._limits)


@dataclass
class _Reading:
    """One pull."""

    pool: KvPool
    open_frame: Callable[[memoryview], Awaitable[Frame]]
    pull: Pull
    expectation: Expectation
    sink: Sink
    frames: int = 0
    payload_bytes: int = 0

    def __post_init__(self) -> None:
        self.layer = self.expectation.layers.first
        """The first that has not been delivered."""

    async def run(self) -> Outcome:
        """Raises what the sink raises."""
        wanted, began = self.expectation.layers, time.perf_counter()
        key = key_of(self.pull, self.expectation)
        async with aclosing(self.pool.stream(key, Extent(wanted.first, wanted.end))) as items:
            async for item in items:
                if isinstance(item, Missed):
                    return self._missed(item)
                try:
                    await self._deliver(item)
                except TransferError as error:
                    return Failed(error.reason, self.layer, str(error))
        if self.layer < wanted.end:
            return Failed(Reason.INCOMPLETE, self.layer)
        return Fetched(self.frames, self.payload_bytes, time.perf_counter() - began)

    def _missed(self, missed: Missed) -> Outcome:
        reason = _REASONS[missed.reason]
        return Failed(reason, self.layer, missed.detail) if self.frames else Refused(reason)

    async def _deliver(self, sealed: SealedFrame) -> None:
        """Raises FrameError."""
        data = sealed.buffers[0] if len(sealed.buffers) == 1 else b"".join(sealed.buffers)
        frame = await self.open_frame(memoryview(data))
        self.expectation.check(frame.header, self.pull)
        layers = frame.header.layers
        if layers.first != self.layer or layers.end > self.expectation.layers.end:
            raise FrameError(f"layers {layers} where {self.layer} was to come", Reason.UNEXPECTED)
        if self.pull.plan.is_shifted and not self.frames and not frame.header.with_tokens:
            raise FrameError("token ids were to come, by which a shifted run is verified", Reason.UNEXPECTED)
        await self.sink.take(frame)
        self.layer = layers.end
        self.frames += 1
        self.payload_bytes += len(frame.payload)
