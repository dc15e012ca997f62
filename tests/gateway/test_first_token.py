"""The first event of a stream that says something, wherever the stream is cut."""

import json
from typing import Any

import pytest

from gateway.first_token import _HELD_BYTES_MAX, FirstToken


def event(document: Any, end: bytes = b"\n\n") -> bytes:
    return b"data: " + json.dumps(document).encode() + end


def choice(**delta: Any) -> Any:
    return {"choices": [{"index": 0, "delta": delta, "finish_reason": None}], "usage": None}


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


PRELUDE = b": keep-alive\n\n" + event(choice(role="assistant", content="")) + b": still here\r\n\r\n"


@pytest.mark.parametrize(
    "silent",
    [
        b": PROCESSING\n\n",
        b"event: message\nid: 1\nretry: 10\n\n",
        event(choice(role="assistant")),
        event(choice(role="assistant", content="", reasoning_content=None, tool_calls=[])),
        event(choice()),
        event({"choices": [{"index": 0, "delta": None, "finish_reason": None}]}),
        event({"choices": [{"index": 0, "text": "", "finish_reason": None}]}),
        event({"choices": [], "usage": {"prompt_tokens": 9}}),
        event({"type": "response.created", "response": {"output": []}}),
        event({"type": "response.output_item.added", "item": {}}),
        event({"type": "message_start", "message": {"content": []}}),
        event({"type": "ping"}),
    ],
)
def test_what_took_no_computing_is_no_token(silent: bytes) -> None:
    first = FirstToken(chunked=False)
    assert not first.comes_with(PRELUDE + silent)
    assert first.comes_with(event(choice(content="x")))


@pytest.mark.parametrize(
    "token",
    [
        event(choice(role="assistant", content="x")),
        event(choice(reasoning_content="hm")),
        event(choice(reasoning="hm")),
        event(choice(tool_calls=[{"index": 0, "function": {"name": "f"}}])),
        event(choice(refusal="no")),
        event({"choices": [{"index": 1, "delta": {}, "finish_reason": "stop"}]}),
        event({"choices": [{"index": 0, "text": "x"}]}),
        event({"choices": [{"index": 0, "delta": {"content": ""}, "token_ids": [7]}]}),
        event({"choices": [choice(content="")["choices"][0], choice(content="x")["choices"][0]]}),
        event({"type": "response.output_text.delta", "delta": "x"}),
        event({"type": "content_block_delta", "delta": {"text": "x"}}),
        event({"error": {"message": "boom"}}),
        event(["of a form that nobody knows"]),
        b"data:no JSON\n\n",
        b"data: [DONE]\n\n",
        event(choice(content="x"), b"\r\n\r\n"),
        b'data: {"choices":\ndata: [{"delta": {"content": "x"}}]}\n\n',
    ],
)
@pytest.mark.parametrize("chunked", [False, True], ids=["plain", "chunked"])
def test_the_first_part_of_an_answer(token: bytes, chunked: bool) -> None:
    wrap = chunk if chunked else bytes
    assert FirstToken(chunked).comes_with(wrap(token))
    first = FirstToken(chunked)
    assert not first.comes_with(wrap(PRELUDE))
    assert first.comes_with(wrap(b": more\n\n") + wrap(token))


@pytest.mark.parametrize("chunked", [False, True], ids=["plain", "chunked"])
def test_it_comes_with_its_last_byte(chunked: bool) -> None:
    token = event(choice(content="x"))
    stream = chunk(PRELUDE) + chunk(token[:9]) + chunk(token[9:]) if chunked else PRELUDE + token
    first = FirstToken(chunked)
    found = [first.comes_with(bytes([byte])) for byte in stream]
    assert found.index(True) == len(stream) - 1


def test_what_is_held_is_bounded() -> None:
    assert FirstToken(chunked=False).comes_with(b"data: " + b"x" * _HELD_BYTES_MAX)
    assert FirstToken(chunked=True).comes_with(b"fffff\r\ndata: " + b"x" * _HELD_BYTES_MAX)


def test_broken_chunks_are_no_concern_of_it() -> None:
    assert FirstToken(chunked=True).comes_with(b"2\r\nabXX")
