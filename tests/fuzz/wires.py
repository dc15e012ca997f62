"""What comes over connections, cut anywhere: heads, chunks, answers, event streams.

The oracle is most often the same bytes in one piece: where a stream is cut is chance, and must change nothing. Heads
are held beside h11, too, which shares no code with ours: what both take must be the same message to both.
"""

from collections.abc import Callable, Iterator
from random import Random
from typing import Any, cast

import h11
import orjson

from gateway.edge.http1 import (
    CHUNKED,
    BodyEnd,
    FramingError,
    HeadReader,
    parse_request_head,
    parse_response_head,
    take_chunks,
)
from gateway.edge.upstream import UpstreamConnection, UpstreamPool
from gateway.errors import ServiceError
from gateway.first_token import FirstToken, _says_something
from gateway.usage import UsageStripper, read_usage
from tests.fuzz.engine import Target


def pieces(data: bytes, random: Random) -> list[bytes]:
    """Cut anywhere."""
    cuts = sorted(random.randrange(len(data) + 1) for _ in range(random.choice((1, 2, 5, 20))))
    return [data[start:end] for start, end in zip([0, *cuts], [*cuts, len(data)], strict=True)]


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


# Request heads

_REQUESTS = [
    b"POST /v1/chat/completions HTTP/1.1\r\nHost: h\r\nContent-Length: 12\r\nX-A:\t a b \r\n",
    b"POST /v1/x?a=%20b HTTP/1.1\r\nhost: h\r\nTransfer-Encoding: chunked\r\nExpect: 100-continue",
    b"GET / HTTP/1.0\r\nConnection: keep-alive, X-Foo\r\nX-Foo: 1\r\nConnection: close",
    b"POST / HTTP/1.1\r\nHost: h\r\nContent-Length: 5\r\nContent-Length: 5\r\nContent-Type: a; b=\"c\"",
]  # fmt: skip
_RESPONSES = [
    b"HTTP/1.1 200 OK\r\nContent-Length: 12\r\nConnection: keep-alive\r\nX-A: 1",
    b"HTTP/1.0 404 Not Found\r\nTransfer-Encoding: Chunked",
    b"HTTP/1.1 204 \r\nContent-Length: 9",
    b"HTTP/1.1 102 Processing\r\n",
]
_HEAD_WORDS = (
    b"\r\n", b"\n", b"\r", b": ", b":", b" ", b"\t", b"Content-Length: ", b"Transfer-Encoding: ", b"chunked",
    b"identity", b"Host: h", b"Connection: ", b"close", b"HTTP/1.1", b"HTTP/1.0", b"Expect: 100-continue", b",",
    b";", b"\x00", b"\x0b", b"content-length:5\r\n", b"\r\nContent-Length: 7",
    b"transfer-encoding: chunked\r\n",
)  # fmt: skip


def check_request_head(data: bytes, random: Random) -> None:
    head, *more = data.split(b"\r\n\r\n")
    read = _try(parse_request_head, head)
    _compare_readers(parse_request_head, [head, *more])
    if read is None:
        return
    theirs = _h11_request(head)
    if theirs is None:
        return
    if (theirs.method, theirs.target) != (read.method, read.target):
        raise AssertionError(f"{read.method!r} {read.target!r} is {theirs.method!r} {theirs.target!r} to others")
    fields = [(name.lower(), value) for name, value in theirs.headers]
    ours = [(name, value) for name, value in read.headers]
    # h11 makes one of equal lengths, and writes codings in lower case.
    framing = (b"content-length", b"transfer-encoding")
    if [one for one in fields if one[0] not in framing] != [one for one in ours if one[0] not in framing]:
        raise AssertionError(f"{ours} are {fields} to others")
    lengths = {name: value.lower() for name, value in fields if name in framing}
    expected = CHUNKED if b"transfer-encoding" in lengths else int(lengths.get(b"content-length", b"0"))
    if read.length != expected:
        raise AssertionError(f"a body of {read.length} is one of {expected} to others")


