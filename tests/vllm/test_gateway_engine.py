"""What the gateway's vLLM adapter finds, and sends, with a real instance behind it."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.gateway.end_to_end.processes import Gateway, eventually
from tests.vllm.conftest import PLAIN, Pair
from tests.vllm.servers import BLOCK_TOKENS, MODEL, VllmServer

pytestmark = [pytest.mark.vllm, PLAIN]

CHAT = {
    "model": MODEL,
    "messages": [
        {"role": "developer", "content": "Answer in one sentence."},
        {"role": "user", "content": "What is the capital of France, and which river runs through it?"},
    ],
    "temperature": 0,
    "max_tokens": 16,
    "priority": 3,
}
TEXT = {"model": MODEL, "prompt": "The capital of France is", "temperature": 0, "max_tokens": 12}


@pytest.fixture(scope="module")
def engine(pair: Pair) -> VllmServer:
    return pair.b


@pytest.fixture(scope="module")
def gateway(engine: VllmServer, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    config: dict[str, Any] = {
        "tokenizers": {MODEL: str(model)},
        "prompts": {"token_ids_forwarded": True},
        "probes": {"interval_seconds": 0.5, "timeout_seconds": 30},
    }
    with Gateway(tmp_path_factory.mktemp("gateway"), [engine.url], config) as gateway:
        gateway.http.timeout = 300
        yield gateway


def test_what_is_found_of_it(engine: VllmServer, gateway: Gateway) -> None:
    worker = gateway.worker(engine.worker)
    assert (worker["engine"], worker["engine_version"]) == ("vllm", "0.32.0")
    assert (worker["parity"], worker["block_size_tokens"]) == ("proven", BLOCK_TOKENS)
    # It was started with all that it might lack, but for an endpoint that it binds.
    lacks = eventually(lambda: gateway.worker(engine.worker)["lacks"], "it was asked what it lacks", 120.0)
    assert [lack["name"] for lack in lacks] == ["kv events endpoint"]


@pytest.mark.parametrize(("path", "body"), [("/v1/chat/completions", CHAT), ("/v1/completions", TEXT)])
def test_token_ids_in_place_of_text_change_no_answer(
    engine: VllmServer, gateway: Gateway, path: str, body: dict[str, Any]
) -> None:
    plain = {key: value for key, value in body.items() if key != "priority"}
    direct, through = engine.post(plain, path).json(), gateway.post(body, path=path).json()
    assert through["choices"][0] == direct["choices"][0]
    assert through["usage"]["prompt_tokens"] == direct["usage"]["prompt_tokens"]


def test_a_publisher_that_connects_is_heard(engine: VllmServer, gateway: Gateway) -> None:
    body = {**TEXT, "prompt": "One two three four five six seven eight nine ten. " * 12}
    gateway.post(body, path="/v1/completions")
    receipt = gateway.wait_confirmed(body, engine.worker, 4 * BLOCK_TOKENS)
    assert receipt["candidates"][0]["evidence"] == "exact"
