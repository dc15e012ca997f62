"""A real model's KV outlives the worker that computed it: its next life starts from the pool, as the gateway says."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from cachecore.store.pools import run_ends
from tests.gateway.end_to_end.models import FLAGS, MODEL, SECONDS_MAX, gateway_before, tokenizer
from tests.gateway.end_to_end.processes import (
    HOST,
    Gateway,
    Process,
    cached_tokens,
    eventually,
    free_ports,
    matched_tokens,
    new_keyring,
)

BLOCK_TOKENS, RUN_BLOCKS = 16, 4
CONFIG = {"transfer": {"codecs": ["raw"], "fidelity": "exact", "deadline_seconds_min": 20.0}}

pytestmark = [pytest.mark.model, pytest.mark.moving]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("pool-model")


@pytest.fixture(scope="module")
def start_worker(directory: Path) -> Iterator[Callable[[], Process]]:
    """Each on the same port, with the same pool."""
    (port,) = free_ports(1)
    keyring = str(new_keyring(directory))
    (directory / "pool").mkdir()
    tokenizer()
    pool = ["--keyring", keyring, "--pool", f"shared=dir:{directory / 'pool'}", "--pool-codec", "raw"]
    with ExitStack() as lives:

        def start() -> Process:
            worker = Process("worker", ["worker", "reference", "--port", str(port), *FLAGS, *pool], directory)
            lives.enter_context(worker)
            said = worker.said().count("ready http")
            eventually(lambda: worker.said().count("ready http") > said, "the worker is ready", SECONDS_MAX)
            return worker

        start.url = f"http://{HOST}:{port}"  # type: ignore[attr-defined]
        yield start


@pytest.fixture(scope="module")
def gateway(directory: Path, start_worker: Any) -> Iterator[Gateway]:
    start_worker.first = start_worker()
    with gateway_before(directory, [start_worker.url], str(directory / "keyring.json"), CONFIG) as gateway:
        yield gateway


def runs_known(gateway: Gateway) -> float:
    text = gateway.operator.get("/metrics").text
    found = [line for line in text.splitlines() if line.startswith('ropeway_pool_runs{pool="shared"}')]
    return float(found[0].rpartition(" ")[2]) if found else 0.0


def test_a_worker_that_has_restarted_starts_from_the_pool(gateway: Gateway, start_worker: Any) -> None:
    sentences = (f"Cabin {number} leaves the valley at noon and passes the old tower." for number in range(20))
    body: dict[str, Any] = {
        "model": MODEL,
        "messages": [{"role": "system", "content": " ".join(sentences)}, {"role": "user", "content": "Which is last?"}],
        "max_tokens": 24,
        "temperature": 0,
    }
    cold = gateway.post(body)
    ends = list(run_ends(0, cold.json()["usage"]["prompt_tokens"] // BLOCK_TOKENS, RUN_BLOCKS))
    tokens = ends[-1][0] * BLOCK_TOKENS
    assert len(ends) > 1
    eventually(lambda: runs_known(gateway) >= len(ends), "what was stored is known", SECONDS_MAX)
    before = gateway.status()["workers"][0]["epoch"]
    start_worker.first.stop()
    start_worker()
    eventually(lambda: gateway.healthy() and gateway.status()["workers"][0]["epoch"] != before, "a new life", 30.0)
    eventually(lambda: gateway.explain(body)["pull"], "the pool is offered", SECONDS_MAX)
    warm = gateway.post(body)
    assert warm.headers["x-ropeway-transfer"].startswith(f"outcome=fetched; tokens={tokens}; ")
    assert warm.headers["x-ropeway-fidelity"] == "exact"
    assert (matched_tokens(warm), cached_tokens(warm)) == (0, tokens)
    assert warm.json()["choices"][0]["message"] == cold.json()["choices"][0]["message"]
