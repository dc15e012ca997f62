"""Spans, as OpenTelemetry's own exporter in memory gets them."""

import gzip
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import pytest

pytest.importorskip("opentelemetry.sdk", reason="the extra `otel` is not installed")

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from gateway.config import TracingConfig
from gateway.edge.contract import Ending
from gateway.edge.http1 import RequestHead
from gateway.tracing import Tracing
from tests.gateway.end_to_end.processes import Fleet, Gateway, chat
from tests.gateway.test_logs import receipt

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


class Collected:
    def __init__(self, **config: object) -> None:
        self._exporter = InMemorySpanExporter()
        self.tracing = Tracing(TracingConfig(endpoint="http://x", **config), "1.2.3", self._exporter)  # type: ignore[arg-type]

    def spans(self) -> tuple[ReadableSpan, ...]:
        self.tracing.stop()
        return self._exporter.get_finished_spans()


@pytest.fixture
def collected() -> Iterator[Collected]:
    made = Collected()
    yield made
    made.tracing.stop()


class Asked(NamedTuple):
    """What is read of a request."""

    head: RequestHead
    model: str = "m"


def asked(*headers: tuple[bytes, bytes], path: bytes = b"/v1/chat/completions") -> Any:
    return Asked(RequestHead(b"POST", path, list(headers), 0, True, False, False, {}))


def test_a_span_says_what_a_receipt_says(collected: Collected) -> None:
    span = collected.tracing.begin(asked())
    made = receipt()
    made.seen_ttft_ms, made.reported_cached_tokens, made.reported_prompt_tokens = 36.0, 64, 100
    collected.tracing.end(span, made, Ending.COMPLETE, 200, 7)
    (one,) = collected.spans()
    assert (one.name, one.kind, one.parent, one.status.status_code) == (
        "chat m",
        SpanKind.CLIENT,
        None,
        StatusCode.UNSET,
    )
    said = dict(one.attributes or {})
    assert said["gen_ai.operation.name"] == "chat"
    assert (said["gen_ai.usage.input_tokens"], said["gen_ai.usage.output_tokens"]) == (100, 7)
    assert said["gen_ai.usage.cache_read.input_tokens"] == 64
    assert said["gen_ai.response.time_to_first_chunk"] == 0.036
    assert said["ropeway.worker"] == made.candidate.worker
    assert said["http.response.status_code"] == 200
    assert one.resource.attributes["service.name"] == "ropeway"
    assert one.resource.attributes["service.version"] == "1.2.3"


def test_it_is_a_child_of_the_clients_and_the_workers_is_a_child_of_it(collected: Collected) -> None:
    client = f"00-{TRACE}-{PARENT}-01".encode()
    span = collected.tracing.begin(
        asked((b"traceparent", client), (b"tracestate", b"k=v"), path=b"/v1/completions?x=1")
    )
    lines = collected.tracing.header_lines(span).decode()
    collected.tracing.end(span, receipt(), Ending.COMPLETE, 200, 0)
    (one,) = collected.spans()
    assert one.parent is not None
    assert (f"{one.parent.trace_id:032x}", f"{one.parent.span_id:016x}") == (TRACE, PARENT)
    assert lines == f"traceparent: 00-{TRACE}-{one.context.span_id:016x}-01\r\ntracestate: k=v\r\n"
    assert one.name == "text_completion m"


@pytest.mark.parametrize(
    ("ending", "status", "kind"),
    [
        (Ending.COMPLETE, 404, "404"),
        (Ending.UPSTREAM_BROKE, 200, "upstream_broke"),
        (Ending.CLIENT_GONE, 0, "client_gone"),
    ],
)
def test_errors_say_their_kind(collected: Collected, ending: Ending, status: int, kind: str) -> None:
    span = collected.tracing.begin(asked())
    collected.tracing.end(span, receipt(), ending, status, 0)
    (one,) = collected.spans()
    assert one.status.status_code is StatusCode.ERROR
    assert dict(one.attributes or {})["error.type"] == kind


@pytest.mark.parametrize(("flags", "count"), [(b"01", 1), (b"00", 0)])
def test_a_client_that_has_decided_is_followed(flags: bytes, count: int) -> None:
    collected = Collected(sampled_share=0.5)
    parent = (b"traceparent", f"00-{TRACE}-{PARENT}-".encode() + flags)
    span = collected.tracing.begin(asked(parent))
    assert collected.tracing.header_lines(span).endswith(b"-" + flags + b"\r\n")
    collected.tracing.end(span, receipt(), Ending.COMPLETE, 200, 0)
    assert len(collected.spans()) == count


def test_a_share_of_the_others_is_sampled() -> None:
    collected = Collected(sampled_share=0.25)
    for _ in range(400):
        span = collected.tracing.begin(asked())
        collected.tracing.end(span, receipt(), Ending.COMPLETE, 200, 0)
    assert 50 < len(collected.spans()) < 150


def test_what_is_no_context_begins_a_trace(collected: Collected) -> None:
    span = collected.tracing.begin(asked((b"traceparent", b"nonsense")))
    collected.tracing.end(span, receipt(), Ending.COMPLETE, 200, 0)
    (one,) = collected.spans()
    assert one.parent is None


class Collector(BaseHTTPRequestHandler):
    """Takes what an exporter sends, as OTLP over HTTP has it."""

    spans: ClassVar[list[Any]] = []

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        if self.headers.get("content-encoding") == "gzip":
            body = gzip.decompress(body)
        for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
            for scope in resource.scope_spans:
                self.spans.extend(scope.spans)
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


def test_a_gateway_sends_its_spans_and_names_them_to_workers(tmp_path: Path) -> None:
    Collector.spans.clear()
    with HTTPServer(("127.0.0.1", 0), Collector) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        config = {"tracing": {"endpoint": f"http://127.0.0.1:{server.server_port}/v1/traces"}}
        with Fleet(tmp_path, count=1) as fleet, Gateway(tmp_path, fleet.urls, config) as gateway:
            parent = {"traceparent": f"00-{TRACE}-{PARENT}-01", "x-simulate": '{"echo": true}'}
            seen = gateway.post(chat("traced"), parent).json()
            assert gateway.post(chat("of nobody", model="nobody")).status_code == 404
        server.shutdown()
    # What is left is sent when the gateway ends. Who was refused before a worker was chosen has no span.
    (span,) = Collector.spans
    assert (span.trace_id.hex(), span.parent_span_id.hex(), span.name) == (TRACE, PARENT, "chat simulated")
    told = [value for name, value in seen["headers"] if name.lower() == "traceparent"]
    assert told == [f"00-{TRACE}-{span.span_id.hex()}-01"]


def test_without_its_packages_it_is_said() -> None:
    program = (
        "import sys; sys.modules['opentelemetry.exporter'] = None\n"
        "import ropeway; sys.exit(ropeway.main(['serve', '--port', '1']))"
    )
    environment = {**os.environ, "ROPEWAY_TRACING_ENDPOINT": "http://127.0.0.1:9"}
    ended = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    assert ended.returncode == 2
    assert "tracing.endpoint: opentelemetry.exporter.otlp is not installed: pip install 'ropeway[otel]'" in ended.stderr
