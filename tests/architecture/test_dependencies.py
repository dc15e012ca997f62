"""What the house is built on: bounded from below, from the package index alone, consistent, and free to use.

What it does not see: known vulnerabilities, and versions that were withdrawn. Both are told by a database on the
network, which a check of the repository does not ask (docs/security.md says how to).
"""

import re
import tomllib
from collections.abc import Iterator
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement

FREE = re.compile(
    r"MIT|MIT-0|BSD|0BSD|Apache|ISC|PSF|Python Software|Zlib|CC0|BSL-1\.0|CNRI-Python|ZPL|MPL|Mozilla|LLVM-exception"
)
"""Licences that ask for nothing of who uses a package unchanged."""
NOT_FREE = re.compile(r"(?<!L)\b(?:A|L)?GPL|Affero|SSPL|BUSL|Commons.Clause|proprietary|non.?commercial", re.IGNORECASE)


def project(repository: Path) -> dict[str, Any]:
    document: dict[str, Any] = tomllib.loads((repository / "pyproject.toml").read_text())
    return document["project"]  # type: ignore[no-any-return]


def requirements(repository: Path, *extras: str) -> list[Requirement]:
    declared = project(repository)
    optional = declared["optional-dependencies"]
    texts = [*declared["dependencies"], *(text for extra in extras or optional for text in optional[extra])]
    return [Requirement(text) for text in texts]


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def installed(name: str) -> Distribution | None:
    try:
        return distribution(name)
    except PackageNotFoundError:
        return None


def closure(wanted: list[Requirement]) -> Iterator[tuple[str, Requirement, Distribution | None]]:
    """(who asks, what for, what is there), for all that is needed directly or by others."""
    open_, seen = [("pyproject.toml", requirement) for requirement in wanted], set()
    while open_:
        asking, requirement = open_.pop()
        found = installed(requirement.name)
        yield asking, requirement, found
        key = (normal(requirement.name), frozenset(requirement.extras))
        if found is None or key in seen:
            continue
        seen.add(key)
        for text in found.requires or []:
            further = Requirement(text)
            extras = [*requirement.extras, ""]
            if further.marker is None or any(further.marker.evaluate({"extra": extra}) for extra in extras):
                open_.append((requirement.name, further))


def licence(found: Distribution) -> str:
    told = found.metadata
    classified = [line for line in told.get_all("Classifier", []) if line.startswith("License ::")]
    return told.get("License-Expression") or "; ".join(classified) or (told.get("License") or "")[:200]


def complaints(wanted: list[Requirement]) -> list[str]:
    found = []
    for asking, requirement, there in closure(wanted):
        if there is None:
            found.append(f"{asking} needs {requirement}, which is not installed")
        elif not requirement.specifier.contains(there.version, prereleases=True):
            found.append(f"{asking} needs {requirement}; installed is {there.version}")
    return found


def test_what_is_declared_comes_from_the_index_and_has_a_least_version(repository: Path) -> None:
    for requirement in requirements(repository):
        assert requirement.url is None, requirement
        typed = requirement.name.startswith("types-")
        assert typed or any(one.operator in (">=", "==") for one in requirement.specifier), requirement


def test_constraints_are_exact_and_hold(repository: Path) -> None:
    lines = [line.partition("#")[0].strip() for line in (repository / "constraints.txt").read_text().splitlines()]
    for requirement in map(Requirement, filter(None, lines)):
        assert [one.operator for one in requirement.specifier] == ["=="], requirement
        found = installed(requirement.name)
        assert found is None or requirement.specifier.contains(found.version), f"{requirement}: {found.version}"


def test_what_is_installed_fits_together(repository: Path) -> None:
    assert complaints(requirements(repository, "dev")) == []


@pytest.mark.parametrize("wanted", ["httpx>=99", "no-such-package-of-ours"])
def test_what_does_not_fit_is_found(wanted: str) -> None:
    assert len(complaints([Requirement(wanted)])) == 1


def test_licences_are_free(repository: Path) -> None:
    licences = {found.name: licence(found) for _, _, found in closure(requirements(repository)) if found is not None}
    assert len(licences) > 20
    assert {name: text for name, text in licences.items() if not is_free(text)} == {}


def is_free(text: str) -> bool:
    return bool(FREE.search(text)) and not NOT_FREE.search(text)


@pytest.mark.parametrize(
    ("text", "free"),
    [
        ("MIT", True),
        ("License :: OSI Approved :: BSD License", True),
        ("MPL-2.0 AND (Apache-2.0 OR MIT)", True),
        ("", False),
        ("AGPL-3.0-only", False),
        ("GPL-3.0-or-later", False),
        ("License :: OSI Approved :: GNU Affero General Public License v3", False),
        ("SSPL-1.0", False),
    ],
)
def test_licences_are_told_apart(text: str, free: bool) -> None:
    assert is_free(text) is free
