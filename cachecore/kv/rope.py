"""Rotary position embeddings as one cos/sin table: every scaling changes the table and nothing else.

The table stays in fp32 whatever the model's dtype, so a rotation is rounded once. Moving a key is table-matched: with
T(p) the pairs' turn (and scale) that the engine's table holds for position p, a key stored at m becomes at n

    T(n) T(m)^-1 k,    T(m)^-1 = (cos, -sin) / (cos^2 + sin^2)

which is right also where the table's rows are no unit vectors: YaRN's and longrope's factor, or a table that the
engine rounded to 16 bits. The product of both turns is one turn per token and pair, made in fp64; so keys are read
once, turned in fp32 and rounded once. Always start from the bytes first stored and their position: rounding adds up.
"""

import hashlib
import math
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from cachecore.kv import kernels
from cachecore.kv.slicing import slices
from cachecore.kv.variants import Pairing, RopeConfig, RopeError, RotaryLayout

_PLAIN = RotaryLayout()
_KEPT = 8
"""Turns of runs: all layers of a run ask for the same, one after the other."""


class RopeRows(NamedTuple):
    """A turn (and scale) for each of some tokens: `cos` and `sin` are [tokens, 1 or heads, rotary_dim / 2], fp32."""

    cos: Tensor
    sin: Tensor
    layout: RotaryLayout = _PLAIN

    def inverse(self) -> "RopeRows":
        """The turns that undo these."""
        cos, sin = self.cos.double(), self.sin.double()
        squares = cos.square() + sin.square()
        return RopeRows((cos / squares).float(), (-sin / squares).float(), self.layout)

    def towards(self, target: "RopeRows") -> "RopeRows":
        """The turns that take keys rotated by these to keys rotated by `target`."""
        cos, sin = self.cos.double(), self.sin.double()
        other_cos, other_sin = target.cos.double(), target.sin.double()
        squares = cos.square() + sin.square()
        return RopeRows(
            ((other_cos * cos + other_sin * sin) / squares).float(),
            ((other_sin * cos - other_cos * sin) / squares).float(),
            self.layout,
        )

    def for_heads(self, heads: int) -> "RopeRows":
        """The same, written out for each head: in torch, turning few heads takes two thirds of the time."""
        shape = (len(self.cos), heads, self.cos.shape[2])
        return RopeRows(self.cos.expand(shape).contiguous(), self.sin.expand(shape).contiguous(), self.layout)

    def of(self, tokens: slice) -> "RopeRows":
        return RopeRows(self.cos[tokens], self.sin[tokens], self.layout)

    def to(self, device: torch.device) -> "RopeRows":
        return RopeRows(self.cos.to(device), self.sin.to(device), self.layout)

    def turn(self, heads: Tensor, out: Tensor | None = None) -> Tensor:
        """Rotate [tokens, heads, head_dim]; see `rotate`."""
        return rotate(heads, self.cos, self.sin, self.layout, out)


