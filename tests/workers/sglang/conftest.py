from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from cachecore.scope import Keyring
from tests.cachecore.store.servers import BINARIES, Server, start_server
from tests.workers.sglang.interface import published_interface
from tests.workers.sglang.labs import DirectoryLab, Lab, RedisLab

OpenStorage = Callable[..., Any]
KINDS = ("directory", *sorted(BINARIES))


@pytest.fixture(scope="module")
def adapter() -> Iterator[ModuleType]:
    """`workers.sglang.hicache`."""
    with published_interface() as module:
        yield module


@pytest.fixture(scope="module")
def pool_servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Server]]:
    """By kind, started when they are asked for."""
    servers: dict[str, Server] = {}
    yield servers
    for server in servers.values():
        server.stop()


@pytest.fixture(params=KINDS)
def lab(
    request: pytest.FixtureRequest,
    pool_servers: dict[str, Server],
    tmp_path: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Lab:
    kind = request.param
    if kind == "directory":
        return DirectoryLab(tmp_path / "pool")
    if kind not in pool_servers:
        directory = tmp_path_factory.mktemp(kind)
        pool_servers[kind] = start_server(directory, binary=BINARIES[kind], persist=False)
    return RedisLab(pool_servers[kind])


@pytest.fixture
def directory(tmp_path: Path) -> DirectoryLab:
    return DirectoryLab(tmp_path / "pool")


@pytest.fixture
def keyring(tmp_path: Path) -> Path:
    path = tmp_path / "keyring.json"
    Keyring.generate().save(path)
    return path


@pytest.fixture
def open_storage(adapter: ModuleType, keyring: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[OpenStorage]:
    """Makes storages as SGLang does, registers their host pool, and closes them after the test."""
    opened = []
    monkeypatch.setattr(adapter, "_started_with", lambda: {"dtype": "bfloat16"})

    def open_storage(lab: Lab, host_pool: Any, extra: dict[str, Any] | None = None, **config: Any) -> Any:
        stated = {
            "backend_name": "ropeway",
            "module_path": "workers.sglang.hicache",
            "class_name": "RopewayHiCache",
            "interface_v1": 1,
            "pool": f"shared={lab.where}",
            "keyring": str(keyring),
            "weights": "a-model@1",
            "bytes_max": 64 << 20,
            "stall_seconds": 20.0,
            **(extra or {}),
        }
        storage = adapter.RopewayHiCache(configuration(adapter, stated, **config), {})
        opened.append(storage)
        storage.register_mem_pool_host(host_pool)
        return storage

    yield open_storage
    for storage in opened:
        storage.close()


def configuration(adapter: ModuleType, extra: dict[str, Any], **changed: Any) -> Any:
    said = {
        "tp_rank": 0,
        "tp_size": 1,
        "pp_rank": 0,
        "pp_size": 1,
        "attn_cp_rank": 0,
        "attn_cp_size": 1,
        "is_mla_model": False,
        "enable_storage_metrics": False,
        "is_page_first_layout": True,
        "model_name": "a-model",
        **changed,
    }
    return adapter.HiCacheStorageConfig(**said, extra_config=extra)
