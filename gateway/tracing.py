"""A span for each request, by OpenTelemetry, in the words of its conventions for generative AI.

    client's traceparent ─► span of the gateway ─► its traceparent, to the worker

Of a request there are numbers and names, as in its receipt; never a text. Spans are collected in memory and sent by a
thread; what cannot be sent is dropped and said in the log. Needs the packages of the extra `otel`.

Conventions: https://opentelemetry.io/docs/specs/semconv/gen-ai/gen-ai-spans/ (inference), attributes of our own begin
with `ropeway.`.
"""

from collections.abc import Mapping

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
from opentelemetry.trace import Span, SpanKind, StatusCode, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from gateway.config import TracingConfig
from gateway.edge.contract import Ending
from gateway.outbound import TRACE_HEADERS
from gateway.requests import Request
from policies.contract import Receipt

_OPERATIONS = {"/v1/chat/completions": "chat", "/v1/completions": "text_completion", "/v1/embeddings": "embeddings"}
_FAILED_STATUS_MIN = 400
_QUEUED_SPANS_MAX = 8192


class Tracing:
    """Begins and ends the spans of one gateway."""

    def __init__(self, config: TracingConfig, version: str, exporter: SpanExporter | None = None) -> None:
        """`exporter` in place of the one that sends to `config.endpoint`."""
        resource = Resource.create({"service.name": config.service_name, "service.version": version})
        self._provider = TracerProvider(
            sampler=ParentBased(TraceIdRatioBased(config.sampled_share)), resource=resource, shutdown_on_exit=False
        )
        exporter = exporter or OTLPSpanExporter(endpoint=config.endpoint)
        self._provider.add_span_processor(BatchSpanProcessor(exporter, max_queue_size=_QUEUED_SPANS_MAX))
        self._tracer = self._provider.get_tracer("ropeway", version)
        self._propagator = TraceContextTextMapPropagator()

    def begin(self, request: Request) -> Span:
        """The span of a request from now on, a child of the client's where it names one."""
        told = {
            name.decode("latin-1"): value.decode("latin-1")
            for name, value in request.head.headers
            if name in TRACE_HEADERS
        }
        path = request.head.path.decode("latin-1")
        operation, model = _OPERATIONS.get(path, path.rpartition("/")[2]), request.model
        span: Span = self._tracer.start_span(
            f"{operation} {model}",
            self._propagator.extract(told),
            SpanKind.CLIENT,
            {"gen_ai.operation.name": operation, "gen_ai.request.model": model},
        )
        return span

    def header_lines(self, span: Span) -> bytes:
        """What the worker is told, so that its spans are children of ours."""
        carrier: dict[str, str] = {}
        self._propagator.inject(carrier, set_span_in_context(span))
        return "".join(f"{name}: {value}\r\n" for name, value in carrier.items()).encode()

    def end(self, span: Span, receipt: Receipt, ending: Ending, status: int, output_tokens: int) -> None:
        if not span.is_recording():
            return
        span.set_attributes(_attributes(receipt, ending, status, output_tokens))
        if ending is not Ending.COMPLETE or status >= _FAILED_STATUS_MIN:
            span.set_attribute("error.type", str(status) if ending is Ending.COMPLETE else ending.value)
            span.set_status(StatusCode.ERROR)
        span.end()

    def stop(self) -> None:
        """Send what is left. Waits for it."""
        self._provider.shutdown()


def _attributes(receipt: Receipt, ending: Ending, status: int, output_tokens: int) -> Mapping[str, str | int | float]:
    chosen, query = receipt.candidate, receipt.query
    said: dict[str, str | int | float | None] = {
        "http.response.status_code": status,
        "gen_ai.usage.input_tokens": receipt.reported_prompt_tokens or query.prompt_tokens,
        "gen_ai.usage.output_tokens": output_tokens or None,
        "gen_ai.request.max_tokens": query.output_tokens_max or None,
        "gen_ai.usage.cache_read.input_tokens": receipt.reported_cached_tokens,
        "gen_ai.response.time_to_first_chunk": receipt.seen_ttft_ms and receipt.seen_ttft_ms / 1e3,
        "ropeway.request.id": receipt.request_id,
        "ropeway.tenant": receipt.tenant,
        "ropeway.policy": receipt.policy,
        "ropeway.worker": chosen.worker,
        "ropeway.matched_tokens": chosen.matched_tokens,
        "ropeway.evidence": str(chosen.evidence),
        "ropeway.decision_us": receipt.decision_us,
        "ropeway.ending": ending.value,
    }
    return {name: value for name, value in said.items() if value is not None}
