"""What SGLang loads, and the only module here that imports it.

    --enable-hierarchical-cache --hicache-storage-backend dynamic --hicache-storage-backend-extra-config
      '{"backend_name": "ropeway", "module_path": "workers.sglang.hicache", "class_name": "RopewayHiCache",
        "interface_v1": 1, "pool": "shared=dir:/mnt/kv", "keyring": "...", "weights": "..."}'

SGLang makes one in each rank's scheduler. What is configured wrongly raises there, so the server does not start; from
then on nothing raises (`guarded`): whatever goes wrong is a miss, which is computed, or a page that is not stored.

The interface has three generations: tensors (`get`, `set` and their batches), pages in host memory (`_v1`), and pages
of several pools beside each other (`_v2`), for models whose cache is more than keys and values.
"""

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import sglang
from sglang.srt.mem_cache.hicache_storage import (
    HiCacheStorage,
    HiCacheStorageConfig,
    HiCacheStorageExtraInfo,
    PoolTransfer,
    PoolTransferResult,
)
from sglang.srt.runtime_context import get_model

from cachecore.scope import KeyId, Keyring, TenantId
from workers.guarded import guarded
from workers.sglang.memory import FlatTensor
from workers.sglang.namespaces import KV, Deployment
from workers.sglang.pages import Beside, PoolPages, usable
from workers.sglang.settings import Settings, SettingsError, read_settings
from workers.sglang.store import PageStore

_STARTED_WITH = ("dtype", "quantization", "kv_cache_dtype", "json_model_override_args")
"""Of what SGLang was started with: what makes other KV of the same weights."""
_BLOCK_GROUPS = "block_groups"
"""A second form of pages that are there anyway: it never decides on a hit, and goes unanswered here."""


