"""SGLang's storage interface as it is published (0.5.23), for machines without SGLang: signatures, types, nothing else.

Written from `sglang/srt/mem_cache/hicache_storage.py` and `storage/backend_factory.py`. Where the package itself is
installed, `test_published_interface.py` compares the two.
"""

import importlib
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace
from typing import Any

MODULES = (
    "sglang",
    "sglang.srt",
    "sglang.srt.mem_cache",
    "sglang.srt.mem_cache.hicache_storage",
    "sglang.srt.runtime_context",
)
ADAPTER = "workers.sglang.hicache"


@dataclass
class HiCacheStorageConfig:
    tp_rank: int
    tp_size: int
    pp_rank: int
    pp_size: int
    attn_cp_rank: int
    attn_cp_size: int
    is_mla_model: bool
    enable_storage_metrics: bool
    is_page_first_layout: bool
    model_name: str | None
    tp_lcm_size: int | None = None
    should_split_heads: bool = False
    dp_rank: int = 0
    extra_config: dict[str, Any] | None = None
    dcp_size: int = 1
    dcp_rank: int = 0
    logical_page_size: int | None = None


@dataclass
class HiCacheStorageExtraInfo:
    prefix_keys: list[str] | None = None
    extra_info: dict[str, Any] | None = None


class PoolName(StrEnum):
    KV = "kv"
    MAMBA = "mamba"
    SWA = "swa"
    INDEXER = "indexer"


class PoolHitPolicy(StrEnum):
    ALL_PAGES = "all_pages"
    TRAILING_PAGES = "trailing_pages"
    BLOCK_GROUPS = "block_groups"


@dataclass
class PoolTransfer:
    name: PoolName
    host_indices: Any = None
    device_indices: Any = None
    keys: list[str] | None = None
    hit_policy: PoolHitPolicy = PoolHitPolicy.ALL_PAGES
    nodes_to_load: list[Any] | None = None
    indices_from_pool: PoolName | None = None
    block_pages: int = 0
    group_pages: int = 0


@dataclass
class PoolTransferResult:
    kv_hit_pages: int
    extra_pool_hit_pages: dict[str, int]
    restorable_prefix_pages: list[int] | None = None


class HiCacheStorage(ABC):
    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        self.mem_pool_host = mem_pool_host

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        if not hasattr(self, "registered_pools"):
            self.registered_pools: dict[Any, Any] = {}
        self.registered_pools[host_pool_name] = host_pool

    def on_host_pools_registered(self) -> None:
        return

    def batch_exists_v2(self, keys: Any, pool_transfers: Any = None, extra_info: Any = None) -> Any:
        raise NotImplementedError

    def batch_get_v2(self, transfers: Any, extra_info: Any = None) -> Any:
        raise NotImplementedError

    def batch_set_v2(self, transfers: Any, extra_info: Any = None) -> Any:
        raise NotImplementedError

    def batch_get_v1(self, keys: Any, host_indices: Any, extra_info: Any = None) -> Any:
        return None

    def batch_set_v1(self, keys: Any, host_indices: Any, extra_info: Any = None) -> Any:
        return None

    @abstractmethod
    def get(self, key: Any, target_location: Any = None, target_sizes: Any = None) -> Any: ...

    @abstractmethod
    def batch_get(self, keys: Any, target_locations: Any = None, target_sizes: Any = None) -> Any: ...

    @abstractmethod
    def set(self, key: Any, value: Any = None, target_location: Any = None, target_sizes: Any = None) -> Any: ...

    @abstractmethod
    def batch_set(
        self, keys: Any, values: Any = None, target_locations: Any = None, target_sizes: Any = None
    ) -> Any: ...

    @abstractmethod
    def exists(self, key: Any) -> Any: ...

    def batch_exists(self, keys: Any, extra_info: Any = None) -> Any:
        return 0

    def clear(self) -> None:
        return

    def get_stats(self) -> Any:
        return None


@contextmanager
def published_interface() -> Iterator[ModuleType]:
    """The adapter's module, over SGLang's own interface where that is installed, and over this one elsewhere."""
    try:
        importlib.import_module("sglang.srt.mem_cache.hicache_storage")
        stood_in = ()
    except ImportError:
        stood_in = MODULES
        for name in MODULES:
            sys.modules[name] = _module(name)
    try:
        yield importlib.import_module(ADAPTER)
    finally:
        for name in (*stood_in, ADAPTER):
            sys.modules.pop(name, None)


def _module(name: str) -> ModuleType:
    module = ModuleType(name)
    module.__spec__ = ModuleSpec(name, None, is_package=True)
    module.__path__ = []
    if name == "sglang":
        module.__version__ = "0.5.23"  # type: ignore[attr-defined]
    if name.endswith("hicache_storage"):
        for each in (
            *(HiCacheStorage, HiCacheStorageConfig, HiCacheStorageExtraInfo),
            *(PoolHitPolicy, PoolName, PoolTransfer, PoolTransferResult),
        ):
            setattr(module, each.__name__, each)
    if name.endswith("runtime_context"):
        module.get_model = lambda: STARTED_WITH  # type: ignore[attr-defined]
    return module


STARTED_WITH = SimpleNamespace(
    dtype="bfloat16", quantization=None, kv_cache_dtype="auto", json_model_override_args="{}"
)
