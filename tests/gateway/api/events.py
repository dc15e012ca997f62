"""Server-sent events, read and written."""

import json
from collections.abc import Iterable
from typing import Any

EVENT_SEPARATOR = "\n\n"


def parsed(events: bytes) -> list[dict[str, Any]]:
    """The documents of named events; each is called what its `type` says."""
    found = []
    for event in events.decode().split(EVENT_SEPARATOR):
        if event:
            name, data = event.split("\n")
            document = json.loads(data.removeprefix("data: "))
            assert name == f"event: {document['type']}"
            found.append(document)
    return found


def chunk(delta: dict[str, Any] | None = None, finish: str | None = None, **fields: Any) -> dict[str, Any]:
    """An event of a chat's stream, parsed."""
    choice = {"index": 0, "delta": delta or {}, "finish_reason": finish}
    return {"id": "chatcmpl-1", "created": 7, "model": "m", "choices": [choice], **fields}


def call(index: int, arguments: str, identifier: str | None = None, name: str | None = None) -> dict[str, Any]:
    """A delta with a part of a call."""
    function = {"arguments": arguments} | ({"name": name} if name else {})
    return {"tool_calls": [{"index": index, "function": function} | ({"id": identifier} if identifier else {})]}


USAGE = {
    "choices": [],
    "usage": {
        "prompt_tokens": 20,
        "completion_tokens": 5,
        "prompt_tokens_details": {"cached_tokens": 16},
        "completion_tokens_details": {"reasoning_tokens": 2},
    },
}


def fed(stream: Any, chunks: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    return parsed(b"".join(map(stream.feed, chunks)) + stream.end())
