"""Request bodies: what is refused, and that splicing leaves every other byte alone."""

import json
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.edge.body import CONTROL_KEYS, Body
from gateway.errors import BadRequest, DuplicateKey


def spliced(data: bytes, **changes: bytes | None) -> bytes:
    return b"".join(Body(data).spliced(changes))


# Keys that two readers could read differently


@pytest.mark.parametrize("key", sorted(CONTROL_KEYS))
def test_a_control_key_may_stand_once(key: str) -> None:
    name = key.encode()
    for data in (
        b'{"%b":1,"%b":2}' % (name, name),
        b'{"%b":1,"%b":1}' % (name, name),
        b'{"%b":1,"x":2,"%b":3}' % (name, name),
        b'{"x":[{}],"%b":"a", "y":null ,\t"%b":"a"}' % (name, name),
    ):
        with pytest.raises(DuplicateKey) as caught:
            Body(data)
        assert (caught.value.status, caught.value.param, caught.value.code) == (400, key, "duplicate_key")


@pytest.mark.parametrize("key", sorted(CONTROL_KEYS))
def test_a_control_key_is_spelled_without_escapes(key: str) -> None:
    for position, character in enumerate(key):
        escaped = f"{key[:position]}\\u{ord(character):04x}{key[position + 1 :]}"
        for data in (f'{{"{escaped}":1}}', f'{{"{key}":1,"{escaped}":1}}', f'{{"a":0,"{escaped}":1,"{key}":1}}'):
            with pytest.raises(DuplicateKey):
                Body(data.encode())


def test_the_escaped_spelling_of_the_issue() -> None:
    with pytest.raises(DuplicateKey):
        Body(b'{"mod\\u0065l":"m"}')


def test_duplicates_inside_values_are_the_engines_business() -> None:
    body = Body(b'{"model":"m","x":{"model":1,"model":2},"messages":[{"role":"a","role":"b"}]}')
    assert body.get("model") == "m"


def test_unknown_keys_may_be_odd() -> None:
    data = b'{"odd":1, "model":"m", "odd": 2,"\\u006fdd2":3, "a\\"b": 4, "\\u00e9":"\xc3\xa9","cache_salt":"c"}'
    body = Body(data)
    assert body.get("model") == "m"
    assert b"".join(body.spliced({"cache_salt": b'"s"'})) == data.replace(b'"c"}', b'"s"}')
    expected = {**json.loads(data), "model": "n"}
    assert json.loads(b"".join(body.spliced({"model": b'"n"'}))) == expected


def test_odd_bodies_lose_a_key_cleanly() -> None:
    data = b'{"od\\u0064":1,"kv_transfer_params":{"a":[1]},"model":"m\xc3\xa9"}'
    assert json.loads(spliced(data, kv_transfer_params=None)) == {"odd": 1, "model": "m\u00e9"}


# Refusals


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"   ",
        b"null",
        b"[]",
        b'"text"',
        b"1",
        b"{",
        b"{}x",
        b'{"a":1,}',
        b"{'a':1}",
        b"{a:1}",
        b'{"a" 1}',
        b'{"a":NaN}',
        b'{"a":Infinity}',
        b'{"a":01}',
        b'{"a":"\x01"}',
        b'{"a":"\\x"}',
        b'\xef\xbb\xbf{"a":1}',
        '{"a":1}'.encode("utf-16"),
        b'{"a":"\xff"}',
        b'{"\xff":1}',
        b'{"a":"\xed\xa0\x80"}',
        b'{"model":1,"model":"\xff"}',
        b'{"\\ud83d":1}',
        b'{"a":' + b"[" * 10_000 + b"]" * 10_000 + b"}",
        b'{"model":1,"a":' + b'{"a":' * 10_000 + b"1" + b"}" * 10_000 + b"}",
        b"[" * 100_000,
        b'{"a":"' + b"\\",
    ],
)
def test_what_is_not_a_json_object_is_the_clients_fault(data: bytes) -> None:
    with pytest.raises(BadRequest):
        Body(data)


@pytest.mark.parametrize("depth", range(900, 1010, 7))
def test_nesting_near_the_limit_never_fails_otherwise(depth: int) -> None:
    value = b"[" * depth + b"]" * depth
    for data in (b'{"messages":%b}' % value, b'{"messages":%b,"odd":1,"odd":1}' % value):
        try:
            Body(data).get("messages")
        except BadRequest:
            continue


@pytest.mark.parametrize("number", [b"9" * 100_000, b"1e999", b"-1e999"])
def test_endless_numbers_pass_unread_and_are_refused_when_read(number: bytes) -> None:
    data = b'{"model":"m","n":%b}' % number
    assert spliced(data, model=b'"n"') == data.replace(b'"m"', b'"n"')
    with pytest.raises(BadRequest):
        Body(data).get("n")
    odd = b'{"odd":%b,"odd":%b,"model":"m"}' % (number, number)
    assert Body(odd).get("model") == "m"


# Values


def test_values() -> None:
    body = Body(b'{"s":"x","t":true,"f":false,"z":null,"i":7,"d":1.5,"big":9007199254740993}')
    assert body.select(["s", "t", "absent", "z", "big"]) == {"s": "x", "t": True, "z": None, "big": 2**53 + 1}
    assert (body.get("d"), body.get("absent")) == (1.5, None)
    assert "s" in body
    assert "absent" not in body
    assert list(body.keys()) == ["s", "t", "f", "z", "i", "d", "big"]


