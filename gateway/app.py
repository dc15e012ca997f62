"""Everything that is not inference: models, health, status, metrics, explanations, administration.

An ordinary FastAPI application behind the same port as the hot path (`gateway.edge`), or, for the routes of operators,
behind a listener of its own.
"""

from collections.abc import Awaitable, Callable
from typing import Any, Protocol

import msgspec
import orjson
from fastapi import Depends, FastAPI, Request, Response
from fastapi.responses import JSONResponse
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from starlette.exceptions import HTTPException

from gateway.config import WorkerConfig
from gateway.edge.http1 import RequestHead
from gateway.edge.server import Inbound
from gateway.errors import BadRequest, InternalError, MethodNotAllowed, NotFound, ServiceError
from gateway.fleet.worker import WorkerRecord
from gateway.pipeline import Pipeline
from gateway.requests import request_id_of
from gateway.tenants import OperatorKey
from gateway.views.status import StatusView

EXPLAIN_BODY_BYTES_MAX = 64 * 1024 * 1024


class Members(Protocol):
    """Who takes workers in and out: the gateway's own fleet, or the directory that it shares with others."""

    async def register(self, config: WorkerConfig) -> WorkerRecord: ...

    async def remove(self, name: str) -> None: ...


class Surfaces(msgspec.Struct, frozen=True):
    """Which groups of routes an application serves, and which keys open them."""

    public: bool
    admin: bool
    metrics: bool


def build_app(
    pipeline: Pipeline,
    status: StatusView,
    registry: CollectorRegistry,
    surfaces: Surfaces,
    admin_key: OperatorKey,
    metrics_key: OperatorKey,
    members: Members,
) -> FastAPI:
    app = FastAPI(title="Ropeway", docs_url=None, redoc_url=None, openapi_url="/openapi.json")
    _translate_errors(app)
    if surfaces.public:
        _add_public_routes(app, pipeline, status)
    if surfaces.admin:
        _add_admin_routes(app, members, pipeline, status, admin_key)
    if surfaces.metrics:
        _add_metrics_route(app, registry, metrics_key)
    return app


def _translate_errors(app: FastAPI) -> None:
    """Errors in OpenAI's form, each with a request id, none with a traceback."""

    def answer(request: Request, error: ServiceError) -> Response:
        headers = {name.decode(): value.decode() for name, value in error.headers()}
        return Response(error.body(), error.status, headers)

    async def service_error(request: Request, error: Exception) -> Response:
        return answer(request, error if isinstance(error, ServiceError) else InternalError())

    async def http_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)  # noqa: S101
        if error.status_code == 405:
            allowed = (error.headers or {}).get("Allow", "").split(", ")
            return answer(request, MethodNotAllowed(request.method, allowed))
        return answer(request, NotFound(f"there is nothing at {request.url.path}"))

    async def with_request_id(request: Request, call_next: Callable[[Request], Awaitable[Response]]) -> Response:
        response = await call_next(request)
        response.headers.setdefault("x-request-id", request_id_of(_head_of(request)))
        return response

    app.add_exception_handler(ServiceError, service_error)
    app.add_exception_handler(HTTPException, http_error)
    app.add_exception_handler(Exception, service_error)
    app.middleware("http")(with_request_id)


def _add_public_routes(app: FastAPI, pipeline: Pipeline, status: StatusView) -> None:
    def authenticate(request: Request) -> None:
        authorization = request.headers.get("authorization")
        pipeline.tenants.authenticate(authorization.encode("latin-1") if authorization is not None else None)

    tenant = [Depends(authenticate)]

    @app.get("/healthz")
    async def healthz() -> dict[str, str]:
        """The process is alive."""
        return {"status": "ok"}

    @app.get("/readyz")
    async def readyz() -> JSONResponse:
        """At least one worker takes requests."""
        ready = status.ready
        headers = None if ready else {"retry-after": "1"}
        return JSONResponse({"ready": ready}, 200 if ready else 503, headers)

    @app.api_route("/v1/chat/completions", methods=["GET", "PUT", "PATCH", "DELETE"], include_in_schema=False)
    @app.api_route("/v1/completions", methods=["GET", "PUT", "PATCH", "DELETE"], include_in_schema=False)
    async def not_posted(request: Request) -> Response:
        """The edge serves POST; whatever else comes here is a mistake of the client's."""
        raise MethodNotAllowed(request.method, ("POST",))

    @app.get("/v1/models", dependencies=tenant)
    async def models() -> dict[str, Any]:
        """The union of the workers' models."""
        return {"object": "list", "data": pipeline.fleet.models()}

    @app.get("/v1/models/{model:path}", dependencies=tenant)
    async def model(model: str) -> dict[str, Any]:
        for entry in pipeline.fleet.models():
            if entry["id"] == model:
                return entry
        raise NotFound(f"the model {model!r} does not exist here", param="model", code="model_not_found")

    @app.post("/route/explain", dependencies=tenant)
    async def explain(request: Request) -> dict[str, Any]:
        """The receipt of a chat or completion body, which is sent nowhere."""
        body = await _read_body(request)
        path = "/v1/chat/completions" if b'"messages"' in body else "/v1/completions"
        inbound = Inbound(_head_of(request), path, body, request.client.host if request.client else "")
        return (await pipeline.explain(inbound)).document()


def _add_admin_routes(
    app: FastAPI, members: Members, pipeline: Pipeline, status: StatusView, admin_key: OperatorKey
) -> None:
    def authorize(request: Request) -> None:
        authorization = request.headers.get("authorization")
        admin_key.check(authorization.encode("latin-1") if authorization is not None else None)

    admin = [Depends(authorize)]

    @app.get("/status", dependencies=admin)
    async def full_status() -> Response:
        return Response(orjson.dumps(status.now().document()), media_type="application/json")

    @app.get("/admin/workers", dependencies=admin)
    async def workers() -> dict[str, Any]:
        return {"workers": status.now().document()["workers"]}

    @app.post("/admin/workers", dependencies=admin, status_code=201)
    async def add_worker(request: Request) -> dict[str, Any]:
        """Register `{"url": ...}` and further keys of a worker's configuration; it takes requests after its first
        probe."""
        try:
            config = msgspec.json.decode(await request.body(), type=WorkerConfig)
        except (msgspec.DecodeError, ValueError) as error:
            raise BadRequest(f"not a worker: {error}") from None
        record = await members.register(config)
        return {"name": record.name, "url": record.url}

    @app.delete("/admin/workers/{name:path}", dependencies=admin)
    async def remove_worker(name: str) -> dict[str, Any]:
        """Forget a worker; what it is serving goes on."""
        await members.remove(name)
        return {"removed": name}


def _add_metrics_route(app: FastAPI, registry: CollectorRegistry, metrics_key: OperatorKey) -> None:
    @app.get("/metrics")
    async def metrics(request: Request) -> Response:
        authorization = request.headers.get("authorization")
        metrics_key.check(authorization.encode("latin-1") if authorization is not None else None)
        return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)


async def _read_body(request: Request) -> bytes:
    parts: list[bytes] = []
    size = 0
    async for part in request.stream():
        size += len(part)
        if size > EXPLAIN_BODY_BYTES_MAX:
            raise BadRequest(f"The body is larger than {EXPLAIN_BODY_BYTES_MAX} bytes.")
        parts.append(part)
    return b"".join(parts)


def _head_of(request: Request) -> RequestHead:
    """The edge's form of an ASGI request's head."""
    return RequestHead(
        request.method.encode(), request.scope["path"].encode(), list(request.headers.raw), 0, True, False, False, {}
    )
