import pytest
import torch

from cachecore.kv.layout import LayerKv, PagedMemory, slots_of

LAYERS, BLOCKS, SIZE, HEADS, DIM = 3, 6, 4, 2, 8


@pytest.fixture
def memory() -> PagedMemory:
    keys = torch.arange(float(LAYERS * BLOCKS * SIZE * HEADS * DIM)).view(LAYERS, BLOCKS, SIZE, HEADS, DIM)
    return PagedMemory(keys, -keys)


def test_slots_follow_the_block_table() -> None:
    assert slots_of([5, 0, 2], SIZE, 2, 9).tolist() == [22, 23, 0, 1, 2, 3, 8]
    assert slots_of([5], SIZE, 4, 4).tolist() == []


@pytest.mark.parametrize(("start", "end"), [(0, 13), (-1, 2), (3, 2)])
def test_tokens_outside_the_table_are_refused(start: int, end: int) -> None:
    with pytest.raises(ValueError, match="leave a table of 3 blocks"):
        slots_of([5, 0, 2], SIZE, start, end)


def test_reading_gathers_tokens_in_the_order_of_their_slots(memory: PagedMemory) -> None:
    kv = memory.read(1, slots_of([5, 0], SIZE, 3, 6))
    assert kv.keys.shape == (3, HEADS, DIM)
    for index, (block, offset) in enumerate([(5, 3), (0, 0), (0, 1)]):
        assert torch.equal(kv.keys[index], memory.keys[1, block, offset])
        assert torch.equal(kv.values[index], -memory.keys[1, block, offset])


def test_writing_touches_nothing_else(memory: PagedMemory) -> None:
    before = memory.keys.clone()
    slots = slots_of([2, 4], SIZE, 3, 6)
    written = LayerKv(torch.full((3, HEADS, DIM), 7.0), torch.full((3, HEADS, DIM), 9.0))
    memory.write(2, slots, written)
    got = memory.read(2, slots)
    assert torch.equal(got.keys, written.keys)
    assert torch.equal(got.values, written.values)
    changed = (memory.keys != before).flatten(3).any(-1).nonzero().tolist()
    assert changed == [[2, 2, 3], [2, 4, 0], [2, 4, 1]]


def test_a_read_is_a_copy(memory: PagedMemory) -> None:
    slots = slots_of([0], SIZE, 0, 4)
    kv = memory.read(0, slots)
    memory.keys.zero_()
    assert kv.keys.abs().sum() > 0
