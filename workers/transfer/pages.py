"""KV in an engine's pages, read and written by whole blocks.

A page is token-major, so blocks whose numbers follow each other lie in memory as one stretch, and what a puller allots
for a run mostly does. Stretches are sent from where they lie and copied to where they belong.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from cachecore.kv.layout import LayerKv


class Stretch(NamedTuple):
    """Blocks `first` to `end` of the pool, one after the other."""

    first: int
    end: int


def stretches_of(blocks: Sequence[int]) -> list[Stretch]:
    """A block table as stretches, in its order."""
    found = []
    for _, group in groupby(enumerate(blocks), key=lambda pair: pair[1] - pair[0]):
        members = [block for _, block in group]
        found.append(Stretch(members[0], members[-1] + 1))
    return found


class EnginePages(Protocol):
    """An engine's memory, as transfers read and write it: by whole blocks."""

    def payload(self, layer: int, stretches: Sequence[Stretch]) -> Sequence[memoryview]:
        """The bytes of a layer as codec `raw` lays them out."""
        ...

    def read(self, layer: int, stretches: Sequence[Stretch]) -> LayerKv: ...

    def write(self, layer: int, stretches: Sequence[Stretch], kv: LayerKv) -> None: ...


@dataclass(frozen=True, slots=True, eq=False)
class Pages:
    """`keys` and `values`: [layers, blocks, block_size, kv_heads, head_dim].

    Blocks that somebody references keep their contents, so any thread may read those it holds while the engine writes
    others. On CUDA all threads use one stream: what was written before is read after.
    """

    keys: Tensor
    values: Tensor

    def payload(self, layer: int, stretches: Sequence[Stretch]) -> list[memoryview]:
        """The bytes of a layer as codec `raw` lays them out, keys before values; from where they lie in host memory."""
        return [_bytes(part) for pool in (self.keys, self.values) for part in _parts(pool[layer], stretches)]

    def read(self, layer: int, stretches: Sequence[Stretch]) -> LayerKv:
        """[tokens, kv_heads, head_dim] each; a view where the blocks are one stretch."""
        keys, values = (_joined(list(_parts(pool[layer], stretches))) for pool in (self.keys, self.values))
        return LayerKv(keys, values)

    def write(self, layer: int, stretches: Sequence[Stretch], kv: LayerKv) -> None:
        """Fill the blocks with [tokens, kv_heads, head_dim] each, as many tokens as they take."""
        for pool, given in ((self.keys, kv.keys), (self.values, kv.values)):
            start = 0
            for part in _parts(pool[layer], stretches):
                part.copy_(given[start : start + len(part)])
                start += len(part)


def _parts(pages: Tensor, stretches: Sequence[Stretch]) -> Iterator[Tensor]:
    """Views [tokens, kv_heads, head_dim] of pages [blocks, block_size, kv_heads, head_dim]."""
    for first, end in stretches:
        yield pages[first:end].flatten(0, 1)


def _joined(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _bytes(part: Tensor) -> memoryview:
    data: memoryview = part.flatten().view(torch.uint8).cpu().numpy().data
    return data
