"""The chart as Helm would render it."""

import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
CHART = ROOT / "deploy" / "helm" / "ropeway"

Rendered = dict[tuple[str, str], dict[str, Any]]


@pytest.fixture(scope="session")
def helm(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Renders with a file of values, or with the chart's own."""
    if shutil.which("go") is None:
        pytest.skip("Go is not installed: make test-deploy says what is needed")
    where = tmp_path_factory.mktemp("helm")
    program = where / "render"
    # Debian's packages of Go's libraries lie in a GOPATH.
    environment = {
        **os.environ,
        "GO111MODULE": "off",
        "GOPATH": f"/usr/share/gocode:{where}",
        "GOCACHE": f"{where}/cache",
    }
    source = Path(__file__).parent / "helm" / "main.go"
    built = subprocess.run(
        ["go", "build", "-o", program, source],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert built.returncode == 0, built.stderr

    def render(*values: Path) -> subprocess.CompletedProcess[str]:
        return subprocess.run([program, CHART, "demo", *values], capture_output=True, text=True)

    return render


@pytest.fixture(scope="session", params=["", "full.yaml"], ids=["defaults", "everything"])
def rendered(request: pytest.FixtureRequest, helm: Callable[..., subprocess.CompletedProcess[str]]) -> Rendered:
    """Objects by kind and name."""
    values = [Path(__file__).parent / request.param] if request.param else []
    output = helm(*values)
    assert output.returncode == 0, output.stderr
    documents = [document for document in yaml.safe_load_all(output.stdout) if document]
    objects = {(document["kind"], document["metadata"]["name"]): document for document in documents}
    assert len(objects) == len(documents)
    return objects
