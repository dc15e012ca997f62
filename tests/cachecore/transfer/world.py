"""A small world in which KV moves: a keyring, a run, a source in memory, a sink that keeps what it is given."""

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, field
from random import Random

from cachecore.blocks import PrefixHash, pack_tokens
from cachecore.holders import Epoch, Holder, Worker, WorkerName
from cachecore.scope import Fidelity, KeyId, Keyring, TenantId
from cachecore.transfer.capability import Run
from cachecore.transfer.errors import Reason, Unserved
from cachecore.transfer.frames import Buffer, Frame, FrameWriter
from cachecore.transfer.header import FrameHeader, Span
from cachecore.transfer.plan import Grant, Plan, Pull, read_plan, sign
from cachecore.transfer.transport import Draft, Expectation, Request, Sealed

ACME, RIVAL = KeyId(TenantId("acme"), 0), KeyId(TenantId("rival"), 0)
KEYRING = Keyring({0: bytes(range(32)), 1: bytes(range(32, 64))}, 0)
STRANGERS = Keyring({0: bytes(range(1, 33))}, 0)
"""Another deployment's."""
SOURCE = Worker(WorkerName("worker-a"), Epoch(7), 0)
TARGET = Worker(WorkerName("worker-b"), Epoch(3), 0)
COMPATIBILITY, SCOPE = b"C" * 16, b"S" * 16
RUN = Run(PrefixHash(b"p" * 16), PrefixHash(b"t" * 16), 2, 3)
BLOCK_SIZE, LAYERS, KV_HEADS, HEAD_DIM = 4, 6, 2, 8
TOKENS = pack_tokens(range(100, 100 + RUN.blocks * BLOCK_SIZE))
LAYER_BYTES = RUN.blocks * BLOCK_SIZE * KV_HEADS * HEAD_DIM * 2 * 2

HEADER = FrameHeader(
    compatibility=COMPATIBILITY,
    scope=SCOPE,
    key_id=ACME,
    parent=RUN.parent,
    tail=RUN.tail,
    first_block=RUN.first_block,
    blocks=RUN.blocks,
    block_size_tokens=BLOCK_SIZE,
    position=RUN.first_block * BLOCK_SIZE,
    layers=Span(0, 1, LAYERS),
    kv_heads=Span.all(KV_HEADS),
    head_dim=HEAD_DIM,
    value_dim=HEAD_DIM,
    dtype="bfloat16",
    codec="raw",
    fidelity=Fidelity.EXACT,
    layer_bytes=(LAYER_BYTES,),
)
EXPECTATION = Expectation(
    COMPATIBILITY, SCOPE, Span.all(LAYERS), Span.all(KV_HEADS), HEAD_DIM, HEAD_DIM, BLOCK_SIZE, "bfloat16"
)


def layer_payload(layer: int, size: int = LAYER_BYTES) -> bytes:
    return Random(layer).randbytes(size)


def make_plan(address: str = "tcp://127.0.0.1:1", **changes: object) -> Plan:
    position = RUN.first_block * BLOCK_SIZE
    return Plan(SOURCE, (address,), RUN, position, position, "raw", 5.0)._replace(**changes)  # type: ignore[arg-type]


def make_pull(
    plan: Plan,
    *,
    key_id: KeyId = ACME,
    fidelity: Fidelity = Fidelity.EXACT,
    keyring: Keyring = KEYRING,
    target: Holder = TARGET,
    seconds: float = 60.0,
) -> Pull:
    now = time.time()
    document = sign(plan, Grant(key_id, target, fidelity, now + seconds), keyring)
    return read_plan(document, keyring, target, min(now, now + seconds - 1))


