"""OpenAI's Responses become chats, and chats' answers Responses."""

from typing import Any

import pytest

from gateway.api.errors import Untranslatable
from gateway.api.responses import ResponseStream, chat_of_responses, response_of_chat
from tests.gateway.api.events import USAGE, call, chunk, fed

TOOL = {"type": "function", "name": "weather", "parameters": {"type": "object"}, "strict": True}


def chat(**fields: Any) -> dict[str, Any]:
    return chat_of_responses({"model": "m", "input": "hi", **fields})


def test_what_is_asked() -> None:
    form = {"type": "json_schema", "name": "n", "schema": {"type": "object"}, "strict": True}
    assert chat(
        instructions="Be kind.",
        max_output_tokens=9,
        temperature=0.5,
        stream=True,
        tools=[TOOL],
        tool_choice={"type": "function", "name": "weather"},
        parallel_tool_calls=False,
        reasoning={"effort": "low"},
        text={"format": form},
        store=True,
        include=["reasoning.encrypted_content"],
    ) == {
        "model": "m",
        "messages": [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "hi"}],
        "max_completion_tokens": 9,
        "temperature": 0.5,
        "stream": True,
        "stream_options": {"include_usage": True},
        "tools": [
            {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}, "strict": True}}
        ],
        "tool_choice": {"type": "function", "function": {"name": "weather"}},
        "parallel_tool_calls": False,
        "reasoning_effort": "low",
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "n", "schema": {"type": "object"}, "strict": True},
        },
    }


def test_items_of_a_conversation() -> None:
    items = [
        {"role": "developer", "content": "Rules."},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "weather?"}]},
        {"type": "reasoning", "id": "rs", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Let me look."}]},
        {"type": "function_call", "call_id": "a", "name": "weather", "arguments": "{}"},
        {"type": "function_call", "call_id": "b", "name": "time", "arguments": '{"x":1}'},
        {"type": "function_call_output", "call_id": "a", "output": "rain"},
        {"type": "function_call_output", "call_id": "b", "output": [{"type": "input_text", "text": "noon"}]},
        {"role": "user", "content": [{"type": "input_image", "image_url": "data:x", "detail": "low"}]},
    ]
    turn = {
        "role": "assistant",
        "reasoning": "Hm.",
        "content": "Let me look.",
        "tool_calls": [
            {"id": "a", "type": "function", "function": {"name": "weather", "arguments": "{}"}},
            {"id": "b", "type": "function", "function": {"name": "time", "arguments": '{"x":1}'}},
        ],
    }
    assert chat(input=items)["messages"] == [
        {"role": "developer", "content": "Rules."},
        {"role": "user", "content": "weather?"},
        turn,
        {"role": "tool", "tool_call_id": "a", "content": "rain"},
        {"role": "tool", "tool_call_id": "b", "content": "noon"},
        {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:x", "detail": "low"}}]},
    ]


def test_two_texts_in_a_row_are_two_turns() -> None:
    items = [{"role": "assistant", "content": "one"}, {"role": "assistant", "content": "two"}]
    assert chat(input=items)["messages"] == items


@pytest.mark.parametrize(
    ("fields", "place"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"conversation": "c"}, "conversation"),
        ({"background": True}, "background"),
        ({"prompt": {"id": "p"}}, "prompt"),
        ({"input": None}, "input"),
        ({"input": []}, "input"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, r"input\[0\]"),
        ({"input": [{"role": "user", "content": [{"type": "input_file"}]}]}, r"input\[0\].content\[0\]"),
        ({"tools": [{"type": "web_search"}]}, r"tools\[0\]"),
        ({"tools": [TOOL], "tool_choice": {"type": "file_search"}}, "tool_choice"),
    ],
)
def test_what_cannot_be_asked_names_its_place(fields: dict[str, Any], place: str) -> None:
    with pytest.raises(Untranslatable, match=place) as caught:
        chat(**fields)
    assert caught.value.status == 400


# Answers


def answer(message: dict[str, Any], finish: str, **request: Any) -> dict[str, Any]:
    choice = {"index": 0, "message": message, "finish_reason": finish}
    whole = {"id": "chatcmpl-1", "created": 7, "model": "m", "choices": [choice], "usage": USAGE["usage"]}
    return response_of_chat(whole, {"model": "asked", "input": "hi", **request})


