"""How vectors of one token and head become codes. A scale is bf16: every fp32 magnitude has one, at 0.4 %.

Codes are made with the scale as it is stored, so its rounding costs no accuracy beyond the last step of a code.
"""

import math
from functools import lru_cache
from itertools import pairwise
from typing import Protocol

import torch
from torch import Tensor

SCALE_BYTES = 2
_ROUND_UP = 1 + 2**-8
"""A scale is rounded to 8 significant bits: grown by this much before, it never ends below what was wanted."""
_TINY = 1e-30
"""Smaller magnitudes become zeros: no scale is zero, and none has an infinite inverse."""
_RANGES = (1.0, 0.96, 0.92)
_LLOYD_MAX_3 = (0.2451, 0.7560, 1.3439, 2.1520)
"""Optimal 3-bit levels for a unit normal, positive half (Max 1960, table I)."""
_BOUNDS = tuple((low + high) / 2 for low, high in pairwise(_LLOYD_MAX_3))
_LOWEST_BITS = 0x0101010101010101
_GATHER = 0x0102040810204080
_EACH_ITS_BIT = 0x8040201008040201 - 2**64
"""Byte i of eight holds bit i (as a signed number)."""
_STRETCHES = (0.93, 1.12)
"""Around what a vector's largest magnitude suggests: two, as good as four fixed ones."""


class Quantizer(Protocol):
    """Vectors are [tokens, heads, dim] fp32; codes [tokens, heads, code_bytes] uint8; scales [.., scales] bf16."""

    @property
    def scales(self) -> int:
        """Scales of a vector."""
        ...

    @property
    def kernel(self) -> int:
        """Its twin in `cachecore.kv.native`."""
        ...

    def code_bytes(self, dim: int) -> int:
        """Raises ValueError for a width that it does not take."""
        ...

    def quantize(self, vectors: Tensor, codes: Tensor, scales: Tensor) -> None:
        """Write codes and scales; `vectors` may be overwritten."""
        ...

    def dequantize(self, codes: Tensor, scales: Tensor, vectors: Tensor) -> None: ...


class Int8:
    """Symmetric: 255 levels up to the largest magnitude."""

    scales = 1
    kernel = 0

    def code_bytes(self, dim: int) -> int:
        return dim

    def quantize(self, vectors: Tensor, codes: Tensor, scales: Tensor) -> None:
        vectors.mul_(_inverse_scale(vectors, 127.0, scales)).round_()
        codes.view(torch.int8).copy_(vectors)

    def dequantize(self, codes: Tensor, scales: Tensor, vectors: Tensor) -> None:
        vectors.copy_(codes.view(torch.int8)).mul_(scales)


class Float8:
    """E4M3, scaled to its largest number: unscaled casts clip outliers without a word."""

    scales = 1
    kernel = 1

    def code_bytes(self, dim: int) -> int:
        return dim

    def quantize(self, vectors: Tensor, codes: Tensor, scales: Tensor) -> None:
        vectors.mul_(_inverse_scale(vectors, 448.0, scales))
        codes.view(torch.float8_e4m3fn).copy_(vectors)

    def dequantize(self, codes: Tensor, scales: Tensor, vectors: Tensor) -> None:
        vectors.copy_(codes.view(torch.float8_e4m3fn)).mul_(scales)


class HadamardInt4:
    """Spread by a Hadamard transform, then 16 even levels over its range or less (SAW-INT4, arXiv 2604.19157).

    Of three ranges the one with the least error is taken: giving up the outermost numbers makes the steps finer.
    Scales: the lowest level, and the step. Two codes a byte, the first of the lower half beside the first of the upper.
    """

    scales = 2
    kernel = 2

    def code_bytes(self, dim: int) -> int:
        if dim % 2:
            raise ValueError(f"4-bit codes are packed in pairs: {dim} dimensions are odd")
        return dim // 2

    def quantize(self, vectors: Tensor, codes: Tensor, scales: Tensor) -> None:
        spread = vectors @ hadamard(vectors.shape[-1])
        low, high = spread.amin(-1, keepdim=True), spread.amax(-1, keepdim=True)
        middle, width = (low + high) / 2, (high - low).clamp_min_(_TINY)
        grids = [((middle - width * (share / 2)).bfloat16(), (width * (share / 15)).bfloat16()) for share in _RANGES]
        errors = [(_on_grid(spread, *grid).sub_(spread)).square_().sum(-1, keepdim=True) for grid in grids]
        best = torch.cat(errors, -1).argmin(-1, keepdim=True)
        lowest, step = (torch.cat(part, -1).gather(-1, best) for part in zip(*grids, strict=True))
        torch.cat((lowest, step), -1, out=scales)
        chosen_low, chosen_high = _grid_codes(spread, lowest, step).to(torch.uint8).chunk(2, -1)
        torch.bitwise_or(chosen_low, chosen_high << 4, out=codes)

    def dequantize(self, codes: Tensor, scales: Tensor, vectors: Tensor) -> None:
        low, high = vectors.chunk(2, -1)
        low.copy_(codes & 15)
        high.copy_(codes >> 4)
        vectors.mul_(scales[..., 1:]).add_(scales[..., :1])
        vectors.copy_(vectors @ hadamard(vectors.shape[-1]))


