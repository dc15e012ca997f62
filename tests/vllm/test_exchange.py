"""vLLM with the connector beside a reference worker of the same model, and how an instance ends."""

import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from cachecore.scope import Keyring
from tests.gateway.end_to_end.processes import HOST, Process, eventually, free_ports
from tests.vllm.conftest import MOVING, Pair
from tests.vllm.family import called, family, lives
from tests.vllm.movers import BYTES_PER_TOKEN, Movers, ask, asked_in_vain, info
from tests.vllm.servers import BLOCK_TOKENS, MODEL
from tests.vllm.test_moving import HELD, SHORT, link_to

pytestmark = [pytest.mark.vllm, MOVING]


class ReferenceWorker(Process):
    """What is asked of a vLLM instance here can be asked of it as well."""

    start_seconds_max = 180.0

    def __init__(self, directory: Path, model: Path, keyring: Path) -> None:
        (port,) = free_ports(1)
        flags = {
            "--model": str(model),
            "--served-model-name": MODEL,
            "--dtype": "float32",
            "--device": "cpu",
            "--threads": "1",
            "--block-size": str(BLOCK_TOKENS),
            "--port": str(port),
            "--keyring": str(keyring),
            "--codecs": "raw",
        }
        arguments = [word for pair in flags.items() for word in pair]
        super().__init__("reference", ["worker", "reference", *arguments], directory)
        self.sidecar = f"http://{HOST}:{port}"
        self.http = httpx.Client(base_url=self.sidecar, timeout=300, trust_env=False)


@pytest.fixture(scope="module")
def reference(pair: Pair, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ReferenceWorker]:
    assert pair.a.keyring is not None
    with ReferenceWorker(tmp_path_factory.mktemp("reference"), model, pair.a.keyring) as worker:
        worker.wait_for(lambda: worker.http.get("/health").status_code == 200, "ready")
        yield worker
        worker.http.close()


def completed(http: httpx.Client, body: dict[str, Any]) -> httpx.Response:
    """All at once: a reference worker streams text alone."""
    plain = {key: value for key, value in body.items() if not key.startswith(("stream", "return_"))}
    return http.post("/v1/completions", json=plain).raise_for_status()


def text_of(answer: httpx.Response) -> str:
    return str(answer.json()["choices"][0]["text"])


def between(source: object, target: object, pair: Pair) -> Movers:
    assert pair.a.keyring is not None
    return Movers(source, target, Keyring.load(pair.a.keyring))  # type: ignore[arg-type]


# ---- with a reference worker -----------------------------------------------------------------------------------------


def test_they_are_of_one_class(pair: Pair, reference: ReferenceWorker) -> None:
    about = [info(server) for server in (pair.a, pair.b, reference)]  # type: ignore[arg-type]
    assert len({one["transfer"]["compatibility"] for one in about}) == 1
    assert len({one["transfer"]["bytes_per_token"] for one in about}) == 1
    assert len({one["tokenizer_fingerprint"] for one in about}) == 1
    assert len({one["transfer"]["holder"] for one in about}) == 3


def test_vllm_answers_from_what_a_reference_worker_computed(pair: Pair, reference: ReferenceWorker) -> None:
    movers = between(reference, pair.b, pair)
    prompt = movers.prompt(SHORT)
    completed(reference.http, movers.body(prompt))
    pulled = movers.pull(prompt, movers.plan(prompt), output_tokens=16)
    cold = ask(pair.a.http, movers.body(prompt, output_tokens=16))
    assert (pulled.cached_tokens, cold.cached_tokens) == (HELD, 0)
    assert pulled.tokens == cold.tokens


def test_a_reference_worker_answers_from_what_vllm_computed(pair: Pair, reference: ReferenceWorker) -> None:
    movers = between(pair.a, reference, pair)
    prompt = movers.prompt(SHORT)
    cold = completed(pair.a.http, movers.body(prompt, output_tokens=16))
    pulled = completed(reference.http, movers.body(prompt, movers.signed(movers.plan(prompt)), output_tokens=16))
    assert pulled.headers["x-ropeway-transfer"].startswith(f"outcome=fetched; tokens={HELD};")
    assert text_of(pulled) == text_of(cold)


# ---- edges -----------------------------------------------------------------------------------------------------------


def test_one_token_of_a_prompt_that_is_pulled_whole(pair: Pair) -> None:
    movers = between(pair.a, pair.b, pair)
    prompt = movers.prompt(HELD)
    cold = movers.cold(prompt, output_tokens=1)
    pulled = movers.pull(prompt, movers.plan(prompt), output_tokens=1)
    assert pulled.tokens == cold.tokens
    assert pulled.cached_tokens in (HELD, HELD - 1)


def test_chats_and_token_requests_carry_plans(pair: Pair) -> None:
    movers = between(pair.a, pair.b, pair)
    prompt = movers.prompt(SHORT)
    cold = movers.cold(prompt)
    body = {
        "model": MODEL,
        "token_ids": prompt,
        "sampling_params": {"max_tokens": 8, "temperature": 0.0, "ignore_eos": True},
        "cache_salt": movers.salt(),
        "kv_transfer_params": {"ropeway": [movers.signed(movers.plan(prompt))]},
    }
    answer = pair.b.http.post("/inference/v1/generate", json=body).raise_for_status().json()
    assert answer["choices"][0]["token_ids"] == list(cold.tokens)
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == HELD
    assert not answer["kv_transfer_params"]


# ---- the end ---------------------------------------------------------------------------------------------------------


def test_an_instance_stops_in_the_middle_of_transfers(pair: Pair) -> None:
    """One that loads and serves at once ends in time, leaves no process behind, and has its ports again.

    Its API server waits for clients that are still there, whatever its engine does.
    """
    movers, back = between(pair.a, pair.b, pair), between(pair.b, pair.a, pair)
    prompt, other = movers.prompt(SHORT), movers.prompt(SHORT)
    movers.cold(prompt)
    back.cold(other)
    plan, served = movers.plan(prompt), back.plan(other)
    with (
        link_to(plan.addresses[0]) as link,
        link_to(served.addresses[0]) as outwards,
        ThreadPoolExecutor(1) as threads,
    ):
        link.hold_at = outwards.hold_at = HELD * BYTES_PER_TOKEN // 2
        serving = threads.submit(back.pull, other, served._replace(addresses=(outwards.address,)))
        document = movers.signed(plan._replace(addresses=(link.address,)))
        with asked_in_vain(pair.b.http, movers.body(prompt, document)):
            eventually(lambda: link.sent > 0 and outwards.sent > 0, "both have begun")
            everybody = family(pair.b.process.pid)
            engine = called(everybody, "VLLM::")
            assert len(engine) == 2
            pair.b.process.send_signal(signal.SIGINT)
            eventually(lambda: not any(map(lives, engine)), "the engine has ended")
        pair.b.process.wait(10)
        eventually(lambda: not any(map(lives, everybody)), "nothing of it is left")
        assert len(serving.result().tokens) == 8
    pair.b.start()
    pair.b.wait_ready()
    assert movers.pull(prompt, movers.plan(prompt)).cached_tokens == HELD
