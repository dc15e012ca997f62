"""Sockets and processes: taken ports, unix sockets, signals, several workers in one process."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.gateway.end_to_end.processes import free_ports
from workers.openai.server import CannotListen
from workers.simulated.engine import SimulatedConfig
from workers.simulated.fleet import SimulatedWorker, WorkerOptions


@contextlib.contextmanager
def command(*arguments: str) -> Iterator["subprocess.Popen[str]"]:
    process = subprocess.Popen(
        [sys.executable, "-m", "ropeway", "worker", "simulated", *arguments],
        stderr=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[3],
    )
    with process:
        try:
            yield process
        finally:
            process.kill()


def ready_urls(process: "subprocess.Popen[str]") -> list[str]:
    assert process.stderr is not None
    word, *urls = process.stderr.readline().split()
    assert word == "ready"
    return urls


async def test_a_taken_port_is_one_clear_line(worker: SimulatedWorker) -> None:
    port = worker.server.port
    with pytest.raises(CannotListen, match=f"cannot listen on 127.0.0.1:{port}: Address already in use"):
        SimulatedWorker(SimulatedConfig(), WorkerOptions(port=port))
    with command("--port", str(port)) as process:
        _, stderr = process.communicate(timeout=30)
    assert process.returncode == 1
    assert stderr == f"ropeway worker: cannot listen on 127.0.0.1:{port}: Address already in use\n"


async def test_an_unknown_host_is_one_clear_line() -> None:
    with pytest.raises(CannotListen, match=r"cannot listen on no\.such\.host\.invalid:0"):
        SimulatedWorker(SimulatedConfig(), WorkerOptions(host="no.such.host.invalid", events=False))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_a_fleet_cleanly(number: signal.Signals) -> None:
    with command("--count", "3", "--port", "0") as process:
        urls = ready_urls(process)
        assert len(set(urls)) == 3
        infos = [httpx.get(f"{url}/server_info").json() for url in urls]
        assert len({info["epoch"] for info in infos}) == 3
        assert len({info["kv_events"]["endpoint"] for info in infos}) == 3
        process.send_signal(number)
        assert process.wait(timeout=20) == 0
        assert process.stderr is not None
        assert process.stderr.read() == ""


def test_ports_count_up_from_the_base() -> None:
    base = free_ports(2).start
    with command("--count", "2", "--port", str(base)) as process:
        assert ready_urls(process) == [f"http://127.0.0.1:{base}", f"http://127.0.0.1:{base + 1}"]


async def test_a_unix_socket(start_worker: Any, tmp_path: Path) -> None:
    path = str(tmp_path / "worker.sock")
    worker = await start_worker(WorkerOptions(uds=path))
    assert worker.url == f"unix:{path}"
    assert os.stat(path).st_mode & 0o777 == 0o600
    async with httpx.AsyncClient(transport=httpx.AsyncHTTPTransport(uds=path), base_url="http://worker") as http:
        assert (await http.get("/health")).status_code == 200
    with pytest.raises(CannotListen, match="Address already in use"):
        SimulatedWorker(SimulatedConfig(), WorkerOptions(uds=path))
    await worker.server.stop()
    assert not Path(path).exists()


async def test_a_stale_unix_socket_is_replaced(start_worker: Any, tmp_path: Path) -> None:
    path = str(tmp_path / "worker.sock")
    with socket.socket(socket.AF_UNIX) as stale:
        stale.bind(path)
    worker = await start_worker(WorkerOptions(uds=path))
    assert worker.url == f"unix:{path}"


def test_help_needs_no_torch() -> None:
    script = (
        "import sys; import ropeway\ntry: ropeway.main(sys.argv[1:])\nexcept SystemExit: print('torch' in sys.modules)"
    )
    for arguments in (
        ["worker", "simulated", "--help"],
        ["worker", "reference", "--help"],
        ["model", "fetch", "--help"],
    ):
        done = subprocess.run(
            [sys.executable, "-c", script, *arguments],
            capture_output=True,
            text=True,
            check=True,
            cwd=Path(__file__).parents[3],
        )
        assert "example" in done.stdout
        assert done.stdout.endswith("False\n")


def test_what_the_command_line_cannot_mean() -> None:
    for arguments, message in [
        (["--count", "0"], "--count must be at least 1"),
        (["--count", "2", "--port", "65535"], "do not fit"),
        (["--speed", "0"], "speed must be positive"),
        (["--tokenizer", "/none/such"], "cannot read tokenizer.json"),
    ]:
        with command(*arguments) as process:
            _, stderr = process.communicate(timeout=30)
        assert process.returncode == 1
        assert message in stderr
        assert stderr.count("\n") == 1


async def test_no_events_is_said(start_worker: Any) -> None:
    worker = await start_worker(WorkerOptions(events=False))
    async with httpx.AsyncClient(base_url=worker.url) as http:
        assert json.loads((await http.get("/server_info")).text)["kv_events"] is None
