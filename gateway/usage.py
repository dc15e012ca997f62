"""An answer's `usage`: read off its last bytes, without having parsed the rest, and taken out of a stream again where
the client did not ask for it."""

import re
from collections.abc import Mapping
from typing import Any

import msgspec
import orjson

_KEY = b'"usage"'
# As `_object_after` reads it, where nothing in it is nested twice.
_plain_object = re.compile(rb'"usage"[ \t\r\n]*:[ \t\r\n]*(\{[^{}]*(?:\{[^{}]*\}[^{}]*)*\})').match
# Where a worker cut the object into two chunks, or an event's data into two lines.
_SEAM = re.compile(rb"\r\n[0-9A-Fa-f]+(?:;[^\r\n]*)?\r\n|(?:\r\n|\n|\r)data: ?")
_cut_within_a_line = re.compile(rb"\r\n(?<!\n\r\n)[0-9A-Fa-f]+(?:;[^\r\n]*)?\r\n").search
_CUT_BYTES_MAX = 1024
"""How far from the end a cut is looked for: no usage and what follows it is longer."""


class Usage(msgspec.Struct, frozen=True, gc=False):
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int | None
    """None when the worker does not report it."""


def read_usage(tail: bytes) -> Usage | None:
    """The last usage object in the end of a body, JSON or event stream, chunk headers and all; None without one."""
    usage = _read_usage(tail)
    if usage is not None or _cut_within_a_line(tail, max(len(tail) - _CUT_BYTES_MAX, 0)) is None:
        return usage
    # Its key, too, may have been cut in two.
    return _read_usage(_SEAM.sub(b"", tail))


def _read_usage(tail: bytes) -> Usage | None:
    start = tail.rfind(_KEY)
    while start >= 0:
        plain = _plain_object(tail, start)
        raw = plain[1] if plain is not None else _object_after(tail, start + len(_KEY))
        if raw:
            return _usage(raw) or _usage(_SEAM.sub(b"", raw))
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


class _Details(msgspec.Struct, gc=False):
    cached_tokens: int | None = None


class _Stated(msgspec.Struct, gc=False):
    """The object as engines write it; anything else is read by `_odd_usage`."""

    prompt_tokens: int
    completion_tokens: int = 0
    prompt_tokens_details: _Details | None = None


_decode = msgspec.json.Decoder(_Stated).decode


def _usage(raw: bytes) -> Usage | None:
    try:
        stated = _decode(raw)
    except (msgspec.DecodeError, RecursionError):
        return _odd_usage(raw)
    details = stated.prompt_tokens_details
    return Usage(stated.prompt_tokens, stated.completion_tokens, details.cached_tokens if details is not None else None)


def _odd_usage(raw: bytes) -> Usage | None:
    try:
        document = orjson.loads(raw)
        if "input_tokens" in document:
            return _usage_of_another_form(document)
        details = document.get("prompt_tokens_details")
        cached = details.get("cached_tokens") if details else None
        return Usage(
            int(document["prompt_tokens"]),
            int(document.get("completion_tokens") or 0),
            int(cached) if cached is not None else None,
        )
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError):
        return None


def _usage_of_another_form(document: Mapping[str, Any]) -> Usage:
    """Of Responses, or of Anthropic's Messages, whose input tokens are those that were not cached."""
    computed, output = int(document["input_tokens"]), int(document.get("output_tokens") or 0)
    details = document.get("input_tokens_details")
    if details:
        return Usage(computed, output, details.get("cached_tokens"))
    cached, written = document.get("cache_read_input_tokens"), document.get("cache_creation_input_tokens")
    return Usage(computed + int(cached or 0) + int(written or 0), output, cached)


# ---- taking it out of a stream ---------------------------------------------------------------------------------------

# A carriage return that nothing follows yet may be the first half of a line end.
# Both begin with what is quickly looked for.
EVENT_END = re.compile(rb"(?:\n|\r\n|\r(?=[^\n]))(?:\n|\r\n|\r(?=[^\n]))")
_DATA = re.compile(rb"data:(?<![^\r\n]data:) ?([^\r\n]*)")
_EVENT_BYTES_MAX = 1024 * 1024


class UsageStripper:
    """Passes a stream of server-sent events on, byte for byte, but for the event that brings usage and nothing else.

    Whole events go out; the beginning of one is held back until its end has come, or it has become too long to be it.
    """

    __slots__ = ("_held", "_searched", "stripped")

    def __init__(self) -> None:
        self._held = b""
        self._searched = 0
        """How far an event's end has been looked for in what is held."""
        self.stripped = b""
        """The last event that was taken out."""

    @property
    def holds(self) -> bool:
        """Whether the beginning of an event is held back."""
        return bool(self._held)

    def feed(self, data: bytes) -> bytes:
        """The bytes to pass on now."""
        held = self._held + data
        passed: list[bytes] = []
        start, search = 0, self._searched
        while (end := EVENT_END.search(held, search)) is not None:
            start = search = self._pass(held, start, end.end(), passed)
        self._held = held[start:]
        # An end may be cut in two.
        self._searched = max(len(self._held) - 3, 0)
        if len(self._held) > _EVENT_BYTES_MAX:
            passed.append(self.end())
        return b"".join(passed)

    def end(self) -> bytes:
        """What is still held, once nothing more comes."""
        held, self._held, self._searched = self._held, b"", 0
        return held

    def _pass(self, held: bytes, start: int, end: int, passed: list[bytes]) -> int:
        event = held[start:end]
        if _KEY in event and _brings_usage_alone(event):
            self.stripped = event
        else:
            passed.append(event)
        return end


def event_data(event: bytes) -> bytes:
    """What an event says: its lines of data, joined; empty for comments."""
    return b"\n".join(_DATA.findall(event))


def _brings_usage_alone(event: bytes) -> bool:
    try:
        document = orjson.loads(event_data(event))
    except orjson.JSONDecodeError:
        return False
    return isinstance(document, dict) and document.get("choices") == [] and isinstance(document.get("usage"), dict)
