"""Addresses are of contiguous host memory, which the caller keeps alive. `dtype` is 0 for fp32, 1 for bf16.

Turns are fp32 [tokens, turn_heads, pairs] of cosines and sines, `turn_heads` being 1 or `heads`; 0 pairs turn nothing.
"""

DIM_MAX: int
"""Of vectors."""

def turn(
    source: int,
    target: int,
    dtype: int,
    tokens: int,
    heads: int,
    dim: int,
    cos: int,
    sin: int,
    turn_heads: int,
    pairs: int,
    offset: int,
    interleaved: bool,
    /,
) -> None:
    """Turn pairs of [tokens, heads, dim] from dimension `offset` on. `target` may be `source`."""

def quantize(
    kind: int,
    source: int,
    dtype: int,
    codes: int,
    scales: int,
    tokens: int,
    heads: int,
    dim: int,
    cos: int,
    sin: int,
    turn_heads: int,
    pairs: int,
    offset: int,
    interleaved: bool,
    /,
) -> None:
    """Turn, and put into codes and bf16 scales. Kinds: 0 int8, 1 E4M3, 2 Hadamard and int4, 3 Hadamard and 8 levels."""

def dequantize(
    kind: int,
    codes: int,
    scales: int,
    target: int,
    dtype: int,
    tokens: int,
    heads: int,
    dim: int,
    cos: int,
    sin: int,
    turn_heads: int,
    pairs: int,
    offset: int,
    interleaved: bool,
    /,
) -> None:
    """`quantize` undone, and turned."""
