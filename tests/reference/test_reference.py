"""The reference pages say what the code does, and nothing else; and every other page names what exists."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

import ropeway
from gateway.headers import HEADERS
from gateway.settings.commands import EXIT_SUSPICIOUS, EXIT_WRONG
from gateway.settings.sources import is_section, variables
from tests.reference import commands, service, settings
from tests.reference.pages import DIRECTORY, PAGES, REPOSITORY

DOCUMENTS = sorted(
    {REPOSITORY / "README.md", *(REPOSITORY / "docs").rglob("*.md")} - {DIRECTORY / name for name in PAGES}
)
OWN_HEADERS = {header.name for header in HEADERS if header.name.startswith("x-ropeway-")}
_header = re.compile(r"x-ropeway-[a-z]+(?:-[a-z]+)*")
_metric = re.compile(r"(?<![\w/.-])ropeway_[a-z0-9_]+[a-z0-9]")
NOT_METRICS = {"ropeway_recompute_fraction"}
"""Settings of our connector in vLLM's own configuration."""
_setting = re.compile(r"`([a-z_]+(?:\.[a-z_]+)+)(?::[^`]*)?`")


@pytest.mark.parametrize("name", PAGES)
def test_a_page_is_what_the_code_says(name: str) -> None:
    """Where this fails: `make reference`."""
    assert (DIRECTORY / name).read_text() == PAGES[name]()


def test_there_is_no_other_page() -> None:
    assert {path.name for path in DIRECTORY.iterdir()} == {*PAGES}


# What must be explained is


def test_every_route_says_what_it_is() -> None:
    assert [route.path for route in service.routes() if not route.meaning] == []


def test_the_routes_of_every_surface_are_there() -> None:
    found = {(route.method, route.path) for route in service.routes()}
    assert found >= {
        ("POST", "/v1/chat/completions"),
        ("GET", "/v1/models"),
        ("GET", "/status"),
        ("POST", "/admin/workers/{name}/drain"),
        ("PUT", "/admin/policy"),
        ("GET", "/metrics"),
    }


def test_every_error_of_a_command_says_what_it_is() -> None:
    assert [kind.__name__ for kind in commands._errors() if not (kind.__doc__ or "").strip()] == []


def test_every_code_of_an_error_is_one_of_the_table() -> None:
    assert {kind.exit_code for kind in commands._errors()} <= ropeway.EXIT_CODES.keys()
    assert {EXIT_WRONG, EXIT_SUSPICIOUS} <= ropeway.EXIT_CODES.keys()


def test_every_key_of_the_environment_is_a_row_of_the_page() -> None:
    page = settings.page()
    assert [key for _, key, kind in variables() if not is_section(kind) and f"| `{key}` |" not in page] == []


# Headers and metrics of the code


def literals(room: str, about: str) -> Iterator[tuple[str, str]]:
    """(path, text) of every string and bytes in a room's files about something, docstrings left out."""
    for path in sorted((REPOSITORY / room).rglob("*.py")):
        source = path.read_text()
        tree = ast.parse(source if about in source else "")
        prose = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and id(node) not in prose and isinstance(node.value, str | bytes):
                text = node.value if isinstance(node.value, str) else node.value.decode("latin-1")
                yield path.relative_to(REPOSITORY).as_posix(), text


def test_every_header_of_the_code_is_in_the_table_and_the_other_way_round() -> None:
    used = {
        name
        for room in ("gateway", "workers", "cachecore")
        for path, text in literals(room, "x-ropeway-")
        if path != "gateway/headers.py"
        for name in _header.findall(text)
    }
    assert used == OWN_HEADERS


def test_every_metric_of_the_code_is_on_the_page() -> None:
    """Also those that are there only once there is something to count."""
    page = {family.name for family in service.families()}
    named = {
        text
        for path, text in literals("gateway/views", "ropeway_")
        if re.fullmatch(r"ropeway_[a-z0-9_]*[a-z0-9]", text)
    }
    assert named - page - {name for name in named if any(known.startswith(f"{name}_") for known in page)} == set()


def test_metrics_keep_the_conventions() -> None:
    """Units and `_total` come last, labels are few, and each says what it is."""
    for family in service.families():
        assert family.name.startswith("ropeway_")
        assert family.documentation.endswith("."), family.name
        assert not re.search(r"_(ms|milliseconds|kb|mb|percent)$", family.name), family.name
        assert len(getattr(family, "_labelnames", ())) <= 3


# What other pages name


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_a_page_names_headers_that_exist(path: Path) -> None:
    assert set(_header.findall(path.read_text())) - OWN_HEADERS == set()


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_a_page_names_metrics_that_exist(path: Path) -> None:
    known = {family.name for family in [*service.families(), *service.worker_families()]}
    shown = known | {f"{name}{suffix}" for name in known for suffix in ("_total", "_bucket", "_sum", "_count")}
    named = set(_metric.findall(path.read_text())) - NOT_METRICS
    assert {name for name in named if name not in shown and not any(k.startswith(f"{name}_") for k in known)} == set()


def settings_known() -> tuple[set[str], set[str]]:
    """Every key, and the names at the top."""
    keys = {
        f"{path}.{field.name}" if path else field.name
        for path, kind in settings.sections()
        for field in msgspec.structs.fields(kind)
    }
    return keys, {key for key in keys if "." not in key}


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_a_page_names_settings_that_exist(path: Path) -> None:
    keys, top = settings_known()
    sections = {key.partition(".")[0] for key in keys if "." in key} & top
    named = {name for name in _setting.findall(path.read_text()) if name.partition(".")[0] in sections}
    assert {name for name in named if not any(key == name or name.startswith(f"{key}.") for key in keys)} == set()
