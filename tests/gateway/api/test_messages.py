"""Anthropic's Messages become chats, and chats' answers Messages."""

from typing import Any

import pytest

from gateway.api.errors import Untranslatable, anthropic_error
from gateway.api.messages import MessageStream, chat_of_messages, message_of_chat
from tests.gateway.api.events import USAGE, call, chunk, fed

TOOL = {"name": "weather", "description": "Tells it.", "input_schema": {"type": "object", "properties": {}}}


def chat(**fields: Any) -> dict[str, Any]:
    return chat_of_messages({"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": "hi"}], **fields})


def messages(*given: dict[str, Any], **fields: Any) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = chat(messages=list(given), **fields)["messages"]
    return found


def test_what_is_asked() -> None:
    assert chat(
        system="Be kind.",
        temperature=0.5,
        top_p=0.9,
        top_k=4,
        stop_sequences=["END"],
        metadata={"user_id": "u"},
        stream=True,
        service_tier="auto",
        container="c",
    ) == {
        "model": "m",
        "messages": [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "hi"}],
        "max_tokens": 9,
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 4,
        "stop": ["END"],
        "user": "u",
        "stream": True,
        "stream_options": {"include_usage": True},
    }


def test_system_blocks_are_one_text_without_the_line_that_changes_with_every_request() -> None:
    billing = {"type": "text", "text": "x-anthropic-billing-header: cc_version=1; cch=abc"}
    blocks = [billing, {"type": "text", "text": "One. "}, {"type": "text", "text": "Two."}]
    assert messages({"role": "user", "content": "hi"}, system=blocks)[0] == {"role": "system", "content": "One. Two."}
    assert chat(system=[billing])["messages"] == [{"role": "user", "content": "hi"}]


def test_one_text_is_a_text_and_several_stay_parts() -> None:
    one, two = {"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}, {"type": "text", "text": "b"}
    assert messages({"role": "user", "content": [one]}) == [{"role": "user", "content": "a"}]
    assert messages({"role": "user", "content": [one, two]}) == [
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}
    ]


def test_a_turn_with_thoughts_and_a_call_and_what_came_of_it() -> None:
    turn = [
        {"type": "thinking", "thinking": "Hm.", "signature": "s"},
        {"type": "redacted_thinking", "data": "x"},
        {"type": "text", "text": "Let me look."},
        {"type": "tool_use", "id": "toolu_1", "name": "weather", "input": {"place": "Zürich"}},
    ]
    result = {"type": "tool_result", "tool_use_id": "toolu_1", "content": [{"type": "text", "text": "rain"}]}
    assert messages(
        {"role": "assistant", "content": turn},
        {"role": "user", "content": [{"type": "text", "text": "and?"}, result]},
    ) == [
        {
            "role": "assistant",
            "reasoning": "Hm.",
            "tool_calls": [
                {
                    "id": "toolu_1",
                    "type": "function",
                    "function": {"name": "weather", "arguments": '{"place": "Zürich"}'},
                }
            ],
            "content": "Let me look.",
        },
        {"role": "tool", "tool_call_id": "toolu_1", "content": "rain"},
        {"role": "user", "content": "and?"},
    ]


def test_images_of_results_follow_as_the_users() -> None:
    source = {"type": "base64", "media_type": "image/png", "data": "AAAA"}
    content = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}, {"type": "image", "source": source}]
    assert messages({"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": content}]}) == [
        {"role": "tool", "tool_call_id": "t", "content": "a\nb"},
        {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}]},
    ]


@pytest.mark.parametrize(
    ("choice", "asked"),
    [
        (None, {"tool_choice": "auto"}),
        ({"type": "any"}, {"tool_choice": "required"}),
        ({"type": "none"}, {"tool_choice": "none"}),
        (
            {"type": "tool", "name": "weather", "disable_parallel_tool_use": True},
            {"tool_choice": {"type": "function", "function": {"name": "weather"}}, "parallel_tool_calls": False},
        ),
    ],
)
def test_tools_and_how_they_are_chosen(choice: Any, asked: dict[str, Any]) -> None:
    found = chat(tools=[TOOL], tool_choice=choice)
    function = {"name": "weather", "description": "Tells it.", "parameters": TOOL["input_schema"]}
    assert found["tools"] == [{"type": "function", "function": function}]
    assert {key: found[key] for key in ("tool_choice", "parallel_tool_calls") if key in found} == asked


def test_thinking_and_effort() -> None:
    assert chat(thinking={"type": "disabled"})["reasoning_effort"] == "none"
    assert "reasoning_effort" not in chat(thinking={"type": "enabled", "budget_tokens": 2048})
    schema = {"type": "object"}
    found = chat(output_config={"effort": "low", "format": {"type": "json_schema", "schema": schema}})
    assert found["reasoning_effort"] == "low"
    assert found["response_format"]["json_schema"]["schema"] == schema


@pytest.mark.parametrize(
    ("fields", "place"),
    [
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": [{"content": "x"}]}, "messages.0"),
        ({"messages": [{"role": "user"}]}, "messages.0.content"),
        ({"messages": [{"role": "user", "content": [{"type": "video"}]}]}, "messages.0.content.0"),
        ({"messages": [{"role": "user", "content": [{"type": "document", "source": {"type": "base64"}}]}]}, "document"),
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": True}, "max_tokens"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools.0"),
    ],
)
def test_what_cannot_be_asked_names_its_place(fields: dict[str, Any], place: str) -> None:
    with pytest.raises(Untranslatable, match=place) as caught:
        chat(**fields)
    assert caught.value.status == 400