@dataclass(frozen=True, slots=True, eq=False)
class RopeTable:
    """`cos` and `sin`: [positions, rotary_dim / 2], fp32, attention factor applied. Ours, or taken from an engine."""

    cos: Tensor
    sin: Tensor
    layout: RotaryLayout = _PLAIN

    def rows(self, positions: Tensor) -> RopeRows:
        """The turns of tokens at `positions`: [tokens], or [sections, tokens] where pairs follow several.

        Raises RopeError for a position that the table does not reach.
        """
        if positions.numel() and not 0 <= int(positions.min()) <= int(positions.max()) < len(self.cos):
            raise RopeError(f"positions {int(positions.min())}..{int(positions.max())} leave 0..{len(self.cos) - 1}")
        positions = positions.to(self.cos.device)
        if positions.dim() == 1:
            cos, sin = (part.index_select(0, positions).unsqueeze(1) for part in (self.cos, self.sin))
            return RopeRows(cos, sin, self.layout)
        axes = _axis_of_pair(self.layout, self.cos.shape[1]).to(self.cos.device)
        pairs = torch.arange(self.cos.shape[1], device=self.cos.device)
        by_pair = positions.index_select(0, axes).t().unsqueeze(1)  # [tokens, 1, pairs]
        return RopeRows(self.cos[by_pair, pairs], self.sin[by_pair, pairs], self.layout)

    def span(self, start: int, count: int) -> RopeRows:
        """The turns of `count` tokens from position `start` on. Raises RopeError where the table ends before."""
        if not 0 <= start <= start + count <= len(self.cos):
            raise RopeError(f"positions {start}..{start + count - 1} leave 0..{len(self.cos) - 1}")
        cos, sin = (part[start : start + count].unsqueeze(1) for part in (self.cos, self.sin))
        return RopeRows(cos, sin, self.layout)

    def shift(self, source: int | None, target: int | None, count: int, heads: int) -> RopeRows:
        """The turns that take `count` tokens from position `source` to `target`, None being without rotation.

        Made ready for so many heads, and kept: the next layer of a run asks for the same.
        """
        return _shift(self, source, target, count, heads)

    def fingerprint(self) -> str:
        """Digest of the table and of where it acts: equal digests rotate equally."""
        digest = hashlib.blake2b(repr((tuple(self.cos.shape), self.layout)).encode(), digest_size=16)
        for part in (self.cos, self.sin):
            digest.update(part.cpu().contiguous().numpy().tobytes())
        return digest.hexdigest()


@lru_cache(_KEPT)
def _shift(table: RopeTable, source: int | None, target: int | None, count: int, heads: int) -> RopeRows:
    rows = table.span(source or 0 if target is None else target, count)
    if target is None:
        rows = rows.inverse()
    elif source is not None:
        rows = table.span(source, count).towards(rows)
    return rows if kernels.AVAILABLE and table.cos.device.type == "cpu" else rows.for_heads(heads)


def rope_table(config: RopeConfig, positions: int, device: torch.device | None = None) -> RopeTable:
    """The table of positions 0..positions-1. Longrope takes its long factors when the table outgrows the original."""
    frequencies = inverse_frequencies(config, positions)
    angles = torch.outer(torch.arange(positions, dtype=torch.float32), frequencies)
    scale = attention_factor(config)
    return RopeTable((angles.cos() * scale).to(device), (angles.sin() * scale).to(device), config.layout)


def rotate(heads: Tensor, cos: Tensor, sin: Tensor, layout: RotaryLayout = _PLAIN, out: Tensor | None = None) -> Tensor:
    """Turn the pairs of `heads` [tokens, heads, head_dim] by rows of a turn for each; other dimensions pass unchanged.

    Rows are [tokens, pairs], or [tokens, 1 or heads, pairs]. Computed in fp32 and rounded once. `out` may be `heads`.
    """
    if out is None:
        out = torch.empty_like(heads)
    cos, sin = (part.unsqueeze(1) if part.dim() == 2 else part for part in (cos, sin))
    rows = RopeRows(cos, sin, layout)
    if kernels.turn(heads, rows, out):
        return out
    for part in slices(heads):
        turned = heads[part].to(torch.float32, copy=True)
        turn_pairs(turned, rows, part)
        out[part].copy_(turned)
    return out


def turn_pairs(heads: Tensor, rows: RopeRows, tokens: slice) -> None:
    """Turn fp32 `heads` [tokens, heads, head_dim] in place, by the rows of `tokens`."""
    cos, sin, layout = rows.cos[tokens], rows.sin[tokens], rows.layout
    first, second = _pairs(heads[..., layout.offset : layout.offset + 2 * cos.shape[-1]], layout.pairing)
    crossed = first * sin
    first.mul_(cos).addcmul_(second, sin, value=-1)
    second.mul_(cos).add_(crossed)


def _pairs(heads: Tensor, pairing: Pairing) -> tuple[Tensor, Tensor]:
    """Views of the first and the second member of every pair."""
    if pairing is Pairing.INTERLEAVED:
        return heads[..., 0::2], heads[..., 1::2]
    first, second = heads.chunk(2, dim=-1)
    return first, second


