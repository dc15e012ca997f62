"""The load client and locust against simulated workers behind a gateway: what they count is what the workers saw.

Whether their times are those of the workers is measured by tests/bench/bench_loadtest.py.
"""

import json
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.gateway.end_to_end.processes import Fleet, Gateway, new_keyring

pytestmark = pytest.mark.stacks

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Fleet, Gateway]]:
    directory = tmp_path_factory.mktemp("loadtest")
    keyring = str(new_keyring(directory))
    with (
        Fleet(directory, "--keyring", keyring) as fleet,
        Gateway(directory, fleet.urls, {"keyring": keyring}) as gateway,
    ):
        yield fleet, gateway


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", *arguments], cwd=ROOT, capture_output=True, text=True, timeout=120)


def seen_by_workers(fleet: Fleet, path: str) -> list[dict[str, Any]]:
    return [exchange for worker in fleet.names for exchange in fleet.requests(worker, path)]


def test_a_workload_is_sent_and_measured(stack: tuple[Fleet, Gateway]) -> None:
    fleet, gateway = stack
    source = ["--workload", "fan-out-small", "--requests", "24", "--rate", "2"]
    done = command("ropeway", "loadtest", *source, "--url", gateway.url, "--json")
    assert (done.returncode, done.stderr) == (0, "")
    document = json.loads(done.stdout)
    (row,) = document["rows"]
    seen = seen_by_workers(fleet, "/v1/completions")
    assert (row["requests"], row["answered"], row["failed"]) == (24, 24, 0) == (len(seen), len(seen), 0)
    assert row["policy"] == "kv-aware"
    assert row["hit_rate"] > 0.3
    waited = [exchange["content_at"] - exchange["arrived_at"] for exchange in seen]
    assert row["ttft_ms_mean"] / 1e3 > sum(waited) / len(waited)


def test_failures_end_with_code_1_and_are_told(stack: tuple[Fleet, Gateway]) -> None:
    _, gateway = stack
    source = ["--workload", "burst", "--requests", "3", "--model", "nobody"]
    done = command("ropeway", "loadtest", *source, "--url", gateway.url)
    assert done.returncode == 1
    assert "3 x status 404: " in done.stdout


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--workload", "burst", "--url", "http://127.0.0.1:1"], "http://127.0.0.1:1 does not answer"),
        (["--workload", "burst", "--start", "1e9"], "nothing to send"),
        (["--trace", __file__], "no known format"),
        (["--workload", "burst", "--model", "m", "--vocabulary", "7"], "a vocabulary of"),
        (["--workload", "none"], "no workload 'none'"),
        (["--trace", "/nowhere"], "no such file"),
        ([], "required"),
    ],
)
def test_what_cannot_be_done_is_said_in_a_line(arguments: list[str], said: str) -> None:
    done = command("ropeway", "loadtest", *arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert said in done.stderr
    assert "Traceback" not in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_locust_runs_clean(stack: tuple[Fleet, Gateway]) -> None:
    if find_spec("locust") is None:  # imported, it would patch this very process
        pytest.skip("locust is not installed")
    fleet, gateway = stack
    for url in fleet.urls:
        httpx.delete(f"{url}/simulate/log", trust_env=False)
    file, load = ["-f", "loadtest/locustfile.py", "CompletionUser", "RagUser"], ["-u", "4", "-r", "4", "-t", "8s"]
    done = command("locust", *file, "--headless", *load, "-H", gateway.url, "--json", "--loglevel", "WARNING")
    assert done.returncode == 0, done.stderr
    entries = {(entry["method"], entry["name"]): entry for entry in json.loads(done.stdout)}
    assert sum(entry["num_failures"] for entry in entries.values()) == 0
    seen = seen_by_workers(fleet, "/v1/completions")
    assert 0 < entries["POST", "completion"]["num_requests"] <= len(seen)
    assert entries["TTFT", "completion"]["num_requests"] == entries["POST", "completion"]["num_requests"]
    assert entries["ITL", "rag"]["num_requests"] > 0
