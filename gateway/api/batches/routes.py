"""`/v1/files` and `/v1/batches`, as OpenAI answers them."""

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Any

import orjson
from fastapi import FastAPI, Query, Request
from fastapi.responses import FileResponse

from gateway.api.batches.forms import read_form
from gateway.api.batches.requests import ENDPOINTS
from gateway.api.batches.shelf import ENDED, Document, Key, Shelf
from gateway.errors import BadRequest, PayloadTooLarge

PATHS = ("/v1/files", "/v1/batches")
WINDOW_SECONDS = 86_400
"""The one `completion_window` there is, 24h."""
_FORM_BYTES = 65_536
"""What a form may have around its file."""
_METADATA_MAX = 16

TenantOf = Callable[[Request], str]
"""Whose request it is. Raises ServiceError."""


def add_batch_routes(app: FastAPI, shelf: Shelf, tenant_of: TenantOf) -> None:
    _add_file_routes(app, shelf, tenant_of)

    @app.post("/v1/batches")
    async def create(request: Request) -> Document:
        """Run the requests of a file, from within seconds on (where `batches.directory` is set, as all of these)."""
        tenant = tenant_of(request)
        document = _batch(await _read(request, _FORM_BYTES))
        await asyncio.to_thread(shelf.file, tenant, document["input_file_id"])
        return await asyncio.to_thread(shelf.add_batch, tenant, document)

    @app.get("/v1/batches")
    async def batches(request: Request, after: str = "", limit: int = Query(20, ge=1, le=100)) -> Document:
        """The tenant's batches, the newest first."""
        return _page(await asyncio.to_thread(shelf.batches, tenant_of(request)), after, limit)

    @app.get("/v1/batches/{identifier}")
    async def batch(request: Request, identifier: str) -> Document:
        """How far a batch is."""
        return await asyncio.to_thread(shelf.batch, Key(tenant_of(request), identifier))

    @app.post("/v1/batches/{identifier}/cancel")
    async def cancel(request: Request, identifier: str) -> Document:
        """Cancel a batch: what is under way is broken off, what is answered stays."""
        key = Key(tenant_of(request), identifier)
        document = await asyncio.to_thread(shelf.batch, key)
        if document["status"] in ENDED:
            raise BadRequest(f"The batch has ended: it is {document['status']}.")
        await asyncio.to_thread(shelf.cancel, key)
        return {**document, "status": "cancelling", "cancelling_at": int(time.time())}


def _add_file_routes(app: FastAPI, shelf: Shelf, tenant_of: TenantOf) -> None:
    @app.post("/v1/files")
    async def upload(request: Request) -> Document:
        """Upload a file of requests: a form with `purpose` (`batch`) and `file`."""
        tenant = tenant_of(request)
        body = await _read(request, shelf.config.file_bytes_max + _FORM_BYTES)
        parts = read_form(request.headers.get("content-type", ""), body)
        if "file" not in parts or "purpose" not in parts:
            raise BadRequest("The form has a file and a purpose.", param="file" if "file" not in parts else "purpose")
        purpose = parts["purpose"].content.decode("utf-8", "replace")
        if purpose != "batch":
            raise BadRequest("Files are for batches here: the purpose is 'batch'.", param="purpose")
        name = parts["file"].filename or "upload.jsonl"
        return await asyncio.to_thread(shelf.add_file, tenant, name, purpose, parts["file"].content, time.time())

    @app.get("/v1/files")
    async def files(request: Request, after: str = "", limit: int = Query(10_000, ge=1, le=10_000)) -> Document:
        """The tenant's files, the newest first."""
        return _page(await asyncio.to_thread(shelf.files, tenant_of(request)), after, limit)

    @app.get("/v1/files/{identifier}")
    async def file(request: Request, identifier: str) -> Document:
        """What is said of a file."""
        return await asyncio.to_thread(shelf.file, tenant_of(request), identifier)

    @app.get("/v1/files/{identifier}/content")
    async def content(request: Request, identifier: str) -> FileResponse:
        """A file's lines: what was uploaded, or what became of a batch."""
        path = await asyncio.to_thread(shelf.content, tenant_of(request), identifier)
        return FileResponse(path, media_type="application/jsonl")

    @app.delete("/v1/files/{identifier}")
    async def delete(request: Request, identifier: str) -> Document:
        """Delete a file. A batch that reads it ends with what is answered."""
        await asyncio.to_thread(shelf.delete_file, tenant_of(request), identifier)
        return {"id": identifier, "object": "file", "deleted": True}


def _batch(body: bytes) -> Document:
    """A new batch. Raises BadRequest."""
    try:
        asked: Any = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise BadRequest(f"The request body is not valid JSON: {error}.") from None
    if not isinstance(asked, dict) or not isinstance(asked.get("input_file_id"), str):
        raise BadRequest("An input_file_id is needed.", param="input_file_id")
    if asked.get("endpoint") not in ENDPOINTS:
        raise BadRequest(f"The endpoint is one of {', '.join(ENDPOINTS)}.", param="endpoint")
    if asked.get("completion_window") != "24h":
        raise BadRequest("The completion_window is '24h'.", param="completion_window")
    metadata = asked.get("metadata")
    if metadata is not None and (not isinstance(metadata, dict) or len(metadata) > _METADATA_MAX):
        raise BadRequest(f"metadata is an object of at most {_METADATA_MAX} keys.", param="metadata")
    now = int(time.time())
    times = ("in_progress", "finalizing", "completed", "failed", "expired", "cancelling", "cancelled")
    return {
        "object": "batch",
        "endpoint": asked["endpoint"],
        "errors": None,
        "input_file_id": asked["input_file_id"],
        "completion_window": "24h",
        "status": "validating",
        "output_file_id": None,
        "error_file_id": None,
        "created_at": now,
        "expires_at": now + WINDOW_SECONDS,
        **{f"{name}_at": None for name in times},
        "request_counts": {"total": 0, "completed": 0, "failed": 0},
        "metadata": metadata,
    }


def _page(documents: Sequence[Document], after: str, limit: int) -> Document:
    """Those that follow one, if it is there."""
    identifiers = [document["id"] for document in documents]
    start = identifiers.index(after) + 1 if after in identifiers else 0
    shown = list(documents[start : start + limit])
    return {
        "object": "list",
        "data": shown,
        "first_id": shown[0]["id"] if shown else None,
        "last_id": shown[-1]["id"] if shown else None,
        "has_more": start + limit < len(documents),
    }


async def _read(request: Request, bytes_max: int) -> bytes:
    parts: list[bytes] = []
    size = 0
    async for part in request.stream():
        size += len(part)
        if size > bytes_max:
            raise PayloadTooLarge(bytes_max)
        parts.append(part)
    return b"".join(parts)
