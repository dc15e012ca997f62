"""Workers found in Kubernetes: the endpoints of the EndpointSlices that a selector names.

    list ─► slices ─► found ─► fleet: register, drain, remove
    watch ─┘ (each change; from the start again when the server has forgotten what we have seen)

Each gateway looks for itself. Whom it found stays while the API server is away: that a worker is gone, its probes find
out as well. Needs `get`, `list` and `watch` on endpointslices (deploy/helm makes the role).
"""

import asyncio
import logging
import os
import ssl
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, Final, NamedTuple, Protocol

import httpx
import orjson

from gateway.config import KubernetesConfig, WorkerConfig
from gateway.errors import ConfigError, NotFound, ServiceError

logger = logging.getLogger("ropeway.kubernetes")

_ACCOUNT: Final = Path("/var/run/secrets/kubernetes.io/serviceaccount")
_PAGE_SLICES: Final = 500
_WATCH_SECONDS: Final = 300
"""After which the server ends a watch, and another one goes on."""
_ANSWER_SECONDS: Final = 10.0
_PAUSE_SECONDS_MAX: Final = 30.0
_LINE_BYTES_MAX: Final = 4 * 1024 * 1024
_GONE: Final = 410


class Found(NamedTuple):
    """A worker as Kubernetes knows it."""

    url: str
    draining: bool
    """It is told to stop, and serves what it has."""


class Slices:
    """EndpointSlices, and the workers that they make. Without I/O."""

    def __init__(self, port: str, scheme: str) -> None:
        """`port` is one's name, or its number."""
        self._port = port
        self._scheme = scheme
        self._found: dict[str, dict[str, Found]] = {}

    def replace(self, slices: Iterable[Mapping[str, Any]]) -> None:
        """What a list says: all there are."""
        self._found = {one["metadata"]["name"]: self._workers(one) for one in slices}

    def change(self, kind: str, one: Mapping[str, Any]) -> None:
        """What a watch says of one: `ADDED`, `MODIFIED` or `DELETED`."""
        name = one["metadata"]["name"]
        if kind == "DELETED":
            self._found.pop(name, None)
        else:
            self._found[name] = self._workers(one)

    def found(self) -> dict[str, Found]:
        """Workers by name. One that moves between slices may stand in two for a moment: whoever serves, wins."""
        workers: dict[str, Found] = {}
        for of_slice in self._found.values():
            for name, worker in of_slice.items():
                if name not in workers or workers[name].draining:
                    workers[name] = worker
        return workers

    def _workers(self, one: Mapping[str, Any]) -> dict[str, Found]:
        port = self._port_of(one.get("ports") or ())
        if port is None:
            return {}
        workers = {}
        for endpoint in one.get("endpoints") or ():
            conditions = endpoint.get("conditions") or {}
            draining = conditions.get("terminating") is True
            # A condition that is not stated counts as met, by the API's definition.
            if not draining and conditions.get("ready") is False:
                continue
            address = endpoint["addresses"][0]
            host = f"[{address}]" if one.get("addressType") == "IPv6" else address
            target = endpoint.get("targetRef") or {}
            name = target["name"] if target.get("kind") == "Pod" else f"{host}:{port}"
            workers[name] = Found(f"{self._scheme}://{host}:{port}", draining)
        return workers

    def _port_of(self, ports: Iterable[Mapping[str, Any]]) -> int | None:
        for port in ports:
            number = port.get("port")
            if number and (self._port in (port.get("name"), str(number))):
                return int(number)
        return None


class Members(Protocol):
    """Who takes workers in and out (`gateway.fleet.registry.Fleet`)."""

    async def register(self, config: WorkerConfig) -> object: ...

    async def drain(self, name: str, draining: bool) -> object: ...

    async def remove(self, name: str) -> None: ...


