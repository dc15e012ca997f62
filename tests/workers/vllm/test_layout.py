"""vLLM's CPU memory: what is read is what was written, and what is not understood is refused."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from cachecore.kv.layout import LayerKv, TransposedMemory, slots_of
from workers.transfer.pages import stretches_of
from workers.vllm.layout import EnginePages, engine_memory
from workers.vllm.settings import SettingsError

BLOCKS, HEADS, SIZE, WIDTH = 7, 3, 4, 8


def memory(dtype: torch.dtype = torch.float32, layers: int = 2) -> TransposedMemory:
    return TransposedMemory([torch.zeros(BLOCKS, HEADS, SIZE, 2 * WIDTH, dtype=dtype) for _ in range(layers)])


def some_kv(tokens: int, dtype: torch.dtype = torch.float32, seed: int = 1) -> LayerKv:
    generator = torch.Generator().manual_seed(seed)
    return LayerKv(*(torch.randn(tokens, HEADS, WIDTH, generator=generator).to(dtype) for _ in range(2)))


def kernel_store(keys: Tensor, values: Tensor, tensor: Tensor, slots: Tensor) -> None:
    """`cpu_attn_vec`, number by number: within a block and head, keys [width, size], then values [size, width]."""
    for token, slot in enumerate(slots.tolist()):
        block, offset = divmod(slot, SIZE)
        for head in range(HEADS):
            inside = tensor[block, head].view(-1)
            for dim in range(WIDTH):
                inside[dim * SIZE + offset] = keys[token, head, dim]
                inside[SIZE * WIDTH + offset * WIDTH + dim] = values[token, head, dim]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("blocks", [[3, 4, 5], [5, 1, 2], [6]])
def test_blocks_are_where_the_kernel_puts_their_tokens(blocks: list[int], dtype: torch.dtype) -> None:
    ours, theirs = memory(dtype), memory(dtype)
    kv = some_kv(len(blocks) * SIZE, dtype)
    kernel_store(*kv, theirs.tensors[1], slots_of(blocks, SIZE, 0, len(blocks) * SIZE))
    ours.write_blocks(1, torch.tensor(blocks), kv)
    assert torch.equal(ours.tensors[1], theirs.tensors[1])
    assert not ours.tensors[0].any()
    for read, written in zip(theirs.read_blocks(1, torch.tensor(blocks)), kv, strict=True):
        assert torch.equal(read, written)
        assert read.is_contiguous()


def test_single_tokens_touch_nothing_else() -> None:
    blocks = [2, 5, 1]
    whole, parts = memory(), memory()
    kv = some_kv(3 * SIZE)
    whole.write_blocks(0, torch.tensor(blocks), kv)
    for start, end in ((0, 3), (3, 9), (9, 12)):
        parts.write(0, slots_of(blocks, SIZE, start, end), LayerKv(*(part[start:end] for part in kv)))
    assert torch.equal(whole.tensors[0], parts.tensors[0])
    before = whole.tensors[0].clone()
    whole.write(0, slots_of(blocks, SIZE, 5, 6), some_kv(1, seed=2))
    assert int((whole.tensors[0] != before).sum()) == 2 * HEADS * WIDTH
    read = whole.read(0, slots_of(blocks, SIZE, 2, 11))
    assert torch.equal(read.keys[4:], kv.keys[6:11])
    assert torch.equal(read.keys[3], some_kv(1, seed=2).keys[0])


def test_pages_send_keys_before_values() -> None:
    source = memory()
    kv = some_kv(3 * SIZE)
    pages = EnginePages(source)
    stretches = stretches_of([5, 1, 2])
    pages.write(0, stretches, kv)
    sent = b"".join(pages.payload(0, stretches))
    assert sent == b"".join(part.numpy().tobytes() for part in kv)
    kept = pages.read(0, stretches)
    pages.write(0, stretches, some_kv(3 * SIZE, seed=3))
    assert torch.equal(kept.keys, kv.keys)  # a copy: it does not change under the reader


@pytest.mark.parametrize("kernel", ["vec", "vec16"])
def test_a_kernel_that_shows_the_layout_is_taken(kernel: str) -> None:
    tensors = memory().tensors
    assert engine_memory(tensors, kernel, kernel_store).layers == 2
    assert not any(tensor.any() for tensor in tensors)  # it was shown elsewhere


def keys_by_token(keys: Tensor, values: Tensor, tensor: Tensor, slots: Tensor) -> None:
    for token, slot in enumerate(slots.tolist()):
        block, offset = divmod(slot, SIZE)
        tensor[block, :, offset, :WIDTH], tensor[block, :, offset, WIDTH:] = keys[token], values[token]


def values_before_keys(keys: Tensor, values: Tensor, tensor: Tensor, slots: Tensor) -> None:
    kernel_store(values, keys, tensor, slots)


def one_block_on(keys: Tensor, values: Tensor, tensor: Tensor, slots: Tensor) -> None:
    kernel_store(keys, values, tensor, (slots + SIZE) % (3 * SIZE))


@pytest.mark.parametrize("store", [keys_by_token, values_before_keys, one_block_on])
def test_a_kernel_that_does_otherwise_is_refused(store: Callable[[Tensor, Tensor, Tensor, Tensor], None]) -> None:
    with pytest.raises(SettingsError, match="lays KV out in another way"):
        engine_memory(memory().tensors, "vec", store)


@pytest.mark.parametrize(
    ("tensors", "kernel", "reason"),
    [
        (memory().tensors, "amx", "'amx' is not supported"),
        (memory().tensors, "None", "'None' is not supported"),
        ([memory().tensors[0], memory(torch.bfloat16).tensors[0]], "vec", "differs in shape or dtype"),
        ([torch.zeros(BLOCKS, SIZE, HEADS, 2 * WIDTH).transpose(1, 2)], "vec", "strides"),
        ([torch.zeros(BLOCKS, HEADS, SIZE, 2 * WIDTH + 1)], "vec", "is not supported"),
    ],
)
def test_what_is_not_understood_is_refused(tensors: list[Tensor], kernel: str, reason: str) -> None:
    with pytest.raises(SettingsError, match=reason):
        engine_memory(tensors, kernel, kernel_store)
