"""The Helm chart under Helm itself, by way of its library: it lints, and renders to what test_chart.py looks at."""

import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.deploy.conftest import CHART

pytestmark = pytest.mark.deploy

FULL = Path(__file__).with_name("full.yaml")
WARNING = 2
"""Severity of Helm's findings from which one is to be mended."""

Helm = Any


@pytest.fixture(scope="module")
def library() -> Helm:
    return pytest.importorskip("helm_python", reason="needed: pip install helm-python-sdk")


@pytest.fixture(params=[None, FULL], ids=["defaults", "everything"])
def values(request: pytest.FixtureRequest) -> Path | None:
    return request.param  # type: ignore[no-any-return]


def read(values: Path | None) -> dict[str, Any]:
    return yaml.safe_load(values.read_text()) if values else {}


def objects(text: str) -> dict[tuple[str, str], Any]:
    documents = [document for document in yaml.safe_load_all(text) if document]
    return {(document["kind"], document["metadata"]["name"]): document for document in documents}


def test_helm_finds_nothing_to_mend(library: Helm, values: Path | None) -> None:
    report = library.lint(str(CHART), read(values), strict=True, kube_version="v1.31.0")
    assert report["total_charts_linted"] == 1
    assert report["errors"] == []
    assert [finding for finding in report["messages"] if finding["severity"] >= WARNING] == []


def test_helm_renders_what_the_tests_look_at(
    library: Helm, helm: Callable[..., subprocess.CompletedProcess[str]], values: Path | None
) -> None:
    with library.Chart.load(str(CHART)) as chart:
        manifests = chart.render(read(values), name="demo", namespace="default")
    notes = [name for name in manifests if name.endswith("NOTES.txt")]
    assert len(notes) == 1
    rendered = objects("\n---\n".join(text for name, text in manifests.items() if name not in notes))
    assert len(rendered) > 5
    assert rendered == objects(helm(*([values] if values else [])).stdout)


def test_helm_refuses_with_the_charts_own_words(library: Helm) -> None:
    with library.Chart.load(str(CHART)) as chart, pytest.raises(library.HelmError) as refused:
        chart.render({"keyringSecret": ""}, name="demo")
    assert "keyringSecret names a secret" in str(refused.value)
