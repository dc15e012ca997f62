"""`GET /server_info` of a vLLM worker, for gateways: what can be moved, and as whom. `/metrics` of what was moved, and
`POST /reports/KEY` of what became of a request's plans, for its answer.

vLLM answers neither itself, so the worker's side does, at an address of its own, on loopback by default.
"""

import contextlib
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.registry import Collector
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from workers.openai.server import WorkerServer
from workers.transfer.service import Attachment, TransferService
from workers.vllm.reports import Reports

Describe = Callable[[TransferService], Mapping[str, Any]]


def sidecar(
    host: str, port: int, describe: Describe, metrics: Collector, reports: Reports, listening: Callable[[str], None]
) -> Attachment:
    """Serves while transfers do. `listening` hears the URL. Starting raises CannotListen."""
    registry = CollectorRegistry()
    registry.register(metrics)

    @contextlib.asynccontextmanager
    async def serving(service: TransferService) -> AsyncIterator[None]:
        async def server_info(_request: Request) -> Response:
            return JSONResponse(dict(describe(service)))

        async def scrape(_request: Request) -> Response:
            return Response(generate_latest(registry), headers={"content-type": CONTENT_TYPE_PLAIN_0_0_4})

        async def report(request: Request) -> Response:
            headers = reports.take(request.path_params["key"])
            return Response(status_code=404) if headers is None else JSONResponse(dict(headers))

        async def health(_request: Request) -> Response:
            return Response()

        answers = {"/server_info": server_info, "/metrics": scrape, "/health": health}
        routes = [Route(path, answer) for path, answer in answers.items()]
        app = Starlette(routes=[*routes, Route("/reports/{key}", report, methods=["POST"])])
        server = WorkerServer(app, host=host, port=port)
        await server.start()
        listening(server.url)
        try:
            yield
        finally:
            await server.stop()

    return serving
