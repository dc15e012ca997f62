"""What a worker's head says to us, and what of it its client gets. Whoever asks keeps the answer: heads repeat."""

from gateway.edge.http1 import HOP_BY_HOP, Headers, ResponseHead, forwardable, status_line

# The gateway writes framing itself; `x-request-id` of the worker is the id we gave it, not the client's. What a worker
# would have its own callers keep or show is between it and the gateway.
_CREDENTIALS = frozenset({b"authorization", b"api-key", b"set-cookie", b"set-cookie2", b"x-api-key"})
_DROPPED_FROM_ANSWERS = HOP_BY_HOP | _CREDENTIALS | {b"content-length", b"x-request-id"}


def forwarded_lines(head: ResponseHead) -> bytes:
    """The status line and the header lines of a worker's answer that its client gets."""
    lines = [status_line(head.status)]
    for name, value in forwardable(head.headers, _DROPPED_FROM_ANSWERS):
        lines += (name, b": ", value, b"\r\n")
    if any(name == b"content-type" and value.lower().startswith(b"text/event-stream") for name, value in head.headers):
        lines.append(_stream_headers(head.headers))
    return b"".join(lines)


def _stream_headers(headers: Headers) -> bytes:
    """What keeps proxies in front of us from buffering an event stream, unless the worker has said it."""
    names = {name for name, _ in headers}
    lines = b""
    if b"cache-control" not in names:
        lines += b"cache-control: no-cache\r\n"
    if b"x-accel-buffering" not in names:
        lines += b"x-accel-buffering: no\r\n"
    return lines


def brings_events(headers: Headers) -> bool:
    """Whether a body is events that can be read: not where a worker compresses them, unasked."""
    events, plain = False, True
    for name, value in headers:  # of every answer: cheaper than a dictionary of them
        if name == b"content-type":
            events = value[:17].lower() == b"text/event-stream"
        elif name == b"content-encoding":
            plain = value == b"identity"
    return events and plain
