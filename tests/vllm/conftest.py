"""Two real vLLM instances that these tests share; they take a minute or two to start, and start when first asked for.

`make test-vllm` runs this suite in an environment that has vLLM.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.gateway.end_to_end.logs import pytest_runtest_makereport as pytest_runtest_makereport
from tests.gateway.end_to_end.processes import new_keyring
from tests.vllm.servers import VllmServer
from workers.reference.fetch import default_cache_dir, fetch_smollm2

pytest.register_assert_rewrite("tests.workers.contract.suite", "tests.workers.contract.lab", "tests.workers.following")


Report = Callable[[str], None]


PLAIN = pytest.mark.parametrize("pair", ["plain"], indirect=True, scope="session")
"""vLLM as it is."""
MOVING = pytest.mark.parametrize("pair", ["moving"], indirect=True, scope="session")
"""With the connector."""


class Pair(NamedTuple):
    """A publishes where subscribers connect to it, B connects to whoever listens for it."""

    a: VllmServer
    b: VllmServer


@pytest.fixture
def report(request: pytest.FixtureRequest) -> Report:
    """Writes a line to the terminal, whether the test passes or not."""
    capture = request.config.pluginmanager.getplugin("capturemanager")

    def write(line: str) -> None:
        with capture.global_and_fixture_disabled():
            print(f"\n{line}", flush=True)

    return write


@pytest.fixture(scope="session")
def model() -> Path:
    return fetch_smollm2(default_cache_dir()).directory


@pytest.fixture(scope="session")
def pair(request: pytest.FixtureRequest, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    """Of the kind that `PLAIN` or `MOVING` says; there are never more than two instances at a time."""
    directory = tmp_path_factory.mktemp("vllm")
    keyring = new_keyring(directory) if request.param == "moving" else None
    pair = Pair(
        VllmServer(directory, model, "vllm-a", events="bind", keyring=keyring),
        VllmServer(directory, model, "vllm-b", events="connect", keyring=keyring),
    )
    try:
        for server in pair:
            server.wait_ready()
        yield pair
    finally:
        for server in pair:
            server.close()