@dataclass
class MemorySource:
    """Holds one run. `before` is called with each layer before its frame is given: to wait, or to raise."""

    holder: Holder = SOURCE
    header: FrameHeader = HEADER
    payload: Callable[[int], bytes] = layer_payload
    layers_per_frame: int = 1
    before: Callable[[int], object] | None = None
    requests: list[Request] = field(default_factory=list)
    closed: int = 0

    async def serve(self, request: Request) -> AsyncGenerator[Draft | Sealed, None]:
        self.requests.append(request)
        wanted = request.wanted
        if wanted.compatibility != self.header.compatibility:
            raise Unserved("another class", Reason.INCOMPATIBLE)
        if request.capability.run.tail != self.header.tail:
            raise Unserved("evicted", Reason.STALE)
        step = max(wanted.stride, self.layers_per_frame)
        try:
            for layer in range(wanted.layers.first, wanted.layers.end, step):
                await self._wait(layer)
                with_tokens = wanted.with_tokens and layer == wanted.layers.first
                yield self.draft(layer, min(self.layers_per_frame, wanted.layers.end - layer), with_tokens)
        finally:
            self.closed += 1

    def draft(self, layer: int, size: int = 1, with_tokens: bool = False) -> Draft:
        parts = [self.payload(number) for number in range(layer, layer + size)]
        header = self.header._replace(
            layers=Span(layer, size, self.header.layers.total),
            layer_bytes=tuple(map(len, parts)),
            with_tokens=with_tokens,
        )
        return Draft(header, [*parts, TOKENS] if with_tokens else parts)

    async def _wait(self, layer: int) -> None:
        waited = self.before(layer) if self.before else None
        if waited is not None:
            await waited  # type: ignore[misc]


@dataclass(frozen=True)
class Script:
    """What a source holds and what becomes of it, told so that it can happen in another process."""

    holder: Holder = SOURCE
    header: FrameHeader = HEADER
    layer_bytes: int = LAYER_BYTES
    layers_per_frame: int = 1
    hangs_at: int | None = None
    evicted_at: int | None = None
    breaks_at: int | None = None
    seconds_per_layer: float = 0.0
    instead: FrameHeader | None = None
    """Of every frame, whatever was asked for."""
    sealed: bool = False
    """Its frames lie ready."""
    runs: int = 1
    """With more than one: number n has n for the first byte of its tail, and layers of its own."""

    def source(self) -> "ScriptedSource":
        return ScriptedSource(self)


class ScriptedSource:
    def __init__(self, script: Script) -> None:
        self._script = script
        self.holder = script.holder
        self.requests: list[Request] = []
        self.closed = 0

    async def serve(self, request: Request) -> AsyncGenerator[Draft | Sealed, None]:
        self.requests.append(request)
        run = request.capability.run
        number, header = 0, self._script.header
        if self._script.runs > 1:
            number, header = run.tail[0], header._replace(tail=run.tail)
        source = MemorySource(
            header=header,
            payload=lambda layer: layer_payload(100 * number + layer, self._script.layer_bytes),
            layers_per_frame=self._script.layers_per_frame,
            before=self._before,
        )
        try:
            async for draft in source.serve(request):
                yield self._given(draft)
        finally:
            self.closed += 1

    def _given(self, draft: Draft | Sealed) -> Draft | Sealed:
        assert isinstance(draft, Draft)
        if self._script.instead is not None:
            return Draft(self._script.instead, draft.parts)
        if self._script.sealed:
            return Sealed(draft.header, seal_as_before(draft))
        return draft

    def _before(self, layer: int) -> object:
        if layer == self._script.evicted_at:
            raise Unserved("evicted", Reason.STALE)
        if layer == self._script.breaks_at:
            raise ZeroDivisionError
        seconds = 600 if layer == self._script.hangs_at else self._script.seconds_per_layer
        return asyncio.sleep(seconds) if seconds else None


def seal_as_before(draft: Draft) -> Sequence[Buffer]:
    """The same frame each time, as that of a pool."""
    return FrameWriter(KEYRING.frame_key, lambda size: bytes(range(size))).seal(*draft)


@dataclass
class ListSink:
    """Keeps frames. `after` is called with each; to wait, or to raise."""

    frames: list[Frame] = field(default_factory=list)
    after: Callable[[Frame], object] | None = None

    async def take(self, frame: Frame) -> None:
        self.frames.append(frame)
        waited = self.after(frame) if self.after else None
        if waited is not None:
            await waited  # type: ignore[misc]

    @property
    def layers(self) -> dict[int, bytes]:
        return {layer: bytes(payload) for frame in self.frames for layer, payload in frame.layer_payloads()}


def whole_run(layers: Sequence[int] = range(LAYERS)) -> dict[int, bytes]:
    return {layer: layer_payload(layer) for layer in layers}
