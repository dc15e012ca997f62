"""Everything that is not inference: models, health, status, metrics, explanations, administration.

An ordinary FastAPI application behind the same port as the hot path (`gateway.edge`), or, for the routes of operators,
behind a listener of its own.
"""

import time
from collections.abc import Awaitable, Callable
from typing import Any, Protocol

import msgspec
import orjson
from fastapi import Depends, FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from starlette.exceptions import HTTPException

from gateway.administration import Administration, add_administration_routes
from gateway.api.errors import error_body
from gateway.api.routes import add_posted_routes, key_of
from gateway.config import WorkerConfig
from gateway.edge.http1 import RequestHead
from gateway.edge.server import Inbound
from gateway.errors import BadRequest, Forbidden, InternalError, MethodNotAllowed, NotFound, ServiceError
from gateway.fleet.worker import WorkerRecord
from gateway.logs import RequestLog
from gateway.pipeline import Pipeline
from gateway.requests import request_id_of
from gateway.tenants import OperatorKey
from gateway.views.dashboard.routes import add_dashboard_routes
from gateway.views.feed import Feed
from gateway.views.openapi import describe
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
    administration: Administration,
    feed: Feed,
    request_log: RequestLog | None = None,
) -> FastAPI:
    app = FastAPI(title="Ropeway", docs_url=None, redoc_url=None, openapi_url="/openapi.json")
    _translate_errors(app)
    if request_log is not None:
        _log_requests(app, request_log)
    if surfaces.public:
        _add_public_routes(app, pipeline, status)
    if surfaces.admin:
        _add_admin_routes(app, members, status, admin_key, administration)
        add_dashboard_routes(app, status, feed, admin_key)
    if surfaces.metrics:
        _add_metrics_route(app, registry, metrics_key)
    describe(app, surfaces.public)
    return app


def _translate_errors(app: FastAPI) -> None:
    """Errors in OpenAI's form, each with a request id, none with a traceback."""

    def answer(request: Request, error: ServiceError) -> Response:
        headers = {name.decode(): value.decode() for name, value in error.headers()}
        return Response(error_body(request.url.path, error), error.status, headers)

    async def service_error(request: Request, error: Exception) -> Response:
        return answer(request, error if isinstance(error, ServiceError) else InternalError())

    async def http_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)  # noqa: S101
        if error.status_code == 405:
            allowed = (error.headers or {}).get("Allow", "").split(", ")
            return answer(request, MethodNotAllowed(request.method, allowed))
        return answer(request, NotFound(f"there is nothing at {request.url.path}"))

    async def bad_parameter(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)  # noqa: S101
        first = error.errors()[0]
        name = str(first["loc"][-1])
        return answer(request, BadRequest(f"{name}: {first['msg']}", param=name))

    async def with_request_id(request: Request, call_next: Callable[[Request], Awaitable[Response]]) -> Response:
        response = await call_next(request)
        response.headers.setdefault("x-request-id", request_id_of(_head_of(request)))
        return response

    app.add_exception_handler(ServiceError, service_error)
    app.add_exception_handler(HTTPException, http_error)
    app.add_exception_handler(RequestValidationError, bad_parameter)
    app.add_exception_handler(Exception, service_error)
    app.middleware("http")(with_request_id)


def _log_requests(app: FastAPI, request_log: RequestLog) -> None:
    async def logged(request: Request, call_next: Callable[[Request], Awaitable[Response]]) -> Response:
        began = time.monotonic()
        response = await call_next(request)
        request_log.served(request.method, request.url.path, response.status_code, time.monotonic() - began)
        return response

    app.middleware("http")(logged)


def _add_public_routes(app: FastAPI, pipeline: Pipeline, status: StatusView) -> None:
    def authenticate(request: Request) -> None:
        pipeline.tenants.authenticate(key_of(request))

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

    add_posted_routes(app)

    @app.get("/v1/models", dependencies=tenant)
    async def models() -> dict[str, Any]:
        """The union of the workers' models."""
        return {"object": "list", "data": pipeline.fleet.models()}

    @app.get("/v1/models/{model:path}", dependencies=tenant)
    async def model(model: str) -> dict[str, Any]:
        """One of them, with every field that its workers sent."""
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
    app: FastAPI, members: Members, status: StatusView, admin_key: OperatorKey, administration: Administration
) -> None:
    def authorize(request: Request) -> None:
        authorization = request.headers.get("authorization")
        admin_key.check(authorization.encode("latin-1") if authorization is not None else None)
        if admin_key.open and request.method != "GET":
            _refuse_foreign_pages(request)

    admin = [Depends(authorize)]

    @app.get("/status", dependencies=admin)
    async def full_status() -> Response:
        """How the gateway is: workers, index, load, hits, what waits, the last receipts."""
        return Response(orjson.dumps(status.now().document()), media_type="application/json")

    @app.get("/admin/workers", dependencies=admin)
    async def workers() -> dict[str, Any]:
        """The workers, as `/status` has them."""
        return {"workers": status.now().document()["workers"]}

    @app.post("/admin/workers", dependencies=admin, status_code=201)
    async def add_worker(request: Request) -> dict[str, Any]:
        """Register `{"url": ...}` and further keys of a worker's configuration; it takes requests after its first
        probe."""
        try:
            config = msgspec.json.decode(await request.body(), type=WorkerConfig)
        except (msgspec.DecodeError, ValueError, RecursionError) as error:
            raise BadRequest(f"not a worker: {error}") from None
        record = await members.register(config)
        return {"name": record.name, "url": record.url}

    @app.delete("/admin/workers/{name:path}", dependencies=admin)
    async def remove_worker(name: str) -> dict[str, Any]:
        """Forget a worker; what it is serving goes on."""
        await members.remove(name)
        return {"removed": name}

    add_administration_routes(app, administration, admin)


def _refuse_foreign_pages(request: Request) -> None:
    """Without a key, a page of anybody's in an operator's browser could steer a gateway at its loopback address."""
    origin = request.headers.get("origin")
    if origin is not None and origin.partition("://")[2] != request.headers.get("host"):
        raise Forbidden("pages of other origins may not do this: set admin.key_file")


def _add_metrics_route(app: FastAPI, registry: CollectorRegistry, metrics_key: OperatorKey) -> None:
    @app.get("/metrics")
    async def metrics(request: Request) -> Response:
        """What Prometheus scrapes."""
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
