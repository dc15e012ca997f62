"""Bodies read with what is remembered of earlier ones say what they say when read alone."""

import json
from random import Random
from typing import Any

import pytest

from gateway.edge.beginnings import BODY_BYTES_MIN, Beginnings
from gateway.edge.body import CONTROL_KEYS, LAYOUTS_MAX, Body, BodyMemory
from gateway.errors import BadRequest, DuplicateKey

SYSTEM = {"role": "system", "content": "x" * BODY_BYTES_MIN}
KEYS = {"messages", "model", "stream", "user"}


def chat(*messages: Any, **more: Any) -> bytes:
    return json.dumps({"model": "m", "messages": [SYSTEM, *messages], **more}).encode()


def turn(text: str, role: str = "user") -> dict[str, str]:
    return {"role": role, "content": text}


def reading(data: bytes, memory: BodyMemory | None) -> Any:
    """What the gateway learns of a body and makes of it, or why it refuses it."""
    try:
        body = Body(data, memory)
        values = body.values(KEYS)
        spliced = [b"".join(body.spliced({key: b'"new"'})) for key in ("cache_salt", "user")]
        return values, body.keys() == values.keys(), spliced, b"".join(body.with_member(b'"z":1')), body.select(KEYS)
    except BadRequest as error:
        return type(error), error.param


def test_a_shared_beginning_is_found() -> None:
    memory = BodyMemory()
    for number in range(3):
        data = chat(turn(f"question {number}"), stream=False)
        assert (memory.beginnings.find("", data) is not None) == (number > 0)
        assert Body(data, memory).values(KEYS) == json.loads(data)
    assert len(memory.beginnings) == 1


def test_what_one_tenant_sent_is_read_no_faster_for_another() -> None:
    memory = BodyMemory()
    data = chat(turn("a"), turn("b"))
    Body(data, memory, "acme").values(KEYS)
    assert memory.beginnings.find("acme", data) is not None
    assert memory.beginnings.find("other", data) is None


def test_what_is_known_is_not_read_again() -> None:
    memory = BodyMemory()
    Body(chat(turn("a")), memory).values(KEYS)
    body = Body(chat(turn("b"), turn("c")), memory)
    assert len(body._text) < 200
    known = memory.beginnings.find("", body.data)
    assert known is not None
    assert body.values(KEYS)["messages"][0] is known.messages[0]


def test_a_conversation_is_found_as_it_grows() -> None:
    memory, turns, read_bytes = BodyMemory(), [turn("0")], 0
    for number in range(40):
        data = chat(*turns)
        body = Body(data, memory)
        assert body.values(KEYS) == json.loads(data)
        read_bytes = max(read_bytes, len(body._text)) if number > 1 else 0
        turns += [turn("a" * 200, "assistant"), turn(f"{number} " + "b" * 100)]
    assert read_bytes < 2500


@pytest.mark.parametrize(
    "rest",
    [
        b"]}",
        b', {"role": "user", "content": "a"}], "messages": []}',
        b', {"role": "user", "content": "a"}], "model": "n"}',
        b', {"role": "user", "content": "a"}], "mod\\u0065l": "n"}',
        b', {"role": "user", "content": "a"}], "odd": 1, "odd": 2}',
        b', {"role": "user", "content": "a"}], "user": "u"}',
        b', {"role": "user", "content": "a"}], "user": "\\ud800"}',
        b', {"role": "user", "content": "a"}], "other": "\\ud800"}',
        b', {"role": "user", "content": "\xff"}]}',
        b', {"role": "user", "content": "\xc3\xa9"}]}',
        b', {"role": "user", "content": "a"}',
        b', {"role": "user", "content": "a"}]} x',
        b' {"role": "user", "content": "a"}]}',
        b', {"role": "user", "content": "a"}, 1, null, []], "user": "u"}',
        b'}, {"role": "user", "content": "a"}]}',
        b'"}, {"role": "user", "content": "a"}]}',
    ],
)
def test_what_follows_a_known_beginning_is_judged_as_ever(rest: bytes) -> None:
    memory = BodyMemory()
    Body(chat(turn("a")), memory).values(KEYS)
    data = chat(turn("b")).partition(b', {"role": "user"')[0] + rest
    assert reading(data, memory) == reading(data, None)
    assert reading(data, memory) == reading(data, None)