def test_a_whole_answer_repeats_what_was_asked() -> None:
    found = answer({"content": "Yes."}, "stop", temperature=0.5, metadata={"a": "b"}, tools=[TOOL])
    part = {"type": "output_text", "text": "Yes.", "annotations": [], "logprobs": []}
    item = {"type": "message", "id": "msg_1_0", "status": "completed", "role": "assistant", "content": [part]}
    assert (found["id"], found["object"], found["created_at"]) == ("resp_1", "response", 7)
    assert (found["status"], found["model"], found["store"]) == ("completed", "m", False)
    assert (found["temperature"], found["metadata"], found["tools"]) == (0.5, {"a": "b"}, [TOOL])
    assert found["output"] == [item]
    assert found["usage"] == {
        "input_tokens": 20,
        "input_tokens_details": {"cached_tokens": 16},
        "output_tokens": 5,
        "output_tokens_details": {"reasoning_tokens": 2},
        "total_tokens": 25,
    }


def test_an_answer_that_was_cut_off() -> None:
    found = answer({"reasoning": "Hm.", "content": "Ye"}, "length")
    assert (found["status"], found["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert [(item["type"], item["status"]) for item in found["output"]] == [
        ("reasoning", "completed"),
        ("message", "incomplete"),
    ]


def test_calls_are_items() -> None:
    calls = [{"id": "a", "type": "function", "function": {"name": "weather", "arguments": '{"place":"x"}'}}]
    (item,) = answer({"content": None, "tool_calls": calls}, "tool_calls")["output"]
    assert item == {
        "type": "function_call",
        "id": "fc_1_0",
        "status": "completed",
        "call_id": "a",
        "name": "weather",
        "arguments": '{"place":"x"}',
    }


def test_a_stream_of_text_and_a_call() -> None:
    events = fed(
        ResponseStream({"model": "asked", "input": "hi"}),
        [
            chunk({"role": "assistant", "content": ""}),
            chunk({"content": "Look"}),
            chunk({"content": ":"}),
            chunk(call(0, "", "a", "weather")),
            chunk(call(0, "{}")),
            chunk(finish="tool_calls"),
            USAGE,
        ],
    )
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert [event["type"].removeprefix("response.") for event in events] == [
        "created",
        "in_progress",
        "output_item.added",
        "content_part.added",
        "output_text.delta",
        "output_text.delta",
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "output_item.added",
        "function_call_arguments.delta",
        "function_call_arguments.done",
        "output_item.done",
        "completed",
    ]
    assert events[0]["response"]["status"] == "in_progress"
    assert events[3]["part"]["text"] == ""
    assert [event["delta"] for event in events[4:6]] == ["Look", ":"]
    assert events[6]["text"] == "Look:"
    assert (events[9]["item"]["arguments"], events[11]["arguments"]) == ("", "{}")
    assert [event["output_index"] for event in events[2:13]] == [0] * 7 + [1] * 4
    final = events[-1]["response"]
    assert [item["type"] for item in final["output"]] == ["message", "function_call"]
    assert final["output"][0] == events[8]["item"]
    assert final["output"][1] == events[12]["item"]
    assert final["usage"]["total_tokens"] == 25


def test_thoughts_are_an_item_of_their_own() -> None:
    events = fed(ResponseStream({"model": "m"}), [chunk({"reasoning": "Hm."}), chunk({"content": "Y"}, "length")])
    kinds = [event["type"].removeprefix("response.") for event in events]
    assert kinds[3:8] == [
        "content_part.added",
        "reasoning_text.delta",
        "reasoning_text.done",
        "content_part.done",
        "output_item.done",
    ]
    assert events[3]["part"]["type"] == "reasoning_text"
    assert kinds[-1] == "incomplete"


def test_a_stream_that_fails_says_so() -> None:
    stream = ResponseStream({"model": "m"})
    stream.feed(chunk({"content": "Y"}))
    failed = stream.feed({"error": {"message": "gone"}})
    assert failed.startswith(b"event: response.failed\n")
    assert b'"status":"failed"' in failed
    assert b'"message":"gone"' in failed
    assert stream.end() == b""
