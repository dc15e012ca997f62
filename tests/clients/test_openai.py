"""The `openai` library: chats with tools, Responses, and lists of models, whole and streamed."""

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from tests.clients.conftest import Stand
from tests.clients.talking import ARGUMENTS, ENTRY, MODEL, SAID, THOUGHT

QUESTION: Any = [{"role": "user", "content": "How is the weather?"}]
PARAMETERS = {"type": "object", "properties": {"place": {"type": "string"}}, "required": ["place"]}
CHAT_TOOLS: Any = [{"type": "function", "function": {"name": "weather", "parameters": PARAMETERS}}]
TOOLS: Any = [{"type": "function", "name": "weather", "parameters": PARAMETERS, "strict": False}]


@pytest.fixture
def client(stand: Stand) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{stand.gateway.url}/v1", api_key="none", max_retries=0, timeout=30) as client:
        yield client


def test_a_chat_calls_a_tool_and_hears_of_it(client: openai.OpenAI, stand: Stand) -> None:
    first = client.chat.completions.create(model=MODEL, messages=QUESTION, tools=CHAT_TOOLS)
    (call,) = first.choices[0].message.tool_calls or ()
    assert call.type == "function"
    assert (call.function.name, call.function.arguments) == ("weather", ARGUMENTS)
    result: Any = {"role": "tool", "tool_call_id": call.id, "content": "fine"}
    turn: Any = first.choices[0].message.model_dump(exclude_none=True)
    second = client.chat.completions.create(model=MODEL, messages=[*QUESTION, turn, result], tools=CHAT_TOOLS)
    assert second.choices[0].message.content == SAID
    assert stand.bodies()[1]["messages"] == [*QUESTION, turn, result]


def test_a_streamed_chat_calls_a_tool(client: openai.OpenAI) -> None:
    with client.chat.completions.stream(model=MODEL, messages=QUESTION, tools=CHAT_TOOLS) as stream:
        for _ in stream:
            pass
        final = stream.get_final_completion()
    assert final.choices[0].finish_reason == "tool_calls"
    (call,) = final.choices[0].message.tool_calls or ()
    assert json.loads(call.function.arguments) == {"place": "Zürich"}


def test_a_response(client: openai.OpenAI, stand: Stand) -> None:
    answer = client.responses.create(
        model=MODEL, input="How is it?", instructions="Be brief.", max_output_tokens=64, reasoning={"effort": "high"}
    )
    assert (answer.status, answer.output_text) == ("completed", SAID)
    assert [item.type for item in answer.output] == ["reasoning", "message"]
    assert answer.usage is not None
    assert (answer.usage.input_tokens, answer.usage.input_tokens_details.cached_tokens) == (20, 16)
    assert stand.bodies() == [
        {
            "model": MODEL,
            "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "How is it?"}],
            "max_completion_tokens": 64,
            "reasoning_effort": "high",
        }
    ]


def test_a_response_calls_a_tool_and_hears_of_it(client: openai.OpenAI, stand: Stand) -> None:
    first = client.responses.create(model=MODEL, input=QUESTION, tools=TOOLS)
    (call,) = first.output
    assert call.type == "function_call"
    assert (call.name, call.arguments) == ("weather", ARGUMENTS)
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "fine"}
    follow_up: Any = [*QUESTION, call.model_dump(exclude_none=True), result]
    assert client.responses.create(model=MODEL, input=follow_up, tools=TOOLS).output_text == SAID
    _, asked, heard = stand.bodies()[1]["messages"]  # type: ignore[misc, has-type]
    assert asked["tool_calls"][0]["function"] == {"name": "weather", "arguments": ARGUMENTS}
    assert heard == {"role": "tool", "tool_call_id": call.call_id, "content": "fine"}


def test_a_streamed_response_adds_up(client: openai.OpenAI) -> None:
    with client.responses.stream(model=MODEL, input="How is it?", reasoning={"effort": "high"}) as stream:
        events = list(stream)
        final = stream.get_final_response()
    said = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    thought = "".join(event.delta for event in events if event.type == "response.reasoning_text.delta")
    assert (said, thought, final.output_text) == (SAID, THOUGHT, SAID)
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert final.usage is not None
    assert final.usage.output_tokens == 5


def test_a_streamed_response_calls_a_tool(client: openai.OpenAI) -> None:
    with client.responses.stream(model=MODEL, input=QUESTION, tools=TOOLS) as stream:
        events = list(stream)
        (call,) = stream.get_final_response().output
    said = "".join(event.delta for event in events if event.type == "response.function_call_arguments.delta")
    assert call.type == "function_call"
    assert (call.name, call.arguments, said) == ("weather", ARGUMENTS, ARGUMENTS)


def test_a_response_that_leads_to_an_earlier_one_is_refused(client: openai.OpenAI, stand: Stand) -> None:
    with pytest.raises(openai.BadRequestError, match="not stored here") as caught:
        client.responses.create(model=MODEL, input="And?", previous_response_id="resp_1")
    assert caught.value.param == "previous_response_id"
    assert stand.bodies() == []


def test_a_stream_that_breaks_off_is_an_error(client: openai.OpenAI, stand: Stand) -> None:
    stand.worker.broken_after = 3
    kinds = []
    with client.responses.create(model=MODEL, input="How is it?", stream=True) as stream:
        events = iter(stream)
        while not kinds or kinds[-1] != "response.failed":
            kinds.append(next(events).type)
        with pytest.raises(openai.APIConnectionError):
            next(events)
    assert kinds[:2] == ["response.created", "response.in_progress"]


def test_unknown_routes_and_models_are_refused_in_openais_form(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        client.embeddings.create(model=MODEL, input="embed me")
    assert "/v1/embeddings" in caught.value.message
    with pytest.raises(openai.NotFoundError) as caught:
        client.responses.create(model="other", input="hi")
    assert caught.value.code == "model_not_found"


def test_models_keep_what_their_workers_said(client: openai.OpenAI) -> None:
    (listed,) = client.models.list().data
    assert listed.model_dump(exclude_none=True) == ENTRY
    assert client.models.retrieve(MODEL).model_dump(exclude_none=True) == ENTRY
