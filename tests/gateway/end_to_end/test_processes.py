"""`ropeway serve --processes`: gateways of one port that share an index of their own."""

import os
import signal
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import httpx
import pytest
import yaml

from tests.gateway.end_to_end.processes import (
    HOST,
    Fleet,
    Gateway,
    Process,
    cached_tokens,
    chat,
    eventually,
    free_ports,
    full_hit,
    matched_tokens,
)

pytestmark = pytest.mark.stacks


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("processes")


@pytest.fixture(scope="module")
def fleet(folder: Path) -> Iterator[Fleet]:
    with Fleet(folder, count=2) as fleet:
        yield fleet


@pytest.fixture(scope="module")
def gateway(folder: Path, fleet: Fleet) -> Iterator[Gateway]:
    ports = free_ports(2)
    config = {
        "processes": 2,
        "metrics": {"port": ports[0]},
        "admin": {"port": ports[0]},
        "sharing": {"directory": str(folder / "valkey")},
    }
    with Gateway(folder, fleet.urls, config, has_status=False) as gateway:
        for port in ports:
            gateway.wait_for(lambda port=port: len(members(port)) == 2, "both processes know both workers")
        yield gateway


def members(port: int) -> list[str]:
    workers = httpx.get(f"http://{HOST}:{port}/status", trust_env=False).json()["workers"]
    return [worker["name"] for worker in workers if worker["healthy"]]


def routed(port: int) -> float:
    text = httpx.get(f"http://{HOST}:{port}/metrics", trust_env=False).text
    return sum(float(line.split()[-1]) for line in text.splitlines() if line.startswith("ropeway_requests_total{"))


def operators_port(gateway: Gateway) -> int:
    config = yaml.safe_load((gateway.log.parent / "gateway.yaml").read_text())
    return int(config["metrics"]["port"])


def children(gateway: Gateway) -> list[int]:
    pid = gateway.process.pid
    found = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [int(child) for child in found if b"--process\0" in Path(f"/proc/{child}/cmdline").read_bytes()]


def on_a_new_connection(gateway: Gateway, content: str) -> httpx.Response:
    with httpx.Client(base_url=gateway.url, trust_env=False, timeout=30) as client:
        return client.post("/v1/chat/completions", json=chat(content))


def test_either_process_finds_what_the_other_has_sent(gateway: Gateway) -> None:
    base = operators_port(gateway)
    before = [routed(base + number) for number in range(2)]
    content = "what both of them know, told to one of them " * 8
    on_a_new_connection(gateway, content)
    hit = full_hit(chat(content))
    eventually(lambda: matched_tokens(on_a_new_connection(gateway, content)) == hit, "it is known")

    def both() -> bool:
        answer = on_a_new_connection(gateway, content)
        assert (matched_tokens(answer), cached_tokens(answer)) == (hit, hit)
        return all(routed(base + number) > before[number] for number in range(2))

    eventually(both, "both processes have served")


def test_one_that_dies_is_started_again_and_the_others_serve(gateway: Gateway) -> None:
    first, second = children(gateway)
    os.kill(first, signal.SIGKILL)

    def replaced() -> bool:
        with suppress(httpx.TransportError):  # the kernel had dealt it to the one that died
            assert on_a_new_connection(gateway, "somebody is there").status_code == 200
        return second in children(gateway) and len(children(gateway)) == 2

    eventually(replaced, "another is there", 30.0)
    assert "a process has ended with status -9" in gateway.said()
    base = operators_port(gateway)
    for number in range(2):
        gateway.wait_for(lambda number=number: len(members(base + number)) == 2, "it knows the workers")


def test_both_end_in_good_order(folder: Path, fleet: Fleet) -> None:
    config = {"processes": 2, "sharing": {"directory": str(folder / "other")}}
    with Gateway(folder, fleet.urls, config, name="ends", has_status=False) as gateway:
        eventually(lambda: gateway.http.get("/readyz").status_code == 200, "it is ready", 30.0)
        served = children(gateway)
        assert len(served) == 2
        gateway.process.send_signal(signal.SIGTERM)
        assert gateway.process.wait(15) == 0
        assert not any(Path(f"/proc/{child}").exists() for child in served)


@pytest.mark.parametrize(
    ("flags", "status", "message"),
    [
        (["--tokenizer", "m=/nowhere"], 2, "tokenizers.m: /nowhere"),
        (["--port", "0"], 2, "a port lies in 1..65535"),
        (["--processes", "65"], 2, "processes: Expected `int` <= 64"),
    ],
)
def test_what_cannot_be_served_is_said_and_nothing_is_left(
    folder: Path, flags: list[str], status: int, message: str
) -> None:
    (port,) = free_ports(1)
    environment = {"ROPEWAY_SHARING_DIRECTORY": str(folder / "wrong")}
    line = ["serve", "--processes", "2", "--port", str(port), *flags]
    with Process(f"wrong{status}{message[:5]}", line, folder, environment) as process:
        assert process.process.wait(60) == status
        assert message in process.said()
        assert "Traceback" not in process.said()


def test_ports_of_operators_must_not_overlap(folder: Path) -> None:
    (port,) = free_ports(1)
    environment = {
        "ROPEWAY_SHARING_DIRECTORY": str(folder / "overlap"),
        "ROPEWAY_METRICS_PORT": str(port + 10),
        "ROPEWAY_ADMIN_PORT": str(port + 11),
    }
    with Process("overlap", ["serve", "--processes", "2", "--port", str(port)], folder, environment) as process:
        assert process.process.wait(60) == 2
        assert "they overlap" in process.said()
