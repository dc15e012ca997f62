"""What must not travel, and what must not be written down: secrets in every place, and a look at where they went."""

import json
import re
import socket
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any, NamedTuple

import pytest

from gateway.api_keys import add_api_key
from tests.gateway.end_to_end.processes import HOST, Gateway, chat, eventually, free_ports

pytestmark = pytest.mark.stacks

MODEL = "confided"
ADMIN_KEY = "operator-0123456789-secret"
REDIS_PASSWORD = "hunter2-redis-password"
SECRET = "4711-do-not-tell"


class Confidant:
    """A worker that remembers what it was told, and tells secrets of its own."""

    def __init__(self) -> None:
        self.requests: list[dict[str, str]] = []
        self.bodies: list[str] = []
        self.status = 200
        self.breaks = self.closes = False
        confidant = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_: object) -> None:
                pass

            def do_GET(self) -> None:
                models = {"object": "list", "data": [{"id": MODEL, "object": "model", "max_model_len": 65536}]}
                found = {"/health": {}, "/v1/models": models}.get(self.path)
                self._answer(404 if found is None else 200, found or {})

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"])).decode(errors="replace")
                if not self.path.startswith("/v1/chat"):
                    self._answer(404, {})
                    return
                confidant.requests.append({name.lower(): value for name, value in self.headers.items()})
                confidant.bodies.append(body)
                if confidant.closes:
                    self.close_connection = True
                    return
                if confidant.breaks:
                    self.wfile.write(b"HTTP/1.1 200 OK\r\ncontent-length: 1000\r\n\r\n" + body[:20].encode())
                    self.close_connection = True
                    return
                choice = {"index": 0, "message": {"role": "assistant", "content": "ok"}, "finish_reason": "stop"}
                usage = {"prompt_tokens": 1, "completion_tokens": 1}
                answer = {"id": "c", "object": "chat.completion", "choices": [choice], "usage": usage}
                self._answer(confidant.status, answer if confidant.status == 200 else {"error": {"message": body}})

            def _answer(self, status: int, document: Any) -> None:
                data = json.dumps(document).encode()
                self.send_response(status)
                for name, value in (
                    ("set-cookie", "worker=upstream-secret"),
                    ("x-api-key", "upstream-secret"),
                    ("authorization", "Bearer upstream-secret"),
                    ("x-worker-says", "this travels"),
                    ("content-type", "application/json"),
                    ("content-length", str(len(data))),
                ):
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(data)

        self._server = ThreadingHTTPServer((HOST, 0), Handler)
        self._server.daemon_threads = True
        self._thread = Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)
        self._thread.start()
        self.url = f"http://{HOST}:{self._server.server_address[1]}"

    def stop(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class Scene(NamedTuple):
    worker: Confidant
    gateway: Gateway
    key: str

    @property
    def headers(self) -> dict[str, str]:
        return {"authorization": f"Bearer {self.key}"}


@pytest.fixture(scope="module")
def worker() -> Iterator[Confidant]:
    worker = Confidant()
    yield worker
    worker.stop()


def scene_of(directory: Path, worker: Confidant, **config: Any) -> Gateway:
    (nobody,) = free_ports(1)
    (directory / "admin").write_text(ADMIN_KEY)
    whole = {
        "tenants": {
            "api_keys_file": str(directory / "keys.jsonl"),
            "api_keys_redis": f"redis://user:{REDIS_PASSWORD}@{HOST}:{nobody}",
        },
        "admin": {"key_file": str(directory / "admin")},
        "metrics": {"key_file": str(directory / "admin")},
        "limits": {"body_bytes_max": 100_000},
        **config,
    }
    return Gateway(directory, [worker.url], whole, admin_key=ADMIN_KEY)


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory, worker: Confidant) -> Iterator[Scene]:
    directory = tmp_path_factory.mktemp("hygiene")
    key = add_api_key(directory / "keys.jsonl", "acme")
    with scene_of(directory, worker) as gateway:
        yield Scene(worker, gateway, key)


def prompt(**fields: Any) -> dict[str, Any]:
    return {**chat(f"my secret is {SECRET}"), "model": MODEL, **fields}


# What must not travel


def test_credentials_of_clients_stay_at_the_gateway(scene: Scene) -> None:
    secrets = {
        "authorization": f"Bearer {scene.key}",
        "x-api-key": "sk-client-secret",
        "api-key": "client-secret",
        "cookie": "session=client-secret",
        "proxy-authorization": "Basic client-secret",
        "x-ropeway-session": "client-secret",
    }
    passed = {"user-agent": "a client", "x-trace": "1", "traceparent": "00-1-2-01"}
    assert scene.gateway.post(prompt(), {**secrets, **passed}).status_code == 200
    received = scene.worker.requests[-1]
    assert not secrets.keys() & received.keys()
    assert "secret" not in json.dumps(received)
    assert {name: received[name] for name in passed} == passed


