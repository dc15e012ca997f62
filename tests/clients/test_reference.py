"""The official libraries against reference workers: a real model answers, whole and streamed, from kept prefixes."""

from collections.abc import Iterator
from typing import Any

import openai
import pytest

from tests.gateway.end_to_end.models import MODEL, SECONDS_MAX, two_workers
from tests.gateway.end_to_end.processes import Gateway

anthropic = pytest.importorskip("anthropic")
pytestmark = pytest.mark.model

SYSTEM = "You are a helpful assistant who answers in one short sentence, whatever the question is about. " * 4
QUESTION: Any = [{"role": "user", "content": "Which city is the capital of France?"}]
CHAT: Any = [{"role": "system", "content": SYSTEM}, *QUESTION]
PARAMETERS = {"type": "object", "properties": {"place": {"type": "string"}}, "required": ["place"]}
TOOLS: Any = [{"name": "weather", "description": "Tells the weather.", "input_schema": PARAMETERS}]
CHAT_TOOLS: Any = [
    {
        "type": "function",
        "function": {"name": "weather", "description": "Tells the weather.", "parameters": PARAMETERS},
    }
]


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    with two_workers(tmp_path_factory.mktemp("reference"), {}) as gateway:
        yield gateway


@pytest.fixture
def client(gateway: Gateway) -> Iterator[openai.OpenAI]:
    settings: Any = {"api_key": "none", "max_retries": 0, "timeout": SECONDS_MAX}
    with openai.OpenAI(base_url=f"{gateway.url}/v1", **settings) as client:
        yield client


@pytest.fixture
def messages(gateway: Gateway) -> Iterator[Any]:
    with anthropic.Anthropic(base_url=gateway.url, api_key="none", max_retries=0, timeout=SECONDS_MAX) as client:
        yield client.messages


def test_three_forms_of_one_question_get_one_answer_from_one_prefix(client: openai.OpenAI, messages: Any) -> None:
    chat = client.chat.completions.with_raw_response.create(
        model=MODEL, messages=CHAT, temperature=0, max_completion_tokens=16
    )
    said, worker = chat.parse().choices[0].message.content, chat.headers["x-ropeway-worker"]
    assert "Paris" in (said or "")
    response = client.responses.with_raw_response.create(
        model=MODEL, instructions=SYSTEM, input=QUESTION[0]["content"], temperature=0, max_output_tokens=16
    )
    message = messages.with_raw_response.create(
        model=MODEL, system=SYSTEM, messages=QUESTION, max_tokens=16, extra_body={"temperature": 0}
    )
    assert response.parse().output_text == said
    assert message.parse().content[0].text == said
    for answer in (response, message):
        assert answer.headers["x-ropeway-worker"] == worker
        assert int(answer.headers["x-ropeway-matched-tokens"]) >= 64
    assert message.parse().usage.cache_read_input_tokens >= 64


def test_streams_say_what_whole_answers_say(client: openai.OpenAI, messages: Any) -> None:
    settings: Any = {"model": MODEL, "temperature": 0}
    whole = client.chat.completions.create(messages=CHAT, max_completion_tokens=16, **settings)
    said = whole.choices[0].message.content
    with client.chat.completions.stream(messages=CHAT, max_completion_tokens=16, **settings) as chat:
        assert "".join(event.delta for event in chat if event.type == "content.delta") == said
    with client.responses.stream(input=CHAT, max_output_tokens=16, **settings) as response:
        assert "".join(event.delta for event in response if event.type == "response.output_text.delta") == said
    extra = {"temperature": 0}
    with messages.stream(model=MODEL, system=SYSTEM, messages=QUESTION, max_tokens=16, extra_body=extra) as message:
        assert "".join(message.text_stream) == said
        assert message.get_final_message().usage.output_tokens == whole.usage.completion_tokens


def test_tools_are_part_of_the_prompt_in_every_form(client: openai.OpenAI, messages: Any, gateway: Gateway) -> None:
    chat = client.chat.completions.create(model=MODEL, messages=QUESTION, tools=CHAT_TOOLS, max_completion_tokens=2)
    assert chat.usage is not None
    counted = messages.count_tokens(model=MODEL, messages=QUESTION, tools=TOOLS).input_tokens
    with messages.stream(model=MODEL, messages=QUESTION, tools=TOOLS, max_tokens=2) as stream:
        usage = stream.get_final_message().usage
    assert usage.input_tokens + usage.cache_read_input_tokens == counted == chat.usage.prompt_tokens
    assert {worker["parity"] for worker in gateway.status()["workers"]} == {"proven"}


def test_models_keep_what_their_workers_said(client: openai.OpenAI) -> None:
    (model,) = client.models.list().data
    assert (model.id, model.owned_by) == (MODEL, "ropeway")
    assert model.model_extra is not None
    assert {"root", "parent", "max_model_len"} <= model.model_extra.keys()
    assert client.models.retrieve(MODEL) == model
