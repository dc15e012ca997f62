"""The JSON body of a request, read without being rebuilt.

Bodies are forwarded as received. Where the gateway must set a key, the bytes around it stay as they are.
That is safe only if the gateway and the engine agree on what the body says, and JSON readers disagree about one thing:
a key that occurs twice, or is spelled with escapes (`"mod\\u0065l"`). So the top level is scanned once, every byte of
its structure accounted for:

* msgspec splits the body into {key: raw value}; it validates the JSON and costs about 0.6 ns a byte;
* `_plain_spans` then walks the top level: after each value there must be a comma and the next key, spelled plainly, or
  the closing brace. A repeated key leaves bytes that the walk does not expect; an escaped one is not found where it
  should be. Both end in the slow path, which says what is wrong, or accepts a body that is odd but unambiguous;
* clients write all their bodies alike. What a walk found around the values (`Layouts`) is remembered: filled with the
  values of another body, it is that body, or the body is walked;
* most bodies of a client differ in their messages alone. What stood around those twice is remembered with what it says
  (`Frames`): of a body in such a frame nothing is read but its messages, and once.
"""

import json
import re
from collections.abc import Container, KeysView, Mapping
from typing import Any, NamedTuple

import msgspec
import orjson

from gateway.edge.beginnings import BODY_BYTES_MIN, NEW_BYTES_MIN, NEW_MESSAGES_MIN, Beginning, Beginnings
from gateway.errors import BadRequest, DuplicateKey

CONTROL_KEYS = frozenset(
    {
        "model",
        "messages",
        "prompt",
        "stream",
        "stream_options",
        "cache_salt",
        "kv_transfer_params",
        "priority",
        "request_id",
        "user",
        "max_tokens",
        "max_completion_tokens",
        "echo",
        "logprobs",
        "prompt_logprobs",
        "n",
        "best_of",
        "use_beam_search",
        "min_tokens",
        "stop",
        "stop_token_ids",
        "top_logprobs",
        "tools",
        "tool_choice",
        "chat_template",
        "chat_template_kwargs",
        "add_generation_prompt",
        "continue_final_message",
        "documents",
        "truncate_prompt_tokens",
        "add_special_tokens",
        "input",
        "instructions",
        "max_output_tokens",
        "previous_response_id",
        "system",
        "query",
    }
)
"""Keys that the gateway reads or writes: a second or an escaped spelling of one is refused."""

_decode_top_level = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
# Numbers are skipped, not read: an integer of a million digits must cost nothing.
_scan_value = json.JSONDecoder(parse_int=str, parse_float=str).raw_decode
_text_space = re.compile(r"[ \t\r\n]*").match
_next_key = re.compile(rb'[ \t\r\n]*"([^"\\]*)"[ \t\r\n]*:[ \t\r\n]*').match
_next_mark = re.compile(rb"[ \t\r\n]*([,}])").match

Span = tuple[int, int, int]
"""(start of the key, start of the value, end of the value), in bytes of the body."""

LAYOUTS_MAX = 256
LAYOUT_BYTES_MAX = 1024
FRAMES_MET_MAX = 16_384


class Layouts:
    """How bodies are written around their values: a format of `%`, by their keys in order."""

    def __init__(self) -> None:
        self._formats: dict[tuple[str, ...], bytes] = {}

    def fits(self, data: bytes, raw: Mapping[str, msgspec.Raw]) -> bool:
        """Whether the body is written as one before it: then its keys occur once, and are spelled plainly."""
        layout = self._formats.get(tuple(raw))
        return layout is not None and layout % tuple(raw.values()) == data

    def learn(self, data: bytes, spans: Mapping[str, Span]) -> None:
        """Remember a body whose keys were found to be plain, and all of it to be accounted for."""
        pieces: list[bytes] = []
        position = 0
        for _, start, end in spans.values():
            pieces.append(data[position:start].replace(b"%", b"%%"))
            position = end
        layout = b"%b".join([*pieces, data[position:].replace(b"%", b"%%")])
        if len(layout) <= LAYOUT_BYTES_MAX:
            if len(self._formats) >= LAYOUTS_MAX:
                self._formats.clear()
            self._formats[tuple(spans)] = layout


