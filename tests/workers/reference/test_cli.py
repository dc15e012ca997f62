"""`ropeway worker reference` and `ropeway model` as processes."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from transformers import LlamaConfig

from cachecore.blocks import PrefixHash, pack_tokens
from cachecore.index.schema import parse_holder
from cachecore.scope import DEFAULT_TENANT, Fidelity, IdentityScope, Keyring, Naming
from cachecore.transfer.capability import Run
from cachecore.transfer.plan import Grant, Plan, sign
from tests.workers.reference.test_gguf_export import SHAPE, write_gguf
from tests.workers.reference.test_model import write_model


@contextlib.contextmanager
def running(directory: Path, *arguments: str) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """A worker on the tiny GGUF file of a directory: its URL, and its process. Unless it was killed, it is stopped by
    SIGTERM, which must end it cleanly."""
    command = [sys.executable, "-m", "ropeway", "worker", "reference", f"--model={directory / 'tiny.gguf'}", "--port=0"]
    command += ["--block-size=4", "--blocks=64", "--threads=1", *arguments]
    environment = {**os.environ, "ROPEWAY_CACHE": str(directory / "cache")}
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stderr is not None
        ready = next((line for line in process.stderr if line.startswith("ready ")), "")
        assert ready, f"the worker ended with {process.wait()}"
        try:
            yield ready.split()[1], process
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
                process.communicate(timeout=20)
                assert process.returncode == 0
        finally:
            process.kill()


@pytest.fixture
def model_directory(tmp_path: Path) -> Path:
    write_gguf(tmp_path / "tiny.gguf", write_model(LlamaConfig(**SHAPE), tmp_path / "original"))
    return tmp_path


@pytest.fixture
def worker_url(model_directory: Path) -> Iterator[str]:
    with running(model_directory) as (url, _):
        yield url


def test_a_worker_serves_a_gguf_file(worker_url: str) -> None:
    body = {"model": "tiny", "prompt": [5, 6, 7, 8, 9, 10, 11, 12, 13], "max_tokens": 6, "temperature": 0}
    with httpx.Client(base_url=worker_url, timeout=30) as client:
        answers = [client.post("/v1/completions", json=body).json() for _ in range(2)]
        info = client.get("/server_info").json()
    assert answers[0]["choices"][0]["text"] == answers[1]["choices"][0]["text"]
    usages = [answer["usage"] for answer in answers]
    assert [usage["prompt_tokens"] for usage in usages] == [9, 9]
    assert [(usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0) for usage in usages] == [0, 8]
    assert info["kv_events"]["block_size"] == 4
    assert info["kv_events"]["next_sequence"] > 0
    assert "transfer" not in info  # without a keyring there is nobody to exchange KV with


PROMPT = list(range(5, 46))


def plan_for(keyring: Keyring, source: dict[str, Any], target: dict[str, Any]) -> dict[str, Any]:
    """For the prompt's ten blocks, as a gateway would sign it."""
    scope = IdentityScope(
        "tiny", keyring.key_id(DEFAULT_TENANT), 4, tokenizer=source["tokenizer_fingerprint"]
    )  # fmt: skip
    naming = Naming.of(scope, keyring)
    chain = naming.hasher.chain(naming.root, pack_tokens(PROMPT))
    run = Run(naming.root, PrefixHash(chain[-16:]), 0, 10)
    holders = [parse_holder(info["transfer"]["holder"].encode()) for info in (source, target)]
    plan = Plan(holders[0], tuple(source["transfer"]["addresses"]), run, 0, 0, "raw", 20.0)
    return sign(plan, Grant(scope.key_id, holders[1], Fidelity.EXACT, time.time() + 60), keyring)


def ask(url: str, *plans: dict[str, Any]) -> tuple[str, str | None, int]:
    """Text, what became of the plans, and cached tokens."""
    body = {"model": "tiny", "prompt": PROMPT, "max_tokens": 12, "temperature": 0, "ignore_eos": True}
    answer = httpx.post(
        f"{url}/v1/completions", json={**body, "kv_transfer_params": {"ropeway": list(plans)}}, timeout=60
    )
    assert answer.status_code == 200, answer.text
    usage = answer.json()["usage"]
    return answer.json()["choices"][0]["text"], answer.headers.get("x-ropeway-transfer"), (
        usage["prompt_tokens_details"]["cached_tokens"]
    )  # fmt: skip


def test_one_worker_pulls_from_another_and_outlives_it(model_directory: Path) -> None:
    keyring = Keyring.generate()
    keyring.save(model_directory / "keyring.json")
    keys = f"--keyring={model_directory / 'keyring.json'}"
    with running(model_directory, keys) as (one, source), running(model_directory, keys, "--name=second") as (two, _):
        infos = [httpx.get(f"{url}/server_info").json() for url in (one, two)]
        assert infos[0]["transfer"]["compatibility"] == infos[1]["transfer"]["compatibility"]
        assert infos[1]["transfer"]["holder"] == f"w/second/{infos[1]['epoch']}/0"
        expected, transfer, _ = ask(one)
        assert transfer is None
        text, transfer, cached = ask(two, plan_for(keyring, *infos))
        assert (text, cached) == (expected, 40)
        assert transfer is not None
        assert transfer.startswith("outcome=fetched; tokens=40; bytes=")
        source.kill()
        source.wait()
        httpx.post(f"{two}/reset_prefix_cache").raise_for_status()
        text, transfer, cached = ask(two, plan_for(keyring, *infos))
        assert (text, cached) == (expected, 0)
        assert transfer is not None
        assert transfer.startswith("outcome=failed; reason=")


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--model=/nowhere"], "/nowhere is neither a directory"),
        (["--model=."], "cannot read tokenizer.json"),
        (["--keyring=/nowhere", "--model=."], "keyring /nowhere"),
    ],
)
def test_what_cannot_be_served_is_one_line(arguments: list[str], reason: str) -> None:
    command = [sys.executable, "-m", "ropeway", "worker", "reference", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert done.stderr.startswith("ropeway: error: ")
    assert reason in done.stderr
    assert done.stderr.count("\n") == 1


def test_the_command_line_needs_no_torch() -> None:
    code = "import sys, ropeway; ropeway.parser(); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


@pytest.mark.model
def test_fetching_prints_the_directory_as_json() -> None:
    command = [sys.executable, "-m", "ropeway", "model", "fetch", "smollm2", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert (Path(json.loads(done.stdout)["directory"]) / "tokenizer.json").exists()