def test_credentials_of_workers_stay_there(scene: Scene) -> None:
    answer = scene.gateway.post(prompt(), scene.headers)
    assert answer.headers["x-worker-says"] == "this travels"
    assert "upstream-secret" not in str(answer.headers)
    assert not {"set-cookie", "authorization", "x-api-key"} & answer.headers.keys()


@pytest.mark.parametrize(
    "written",
    [
        '"kv_transfer_params": {"do_remote_prefill": true, "remote_host": "10.0.0.1"}',
        '"kv_transfer_params": null',
        '"kv_transfer_params" \n : {"ropeway": ["plan"]}',
    ],
)
def test_plans_of_clients_stay_at_the_gateway(scene: Scene, written: str) -> None:
    body = json.dumps(prompt())[:-1] + f", {written}}}"
    assert scene.gateway.post(body.encode(), scene.headers).status_code == 200
    assert "kv_transfer_params" not in json.loads(scene.worker.bodies[-1])


@pytest.mark.parametrize(
    "written",
    ['"kv_transfer_params": 1, "kv_transfer_params": 2', '"kv_transfer\\u005fparams": 1', '"cache\\u005fsalt": "x"'],
)
def test_what_two_readers_could_read_differently_is_refused(scene: Scene, written: str) -> None:
    count = len(scene.worker.bodies)
    answer = scene.gateway.post((json.dumps(prompt())[:-1] + f", {written}}}").encode(), scene.headers)
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "duplicate_key")
    assert len(scene.worker.bodies) == count


@pytest.mark.parametrize("kept", ["a", "A-b_c.d:1", "x" * 128])
def test_a_request_id_that_is_fit_for_logs_is_kept(scene: Scene, kept: str) -> None:
    answer = scene.gateway.post(prompt(), {**scene.headers, "x-request-id": kept})
    assert answer.headers["x-request-id"] == kept
    assert scene.worker.requests[-1]["x-request-id"].startswith(f"{kept}-")


@pytest.mark.parametrize(
    "unfit", ["x" * 129, "two words", 'a"b', "a/b", "a%0d%0ab", "\u00e9".encode().decode("latin-1"), "<b>"]
)
def test_a_request_id_that_is_not_is_replaced(scene: Scene, unfit: str) -> None:
    headers = {name: value.encode("latin-1") for name, value in {**scene.headers, "x-request-id": unfit}.items()}
    for body in (prompt(), {"model": "none"}):
        answer = scene.gateway.http.post("/v1/chat/completions", json=body, headers=headers)
        assert re.fullmatch(r"req-[0-9a-f]{16}", answer.headers["x-request-id"])


def test_a_header_cannot_be_split(scene: Scene) -> None:
    """Bare line ends within a value, which some would take for the end of a line."""
    port = int(scene.gateway.url.rpartition(":")[2])
    for value in (b"a\nx-evil: 1", b"a\rx-evil: 1", b"a\x00b"):
        with socket.create_connection((HOST, port), 10.0) as opened:
            opened.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nhost: h\r\nx-request-id: %b\r\n\r\n" % value)
            assert opened.recv(65536).startswith(b"HTTP/1.1 400 ")


def test_the_bounds_of_heads_and_bodies(scene: Scene) -> None:
    large = scene.gateway.post(b'{"x": "' + b"x" * 100_000, scene.headers)
    assert (large.status_code, large.json()["error"]["code"]) == (413, "payload_too_large")
    long = scene.gateway.post(prompt(), {**scene.headers, "x-long": "y" * 70_000})
    assert (long.status_code, long.json()["error"]["code"]) == (431, "headers_too_large")
    many = scene.gateway.post(prompt(), {**scene.headers, **{f"x-{number}": "1" for number in range(250)}})
    assert many.status_code == 431


def test_operators_see_what_clients_do_not(scene: Scene) -> None:
    for path in ("/status", "/metrics", "/admin/workers"):
        assert scene.gateway.http.get(path, headers=scene.headers).status_code == 401
        assert scene.gateway.http.get(path).status_code == 401
        assert scene.gateway.operator.get(path).status_code == 200


def test_errors_say_nothing_of_what_is_behind(scene: Scene, tmp_path: Path) -> None:
    """No traceback, and no address of a worker."""
    where = scene.worker.url.partition("//")[2]
    try:
        scene.worker.closes = True
        refused = [scene.gateway.post(prompt(), scene.headers)]
    finally:
        scene.worker.closes = False
    eventually(lambda: scene.gateway.healthy() == 1, "the worker is trusted again", 30.0)
    for body in ({"model": "none"}, [1], b"{", {**prompt(), "model": 1}):
        refused += [
            scene.gateway.post(body, scene.headers, path) for path in ("/v1/chat/completions", "/route/explain")
        ]
    refused.append(scene.gateway.http.get("/nowhere", headers=scene.headers))
    assert refused[0].status_code == 503
    for answer in refused:
        assert answer.status_code >= 400
        assert set(answer.json()) == {"error"}
        assert "Traceback" not in answer.text
        assert where not in answer.text