class Frame(NamedTuple):
    """What stood around the messages of a tenant's chats, and what it says."""

    tenant: str
    """How fast a body is read says nothing of what others have sent."""
    before: bytes
    after: bytes
    """With the messages' own end, `}]`."""
    values: dict[str, Any]


_NO_FRAME = Frame("", b"{", b"", {})


class Frames:
    """What stood around the messages of chats: whole members of a body whose keys occur once, and are spelled plainly.

    One JSON value in place of another leaves such a body what it was, so the value is all that is left to check.
    """

    def __init__(self) -> None:
        self._known: dict[tuple[str, bytes, bytes], Frame] = {}
        self._last = _NO_FRAME
        """The one met last, which often is the next as well."""
        self._met: set[int] = set()
        """Hashes of frames met once: most that hold a user or a seed are never met again."""

    def read(self, tenant: str, text: bytes) -> dict[str, Any] | None:
        """All that a body says; None where its frame is not known."""
        known_tenant, before, after, values = self._last
        if not (text.endswith(after) and text.startswith(before) and values and tenant == known_tenant):
            start, end = _guess_messages(text)
            known = self._known.get((tenant, text[:start], text[end:]))
            if known is None:
                return None
            self._last = known
            _, before, after, values = known
        try:
            messages = orjson.loads(text[len(before) : len(text) - len(after) + 2])
        except orjson.JSONDecodeError:
            return None
        values = values.copy()
        values["messages"] = messages
        return values

    def learn(self, tenant: str, text: bytes, raw: Mapping[str, msgspec.Raw]) -> None:
        """Remember the frame of a body whose keys were found to be plain, if it was met before."""
        start, end = _guess_messages(text)
        frame = tenant, text[:start], text[end:]
        if not 0 < start < end or len(text) - (end - start) > LAYOUT_BYTES_MAX or "messages" not in raw:
            return
        if hash(frame) not in self._met:
            if len(self._met) >= FRAMES_MET_MAX:
                self._met.clear()
            self._met.add(hash(frame))
            return
        spans = _plain_spans(text, raw)
        if spans is None or spans["messages"][1:] != (start, end):
            return
        try:
            values = orjson.loads(b"%bnull%b" % frame[1:])
        except orjson.JSONDecodeError:
            # What nobody asks for may be odd.
            return
        if len(self._known) >= LAYOUTS_MAX:
            del self._known[next(iter(self._known))]
        self._known[frame] = Frame(tenant, frame[1], text[end - 2 :], values)


def _guess_messages(text: bytes) -> tuple[int, int]:
    """Where a chat's messages begin and end, if they stand where they usually do: they end with `}]`."""
    return text.find(b"[", text.find(b'"messages"')), text.rfind(b"}]") + 2


class BodyMemory:
    """What bodies had in common so far, for those to come."""

    def __init__(self) -> None:
        self.layouts = Layouts()
        self.frames = Frames()
        self.beginnings = Beginnings()


