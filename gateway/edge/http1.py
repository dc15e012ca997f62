"""HTTP/1.1 framing, without I/O: heads in, heads out, and where a body ends (RFC 9112).

The edge splices bodies: it never needs a chunk's content, only the message's last byte. `BodyEnd` finds it by walking
chunk headers, one `find` and one `int` for each, and leaves the bytes alone.
"""

import re
from collections.abc import Callable
from functools import lru_cache
from http import HTTPStatus
from typing import Any, Generic, TypeVar

import msgspec

from gateway.errors import BadRequest, HeaderTooLarge

Headers = list[tuple[bytes, bytes]]
"""(lower-case name, value) in order of arrival."""

HEADER_COUNT_MAX = 200
HEADER_BYTES_MAX = 65_536
CHUNK_LINE_BYTES_MAX = 256
TRAILER_BYTES_MAX = 16_384

# RFC 9110 7.6.1, and those that belong to one connection by their nature.
HOP_BY_HOP = frozenset(
    {
        b"connection",
        b"keep-alive",
        b"proxy-authenticate",
        b"proxy-authorization",
        b"proxy-connection",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
    }
)

_TOKEN = re.compile(rb"[!#$%&'*+\-.^_`|~0-9A-Za-z]+").fullmatch
_VALUE = re.compile(rb"[\t\x20-\x7e\x80-\xff]*").fullmatch
_TARGET = re.compile(rb"[\x21-\x7e\x80-\xff]+").fullmatch
_DIGITS = re.compile(rb"[0-9]{1,18}").fullmatch
_LENGTH_LINE = re.compile(rb"\r\ncontent-length:[ \t]*([0-9]+)[ \t]*(?=\r\n|$)", re.IGNORECASE)
_CHUNK_SIZE = re.compile(rb"([0-9A-Fa-f]{1,16})[ \t]*(?:;[\t\x20-\x7e\x80-\xff]*)?").fullmatch
_STATUS_LINE = re.compile(rb"HTTP/1\.([01]) ([1-5][0-9][0-9])(?: [\t\x20-\x7e\x80-\xff]*)?").fullmatch

_STATUS_LINES = {status.value: f"HTTP/1.1 {status.value} {status.phrase}\r\n".encode() for status in HTTPStatus}

_BODILESS = frozenset({204, 304})

CHUNKED = -1
UNTIL_CLOSE = -2


def status_line(status: int) -> bytes:
    return _STATUS_LINES.get(status) or b"HTTP/1.1 %d \r\n" % status


class FramingError(Exception):
    """The peer broke HTTP's framing; the connection cannot be used any further."""


class RequestHead(msgspec.Struct, frozen=True):
    method: bytes
    target: bytes
    headers: Headers
    length: int
    """Body bytes, or CHUNKED."""
    keep_alive: bool
    http10: bool
    expects_continue: bool
    notes: dict[str, Any]
    """What later stages have derived from the head alone. Heads that differ in their length only share it."""

    def with_length(self, length: int) -> "RequestHead":
        return RequestHead(
            self.method,
            self.target,
            self.headers,
            length,
            self.keep_alive,
            self.http10,
            self.expects_continue,
            self.notes,
        )

    @property
    def path(self) -> bytes:
        return self.target.partition(b"?")[0]

    def get(self, name: bytes) -> bytes | None:
        """The first value of a header (lower-case name)."""
        for header, value in self.headers:
            if header == name:
                return value
        return None


class ResponseHead(msgspec.Struct, frozen=True):
    status: int
    headers: Headers
    length: int
    """Body bytes, CHUNKED, or UNTIL_CLOSE."""
    keep_alive: bool
    notes: dict[str, Any]
    """As `RequestHead.notes`."""

    def with_length(self, length: int) -> "ResponseHead":
        # A status without a body has none whatever its head says.
        length = length if self.length or self.status not in _BODILESS else 0
        return ResponseHead(self.status, self.headers, length, self.keep_alive, self.notes)


Head = TypeVar("Head", RequestHead, ResponseHead)


def parse_request_head(head: bytes) -> RequestHead:
    """Parse a request head (without its blank line). Raises BadRequest or HeaderTooLarge."""
    lines = head.split(b"\r\n")
    parts = lines[0].split(b" ")
    if len(parts) != 3 or not _TOKEN(parts[0]) or not _TARGET(parts[1]):
        raise BadRequest("Malformed HTTP request line.")
    method, target, version = parts
    if version not in (b"HTTP/1.1", b"HTTP/1.0"):
        raise BadRequest("Only HTTP/1.1 and HTTP/1.0 are spoken here.")
    http10 = version == b"HTTP/1.0"
    if len(lines) - 1 > HEADER_COUNT_MAX:
        raise HeaderTooLarge(HEADER_BYTES_MAX)
    try:
        headers = _parse_fields(lines)
        length = _request_length(headers, http10)
    except FramingError as error:
        raise BadRequest(f"{error}") from None
    connection = expect = host = None
    for name, value in headers:
        if name == b"connection":
            connection = value.lower() if connection is None else connection + b"," + value.lower()
        elif name == b"expect":
            expect = value.lower()
        elif name == b"host":
            if host is not None:
                raise BadRequest("More than one Host header.")
            host = value
    if host is None and not http10:
        raise BadRequest("HTTP/1.1 requests need a Host header.")
    # An HTTP/1.0 client does not know what a 100 is.
    expects_continue = expect == b"100-continue" and not http10
    keep_alive = _keeps_alive(connection, http10)
    return RequestHead(method, target, headers, length, keep_alive, http10, expects_continue, {})


