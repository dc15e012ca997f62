"""The endpoint picker that Envoy asks over gRPC: messages of ext_proc to what `gateway.envoy.picker` does with them.

Body modes: FULL_DUPLEX_STREAMED, as the Gateway API Inference Extension has it (the head is answered when the body is
there), and BUFFERED for requests; FULL_DUPLEX_STREAMED or STREAMED for answers. Needs the packages of the extra
`envoy`.
"""

import logging
from collections.abc import AsyncIterator
from typing import Any

import grpc
from envoy.config.core.v3 import base_pb2
from envoy.extensions.filters.http.ext_proc.v3.processing_mode_pb2 import ProcessingMode
from envoy.service.ext_proc.v3 import external_processor_pb2 as messages
from envoy.service.ext_proc.v3 import external_processor_pb2_grpc as services
from google.protobuf.struct_pb2 import Struct

from gateway.config import EnvoyConfig
from gateway.edge.http1 import Headers
from gateway.edge.server import Handler
from gateway.envoy.picker import DESTINATION_HEADER, EnvoyExchange, Picked
from gateway.errors import InternalError, ServiceError, StartupError

logger = logging.getLogger("ropeway.envoy")

_CHUNK_BYTES = 60_000
"""Envoy takes chunks of up to 64 KiB in the duplex mode."""
_STREAMS_MAX = 65_536
_FULL_DUPLEX, _BUFFERED = ProcessingMode.FULL_DUPLEX_STREAMED, ProcessingMode.BUFFERED

Request, Response = messages.ProcessingRequest, messages.ProcessingResponse


class EndpointPicker:
    """Serves until it is stopped."""

    def __init__(self, config: EnvoyConfig, handler: Handler, body_bytes_max: int) -> None:
        self._config = config
        self._server = grpc.aio.server(
            maximum_concurrent_rpcs=_STREAMS_MAX,
            options=[("grpc.max_receive_message_length", 4 * 1024 * 1024 + body_bytes_max), ("grpc.so_reuseport", 0)],
        )
        services.add_ExternalProcessorServicer_to_server(_Processor(handler, body_bytes_max), self._server)

    async def start(self) -> None:
        """Raises StartupError."""
        host, port = self._config.host, self._config.port
        address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        try:
            self._server.add_insecure_port(address)
        except RuntimeError:
            raise StartupError(f"envoy: cannot listen on {address}") from None
        await self._server.start()
        logger.info("picking endpoints for Envoy at %s", address)

    async def stop(self, grace_seconds: float) -> None:
        await self._server.stop(grace_seconds)


class _Processor(services.ExternalProcessorServicer):  # type: ignore[misc]  # generated without types
    def __init__(self, handler: Handler, body_bytes_max: int) -> None:
        self._handler = handler
        self._body_bytes_max = body_bytes_max

    async def Process(self, requests: AsyncIterator[Any], context: Any) -> AsyncIterator[Any]:
        exchange = EnvoyExchange(self._handler, self._body_bytes_max)
        stream = _Stream(exchange)
        try:
            async for request in requests:
                try:
                    async for response in stream.take(request):
                        yield response
                except ServiceError as error:
                    exchange.failed()
                    yield _immediate(error)
                    return
                except Exception:
                    logger.exception("cannot pick an endpoint")
                    exchange.failed()
                    yield _immediate(InternalError())
                    return
        finally:
            exchange.gone()