def _h11_request(head: bytes) -> h11.Request | None:
    connection = h11.Connection(h11.SERVER, max_incomplete_event_size=1 << 20)
    connection.receive_data(head + b"\r\n\r\n")
    try:
        event = connection.next_event()
    except h11.RemoteProtocolError:
        return None
    return event if isinstance(event, h11.Request) else None


def check_response_head(data: bytes, random: Random) -> None:
    heads = data.split(b"\r\n\r\n")
    _compare_readers(parse_response_head, heads)
    read = _try(parse_response_head, heads[0])
    if read is not None and not 100 <= read.status <= 599:
        raise AssertionError(f"status {read.status}")


def _compare_readers(parse: Callable[[bytes], Any], heads: list[bytes]) -> None:
    """A reader that remembers says of each head what one says that does not."""
    reader: HeadReader[Any] = HeadReader(parse)
    for head in heads * 2:
        remembered, fresh = _try(reader.read, head), _try(parse, head)
        if _fields(remembered) != _fields(fresh):
            raise AssertionError(f"{head!r} is {remembered} to who remembers, and {fresh}")


def _fields(head: Any) -> Any:
    if head is None:
        return None
    keys = ("method", "target", "status", "length", "keep_alive", "http10", "expects_continue")
    named = [(name, value) for name, value in head.headers if name != b"content-length"]
    return [getattr(head, key, None) for key in keys], named


def _try(parse: Callable[[bytes], Any], head: bytes) -> Any:
    try:
        return parse(head)
    except (ServiceError, FramingError):
        return None


# Chunks

_CHUNKS = [
    b'5;name=value\r\nhello\r\n1 \r\n,\r\n00A;q="a;b"\r\n 0\r\n\r\nend!\r\n0;last\r\nX-Sum: 1\r\n\r\nGET / HTTP/1.1',
    chunk(b"data: a\n\n") + chunk(b"data: b\n\n") + b"0\r\n\r\n",
    chunk(b"x" * 300) + b"0\r\nA: b\r\n\r\n",
    b"0\r\n\r\n",
]
_CHUNK_WORDS = (b"\r\n", b"\n", b"\r", b"0\r\n\r\n", b"1\r\n", b"a\r\n", b"f" * 16 + b"\r\n", b";", b" ", b"0x1", b"+1")


def check_chunks(data: bytes, random: Random) -> None:
    whole, cut = _delimit([data]), _delimit(pieces(data, random))
    if whole != cut:
        raise AssertionError(f"in pieces {cut}, whole {whole}")
    taken, done, broken = whole
    if broken or not done:
        return
    content, theirs = _unpacked([data[:taken]]), _h11_body(data[:taken])
    if content != _unpacked(pieces(data[:taken], random)):
        raise AssertionError("in pieces it says something else")
    # Others may refuse what we take, but not read it otherwise.
    if None not in (content, theirs) and content != theirs:
        raise AssertionError(f"to others it says {theirs!r}, and not {content!r}")


def _delimit(parts: list[bytes]) -> tuple[int, bool, bool]:
    """(bytes of the body, ended, broken)."""
    end, taken = BodyEnd(CHUNKED), 0
    for part in parts:
        if end.done:
            break
        try:
            taken += end.feed(part)
        except FramingError:
            # How much came before it is nobody's business.
            return 0, False, True
    return taken, end.done, False


def _unpacked(parts: list[bytes]) -> bytes | None:
    content, rest = b"", b""
    try:
        for part in parts:
            taken, rest = take_chunks(rest + part)
            content += taken
    except FramingError:
        return None
    return content


def _h11_body(data: bytes) -> bytes | None:
    """As another reader has it; None for what it refuses."""
    connection = h11.Connection(h11.SERVER, max_incomplete_event_size=1 << 20)
    connection.receive_data(b"POST / HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n" + data)
    content = b""
    try:
        while not isinstance(event := connection.next_event(), h11.EndOfMessage):
            if isinstance(event, h11.Data):
                content += bytes(event.data)
            elif event is h11.NEED_DATA:
                return None
    except h11.RemoteProtocolError:
        return None
    return content


# Answers

