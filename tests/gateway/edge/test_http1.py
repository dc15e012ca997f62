"""HTTP framing: heads that are taken and heads that are refused, and the last byte of a body at every split."""

import pytest

from gateway.edge.http1 import (
    CHUNK_LINE_BYTES_MAX,
    CHUNKED,
    HEADER_COUNT_MAX,
    HOP_BY_HOP,
    TRAILER_BYTES_MAX,
    UNTIL_CLOSE,
    BodyEnd,
    FramingError,
    chunk_start,
    dechunk,
    forwardable,
    parse_request_head,
    parse_response_head,
    status_line,
    take_chunks,
)
from gateway.errors import BadRequest, HeaderTooLarge

CHUNKED_BODY = (
    b'5;name=value\r\nhello\r\n1 \r\n,\r\n00A;q="a;b"\r\n 0\r\n\r\nend!\r\n0;last\r\nX-Sum: 1\r\nX-Two: 2\r\n\r\n'
)
CHUNKED_CONTENT = b"hello, 0\r\n\r\nend!"


def request(*lines: bytes, start: bytes = b"POST /v1/x HTTP/1.1", host: bool = True) -> bytes:
    return b"\r\n".join([start, *([b"Host: h"] if host else []), *lines])


def response(*lines: bytes, start: bytes = b"HTTP/1.1 200 OK") -> bytes:
    return b"\r\n".join([start, *lines])


def feed_each(end: BodyEnd, data: bytes) -> None:
    for byte in data:
        end.feed(bytes([byte]))


# Request heads


def test_a_request_head_is_read() -> None:
    head = parse_request_head(
        request(b"Content-Length: 12", b"X-Thing:\t a b \t", b"x-thing: c", start=b"POST /v1/x?a=%20b HTTP/1.1")
    )
    assert (head.method, head.target, head.path) == (b"POST", b"/v1/x?a=%20b", b"/v1/x")
    assert head.headers == [
        (b"host", b"h"),
        (b"content-length", b"12"),
        (b"x-thing", b"a b"),
        (b"x-thing", b"c"),
    ]
    assert (head.length, head.keep_alive, head.http10, head.expects_continue) == (12, True, False, False)
    assert head.get(b"x-thing") == b"a b"
    assert head.get(b"x-other") is None


@pytest.mark.parametrize(
    ("start", "lines", "keep_alive"),
    [
        (b"GET / HTTP/1.1", (), True),
        (b"GET / HTTP/1.1", (b"Connection: Close",), False),
        (b"GET / HTTP/1.1", (b"Connection: X-Foo", b"Connection: keep-alive , close"), False),
        (b"GET / HTTP/1.1", (b"Connection: keep-alive",), True),
        (b"GET / HTTP/1.0", (), False),
        (b"GET / HTTP/1.0", (b"Connection: Keep-Alive",), True),
    ],
)
def test_persistence(start: bytes, lines: tuple[bytes, ...], keep_alive: bool) -> None:
    assert parse_request_head(request(*lines, start=start)).keep_alive is keep_alive


def test_http10_needs_no_host() -> None:
    head = parse_request_head(request(start=b"GET / HTTP/1.0", host=False))
    assert head.http10
    assert not head.keep_alive


@pytest.mark.parametrize(
    ("line", "length"),
    [
        (b"Content-Length: 0", 0),
        (b"Content-Length: 007", 7),
        (b"Transfer-Encoding: chunked", CHUNKED),
        (b"Transfer-Encoding: Chunked", CHUNKED),
    ],
)
def test_request_lengths(line: bytes, length: int) -> None:
    assert parse_request_head(request(line)).length == length


def test_equal_content_lengths_are_one() -> None:
    assert parse_request_head(request(b"Content-Length: 5", b"Content-Length: 5")).length == 5


def test_expectations() -> None:
    assert parse_request_head(request(b"Expect: 100-Continue")).expects_continue
    assert not parse_request_head(request(b"Expect: 100-continue", start=b"POST / HTTP/1.0")).expects_continue
    assert not parse_request_head(request(b"Expect: something")).expects_continue


