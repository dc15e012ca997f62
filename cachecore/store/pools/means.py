"""How a pool keeps the mean KV of a text over contexts: as a run of one block that says of a mean what others say of a
run.

    tail          the name of the text's anchor, the first of its chunks that others share (`cachecore.chunks`)
    block size    the text's tokens, whose ids come with the frame
    position      tokens of the text before its anchor; keys are without rotation
    first block   the number of contexts
    parent        a sketch of which ones, so that none counts twice, whoever comes across it
    fidelity      fused: nobody who wants better is given it

All of that is in the frame's header, and so under its MAC. A pool of any kind takes it like a run, with bounds, quota
and eviction. A mean that grows is evicted and put again; of two workers that do so at once the later one wins, with a
context less. No gateway is told: only who has the text can ask for it.
"""

from dataclasses import dataclass
from hashlib import blake2b
from typing import NamedTuple

from cachecore.blocks import HASH_BYTES, Chain, PrefixHash
from cachecore.scope import Fidelity, KeyId
from cachecore.store.pools.contract import Announcement, Extent, PoolRun, RunKey
from cachecore.transfer.errors import FrameError, Reason
from cachecore.transfer.header import FrameHeader, Span

_SKETCH_BITS = 8 * HASH_BYTES
_MARKS = 4
"""Bits that a context sets: with eight contexts, one in some 250 others looks as if it were one of them."""


class Contexts(NamedTuple):
    """How many, and which: the second as far as a sketch tells."""

    number: int
    sketch: bytes

    @classmethod
    def of(cls, context: PrefixHash) -> "Contexts":
        return cls(1, _sketch(context).to_bytes(HASH_BYTES, "little"))

    def __contains__(self, context: object) -> bool:
        """Perhaps, when it says so; certainly not, when not."""
        marks = _sketch(context) if isinstance(context, bytes) else 0
        return bool(marks) and int.from_bytes(self.sketch, "little") & marks == marks

    def joined(self, other: "Contexts") -> "Contexts":
        sketch = int.from_bytes(self.sketch, "little") | int.from_bytes(other.sketch, "little")
        return Contexts(self.number + other.number, sketch.to_bytes(HASH_BYTES, "little"))


NO_CONTEXTS = Contexts(0, bytes(HASH_BYTES))


def _sketch(context: bytes) -> int:
    digest = blake2b(context, digest_size=_MARKS, person=b"ropeway.context").digest()
    return sum(1 << place for place in {byte % _SKETCH_BITS for byte in digest})


class Text(NamedTuple):
    """As a mean is found: by its anchor, with `lead` of its tokens before that."""

    anchor: PrefixHash
    tokens: int
    lead: int


def is_mean(key: RunKey) -> bool:
    """No chain's run is kept that is fused: it belongs to one prompt."""
    return key.fidelity is Fidelity.FUSED


def tells_of_mean(announcement: Announcement) -> bool:
    return getattr(announcement.event, "fidelity", None) is Fidelity.FUSED


@dataclass(frozen=True, slots=True)
class MeanShape:
    """What the means of one scope, one class of workers and one codec have in common."""

    compatibility: bytes
    scope: bytes
    key_id: KeyId
    layers: int
    kv_heads: int
    head_dim: int
    value_dim: int
    dtype: str
    codec: str

    def key(self, anchor: PrefixHash) -> RunKey:
        layers, heads = Extent(0, self.layers), Extent(0, self.kv_heads)
        return RunKey(self.compatibility, self.scope, self.key_id, anchor, 1, layers, heads, self.codec, Fidelity.FUSED)

    def header(self, text: Text, contexts: Contexts, kv_bytes: int) -> FrameHeader:
        """Of the one frame that all layers are in, packed together: a layer's share is no more than a number."""
        share = kv_bytes // self.layers
        return FrameHeader(
            compatibility=self.compatibility,
            scope=self.scope,
            key_id=self.key_id,
            parent=PrefixHash(contexts.sketch),
            tail=text.anchor,
            first_block=contexts.number,
            blocks=1,
            block_size_tokens=text.tokens,
            position=text.lead,
            layers=Span.all(self.layers),
            kv_heads=Span.all(self.kv_heads),
            head_dim=self.head_dim,
            value_dim=self.value_dim,
            dtype=self.dtype,
            codec=self.codec,
            fidelity=Fidelity.FUSED,
            with_tokens=True,
            layer_bytes=(share,) * (self.layers - 1) + (kv_bytes - share * (self.layers - 1),),
        )

    def run(self, anchor: PrefixHash, contexts: Contexts) -> PoolRun:
        return PoolRun(self.key(anchor), PrefixHash(contexts.sketch), Chain(anchor), contexts.number)

    def contexts_of(self, header: FrameHeader, anchor: PrefixHash) -> Contexts:
        """What an authentic frame says. Raises FrameError for one that is not of such a mean."""
        contexts = Contexts(header.first_block, header.parent)
        text = Text(anchor, header.block_size_tokens, header.position)
        if header != self.header(text, contexts, sum(header.layer_bytes)) or not contexts.number:
            raise FrameError(f"a frame of {header} where the mean of a text was to come", Reason.UNEXPECTED)
        return contexts