def test_a_beginning_inside_a_text_is_none() -> None:
    """The text of a message looks like messages; its escapes keep it apart."""
    memory = BodyMemory()
    inner = json.dumps([SYSTEM, turn("a")])[1:-1]
    for text in (inner, inner + ', {"role"', "}, " + inner):
        for data in (chat(turn(text), turn("b")), json.dumps({"messages": [turn(text), turn(text)]}).encode()):
            assert reading(data, memory) == reading(data, None)


@pytest.mark.parametrize("seed", range(30))
def test_random_bodies(seed: int) -> None:
    random, memory = Random(seed), BodyMemory()
    texts = ["", "é", '"}, {"role": "user', "\\", "]", "x" * 700, "\n" * 300, "plain", "%b %s %%"]
    separators = random.choice([(",", ":"), (", ", ": "), (" ,\n", " :  ")])
    turns: list[Any] = []
    for _ in range(60):
        if random.random() < 0.2:
            turns = turns[: random.randrange(len(turns) + 1)]
        turns += [turn(random.choice(texts)) for _ in range(random.randint(1, 4))]
        if random.random() < 0.1:
            turns.append(random.choice([1, None, [], {"content": "x", "role": "user"}, "text"]))
        document = {"messages": turns, "model": "m"} if random.random() < 0.3 else {"model": "m", "messages": turns}
        if random.random() < 0.3:
            document["user"] = random.choice(["u", "%", 5])
        data = json.dumps(document, separators=separators, ensure_ascii=random.random() < 0.5).encode()
        if random.random() < 0.2:
            at = random.randrange(len(data))
            data = data[:at] + random.choice([b"", b"x", b'"', b"}", b","]) + data[at + 1 :]
        assert reading(data, memory) == reading(data, None)


def test_memory_is_bounded() -> None:
    beginnings, memory = Beginnings(20_000), BodyMemory()
    memory.beginnings = beginnings
    for number in range(50):
        data = json.dumps({"messages": [turn(f"{number}" * 1500), turn("a")]}).encode()
        assert Body(data, memory).values(KEYS) == json.loads(data)
    assert 0 < len(beginnings) < 14


# Layouts


@pytest.mark.parametrize("key", sorted(CONTROL_KEYS))
def test_a_known_layout_hides_no_second_key(key: str) -> None:
    memory, name = BodyMemory(), key.encode()
    Body(b'{"%b":1}' % name, memory)
    Body(b'{"%b":1,"x":2}' % name, memory)
    for data in (b'{"%b":1,"%b":1}', b'{"%b":1,"%b":2}', b'{"%b":1,"x":2,"%b":1}'):
        with pytest.raises(DuplicateKey):
            Body(data % ((name,) * data.count(b"%b")), memory)


def test_layouts_differ_by_what_stands_between() -> None:
    memory = BodyMemory()
    for data in (
        b'{"a":1,"b":2}',
        b'{"a": 1, "b": 2}',
        b'{"a":1,"b":2}\n',
        b'{"b":1,"a%b":2}',
        b'{"100%":[1, 2]}',
        b"{}",
    ):
        for _ in range(2):
            body = Body(data, memory)
            assert body.values({"a", "b"}) == json.loads(data)
            assert json.loads(b"".join(body.with_member(b'"c":3'))) == {**json.loads(data), "c": 3}
            assert json.loads(b"".join(body.spliced({"a": b"7"}))) == {**json.loads(data), "a": 7}