@pytest.mark.parametrize(
    "head",
    [
        pytest.param(request(b"X-A: 1", b" folded"), id="obs-fold"),
        pytest.param(request(b"X-A: 1", b"\tfolded"), id="obs-fold tab"),
        pytest.param(request(b"Content-Length : 5"), id="space before colon"),
        pytest.param(request(b"no colon"), id="no colon"),
        pytest.param(request(b": empty name"), id="empty name"),
        pytest.param(request(b"X A: 1"), id="space in name"),
        pytest.param(request(b"Content-Length: 5", b"Content-Length: 6"), id="conflicting lengths"),
        pytest.param(request(b"Content-Length: 5, 5"), id="listed lengths"),
        pytest.param(request(b"Content-Length: +5"), id="signed length"),
        pytest.param(request(b"Content-Length: -1"), id="negative length"),
        pytest.param(request(b"Content-Length: 0x5"), id="hexadecimal length"),
        pytest.param(request(b"Content-Length: 5_0"), id="underscored length"),
        pytest.param(request(b"Content-Length: "), id="empty length"),
        pytest.param(request(b"Content-Length: \xb2"), id="superscript length"),
        pytest.param(request(b"Content-Length: " + b"9" * 19), id="endless length"),
        pytest.param(request(b"Content-Length: 5", b"Transfer-Encoding: chunked"), id="length and coding"),
        pytest.param(request(b"Transfer-Encoding: gzip"), id="gzip"),
        pytest.param(request(b"Transfer-Encoding: gzip, chunked"), id="gzip, chunked"),
        pytest.param(request(b"Transfer-Encoding: chunked", b"Transfer-Encoding: identity"), id="two codings"),
        pytest.param(request(b"Transfer-Encoding: xchunked"), id="unknown coding"),
        pytest.param(request(b"Transfer-Encoding: \x0bchunked"), id="disguised coding"),
        pytest.param(request(b"Transfer-Encoding: chunked", start=b"POST / HTTP/1.0"), id="coding in HTTP/1.0"),
        pytest.param(request(host=False), id="no host"),
        pytest.param(request(b"Host: other"), id="two hosts"),
        pytest.param(request(b"X-A: a\x00b"), id="NUL"),
        pytest.param(request(b"X-A: a\rb"), id="bare CR"),
        pytest.param(request(b"X-A: a\nContent-Length: 5"), id="bare LF"),
        pytest.param(request(b"X-A: a\x7f"), id="DEL"),
        pytest.param(request(start=b"POST /v1/x HTTP/2.0"), id="HTTP/2"),
        pytest.param(request(start=b"POST /v1/x HTTP/1.1 "), id="space after version"),
        pytest.param(request(start=b"POST  /v1/x HTTP/1.1"), id="two spaces"),
        pytest.param(request(start=b"POST /v1/x"), id="HTTP/0.9"),
        pytest.param(request(start=b"POST /a\tb HTTP/1.1"), id="tab in target"),
        pytest.param(request(start=b"PO(ST / HTTP/1.1"), id="method is no token"),
        pytest.param(b"", id="empty"),
    ],
)
def test_request_heads_that_smuggle_are_refused(head: bytes) -> None:
    with pytest.raises(BadRequest):
        parse_request_head(head)


def test_a_head_holds_so_many_headers() -> None:
    fields = [b"X-%d: 1" % number for number in range(HEADER_COUNT_MAX - 1)]
    assert len(parse_request_head(request(*fields)).headers) == HEADER_COUNT_MAX
    with pytest.raises(HeaderTooLarge):
        parse_request_head(request(*fields, b"X-More: 1"))


# Response heads