class Body:
    """One request body: its bytes, and where each top-level key stands. Raises BadRequest from the constructor."""

    __slots__ = ("_known", "_memory", "_raw", "_spans", "_tenant", "_text", "_values", "data")

    def __init__(self, data: bytes, memory: "BodyMemory | None" = None, tenant: str = "") -> None:
        self.data = data
        self._memory = memory
        self._tenant = tenant
        self._known: Beginning | None = None
        """What the body begins with; then `_text` and all that is read off it have a stand-in for that."""
        self._spans: dict[str, Span] | None = None
        if memory is not None and len(data) >= BODY_BYTES_MIN:
            self._known = memory.beginnings.find(tenant, data)
        self._text = data if self._known is None else self._known.stand_in + data[len(self._known.data) :]
        self._raw: dict[str, msgspec.Raw] | None = None
        self._values = memory.frames.read(tenant, self._text) if memory is not None else None
        """What the text says, where it is read at once."""
        if self._values is None:
            self._check()
        elif self._known is not None:
            self._values["messages"][:1] = self._known.messages

    def _check(self) -> None:
        try:
            self._parse(self._text, self._memory)
        except (msgspec.DecodeError, RecursionError) as error:
            raise BadRequest(f"The request body is not a valid JSON object: {error}.") from None
        except UnicodeDecodeError:
            raise BadRequest("The request body is not valid UTF-8.") from None

    def _parse(self, text: bytes, memory: BodyMemory | None) -> None:
        if not text.isascii():
            # The decoder checks no string that it does not read; every engine will.
            text.decode()
        self._raw = raw = _decode_top_level(text)
        if memory is not None and memory.layouts.fits(text, raw):
            memory.frames.learn(self._tenant, text, raw)
            return
        self._spans = _plain_spans(text, raw)
        if self._spans is None:
            self._spans = _odd_spans(text, raw)
        elif memory is not None:
            memory.layouts.learn(text, self._spans)

    @property
    def _members(self) -> dict[str, msgspec.Raw]:
        raw = self._raw
        if raw is None:
            raw = self._raw = _decode_top_level(self._text)
        return raw

    def __contains__(self, key: str) -> bool:
        return key in self.keys()

    def keys(self) -> KeysView[str]:
        return self._members.keys() if self._values is None else self._values.keys()

    def get(self, key: str) -> Any:
        """The value of a top-level key, or None."""
        return self.select((key,)).get(key)

    def select(self, keys: Container[str]) -> dict[str, Any]:
        """The values of those of the given keys that are there."""
        if self._known is not None:
            return Body(self.data).select(keys)
        return {key: _read(key, raw) for key, raw in self._members.items() if key in keys}

    def values(self, keys: Container[str]) -> dict[str, Any]:
        """As `select`, with whatever else is there: the whole is read faster than several of its parts."""
        values = self._values
        if values is None:
            try:
                values = orjson.loads(self._text)
            except orjson.JSONDecodeError:
                # What is not asked for may be odd.
                return self.select(keys)
            if self._known is not None:
                values["messages"][:1] = self._known.messages
        if self._memory is not None and len(self.data) >= BODY_BYTES_MIN:
            self._learn_beginning(self._memory.beginnings, values.get("messages"))
        return values

    def _learn_beginning(self, beginnings: Beginnings, messages: Any) -> None:
        if not isinstance(messages, list):
            return
        new = len(messages) - (len(self._known.messages) if self._known is not None else 0)
        if new < 2 or (new < NEW_MESSAGES_MIN and len(self._text) < NEW_BYTES_MIN):
            return
        spans = self._spans
        if spans is None:
            spans = self._spans = _plain_spans(self._text, self._members)
        if spans is not None:
            raw = bytes(self._members["messages"])
            beginnings.learn(self._tenant, self.data, spans["messages"][1], raw, self._known, messages)

    def spliced(self, changes: Mapping[str, bytes | None]) -> list[bytes]:
        """The body with top-level keys set to new raw JSON values, or taken out (None); the rest as received."""
        if self._known is not None:
            return Body(self.data).spliced(changes)
        data, spans = self.data, self._spans
        if spans is None:
            spans = self._spans = _plain_spans(data, self._members) or {}
        added = [b'"%b":%b' % (key.encode(), value) for key, value in changes.items() if value and key not in spans]
        if any(changes[key] is None for key in changes.keys() & spans.keys()):
            return self._rebuilt(spans, changes, added)
        brace = data.index(b"{") + 1
        edits = [(brace, brace, b",".join(added) + (b"," if spans else b""))] if added else []
        edits += [(spans[key][1], spans[key][2], value) for key, value in changes.items() if value and key in spans]
        return _apply(data, edits)

    def with_member(self, member: bytes) -> list[bytes]:
        """The body with one more member (`"key":value`), in front of its others."""
        data = self.data
        brace = data.index(b"{") + 1
        return [data[:brace], member + b"," if self.keys() else member, data[brace:]]

    def _rebuilt(
        self, spans: Mapping[str, Span], changes: Mapping[str, bytes | None], members: list[bytes]
    ) -> list[bytes]:
        """As `spliced`, where a key goes: the members that stay, joined anew. Only white space between them changes."""
        data = self.data
        for key, (key_start, value_start, value_end) in spans.items():
            replacement = changes.get(key)
            if replacement is not None:
                members.append(data[key_start:value_start] + replacement)
            elif key not in changes:
                members.append(data[key_start:value_end])
        return [b"{", b",".join(members), b"}"]


