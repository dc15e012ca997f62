"""Two real vLLM instances that these tests share; they take a minute or two to start, and start when first asked for.

`make test-vllm` runs this suite in an environment that has vLLM.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.gateway.end_to_end.logs import pytest_runtest_makereport as pytest_runtest_makereport
from tests.gateway.end_to_end.processes import new_keyring
from tests.vllm.servers import Processes, VllmServer
from workers.reference.fetch import default_cache_dir, fetch_smollm2

pytest.register_assert_rewrite("tests.workers.contract.suite", "tests.workers.contract.lab", "tests.workers.following")


Report = Callable[[str], None]


def _pair(*kinds: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("pair", kinds, indirect=True, scope="session")


PLAIN = _pair("plain")
"""vLLM as it is."""
MOVING = _pair("float32")
"""With the connector."""
MOVING_IN_EACH_DTYPE = _pair("float32", "bfloat16")
STEP_TOKENS = 512
"""That those with the connector compute at once: what is more goes in chunks."""


class Pair(NamedTuple):
    """A publishes where subscribers connect to it, B connects to whoever listens for it. A is started by its module and
    without the metadata of `vllm`, B by the `vllm` command, with them; the one in bfloat16 has its worker within."""

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
    """Of the kind that a mark above says; there are never more than two instances at a time."""
    directory = tmp_path_factory.mktemp("vllm")
    how: dict[str, Any] = {}
    more: tuple[str, ...] = ()
    processes: Processes = "one" if request.param == "bfloat16" else "two"
    if request.param != "plain":
        connector = {"codecs": ["raw", "i8"], "fuser": True}
        how = {"keyring": new_keyring(directory), "dtype": request.param, "connector": connector}
        more = ("--max-num-batched-tokens", str(STEP_TOKENS))
    pair = Pair(
        VllmServer(directory, model, "vllm-a", *more, events="bind", **how),
        VllmServer(directory, model, "vllm-b", *more, events="connect", by="command", processes=processes, **how),
    )
    try:
        for server in pair:
            server.wait_ready()
        yield pair
    finally:
        for server in pair:
            server.close()
