"""The endpoint picker behind a real Envoy: its data path, our decisions."""

import base64
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.gateway.end_to_end.processes import (
    HOST,
    MODEL,
    Fleet,
    Gateway,
    Process,
    cached_tokens,
    chat,
    eventually,
    free_ports,
    full_hit,
    matched_tokens,
    worker_of,
)

pytestmark = pytest.mark.envoy
pytest.importorskip("grpc")
envoy_binary = pytest.importorskip("envoy._bin")

DUPLEX = {
    "request_header_mode": "SEND",
    "request_body_mode": "FULL_DUPLEX_STREAMED",
    "request_trailer_mode": "SEND",
    "response_header_mode": "SEND",
    "response_body_mode": "FULL_DUPLEX_STREAMED",
    "response_trailer_mode": "SEND",
}
BUFFERED = {
    "request_header_mode": "SEND",
    "request_body_mode": "BUFFERED",
    "response_header_mode": "SEND",
    "response_body_mode": "STREAMED",
}


def configuration(listens: int, picker: int, admin: int, modes: Mapping[str, str]) -> dict[str, Any]:
    def address(port: int) -> dict[str, Any]:
        return {"socket_address": {"address": HOST, "port_value": port}}

    def typed(kind: str, **fields: Any) -> dict[str, Any]:
        return {"@type": f"type.googleapis.com/envoy.extensions.{kind}", **fields}

    processor = typed(
        "filters.http.ext_proc.v3.ExternalProcessor",
        grpc_service={"envoy_grpc": {"cluster_name": "picker"}},
        processing_mode=modes,
        message_timeout="30s",
    )
    manager = typed(
        "filters.network.http_connection_manager.v3.HttpConnectionManager",
        stat_prefix="ingress",
        route_config={
            "virtual_hosts": [
                {
                    "name": "all",
                    "domains": ["*"],
                    "routes": [{"match": {"prefix": "/"}, "route": {"cluster": "workers", "timeout": "0s"}}],
                }
            ]
        },
        http_filters=[
            {"name": "picker", "typed_config": processor},
            {"name": "router", "typed_config": typed("filters.http.router.v3.Router")},
        ],
    )
    grpc_options = typed("upstreams.http.v3.HttpProtocolOptions", explicit_http_config={"http2_protocol_options": {}})
    endpoints = [{"lb_endpoints": [{"endpoint": {"address": address(picker)}}]}]
    return {
        "admin": {"address": address(admin)},
        "static_resources": {
            "listeners": [
                {
                    "name": "clients",
                    "address": address(listens),
                    "filter_chains": [{"filters": [{"name": "http", "typed_config": manager}]}],
                }
            ],
            "clusters": [
                {
                    "name": "workers",
                    "type": "ORIGINAL_DST",
                    "lb_policy": "CLUSTER_PROVIDED",
                    "connect_timeout": "2s",
                    "original_dst_lb_config": {
                        "use_http_header": True,
                        "http_header_name": "x-gateway-destination-endpoint",
                    },
                },
                {
                    "name": "picker",
                    "type": "STATIC",
                    "connect_timeout": "2s",
                    "typed_extension_protocol_options": {
                        "envoy.extensions.upstreams.http.v3.HttpProtocolOptions": grpc_options
                    },
                    "load_assignment": {"cluster_name": "picker", "endpoints": endpoints},
                },
            ],
        },
    }


class Envoy(Process):
    def __init__(self, directory: Path, picker: int, modes: Mapping[str, str]) -> None:
        port, admin = free_ports(2)
        path = directory / "envoy.json"
        path.write_text(json.dumps(configuration(port, picker, admin, modes)))
        super().__init__("envoy", ["-c", str(path), "--concurrency", "1", "--base-id", str(port)], directory)
        self.http = httpx.Client(base_url=f"http://{HOST}:{port}", timeout=30, trust_env=False)
        ready = f"http://{HOST}:{admin}/ready"
        self.wait_for(lambda: httpx.get(ready, trust_env=False).status_code == 200, "ready")

    def _command(self, arguments: Sequence[str]) -> list[str]:
        return [str(Path(envoy_binary.__file__).parent / "envoy"), *arguments]

    def stop(self) -> None:
        self.http.close()
        super().stop()

    def post(self, body: Any, path: str = "/v1/chat/completions", **headers: str) -> httpx.Response:
        return self.http.post(path, json=body, headers=headers)


