"""The house as syntax trees."""

import ast
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
ROOMS = ("cachecore", "policies", "gateway", "workers", "loadtest")


@dataclass(frozen=True)
class Import:
    module: str
    """Dotted name of what is imported; for `from a import b`, one `a.b` for each name."""
    line: int
    eager: bool
    """Done when the importing module is loaded: not inside a function, not for type checkers alone."""


@dataclass(frozen=True)
class Module:
    path: str
    """Relative to the root, with slashes."""
    text: str
    tree: ast.Module

    @property
    def name(self) -> str:
        return self.path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")

    @property
    def room(self) -> str:
        return self.name.partition(".")[0]

    def imports(self) -> Iterator[Import]:
        yield from self._imports(self.tree, eager=True)

    def _imports(self, node: ast.AST, eager: bool) -> Iterator[Import]:
        for child in ast.iter_child_nodes(node):
            inner = eager and not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
                inner = False
            for name in self._imported(child):
                yield Import(name, child.lineno, eager)
            yield from self._imports(child, inner)

    def _imported(self, node: ast.AST) -> list[str]:
        match node:
            case ast.Import(names=names):
                return [alias.name for alias in names]
            case ast.ImportFrom(module=module, names=names, level=level):
                base = self._base(level) + ([module] if module else [])
                return [".".join([*base, alias.name]) for alias in names]
            case ast.Call(func=ast.Attribute(attr="import_module"), args=[ast.Constant(value=str(name)), *_]):
                return [name]
        return []

    def _base(self, level: int) -> list[str]:
        package = self.path.removesuffix(".py").split("/")[:-1]
        return package[: len(package) - level + 1] if level else []


def read_house(root: Path) -> list[Module]:
    paths = [path for room in ROOMS for path in sorted((root / room).rglob("*.py"))]
    if (root / "ropeway.py").exists():
        paths.append(root / "ropeway.py")
    return read_modules(root, paths)


def read_modules(root: Path, paths: Iterable[Path]) -> list[Module]:
    return [Module(path.relative_to(root).as_posix(), text := path.read_text(), ast.parse(text)) for path in paths]


@pytest.fixture(scope="session")
def house() -> list[Module]:
    return read_house(REPOSITORY)


@pytest.fixture
def build(tmp_path: Path) -> Callable[[dict[str, str]], list[Module]]:
    """A house made for a test, from relative paths to sources."""

    def build(sources: dict[str, str]) -> list[Module]:
        for path, text in sources.items():
            (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / path).write_text(text)
        return read_house(tmp_path)

    return build


@pytest.fixture(scope="session")
def tests() -> list[Module]:
    return read_modules(REPOSITORY, sorted((REPOSITORY / "tests").rglob("*.py")))


@pytest.fixture(scope="session")
def repository() -> Path:
    return REPOSITORY
