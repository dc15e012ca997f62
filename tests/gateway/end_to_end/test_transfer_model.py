"""KV of a real model moves between two workers, because the gateway says so, and the text stays what it was."""

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.gateway.end_to_end.processes import (
    HOST,
    Gateway,
    Process,
    cached_tokens,
    eventually,
    free_ports,
    matched_tokens,
    new_keyring,
    worker_of,
)

pytest.importorskip("torch")
fetch = pytest.importorskip("workers.reference.fetch")

MODEL = "smollm2"
SECONDS_MAX = 180.0
CONFIG = {
    "policy_header_allowed": True,
    "transfer": {"codecs": ["raw"], "fidelity": "exact", "deadline_seconds_min": 20.0},
}

pytestmark = pytest.mark.model


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    directory = tmp_path_factory.mktemp("transfer-model")
    keyring = str(new_keyring(directory))
    tokenizer = fetch.fetch_smollm2(fetch.default_cache_dir()).directory
    workers: list[Process] = []
    urls: list[str] = []
    try:
        for name, port in zip(("first", "second"), free_ports(2), strict=True):
            where = ["--port", str(port), "--name", name, "--keyring", keyring]
            flags = ["--model", MODEL, "--device", "cpu", "--dtype", "float32", "--threads", "1"]
            workers.append(Process(name, ["worker", "reference", *flags, *where], directory))
            urls.append(f"http://{HOST}:{port}")
        for worker in workers:
            eventually(lambda worker=worker: "ready http" in worker.said(), f"{worker.name} is ready", SECONDS_MAX)
        config = {**CONFIG, "keyring": keyring, "tokenizers": {MODEL: str(tokenizer)}}
        with Gateway(directory, urls, config) as gateway:
            gateway.http.timeout = httpx.Timeout(SECONDS_MAX)
            yield gateway
    finally:
        for worker in workers:
            worker.stop()


def test_the_other_worker_pulls_and_says_the_same(gateway: Gateway) -> None:
    sentences = (f"Cabin {number} leaves the valley at noon and passes the old tower." for number in range(20))
    body: dict[str, Any] = {
        "model": MODEL,
        "messages": [{"role": "system", "content": " ".join(sentences)}, {"role": "user", "content": "Which is last?"}],
        "max_tokens": 24,
        "temperature": 0,
    }
    cold = gateway.post(body)
    warm = worker_of(cold)
    expected = cold.json()["usage"]["prompt_tokens"] // 16 * 16

    def elsewhere() -> dict[str, str] | None:
        """A session of the other worker, once it is known what the warm one has."""
        for number in range(50):
            session = {"x-ropeway-policy": "session", "x-ropeway-session": str(number)}
            told = gateway.explain(body, session)
            if told["worker"] != warm and told["pull"]:
                return session
        return None

    pulled = gateway.post(body, eventually(elsewhere, "the other worker could pull", SECONDS_MAX))
    assert worker_of(pulled) != warm
    assert pulled.headers["x-ropeway-transfer"].startswith(f"outcome=fetched; tokens={expected}; ")
    assert pulled.headers["x-ropeway-fidelity"] == "exact"
    assert (matched_tokens(pulled), cached_tokens(pulled)) == (0, expected)
    assert pulled.json()["choices"][0]["message"] == cold.json()["choices"][0]["message"]
    (link,) = gateway.status()["estimates"]["links"].values()
    assert link["observations"] == 1