def parse_response_head(head: bytes, request_method: bytes = b"POST") -> ResponseHead:
    """Parse a response head (without its blank line). Raises FramingError."""
    lines = head.split(b"\r\n")
    match = _STATUS_LINE(lines[0])
    if match is None:
        raise FramingError("malformed status line")
    headers = _parse_fields(lines)
    status = int(match[2])
    connection = None
    length = chunked = None
    for name, value in headers:
        if name == b"content-length":
            length = _content_length(value, length)
        elif name == b"transfer-encoding":
            chunked = value.lower() if chunked is None else chunked + b"," + value.lower()
        elif name == b"connection":
            connection = value.lower() if connection is None else connection + b"," + value.lower()
    keep_alive = _keeps_alive(connection, match[1] == b"0")
    if request_method == b"HEAD" or status < 200 or status in _BODILESS:
        return ResponseHead(status, headers, 0, keep_alive, {})
    if chunked is not None:
        if chunked != b"chunked" or length is not None:
            raise FramingError("unsupported transfer coding in a response")
        return ResponseHead(status, headers, CHUNKED, keep_alive, {})
    if length is None:
        return ResponseHead(status, headers, UNTIL_CLOSE, False, {})
    return ResponseHead(status, headers, length, keep_alive, {})


class HeadReader(Generic[Head]):
    """Parses the heads that one connection receives.

    A peer that keeps its connection open sends one head again and again, but for its Content-Length. Such a head costs
    a comparison or two, and what was derived from it (`notes`) holds as well.
    """

    __slots__ = ("_after", "_before", "_data", "_head", "_parse")
    _parse: Callable[[bytes], Head]

    def __init__(self, parse: Callable[[bytes], Head]) -> None:
        self._parse = parse
        self._head: Head | None = None
        self._data: bytes | None = None
        """The last head."""
        self._before = b""
        """What stood before the digits of its Content-Length, and after them; None where nothing may vary."""
        self._after: bytes | None = None

    def read(self, data: bytes) -> Head:
        """As `parse`."""
        head = self._head
        if head is not None:
            if data == self._data:
                return head
            before, after = self._before, self._after
            if after is not None and data.startswith(before) and data.endswith(after):
                digits = data[len(before) : len(data) - len(after)]
                if _DIGITS(digits):
                    self._data = data
                    head = self._head = head.with_length(int(digits))
                    return head
        head = self._head = self._parse(data)
        self._data, self._after = data, None
        lines = list(_LENGTH_LINE.finditer(data))
        # Of two such lines, digits that change in one could contradict the other.
        if len(lines) == 1 and head.length >= 0:
            self._before, self._after = data[: lines[0].start(1)], data[lines[0].end(1) :]
        return head


def _parse_fields(lines: list[bytes]) -> Headers:
    headers: Headers = []
    for line in lines[1:]:
        name, colon, value = line.partition(b":")
        # A name that is no token also catches folded lines and white space before the colon: both smuggle.
        if not colon or not _TOKEN(name):
            raise FramingError("Malformed header line.")
        value = value.strip(b" \t")
        if not _VALUE(value):
            raise FramingError("A header value holds control characters.")
        headers.append((name.lower(), value))
    return headers


def _request_length(headers: Headers, http10: bool) -> int:
    length = coding = None
    for name, value in headers:
        if name == b"content-length":
            length = _content_length(value, length)
        elif name == b"transfer-encoding":
            coding = value.lower() if coding is None else coding + b"," + value.lower()
    if coding is None:
        return length or 0
    # HTTP/1.0 has no codings: a proxy that dropped what it did not know would see another message (RFC 9112 6.1).
    if coding != b"chunked" or http10:
        raise FramingError("Unsupported transfer coding.")
    if length is not None:
        raise FramingError("Both Content-Length and Transfer-Encoding.")
    return CHUNKED


def _content_length(value: bytes, earlier: int | None) -> int:
    if not _DIGITS(value):
        raise FramingError("Malformed Content-Length.")
    length = int(value)
    if earlier is not None and earlier != length:
        raise FramingError("Conflicting Content-Length headers.")
    return length


def _keeps_alive(connection: bytes | None, http10: bool) -> bool:
    if connection is None:
        return not http10
    tokens = {token.strip() for token in connection.split(b",")}
    return b"keep-alive" in tokens if http10 else b"close" not in tokens


