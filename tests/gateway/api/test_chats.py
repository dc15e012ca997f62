"""Chat completions, read in pieces however they come."""

import random

import orjson
import pytest

from gateway.api.chats import CallArguments, CallBegun, ChatEvents, Finished, Text, Thought, Usage, pieces_of_chunk
from gateway.api.errors import message_of
from tests.gateway.api.events import call, chunk

STREAM = b"".join(
    (
        b": a comment\n\n",
        b'data: {"n":1}\n\n',
        b'event: x\r\ndata: {"n":\r\ndata: 2}\r\n\r\n',
        b"data: not JSON\n\n",
        b'data: ["n", 3]\n\n',
        b'data:{"n":4}\n\n',
        b"data: [DONE]\n\n",
    )
)


@pytest.mark.parametrize("seed", range(20))
def test_events_are_found_however_the_bytes_come(seed: int) -> None:
    draw = random.Random(seed)
    events, found, position = ChatEvents(), [], 0
    while position < len(STREAM):
        step = draw.randint(1, 9)
        found += events.feed(STREAM[position : position + step])
        position += step
    assert [document["n"] for document in (*found, *events.end())] == [1, 2, 4]
    assert events.done


def test_the_last_event_may_lack_its_end() -> None:
    events = ChatEvents()
    assert events.feed(b'data: {"n":1}\n') == []
    assert events.end() == [{"n": 1}]
    assert events.end() == []


def test_a_chunk_may_bring_several_pieces() -> None:
    delta = {"reasoning": "Hm", "content": "Yes", **call(2, "{", "a", "weather")}
    found = pieces_of_chunk(chunk(delta, "stop"))
    assert found == [
        Thought("Hm"),
        Text("Yes"),
        CallBegun(2, "a", "weather"),
        CallArguments(2, "{"),
        Finished("stop", None),
    ]


def test_only_the_first_choice_is_the_answer() -> None:
    other = {"index": 1, "delta": {"content": "no"}}
    assert pieces_of_chunk({"choices": [other, {"index": 0, "delta": {"content": "yes"}}]}) == [Text("yes")]
    assert pieces_of_chunk({"choices": [other]}) == []


@pytest.mark.parametrize(
    "document",
    [
        {},
        {"choices": None},
        {"choices": [None]},
        {"choices": [{"delta": None}]},
        {"choices": [{"delta": {"tool_calls": [None, {"function": 1}]}}]},
    ],
)
def test_odd_chunks_bring_nothing(document: dict[str, object]) -> None:
    assert pieces_of_chunk(document) == []


def test_usage_of_any_shape() -> None:
    assert Usage.of(None) is None
    assert Usage.of({"prompt_tokens": 3, "completion_tokens": None, "prompt_tokens_details": None}) == Usage(3)
    assert Usage.of({"prompt_tokens": "3"}) == Usage()


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({"error": {"message": "a"}}, "a"),
        ({"error": "b"}, "b"),
        ({"object": "error", "message": "c"}, "c"),
        ({"detail": "d"}, "d"),
        ({"detail": [{"msg": "e"}]}, "default"),
        ([], "default"),
        (None, "default"),
    ],
)
def test_what_an_error_says(body: object, said: str) -> None:
    assert message_of(orjson.loads(orjson.dumps(body)), "default") == said
