"""The engine's own bytes: keys, then values, each [tokens, kv_heads, head_dim]."""

import math

import torch

from cachecore.kv.codecs.contract import CodecError, Encoded, KvFacts, Origin, bytes_of, facts_of, memory_of
from cachecore.kv.layout import LayerKv
from cachecore.kv.rope import RopeTable


class RawCodec:
    """See the module's opening."""

    name = "raw"

    def payload_bytes(self, facts: KvFacts) -> int:
        return sum(math.prod(shape) for shape in _shapes(facts)) * facts.torch_dtype.itemsize

    def encode(self, kv: LayerKv, origin: Origin, rope: RopeTable | None) -> Encoded:
        facts = facts_of(self.name, kv, origin)
        payload = torch.cat([part.contiguous().view(torch.uint8).flatten() for part in kv])
        return Encoded(memory_of(payload), facts)

    def decode(
        self, payload: bytes | bytearray | memoryview, facts: KvFacts, position: int, rope: RopeTable | None
    ) -> LayerKv:
        if facts.codec != self.name:
            raise CodecError(f"{self.name} cannot read {facts.codec}")
        flat = bytes_of(payload, self.payload_bytes(facts)).view(facts.torch_dtype)
        shape, value_shape = _shapes(facts)
        numbers = math.prod(shape)
        keys, values = flat[:numbers].view(shape), flat[numbers:].view(value_shape)
        if position != facts.position and rope is not None:
            keys = rope.shift(facts.position, position, facts.tokens, facts.kv_heads).to(keys.device).turn(keys)
        return LayerKv(keys, values)


def _shapes(facts: KvFacts) -> tuple[tuple[int, int, int], tuple[int, int, int]]:
    """Of keys, and of values."""
    shape = (facts.tokens, facts.kv_heads)
    return (*shape, facts.head_dim), (*shape, facts.value_dim)
