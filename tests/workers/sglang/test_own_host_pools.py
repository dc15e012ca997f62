"""The storage on SGLang's own host pools, in torch's memory. Skipped where SGLang is not there."""

from queue import Queue
from typing import Any

import pytest

from tests.workers.sglang.conftest import OpenStorage
from tests.workers.sglang.labs import DirectoryLab
from tests.workers.sglang.test_hicache import KEYS

torch = pytest.importorskip("torch")
mha = pytest.importorskip(
    "sglang.srt.mem_cache.pool_host.mha", reason="SGLang is not installed: pip install sglang", exc_type=ImportError
)
mla = pytest.importorskip("sglang.srt.mem_cache.pool_host.mla", exc_type=ImportError)

PAGE, PAGES, LAYERS, HEADS, DIM = 4, 8, 3, 2, 8
SIZE = PAGE * PAGES
MHA_SHAPES = {
    "layer_first": (2, LAYERS, SIZE, HEADS, DIM),
    "page_first": (2, SIZE, LAYERS, HEADS, DIM),
    "page_first_direct": (2, PAGES, LAYERS, PAGE, HEADS, DIM),
    "page_head": (2, PAGES, HEADS, PAGE, LAYERS, DIM),
}
MLA_SHAPES = {
    "layer_first": (LAYERS, SIZE, 1, DIM),
    "page_first": (SIZE, LAYERS, 1, DIM),
    "page_first_direct": (PAGES, LAYERS, PAGE, 1, DIM),
}


def own_pool(kind: type[Any], layout: str, shape: tuple[int, ...], seed: int | None) -> Any:
    """As SGLang lays it out; made without its constructor, which allots memory by what a device has."""
    pool = object.__new__(kind)
    facts = {
        "layout": layout,
        "page_size": PAGE,
        "page_num": PAGES,
        "size": SIZE,
        "layer_num": LAYERS,
        "head_num": HEADS,
        "head_dim": DIM,
        "v_head_dim": DIM,
        "kv_cache_dim": DIM,
        "dtype": torch.bfloat16,
        "device": "cpu",
        "pin_memory": False,
        "start_layer": 0,
        "end_layer": LAYERS,
    }
    for name, value in facts.items():
        setattr(pool, name, value)
    pool.size_per_token = pool.get_size_per_token() if kind is mha.MHATokenToKVPoolHost else DIM * LAYERS * 2
    noise = torch.zeros(shape) if seed is None else torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    pool.kv_buffer = noise.to(torch.bfloat16)
    return pool


def places(*pages: int) -> Any:
    return torch.tensor([page * PAGE + token for page in pages for token in range(PAGE)], dtype=torch.int64)


CASES = [
    *((mha.MHATokenToKVPoolHost, layout, shape) for layout, shape in MHA_SHAPES.items()),
    *((mla.MLATokenToKVPoolHost, layout, shape) for layout, shape in MLA_SHAPES.items()),
]


@pytest.mark.parametrize("interface_v1", [0, 1])
@pytest.mark.parametrize(("kind", "layout", "shape"), CASES)
def test_pages_come_back_as_they_were(
    directory: DirectoryLab,
    open_storage: OpenStorage,
    kind: type[Any],
    layout: str,
    shape: tuple[int, ...],
    interface_v1: int,
) -> None:
    source, target = own_pool(kind, layout, shape, 7), own_pool(kind, layout, shape, None)
    replicated = kind is mla.MLATokenToKVPoolHost
    writer = open_storage(directory, source, {"interface_v1": interface_v1}, is_mla_model=replicated)
    reader = open_storage(directory, target, {"interface_v1": interface_v1}, is_mla_model=replicated)
    assert writer.batch_set_v1(KEYS, places(1, 2, 5, 6)) == [True] * 4
    assert reader.batch_get_v1(KEYS, places(0, 3, 6, 7)) == [True] * 4
    for old, new in ((1, 0), (2, 3), (5, 6), (6, 7)):
        assert torch.equal(target.get_data_page(new * PAGE), source.get_data_page(old * PAGE))
    assert not target.get_data_page(1 * PAGE).any()


