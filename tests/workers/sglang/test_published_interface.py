"""Our stand-in for SGLang's interface, and our class, beside the interface itself; skipped where that is missing."""

import inspect
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.workers.sglang import interface
from tests.workers.sglang.conftest import configuration
from tests.workers.sglang.hostpools import HostPool
from tests.workers.sglang.labs import DirectoryLab

published = pytest.importorskip(
    "sglang.srt.mem_cache.hicache_storage", reason="SGLang is not installed: pip install sglang", exc_type=ImportError
)


def parameters(function: Any) -> list[tuple[str, bool]]:
    """Names, and whether they may be left out."""
    return [
        (each.name, each.default is not inspect.Parameter.empty)
        for each in inspect.signature(function).parameters.values()
    ]


METHODS = [name for name in vars(interface.HiCacheStorage) if not name.startswith("_")]


@pytest.mark.parametrize("name", METHODS)
def test_the_stand_in_takes_what_the_interface_takes(name: str) -> None:
    theirs = getattr(published.HiCacheStorage, name)
    assert parameters(getattr(interface.HiCacheStorage, name)) == parameters(theirs)


def test_nothing_of_the_interface_is_missing() -> None:
    theirs = {name for name in vars(published.HiCacheStorage) if not name.startswith("_")}
    assert theirs == set(METHODS)
    assert published.HiCacheStorage.__abstractmethods__ == interface.HiCacheStorage.__abstractmethods__


@pytest.mark.parametrize("name", METHODS)
def test_our_class_takes_what_the_interface_takes(adapter: Any, name: str) -> None:
    assert parameters(getattr(adapter.RopewayHiCache, name)) == parameters(getattr(published.HiCacheStorage, name))


@pytest.mark.parametrize(
    "name", ["HiCacheStorageConfig", "HiCacheStorageExtraInfo", "PoolTransfer", "PoolTransferResult"]
)
def test_its_documents_have_the_same_fields(name: str) -> None:
    assert parameters(getattr(interface, name)) == parameters(getattr(published, name))


@pytest.mark.parametrize("name", ["PoolHitPolicy", "PoolName"])
def test_its_words_are_the_same(name: str) -> None:
    ours = {each.name: each.value for each in getattr(interface, name)}
    assert ours.items() <= {each.name: each.value for each in getattr(published, name)}.items()


def test_sglang_makes_one_by_name(adapter: Any, tmp_path: Path, keyring: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    factory = pytest.importorskip("sglang.srt.mem_cache.storage.backend_factory").StorageBackendFactory
    monkeypatch.setattr(adapter, "get_model", lambda: interface.STARTED_WITH)
    extra = {
        "backend_name": "ropeway",
        "module_path": "workers.sglang.hicache",
        "class_name": "RopewayHiCache",
        "interface_v1": 1,
        "pool": f"shared={DirectoryLab(tmp_path / 'pool').where}",
        "keyring": str(keyring),
        "weights": "a@1",
    }
    pool = HostPool()
    pool.write(0, "x")
    storage = factory.create_backend("dynamic", configuration(adapter, extra), pool)
    try:
        storage.register_mem_pool_host(pool)
        storage.on_host_pools_registered()
        assert storage.batch_set_v1(["0" * 64], pool.places(0)) == [True]
        assert storage.batch_exists(["0" * 64, "1" * 64]) == 1
        assert storage.batch_get_v1(["0" * 64], pool.places(5)) == [True]
        assert pool.read(5) == pool.read(0)
    finally:
        storage.close()


def test_what_it_was_started_with_is_asked_of_sglang(adapter: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    said = SimpleNamespace(dtype="auto", quantization="fp8", kv_cache_dtype="fp8_e5m2", json_model_override_args="{}")
    monkeypatch.setattr(adapter, "get_model", lambda: said)
    assert adapter._started_with()["kv_cache_dtype"] == "fp8_e5m2"