# Answers


def answer(message: dict[str, Any], finish: str, **choice: Any) -> dict[str, Any]:
    whole = {"index": 0, "message": message, "finish_reason": finish, **choice}
    return message_of_chat({"id": "chatcmpl-1", "model": "m", "choices": [whole], "usage": USAGE["usage"]}, "asked")


def test_a_whole_answer() -> None:
    assert answer({"role": "assistant", "reasoning_content": "Hm.", "content": "Yes."}, "stop") == {
        "id": "msg_1",
        "type": "message",
        "role": "assistant",
        "model": "m",
        "content": [{"type": "thinking", "thinking": "Hm.", "signature": ""}, {"type": "text", "text": "Yes."}],
        "stop_reason": "end_turn",
        "stop_sequence": None,
        "usage": {
            "input_tokens": 4,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 16,
            "output_tokens": 5,
        },
    }


@pytest.mark.parametrize(
    ("finish", "choice", "expected"),
    [
        ("length", {}, ("max_tokens", None)),
        ("stop", {"stop_reason": "END"}, ("stop_sequence", "END")),
        ("stop", {"matched_stop": "END"}, ("stop_sequence", "END")),
        ("stop", {"stop_reason": 2}, ("end_turn", None)),
        ("content_filter", {}, ("refusal", None)),
    ],
)
def test_why_it_stopped(finish: str, choice: dict[str, Any], expected: tuple[str, str | None]) -> None:
    found = answer({"content": ""}, finish, **choice)
    assert (found["stop_reason"], found["stop_sequence"]) == expected
    assert found["content"] == [{"type": "text", "text": ""}]


@pytest.mark.parametrize("finish", ["tool_calls", "stop"])
def test_calls_are_blocks_with_their_arguments_read(finish: str) -> None:
    calls = [
        {"id": "a", "type": "function", "function": {"name": "weather", "arguments": '{"place":"x"}'}},
        {"id": "b", "type": "function", "function": {"name": "time", "arguments": "no JSON"}},
    ]
    found = answer({"content": None, "tool_calls": calls}, finish)
    assert found["content"] == [
        {"type": "tool_use", "id": "a", "name": "weather", "input": {"place": "x"}},
        {"type": "tool_use", "id": "b", "name": "time", "input": {}},
    ]
    assert found["stop_reason"] == "tool_use"


def test_a_stream_of_text() -> None:
    events = fed(
        MessageStream("asked", input_tokens=18),
        [
            chunk({"role": "assistant", "content": ""}),
            chunk({"content": "Y"}),
            chunk({"content": "es"}),
            chunk(finish="stop"),
            USAGE,
        ],
    )
    assert [event["type"] for event in events] == [
        "message_start",
        "content_block_start",
        "content_block_delta",
        "content_block_delta",
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    assert events[0]["message"]["usage"]["input_tokens"] == 18
    assert [event["delta"]["text"] for event in events[2:4]] == ["Y", "es"]
    assert events[5]["delta"] == {"stop_reason": "end_turn", "stop_sequence": None}
    assert events[5]["usage"]["cache_read_input_tokens"] == 16


def test_a_stream_of_thoughts_text_and_two_calls() -> None:
    events = fed(
        MessageStream("asked"),
        [
            chunk({"reasoning": "Hm."}),
            chunk({"content": "Look:"}),
            chunk(call(0, "", "a", "weather")),
            chunk(call(0, '{"place":')),
            chunk(call(0, '"x"}')),
            chunk(call(1, "{}", "b", "time")),
            chunk(finish="tool_calls"),
        ],
    )
    started = [event for event in events if event["type"] == "content_block_start"]
    assert [(event["index"], event["content_block"]["type"]) for event in started] == [
        (0, "thinking"),
        (1, "text"),
        (2, "tool_use"),
        (3, "tool_use"),
    ]
    deltas = [(event["index"], event["delta"]) for event in events if event["type"] == "content_block_delta"]
    assert deltas == [
        (0, {"type": "thinking_delta", "thinking": "Hm."}),
        (0, {"type": "signature_delta", "signature": ""}),
        (1, {"type": "text_delta", "text": "Look:"}),
        (2, {"type": "input_json_delta", "partial_json": '{"place":'}),
        (2, {"type": "input_json_delta", "partial_json": '"x"}'}),
        (3, {"type": "input_json_delta", "partial_json": "{}"}),
    ]
    stopped = [event["index"] for event in events if event["type"] == "content_block_stop"]
    assert stopped == [0, 1, 2, 3]
    assert events[-2]["delta"]["stop_reason"] == "tool_use"


def test_a_stream_that_fails_ends_with_the_error() -> None:
    stream = MessageStream("asked")
    assert b"message_start" in stream.feed(chunk({"content": "Y"}))
    failed = stream.feed({"error": {"message": "gone", "type": "server_error"}})
    assert failed == b'event: error\ndata: {"type":"error","error":{"type":"api_error","message":"gone"}}\n\n'
    assert stream.end() == b""
    assert stream.failed(500, "again") == b""


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, "invalid_request_error"),
        (401, "authentication_error"),
        (404, "not_found_error"),
        (413, "request_too_large"),
        (429, "rate_limit_error"),
        (500, "api_error"),
        (503, "overloaded_error"),
    ],
)
def test_errors_are_of_anthropics_types(status: int, kind: str) -> None:
    assert anthropic_error(status, "why") == {"type": "error", "error": {"type": kind, "message": "why"}}
