"""The plain rendering is a format that gateway and simulated worker share: exact strings, exact ids."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cachecore.prompts.contract import PromptError
from cachecore.prompts.plain import PlainRenderer

RENDERER = PlainRenderer()


def test_golden_chat() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"b": 1, "a": "é"}'}}
    rendered = RENDERER.chat(
        {
            "messages": [
                {"role": "system", "content": "Be brief."},
                {"role": "user", "content": [{"type": "text", "text": "Hi"}, {"type": "text", "text": "there"}]},
                {"role": "assistant", "content": None, "tool_calls": [call]},
            ],
            "tools": [{"type": "function", "function": {"name": "f"}}],
        }
    )
    assert rendered.complete
    assert list(rendered.segments) == [
        '<|tools|>\n[{"function":{"description":null,"name":"f","parameters":null},"type":"function"}]\n',
        "<|system|>\nBe brief.\n",
        "<|user|>\nHi\nthere\n",
        '<|assistant|>\n\n[{"function":{"arguments":{"a":"é","b":1},"name":"f"},"id":"1","type":"function"}]\n',
        "<|assistant|>\n",
    ]


def test_flags() -> None:
    body = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
    closed = RENDERER.chat({**body, "add_generation_prompt": False})
    assert list(closed.segments) == ["<|user|>\na\n", "<|assistant|>\nb\n"]
    resumed = RENDERER.chat({**body, "add_generation_prompt": False, "continue_final_message": True})
    assert list(resumed.segments) == ["<|user|>\na\n", "<|assistant|>\nb"]


def test_images_end_what_has_a_name() -> None:
    image = {"type": "image_url", "image_url": {"url": "data:,"}}
    messages = [
        {"role": "system", "content": "s"},
        {"role": "user", "content": [image]},
        {"role": "user", "content": "x"},
    ]
    rendered = RENDERER.chat({"messages": messages})
    assert (list(rendered.segments), rendered.complete) == (["<|system|>\ns\n"], False)


def test_empty_messages_are_refused() -> None:
    with pytest.raises(PromptError, match="`messages`"):
        RENDERER.chat({"messages": []})


@given(st.text())
def test_tokens_are_the_bytes(text: str) -> None:
    token_ids = RENDERER.encode(text)
    assert token_ids.typecode == "I"
    assert token_ids.tolist() == list(text.encode())
    assert RENDERER.decode(token_ids) == text


def test_any_json_string_has_tokens() -> None:
    assert RENDERER.encode("\ud800").tolist() == [0xED, 0xA0, 0x80]
    assert RENDERER.decode([0xED, 0xA0, 0x80, 65]) == "\ufffd\ufffd\ufffdA"
    with pytest.raises(ValueError, match="range"):
        RENDERER.decode([256])
