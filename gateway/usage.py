"""Reading an answer's `usage` off its last bytes, without having parsed the rest."""

import re
from typing import NamedTuple

import msgspec
import orjson

_KEY = b'"usage"'
# Where a worker cut the object into two chunks.
_CHUNK_SEAM = re.compile(rb"\r\n[0-9A-Fa-f]+(?:;[^\r\n]*)?\r\n")


class Usage(NamedTuple):
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int | None
    """None when the worker does not report it."""


def read_usage(tail: bytes) -> Usage | None:
    """The last usage object in the end of a body, JSON or event stream, chunk headers and all; None without one."""
    start = tail.rfind(_KEY)
    while start >= 0:
        raw = _object_after(tail, start + len(_KEY))
        if raw:
            return _usage(raw) or _usage(_CHUNK_SEAM.sub(b"", raw))
        start = tail.rfind(_KEY, 0, start)
    return None


def _object_after(tail: bytes, key_end: int) -> bytes:
    """The object that is the value of the key before; empty where there is none. Its strings hold no braces."""
    start = tail.find(b"{", key_end)
    if tail[key_end:start].strip(b" \t\r\n") != b":":
        return b""
    end = tail.find(b"}", start) + 1
    nested = tail.find(b"{", start + 1, end)
    while nested >= 0:
        end = tail.find(b"}", end) + 1
        nested = tail.find(b"{", nested + 1, end)
    return tail[start:end]


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Stated(msgspec.Struct):
    """The object as engines write it; anything else is read by `_odd_usage`."""

    prompt_tokens: int
    completion_tokens: int = 0
    prompt_tokens_details: _Details | None = None


_decode = msgspec.json.Decoder(_Stated).decode


def _usage(raw: bytes) -> Usage | None:
    try:
        stated = _decode(raw)
    except msgspec.DecodeError:
        return _odd_usage(raw)
    details = stated.prompt_tokens_details
    return Usage(stated.prompt_tokens, stated.completion_tokens, details.cached_tokens if details is not None else None)


def _odd_usage(raw: bytes) -> Usage | None:
    try:
        document = orjson.loads(raw)
        details = document.get("prompt_tokens_details")
        cached = details.get("cached_tokens") if details else None
        return Usage(
            int(document["prompt_tokens"]),
            int(document.get("completion_tokens") or 0),
            int(cached) if cached is not None else None,
        )
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError):
        return None