@pytest.mark.parametrize(
    ("head", "method", "status", "length", "keep_alive"),
    [
        (response(b"Content-Length: 3"), b"POST", 200, 3, True),
        (response(b"Transfer-Encoding: chunked"), b"POST", 200, CHUNKED, True),
        (response(b"Content-Length: 3", b"Connection: close"), b"POST", 200, 3, False),
        (response(b"Content-Length: 3", b"Connection: close", b"Connection: X-Foo"), b"POST", 200, 3, False),
        (response(), b"POST", 200, UNTIL_CLOSE, False),
        (response(b"Content-Length: 3", start=b"HTTP/1.0 200 OK"), b"POST", 200, 3, False),
        (response(b"Content-Length: 3", b"Connection: keep-alive", start=b"HTTP/1.0 200"), b"POST", 200, 3, True),
        (response(start=b"HTTP/1.1 204 No Content"), b"POST", 204, 0, True),
        (response(b"Content-Length: 9", start=b"HTTP/1.1 304 "), b"GET", 304, 0, True),
        (response(b"Content-Length: 9"), b"HEAD", 200, 0, True),
        (response(start=b"HTTP/1.1 102 Processing"), b"POST", 102, 0, True),
        (response(b"Content-Length: 1", start=b"HTTP/1.1 599"), b"POST", 599, 1, True),
    ],
)
def test_response_heads(head: bytes, method: bytes, status: int, length: int, keep_alive: bool) -> None:
    parsed = parse_response_head(head, method)
    assert (parsed.status, parsed.length, parsed.keep_alive) == (status, length, keep_alive)


@pytest.mark.parametrize(
    "head",
    [
        b"",
        b"SSH-2.0-OpenSSH",
        b"HTTP/2 200",
        b"HTTP/1.1 2000 OK",
        b"HTTP/1.1 099 Low",
        b"HTTP/1.1  200 OK",
        response(b"X-A: 1", b" folded"),
        response(b"Content-Length : 3"),
        response(b"Content-Length: 3", b"Content-Length: 4"),
        response(b"Content-Length: 3", b"Transfer-Encoding: chunked"),
        response(b"Transfer-Encoding: gzip, chunked"),
        response(b"X-A: a\x00"),
    ],
)
def test_response_heads_that_are_refused(head: bytes) -> None:
    with pytest.raises(FramingError):
        parse_response_head(head)


def test_status_lines() -> None:
    assert status_line(404) == b"HTTP/1.1 404 Not Found\r\n"
    assert status_line(599) == b"HTTP/1.1 599 \r\n"


# Hop by hop


def test_hop_by_hop_headers_stay_behind() -> None:
    head = parse_request_head(
        request(
            b"Connection: keep-alive, X-Foo",
            b"connection:x-bar",
            b"X-Foo: 1",
            b"X-Bar: 2",
            b"X-Baz: 3",
            b"TE: trailers",
            b"Upgrade: h2c",
            b"Keep-Alive: timeout=5",
            b"Trailer: X-Sum",
            b"Proxy-Authorization: Basic eA==",
            b"Proxy-Authenticate: Basic",
            b"Proxy-Connection: keep-alive",
            b"Transfer-Encoding: chunked",
        )
    )
    assert forwardable(head.headers, HOP_BY_HOP) == [(b"host", b"h"), (b"x-baz", b"3")]


def test_headers_named_by_the_caller_stay_behind() -> None:
    headers = [(b"host", b"h"), (b"te", b"x"), (b"x-a", b"1")]
    assert forwardable(headers, HOP_BY_HOP | {b"host"}) == [(b"x-a", b"1")]


# Where a body ends


@pytest.mark.parametrize(
    ("length", "body"),
    [(10, b"0123456789"), (CHUNKED, CHUNKED_BODY), (CHUNKED, b"0\r\n\r\n"), (CHUNKED, b"1\r\nx\r\n0\r\n\r\n")],
)
def test_the_end_is_found_at_every_split(length: int, body: bytes) -> None:
    surplus = b"GET / HTTP/1.1\r\n\r\n"
    data = body + surplus
    for first in range(len(body) + 1):
        for second in range(first, len(body) + 1, 7):
            end = BodyEnd(length)
            taken = 0
            for piece in (data[:first], data[first:second], data[second:]):
                taken += 0 if end.done else end.feed(piece)
            assert end.done
            assert taken == len(body), (first, second)


@pytest.mark.parametrize(("length", "body"), [(10, b"0123456789"), (CHUNKED, CHUNKED_BODY)])
def test_the_end_is_found_byte_by_byte(length: int, body: bytes) -> None:
    end = BodyEnd(length)
    for position in range(len(body)):
        assert not end.done
        assert end.feed(body[position : position + 1]) == 1
    assert end.done


