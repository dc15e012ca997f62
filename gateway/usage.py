"""Reading an answer's `usage` off its last bytes, without having parsed the rest."""

import re
from typing import NamedTuple

import orjson

# The object nests one level (token details); its strings hold no braces.
# Where a worker cut the object into two chunks.
_CHUNK_SEAM = re.compile(rb"\r\n[0-9A-Fa-f]+(?:;[^\r\n]*)?\r\n")
_USAGE = re.compile(rb'"usage"[ \t\r\n]*:[ \t\r\n]*(\{[^{}]*(?:\{[^{}]*\}[^{}]*)*\})')


class Usage(NamedTuple):
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int | None
    """None when the worker does not report it."""


def read_usage(tail: bytes) -> Usage | None:
    """The last usage object in the end of a body, JSON or event stream, chunk headers and all; None without one."""
    start = tail.rfind(b'"usage"')
    while start >= 0:
        match = _USAGE.match(tail, start)
        if match is not None:
            return _usage(match[1]) or _usage(_CHUNK_SEAM.sub(b"", match[1]))
        start = tail.rfind(b'"usage"', 0, start)
    return None


def _usage(raw: bytes) -> Usage | None:
    try:
        document = orjson.loads(raw)
        details = document.get("prompt_tokens_details") or {}
        cached = details.get("cached_tokens")
        return Usage(
            int(document["prompt_tokens"]),
            int(document.get("completion_tokens") or 0),
            int(cached) if cached is not None else None,
        )
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError):
        return None
