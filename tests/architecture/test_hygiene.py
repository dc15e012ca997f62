"""What is deliberately absent, and what files may look like."""

import ast
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

LINES_MAX = 700
UNSAFE_MODULES = {"pickle", "cPickle", "dill", "cloudpickle", "joblib", "marshal", "shelve", "jsonpickle"}
UNSAFE_CALLS = {"eval", "exec", "compile", "__import__"}

TENSOR_ROOMS = ("cachecore.kv", "workers.reference", "workers.transfer", "workers.vllm")
WITHIN_SGLANG = "workers.sglang.hicache"
WITHIN_EXTRAS = ("gateway.envoy.server", "gateway.tracing")
"""Of which each is loaded where a setting asks for it."""
"""Loaded by SGLang, which is no dependency."""


def unsafe_imports(modules) -> list[str]:
    return [
        f"{module.path}:{name.line} imports {name.module}"
        for module in modules
        for name in module.imports()
        if name.module.partition(".")[0] in UNSAFE_MODULES
    ]


def unsafe(house) -> list[str]:
    return unsafe_imports(house) + [
        f"{module.path}:{line} {what}" for module in house for line, what in _unsafe_nodes(module.tree)
    ]


def _unsafe_nodes(tree: ast.Module) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        match node:
            case ast.Call(func=ast.Name(id=name)) if name in UNSAFE_CALLS:
                yield node.lineno, f"calls {name}"
            case ast.Attribute(value=ast.Name(id="torch"), attr="load"):
                yield node.lineno, "uses torch.load"
            case ast.keyword(arg="allow_pickle", value=ast.Constant(value=True)):
                yield node.lineno, "allows pickle"
            case ast.Global():
                yield node.lineno, "writes module state"


def too_long(paths: list[Path]) -> list[str]:
    lengths = {path: len(path.read_text().splitlines()) for path in paths}
    return [f"{path}: {lines} lines" for path, lines in lengths.items() if lines > LINES_MAX]


def test_nothing_unsafe(house) -> None:
    assert unsafe(house) == []


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from marshal import loads",
        "eval('1')",
        "import torch\ntorch.load('x')",
        "import numpy\nnumpy.load('x', allow_pickle=True)",
        "state = None\ndef f():\n    global state\n    state = 1",
    ],
)
def test_what_is_unsafe_is_found(build, source: str) -> None:
    assert len(unsafe(build({"gateway/a.py": source}))) == 1


def test_tests_unpickle_nothing_either(build, tests) -> None:
    assert len(unsafe_imports(build({"gateway/a.py": "import pickle"}))) == 1
    assert unsafe_imports(tests) == []


def test_methods_that_share_a_name_are_safe(build) -> None:
    assert unsafe(build({"workers/a.py": "import re\nmodel.eval()\nre.compile('x')"})) == []


def test_no_file_is_too_long(house, repository: Path) -> None:
    tests = sorted((repository / "tests").rglob("*.py"))
    assert too_long([repository / module.path for module in house] + tests) == []


def test_a_file_that_is_too_long_is_found(tmp_path: Path) -> None:
    path = tmp_path / "a.py"
    path.write_text("\n" * (LINES_MAX + 1))
    assert too_long([path]) == [f"{path}: {LINES_MAX + 1} lines"]


def test_no_package_under_tests(repository: Path) -> None:
    """`tests/policies/__init__.py` would make `import policies` find the tests."""
    assert sorted((repository / "tests").rglob("__init__.py")) == []


def test_everything_but_the_tensor_rooms_loads_without_the_worker_extra(house, repository: Path) -> None:
    names = [
        module.name for module in house if not module.name.startswith((*TENSOR_ROOMS, WITHIN_SGLANG, *WITHIN_EXTRAS))
    ]
    project = tomllib.loads((repository / "pyproject.toml").read_text())["project"]
    base = {_distribution(requirement) for requirement in project["dependencies"]}
    extra = {_distribution(requirement) for requirement in project["optional-dependencies"]["worker"]} - base
    code = f"""
import importlib, sys
for name in {sorted(extra | {"transformers"})!r}:
    sys.modules[name] = None
for name in {names!r}:
    importlib.import_module(name)
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=repository, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def _distribution(requirement: str) -> str:
    return requirement.partition(">")[0].strip()


def test_help_needs_no_model(repository: Path) -> None:
    """What takes seconds to load is imported by the command that needs it."""
    code = "import sys, ropeway; ropeway.parser(); print(*sorted({name.partition('.')[0] for name in sys.modules}))"
    done = subprocess.run([sys.executable, "-c", code], cwd=repository, capture_output=True, text=True, check=True)
    assert not {"torch", "transformers", "safetensors"} & set(done.stdout.split())