class KubernetesDiscovery:
    """Keeps a fleet to what Kubernetes says, as long as `run` runs."""

    def __init__(self, config: KubernetesConfig, members: Members, environment: Mapping[str, str] = os.environ) -> None:
        """Raises ConfigError outside of a cluster, unless `config` says where the API server is."""
        self.config = config
        self.synchronized = False
        """Whether a list has been read since the start."""
        self._members = members
        self._server = config.server.rstrip("/") or _server_of(environment)
        namespace = config.namespace or _read(_ACCOUNT / "namespace", "kubernetes.namespace is not set")
        self._path = f"/apis/discovery.k8s.io/v1/namespaces/{namespace}/endpointslices"
        self._slices = Slices(config.port, config.scheme)
        self._known: dict[str, Found] = {}

    async def run(self) -> None:
        pause = 1.0
        while True:
            try:
                async with self._client() as client:
                    version = await self._list(client)
                    pause = 1.0
                    await self._watch(client, version)
            except (httpx.HTTPError, OSError, ValueError, KeyError) as error:
                logger.warning("cannot follow the workers in Kubernetes, whose last state stays: %s", _said(error))
                await asyncio.sleep(pause)
                pause = min(pause * 2, _PAUSE_SECONDS_MAX)

    @asynccontextmanager
    async def _client(self) -> AsyncIterator[httpx.AsyncClient]:
        config = self.config
        verify: ssl.SSLContext | bool = True
        ca_file = config.ca_file or (None if config.server else _ACCOUNT / "ca.crt")
        if ca_file is not None:
            verify = ssl.create_default_context(cafile=str(ca_file))
        # A watch is silent for as long as nothing changes; the server ends it.
        timeout = httpx.Timeout(_ANSWER_SECONDS, read=_WATCH_SECONDS + _ANSWER_SECONDS)
        async with httpx.AsyncClient(base_url=self._server, verify=verify, timeout=timeout, trust_env=False) as client:
            yield client

    def _headers(self) -> dict[str, str]:
        token_file = self.config.token_file or (None if self.config.server else _ACCOUNT / "token")
        if token_file is None:
            return {}
        # Read each time: Kubernetes writes a new one every hour or so.
        return {"authorization": f"Bearer {token_file.read_text().strip()}"}

    async def _list(self, client: httpx.AsyncClient) -> str:
        """Returns the version that a watch goes on from."""
        slices: list[dict[str, Any]] = []
        query = {"labelSelector": self.config.selector, "limit": str(_PAGE_SLICES)}
        while True:
            answer = await client.get(self._path, params=query, headers=self._headers(), timeout=_ANSWER_SECONDS)
            answer.raise_for_status()
            page = orjson.loads(answer.content)
            slices += page["items"]
            further = page["metadata"].get("continue")
            if not further:
                break
            query["continue"] = further
        self._slices.replace(slices)
        await self._settle()
        self.synchronized = True
        version: str = page["metadata"]["resourceVersion"]
        return version

    async def _watch(self, client: httpx.AsyncClient, version: str) -> None:
        """Returns when the server has forgotten what comes after `version`: then everything is to be listed again."""
        while True:
            query = {
                "labelSelector": self.config.selector,
                "watch": "1",
                "allowWatchBookmarks": "true",
                "resourceVersion": version,
                "timeoutSeconds": str(_WATCH_SECONDS),
            }
            async with client.stream("GET", self._path, params=query, headers=self._headers()) as answer:
                if answer.status_code == _GONE:
                    return
                answer.raise_for_status()
                async for line in _lines(answer):
                    event = orjson.loads(line)
                    kind, one = event["type"], event["object"]
                    if kind == "ERROR":
                        if one.get("code") == _GONE:
                            return
                        raise ValueError(str(one.get("message", "the watch failed"))[:200])
                    version = one["metadata"]["resourceVersion"]
                    if kind != "BOOKMARK":
                        self._slices.change(kind, one)
                        await self._settle()

    async def _settle(self) -> None:
        """Make the fleet what was found. Whoever is not taken is tried again at the next change."""
        found = self._slices.found()
        for name in self._known.keys() - found.keys():
            del self._known[name]
            with suppress(NotFound):  # an operator was quicker
                await self._members.remove(name)
        for name, worker in found.items():
            before = self._known.get(name)
            if before == worker:
                continue
            try:
                if before is not None and before.url == worker.url:
                    await self._members.drain(name, worker.draining)
                else:
                    await self._members.register(self._config_of(name, worker))
                self._known[name] = worker
            except (ServiceError, ValueError) as error:
                self._known.pop(name, None)
                logger.warning("the worker %s at %s is not taken: %s", name, worker.url, error)

    def _config_of(self, name: str, worker: Found) -> WorkerConfig:
        config = self.config
        return WorkerConfig(url=worker.url, name=name, engine=config.engine, role=config.role, draining=worker.draining)


async def _lines(answer: httpx.Response) -> AsyncIterator[bytes]:
    rest = b""
    async for data in answer.aiter_bytes():
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            if line.strip():
                yield line
        if len(rest) > _LINE_BYTES_MAX:
            raise ValueError("an event of the watch is too large")


def _server_of(environment: Mapping[str, str]) -> str:
    host, port = environment.get("KUBERNETES_SERVICE_HOST"), environment.get("KUBERNETES_SERVICE_PORT", "443")
    if not host:
        raise ConfigError("kubernetes: this is no pod of a cluster; kubernetes.server says where the API server is")
    return f"https://[{host}]:{port}" if ":" in host else f"https://{host}:{port}"


def _read(path: Path, otherwise: str) -> str:
    try:
        return path.read_text().strip()
    except OSError as error:
        raise ConfigError(f"kubernetes: {otherwise}, and {path} cannot be read: {error.strerror}") from error


def _said(error: Exception) -> str:
    if isinstance(error, httpx.HTTPStatusError):
        status = error.response.status_code
        if status in (401, 403):
            return f"the API server answered {status}: the service account may not list and watch endpointslices"
        return f"the API server answered {status}"
    if isinstance(error, KeyError):
        return f"an answer without {error}"
    return f"{error}" or type(error).__name__
