"""The `anthropic` library: Messages whole and streamed, with tools, counted, and refused."""

from collections.abc import Iterator
from typing import Any

import pytest

from tests.clients.conftest import Stand
from tests.clients.talking import MODEL, SAID, THOUGHT

anthropic = pytest.importorskip("anthropic")

QUESTION: Any = [{"role": "user", "content": "How is the weather?"}]
TOOLS: Any = [
    {
        "name": "weather",
        "description": "Tells the weather.",
        "input_schema": {"type": "object", "properties": {"place": {"type": "string"}}, "required": ["place"]},
    }
]


@pytest.fixture
def client(stand: Stand) -> Iterator[Any]:
    with anthropic.Anthropic(base_url=stand.gateway.url, api_key="none", max_retries=0, timeout=30) as client:
        yield client


def test_a_message(client: Any, stand: Stand) -> None:
    answer = client.messages.create(
        model=MODEL, max_tokens=64, system="Be brief.", messages=QUESTION, stop_sequences=["END"]
    )
    (block,) = answer.content
    assert (block.type, block.text, answer.stop_reason) == ("text", SAID, "end_turn")
    assert (answer.usage.input_tokens, answer.usage.cache_read_input_tokens, answer.usage.output_tokens) == (4, 16, 5)
    assert answer._request_id.startswith("req-")
    assert stand.bodies() == [
        {
            "model": MODEL,
            "messages": [{"role": "system", "content": "Be brief."}, *QUESTION],
            "max_tokens": 64,
            "stop": ["END"],
        }
    ]


def test_what_is_of_the_form_does_not_reach_the_worker(client: Any, stand: Stand) -> None:
    client.messages.create(model=MODEL, max_tokens=8, messages=QUESTION)
    ((path, headers, _),) = [asked for asked in stand.worker.asked if asked[0].startswith("/v1/")]
    assert path == "/v1/chat/completions"
    assert headers["content-type"] == "application/json"
    assert {"x-api-key", "anthropic-version"}.isdisjoint(headers)


def test_a_call_and_what_came_of_it(client: Any, stand: Stand) -> None:
    first = client.messages.create(model=MODEL, max_tokens=64, messages=QUESTION, tools=TOOLS)
    (call,) = first.content
    assert (call.type, call.name, call.input) == ("tool_use", "weather", {"place": "Zürich"})
    assert first.stop_reason == "tool_use"
    turn = {"role": "assistant", "content": [call.model_dump(exclude_none=True)]}
    result = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": call.id, "content": "fine"}]}
    second = client.messages.create(model=MODEL, max_tokens=64, messages=[*QUESTION, turn, result], tools=TOOLS)
    assert second.content[0].text == SAID
    _, asked, heard = stand.bodies()[1]["messages"]  # type: ignore[misc, has-type]
    assert asked["tool_calls"][0]["function"]["name"] == "weather"
    assert heard == {"role": "tool", "tool_call_id": call.id, "content": "fine"}


def test_a_stream_adds_up(client: Any) -> None:
    output: Any = {"effort": "high"}
    with client.messages.stream(model=MODEL, max_tokens=64, messages=QUESTION, output_config=output) as stream:
        said = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert said == SAID
    assert [block.type for block in final.content] == ["thinking", "text"]
    assert (final.content[0].thinking, final.content[1].text) == (THOUGHT, SAID)
    assert (final.stop_reason, final.usage.output_tokens) == ("end_turn", 5)


def test_a_streamed_call(client: Any) -> None:
    with client.messages.stream(model=MODEL, max_tokens=64, messages=QUESTION, tools=TOOLS) as stream:
        final = stream.get_final_message()
    (call,) = final.content
    assert (call.type, call.name, call.input, final.stop_reason) == (
        "tool_use",
        "weather",
        {"place": "Zürich"},
        "tool_use",
    )


async def test_the_async_client(stand: Stand) -> None:
    async with (
        anthropic.AsyncAnthropic(base_url=stand.gateway.url, api_key="none", max_retries=0) as client,
        client.messages.stream(model=MODEL, max_tokens=64, messages=QUESTION) as stream,
    ):
        assert "".join([text async for text in stream.text_stream]) == SAID


def test_tokens_are_counted(client: Any, stand: Stand) -> None:
    assert client.messages.count_tokens(model=MODEL, messages=QUESTION, tools=TOOLS).input_tokens == 20
    (body,) = [body for body in stand.bodies("/tokenize") if "tools" in body]
    assert body["messages"] == QUESTION


def test_refusals_are_of_the_librarys_kinds(client: Any, stand: Stand) -> None:
    with pytest.raises(anthropic.NotFoundError, match="'other' does not exist here"):
        client.messages.create(model="other", max_tokens=8, messages=QUESTION)
    tool: Any = {"type": "web_search_20250305", "name": "web_search"}
    with pytest.raises(anthropic.BadRequestError, match=r"tools\.0"):
        client.messages.create(model=MODEL, max_tokens=8, messages=QUESTION, tools=[tool])
    assert stand.bodies() == []


def test_a_stream_that_breaks_off_is_an_error(client: Any, stand: Stand) -> None:
    stand.worker.broken_after = 3
    stream = client.messages.create(model=MODEL, max_tokens=8, messages=QUESTION, stream=True)
    with pytest.raises(anthropic.APIStatusError, match="broke off"):
        list(stream)
