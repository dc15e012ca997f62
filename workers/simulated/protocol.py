"""uvicorn's HTTP protocol with two things more in the scope, for faults and echoes."""

from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

TRANSPORT = "ropeway.transport"
RAW_HEADERS = "ropeway.raw_headers"
"""Headers as received: names in the client's spelling."""


class ObservedProtocol(HttpToolsProtocol):
    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._raw_headers: list[tuple[bytes, bytes]] = []
        extras: dict[str, Any] = {TRANSPORT: self.transport, RAW_HEADERS: self._raw_headers}
        self.scope.update(extras)  # type: ignore[typeddict-item]

    def on_header(self, name: bytes, value: bytes) -> None:
        super().on_header(name, value)
        self._raw_headers.append((name, value))
