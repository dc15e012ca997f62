"""`ropeway up`: the commands it runs, and a whole simulated stack from its first line to its last."""

import json
import os
import shlex
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from cachecore.scope import Keyring
from gateway.errors import StartupError
from gateway.ports import free_port_range
from gateway.settings.loading import load
from gateway.up import UpOptions, curl_line, gateway_part, up, worker_parts

REPOSITORY = Path(__file__).parents[2]
KEYRING = Path("/state/keyring.json")


def free_port() -> int:
    return free_port_range("127.0.0.1", 8, 20_000 + os.getpid() % 20_000)[0]


def words(part: Any) -> list[str]:
    """The command line after the interpreter."""
    assert part.arguments[:3] == [sys.executable, "-m", "ropeway"]
    return part.arguments[3:]


def test_reference_workers_are_a_process_each(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    parts, urls = worker_parts(UpOptions(port=free_port(), workers=3), KEYRING, Path("/models/m"))
    assert [part.name for part in parts] == ["worker-1", "worker-2", "worker-3"]
    assert len(set(urls)) == 3
    for part, url in zip(parts, urls, strict=True):
        assert words(part)[:2] == ["worker", "reference"]
        assert "/models/m" in words(part)
        assert str(KEYRING) in words(part)
        assert url.rpartition(":")[2] in words(part)
        assert part.ready_urls == [f"{url}/health"]
        assert part.environment["OMP_NUM_THREADS"] == "2"


def test_a_thread_is_left_for_each_of_many_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1})
    parts, _ = worker_parts(UpOptions(port=free_port(), workers=4), KEYRING, Path("/m"))
    assert parts[0].environment == {"OMP_NUM_THREADS": "1"}


def test_a_users_thread_count_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    parts, _ = worker_parts(UpOptions(port=free_port()), KEYRING, Path("/m"))
    assert "OMP_NUM_THREADS" not in parts[0].environment


def test_a_simulated_fleet_is_one_process() -> None:
    parts, urls = worker_parts(UpOptions(port=free_port(), workers=8, simulated=True), KEYRING, None)
    (part,) = parts
    assert words(part)[:2] == ["worker", "simulated"]
    assert words(part)[words(part).index("--count") + 1] == "8"
    assert len(urls) == 8
    assert part.ready_urls == [f"{url}/health" for url in urls]


def test_workers_get_roles_and_move_kv() -> None:
    options = UpOptions(port=free_port(), prefill=1, decode=2, simulated=True, redis="none")
    (part,), urls = worker_parts(options, KEYRING, None)
    line = " ".join(words(part))
    assert "--count 3 --keyring /state/keyring.json --kv-link 400" in line
    gateway = gateway_part(options, KEYRING, None, urls, Path("/state"))
    assert "--worker" not in words(gateway)
    config = load(None, gateway.environment, {"keyring": str(KEYRING)})
    assert [(worker.url, worker.role) for worker in config.workers] == list(
        zip(urls, ("prefill", "decode", "decode"), strict=True)
    )


@pytest.mark.parametrize("flag", ["--prefill", "--decode"])
def test_one_role_alone_is_no_stack(flag: str) -> None:
    command = [sys.executable, "-m", "ropeway", "up", "--simulated", flag, "1"]
    ended = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert ended.returncode == 1
    assert ended.stderr == (
        "ropeway: error: --prefill and --decode go together: the one computes prompts, the other answers\n"
    )


def test_the_gateway_gets_workers_tokenizer_and_keyring() -> None:
    options = UpOptions(port=9000, policy="session", redis="none")
    part = gateway_part(options, KEYRING, Path("/models/m"), ["http://a:1", "http://b:2"], Path("/state"))
    line = " ".join(words(part))
    assert line.startswith("serve --host 127.0.0.1 --port 9000 --keyring /state/keyring.json")
    assert "--worker http://a:1 --worker http://b:2" in line
    assert "--tokenizer smollm2=/models/m" in line
    assert line.endswith("--policy session --redis none")
    assert part.ready_urls == ["http://127.0.0.1:9000/readyz"]


def test_the_index_lies_beside_the_keyring() -> None:
    part = gateway_part(UpOptions(), KEYRING, None, [], Path("/state"))
    assert " ".join(words(part)).endswith("--redis embedded")
    assert part.environment == {"ROPEWAY_SHARING_DIRECTORY": "/state/valkey"}


def test_a_gateway_on_every_interface_is_asked_on_loopback() -> None:
    part = gateway_part(UpOptions(host="0.0.0.0", port=9000), KEYRING, None, [], Path("/state"))
    assert part.ready_urls == ["http://127.0.0.1:9000/readyz"]


def test_the_curl_line_survives_a_shell() -> None:
    line = shlex.split(curl_line("http://127.0.0.1:8000", "it's a model"))
    assert line[:3] == ["curl", "-i", "http://127.0.0.1:8000/v1/chat/completions"]
    body = json.loads(line[line.index("-d") + 1])
    assert body["model"] == "it's a model"
    assert body["temperature"] == 0


def test_a_model_that_is_not_there_is_named(tmp_path: Path) -> None:
    options = UpOptions(port=free_port(), model=str(tmp_path / "absent"), state_directory=tmp_path)
    with pytest.raises(StartupError, match=r"there is no model directory .*absent"):
        up(options)


class Stack:
    """A simulated stack that another process runs."""

    def __init__(self, directory: Path) -> None:
        self.port = free_port()
        arguments = ["--simulated", "--workers", "2", "--port", str(self.port), "--state-dir", str(directory), "--json"]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "ropeway", "up", *arguments],
            cwd=REPOSITORY,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, self.process.stderr and self.process.stderr.read()
        self.document = json.loads(line)
        self.pids = {name: process["pid"] for name, process in self.document["processes"].items()}

    def end(self) -> tuple[int, str]:
        """Exit code and what was said on stderr."""
        _, said = self.process.communicate(timeout=60)
        return self.process.returncode, said


@pytest.fixture
def stack(tmp_path: Path) -> Iterator[Stack]:
    stack = Stack(tmp_path)
    yield stack
    if stack.process.poll() is None:
        stack.process.kill()
        stack.process.communicate()


def gone(pid: int) -> bool:
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.05)
    return False


def test_a_stack_serves_what_it_prints_and_ends_on_ctrl_c(stack: Stack, tmp_path: Path) -> None:
    assert len(stack.document["workers"]) == 2
    assert stat.S_IMODE((tmp_path / "keyring.json").stat().st_mode) == 0o600
    Keyring.load(tmp_path / "keyring.json")
    command = shlex.split(stack.document["curl"])
    content = command[command.index("-d") + 1]
    answer = httpx.post(command[2], content=content, headers={"content-type": "application/json"}, timeout=30)
    assert answer.status_code == 200, answer.text
    assert answer.json()["choices"][0]["message"]["role"] == "assistant"
    assert answer.headers["x-ropeway-policy"] == "kv-aware"
    stack.process.send_signal(signal.SIGINT)
    code, said = stack.end()
    assert code == 0, said
    assert "Stopping." in said
    assert all(gone(pid) for pid in stack.pids.values())


@pytest.mark.parametrize("victim", ["workers", "gateway"])
def test_when_a_part_dies_the_stack_says_which_and_ends(stack: Stack, victim: str) -> None:
    os.kill(stack.pids[victim], signal.SIGKILL)
    code, said = stack.end()
    assert code == 1
    assert f"ropeway: error: {victim} was killed by SIGKILL; the end of " in said
    assert all(gone(pid) for pid in stack.pids.values())
