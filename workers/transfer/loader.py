"""Carrying out loads: each run over the transport that its plan names, all runs of a prompt at once.

A frame is decoded and put in place on another thread while the next is received; no more than two are under way for a
run. Layers count as in place in their order, so the engine may compute with the first while the last are on their way.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import Executor
from dataclasses import dataclass

from cachecore.holders import Pool
from cachecore.kv.codecs.contract import CodecError, KvFacts
from cachecore.kv.codecs.registry import codec_named
from cachecore.kv.layout import LayerKv
from cachecore.kv.rope import RopeTable
from cachecore.transfer.errors import FrameError, Reason
from cachecore.transfer.frames import Frame
from cachecore.transfer.header import FrameHeader
from cachecore.transfer.plan import Plan
from cachecore.transfer.transport import Failed, Outcome, Refused, Transport
from workers.transfer.loads import Load, LoadCancelled, RunLoad, best_of
from workers.transfer.pages import EnginePages, stretches_of
from workers.transfer.passages import PassageLoad, PassageSink
from workers.transfer.placing import PlacingSink
from workers.transfer.shape import KvShape

logger = logging.getLogger("ropeway.transfer")

_GRACE_SECONDS = 1.0
"""After its deadline a transport is given up that has not answered."""
POOL_SCHEME = "pool"
"""Under which the transport for plans whose source is a pool is registered: they name no address."""


@dataclass(frozen=True, slots=True)
class Destination:
    """The engine's memory, as loads write to it."""

    shape: KvShape
    pages: EnginePages
    rope: RopeTable | None
    """None where keys' turns are not known: only what stays as it is can then be taken."""


class BlockSink(PlacingSink):
    """A `cachecore.transfer.transport.Sink` that fills one run's blocks."""

    def __init__(
        self, load: Load, run: RunLoad, destination: Destination, executor: Executor, wake: Callable[[], None]
    ) -> None:
        super().__init__(executor)
        self._load = load
        self._run = run
        self._destination = destination
        self._wake = wake
        self._stretches = stretches_of(run.blocks)
        size = destination.shape.block_size_tokens
        first = (run.first_block - run.pull.plan.run.first_block) * size
        self._tokens = slice(first, first + len(run.blocks) * size)
        """Of the run, those that are wanted."""

    async def take(self, frame: Frame) -> None:
        """Raises FrameError, also for the frame before; LoadCancelled."""
        if frame.header.fidelity > self._load.fidelity:
            raise FrameError(f"KV that is {frame.header.fidelity.name}", Reason.UNEXPECTED)
        await self.hand_over(self._place, frame)

    def _place(self, frame: Frame) -> None:
        destination, header = self._destination, frame.header
        for layer, payload in frame.layer_payloads():
            kv = self._decode(header, layer, payload)
            with self._load.writing():
                destination.pages.write(layer, self._stretches, kv)
            # A codec that loses something has lost it, whatever the frame says.
            self._run.fidelity = max(self._run.fidelity, header.fidelity, best_of(header.codec))
            self._run.layers = layer + 1
        self._wake()

    def _decode(self, header: FrameHeader, layer: int, payload: memoryview) -> LayerKv:
        shape = (header.tokens, header.kv_heads.size, header.head_dim, header.value_dim, header.dtype)
        try:
            facts = KvFacts(header.codec, layer, header.position, *shape)
            position = self._run.pull.plan.target_position
            keys, values = codec_named(header.codec).decode(payload, facts, position, self._destination.rope)
        except CodecError as error:
            raise FrameError(f"a payload that does not decode: {error}", Reason.UNUSABLE) from error
        return LayerKv(keys[self._tokens], values[self._tokens])


class Loader:
    """Runs on the transfers' loop. `transports` is by the scheme of an address, or POOL_SCHEME."""

    def __init__(self, destination: Destination, executor: Executor, wake: Callable[[], None]) -> None:
        self.destination = destination
        self.transports: dict[str, Transport] = {}
        self.improve: Callable[[Load], Awaitable[None]] | None = None
        """What looks for better KV than passages' own, beside their pulls."""
        self._executor = executor
        self._wake = wake

    async def carry_out(self, load: Load) -> None:
        """All runs and passages; each settles by its deadline. Does nothing for one that is called off."""
        parts: list[RunLoad | PassageLoad] = [*load.runs, *load.passages]
        await asyncio.gather(self._improve(load), *(self._settle(load, part) for part in parts if part.outcome is None))

    async def _improve(self, load: Load) -> None:
        if self.improve is None or not load.improving:
            return
        try:
            await self.improve(load)
        finally:
            load.improving = False
            self._wake()

    async def _settle(self, load: Load, run: RunLoad | PassageLoad) -> None:
        try:
            outcome = await self._fetch(load, run)
        except LoadCancelled:
            return
        except Exception as error:
            logger.exception("a pull failed")
            outcome = Failed(Reason.INTERNAL, run.layers, repr(error))
        if isinstance(outcome, Failed | Refused):
            logger.info("a pull from %s came to nothing: %s", run.pull.plan.source, outcome)
        run.outcome = outcome
        self._wake()

    async def _fetch(self, load: Load, run: RunLoad | PassageLoad) -> Outcome:
        plan = run.pull.plan
        transport = self._transport_for(plan)
        if transport is None:
            return Refused(Reason.UNREACHABLE)
        deadline = load.began + plan.deadline_seconds
        if time.monotonic() >= deadline:  # it was begun before, and preempted
            return Failed(Reason.DEADLINE, run.layers)
        sink = self._sink(load, run)
        expectation = self.destination.shape.expectation(load.naming.root)
        try:
            async with asyncio.timeout(deadline - time.monotonic() + _GRACE_SECONDS):
                outcome = await transport.fetch(run.pull, expectation, sink, deadline)
                await sink.finish()
        except FrameError as error:
            return Failed(error.reason, run.layers, str(error))
        except TimeoutError:
            return Failed(Reason.DEADLINE, run.layers, "a transport that did not keep its promise")
        finally:
            await sink.rest()  # once this has settled, its blocks may be computed
        return outcome

    def _sink(self, load: Load, run: RunLoad | PassageLoad) -> BlockSink | PassageSink:
        destination = self.destination
        if isinstance(run, PassageLoad):
            assert destination.rope is not None  # noqa: S101  what has no table takes no passages
            return PassageSink(run, destination.shape.layers, destination.rope, self._executor, self._wake)
        return BlockSink(load, run, destination, self._executor, self._wake)

    def _transport_for(self, plan: Plan) -> Transport | None:
        if isinstance(plan.source, Pool):
            return self.transports.get(POOL_SCHEME)
        schemes = (address.partition("://")[0] for address in plan.addresses)
        return next((self.transports[scheme] for scheme in schemes if scheme in self.transports), None)
