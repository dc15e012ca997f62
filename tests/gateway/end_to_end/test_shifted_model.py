"""The same passages in another order: found by a gateway, turned and repaired by a worker that runs a real model."""

from collections.abc import Iterator
from typing import Any

import pytest

from tests.gateway.end_to_end.models import MODEL, SECONDS_MAX, two_workers
from tests.gateway.end_to_end.processes import (
    Gateway,
    cached_tokens,
    eventually,
    worker_of,
)

FUSED = {"x-ropeway-fidelity": "fused"}
CONFIG = {
    "policy_header_allowed": True,
    "transfer": {"codecs": ["raw"], "shifted": True, "deadline_seconds_min": 20.0},
}

pytestmark = [pytest.mark.model, pytest.mark.moving]


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    with two_workers(tmp_path_factory.mktemp("shifted-model"), CONFIG) as gateway:
        yield gateway


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
