"""Pools beside each other (`_v2`): a prefix is restored where all of them have what it needs, and nowhere else."""

import sys
from typing import Any

import pytest

from tests.workers.sglang.conftest import OpenStorage
from tests.workers.sglang.hostpools import HostPool, Indices, Logical, content
from tests.workers.sglang.labs import DirectoryLab
from tests.workers.sglang.test_hicache import KEYS, filled


@pytest.fixture
def published(adapter: Any) -> Any:
    """The interface's own module, whose types callers use."""
    return sys.modules["sglang.srt.mem_cache.hicache_storage"]


class Caller:
    """As SGLang's controller of hybrid caches asks."""

    def __init__(self, published: Any, storage: Any) -> None:
        self._types = published
        self._storage = storage

    def beside(self, name: str, pool: Any) -> None:
        self._storage.register_mem_host_pool_v2(pool, self._types.PoolName(name))

    def transfer(self, name: str, keys: list[str], places: Indices | None = None, policy: str = "all_pages") -> Any:
        policy = self._types.PoolHitPolicy(policy)
        return self._types.PoolTransfer(self._types.PoolName(name), places, keys=keys, hit_policy=policy)

    def set(self, name: str, keys: list[str], places: Indices) -> list[bool]:
        (flags,) = self._storage.batch_set_v2([self.transfer(name, keys, places)]).values()
        return flags  # type: ignore[no-any-return]

    def get(self, name: str, keys: list[str], places: Indices) -> list[bool]:
        (flags,) = self._storage.batch_get_v2([self.transfer(name, keys, places)]).values()
        return flags  # type: ignore[no-any-return]

    def exists(self, *transfers: Any) -> tuple[int, dict[str, int], list[int] | None]:
        found = self._storage.batch_exists_v2(KEYS, list(transfers))
        hits = {str(name): pages for name, pages in found.extra_pool_hit_pages.items()}
        return found.kv_hit_pages, hits, found.restorable_prefix_pages


@pytest.fixture
def storage(directory: DirectoryLab, open_storage: OpenStorage) -> Any:
    """One that has all four pages of KV."""
    source = filled()
    storage = open_storage(directory, source)
    storage.batch_set_v1(KEYS, source.places(0, 1, 2, 3))
    return storage


@pytest.fixture
def caller(published: Any, storage: Any) -> Caller:
    return Caller(published, storage)


def test_each_pool_has_its_own_pages_under_the_same_names(
    caller: Caller, storage: Any, directory: DirectoryLab
) -> None:
    indexer = HostPool(layout="page_first", halves=1, layer_num=1)
    caller.beside("indexer", indexer)
    indexer.write(0, "i0")
    indexer.write(1, "i1")
    assert caller.set("indexer", KEYS[:2], indexer.places(0, 1)) == [True, True]
    assert directory.stored() == 6
    assert caller.get("indexer", KEYS[:3], indexer.places(7, 8, 9)) == [True, True, False]
    assert [indexer.read(page) for page in (7, 8)] == [content(each, indexer.page_bytes) for each in ("i0", "i1")]


def test_all_pages_must_be_there_where_all_count(caller: Caller) -> None:
    indexer = HostPool(layout="layer_first", halves=1)
    caller.beside("indexer", indexer)
    caller.set("indexer", [KEYS[0], KEYS[1], KEYS[3]], indexer.places(0, 1, 3))
    assert caller.exists(caller.transfer("indexer", KEYS)) == (2, {"kv": 4, "indexer": 2}, [1, 2])


def test_only_the_last_pages_must_be_there_where_only_they_count(caller: Caller) -> None:
    state, window = HostPool(layout="page_first", halves=1, page_size=1), HostPool(layout="page_first")
    caller.beside("mamba", state)
    caller.beside("swa", window)
    caller.set("mamba", [KEYS[0], KEYS[2]], state.places(0, 2))
    caller.set("swa", [KEYS[0], *KEYS[2:]], window.places(0, 2, 3))
    mamba = caller.transfer("mamba", KEYS[:1], policy="trailing_pages")
    swa = caller.transfer("swa", KEYS[:2], policy="trailing_pages")
    assert caller.exists(mamba) == (3, {"kv": 4, "mamba": 3}, [1, 3])
    assert caller.exists(swa) == (4, {"kv": 4, "swa": 4}, [1, 4])
    assert caller.exists(mamba, swa) == (1, {"kv": 4, "mamba": 3, "swa": 4}, [1])


def test_what_is_nowhere_ends_the_question(caller: Caller) -> None:
    caller.beside("indexer", HostPool(halves=1))
    caller.beside("swa", HostPool())
    transfers = [caller.transfer("indexer", KEYS), caller.transfer("swa", KEYS, policy="trailing_pages")]
    assert caller.exists(*transfers) == (0, {"kv": 4}, [])


def test_a_pool_of_which_nothing_is_known_restores_nothing(
    caller: Caller, storage: Any, caplog: pytest.LogCaptureFixture
) -> None:
    assert caller.exists(caller.transfer("mamba", KEYS[:1])) == (0, {}, [])
    assert caller.get("mamba", KEYS[:2], Indices(range(8))) == [False, False]
    assert caller.set("mamba", KEYS[:2], Indices(range(8))) == [False, False]
    assert "the engine goes on without it" in caplog.text


def test_a_second_form_of_the_pages_decides_nothing(caller: Caller) -> None:
    assert caller.exists(caller.transfer("swa", KEYS, policy="block_groups")) == (4, {"kv": 4}, [1, 2, 3, 4])


def test_places_that_do_not_fit_are_a_miss(caller: Caller) -> None:
    pool = HostPool(halves=1)
    caller.beside("indexer", pool)
    assert caller.set("indexer", KEYS[:2], pool.places(0)) == [False, False]


def test_where_keys_and_values_have_no_memory_those_beside_decide(
    directory: DirectoryLab, open_storage: OpenStorage, published: Any
) -> None:
    storage = open_storage(directory, Logical())
    caller, compressed = Caller(published, storage), HostPool(halves=1)
    caller.beside("indexer", compressed)
    caller.set("indexer", KEYS[:3], compressed.places(0, 1, 2))
    assert caller.exists(caller.transfer("indexer", KEYS)) == (3, {"kv": 4, "indexer": 3}, [1, 2, 3])


@pytest.mark.parametrize(("name", "shared"), [("mamba", False), ("indexer", True)])
def test_ranks_share_what_is_the_same_on_each(
    directory: DirectoryLab, open_storage: OpenStorage, published: Any, name: str, shared: bool
) -> None:
    pool, ranks = HostPool(halves=1), []
    for rank in (0, 1):
        storage = open_storage(directory, HostPool(halves=1), tp_rank=rank, tp_size=2, is_mla_model=True)
        ranks.append(Caller(published, storage))
        ranks[rank].beside(name, pool)
    assert ranks[0].set(name, KEYS[:1], pool.places(0)) == [True]
    assert ranks[1].get(name, KEYS[:1], pool.places(1)) == [shared]


def test_the_pool_of_keys_and_values_stays_as_it_was_registered(
    directory: DirectoryLab, open_storage: OpenStorage, published: Any
) -> None:
    source = filled()
    storage = open_storage(directory, source, {"interface_v1": 0})
    storage.batch_set(KEYS[:1], [source.get_data_page(0)])
    Caller(published, storage).beside("kv", source)
    assert storage.batch_exists(KEYS) == 1