_ANSWERS = [
    b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello",
    b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + _CHUNKS[1],
    b"HTTP/1.1 102 Processing\r\n\r\nHTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n",
    b"HTTP/1.1 200 OK\r\n\r\nuntil the end",
    b"HTTP/1.1 204 No Content\r\nConnection: close\r\n\r\nHTTP/1.1 408 Late\r\n\r\n",
    b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + _CHUNKS[0],
]


class _Transport:
    """What an upstream connection does to its transport."""

    def __init__(self) -> None:
        self.closed = False

    def write(self, data: bytes) -> None:
        """The request."""

    def close(self) -> None:
        self.closed = True

    abort = close

    def is_closing(self) -> bool:
        return self.closed

    def pause_reading(self) -> None:
        raise AssertionError("nobody has asked for it")

    resume_reading = pause_reading


class _Receiver:
    """All that an exchange is told."""

    def __init__(self) -> None:
        self.head: Any = None
        self.body = b""
        self.ends: list[str] = []

    def response_complete(self, head: Any, body: bytes) -> None:
        self.response_started(head, bool(body))
        self.response_body(body, True)

    def response_started(self, head: Any, body_follows: bool) -> None:
        if self.head is not None or self.ends:
            raise AssertionError("a second answer")
        self.head = head

    def response_body(self, data: bytes, done: bool) -> None:
        if self.ends:
            raise AssertionError("bytes after the end")
        self.body += data
        if done:
            self.ends.append("done")

    def upstream_failed(self, failure: Any, reason: str) -> None:
        if self.ends:
            raise AssertionError("a failure after the end")
        self.ends.append(f"failed: {failure.name}")


def check_answer(data: bytes, random: Random) -> None:
    whole, cut = _answer([data]), _answer(pieces(data, random))
    _, body, ends, _ = whole
    if ends[0].startswith("failed"):
        # What came before a fault is handed on as far as it came alone.
        if cut[2] != ends or not cut[1].startswith(body):
            raise AssertionError(f"in pieces {cut}, whole {whole}")
    elif whole != cut:
        raise AssertionError(f"in pieces {cut}, whole {whole}")


class _Pool(UpstreamPool):
    """Without a loop, there is no later."""

    def write_soon(self, transport: Any, data: bytes) -> None:
        transport.write(data)


def _answer(parts: list[bytes]) -> tuple[Any, bytes, list[str], bool]:
    """(head, body, ends, whether the connection is kept)."""
    pool, transport, receiver = _Pool("worker", 1), _Transport(), _Receiver()
    connection = UpstreamConnection(pool)
    connection.connection_made(cast(Any, transport))
    connection.send(cast(Any, receiver), [b"POST"])
    for part in parts:
        if part and not transport.closed and not pool.idle:
            connection.data_received(part)
    kept = pool.idle > 0
    if not receiver.ends:
        connection.connection_lost(None)
    if len(receiver.ends) != 1:
        raise AssertionError(f"an answer ends once: {receiver.ends}")
    # What comes after a whole answer closes the connection, or is not looked at any more: that is chance.
    surplus = transport.closed and receiver.ends == ["done"]
    return _fields(receiver.head), receiver.body, receiver.ends, kept or surplus


# Event streams

_EVENTS = [
    b'data: {"choices":[{"index":0,"delta":{"role":"assistant","content":""}}],"usage":null}\n\n'
    b'data: {"choices":[{"index":0,"delta":{"content":"hello"}}],"usage":null}\n\n: keep-alive\n\n'
    b'data: {"choices":[],"usage":{"prompt_tokens":9,"completion_tokens":2}}\n\ndata: [DONE]\n\n',
    b'event: message\r\nid: 4\r\ndata: {"choices": [],\r\ndata: "usage": {"prompt_tokens": 1}}\r\n\r\n'
    b"data:[DONE]\r\n\r\n",
    b'data: {"choices":[],"usage":{}}\r\rdata: {"type":"response.output_text.delta"}\r\r',
    b'data: {"choices":[{"text":"a \\"usage\\" {"}]}\n\r\ndata: {"choices":[],"usage":{"a":{"b":1}}}\n\n\n',
]
_EVENT_WORDS = (
    b"data: ", b"data:", b"\n", b"\r\n", b"\r", b"\n\n", b"\r\n\r\n", b": ", b"event: x\n", b'"usage"', b"[DONE]",
    b'"choices":[]', b'{"choices":[],"usage":{}}', b'"delta":{"content":"', b'"text":"',
    b'data: {"choices":[],"usage":{"prompt_tokens":1}}\n\n',
)  # fmt: skip


