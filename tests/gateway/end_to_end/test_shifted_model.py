"""The same passages in another order: found by a gateway, turned and repaired by a worker that runs a real model."""

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
    new_keyring,
    worker_of,
)

pytest.importorskip("torch")
fetch = pytest.importorskip("workers.reference.fetch")

MODEL = "smollm2"
SECONDS_MAX = 180.0
FUSED = {"x-ropeway-fidelity": "fused"}
CONFIG = {
    "policy_header_allowed": True,
    "transfer": {"codecs": ["raw"], "shifted": True, "deadline_seconds_min": 20.0},
}

pytestmark = [pytest.mark.model, pytest.mark.slow]


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    directory = tmp_path_factory.mktemp("shifted-model")
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


def passage(number: int) -> str:
    name = ("Anna", "Boris", "Clara", "David")[number % 4]
    return " ".join(
        f"In the year {1900 + 10 * number + year} {name} built {year + 2} boats and sold them in the north."
        for year in range(4)
    )


def body(*order: int) -> dict[str, Any]:
    text = "\n\n".join(passage(number) for number in order)
    return {
        "model": MODEL,
        "messages": [{"role": "user", "content": f"{text}\n\nWho built two boats?"}],
        "max_tokens": 8,
        "temperature": 0,
    }


def test_passages_in_another_order(gateway: Gateway) -> None:
    cold = gateway.post(body(0, 1, 2, 3))
    assert cold.headers["x-ropeway-fidelity"] == "exact"

    def blocks_known() -> bool:
        lines = gateway.operator.get("/metrics").text.splitlines()
        return any(line.startswith("ropeway_passages_blocks ") and float(line.split()[1]) > 10 for line in lines)

    eventually(blocks_known, "texts are known", SECONDS_MAX)

    # Where they were computed.
    own = gateway.post(body(2, 0, 3, 1), {**FUSED, "x-ropeway-policy": "kv-aware"})
    assert worker_of(own) == worker_of(cold)
    assert own.headers["x-ropeway-fidelity"] == "fused"
    assert own.headers["x-ropeway-transfer"].startswith("outcome=fetched; tokens=")
    assert "; bytes=0; " in own.headers["x-ropeway-transfer"]
    assert cached_tokens(own) > 0.8 * own.json()["usage"]["prompt_tokens"]

    # At the other worker, which pulls them.
    def elsewhere() -> dict[str, str] | None:
        for number in range(50):
            session = {"x-ropeway-policy": "session", "x-ropeway-session": str(number)}
            if gateway.explain(body(3, 1, 0, 2), session)["worker"] != worker_of(cold):
                return session
        return None

    session = eventually(elsewhere, "a session elsewhere", SECONDS_MAX)
    # What computing takes there is learned from streams; before, it is thought to be quick.
    for number in range(4):
        learned = gateway.post({**body(number + 4), "stream": True}, session)
        assert worker_of(learned) != worker_of(cold)
    pulled = gateway.post(body(3, 1, 0, 2), {**FUSED, **session})
    assert worker_of(pulled) != worker_of(cold)
    assert pulled.headers["x-ropeway-fidelity"] == "fused"
    assert pulled.headers["x-ropeway-transfer"].startswith("outcome=fetched; tokens=")
    assert "; bytes=0; " not in pulled.headers["x-ropeway-transfer"]

    # Whoever does not accept it gets it exact, from either.
    exact = gateway.post(body(2, 0, 3, 1), {"x-ropeway-fidelity": "exact"})
    assert exact.headers["x-ropeway-fidelity"] == "exact"
