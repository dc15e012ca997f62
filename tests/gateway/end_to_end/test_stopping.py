"""A gateway that is told to stop: what clients see of it, and its exit status."""

import contextlib
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.gateway.end_to_end.processes import HOST, Fleet, Gateway, Process, chat, eventually, worker_of

pytestmark = pytest.mark.stacks


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    with Fleet(tmp_path_factory.mktemp("fleet"), "--speed", "1", count=1) as fleet:
        yield fleet


def gateway(directory: Path, fleet: Fleet, **config: object) -> Gateway:
    return Gateway(directory, fleet.urls, {"admission": {"enabled": False}, **config})


def take(answer: Iterator[bytes]) -> bytes:
    """All that comes of a body, however it ends."""
    taken = b""
    with contextlib.suppress(httpx.RemoteProtocolError):
        for data in answer:
            taken += data
    return taken


def takes_connections(gateway: Gateway) -> bool:
    with socket.socket() as opened:
        return opened.connect_ex((HOST, int(gateway.url.rpartition(":")[2]))) == 0


def stream(client: httpx.Client, tokens: int) -> contextlib.AbstractContextManager[httpx.Response]:
    return client.stream("POST", "/v1/chat/completions", json=chat("a story", max_tokens=tokens, stream=True))


def test_what_has_begun_is_finished(tmp_path: Path, fleet: Fleet) -> None:
    with gateway(tmp_path, fleet) as stopped, httpx.Client(base_url=stopped.url, timeout=30, trust_env=False) as client:
        with stream(client, 250) as answer:
            body = answer.iter_raw()
            first = next(body)
            stopped.process.send_signal(signal.SIGTERM)
            eventually(lambda: not takes_connections(stopped), "it listens no more")
            # A connection from before is still good for a moment.
            ready = stopped.http.get("/readyz")
            assert (ready.status_code, ready.json(), ready.headers["connection"]) == (503, {"ready": False}, "close")
            rest = first + take(body)
        assert rest.endswith(b"data: [DONE]\n\n")
        assert rest.count(b'"content":"') >= 250
        assert stopped.process.wait(10) == 0


def test_what_is_not_finished_in_time_breaks_off_and_its_worker_is_told(tmp_path: Path, fleet: Fleet) -> None:
    config = {"timeouts": {"shutdown_seconds": 0.5}}
    with gateway(tmp_path, fleet, **config) as stopped:
        with (
            httpx.Client(base_url=stopped.url, timeout=30, trust_env=False) as client,
            stream(client, 90_000) as answer,
        ):
            body = answer.iter_raw()
            first = next(body)
            stopped.process.send_signal(signal.SIGTERM)
            rest = first + take(body)
        assert b'"The gateway stopped before the end of the answer."' in rest
        assert b"[DONE]" not in rest
        assert stopped.process.wait(10) == 0
    eventually(lambda: not fleet.sample(fleet.names[0], "vllm:num_requests_running"), "the engine stops computing")


def test_it_says_so_before_it_stops_listening(tmp_path: Path, fleet: Fleet) -> None:
    """For as long as it was told, or until it is told again."""
    config = {"handover": {"announce_seconds": 600.0}}
    with gateway(tmp_path, fleet, **config) as stopped:
        assert stopped.http.get("/readyz").status_code == 200
        stopped.process.send_signal(signal.SIGTERM)
        eventually(lambda: httpx.get(f"{stopped.url}/readyz", trust_env=False).status_code == 503, "it is not ready")
        answer = httpx.post(f"{stopped.url}/v1/chat/completions", json=chat("hi"), trust_env=False)
        assert answer.status_code == 200, "whoever sends requests has not noticed yet"
        stopped.process.send_signal(signal.SIGTERM)
        assert stopped.process.wait(10) == 0


def test_an_address_is_handed_over(tmp_path: Path, fleet: Fleet) -> None:
    """The next gateway listens before the old one has gone, if both were started to."""
    config = {"handover": {"reuse_port": True}}
    with gateway(tmp_path, fleet, **config) as old:
        port = int(old.url.rpartition(":")[2])
        flags = ["serve", "-c", str(tmp_path / "gateway.yaml")]
        with Process("next-gateway", flags, tmp_path) as following:
            eventually(lambda: "Started server process" in following.said(), "the next one listens", 30)
            old.process.send_signal(signal.SIGTERM)
            assert old.process.wait(10) == 0
            answer = httpx.get(f"http://{HOST}:{port}/readyz", trust_env=False)
            assert (answer.status_code, answer.json()) == (200, {"ready": True})
        assert following.process.returncode == 0


def test_an_address_in_use_is_one_clear_line(tmp_path: Path, fleet: Fleet) -> None:
    with gateway(tmp_path, fleet):
        flags = ["serve", "-c", str(tmp_path / "gateway.yaml")]
        second = Process("second-gateway", flags, tmp_path)
        assert second.process.wait(30) == 1
        second.stop()
        assert second.said().count("\n") == 1
        assert "is in use" in second.said()


def test_a_worker_that_leaves_is_sent_nothing_more_and_finishes(tmp_path: Path, fleet: Fleet) -> None:
    flags = ("--speed", "1", "--announce-seconds", "600", "--finish-seconds", "600")
    with Fleet(tmp_path, *flags, count=1, name="leaving") as leaving, gateway(tmp_path, fleet) as serving:
        name = leaving.names[0]
        serving.operator.post("/admin/workers", json={"url": leaving.urls[0]}).raise_for_status()
        eventually(lambda: serving.worker(name)["healthy"], "it is known")
        with httpx.Client(base_url=leaving.urls[0], timeout=30, trust_env=False) as direct:
            running = direct.stream("POST", "/v1/chat/completions", json=chat("x", max_tokens=90_000, stream=True))
            with running as answer:
                next(answer.iter_raw())
                leaving.process.send_signal(signal.SIGTERM)
                eventually(lambda: serving.worker(name)["reason"] == "draining", "the gateway has heard of it")
                assert {worker_of(serving.post(chat(f"{number}"))) for number in range(8)} == set(fleet.names)
                assert leaving.process.poll() is None
        leaving.process.send_signal(signal.SIGTERM)
        assert leaving.process.wait(10) == 0