class World:
    def __init__(self, fleet: Fleet, gateway: Gateway, envoy: Envoy) -> None:
        self.fleet, self.gateway, self.envoy = fleet, gateway, envoy


@pytest.fixture(scope="module", params=[DUPLEX, BUFFERED], ids=["duplex", "buffered"])
def world(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    directory = tmp_path_factory.mktemp("envoy")
    (picker,) = free_ports(1)
    with ExitStack() as stack:
        fleet = stack.enter_context(Fleet(directory, count=2))
        config = {"envoy": {"port": picker}, "limits": {"body_bytes_max": 200_000}, "usage": {"requested": True}}
        gateway = stack.enter_context(Gateway(directory, fleet.urls, config))
        yield World(fleet, gateway, stack.enter_context(Envoy(directory, picker, request.param)))


def test_a_conversation_stays_where_its_prefix_is(world: World) -> None:
    body = chat("what was said before, and is said again " * 10)
    first = world.envoy.post(body)
    assert first.status_code == 200, first.text
    worker = worker_of(first)
    world.gateway.wait_confirmed(body, worker, full_hit(body))
    for _ in range(4):
        answer = world.envoy.post(body)
        assert (worker_of(answer), matched_tokens(answer)) == (worker, full_hit(body))
        assert cached_tokens(answer) == full_hit(body)
    assert len(world.fleet.requests(worker)) >= 5
    world.gateway.wait_idle()


def test_the_worker_gets_what_the_gateway_would_have_sent(world: World) -> None:
    body = chat("salted", kv_transfer_params={"remote": "x"}, unknown={"kept": 1.0})
    headers = {"x-simulate": json.dumps({"echo": True}), "x-mine": "kept", "x-request-id": "given"}
    seen = world.envoy.post(body, **headers).json()
    sent = json.loads(base64.b64decode(seen["body_base64"]))
    assert sent.pop("cache_salt").startswith("rw1.")
    assert sent == {key: value for key, value in body.items() if key != "kv_transfer_params"} | {
        key: sent[key] for key in ("request_id",) if key in sent
    }
    arrived = {name.lower(): value for name, value in seen["headers"]}
    assert arrived["x-mine"] == "kept"
    assert arrived["x-request-id"].startswith("given")
    assert arrived["x-request-id"] != "given"  # two clients may give the same


def test_streams_are_passed_on_and_counted(world: World) -> None:
    before = world.gateway.status()["requests"]
    with world.envoy.http.stream("POST", "/v1/chat/completions", json=chat("a stream", stream=True)) as answer:
        text = answer.read().decode()
    assert answer.status_code == 200
    events = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
    assert events[-1] == "[DONE]"
    # What the gateway had asked for itself is not the client's to see.
    assert not any(json.loads(event).get("usage") for event in events[:-1])
    world.gateway.wait_idle()
    (receipt, *_) = [r for r in world.gateway.status()["receipts"] if r["worker"] == answer.headers["x-ropeway-worker"]]
    assert receipt["seen_ttft_ms"] > 0 or before


def test_errors_are_in_openais_form(world: World) -> None:
    answer = world.envoy.post({"model": "nobody", "messages": []})
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found")
    answer = world.envoy.post({"model": MODEL, "prompt": "x" * 300_000}, "/v1/completions")
    assert (answer.status_code, answer.json()["error"]["code"]) in [(413, "payload_too_large"), (413, None)]
    world.gateway.wait_idle()


def test_a_long_body_arrives_whole(world: World) -> None:
    body = {"model": MODEL, "prompt": "0123456789" * 12_000, "max_tokens": 1}
    answer = world.envoy.post(body, "/v1/completions")
    assert answer.status_code == 200, answer.text
    assert answer.json()["usage"]["prompt_tokens"] == 120_000


def test_a_client_that_leaves_is_not_waited_for(world: World) -> None:
    body = chat("somebody who leaves", stream=True, max_tokens=2000)
    with world.envoy.http.stream("POST", "/v1/chat/completions", json=body) as answer:
        next(answer.iter_bytes())
    world.gateway.wait_idle()
    told = (exchange["disconnected_at"] for name in world.fleet.names for exchange in world.fleet.requests(name))
    eventually(lambda: any(told), "its worker is told")
