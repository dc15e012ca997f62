"""Where vLLM's attention kernel puts a token: known from its source, and shown by the kernel before anything moves.

A layout that is only nearly right gives fluent garbage, and none of vLLM's own descriptions tells its kernels apart. So
the engine's own kernel writes tokens into memory of the same shape, and what is read back must be what went in.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from cachecore.kv.layout import LayerKv, TransposedMemory
from workers.transfer.pages import Stretch
from workers.vllm.settings import SettingsError

KERNELS = ("vec", "vec16")
"""Whose layout is known. `amx` keeps tiles of pairs; those of ARM, RISC-V, z and POWER have layouts of their own."""

Store = Callable[[Tensor, Tensor, Tensor, Tensor], None]
"""The engine's kernel: keys and values [tokens, kv_heads, head_dim] of a layer, its memory, slots [tokens]."""

_SEED = 5


def engine_memory(tensors: Sequence[Tensor], kernel: str, store: Store) -> TransposedMemory:
    """Of the tensors that vLLM has registered, one for each layer. Raises SettingsError for what is not understood."""
    if kernel not in KERNELS:
        known = ", ".join(KERNELS)
        raise SettingsError(f"the KV layout of attention kernel {kernel!r} is not supported (only {known})")
    first = tensors[0]
    if any(tensor.shape != first.shape or tensor.dtype is not first.dtype for tensor in tensors):
        raise SettingsError("layers whose KV differs in shape or dtype are not supported")
    if first.dim() != 4 or first.shape[3] % 2 or not first[0].is_contiguous():
        raise SettingsError(f"KV memory of shape {tuple(first.shape)} and strides {first.stride()} is not supported")
    _prove(first, kernel, store)
    return TransposedMemory(tensors)


def _prove(like: Tensor, kernel: str, store: Store) -> None:
    """Raises SettingsError unless the kernel puts tokens where `TransposedMemory` looks for them, and nowhere else."""
    blocks, (kv_heads, size, width) = 3, like.shape[1:]
    generator = torch.Generator().manual_seed(_SEED)
    memory = TransposedMemory([like.new_zeros((blocks, kv_heads, size, width))])
    slots = torch.randperm(blocks * size, generator=generator)[: 2 * size + 1]
    shape = (len(slots), kv_heads, width // 2)
    kv = LayerKv(*(torch.randn(shape, generator=generator).to(like.dtype) for _ in range(2)))
    store(*kv, memory.tensors[0], slots)
    expected = TransposedMemory([torch.zeros_like(memory.tensors[0])])
    expected.write(0, slots, kv)
    if not torch.equal(memory.tensors[0], expected.tensors[0]):
        raise SettingsError(f"attention kernel {kernel!r} lays KV out in another way than is known of it")


class EnginePages:
    """`workers.transfer.pages.EnginePages` over vLLM's memory. Whatever is read is a copy."""

    def __init__(self, memory: TransposedMemory) -> None:
        self._memory = memory

    def payload(self, layer: int, stretches: Sequence[Stretch]) -> list[memoryview]:
        return [part.flatten().view(torch.uint8).numpy().data for part in self.read(layer, stretches)]

    def read(self, layer: int, stretches: Sequence[Stretch]) -> LayerKv:
        return self._memory.read_blocks(layer, _numbers(stretches))

    def write(self, layer: int, stretches: Sequence[Stretch], kv: LayerKv) -> None:
        self._memory.write_blocks(layer, _numbers(stretches), kv)


def _numbers(stretches: Sequence[Stretch]) -> Tensor:
    return torch.cat([torch.arange(first, end) for first, end in stretches])