def _grid_codes(spread: Tensor, lowest: Tensor, step: Tensor) -> Tensor:
    """The nearest of 16 levels, as fp32."""
    return (spread - lowest).mul_(step.float().reciprocal_()).round_().clamp_(0, 15)


def _on_grid(spread: Tensor, lowest: Tensor, step: Tensor) -> Tensor:
    return _grid_codes(spread, lowest, step).mul_(step).add_(lowest)


class HadamardLloydMax3:
    """Spread by a Hadamard transform, then the 8 best levels for normal numbers, stretched to fit the vector.

    A transformed vector is only roughly normal: of two stretches the one with the lesser error is taken, and the scale
    is what brings its levels closest. That costs a third less divergence than levels of the vector's own length.
    Codes are a sign and two bits of magnitude, in three planes, eight codes a byte.
    """

    scales = 1
    kernel = 3

    def code_bytes(self, dim: int) -> int:
        if dim % 8:
            raise ValueError(f"lm3h packs eights: {dim} dimensions are no multiple")
        return 3 * dim // 8

    def quantize(self, vectors: Tensor, codes: Tensor, scales: Tensor) -> None:
        spread = vectors @ hadamard(vectors.shape[-1])
        size = torch.linalg.vector_norm(spread, dim=-1, keepdim=True).div_(math.sqrt(spread.shape[-1]))
        unit = spread.mul_(size.clamp_min(_TINY).reciprocal_())
        magnitudes = unit.abs()
        stretch, factor = _best_stretch(magnitudes)
        scales.copy_(factor * size)
        chosen = ((unit < 0).to(torch.uint8) << 2) | _chosen(magnitudes, stretch).to(torch.uint8)
        for plane, part in enumerate(codes.chunk(3, -1)):
            part.copy_(_pack_bits(chosen >> plane))

    def dequantize(self, codes: Tensor, scales: Tensor, vectors: Tensor) -> None:
        low, high, negative = (_unpack_bits(part).float() for part in codes.chunk(3, -1))
        spread = _levels_of(low + 2 * high).mul_(1 - 2 * negative).mul_(scales)
        torch.matmul(spread, hadamard(vectors.shape[-1]), out=vectors)


def _pack_bits(flags: Tensor) -> Tensor:
    """The lowest bits of uint8 [.., 8n] as [.., n], the first the least: eight bytes at a time, by one product that
    brings the eight bits together in the topmost byte."""
    eights = flags.contiguous().view(torch.int64) & _LOWEST_BITS
    return ((eights * _GATHER) >> 56).to(torch.uint8)


def _unpack_bits(packed: Tensor) -> Tensor:
    """[.., n] -> bool [.., 8n]: `_pack_bits` undone."""
    spread = (packed.to(torch.int64) * _LOWEST_BITS) & _EACH_ITS_BIT
    return spread.view(torch.uint8) != 0


def _best_stretch(magnitudes: Tensor) -> tuple[Tensor, Tensor]:
    """For vectors of mean square 1: by how much to stretch the bounds, and the levels' best factor, [..., 1] each."""
    suggested = magnitudes.amax(-1, keepdim=True).mul_(0.305).add_(0.2)
    stretches = torch.cat([suggested * ratio for ratio in _STRETCHES], -1)
    fits = [_fit(magnitudes, stretch) for stretch in stretches.tensor_split(len(_STRETCHES), -1)]
    gains, factors = (torch.cat(part, -1) for part in zip(*fits, strict=True))
    best = gains.argmax(-1, keepdim=True)
    return stretches.gather(-1, best), factors.gather(-1, best)


def _fit(magnitudes: Tensor, stretch: Tensor) -> tuple[Tensor, Tensor]:
    """By how much levels chosen so reduce the squared error, and the factor that makes them do so."""
    levels = _levels_of(_chosen(magnitudes, stretch))
    product, square = (magnitudes * levels).sum(-1, keepdim=True), levels.square().sum(-1, keepdim=True)
    return product.square() / square, product / square


def _chosen(magnitudes: Tensor, stretch: Tensor) -> Tensor:
    """Which of the four levels each magnitude takes, as fp32."""
    chosen = torch.zeros_like(magnitudes)
    for bound in _BOUNDS:
        chosen += magnitudes > bound * stretch
    return chosen


def _levels_of(chosen: Tensor) -> Tensor:
    """Magnitudes of levels 0..3, given as fp32."""
    levels = torch.full_like(chosen, _LLOYD_MAX_3[0])
    for index, (low, high) in enumerate(pairwise(_LLOYD_MAX_3)):
        levels.add_((chosen > index).float(), alpha=high - low)
    return levels


def _inverse_scale(vectors: Tensor, largest: float, scales: Tensor) -> Tensor:
    """Store the scale that brings each vector's largest magnitude to `largest`; returns what to multiply by."""
    scales.copy_(vectors.abs().amax(-1, keepdim=True).clamp_min_(_TINY).mul_(_ROUND_UP / largest))
    return scales.float().reciprocal_()


@lru_cache(16)
def hadamard(dim: int) -> Tensor:
    """The orthogonal, symmetric Sylvester-Hadamard transform [dim, dim]; block-diagonal when `dim` is no power of 2."""
    block = dim & -dim
    matrix = torch.ones(1, 1)
    while len(matrix) < block:
        matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)))
    return torch.kron(torch.eye(dim // block), matrix / math.sqrt(block))
