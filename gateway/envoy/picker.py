"""One request that passes through Envoy: what it says, what is decided, what its answer tells. Knows no gRPC.

Envoy sends a request's head and body here before it forwards them, and then its answer's (external processing,
ext_proc). The endpoint picker protocol of the Gateway API Inference Extension says how a pick is told: as the address
`host:port` in a header and in dynamic metadata. What else a worker is to be sent otherwise than the client wrote it
(the salt, plans) goes back as the body; what it answers is only watched.

Beside the gateway's own data path there is no further attempt: whom Envoy cannot reach, it answers for itself.
"""

import asyncio
import ipaddress
from collections.abc import Awaitable, Iterable
from typing import NamedTuple, Protocol
from urllib.parse import unquote

from gateway.api.translated import Translated
from gateway.edge.contract import Attempt, Ending, Listener
from gateway.edge.http1 import UNTIL_CLOSE, Headers, RequestHead, ResponseHead
from gateway.edge.server import Handler, Inbound
from gateway.errors import NotSupported, PayloadTooLarge, Unavailable
from gateway.first_token import FirstToken
from gateway.usage import UsageStripper

DESTINATION_HEADER = "x-gateway-destination-endpoint"
"""And the key of the metadata, under `envoy.lb`."""
_TAIL_BYTES = 4096
# Envoy writes framing and the connection itself, and has the client's own version of the others.
_ENVOYS = frozenset({b"host", b"connection", b"content-length", b"transfer-encoding", b"keep-alive"})


class Picked(NamedTuple):
    """Where a request is to go, and what of it is to be replaced."""

    endpoint: str
    """`host:port` with an IP address."""
    headers: Headers
    """To set."""
    removed: tuple[bytes, ...]
    body: bytes


class Resolver(Protocol):
    async def __call__(self, host: str) -> str: ...


async def resolved(host: str) -> str:
    """An IP address of a host: Envoy asks no name server for a picked endpoint. Raises OSError."""
    try:
        return str(ipaddress.ip_address(host))
    except ValueError:
        found = await asyncio.get_running_loop().getaddrinfo(host, None)
        return str(found[0][4][0])


class EnvoyExchange:
    """From a request's head to the end of its answer. Every way out ends in `ended`, once."""

    def __init__(self, handler: Handler, body_bytes_max: int, resolve: Resolver = resolved) -> None:
        self._handler = handler
        self._body_bytes_max = body_bytes_max
        self._resolve = resolve
        self._head: RequestHead | None = None
        self._path = ""
        self._body: list[bytes] = []
        self._size = 0
        self._listener: Listener | None = None
        self._status = self._answer_bytes = 0
        self._tail = b""
        self._first_token: FirstToken | None = None
        self._stripper: UsageStripper | None = None
        self._begun = False

    # What the client says

    def head(self, headers: Iterable[tuple[bytes, bytes]]) -> bool:
        """A request's head, pseudo headers among it. Whether the request is ours to place, once its body is there.
        Raises ServiceError."""
        pairs = list(headers)
        pseudo = {name: value for name, value in pairs if name.startswith(b":")}
        method, target = pseudo.get(b":method", b""), pseudo.get(b":path", b"")
        path = unquote(target.partition(b"?")[0].decode("latin-1"))
        self._path = "/" + "/".join(segment for segment in path.split("/") if segment)
        if not self._handler.owns(method.decode("latin-1"), self._path):
            return False
        plain = [(name, value) for name, value in pairs if not name.startswith(b":")]
        self._head = RequestHead(method, target, plain, 0, True, False, False, {})
        self._handler.admit(self._head)
        return True

    def body(self, data: bytes) -> None:
        """Raises ServiceError."""
        self._size += len(data)
        if self._size > self._body_bytes_max:
            raise PayloadTooLarge(self._body_bytes_max)
        self._body.append(data)

    async def pick(self) -> Picked:
        """Decide, once all of the body is there. Raises ServiceError."""
        assert self._head is not None  # noqa: S101
        inbound = Inbound(self._head, self._path, b"".join(self._body), "")
        self._body.clear()
        begun = self._handler.begin(inbound)
        listener = await begun if isinstance(begun, Awaitable) else begun
        if isinstance(listener, Translated):
            self._listener = listener.listener
            self.failed()
            raise NotSupported("No worker serves this route itself, and behind Envoy it is not translated.")
        self._listener = listener
        attempt = listener.attempt
        try:
            host = await self._resolve(attempt.connections.host)
        except OSError:
            self.failed()
            raise Unavailable("The worker's address could not be found.") from None
        return _picked(host, attempt, self._head)

    # What the worker answers

    def answer(self, headers: Iterable[tuple[bytes, bytes]]) -> Headers:
        """The head of the answer. Returns what is to be added to it."""
        listener = self._listener
        if listener is None:
            return []
        pairs = list(headers)
        self._status = next((int(value) for name, value in pairs if name == b":status"), 0)
        plain = [(name, value) for name, value in pairs if not name.startswith(b":")]
        attempt = listener.attempt
        if attempt.reads_head:
            listener.answered(ResponseHead(self._status, plain, UNTIL_CLOSE, True, {}))
        kind = dict(plain).get(b"content-type", b"")
        if self._status == 200 and kind.startswith(b"text/event-stream"):
            self._first_token = FirstToken(chunked=False)
            self._stripper = UsageStripper() if attempt.strips_usage else None
        return _header_lines(attempt.answer_headers)

    @property
    def strips(self) -> bool:
        """Whether `answer_body` may return less than it was given."""
        return self._stripper is not None

    def answer_body(self, data: bytes, done: bool) -> bytes:
        """A piece of the answer. Returns what the client is to get of it."""
        listener = self._listener
        if listener is None:
            return data
        if data and not self._begun and (self._first_token is None or self._first_token.comes_with(data)):
            self._begun = True
            listener.first_byte()
        self._answer_bytes += len(data)
        self._tail = (self._tail + data)[-_TAIL_BYTES:]
        if self._stripper is not None:
            data = self._stripper.feed(data) + (self._stripper.end() if done else b"")
        if done:
            self.complete()
        return data

    # How it ends

    def complete(self) -> None:
        self._end(Ending.COMPLETE)

    def gone(self) -> None:
        """Envoy has closed the stream: the client left, or the worker broke off."""
        self._end(Ending.UPSTREAM_BROKE if self._begun else Ending.CLIENT_GONE)

    def failed(self) -> None:
        """It is answered with an error after all."""
        self._end(Ending.REFUSED)

    def _end(self, ending: Ending) -> None:
        listener, self._listener = self._listener, None
        if listener is not None:
            listener.ended(ending, self._status, self._answer_bytes, self._tail)


def _picked(host: str, attempt: Attempt, head: RequestHead) -> Picked:
    first, _, body = b"".join(attempt.request_parts).partition(b"\r\n\r\n")
    written = _header_lines(first.partition(b"\r\n")[2])
    kept = _ENVOYS | {name for name, _ in written}
    # What follows may be longer or shorter than what the client wrote.
    removed = {b"content-length"} | {name for name, _ in head.headers if name not in kept}
    address = f"[{host}]" if ":" in host else host
    headers = [(name, value) for name, value in written if name not in _ENVOYS]
    return Picked(f"{address}:{attempt.connections.port}", headers, tuple(sorted(removed)), body)


def _header_lines(lines: bytes) -> Headers:
    pairs = []
    for line in lines.split(b"\r\n"):
        name, colon, value = line.partition(b":")
        if colon:
            pairs.append((name.strip().lower(), value.strip()))
    return pairs
