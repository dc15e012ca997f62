"""KV of a real model moves between two workers, because the gateway says so, and the text stays what it was."""

from collections.abc import Iterator
from typing import Any

import pytest

from tests.gateway.end_to_end.models import MODEL, SECONDS_MAX, two_workers
from tests.gateway.end_to_end.processes import (
    Gateway,
    cached_tokens,
    eventually,
    matched_tokens,
    worker_of,
)

CONFIG = {
    "policy_header_allowed": True,
    "transfer": {"codecs": ["raw"], "fidelity": "exact", "deadline_seconds_min": 20.0},
}

pytestmark = pytest.mark.model


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    with two_workers(tmp_path_factory.mktemp("transfer-model"), CONFIG) as gateway:
        yield gateway


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
