"""The extension in C behind tensors: each function does its work and says so, or says that torch has to do it.

It takes what lies contiguously in host memory as fp32 or bf16, and is not called where it has not been built.
"""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from cachecore.kv.native import kernels
from cachecore.kv.variants import Pairing

if TYPE_CHECKING:
    from cachecore.kv.rope import RopeRows

_DTYPES = {torch.float32: 0, torch.bfloat16: 1}

AVAILABLE = kernels is not None


def turn(heads: Tensor, rows: "RopeRows", out: Tensor) -> bool:
    """`rope.rotate`, for [tokens, heads, head_dim]."""
    if kernels is None or heads.dtype is not out.dtype or not (_takes(heads) and _takes(out) and _fits(rows, heads)):
        return False
    kernels.turn(heads.data_ptr(), out.data_ptr(), _DTYPES[heads.dtype], *heads.shape, *_turns(rows))
    return True


def quantize(kind: int, vectors: Tensor, rows: "RopeRows | None", codes: Tensor, scales: Tensor) -> bool:
    """[tokens, heads, dim], turned by `rows`, as a quantizer's codes and scales (`codecs.quantizers`)."""
    if kernels is None or not _match(vectors, rows, codes, scales):
        return False
    memory = (vectors.data_ptr(), _DTYPES[vectors.dtype], codes.data_ptr(), scales.data_ptr())
    kernels.quantize(kind, *memory, *vectors.shape, *_turns(rows))
    return True


def dequantize(kind: int, codes: Tensor, scales: Tensor, rows: "RopeRows | None", vectors: Tensor) -> bool:
    """`quantize` undone, then turned by `rows`, into `vectors`."""
    if kernels is None or not _match(vectors, rows, codes, scales):
        return False
    memory = (codes.data_ptr(), scales.data_ptr(), vectors.data_ptr(), _DTYPES[vectors.dtype])
    kernels.dequantize(kind, *memory, *vectors.shape, *_turns(rows))
    return True


def _match(vectors: Tensor, rows: "RopeRows | None", codes: Tensor, scales: Tensor) -> bool:
    taken = _takes(vectors) and codes.is_contiguous() and scales.is_contiguous()
    return taken and (rows is None or _fits(rows, vectors))


def _takes(vectors: Tensor) -> bool:
    return (
        vectors.dtype in _DTYPES
        and vectors.dim() == 3
        and vectors.device.type == "cpu"
        and vectors.is_contiguous()
        and kernels is not None
        and 1 <= vectors.shape[2] <= kernels.DIM_MAX
    )


def _fits(rows: "RopeRows", vectors: Tensor) -> bool:
    """Whether there is a turn for each vector, and room for its pairs."""
    tokens, heads, pairs = rows.cos.shape
    return (
        tokens == vectors.shape[0]
        and heads in (1, vectors.shape[1])
        and rows.layout.offset + 2 * pairs <= vectors.shape[2]
        and rows.cos.shape == rows.sin.shape
        and all(part.dtype is torch.float32 and part.is_contiguous() for part in (rows.cos, rows.sin))
        and rows.cos.device.type == rows.sin.device.type == "cpu"
    )


def _turns(rows: "RopeRows | None") -> tuple[int, int, int, int, int, bool]:
    if rows is None:
        return 0, 0, 1, 0, 0, False
    _, heads, pairs = rows.cos.shape
    layout = rows.layout
    interleaved = layout.pairing is Pairing.INTERLEAVED
    return rows.cos.data_ptr(), rows.sin.data_ptr(), heads, pairs, layout.offset, interleaved