def test_tensors_go_as_its_controller_sends_them(directory: DirectoryLab, open_storage: OpenStorage) -> None:
    kind, shape = mha.MHATokenToKVPoolHost, MHA_SHAPES["layer_first"]
    source, target = own_pool(kind, "layer_first", shape, 7), own_pool(kind, "layer_first", shape, None)
    storage = open_storage(directory, source, {"interface_v1": 0})
    assert storage.batch_set(KEYS[:2], [source.get_data_page(page * PAGE) for page in (1, 2)]) is True
    found = storage.batch_get(KEYS[:3], [target.get_dummy_flat_data_page() for _ in range(3)])
    assert found[2] is None
    for page, data in zip((4, 5), found[:2], strict=True):
        target.set_from_flat_data_page(page * PAGE, data)
        assert torch.equal(target.get_data_page(page * PAGE), source.get_data_page((page - 3) * PAGE))


@pytest.mark.parametrize("interface_v1", [0, 1])
def test_its_own_controller_backs_up_and_prefetches(
    directory: DirectoryLab, open_storage: OpenStorage, interface_v1: int
) -> None:
    """The steps of its background threads, without the threads."""
    controllers = pytest.importorskip("sglang.srt.managers.cache_controller", exc_type=ImportError)
    kind, shape = mha.MHATokenToKVPoolHost, MHA_SHAPES["page_first"]

    def controller_of(pool: Any) -> Any:
        controller = object.__new__(controllers.HiCacheController)
        controller.page_size, controller.storage_host_pool = PAGE, pool
        controller.storage_backend = open_storage(directory, pool, {"interface_v1": interface_v1})
        controller.prefetch_sync_queue = Queue()
        if interface_v1:
            controller.page_get_func = controller._page_get_zero_copy
            controller.page_set_func = controller._page_set_zero_copy
        else:
            controller.page_get_func = controller._generic_page_get
            controller.page_set_func = controller._generic_page_set
        return controller

    source, target = own_pool(kind, "page_first", shape, 7), own_pool(kind, "page_first", shape, None)
    tokens = list(range(4 * PAGE))
    backup = controllers.StorageOperation(places(1, 2, 5, 6), tokens, hash_value=KEYS)
    controller_of(source)._page_backup(backup)
    assert backup.completed_tokens == 4 * PAGE

    prefetching = controller_of(target)
    prefetch = controllers.PrefetchOperation("request", tokens)
    prefetch.hash_value, prefetch.host_indices = [*KEYS, "0" * 64], places(0, 3, 6, 7, 1)
    assert prefetching._page_transfer(prefetch) == 4
    assert prefetching.prefetch_sync_queue.get_nowait().completed_tokens == 4 * PAGE
    for old, new in ((1, 0), (2, 3), (5, 6), (6, 7)):
        assert torch.equal(target.get_data_page(new * PAGE), source.get_data_page(old * PAGE))


def test_its_own_controller_finds_what_it_has_backed_up(directory: DirectoryLab, open_storage: OpenStorage) -> None:
    controllers = pytest.importorskip("sglang.srt.managers.cache_controller", exc_type=ImportError)
    pool = own_pool(mha.MHATokenToKVPoolHost, "page_first", MHA_SHAPES["page_first"], 7)
    controller = object.__new__(controllers.HiCacheController)
    controller.page_size, controller.storage_backend = PAGE, open_storage(directory, pool)
    tokens = list(range(4 * PAGE))
    asked = controllers.PrefetchOperation("request", tokens)
    assert controller._storage_hit_query(asked) == ([], 0)
    controller.storage_backend.batch_set_v1(asked.all_hash_values[:3], places(0, 1, 2))
    found, hit_tokens = controller._storage_hit_query(controllers.PrefetchOperation("request", tokens))
    assert (found, hit_tokens) == (asked.all_hash_values[:3], 3 * PAGE)