def test_layouts_are_bounded() -> None:
    memory = BodyMemory()
    for number in range(3 * LAYOUTS_MAX):
        Body(b'{"key %d":1}' % number, memory)
    Body(b'{"%b":1}' % (b"k" * 5000), memory)
    assert len(memory.layouts._formats) <= LAYOUTS_MAX


# Frames


def small(*texts: str, after: bytes = b', "stream": false}') -> bytes:
    return b'{"model": "m", "messages": %b%b' % (json.dumps([turn(text) for text in texts]).encode(), after)


def in_a_frame(data: bytes, memory: BodyMemory, tenant: str = "") -> bool:
    return memory.frames.read(tenant, data) is not None


def test_a_frame_met_before_is_read_with_its_messages_alone() -> None:
    memory = BodyMemory()
    for number in range(5):
        data = small(f"question {number}")
        assert in_a_frame(data, memory) == (number > 2)
        body = Body(data, memory)
        assert body.values(KEYS) == body.select(KEYS) == json.loads(data)
        assert "stream" in body
        assert "user" not in body
        assert json.loads(b"".join(body.spliced({"stream": b"true", "user": b"1"}))) == {
            **json.loads(data),
            "stream": True,
            "user": 1,
        }
    assert not in_a_frame(data, memory, "other"), "how fast it is read says nothing of what others have sent"
    data = small("a") + b"\n"
    assert not in_a_frame(data, memory)
    assert not in_a_frame(data.replace(b'"m"', b'"n"'), memory)


def test_what_a_frame_says_is_not_shared() -> None:
    memory = BodyMemory()
    bodies = [Body(small(text), memory) for text in "abcde"]
    assert [body.values(KEYS)["messages"][0]["content"] for body in bodies] == [*"abcde"]


@pytest.mark.parametrize(
    "data",
    [
        small("a", after=b', "model": "n", "messages": [{"role": "user", "content": "b"}], "stream": false}'),
        small("a", after=b', "messages": [{}], "stream": false}'),
        b'{"model": "m", "messages": [{}, "messages": [{}], "stream": false}',
        b'{"model": "m", "messages": [{}]}], "stream": false}',
        b'{"model": "m", "messages": [{"a": 01}], "stream": false}',
        b'{"model": "m", "messages": [{"a": "\xff"}], "stream": false}',
        b'{"model": "m", "messages": [{"a": "\x00"}], "stream": false}',
        b'{"model": "m", "messages": , "stream": false}',
        b'{"model": "m", "messages": [, "stream": false}',
        b'{"model": "m", "messages": }], "stream": false}',
        b'{"model": "m", "messages": [], "stream": false}',
        b'{"model": "m", "messages": "[{}]", "stream": false}',
        b'{"model": "m", "messages": [[{}]], "stream": false}',
        b'{"model": "m", "messages": null, "stream": false}',
    ],
)
def test_a_known_frame_hides_nothing(data: bytes) -> None:
    memory = BodyMemory()
    for text in "abc":
        Body(small(text), memory)
    assert in_a_frame(small("d"), memory)
    assert reading(data, memory) == reading(data, None)


def test_frames_of_odd_bodies_are_not_remembered() -> None:
    memory = BodyMemory()
    for text in "abcd":
        for after in (b', "a": {"messages": [{}]}}', b', "x": 1e999, "y": "\\ud800"}', b', "x": 1, "x": 2}'):
            data = small(text, after=after)
            assert reading(data, memory) == reading(data, None)
            assert not in_a_frame(data, memory)


def test_frames_are_bounded() -> None:
    memory = BodyMemory()
    for number in range(2 * LAYOUTS_MAX):
        for _ in range(3):
            Body(small("a", after=b', "user": %d}' % number), memory)
    assert len(memory.frames._known) == LAYOUTS_MAX
    long = b', "user": "%b"}' % (b"u" * 2000)
    for _ in range(4):
        Body(small("a", after=long), memory)
    assert not in_a_frame(small("a", after=long), memory)
