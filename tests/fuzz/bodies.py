"""Request bodies: what the gateway accepts must mean to every reader of JSON what it means to the gateway."""

import json
from random import Random
from typing import Any

import orjson

from gateway.edge.body import CONTROL_KEYS, Body, BodyMemory
from gateway.errors import BadRequest
from tests.fuzz.engine import Target

SEPARATOR = b"\x00\n"
"""An input is bodies of one client: the last one is judged, and what came before is remembered of them."""
CHANGES: dict[str, bytes | None] = {"cache_salt": b'"salt"', "stream_options": None, "kv_transfer_params": b'{"a":[1]}'}
_NOTHING = object()


def _corpus() -> list[bytes]:
    chat = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "stream": True, "n": 1}
    turns = [{"role": role, "content": "word " * 60} for role in ("user", "assistant")] * 5
    longer = [*turns, {"role": "user", "content": "and then?"}]
    plain = [
        chat,
        {**chat, "messages": turns, "seed": 3},
        {**chat, "messages": longer, "seed": 3},
        {"prompt": [1, 2, 3], "model": "m", "stream_options": {"include_usage": True}, "user": "u", "priority": -1},
        {"kv_transfer_params": {"x": [[]]}, "cache_salt": "é", "model": "m", "prompt": "渐\ud83d\ude00"},
        {},
    ]
    bodies = [json.dumps(one, ensure_ascii=False).encode("utf-8", "surrogatepass") for one in plain[:4]]
    bodies += [json.dumps(one, separators=(",", ":")).encode() for one in plain]
    bodies += [
        b' { "model" : "m" ,\n"messages":[ ] , "x":1, "x":2 } ',
        b'{"mod\\u0065l":"m","prompt":"p"}',
        b'{"model":"a","prompt":"p","model":"b"}',
        b'{"a":{"model":"x","a":[{}]},"prompt":"}]","messages":[{"content":"\\"}],"}]}',
        b'{"messages":[{"role":"user"}],"x%bx%d":1,"model":"%b"}',
    ]
    three = [SEPARATOR.join([body, body, body]) for body in bodies]
    return [*bodies, *three, SEPARATOR.join([bodies[1]] * 2 + [bodies[2]]), SEPARATOR.join([bodies[2]] * 3)]


def check(data: bytes, random: Random) -> None:
    *before, last = data.split(SEPARATOR)
    memory = BodyMemory()
    for body in before[:4]:
        _read(body, memory)
    fresh, remembered = _read(last), _read(last, memory)
    if fresh != remembered:
        raise AssertionError(f"read otherwise by who remembers: {remembered} than {fresh}")
    if fresh is None:
        return
    said = _reference(last)
    if said is None:
        raise AssertionError("taken for a JSON object, which it is not")
    for key in CONTROL_KEYS:
        values = [value for name, value in said if name == key]
        if len(values) > 1:
            raise AssertionError(f"{key!r} is taken, and said {len(values)} times")
        if fresh.get(key, _NOTHING) != (values[0] if values else _NOTHING):
            raise AssertionError(f"{key!r} is {fresh.get(key)!r} to us and {values} to others")
    _check_splices(last, memory, dict(said))


def _read(data: bytes, memory: BodyMemory | None = None) -> dict[str, Any] | None:
    """All that a body says under the keys that are read; None where it is refused."""
    try:
        body = Body(data, memory, "tenant")
        values = body.values(CONTROL_KEYS)
        return {key: values[key] for key in CONTROL_KEYS if key in values}
    except BadRequest:
        return None


def _check_splices(data: bytes, memory: BodyMemory, said: dict[str, Any]) -> None:
    wanted = {**said, **{key: json.loads(value) for key, value in CHANGES.items() if value is not None}}
    wanted = {key: value for key, value in wanted.items() if CHANGES.get(key, b"") is not None}
    for body in (Body(data), Body(data, memory, "tenant")):
        spliced = _reference(b"".join(body.spliced(CHANGES)))
        if spliced is None or dict(spliced) != wanted:
            raise AssertionError(f"spliced to {spliced}, not {wanted}")
        added = _reference(b"".join(body.with_member(b'"brand_new":1')))
        if added is None or dict(added) != {**said, "brand_new": 1}:
            raise AssertionError(f"with a member it is {added}")


def _reference(data: bytes) -> list[tuple[str, Any]] | None:
    """The members of an object as another reader has them: Python's own, which shares no code with ours."""
    try:
        text = data.decode()
        found = json.loads(text, object_pairs_hook=_Pairs, parse_int=_integer, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return None
    return [(key, _plain(value)) for key, value in found] if isinstance(found, _Pairs) else None


class _Pairs(list[tuple[str, Any]]):
    """An object, every member of it."""


def _plain(value: Any) -> Any:
    if isinstance(value, _Pairs):
        return {key: _plain(inner) for key, inner in value}
    return [_plain(inner) for inner in value] if isinstance(value, list) else value


def _integer(text: str) -> Any:
    """As orjson has numbers that fit nowhere."""
    return orjson.loads(text)


def _refuse(text: str) -> Any:
    raise ValueError(text)


WORDS = (
    b'"model"', b'"messages"', b'"stream"', b'"cache_salt"', b'"mod\\u0065l"', b'"', b"\\", b"{", b"}", b"[",
    b"]", b"}]", b",", b":", b"null", b"true", b"1e5", b"-0", b" ", b"\n", b"%b", b"%",
    b'"kv_transfer_params":{}', b'\\ud800', b"\xef\xbb\xbf", b'{"role":"user","content":"hi"}', b'"a":1,',
    SEPARATOR, b"NaN", b"\xed\xa0\x80", b"/*",
)  # fmt: skip
TARGETS = (Target("bodies", _corpus, check, WORDS),)