class RopewayHiCache(HiCacheStorage):  # type: ignore[misc]
    """See the module's opening. Raises SettingsError when it is made for what it cannot do."""

    def __init__(self, storage_config: HiCacheStorageConfig, _options: Mapping[str, Any] | None = None) -> None:
        extra = dict(storage_config.extra_config or {})
        settings = read_settings(extra)
        self._deployment, self._keyring = _deployment(storage_config, settings), _keyring(settings)
        self._as_tensors = not extra.get("interface_v1", 0)
        """Which generation SGLang moves keys and values by."""
        self._pools: dict[str, PoolPages] = {}
        bounds = {"reads": settings.reads, "writes": settings.writes}
        self._store = PageStore(settings.open_pool(), self._keyring, **bounds, stall_seconds=settings.stall_seconds)
        _log_as_sglang_does()
        self._store.start()

    def __repr__(self) -> str:
        return f"RopewayHiCache({', '.join(self._pools)}; {self._store!r})"

    @property
    def counts(self) -> Mapping[str, int]:
        """Pages so far, by what became of them."""
        return self._store.counts

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        super().register_mem_pool_host(mem_pool_host)
        self._pools[KV] = self._pages_of(mem_pool_host, KV, self._as_tensors)

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        super().register_mem_host_pool_v2(host_pool, host_pool_name)
        name = str(host_pool_name)
        if name != KV:  # which has been registered, and moves as it was told there
            self._pools[name] = self._pages_of(host_pool, name, flat=False)

    def close(self) -> None:
        self._store.close()

    @guarded(False)
    def clear(self) -> bool:
        """This rank's pages; whatever else is in the pool is others'."""
        return self._store.clear({each for pages in self._pools.values() for each in pages.classes})

    # ---- keys and values ---------------------------------------------------------------------------------------------

    def exists(self, key: str) -> bool:
        return self.batch_exists([key]) == 1

    @guarded(0)
    def batch_exists(self, keys: list[str], extra_info: HiCacheStorageExtraInfo | None = None) -> int:
        return self._pools[KV].present(keys)

    def batch_get_v1(
        self, keys: list[str], host_indices: Any, extra_info: HiCacheStorageExtraInfo | None = None
    ) -> list[bool]:
        return _flags(self._read(KV, keys, host_indices), len(keys))

    def batch_set_v1(
        self, keys: list[str], host_indices: Any, extra_info: HiCacheStorageExtraInfo | None = None
    ) -> list[bool]:
        return _flags(self._write(KV, keys, host_indices), len(keys))

    def get(self, key: str, target_location: Any | None = None, target_sizes: Any | None = None) -> Any | None:
        return self.batch_get([key], [target_location])[0]

    def batch_get(
        self, keys: list[str], target_locations: Any | None = None, target_sizes: Any | None = None
    ) -> list[Any | None]:
        targets = list(target_locations or [])
        found = self._read_tensors(keys, targets)
        return targets[:found] + [None] * (len(keys) - found)

    def set(
        self, key: str, value: Any | None = None, target_location: Any | None = None, target_sizes: Any | None = None
    ) -> bool:
        return self.batch_set([key], [value])

    def batch_set(
        self,
        keys: list[str],
        values: Any | None = None,
        target_locations: Any | None = None,
        target_sizes: Any | None = None,
    ) -> bool:
        return self._write_tensors(keys, list(values or [])) == len(keys)

    # ---- several pools -----------------------------------------------------------------------------------------------

    def batch_exists_v2(
        self,
        keys: list[str],
        pool_transfers: list[PoolTransfer] | None = None,
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> PoolTransferResult:
        result = self._usable(keys, pool_transfers or [])
        return result if result is not None else PoolTransferResult(0, {}, [])

    def batch_get_v2(
        self, transfers: list[PoolTransfer], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> dict[str, list[bool]]:
        return {each.name: _flags(self._read(each.name, *_asked(each)), len(each.keys or [])) for each in transfers}

    def batch_set_v2(
        self, transfers: list[PoolTransfer], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> dict[str, list[bool]]:
        return {each.name: _flags(self._write(each.name, *_asked(each)), len(each.keys or [])) for each in transfers}

    # ---- steps that may fail -----------------------------------------------------------------------------------------

    @guarded(None)
    def _usable(self, keys: list[str], transfers: Sequence[PoolTransfer]) -> PoolTransferResult | None:
        beside = {
            each.name: Beside(self._pools[str(each.name)], str(each.hit_policy.value), len(each.keys or []) or 1)
            for each in transfers
            if each.hit_policy.value != _BLOCK_GROUPS
        }
        found = usable(self._pools[KV], KV, keys, beside)
        return PoolTransferResult(found.pages, dict(found.by_pool), found.lengths)

    @guarded(0)
    def _read(self, pool_name: Any, keys: Sequence[str], host_indices: Any) -> int:
        return self._pools[str(pool_name)].read(keys, host_indices)

    @guarded(0)
    def _write(self, pool_name: Any, keys: Sequence[str], host_indices: Any) -> int:
        return self._pools[str(pool_name)].write(keys, host_indices)

    @guarded(0)
    def _read_tensors(self, keys: Sequence[str], targets: Sequence[FlatTensor]) -> int:
        return self._pools[KV].read_tensors(keys, targets)

    @guarded(0)
    def _write_tensors(self, keys: Sequence[str], values: Sequence[FlatTensor]) -> int:
        return self._pools[KV].write_tensors(keys, values)

    def _pages_of(self, host_pool: Any, pool_name: str, flat: bool) -> PoolPages:
        return PoolPages(host_pool, pool_name, self._deployment, self._keyring, self._store, flat)


def _flags(leading: int, count: int) -> list[bool]:
    return [number < leading for number in range(count)]


def _asked(transfer: PoolTransfer) -> tuple[Sequence[str], Any]:
    return transfer.keys or [], transfer.host_indices


def _keyring(settings: Settings) -> Keyring:
    try:
        return Keyring.load(Path(settings.keyring))
    except ValueError as error:
        raise SettingsError(str(error)) from None


def _deployment(config: HiCacheStorageConfig, settings: Settings) -> Deployment:
    try:
        tenant = KeyId(TenantId(settings.tenant), 0).tenant
    except ValueError as error:
        raise SettingsError(str(error)) from None
    return Deployment(config, settings.weights, tenant, str(sglang.__version__), _started_with())


def _started_with() -> dict[str, str]:
    """Raises SettingsError where SGLang does not say: pages of unknown KV are shared with nobody."""
    try:
        said = get_model()
        return {name: str(getattr(said, name)) for name in _STARTED_WITH}
    except (AttributeError, ValueError) as error:
        raise SettingsError(f"SGLang {sglang.__version__} does not say what it was started with: {error}") from None


def _log_as_sglang_does() -> None:
    """What is said here is seen where SGLang's own words are."""
    ours, theirs = logging.getLogger("ropeway"), logging.getLogger("sglang")
    if not ours.handlers and theirs.handlers:
        ours.handlers, ours.propagate = list(theirs.handlers), theirs.propagate
        ours.setLevel(theirs.level)
