"""The mean of one text's KV over the contexts in which it was computed.

KV of a text depends on what came before it. Computed behind one thing and used behind another, it is off by what the
two have not in common; the mean over several contexts is off by less, before anything is repaired, since what is each
context's own averages out. Keys are averaged with their rotation taken off, as only then they say the same thing at
every position: a table-matched inverse per copy, fp32 sums, and one rotation to where the mean is wanted.

A mean is nobody's exact KV. It serves whoever would take KV of another position and repair it, and nobody else.
"""

from dataclasses import dataclass

from torch import Tensor

from cachecore.kv.rope import RopeRows, RopeTable

CONTEXTS_MAX = 8
"""A mean of so many is left as it is: another one would move it by a ninth of the little that is left to gain."""


@dataclass(frozen=True, slots=True, eq=False)
class MeanKv:
    """[layers, tokens, kv_heads, head_dim] each, in fp32."""

    keys: Tensor
    """Turned to no position."""
    values: Tensor
    contexts: int
    """That it is the mean of; at least one."""

    @classmethod
    def of(cls, keys: Tensor, values: Tensor, position: int, rope: RopeTable) -> "MeanKv":
        """Of one context, in which the first token stood at `position`. Keys and values may be of any dtype."""
        return cls(_turned(keys, position, None, rope), values.float(), 1)

    def joined(self, other: "MeanKv") -> "MeanKv":
        """The mean over the contexts of both. Raises ValueError for KV of another shape."""
        if self.keys.shape != other.keys.shape or self.values.shape != other.values.shape:
            raise ValueError(f"KV of {tuple(other.keys.shape)} joins none of {tuple(self.keys.shape)}")
        contexts = self.contexts + other.contexts
        share = other.contexts / contexts
        keys, values = self.keys.lerp(other.keys, share), self.values.lerp(other.values, share)
        return MeanKv(keys, values, contexts)

    def part(self, tokens: slice) -> "MeanKv":
        return MeanKv(self.keys[:, tokens], self.values[:, tokens], self.contexts)

    def keys_at(self, position: int, rope: RopeTable) -> Tensor:
        """As if the first token stood at `position`, in fp32."""
        return _turned(self.keys, None, position, rope)


def _turned(keys: Tensor, source: int | None, target: int | None, rope: RopeTable) -> Tensor:
    layers, tokens, heads, _ = keys.shape
    shift = rope.shift(source, target, tokens, heads)
    # All layers in one call: chunks are short.
    rows = RopeRows(shift.cos.repeat(layers, 1, 1), shift.sin.repeat(layers, 1, 1), shift.layout)
    return rows.turn(keys.float().flatten(0, 1)).view(keys.shape)
