"""Asking one worker over HTTP, and reading what comes back as leniently as can be."""

import re
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import urlsplit

import httpx
import orjson

_NOT_OFFERED = frozenset({400, 403, 404, 405, 422, 501})
"""Statuses of routes, or of questions, that an engine does not know."""
_LABEL = re.compile(r'([a-zA-Z_]\w*)="((?:[^"\\]|\\.)*)"')


class ProbeError(Exception):
    """The worker does not answer as an OpenAI server does. The message says how; it is shown to operators."""


class Leaving(ProbeError):
    """The worker says that it is about to stop: it is not asked a second time before it is believed."""


class Questions:
    """Questions to the worker at one URL. What goes wrong on the wire is a ProbeError that names the route."""

    def __init__(self, http: httpx.AsyncClient, url: str) -> None:
        self.http = http
        self.url = url.rstrip("/")

    async def get(self, path: str) -> httpx.Response:
        return await self._request("GET", path)

    async def post(self, path: str, body: Mapping[str, Any]) -> httpx.Response:
        content = orjson.dumps(body, option=orjson.OPT_NON_STR_KEYS)
        return await self._request("POST", path, content=content, headers={"content-type": "application/json"})

    async def document(self, path: str) -> Mapping[str, Any]:
        """A JSON object, or an empty one where that is not what comes."""
        try:
            answer = await self.get(path)
        except ProbeError:
            return {}
        return document_of(answer) if answer.status_code == 200 else {}

    async def metrics(self) -> "Metrics | None":
        """What `/metrics` says; None where there is none. Raises ProbeError when it fails."""
        answer = await self.get("/metrics")
        if answer.status_code >= 500 and answer.status_code != 501:
            raise ProbeError(f"/metrics answers {answer.status_code}")
        return Metrics(answer.text) if answer.status_code == 200 else None

    async def try_metrics(self) -> "Metrics":
        """As `metrics`, empty where that fails: busy engines have been seen to leave it unanswered."""
        try:
            return await self.metrics() or Metrics("")
        except ProbeError:
            return Metrics("")

    async def token_ids(self, path: str, body: Mapping[str, Any], key: str = "tokens") -> list[int] | None:
        """Token ids under a key of the answer; None where the route, or the question, is not known. Raises
        ProbeError when it is and fails."""
        answer = await self.post(path, body)
        if answer.status_code in _NOT_OFFERED:
            return None
        try:
            return list(map(int, document_of(answer)[key]))
        except (KeyError, TypeError, ValueError):
            raise ProbeError(f"{path} answers {answer.status_code} and no {key}") from None

    async def _request(self, method: str, path: str, **what: Any) -> httpx.Response:
        try:
            return await self.http.request(method, self.url + path, **what)
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise ProbeError(f"{path}: {_reason(error)}") from None
        except AttributeError:
            # What httpx makes of a connection that is lost in the moment in which it opens.
            raise ProbeError(f"{path}: connection lost") from None

    def reachable(self, endpoint: str) -> str:
        """A bound wildcard (`tcp://*:5557`) is reached at the worker's own host."""
        host = urlsplit(self.url).hostname or "127.0.0.1"
        shown = f"[{host}]" if ":" in host else host
        for wildcard in ("//*:", "//0.0.0.0:", "//[::]:", "//:::"):
            endpoint = endpoint.replace(wildcard, f"//{shown}:")
        return endpoint


def _reason(error: Exception) -> str:
    """In a word; of certificates in more, since somebody has to put them right."""
    _, failed, why = str(error).partition("certificate verify failed: ")
    return f"its certificate is not believed: {why.partition(' (_ssl')[0]}" if failed else type(error).__name__


def document_of(answer: httpx.Response) -> Mapping[str, Any]:
    """The JSON object that an answer is; an empty one for any other."""
    try:
        document = orjson.loads(answer.content)
    except orjson.JSONDecodeError:
        return {}
    return document if isinstance(document, dict) else {}


class Metrics:
    """A page of Prometheus' text format: a few samples are looked for in it, so it is not parsed as a whole."""

    def __init__(self, text: str) -> None:
        self._text = text

    def total(self, *names: str) -> float | None:
        """The sum over all labels of the samples called one of these; None when there is none."""
        values = [value for name in names for _, value in self._samples(name)]
        return sum(values) if values else None

    def labels(self, name: str) -> list[dict[str, str]]:
        """The labels of each sample of a name."""
        return [dict(_LABEL.findall(labels)) for labels, _ in self._samples(name)]

    def labelled(self, name: str, label: str, wanted: str) -> float | None:
        """The sum of a name's samples with a label of this value."""
        found = [value for labels, value in self._samples(name) if dict(_LABEL.findall(labels)).get(label) == wanted]
        return sum(found) if found else None

    def _samples(self, name: str) -> Iterator[tuple[str, float]]:
        for match in re.finditer(rf"^{re.escape(name)}(?:\{{([^\n]*)\}})? (\S+)", self._text, re.MULTILINE):
            try:
                yield match[1] or "", float(match[2])
            except ValueError:
                continue
