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


@dataclass(frozen=True, slots=True)
class TransposedMemory:
    """vLLM's on CPUs without matrix units (its kernels `vec` and `vec16`): one tensor [blocks, kv_heads, block_size,
    2 * head_dim] for each layer, whose inside is not what that shape says.

    What one block keeps for one head is first its keys transposed, [head_dim, block_size], then its values,
    [block_size, head_dim] (`csrc/cpu/cpu_attn_vec.hpp` and `cpu_attn_vec16.hpp`).
    """

    tensors: Sequence[Tensor]

    @property
    def layers(self) -> int:
        return len(self.tensors)

    @property
    def block_size_tokens(self) -> int:
        return self.tensors[0].shape[2]

    @property
    def head_dim(self) -> int:
        return self.tensors[0].shape[3] // 2

    def read(self, layer: int, slots: Tensor) -> LayerKv:
        blocks, offsets = self._places(slots)
        keys, values = self._parts(layer)
        return LayerKv(keys[blocks, :, :, offsets], values[blocks, :, offsets])

    def write(self, layer: int, slots: Tensor, kv: LayerKv) -> None:
        blocks, offsets = self._places(slots)
        keys, values = self._parts(layer)
        keys[blocks, :, :, offsets] = kv.keys
        values[blocks, :, offsets] = kv.values

    def read_blocks(self, layer: int, blocks: Tensor) -> LayerKv:
        """A copy of whole blocks [blocks]: several times faster than slot by slot."""
        keys, values = self._parts(layer)
        return LayerKv(
            keys.index_select(0, blocks).permute(0, 3, 1, 2).flatten(0, 1).contiguous(),
            values.index_select(0, blocks).transpose(1, 2).flatten(0, 1).contiguous(),
        )

    def write_blocks(self, layer: int, blocks: Tensor, kv: LayerKv) -> None:
        """Fill whole blocks; each number only once."""
        keys, values = self._parts(layer)
        by_block = (len(blocks), self.block_size_tokens, *kv.keys.shape[1:])
        keys.index_copy_(0, blocks, kv.keys.view(by_block).permute(0, 2, 3, 1))
        values.index_copy_(0, blocks, kv.values.view(by_block).transpose(1, 2))

    def _places(self, slots: Tensor) -> tuple[Tensor, Tensor]:
        return slots // self.block_size_tokens, slots % self.block_size_tokens

    def _parts(self, layer: int) -> LayerKv:
        """Views: keys [blocks, kv_heads, head_dim, block_size], values [blocks, kv_heads, block_size, head_dim]."""
        size, width = self.block_size_tokens, self.head_dim
        inside = self.tensors[layer].flatten(2)  # [blocks, kv_heads, 2 * block_size * head_dim]
        keys, values = inside[:, :, : size * width], inside[:, :, size * width :]
        return LayerKv(keys.view(*keys.shape[:2], width, size), values.view(*values.shape[:2], size, width))
