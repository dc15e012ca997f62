"""An import may follow an arrow of the plan and nothing else. Each rule is shown to bite on a house that breaks it."""

import sys
import tomllib
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

LEAVES = {"cachecore", "policies"}
ARROWS = {
    "ropeway": {"gateway", "workers", "loadtest"},
    "gateway": LEAVES,
    "workers": LEAVES,
    "loadtest": LEAVES,
    "cachecore": set(),
    "policies": set(),
}
ROOMS = set(ARROWS)
EXCEPTIONS = {("loadtest", "workers.timing")}

BELOW_THE_ENGINES = {"workers.transfer": {"workers.reference", "workers.simulated", "workers.sglang", "workers.vllm"}}
"""What engines share knows none of them."""

TENSOR_ROOMS = ("cachecore/kv/", "workers/reference/", "workers/transfer/", "workers/vllm/")
STORE_ROOMS = ("cachecore/store/", "cachecore/index/")
CONFINED = {
    "torch": TENSOR_ROOMS,
    "hiredis": ("cachecore/store/",),
    "obstore": ("cachecore/store/",),
    "redis": STORE_ROOMS,
    "valkey": STORE_ROOMS,
    "boto3": STORE_ROOMS,
    "fsspec": STORE_ROOMS,
}
HTTP = {"aiohttp", "fastapi", "h11", "httptools", "httpx", "requests", "starlette", "uvicorn"}
NOT_FOR_POLICIES = (
    {"asyncio", "datetime", "http", "io", "logging", "multiprocessing", "os", "pathlib", "secrets", "select", "shutil"}
    | {"socket", "sqlite3", "ssl", "subprocess", "sys", "tempfile", "threading", "time", "urllib", "uuid"}
)  # fmt: skip
PURE_FILES = {"cachecore/blocks.py", "cachecore/scope.py"}
IMPORT_NAMES = {
    "pyyaml": {"yaml"},
    "pyzmq": {"zmq"},
    "fastapi": {"fastapi", "starlette"},
    "grpcio": {"grpc"},
    "xds-protos": {"envoy", "google"},
    "opentelemetry-sdk": {"opentelemetry"},
}


def top(dotted: str) -> str:
    return dotted.partition(".")[0]


def is_below(name: str, parent: str) -> bool:
    return name == parent or name.startswith(f"{parent}.")


def wrong_arrows(house) -> list[str]:
    return [
        f"{module.path}:{found.line} imports {found.module}"
        for module in house
        for found in module.imports()
        if top(found.module) in ROOMS - {module.room} - ARROWS[module.room]
        and not any(module.room == room and is_below(found.module, name) for room, name in EXCEPTIONS)
    ]


def upward(house) -> list[str]:
    return [
        f"{module.path}:{found.line} imports {found.module}"
        for room, engines in BELOW_THE_ENGINES.items()
        for module in house
        if is_below(module.name, room)
        for found in module.imports()
        if any(is_below(found.module, engine) for engine in engines)
    ]


def unconfined(house) -> list[str]:
    return [
        f"{module.path}:{found.line} imports {found.module}"
        for module in house
        for found in module.imports()
        if not module.path.startswith(CONFINED.get(top(found.module), ("",)))
    ]


def http_in_the_core(house) -> list[str]:
    return [
        f"{module.path}:{found.line} imports {found.module}"
        for module in house
        for found in module.imports()
        if module.room in LEAVES and top(found.module) in HTTP
    ]


def impure_policies(house) -> list[str]:
    return [
        f"{module.path}:{found.line} imports {found.module}"
        for module in house
        if module.room == "policies"
        for found in module.imports()
        if (top(found.module) not in sys.stdlib_module_names | {"policies"})
        or top(found.module) in NOT_FOR_POLICIES
        or (top(found.module) == "random" and found.module != "random.Random")
    ]


def cycle(house) -> list[str]:
    names = {module.name for module in house}
    graph = {module.name: set() for module in house}
    for module in house:
        for found in module.imports():
            target = found.module if found.module in names else found.module.rpartition(".")[0]
            if found.eager and target in names and target != module.name:
                graph[module.name].add(target)
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return error.args[1]
    return []


def undeclared(house, pyproject: Path) -> list[str]:
    """Third-party imports that an installation without extras (or with its own, for the rooms of torch and a few files)
    would miss."""
    project = tomllib.loads(pyproject.read_text())["project"]
    core = _modules(project["dependencies"])
    extras = {name: _modules(listed) for name, listed in project["optional-dependencies"].items()}
    own = [
        (TENSOR_ROOMS, extras["worker"] | {"vllm"}),
        (("workers/sglang/",), {"sglang"}),
        (("cachecore/store/pools/s3.py",), extras.get("s3", set())),
        (("gateway/envoy/server.py",), extras.get("envoy", set())),
        (("gateway/tracing.py", "gateway/journey.py"), extras.get("otel", set())),
        # Which is nothing without gevent.
        (("loadtest/locustfile.py",), extras.get("loadtest", set()) | {"gevent"}),
    ]
    return [
        f"{module.path}:{found.line} imports {found.module}"
        for module in house
        for found in module.imports()
        if top(found.module) not in sys.stdlib_module_names | ROOMS | core
        and not any(module.path.startswith(paths) and top(found.module) in modules for paths, modules in own)
    ]


