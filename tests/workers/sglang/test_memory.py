"""A page's bytes where SGLang keeps them, in torch's memory as in ours."""

import pytest

from tests.workers.sglang.hostpools import FlatOnly, HostPool, Indices, Logical, Tensor, content
from workers.sglang.memory import Form, HostPages, MemoryMismatch, memory_of, scatter


def test_a_tensors_bytes_are_its_own() -> None:
    torch = pytest.importorskip("torch")
    tensor = torch.arange(6, dtype=torch.bfloat16).reshape(2, 3)
    memory = memory_of(tensor)
    assert len(memory) == 12
    memory[2:4] = bytes(memory[10:12])
    assert tensor[0, 1] == 5
    with pytest.raises(MemoryMismatch, match="not contiguous"):
        memory_of(tensor.T)
    with pytest.raises(MemoryMismatch, match="0 bytes"):
        memory_of(torch.empty(0))


@pytest.mark.parametrize(("layout", "pieces"), [("layer_first", 6), ("page_first", 2)])
def test_a_page_is_in_the_pieces_of_its_layout(layout: str, pieces: int) -> None:
    pool = HostPool(layout=layout)
    memory = HostPages(pool)
    (place,) = memory.places(1, pool.places(3))
    assert (memory.form, len(memory.pieces(place)), memory.page_bytes(place)) == (Form.PIECES, pieces, pool.page_bytes)
    memory.fill(place, memoryview(content("z", pool.page_bytes)))
    assert b"".join(memory.pieces(place)) == content("z", pool.page_bytes)
    assert not any(pool.read(2) + pool.read(4))


@pytest.mark.parametrize("pool", [FlatOnly(), HostPool()], ids=["cannot say", "is told"])
def test_a_flat_page_is_all_keys_then_all_values(pool: HostPool) -> None:
    memory = HostPages(pool, flat=True)
    assert memory.form is Form.FLAT
    (place,) = memory.places(1, pool.places(5))
    memory.fill(place, memoryview(content("y", pool.page_bytes)))
    assert b"".join(memory.pieces(place)) == pool.read(5) == content("y", pool.page_bytes)


def test_only_a_pool_without_memory_has_no_pages() -> None:
    silent, empty = HostPool(), FlatOnly()
    silent.get_page_buffer_element_size = lambda: None  # type: ignore[method-assign, assignment, misc]
    empty.kv_buffer = None  # type: ignore[assignment]
    assert [HostPages(pool).form for pool in (Logical(), silent, empty)] == [Form.NONE, Form.FLAT, Form.FLAT]


def test_what_does_not_fit_is_refused_before_anything_is_written() -> None:
    pool = HostPool()
    memory = HostPages(pool)
    for indices in (None, Indices(), pool.places(1, 2), Indices([1, 2, 3])):
        with pytest.raises(MemoryMismatch, match="1 pages of 4 tokens"):
            memory.places(1, indices)
    target = Tensor(8)
    with pytest.raises(MemoryMismatch, match="a page of 7 bytes where 8"):
        scatter(memoryview(b"x" * 7), [memory_of(target)])
    assert target.memory == bytes(8)
