"""Cutting long tensors so that what is made of them on the way stays in the caches of the cores that work on it."""

from collections.abc import Iterator

import torch
from torch import Tensor

_SLICE_ELEMENTS = 65_536
"""Per core, on CPU: fp32 copies of so many, several at a time, fit into a second-level cache."""


def slices(heads: Tensor) -> Iterator[slice]:
    """Stretches of tokens that cover `heads` [tokens, heads, head_dim]; one, where it does not lie in host memory."""
    tokens, step = len(heads), len(heads)
    if heads.device.type == "cpu":
        step = max(1, _SLICE_ELEMENTS * torch.get_num_threads() * tokens // max(heads.numel(), 1))
    for start in range(0, tokens, step or 1):
        yield slice(start, min(start + step, tokens))
