"""What of a message reaches a template, value for value."""

from typing import Any

import pytest

from cachecore.prompts.messages import has_media, read_conversation


def read(message: dict[str, Any], *, wrap_text: bool = False) -> dict[str, Any]:
    return read_conversation({"messages": [message]}, wrap_text=wrap_text).messages[0]


@pytest.mark.parametrize(
    ("content", "joined", "parts"),
    [
        ("a", "a", ["a"]),
        ("", "", [""]),
        (None, "", []),
        ([], "", []),
        ([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "a\nb", ["a", "b"]),
        ([{"type": "text", "text": ""}, {"type": "text", "text": "b"}], "b", ["", "b"]),
        ([{"type": "text", "text": None}, "b"], "b", ["b"]),
        ([{"type": "refusal", "refusal": "no"}, {"type": "output_text", "text": "c"}], "no\nc", ["no", "c"]),
    ],
)
def test_content(content: Any, joined: str, parts: list[str]) -> None:
    message = {"role": "user", "content": content}
    assert read(message) == {"role": "user", "content": joined}
    wrapped = read(message, wrap_text=True)
    assert wrapped == {"role": "user", "content": [{"type": "text", "text": text} for text in parts]}


def test_tool_results_are_text_for_every_template() -> None:
    message = {"role": "tool", "tool_call_id": "1", "content": [{"type": "text", "text": t} for t in ("a", "b")]}
    expected = {"role": "tool", "tool_call_id": "1", "content": "a\nb"}
    assert read(message) == expected
    assert read(message, wrap_text=True) == expected


def test_roles_keep_their_own_keys_alone() -> None:
    everything = {"content": "x", "name": "n", "tool_call_id": "1", "tools": [1], "reasoning": "r", "custom": 1}
    assert read({"role": "user", **everything}) == {"role": "user", "content": "x", "name": "n"}
    assert read({"role": "tool", **everything}) == {"role": "tool", "content": "x", "name": "n", "tool_call_id": "1"}
    assert read({"role": "developer", **everything})["tools"] == [1]
    thinking = {"reasoning": "r", "reasoning_content": "r", "thinking": "r"}
    assert read({"role": "assistant", **everything}) == {"role": "assistant", "content": "x", "name": "n", **thinking}


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [('{"a": [1, 2.5]}', {"a": [1, 2.5]}), ({"a": 1}, {"a": 1}), ("", {}), (None, {}), ("[1]", {}), ("{", {}), (3, {})],
)
def test_arguments_become_an_object(arguments: Any, expected: dict[str, Any]) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}
    read_back = read({"role": "assistant", "tool_calls": [call]})["tool_calls"]
    assert read_back == [{"id": "c", "type": "function", "function": {"name": "f", "arguments": expected}}]


def test_media_keep_their_place() -> None:
    parts = [
        {"type": "text", "text": "a"},
        {"type": "input_audio", "input_audio": {}},
        {"type": "new", "x": 1},
        {"x": 1},
    ]
    request = {"messages": [{"role": "user", "content": "t"}, {"role": "user", "content": parts}]}
    conversation = read_conversation(request, wrap_text=False)
    assert conversation.media == [1]
    kinds = [part["type"] for part in conversation.messages[1]["content"]]
    assert kinds == ["text", "audio", "unknown", "unknown"]
    assert conversation.messages[0]["content"] == "t"


def test_requests_are_left_as_they_are() -> None:
    call = {"id": "c", "function": {"name": "f", "arguments": "{}"}}
    request = {"messages": [{"role": "assistant", "content": [{"type": "text", "text": "a"}], "tool_calls": [call]}]}
    before = repr(request)
    read_conversation(request, wrap_text=True)
    read_conversation(request, wrap_text=False)
    assert repr(request) == before


SYSTEM = {"role": "system", "content": "Be brief."}
DEVELOPER = {"role": "developer", "content": "Use metric units.", "tools": [{"type": "function"}]}
USER = {"role": "user", "content": "How far?"}
BILLING = "x-anthropic-billing-header: cc_version=1; cch=7f3a;"


def without_developers(*messages: dict[str, Any], wrap_text: bool = False) -> Any:
    return read_conversation({"messages": list(messages)}, wrap_text=wrap_text, knows_developers=False)


@pytest.mark.parametrize(
    ("messages", "expected"),
    [
        ([DEVELOPER, USER], [{"role": "system", "content": "Use metric units."}, USER]),
        ([SYSTEM, USER], [SYSTEM, USER]),
        # As long as nobody is a developer nothing is moved.
        ([USER, SYSTEM], [USER, SYSTEM]),
        (
            [SYSTEM, USER, DEVELOPER, {"role": "system", "content": ""}],
            [{"role": "system", "content": "Be brief.\n\nUse metric units."}, USER],
        ),
        ([USER, DEVELOPER], [{"role": "system", "content": "Use metric units."}, USER]),
    ],
)
def test_developers_speak_as_the_system_where_a_template_does_not_know_them(messages: Any, expected: Any) -> None:
    assert without_developers(*messages).messages == expected
    parts = [{**m, "content": [{"type": "text", "text": m["content"]}]} for m in messages]
    assert [m["role"] for m in without_developers(*parts, wrap_text=True).messages] == [m["role"] for m in expected]


def test_a_template_that_knows_developers_sees_them_as_they_are() -> None:
    read = read_conversation({"messages": [DEVELOPER, USER]}, wrap_text=False)
    assert read.messages == [DEVELOPER, USER]


def test_images_stay_where_their_messages_move_to() -> None:
    image = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}
    assert without_developers(USER, DEVELOPER, image).media == [2]
    assert without_developers(DEVELOPER, image).media == [1]
    assert without_developers(USER, {**image, "role": "system"}, DEVELOPER).media == [0]


@pytest.mark.parametrize(
    ("content", "kept"),
    [
        (f"{BILLING}\nYou are an agent.", "You are an agent."),
        (BILLING, ""),
        (f"You are an agent.\n{BILLING}", f"You are an agent.\n{BILLING}"),
        ([{"type": "text", "text": BILLING}, {"type": "text", "text": "a"}, "b"], "a\nb"),
        ([{"type": "text", "text": f"{BILLING}\na"}], "a"),
    ],
)
def test_the_line_that_changes_with_every_request_is_left_out(content: Any, kept: str) -> None:
    read = read_conversation({"messages": [{"role": "system", "content": content}, USER]}, wrap_text=False)
    assert read.messages[0]["content"] == kept
    user = {"role": "user", "content": f"{BILLING}\nx"}
    assert read_conversation({"messages": [user]}, wrap_text=False).messages == [user]


@pytest.mark.parametrize(
    ("content", "found"),
    [
        ("text", False),
        (None, False),
        (["text", {"type": "text", "text": "a"}, {"type": "refusal", "refusal": "no"}], False),
        ([{"type": "image_url", "image_url": {}}], True),
        ([{"type": "something new"}], True),
    ],
)
def test_whether_there_is_more_than_text(content: Any, found: bool) -> None:
    assert has_media([USER, {"role": "user", "content": content}, "odd"]) is found
    assert not has_media(None)
