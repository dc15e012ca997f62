"""The application's part in the routes that the edge serves: what comes there otherwise than by POST is a mistake."""

from fastapi import FastAPI, Request, Response

from gateway.errors import MethodNotAllowed
from gateway.requests import POSTED_PATHS


def add_posted_routes(app: FastAPI) -> None:
    async def not_posted(request: Request) -> Response:
        raise MethodNotAllowed(request.method, ("POST",))

    for path in POSTED_PATHS:
        methods = ["GET", "PUT", "PATCH", "DELETE"]
        app.add_api_route(path, not_posted, methods=methods, include_in_schema=False)


def key_of(request: Request) -> bytes | None:
    """As `gateway.requests.credentials`, of a request to the application."""
    authorization, key = request.headers.get("authorization"), request.headers.get("x-api-key")
    if authorization is None and key is not None:
        authorization = f"Bearer {key}"
    return None if authorization is None else authorization.encode("latin-1")
