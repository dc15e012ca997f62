"""What the worker lends a transport to serve from: runs of its own blocks, sent from where they lie.

A run is referenced while it is being sent, so that nobody evicts it or writes to it; the engine goes on with other
blocks. Exact KV goes out in any codec that is allowed; KV that was quantized once already goes out as it is (`raw`), as
nothing is ever quantized twice.
"""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Iterator, Sequence
from concurrent.futures import Executor
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from cachecore.blocks import PrefixHash, pack_tokens
from cachecore.holders import Holder
from cachecore.kv.calibration import RAW
from cachecore.kv.codecs.contract import DTYPES, Codec, CodecError, Origin
from cachecore.kv.codecs.registry import codec_named
from cachecore.kv.rope import RopeTable
from cachecore.scope import Fidelity, Naming
from cachecore.transfer.errors import Reason, Unserved
from cachecore.transfer.frames import Buffer
from cachecore.transfer.header import FrameHeader, Span
from cachecore.transfer.transport import Draft, Request, Sealed, Wanted
from workers.transfer.loads import best_of
from workers.transfer.pages import EnginePages, Stretch, stretches_of
from workers.transfer.runs import HeldRun
from workers.transfer.shape import KvShape


class Lender(Protocol):
    """The engine's pool, as a source sees it. Called on the transfers' thread."""

    def lend(self, tail: PrefixHash, blocks: int, worst: Fidelity) -> AbstractContextManager[HeldRun | None]:
        """The run that ends with `tail`, referenced until the context ends; None when it is not held."""
        ...

    def vouch(self, run: HeldRun) -> None:
        """Called when blocks have been read: until now they were the run's. Raises Unserved where an engine that keeps
        no block for a peer's sake has given one away."""
        ...


class _Lent(NamedTuple):
    """A run and how it is to go out."""

    run: HeldRun
    naming: Naming
    stretches: Sequence[Stretch]
    header: FrameHeader
    """Of a frame without layers yet."""
    wanted: Wanted


@dataclass(slots=True)
class KvSource:
    """A `cachecore.transfer.transport.Source`."""

    holder: Holder
    """As which it serves; set once it is known where."""
    shape: KvShape
    codecs: Sequence[str]
    lender: Lender
    pages: EnginePages
    rope: RopeTable | None
    executor: Executor
    """For gathering and encoding, which would keep the transfers' loop from others."""
    frame_bytes: int
    """Of raw KV, that short layers share a frame up to."""

    async def serve(self, request: Request) -> AsyncGenerator[Draft | Sealed, None]:
        with self._lend(request) as lent:
            loop = asyncio.get_running_loop()
            spans = list(self._spans(lent))
            following = loop.run_in_executor(self.executor, self._draft, lent, spans[0])
            try:
                for span in [*spans[1:], None]:
                    draft = await following
                    if span is not None:
                        following = loop.run_in_executor(self.executor, self._draft, lent, span)
                    yield draft
            finally:
                # One that runs all the same reads blocks that may be another's by now, for nobody.
                following.cancel()

    @contextlib.contextmanager
    def _lend(self, request: Request) -> Iterator[_Lent]:
        """Raises Unserved."""
        capability, wanted = request.capability, request.wanted
        self._check(wanted, capability.codec)
        lossless = capability.codec == RAW
        worst = capability.fidelity if lossless else Fidelity.EXACT
        with self.lender.lend(capability.run.tail, capability.run.blocks, worst) as run:
            if run is None or (naming := run.held[0].naming) is None:
                raise Unserved("the run is not held, or not well enough", Reason.STALE)
            if naming.scope.key_id != capability.key_id:
                raise Unserved("the run is another tenant's", Reason.OTHER_TENANT)
            first = run.held[0]
            if (first.parent or naming.root, first.number) != (capability.run.parent, capability.run.first_block):
                raise Unserved("the run continues another chain", Reason.STALE)
            header = self._header(request, naming, max(run.fidelity, best_of(capability.codec)))
            yield _Lent(run, naming, stretches_of(run.blocks), header, wanted)

    def _check(self, wanted: Wanted, codec: str) -> None:
        shape = self.shape
        if wanted.compatibility != shape.compatibility:
            raise Unserved("another compatibility class", Reason.INCOMPATIBLE)
        if wanted.layers.total != shape.layers or wanted.kv_heads != Span.all(shape.kv_heads):
            raise Unserved(f"another shape: {wanted}", Reason.INCOMPATIBLE)
        if codec not in self.codecs:
            raise Unserved(f"codec {codec} is not served here", Reason.INCOMPATIBLE)

    def _header(self, request: Request, naming: Naming, fidelity: Fidelity) -> FrameHeader:
        capability, shape = request.capability, self.shape
        run = capability.run
        return FrameHeader(
            compatibility=shape.compatibility,
            scope=naming.root,
            key_id=naming.scope.key_id,
            parent=run.parent,
            tail=run.tail,
            first_block=run.first_block,
            blocks=run.blocks,
            block_size_tokens=shape.block_size_tokens,
            position=run.first_block * shape.block_size_tokens,
            layers=request.wanted.layers,
            kv_heads=request.wanted.kv_heads,
            head_dim=shape.head_dim,
            value_dim=shape.head_dim,
            dtype=shape.dtype,
            codec=capability.codec,
            fidelity=fidelity,
            layer_bytes=(),
        )

    def _spans(self, lent: _Lent) -> Iterator[Span]:
        """The layers of each frame."""
        layers, stride = lent.wanted.layers, lent.wanted.stride
        together = 1
        if stride == 1:
            itemsize = DTYPES[self.shape.dtype].itemsize
            raw_bytes = 2 * lent.header.tokens * self.shape.kv_heads * self.shape.head_dim * itemsize
            together = max(1, self.frame_bytes // raw_bytes)
        for layer in range(layers.first, layers.end, max(stride, together)):
            yield Span(layer, min(together, layers.end - layer), layers.total)

    def _draft(self, lent: _Lent, span: Span) -> Draft:
        layers = [self._layer(lent, layer) for layer in range(span.first, span.end)]
        self.lender.vouch(lent.run)
        with_tokens = lent.wanted.with_tokens and span.first == lent.wanted.layers.first
        header = lent.header._replace(
            layers=span,
            layer_bytes=tuple(sum(memoryview(part).nbytes for part in parts) for parts in layers),
            with_tokens=with_tokens,
        )
        parts = [part for layer in layers for part in layer]
        if with_tokens:
            parts.append(pack_tokens([token for block in lent.run.held for token in block.token_ids]))
        return Draft(header, parts)

    def _layer(self, lent: _Lent, layer: int) -> Sequence[Buffer]:
        if lent.header.codec == RAW:
            return self.pages.payload(layer, lent.stretches)
        codec: Codec = codec_named(lent.header.codec)
        origin = Origin(layer=layer, position=lent.header.position)
        try:
            return [codec.encode(self.pages.read(layer, lent.stretches), origin, self.rope).payload]
        except CodecError as error:
            raise Unserved(f"{lent.header.codec} does not take this KV: {error}", Reason.INTERNAL) from error