def test_an_empty_body_has_ended() -> None:
    assert BodyEnd(0).done


def test_a_body_until_close_never_ends() -> None:
    end = BodyEnd(UNTIL_CLOSE)
    assert end.feed(b"0\r\n\r\n") == 5
    assert not end.done
    assert not end.at_chunk_boundary


def test_chunk_boundaries() -> None:
    end = BodyEnd(CHUNKED)
    seen = []
    for byte in b"2\r\nab\r\n1\r\nc\r\n0\r\n\r\n":
        end.feed(bytes([byte]))
        seen.append(end.at_chunk_boundary)
    # After each chunk's line end, and nowhere else: not within a header, not behind the last chunk.
    assert [position for position, boundary in enumerate(seen) if boundary] == [6, 12]


def test_how_a_chunk_of_a_size_starts() -> None:
    written = {len(chunk): chunk for size in range(1, 5000) if (chunk := b"%x\r\n%b\r\n" % (size, bytes(size)))}
    for size in range(5000):
        start, chunk = chunk_start(size), written.get(size)
        if chunk is None:
            assert start == ()
            assert not b"1\r\n".startswith(start)
        else:
            assert chunk.startswith(start)
            assert start == chunk[: chunk.index(b"\n") + 1]


def test_what_starts_as_a_chunk_of_its_size_leaves_the_boundary_where_it_is() -> None:
    end = BodyEnd(CHUNKED)
    assert end.at_chunk_boundary
    for data in (b"2\r\nab\r\n", b"10\r\n0\r\n\r\n0123456789a\r\n", b"1\r\n\r\r\n"):
        assert data.startswith(chunk_start(len(data)))
        assert end.feed(data) == len(data)
        assert end.at_chunk_boundary
        assert not end.done
    # Neither the last chunk, nor two of them, nor a part.
    for data in (b"0\r\n\r\n", b"2\r\nab\r\n" * 2, b"9\r\nab\r\n"):
        assert not data.startswith(chunk_start(len(data)))


def test_half_a_chunk_header_is_no_boundary() -> None:
    end = BodyEnd(CHUNKED)
    end.feed(b"2\r\nab\r\n1")
    end.feed(b"")
    assert not end.at_chunk_boundary


@pytest.mark.parametrize(
    "body",
    [
        b"\r\n",
        b"g\r\n",
        b"-1\r\n",
        b"+1\r\n",
        b"0x1\r\n",
        b"1_0\r\n",
        b" 1\r\n",
        b"1\n",
        b"1\n\r\n",
        b"1;a\x00\r\n",
        b"1;a\rb\r\n",
        b"11111111111111111\r\n",
        b"1\r\nx\r\nzz\r\n",
        b"0\r\nX-Sum: 1\n\r\n",
        b"0\r\n\n",
        b"1" * (CHUNK_LINE_BYTES_MAX + 1),
        b"0\r\n" + b"x" * (TRAILER_BYTES_MAX + 1),
    ],
)
def test_malformed_chunks(body: bytes) -> None:
    with pytest.raises(FramingError):
        BodyEnd(CHUNKED).feed(body)
    with pytest.raises(FramingError):
        feed_each(BodyEnd(CHUNKED), body)


# Chunks unpacked


def test_dechunk() -> None:
    assert dechunk(CHUNKED_BODY) == CHUNKED_CONTENT
    assert dechunk(b"0\r\n\r\n") == b""


def test_a_chunk_without_its_line_end_is_refused() -> None:
    for body in (b"2\r\nabc\n0\r\n\r\n", b"2\r\nabXX0\r\n\r\n"):
        with pytest.raises(FramingError):
            dechunk(body)


def test_chunks_are_taken_as_they_become_complete() -> None:
    for size in range(1, len(CHUNKED_BODY)):
        rest, content = b"", b""
        for start in range(0, len(CHUNKED_BODY), size):
            taken, rest = take_chunks(rest + CHUNKED_BODY[start : start + size])
            content += taken
        assert content == CHUNKED_CONTENT