def _axis_of_pair(layout: RotaryLayout, pairs: int) -> Tensor:
    """Which position each pair follows. In blocks, or (Qwen3-VL) one of three in turn, as far as a section reaches."""
    if not layout.sections:
        raise RopeError("positions of several sections for a table that has none")
    if not layout.sections_interleaved:
        return torch.repeat_interleave(torch.arange(len(layout.sections)), torch.tensor(layout.sections))
    axes = torch.zeros(pairs, dtype=torch.int64)
    for axis, count in enumerate(layout.sections[1:], start=1):
        axes[axis : count * len(layout.sections) : len(layout.sections)] = axis
    return axes


def attention_factor(config: RopeConfig) -> float:
    """What multiplies cos and sin: YaRN section 3.4 (arXiv 2309.00071), LongRoPE section 3 (arXiv 2402.13753)."""
    if config.kind not in ("yarn", "longrope"):
        return 1.0
    if config.attention_factor is not None:
        return config.attention_factor
    if config.kind == "yarn":
        if config.mscale and config.mscale_all_dim:
            return _yarn_scale(config.factor, config.mscale) / _yarn_scale(config.factor, config.mscale_all_dim)
        return _yarn_scale(config.factor, 1.0)
    if config.factor <= 1.0:
        return 1.0
    return math.sqrt(1.0 + math.log(config.factor) / math.log(config.original_max_positions))


def inverse_frequencies(config: RopeConfig, positions: int) -> Tensor:
    """Angle per position of each pair: [rotary_dim / 2], fp32."""
    exponents = torch.arange(0, config.rotary_dim, 2, dtype=torch.int64).float() / config.rotary_dim
    wavelengths = config.theta**exponents
    match config.kind:
        case "linear":
            return 1.0 / wavelengths / config.factor
        case "ntk":
            return 1.0 / _ntk_theta(config) ** exponents
        case "llama3":
            return _llama3(1.0 / wavelengths, config)
        case "yarn":
            return _yarn(wavelengths, config)
        case "longrope":
            long = positions > config.original_max_positions
            return 1.0 / (torch.tensor(config.long_factor if long else config.short_factor) * wavelengths)
        case "proportional":
            turning = torch.arange(config.rotary_dim // 2) < int(config.proportion * config.rotary_dim // 2)
            return turning / wavelengths / config.factor
        case _:
            return 1.0 / wavelengths


def _ntk_theta(config: RopeConfig) -> float:
    """The base that stretches the slowest pair by `factor` and leaves the fastest alone (YaRN section 3.1)."""
    stretch: float = config.factor ** (config.rotary_dim / (config.rotary_dim - 2))
    return config.theta * stretch


def _llama3(frequencies: Tensor, config: RopeConfig) -> Tensor:
    """Slow pairs are interpolated, fast ones kept, those between blended (Llama 3.1's release)."""
    turns = config.original_max_positions * frequencies / (2 * math.pi)
    blend = (turns - config.low_freq_factor) / (config.high_freq_factor - config.low_freq_factor)
    blend = blend.clamp(0.0, 1.0)
    return (1 - blend) * frequencies / config.factor + blend * frequencies


def _yarn(wavelengths: Tensor, config: RopeConfig) -> Tensor:
    """A ramp over the pairs from extrapolation to interpolation (YaRN section 3.2)."""
    pairs = config.rotary_dim // 2
    low, high = _yarn_pair(config, config.beta_fast), _yarn_pair(config, config.beta_slow)
    if config.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, config.rotary_dim - 1)
    # A ramp of no length would divide by zero.
    span = (high - low) or 0.001
    interpolated = ((torch.arange(pairs, dtype=torch.float32) - low) / span).clamp(0.0, 1.0)
    return (1.0 / (config.factor * wavelengths)) * interpolated + (1.0 / wavelengths) * (1 - interpolated)


def _yarn_pair(config: RopeConfig, turns: float) -> float:
    """The (fractional) pair that makes `turns` turns over the original context."""
    ratio = config.original_max_positions / (turns * 2 * math.pi)
    return config.rotary_dim * math.log(ratio) / (2 * math.log(config.theta))


def _yarn_scale(factor: float, mscale: float) -> float:
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0
