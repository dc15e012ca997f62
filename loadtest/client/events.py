"""Server-sent events out of bytes that come in pieces of any size.

By the WHATWG's rules: lines end with LF, CRLF or CR, an empty line ends an event, `data` lines are joined by LF, one
space after the colon is no part of the value, and a line that begins with a colon is a comment. Other fields than
`data` are of no use to a client of OpenAI's routes.
"""

import re
from collections.abc import Iterator

EVENT_BYTES_MAX = 16 * 1024 * 1024

_LINE_END = re.compile(rb"\r\n|\n|\r")


class EventError(ValueError):
    """More bytes than any event has."""


class EventReader:
    """Feed it what comes; it gives the data of each event that is complete."""

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[bytes] = []

    @property
    def unfinished(self) -> bool:
        """Whether the bytes so far end within an event."""
        return bool(self._rest or self._data)

    def feed(self, piece: bytes) -> Iterator[bytes]:
        """Data of the events that the piece completes. Raises EventError."""
        rest = self._rest + piece
        start = 0
        for match in _LINE_END.finditer(rest):
            if match[0] == b"\r" and match.end() == len(rest):
                break  # a line feed may follow
            line = rest[start : match.start()]
            start = match.end()
            if line.startswith(b"data:"):
                self._data.append(line[5:].removeprefix(b" "))
            elif not line and self._data:
                data, self._data = b"\n".join(self._data), []
                yield data
        self._rest = rest[start:]
        if len(self._rest) > EVENT_BYTES_MAX:
            raise EventError(f"an event of more than {EVENT_BYTES_MAX} bytes")
