"""When a streamed answer begins to say something: with the first event that brings a part of it.

Before that engines, and proxies before them, send what took no computing: comments that keep the connection open, a
chunk that names the role, the announcement of an answer. A time to first token that counted to one of those would be
too short, and estimates that learn from it too hopeful. What is of no known form counts as a part of the answer.
"""

from typing import Any

import orjson

from gateway.edge.http1 import FramingError, take_chunks
from gateway.usage import EVENT_END, event_data

_HELD_BYTES_MAX = 65_536
"""No event that says nothing is as long."""

# As most tokens come, which need not be parsed to be known for one.
_PLAIN_TOKENS = (b'"delta":{"content":"', b'"text":"')


class FirstToken:
    """Fed an event stream as it stands on the wire, until it has been found."""

    __slots__ = ("_chunked", "_held", "_undelivered")

    def __init__(self, chunked: bool) -> None:
        self._chunked = chunked
        self._held = self._undelivered = b""

    def comes_with(self, data: bytes) -> bool:
        """Whether these bytes complete the first event that says something, or begin its text."""
        if _holds_a_plain_token(data):
            return True
        try:
            if self._chunked:
                data, self._undelivered = take_chunks(self._undelivered + data)
        except FramingError:
            return True
        held, start = self._held + data, 0
        while (end := EVENT_END.search(held, start)) is not None:
            if _says_something(held[start : end.start()]):
                return True
            start = end.end()
        self._held = held[start:]
        return len(self._held) + len(self._undelivered) > _HELD_BYTES_MAX


def _holds_a_plain_token(data: bytes) -> bool:
    """Whether there is a text in it that is not empty."""
    for token in _PLAIN_TOKENS:
        start = data.find(token)
        if start >= 0 and data[start + len(token) : start + len(token) + 1] not in (b"", b'"'):
            return True
    return False


def _says_something(event: bytes) -> bool:
    data = event_data(event)
    if not data:
        return False
    try:
        document = orjson.loads(data)
    except orjson.JSONDecodeError:
        return True
    if not isinstance(document, dict):
        return True
    choices = document.get("choices")
    if isinstance(choices, list):
        return any(map(_has_content, choices))
    # Of the responses API and its like, whose events are typed.
    kind = document.get("type")
    return not isinstance(kind, str) or "delta" in kind


def _has_content(choice: Any) -> bool:
    if not isinstance(choice, dict) or choice.get("finish_reason") or choice.get("text") or choice.get("token_ids"):
        return True
    delta = choice.get("delta")
    return isinstance(delta, dict) and any(value for key, value in delta.items() if key != "role")
