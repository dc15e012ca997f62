"""Rotary position embeddings as one cos/sin table: every scaling changes the table and nothing else.

Pairs are neox halves: dimension i turns with dimension i + rotary_dim/2. The table stays in fp32 whatever the model's
dtype, so a rotation is rounded once. Its fingerprint belongs into the compatibility class of the KV.
"""

import hashlib
import math
from typing import NamedTuple

import torch
from torch import Tensor

from workers.reference.config import RopeConfig


class RopeTable(NamedTuple):
    """`cos` and `sin`: [positions, rotary_dim / 2], fp32, attention factor applied."""

    cos: Tensor
    sin: Tensor

    def fingerprint(self) -> str:
        """Digest of the table's bytes: equal digests rotate equally."""
        digest = hashlib.blake2b(digest_size=16)
        for part in self:
            digest.update(part.cpu().numpy().tobytes())
        return digest.hexdigest()


def rope_table(config: RopeConfig, positions: int, device: torch.device | None = None) -> RopeTable:
    """The table of positions 0..positions-1. Longrope takes its long factors when the table outgrows the original."""
    frequencies = inverse_frequencies(config, positions)
    angles = torch.outer(torch.arange(positions, dtype=torch.float32), frequencies)
    scale = attention_factor(config)
    return RopeTable((angles.cos() * scale).to(device), (angles.sin() * scale).to(device))


def rotate(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the first rotary_dim dimensions of `heads` [tokens, heads, head_dim] by table rows [tokens, half]."""
    half = cos.shape[-1]
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    first, second, rest = heads.float().tensor_split((half, 2 * half), dim=-1)
    turned = torch.cat((first * cos - second * sin, second * cos + first * sin, rest), dim=-1)
    return turned.to(heads.dtype)


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
        case "llama3":
            return _llama3(1.0 / wavelengths, config)
        case "yarn":
            return _yarn(wavelengths, config)
        case "longrope":
            long = positions > config.original_max_positions
            return 1.0 / (torch.tensor(config.long_factor if long else config.short_factor) * wavelengths)
        case _:
            return 1.0 / wavelengths


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