def _read(key: str, raw: msgspec.Raw) -> Any:
    try:
        return orjson.loads(memoryview(raw))
    except orjson.JSONDecodeError as error:
        raise BadRequest(f"'{key}' is not valid JSON: {error}.", param=key) from None


def _apply(data: bytes, edits: list[tuple[int, int, bytes]]) -> list[bytes]:
    parts: list[bytes] = []
    position = 0
    for start, end, replacement in sorted(edits):
        parts += (data[position:start], replacement)
        position = end
    parts.append(data[position:])
    return [part for part in parts if part]


def _plain_spans(data: bytes, raw: Mapping[str, msgspec.Raw]) -> dict[str, Span] | None:
    """Spans of a body whose keys occur once and are spelled plainly; None for any other."""
    spans: dict[str, Span] = {}
    position = data.index(b"{") + 1
    remaining = len(raw)
    for key, value in raw.items():
        match = _next_key(data, position)
        if match is None or match[1] != key.encode():
            return None
        start = match.end()
        raw_value = bytes(value)
        end = start + len(raw_value)
        # The last value of a repeated key is kept at the first one's place: compare, do not assume. Where lengths
        # differ the comma check fails; where they agree but bytes do not, this does. (As bytes: a memoryview compares
        # item by item, a hundred times slower.)
        if data[start:end] != raw_value:
            return None
        spans[key] = (match.start(1) - 1, start, end)
        after = _next_mark(data, end)
        remaining -= 1
        if after is None or after[1] != (b"," if remaining else b"}"):
            return None
        position = after.end()
    return spans


def _odd_spans(data: bytes, raw: Mapping[str, msgspec.Raw]) -> dict[str, Span]:
    """Spans of a body with repeated or escaped keys, if none of them is one the gateway or the engine acts upon.

    A repeated unknown key keeps its last place: splicing never touches it.
    """
    spans: dict[str, Span] = {}
    text = data.decode()
    at_text = at_byte = 0

    def byte_offset(position: int) -> int:
        # The decoder counts characters, everyone else bytes.
        nonlocal at_text, at_byte
        at_byte += len(text[at_text:position].encode())
        at_text = position
        return at_byte

    position = text.index("{") + 1
    while True:
        key_from = _text_space(text, position).end()  # type: ignore[union-attr]
        key, key_to = _scan_value(text, key_from)
        if key in CONTROL_KEYS and (key in spans or text[key_from:key_to] != f'"{key}"'):
            raise DuplicateKey(key)
        value_from = _text_space(text, text.index(":", key_to) + 1).end()  # type: ignore[union-attr]
        _, value_to = _scan_value(text, value_from)
        spans[key] = (byte_offset(key_from), byte_offset(value_from), byte_offset(value_to))
        position = _text_space(text, value_to).end()  # type: ignore[union-attr]
        if text[position] == "}":
            return spans
        position += 1