def test_operators_pages_are_off_where_others_could_reach_them(tmp_path: Path) -> None:
    with Gateway(tmp_path, (), {"host": "0.0.0.0"}, has_status=False) as gateway:
        for path in ("/status", "/metrics", "/admin/workers"):
            assert gateway.http.get(path).status_code == 404
        assert "admin routes are off: 0.0.0.0 is not loopback and admin.key_file is not set" in gateway.said()
        assert "metrics routes are off" in gateway.said()


# What must not be written down


@pytest.mark.parametrize(
    ("level", "logs", "name"),
    [
        ("info", {}, SECRET),
        ("debug", {}, SECRET),
        ("info", {"requests": "all", "format": "json"}, "a-path-is-named"),  # there, and nothing after it
    ],
)
def test_nothing_that_is_confided_is_logged_or_shown(
    tmp_path: Path, worker: Confidant, level: str, logs: dict[str, str], name: str
) -> None:
    key = add_api_key(tmp_path / "keys.jsonl", "acme")
    with scene_of(tmp_path, worker, log_level=level, logs=logs) as gateway:
        everywhere(gateway, worker, key, name)
        shown = gateway.operator.get("/metrics").text + json.dumps(gateway.status())
        eventually(lambda: "is ready" in gateway.said(), "something is logged at all")
        gateway.stop()
        written = gateway.said()
    for secret in (SECRET, key, ADMIN_KEY, REDIS_PASSWORD, "wrong-key", "upstream-secret"):
        assert secret not in written, f"{secret} in the log"
        assert secret not in shown, f"{secret} on the operators' pages"
    assert "Traceback" not in written


def everywhere(gateway: Gateway, worker: Confidant, key: str, name: str) -> None:
    """A secret in every place of requests that go well, and of such that go wrong in every way."""
    ours = {"authorization": f"Bearer {key}"}
    marked = {**ours, "x-ropeway-session": SECRET, "x-note": SECRET, "cookie": SECRET}
    for body in (
        prompt(),
        prompt(stream=True),
        prompt(cache_salt=SECRET),
        prompt(user=SECRET, metadata={SECRET: SECRET}, tools=[{"type": "function", "function": {"name": SECRET}}]),
        prompt(model=SECRET),
        prompt(messages=[{"role": SECRET, "content": [{"type": SECRET}]}]),
        prompt(messages=SECRET),
        prompt(cache_salt=[SECRET]),
        {SECRET: SECRET},
        [SECRET],
        f'{{"{SECRET}'.encode(),
        b"\xff" + SECRET.encode(),
        SECRET.encode() * 20_000,
    ):
        for path in ("/v1/chat/completions", f"/v1/chat/completions?key={SECRET}", "/route/explain", f"/v1/{name}"):
            gateway.post(body, marked, path)
    for headers in (
        {"authorization": "Bearer wrong-key"},
        {"authorization": f"Basic {SECRET}"},
        {**ours, "x-request-id": f"{SECRET} {SECRET}"},
        {**ours, "x-ropeway-policy": SECRET},
        {**ours, "x-ropeway-fidelity": SECRET},
        {**ours, "x-ropeway-namespace": SECRET},
        {**ours, "x-ropeway-ttft-budget-ms": SECRET},
    ):
        gateway.post(prompt(), headers)
        gateway.http.get(f"/v1/models/{name}", headers=headers)
        gateway.http.get(f"/status?{SECRET}", headers=headers)
        gateway.http.get(f"/{name}", headers=headers)
    gateway.operator.post("/admin/workers", content=f'{{"url": "{SECRET}"}}')
    raw = b"POST /v1/chat/completions HTTP/1.1\r\nhost: h\r\ntransfer-encoding: chunked\r\n" + b"%b\r\n\r\n"
    for text in (
        raw % f"authorization: Bearer {key}".encode() + SECRET.encode() + b"\r\n",
        SECRET.encode() + b"\r\n\r\n",
    ):
        with socket.create_connection((HOST, int(gateway.url.rpartition(":")[2])), 10.0) as opened:
            opened.sendall(text)
            opened.recv(65536)
    try:
        for worker.status in (400, 401, 500, 503):
            gateway.post(prompt(), marked)
        worker.status = 200
        worker.breaks = True
        with pytest.raises(Exception, match=r"peer closed|incomplete|Server disconnected"):
            gateway.post(prompt(), marked)
    finally:
        worker.status, worker.breaks = 200, False