def check_stripping(data: bytes, random: Random) -> None:
    cut = UsageStripper()
    passed = b"".join(map(cut.feed, pieces(data, random))) + cut.end()
    whole = UsageStripper()
    at_once = whole.feed(data) + whole.end()
    if passed != at_once or cut.stripped != whole.stripped:
        raise AssertionError(f"in pieces {passed!r}, whole {at_once!r}")
    # Of blank lines before an event nobody says whose they are.
    if at_once.translate(None, b"\r\n") != _without_usage(data).translate(None, b"\r\n"):
        raise AssertionError(f"passed on {at_once!r}, where {_without_usage(data)!r} was to be")


def _without_usage(data: bytes) -> bytes:
    return b"".join(event for event, said in _events(data) if said is None or not _is_usage(said))


def _events(data: bytes) -> Iterator[tuple[bytes, bytes | None]]:
    """(bytes, what its data says), line by line as the standard tells; at the end what is no event, and says None."""
    event, said, at = b"", [], 0
    while at < len(data):
        line, ended, at = _line(data, at)
        event += line + ended
        if line.startswith(b"data:"):
            said.append(line[5:].removeprefix(b" "))
        if not line and ended and event.strip(b"\r\n"):
            yield event, b"\n".join(said)
            event, said = b"", []
    yield event, None


def _line(data: bytes, at: int) -> tuple[bytes, bytes, int]:
    ends = [position for position in (data.find(b"\n", at), data.find(b"\r", at)) if position >= 0]
    if not ends:
        return data[at:], b"", len(data)
    end = min(ends)
    if data[end:] == b"\r":
        # The first half of a line end, perhaps, whose other half has not come.
        return data[at:], b"", len(data)
    size = 2 if data[end : end + 2] == b"\r\n" else 1
    return data[at:end], data[end : end + size], end + size


def _is_usage(said: bytes) -> bool:
    try:
        document = orjson.loads(said)
    except orjson.JSONDecodeError:
        return False
    return isinstance(document, dict) and document.get("choices") == [] and isinstance(document.get("usage"), dict)


def check_first_token(data: bytes, random: Random) -> None:
    for chunked in (False, True):
        stream = b"".join(map(chunk, filter(None, pieces(data, random)))) if chunked else data
        cut, whole = FirstToken(chunked), FirstToken(chunked)
        # A plain token is known by its beginning: what begins the answer may be found early, never late.
        begins = any(said is not None and _says_something(event) for event, said in _events(data))
        found = whole.comes_with(stream), any(map(cut.comes_with, pieces(stream, random)))
        if begins and found != (True, True):
            raise AssertionError(f"an answer that has begun, which is found {found}")


def check_usage(data: bytes, random: Random) -> None:
    for tail in (data, b"".join(map(chunk, filter(None, pieces(data, random)))) + b"0\r\n\r\n"):
        read_usage(tail)


TARGETS = (
    Target("request-heads", lambda: [*_REQUESTS, b"\r\n\r\n".join(_REQUESTS)], check_request_head, _HEAD_WORDS),
    Target("response-heads", lambda: [*_RESPONSES, b"\r\n\r\n".join(_RESPONSES)], check_response_head, _HEAD_WORDS),
    Target("chunks", lambda: list(_CHUNKS), check_chunks, _CHUNK_WORDS),
    Target("answers", lambda: list(_ANSWERS), check_answer, _HEAD_WORDS + _CHUNK_WORDS),
    Target("stripping", lambda: list(_EVENTS), check_stripping, _EVENT_WORDS),
    Target("first-token", lambda: list(_EVENTS), check_first_token, _EVENT_WORDS),
    Target("usage", lambda: list(_EVENTS), check_usage, _EVENT_WORDS),
)
