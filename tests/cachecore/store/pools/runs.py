"""Runs to store: every byte follows from a seed, so that whoever reads one can tell whether it is right."""

import random
from dataclasses import dataclass, field

from cachecore.blocks import HASH_BYTES, Chain, PrefixHash
from cachecore.scope import Fidelity, KeyId, TenantId
from cachecore.store.pools import Announcement, Extent, PoolRun, RunKey, SealedFrame

ANN, BOB = TenantId("ann"), TenantId("bob")
LAYERS, HEADS = Extent(0, 6), Extent(0, 3)


def make_run(
    seed: int,
    *,
    tenant: TenantId = ANN,
    blocks: int = 4,
    layers: Extent = LAYERS,
    heads: Extent = HEADS,
    codec: str = "raw",
    fidelity: Fidelity = Fidelity.EXACT,
) -> PoolRun:
    names = random.Random(f"names {seed}")
    parent, chain = PrefixHash(names.randbytes(HASH_BYTES)), Chain(names.randbytes(HASH_BYTES * blocks))
    tail = PrefixHash(chain[-HASH_BYTES:])
    key = RunKey(b"c" * 16, b"s" * 16, KeyId(tenant, 7), tail, blocks, layers, heads, codec, fidelity)
    return PoolRun(key, parent, chain, 12 + seed)


def make_frames(run: PoolRun, frame_bytes: int = 1000, layers_each: int = 2, pieces: int = 3) -> list[SealedFrame]:
    """Of a run's every two layers, in pieces as a sealed frame has them."""
    frames = []
    for start in range(run.key.layers.start, run.key.layers.end, layers_each):
        layers = Extent(start, min(start + layers_each, run.key.layers.end))
        data = payload(run, layers, frame_bytes)
        size = -(-frame_bytes // pieces)
        frames.append(SealedFrame(layers, [memoryview(data)[at : at + size] for at in range(0, len(data), size)]))
    return frames


def payload(run: PoolRun, layers: Extent, frame_bytes: int) -> bytes:
    return random.Random(f"{run.key.name} Span(start={layers.start}, end={layers.end})").randbytes(frame_bytes)


def content(frame: SealedFrame) -> bytes:
    return b"".join(bytes(buffer) for buffer in frame.buffers)


@dataclass
class Ear:
    """Hears what a pool announces."""

    heard: list[Announcement] = field(default_factory=list)

    def __call__(self, announcement: Announcement) -> None:
        self.heard.append(announcement)

    @property
    def events(self) -> list[object]:
        return [announcement.event for announcement in self.heard]
