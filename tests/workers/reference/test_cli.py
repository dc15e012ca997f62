"""`ropeway worker reference` and `ropeway model` as processes."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from transformers import LlamaConfig

from tests.workers.reference.test_gguf_export import SHAPE, write_gguf
from tests.workers.reference.test_model import write_model


@pytest.fixture
def worker_url(tmp_path: Path) -> Iterator[str]:
    """A worker on a tiny GGUF file, stopped by SIGTERM, which must end it cleanly."""
    write_gguf(tmp_path / "tiny.gguf", write_model(LlamaConfig(**SHAPE), tmp_path / "original"))
    command = [sys.executable, "-m", "ropeway", "worker", "reference", f"--model={tmp_path / 'tiny.gguf'}", "--port=0"]
    command += ["--block-size=4", "--blocks=64", "--threads=1"]
    environment = {**os.environ, "ROPEWAY_CACHE": str(tmp_path / "cache")}
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stderr is not None
        ready = next((line for line in process.stderr if line.startswith("ready ")), "")
        assert ready, f"the worker ended with {process.wait()}"
        yield ready.split()[1]
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=20)
        assert process.returncode == 0


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
