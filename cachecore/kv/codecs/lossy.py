"""Codecs that quantize: position-neutral keys and values, token by token and head by head.

The payload is keys, then values; each is, for every stretch of tokens that shares a quantizer, the scales and then the
codes, each padded to 8 bytes. Which stretches there are follows from the facts alone.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from cachecore.kv import kernels
from cachecore.kv.codecs.contract import (
    CodecError,
    Encoded,
    KvFacts,
    Origin,
    bytes_of,
    facts_of,
    memory_of,
)
from cachecore.kv.codecs.quantizers import SCALE_BYTES, Quantizer
from cachecore.kv.layout import LayerKv
from cachecore.kv.rope import RopeRows, RopeTable, turn_pairs
from cachecore.kv.slicing import slices

_ALIGNMENT = 8
_SINK_TOKENS = 4
_HOST = torch.device("cpu")


class _Stretch(NamedTuple):
    """Tokens that share a quantizer, and where in the payload their scales and codes stand."""

    quantizer: Quantizer
    tokens: slice
    scales: Tensor
    """[tokens, kv_heads, scales] bf16, a view of the payload."""
    codes: Tensor
    """[tokens, kv_heads, code_bytes] uint8, a view of the payload."""


@dataclass(frozen=True, slots=True)
class LossyCodec:
    """See the module's opening. `sinks` is for KV computed at positions 0 to 3, which every later token attends to."""

    name: str
    keys: Quantizer
    values: Quantizer
    sinks: Quantizer

    def payload_bytes(self, facts: KvFacts) -> int:
        return sum(
            _padded(count * facts.kv_heads * quantizer.scales * SCALE_BYTES)
            + _padded(count * facts.kv_heads * _code_bytes(quantizer, dim))
            for dim, part in self._plan(facts)
            for quantizer, count in part
        )

    def encode(self, kv: LayerKv, origin: Origin, rope: RopeTable | None) -> Encoded:
        facts = facts_of(self.name, kv, origin)
        payload = torch.zeros(self.payload_bytes(facts), dtype=torch.uint8)
        rows = _turns(rope, origin.position, None, facts)
        parts = self._parts(facts, payload)
        for part, turns, stretches in zip(kv, (rows, None), parts, strict=True):
            for stretch in stretches:
                _encode_stretch(part, turns, stretch)
        return Encoded(memory_of(payload), facts)

    def decode(
        self, payload: bytes | bytearray | memoryview, facts: KvFacts, position: int, rope: RopeTable | None
    ) -> LayerKv:
        if facts.codec != self.name:
            raise CodecError(f"{self.name} cannot read {facts.codec}")
        flat = bytes_of(payload, self.payload_bytes(facts))
        rows = _turns(rope, None, position, facts)
        dtype = facts.torch_dtype
        decoded = [torch.empty((facts.tokens, facts.kv_heads, dim), dtype=dtype) for dim, _ in self._plan(facts)]
        for out, turns, stretches in zip(decoded, (rows, None), self._parts(facts, flat), strict=True):
            for stretch in stretches:
                _decode_stretch(out, turns, stretch)
        return LayerKv(*decoded)

    def _plan(self, facts: KvFacts) -> Iterator[tuple[int, Sequence[tuple[Quantizer, int]]]]:
        """For keys, then values: their dimensions, and quantizers with how many tokens each takes, in order."""
        spared = min(max(_SINK_TOKENS - facts.position, 0), facts.tokens)
        for dim, quantizer in ((facts.head_dim, self.keys), (facts.value_dim, self.values)):
            yield dim, ((self.sinks, spared), (quantizer, facts.tokens - spared)) if dim else ()

    def _parts(self, facts: KvFacts, payload: Tensor) -> Iterator[Sequence[_Stretch]]:
        """The stretches of keys and of values as views of a payload."""
        offset = 0
        for dim, part in self._plan(facts):
            stretches, start = [], 0
            for quantizer, count in part:
                shape = (count, facts.kv_heads)
                scales, offset = _take(payload, offset, (*shape, quantizer.scales * SCALE_BYTES))
                codes, offset = _take(payload, offset, (*shape, _code_bytes(quantizer, dim)))
                tokens = slice(start, start + count)
                stretches.append(_Stretch(quantizer, tokens, scales.view(torch.bfloat16), codes))
                start += count
            yield stretches


def _turns(rope: RopeTable | None, source: int | None, target: int | None, facts: KvFacts) -> RopeRows | None:
    return None if rope is None else rope.shift(source, target, facts.tokens, facts.kv_heads).to(_HOST)


@torch.inference_mode()
def _encode_stretch(part: Tensor, rows: RopeRows | None, stretch: _Stretch) -> None:
    part = part[stretch.tokens]
    rows = None if rows is None else rows.of(stretch.tokens)
    if kernels.quantize(stretch.quantizer.kernel, part, rows, stretch.codes, stretch.scales):
        return
    for some in slices(part):
        vectors = part[some].to(device=_HOST, dtype=torch.float32, copy=True)
        if rows is not None:
            turn_pairs(vectors, rows, some)
        stretch.quantizer.quantize(vectors, stretch.codes[some], stretch.scales[some])


@torch.inference_mode()
def _decode_stretch(out: Tensor, rows: RopeRows | None, stretch: _Stretch) -> None:
    out = out[stretch.tokens]
    rows = None if rows is None else rows.of(stretch.tokens)
    if kernels.dequantize(stretch.quantizer.kernel, stretch.codes, stretch.scales, rows, out):
        return
    for some in slices(out):
        vectors = torch.empty(out[some].shape, dtype=torch.float32)
        stretch.quantizer.dequantize(stretch.codes[some], stretch.scales[some], vectors)
        if rows is not None:
            turn_pairs(vectors, rows, some)
        out[some].copy_(vectors)


def _take(payload: Tensor, offset: int, shape: tuple[int, int, int]) -> tuple[Tensor, int]:
    size = shape[0] * shape[1] * shape[2]
    return payload[offset : offset + size].view(shape), offset + _padded(size)


def _padded(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def _code_bytes(quantizer: Quantizer, dim: int) -> int:
    try:
        return quantizer.code_bytes(dim)
    except ValueError as error:
        raise CodecError(str(error)) from error