class _Stream:
    """The messages of one request, in the modes that Envoy has told with the first."""

    def __init__(self, exchange: EnvoyExchange) -> None:
        self._exchange = exchange
        self._ours = self._duplex = self._duplex_answer = False
        self._picked: Picked | None = None

    async def take(self, request: Any) -> AsyncIterator[Any]:
        """What to say to a message. Raises ServiceError, which is what to say instead."""
        match request.WhichOneof("request"):
            case "request_headers":
                if request.HasField("protocol_config"):
                    config = request.protocol_config
                    self._duplex = config.request_body_mode == _FULL_DUPLEX
                    self._duplex_answer = config.response_body_mode == _FULL_DUPLEX
                said = request.request_headers
                self._ours = self._exchange.head(_pairs(said)) and not said.end_of_stream
                if not (self._ours and self._duplex):
                    yield Response(request_headers=messages.HeadersResponse())
            case "request_body":
                async for response in self._request_body(request.request_body):
                    yield response
            case "request_trailers":
                if self._ours and self._duplex and self._picked is None:
                    async for response in self._pick():
                        yield response
                yield Response(request_trailers=messages.TrailersResponse())
            case "response_headers":
                added = self._exchange.answer(_pairs(request.response_headers))
                mutation = _mutation(added, ())
                if self._exchange.strips:
                    mutation.remove_headers.append("content-length")
                common = messages.CommonResponse(header_mutation=mutation)
                yield Response(response_headers=messages.HeadersResponse(response=common))
                if request.response_headers.end_of_stream:
                    self._exchange.complete()
            case "response_body":
                yield self._answer_body(request.response_body)
            case "response_trailers":
                self._exchange.complete()
                yield Response(response_trailers=messages.TrailersResponse())

    async def _request_body(self, said: Any) -> AsyncIterator[Any]:
        if not self._ours:
            yield _echo(said) if self._duplex else Response(request_body=messages.BodyResponse())
            return
        self._exchange.body(said.body)
        if said.end_of_stream or not self._duplex:
            async for response in self._pick():
                yield response

    async def _pick(self) -> AsyncIterator[Any]:
        picked = self._picked = await self._exchange.pick()
        metadata = Struct()
        metadata.update({"envoy.lb": {DESTINATION_HEADER: picked.endpoint}})
        mutation = _mutation([*picked.headers, (DESTINATION_HEADER.encode(), picked.endpoint.encode())], picked.removed)
        common = messages.CommonResponse(header_mutation=mutation, clear_route_cache=True)
        if not self._duplex:
            common.body_mutation.body = picked.body
            yield Response(request_body=messages.BodyResponse(response=common), dynamic_metadata=metadata)
            return
        yield Response(request_headers=messages.HeadersResponse(response=common), dynamic_metadata=metadata)
        body = picked.body
        for start in range(0, max(len(body), 1), _CHUNK_BYTES):
            end = start + _CHUNK_BYTES
            yield _chunk("request_body", body[start:end], end >= len(body))

    def _answer_body(self, said: Any) -> Any:
        kept = self._exchange.answer_body(said.body, said.end_of_stream)
        if self._duplex_answer:
            return _chunk("response_body", kept, said.end_of_stream)
        common = messages.CommonResponse()
        if kept != said.body:
            if kept:
                common.body_mutation.body = kept
            else:
                common.body_mutation.clear_body = True
        return Response(response_body=messages.BodyResponse(response=common))


def _pairs(said: Any) -> Headers:
    # Envoy fills one of the two, by its version and settings.
    return [
        (header.key.lower().encode("latin-1"), header.raw_value or header.value.encode())
        for header in said.headers.headers
    ]


def _mutation(headers: Headers, removed: tuple[bytes, ...]) -> Any:
    overwrite = base_pb2.HeaderValueOption.OVERWRITE_IF_EXISTS_OR_ADD
    options = [
        base_pb2.HeaderValueOption(
            header=base_pb2.HeaderValue(key=name.decode("latin-1"), raw_value=value), append_action=overwrite
        )
        for name, value in headers
    ]
    return messages.HeaderMutation(set_headers=options, remove_headers=[name.decode("latin-1") for name in removed])


def _chunk(which: str, body: bytes, last: bool) -> Any:
    streamed = messages.StreamedBodyResponse(body=body, end_of_stream=last)
    common = messages.CommonResponse(body_mutation=messages.BodyMutation(streamed_response=streamed))
    return Response(**{which: messages.BodyResponse(response=common)})


def _echo(said: Any) -> Any:
    return _chunk("request_body", said.body, said.end_of_stream)


def _immediate(error: ServiceError) -> Any:
    return Response(
        immediate_response=messages.ImmediateResponse(
            status={"code": error.status}, headers=_mutation(error.headers(), ()), body=error.body()
        )
    )