# Splicing


SURROUNDED = b' \n{ "model" : "m" ,\t"seed":9007199254740993, "p" : 1e-7,"z":-0, "u":"\xe6\xb8\x90\\ud83c\\udf0d" }\r\n'


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, SURROUNDED),
        ({"model": b'"other"'}, SURROUNDED.replace(b'"m"', b'"other"')),
        ({"z": b"[1]"}, SURROUNDED.replace(b"-0", b"[1]")),
        ({"cache_salt": b'"s"'}, SURROUNDED.replace(b"{", b'{"cache_salt":"s",')),
        (
            {"cache_salt": b'"s"', "u": b"1", "model": b'"n"'},
            SURROUNDED.replace(b"{", b'{"cache_salt":"s",')
            .replace(b'"m"', b'"n"')
            .replace(b'"\xe6\xb8\x90\\ud83c\\udf0d"', b"1"),
        ),
        ({"absent": None}, SURROUNDED),
    ],
)
def test_all_other_bytes_stay(changes: dict[str, bytes | None], expected: bytes) -> None:
    assert spliced(SURROUNDED, **changes) == expected


@pytest.mark.parametrize("data", [b"{}", b" { \n} "])
def test_an_empty_object_takes_keys(data: bytes) -> None:
    assert json.loads(spliced(data, cache_salt=b'"s"', priority=b"1")) == {"cache_salt": "s", "priority": 1}
    assert json.loads(spliced(data, model=None)) == {}


@pytest.mark.parametrize("gone", [("a",), ("b",), ("c",), ("a", "b"), ("a", "c"), ("b", "c"), ("a", "b", "c")])
@pytest.mark.parametrize("added", [{}, {"s": b"9"}])
def test_keys_are_taken_out(gone: tuple[str, ...], added: dict[str, bytes]) -> None:
    data = b'{ "a" : [1, 2] , "b":{"x":"}"},"c" :9007199254740993 }'
    expected = {key: value for key, value in json.loads(data).items() if key not in gone}
    result = b"".join(Body(data).spliced({**dict.fromkeys(gone), **added}))
    assert json.loads(result) == expected | {key: int(value) for key, value in added.items()}
    for key, member in {"a": b'"a" : [1, 2]', "b": b'"b":{"x":"}"}', "c": b'"c" :9007199254740993'}.items():
        assert (member in result) is (key not in gone)


json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**60), 2**60)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=["Cs"])),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=8,
)
keys = st.sampled_from(["model", "stream", "cache_salt", "kv_transfer_params", "prompt"]) | st.text(
    st.characters(exclude_categories=["Cs"]), max_size=6
)
spaces = st.text(" \t\r\n", max_size=3)


@st.composite
def documents(draw: st.DrawFn) -> tuple[bytes, dict[str, Any]]:
    document = draw(st.dictionaries(keys, json_values, max_size=6))
    members = []
    for key, value in document.items():
        # Escaped spellings of control keys are refused, so keys keep their plain form; values take either.
        name = json.dumps(key, ensure_ascii=False)
        text = json.dumps(value, ensure_ascii=draw(st.booleans()), indent=draw(st.sampled_from([None, 1])))
        members.append(f"{draw(spaces)}{name}{draw(spaces)}:{draw(spaces)}{text}{draw(spaces)}")
    text = f"{draw(spaces)}{{{','.join(members) or draw(spaces)}}}{draw(spaces)}"
    return text.encode(), document


@given(
    documents(),
    st.dictionaries(
        st.sampled_from(sorted(CONTROL_KEYS)),
        st.none() | json_values.map(lambda value: orjson.dumps(value)),
        max_size=4,
    ),
)
def test_splicing_random_documents(written: tuple[bytes, dict[str, Any]], changes: dict[str, bytes | None]) -> None:
    data, document = written
    expected = dict(document)
    for key, value in changes.items():
        expected.pop(key, None)
        if value is not None:
            expected[key] = json.loads(value)
    result = b"".join(Body(data).spliced(changes))
    assert json.loads(result) == expected
    assert {key: Body(data).get(key) for key in document} == document
    if not changes:
        assert result == data


# Size


def test_a_large_body_is_spliced() -> None:
    text = "x" * 5_000_000
    data = orjson.dumps({"model": "m", "messages": [{"role": "user", "content": text}], "user": "u"})
    result = spliced(data, cache_salt=b'"s"', user=None)
    assert json.loads(result) == {
        "model": "m",
        "messages": [{"role": "user", "content": text}],
        "cache_salt": "s",
    }


def test_a_hundred_thousand_odd_keys() -> None:
    # Linear this takes a moment; were it quadratic in the bytes, hours.
    members = b",".join(b'"\\u006b\xc3\xa9%d":"\xe6\xb8\x90"' % number for number in range(100_000))
    data = b'{"model":"m",%b,"user":"u"}' % members
    assert spliced(data, model=b'"n"', user=b'"v"') == data.replace(b'"m"', b'"n"').replace(b'"u"', b'"v"')
