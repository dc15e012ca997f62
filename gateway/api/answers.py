"""What an exchange writes to a client of HTTP/1.0, read back: for whoever stands between the two within the gateway."""

from gateway.edge.http1 import ResponseHead, parse_response_head


class AnswerReader:
    """A head, then the body as it is."""

    def __init__(self) -> None:
        self._held = b""
        self.head: ResponseHead | None = None

    def feed(self, data: bytes) -> bytes:
        """The bytes of the body among these."""
        if self.head is not None:
            return data
        head, found, body = (self._held + data).partition(b"\r\n\r\n")
        if not found:
            self._held = head
            return b""
        self._held = b""
        self.head = parse_response_head(head)
        return body

    def value(self, name: bytes) -> bytes:
        """A header's first value (lower-case name); empty where there is none."""
        headers = self.head.headers if self.head is not None else ()
        return next((value for header, value in headers if header == name), b"")
