"""A gateway before two reference workers with a real model."""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.gateway.end_to_end.processes import HOST, Gateway, Process, eventually, free_ports, new_keyring

MODEL = "smollm2"
SECONDS_MAX = 180.0
FLAGS = ("--model", MODEL, "--device", "cpu", "--dtype", "float32", "--threads", "1")


def tokenizer() -> str:
    """The model's directory; skips the test where torch is missing."""
    pytest.importorskip("torch")
    fetch = pytest.importorskip("workers.reference.fetch")
    return str(fetch.fetch_smollm2(fetch.default_cache_dir()).directory)


@contextmanager
def gateway_before(directory: Path, urls: list[str], keyring: str, config: Mapping[str, Any]) -> Iterator[Gateway]:
    whole = {**config, "keyring": keyring, "tokenizers": {MODEL: tokenizer()}}
    with Gateway(directory, urls, whole) as gateway:
        gateway.http.timeout = httpx.Timeout(SECONDS_MAX)
        yield gateway


@contextmanager
def two_workers(directory: Path, config: Mapping[str, Any]) -> Iterator[Gateway]:
    """Called first and second."""
    tokenizer()
    keyring, ports = str(new_keyring(directory)), free_ports(2)
    with ExitStack() as stack:
        workers = [
            stack.enter_context(
                Process(
                    name,
                    ["worker", "reference", *FLAGS, "--port", str(port), "--name", name, "--keyring", keyring],
                    directory,
                )
            )
            for name, port in zip(("first", "second"), ports, strict=True)
        ]
        for worker in workers:
            eventually(lambda worker=worker: "ready http" in worker.said(), f"{worker.name} is ready", SECONDS_MAX)
        urls = [f"http://{HOST}:{port}" for port in ports]
        yield stack.enter_context(gateway_before(directory, urls, keyring, config))