def _modules(requirements: list[str]) -> set[str]:
    names = [requirement.partition(">")[0].partition("=")[0].strip() for requirement in requirements]
    return {module for name in names for module in IMPORT_NAMES.get(name, {name.replace("-", "_")})}


def test_imports_follow_the_arrows(house) -> None:
    assert {module.room for module in house} == ROOMS
    assert wrong_arrows(house) == []


def test_what_engines_share_knows_no_engine(house) -> None:
    assert any(is_below(module.name, "workers.transfer") for module in house)
    assert upward(house) == []


def test_torch_and_stores_stay_in_their_rooms(house) -> None:
    assert unconfined(house) == []


def test_the_core_knows_no_http(house) -> None:
    assert http_in_the_core(house) == []


def test_policies_are_pure(house) -> None:
    assert impure_policies(house) == []


def test_identity_needs_the_standard_library_alone(house) -> None:
    pure = [module for module in house if module.path in PURE_FILES]
    assert len(pure) == len(PURE_FILES)
    outside = {top(found.module) for module in pure for found in module.imports()} - sys.stdlib_module_names
    assert outside <= {"cachecore"}


def test_there_is_no_import_cycle(house) -> None:
    assert cycle(house) == []


def test_what_is_imported_is_declared(house, repository) -> None:
    assert undeclared(house, repository / "pyproject.toml") == []


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("gateway/a.py", "import workers.engine"),
        ("gateway/a.py", "def late():\n    from workers import engine"),
        (
            "gateway/edge/a.py",
            "from importlib import import_module\nimport importlib\nimportlib.import_module('workers.cli')",
        ),
        ("workers/a.py", "from gateway.errors import StartupError"),
        ("loadtest/a.py", "from workers.engine import Engine"),
        ("cachecore/a.py", "from policies import contract"),
        ("policies/a.py", "import cachecore"),
        ("policies/a.py", "import ropeway"),
        ("ropeway.py", "import cachecore.blocks"),
    ],
)
def test_a_wrong_arrow_is_found(build, path: str, source: str) -> None:
    assert len(wrong_arrows(build({path: source}))) == 1


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("gateway/a.py", "from cachecore.blocks import Chain\nimport policies.contract"),
        ("gateway/edge/a.py", "from ..errors import StartupError\nfrom . import parser"),
        ("loadtest/a.py", "from workers.timing import Timing\nfrom workers import timing"),
        ("ropeway.py", "import gateway.cli, workers.cli"),
    ],
)
def test_a_right_arrow_is_allowed(build, path: str, source: str) -> None:
    assert wrong_arrows(build({path: source})) == []


@pytest.mark.parametrize(
    ("path", "source", "count"),
    [
        ("workers/transfer/a.py", "from workers.reference.config import ModelConfig", 1),
        ("workers/transfer/a.py", "def late():\n    import workers.vllm.names", 1),
        ("workers/transfer/inner/a.py", "from ...simulated import cache", 1),
        ("workers/transfer/a.py", "from workers.engine import Engine\nfrom . import loads", 0),
        ("workers/vllm/a.py", "from workers.transfer.loads import Load", 0),
    ],
)
def test_an_import_of_an_engine_from_below_is_found(build, path: str, source: str, count: int) -> None:
    assert len(upward(build({path: source}))) == count


@pytest.mark.parametrize(
    ("path", "source", "count"),
    [
        ("gateway/a.py", "import torch.nn", 1),
        ("workers/simulated/a.py", "from torch import Tensor", 1),
        ("cachecore/kv/a.py", "import torch", 0),
        ("workers/reference/a.py", "import torch", 0),
        ("gateway/a.py", "import redis.asyncio", 1),
        ("cachecore/index/a.py", "import redis.asyncio", 0),
    ],
)
def test_what_is_confined_is_found_outside(build, path: str, source: str, count: int) -> None:
    assert len(unconfined(build({path: source}))) == count


@pytest.mark.parametrize(
    ("source", "count"),
    [
        ("import numpy", 1),
        ("import time", 1),
        ("from logging import getLogger", 1),
        ("import random", 1),
        ("from random import choice", 1),
        ("from random import Random", 0),
        ("from math import exp\nfrom policies.contract import Query", 0),
    ],
)
def test_an_impure_policy_is_found(build, source: str, count: int) -> None:
    assert len(impure_policies(build({"policies/a.py": source}))) == count


def test_a_cycle_is_found_and_a_late_import_is_none(build) -> None:
    late = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import gateway.a\ndef f():\n    import gateway.a"
    assert cycle(build({"gateway/a.py": "import gateway.b", "gateway/b.py": late})) == []
    assert cycle(build({"gateway/a.py": "from gateway import b", "gateway/b.py": "from gateway.a import x"}))


def test_an_undeclared_import_is_found(build, repository) -> None:
    sources = {"gateway/a.py": "import yaml, zmq, safetensors", "workers/reference/a.py": "import safetensors"}
    assert len(undeclared(build(sources), repository / "pyproject.toml")) == 1
