"""What every codec has in common: what it takes, what it makes, and what a receiver must know to read it.

`raw` carries the engine's bytes, keys rotated as they are stored: at the same position decoding is a copy. Lossy codecs
take the rotation off keys first and quantize once, where the KV was computed; the receiver dequantizes, rotates to the
position it wants, in fp32, and rounds once to the engine's dtype. Nothing is ever quantized a second time.
"""

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from cachecore.kv.layout import LayerKv
from cachecore.kv.rope import RopeTable
from cachecore.scope import Fidelity

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
"""What engines compute in, by the names that travel."""


class CodecError(ValueError):
    """A payload that is not what its facts say, or KV that a codec cannot take."""


@dataclass(frozen=True, slots=True)
class KvFacts:
    """What a frame's header says of its payload, beside who may read it: enough to know its size to the byte."""

    codec: str
    layer: int
    position: int
    """Where the first token stood when its KV was computed; the others follow it."""
    tokens: int
    kv_heads: int
    head_dim: int
    value_dim: int
    dtype: str
    """Of the engine; one of `DTYPES`."""

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise CodecError(f"dtype {self.dtype!r} is not one of {', '.join(DTYPES)}")
        if min(self.layer, self.position, self.tokens, self.kv_heads, self.head_dim, self.value_dim) < 0:
            raise CodecError("a frame's layer, position and shape are not negative")

    @property
    def torch_dtype(self) -> torch.dtype:
        return DTYPES[self.dtype]

    def fidelity_at(self, position: int) -> Fidelity:
        """How good the decoded KV is at `position`, if what was encoded was exact."""
        if position != self.position:
            return Fidelity.ROTATED
        return Fidelity.EXACT if self.codec == "raw" else Fidelity.QUANTIZED


class Origin(NamedTuple):
    """Where KV comes from: a layer, and the position of its first token."""

    layer: int
    position: int


class Encoded(NamedTuple):
    payload: memoryview
    """Bytes, contiguous; keeps the memory it shows alive."""
    facts: KvFacts


class Codec(Protocol):
    """Stateless. `rope` is the engine's own table, or None for a layer whose keys carry no position."""

    @property
    def name(self) -> str: ...

    def payload_bytes(self, facts: KvFacts) -> int:
        """The size of the payload that `facts` describe: what a receiver may expect, no more and no less."""
        ...

    def encode(self, kv: LayerKv, origin: Origin, rope: RopeTable | None) -> Encoded:
        """Raises CodecError when the codec does not take KV of this shape."""
        ...

    def decode(
        self, payload: bytes | bytearray | memoryview, facts: KvFacts, position: int, rope: RopeTable | None
    ) -> LayerKv:
        """The KV at `position`, in the engine's dtype. May share the payload's memory. Raises CodecError."""
        ...


def facts_of(codec: str, kv: LayerKv, origin: Origin) -> KvFacts:
    """Raises CodecError when keys and values do not belong together."""
    keys, values = kv
    if keys.shape[:2] != values.shape[:2] or keys.dtype is not values.dtype or keys.dim() != 3:
        raise CodecError(f"keys {tuple(keys.shape)} and values {tuple(values.shape)} are no KV of one layer")
    dtype = str(keys.dtype).removeprefix("torch.")
    tokens, kv_heads, head_dim = keys.shape
    return KvFacts(codec, *origin, tokens, kv_heads, head_dim, values.shape[2], dtype)


def bytes_of(payload: "bytes | bytearray | memoryview", expected: int) -> Tensor:
    """The payload as uint8 [expected]; only what may not be written to is copied. Raises CodecError."""
    view = memoryview(payload).cast("B")
    if len(view) != expected:
        raise CodecError(f"a payload of {len(view)} bytes, its header says {expected}")
    if not expected:
        return torch.empty(0, dtype=torch.uint8)
    return torch.frombuffer(bytearray(view) if view.readonly else view, dtype=torch.uint8)


def memory_of(payload: Tensor) -> memoryview:
    """The bytes of a contiguous uint8 tensor, without a copy when it lies in host memory."""
    return payload.cpu().numpy().data
