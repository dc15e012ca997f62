"""KV in its canonical form, and how it is taken from and put into an engine's memory.

Canonical: for each layer, keys (rotated, as the engine stores them) and values of consecutive tokens, each
[tokens, kv_heads, head_dim], contiguous. It is what codecs, rotation and the fuser speak; every engine's own layout is
one class here that reads and writes it token for token, so that a run may begin and end within a block.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor


class LayerKv(NamedTuple):
    """One layer of consecutive tokens: [tokens, kv_heads, head_dim] each. MLA has no values: their head_dim is 0."""

    keys: Tensor
    values: Tensor


class KvMemory(Protocol):
    """An engine's KV memory. A slot is the place of one token: block * block_size + offset."""

    @property
    def layers(self) -> int: ...

    def read(self, layer: int, slots: Tensor) -> LayerKv:
        """A copy of the tokens at `slots` [tokens]."""
        ...

    def write(self, layer: int, slots: Tensor, kv: LayerKv) -> None:
        """Put tokens at `slots`; no other slot is touched, also not in the same block."""
        ...


@dataclass(frozen=True, slots=True)
class PagedMemory:
    """Token-major pages: keys and values [layers, blocks, block_size, kv_heads, head_dim] (the reference worker)."""

    keys: Tensor
    values: Tensor

    @property
    def layers(self) -> int:
        return len(self.keys)

    def read(self, layer: int, slots: Tensor) -> LayerKv:
        return LayerKv(*(pool[layer].flatten(0, 1).index_select(0, slots) for pool in (self.keys, self.values)))

    def write(self, layer: int, slots: Tensor, kv: LayerKv) -> None:
        self.keys[layer].flatten(0, 1).index_copy_(0, slots, kv.keys)
        self.values[layer].flatten(0, 1).index_copy_(0, slots, kv.values)


def slots_of(blocks: Sequence[int], block_size_tokens: int, start: int, end: int) -> Tensor:
    """The slots of tokens `start` to `end` of a sequence with block table `blocks`: [end - start].

    Raises ValueError when the table does not reach that far.
    """
    if not 0 <= start <= end <= len(blocks) * block_size_tokens:
        raise ValueError(f"tokens {start}..{end} leave a table of {len(blocks)} blocks of {block_size_tokens}")
    tokens = torch.arange(start, end)
    table = torch.tensor(blocks, dtype=torch.int64)
    return table[tokens // block_size_tokens] * block_size_tokens + tokens % block_size_tokens
