"""Puts into vLLM's answers what became of a request's plans, as a reference worker says it: `x-ropeway-transfer`.

    --middleware workers.vllm.answers.TransferHeaders

Runs in the API server, which knows nothing of transfers: it asks the sidecar of the connector, once per request that
came with a plan, when the first of its answer is there. The head of such an answer waits for that; nothing else does.
"""

import logging
from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any

import httpx
import msgspec
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cachecore.transfer.plan import PARAMETER
from workers.vllm.reports import ReportKey, key_of
from workers.vllm.settings import SettingsError, read_settings

logger = logging.getLogger("ropeway.transfer")

_PATIENCE_SECONDS = 0.5
"""The answer is there, and waits; without a report it goes out as vLLM made it."""
_MARK = f'"{PARAMETER}"'.encode()


class TransferHeaders:
    """ASGI middleware. An instance serves one app."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._http: httpx.AsyncClient | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            async with httpx.AsyncClient(trust_env=False, timeout=_PATIENCE_SECONDS) as self._http:
                await self._app(scope, receive, send)
            return
        if scope["type"] != "http" or scope["method"] != "POST" or self._http is None:
            await self._app(scope, receive, send)
            return
        answer = _Answer(scope, receive, send, self._http)
        await self._app(scope, answer.receive, answer.send)


class _Answer:
    """One request, and the answer to it."""

    def __init__(self, scope: Scope, receive: Receive, send: Send, http: httpx.AsyncClient) -> None:
        self._scope = scope
        self._receive = receive
        self._send = send
        self._http = http
        self._body: list[bytes] = []
        self._key: ReportKey | None = None
        self._head: Message | None = None
        """Held back until the first of what follows is there."""

    async def receive(self) -> Message:
        message = await self._receive()
        if message["type"] == "http.request":
            self._body.append(message.get("body", b""))
        return message

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start" and message["status"] == 200:
            self._key, self._body = _key_in(b"".join(self._body)), []
            if self._key is not None:
                self._head = message
                return
        head, self._head = self._head, None
        if head is not None:
            await self._send(await self._with_report(head))
        await self._send(message)

    async def _with_report(self, head: Message) -> Message:
        for url in sidecars_of(self._scope["app"].state.vllm_config):
            try:
                found = await self._http.post(f"{url}/reports/{self._key}")
            except httpx.HTTPError as error:
                logger.debug("%s does not say what became of a plan: %r", url, error)
                continue
            if found.status_code == 200:
                return _with_headers(head, found.json())
        return head


class _Body(msgspec.Struct):
    kv_transfer_params: Any = None


def _key_in(body: bytes) -> ReportKey | None:
    if _MARK not in body:
        return None
    try:
        return key_of(msgspec.json.decode(body, type=_Body).kv_transfer_params)
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return None


def sidecars_of(config: Any) -> Sequence[str]:
    """Where the connectors of a `vllm.config.VllmConfig` answer, one for each data parallel rank."""
    transfer = config.kv_transfer_config
    try:
        settings = read_settings(transfer.kv_connector_extra_config, transfer.kv_load_failure_policy)
    except (AttributeError, SettingsError):  # there is no connector, or none of ours
        return []
    ranks = range(int(config.parallel_config.data_parallel_size))
    host = "127.0.0.1" if settings.sidecar_host in ("0.0.0.0", "::") else settings.sidecar_host  # noqa: S104
    return [f"http://{host}:{port}" for rank in ranks if (port := settings.of_rank(rank).sidecar_port)]


def _with_headers(head: MutableMapping[str, Any], headers: Mapping[str, str]) -> Message:
    added = [(name.encode(), value.encode()) for name, value in headers.items()]
    return {**head, "headers": [*head.get("headers", ()), *added]}