def forwardable(headers: Headers, dropped: frozenset[bytes]) -> Headers:
    """The headers that may travel on: neither hop by hop, nor named by Connection, nor in `dropped`."""
    named = [value for name, value in headers if name == b"connection"]
    if not named:
        return [field for field in headers if field[0] not in dropped]
    listed = {token.strip().lower() for value in named for token in value.split(b",")}
    return [field for field in headers if field[0] not in dropped and field[0] not in listed]


@lru_cache(maxsize=1024)
def _chunk_size(line: bytes) -> int:
    """The size that a chunk header states. One model's chunks are much alike, so their headers repeat."""
    match = _CHUNK_SIZE(line[:-1]) if line.endswith(b"\r") else None
    # However it has come: what is taken must not depend on how it was cut.
    if match is None or len(line) > CHUNK_LINE_BYTES_MAX:
        raise FramingError("malformed chunk header")
    return int(match[1], 16)


@lru_cache(maxsize=1024)
def chunk_start(size: int) -> bytes | tuple[()]:
    """How one whole chunk begins that takes `size` bytes on the wire, written as nearly everyone writes it; what no
    bytes start with where there is none of that size."""
    for digits in range(1, len(f"{size:x}") + 1):
        content = size - digits - len(b"\r\n\r\n")
        if content > 0 and len(f"{content:x}") == digits:
            return b"%x\r\n" % content
    return ()


class BodyEnd:
    """Finds the last byte of one body among the bytes fed to it.

    `length` as in the heads. `feed(data)` answers how many bytes of `data` belong to the body; `done` says that the
    last of them has been seen; `at_chunk_boundary` that a chunk of our own could follow what has been fed.
    Where it says so, bytes that start with `chunk_start` of their number are one chunk and would leave all as it is:
    they need not be fed. Raises FramingError.
    """

    __slots__ = ("_chunked", "_line", "_remaining", "_trailer", "at_chunk_boundary", "done")

    def __init__(self, length: int) -> None:
        self._chunked = length == CHUNKED
        self._remaining = 0 if self._chunked else length
        self._line = b""
        """An incomplete chunk header, kept until its line ends."""
        self._trailer = False
        self.at_chunk_boundary = self._chunked
        self.done = length == 0

    def feed(self, data: bytes) -> int:
        if self._chunked:
            return self._feed_chunked(data)
        if self._remaining == UNTIL_CLOSE:
            return len(data)
        taken = min(self._remaining, len(data))
        self._remaining -= taken
        self.done = self._remaining == 0
        return taken

    def _feed_chunked(self, data: bytes) -> int:
        # `_remaining` counts a chunk's data and the line end behind it, so that boundaries are chunk starts.
        size = len(data)
        position = self._remaining
        if position > size:
            self._remaining = position - size
            return size
        self._remaining = 0
        self.at_chunk_boundary = False
        while position < size:
            if self._trailer:
                return self._feed_trailer(data, position)
            line_end = data.find(b"\n", position)
            if line_end < 0:
                self._line += data[position:]
                if len(self._line) > CHUNK_LINE_BYTES_MAX:
                    raise FramingError("chunk header too long")
                return size
            line = data[position:line_end]
            if self._line:
                line, self._line = self._line + line, b""
            chunk = _chunk_size(line)
            position = line_end + 1
            if not chunk:
                self._trailer = True
                continue
            position += chunk + 2
        self._remaining = position - size
        self.at_chunk_boundary = position == size and not self._line and not self._trailer
        return size

    def _feed_trailer(self, data: bytes, position: int) -> int:
        """The lines after the last chunk, up to an empty one."""
        while True:
            line_end = data.find(b"\n", position)
            if line_end < 0:
                self._line += data[position:]
                if len(self._line) > TRAILER_BYTES_MAX:
                    raise FramingError("trailer too long")
                return len(data)
            line = self._line + data[position:line_end]
            self._line = b""
            position = line_end + 1
            if line == b"\r":
                self.done = True
                return position
            if not line.endswith(b"\r") or len(line) > TRAILER_BYTES_MAX:
                raise FramingError("malformed trailer")


def dechunk(data: bytes) -> bytes:
    """The content of a complete chunked body, as `BodyEnd` has delimited it. Raises FramingError."""
    return take_chunks(data)[0]


def take_chunks(data: bytes) -> tuple[bytes, bytes]:
    """The content of the complete chunks that `data` begins with, and the incomplete rest.

    `data` must have passed through `BodyEnd`, which checks chunk headers; it leaves the line ends behind the chunks to
    us. Raises FramingError.
    """
    parts: list[bytes] = []
    position = 0
    while (line_end := data.find(b"\n", position)) >= 0:
        size = int(data[position:line_end].partition(b";")[0], 16)
        if not size:
            break
        start = line_end + 1
        end = start + size
        if len(data) < end + 2:
            break
        if data[end : end + 2] != b"\r\n":
            raise FramingError("chunk without a line end")
        parts.append(data[start:end])
        position = end + 2
    return b"".join(parts), data[position:]
