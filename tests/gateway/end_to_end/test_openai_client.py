"""The official `openai` client does not notice that a gateway stands before the engines."""

import base64
import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from openai import AsyncOpenAI, OpenAI

from tests.gateway.end_to_end.conftest import BODY_BYTES_MAX, Stack
from tests.gateway.end_to_end.processes import MODEL

ECHO = {"x-simulate": '{"echo": true}'}
HELLO: Any = [{"role": "user", "content": "Hello there, who are you?"}]
TOOLS: Any = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "Tells the weather.",
            "parameters": {"type": "object", "properties": {"place": {"type": "string"}}, "required": ["place"]},
        },
    }
]


@pytest.fixture
def client(stack: Stack) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{stack.gateway.url}/v1", api_key="none", max_retries=0, timeout=30) as client:
        yield client


def echoed(raw: Any) -> dict[str, Any]:
    """The body that the worker received, parsed."""
    document: dict[str, Any] = json.loads(base64.b64decode(json.loads(raw.text)["body_base64"]))
    return document


def test_an_answer_and_its_usage(client: OpenAI) -> None:
    answer = client.chat.completions.create(model=MODEL, messages=HELLO, max_tokens=12)
    assert len(answer.choices) == 1
    assert answer.choices[0].finish_reason == "length"
    assert answer.choices[0].message.content
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 12
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 12


def test_a_stream_with_usage_says_what_the_whole_answer_says(client: OpenAI) -> None:
    whole = client.chat.completions.create(model=MODEL, messages=HELLO, max_tokens=12)
    with client.chat.completions.create(
        model=MODEL, messages=HELLO, max_tokens=12, stream=True, stream_options={"include_usage": True}
    ) as stream:
        chunks = list(stream)
    pieces = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]
    assert "".join(pieces) == whole.choices[0].message.content
    assert len([piece for piece in pieces if piece]) > 3
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == "length"
    usage = chunks[-1].usage
    assert chunks[-1].choices == []
    assert usage is not None
    assert usage.completion_tokens == 12
    assert whole.usage is not None
    assert usage.prompt_tokens == whole.usage.prompt_tokens


async def test_the_async_client_whole_and_streamed(stack: Stack) -> None:
    async with AsyncOpenAI(base_url=f"{stack.gateway.url}/v1", api_key="none", max_retries=0) as client:
        whole = await client.chat.completions.create(model=MODEL, messages=HELLO, max_tokens=9)
        stream = await client.chat.completions.create(
            model=MODEL, messages=HELLO, max_tokens=9, stream=True, stream_options={"include_usage": True}
        )
        async with stream:
            chunks = [chunk async for chunk in stream]
    said = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert said == whole.choices[0].message.content
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 9


def test_tools_are_part_of_the_prompt_and_arrive_unchanged(client: OpenAI) -> None:
    plain = client.chat.completions.create(model=MODEL, messages=HELLO, max_tokens=2)
    tooled = client.chat.completions.with_raw_response.create(model=MODEL, messages=HELLO, tools=TOOLS, max_tokens=2)
    answer = tooled.parse()
    assert plain.usage is not None
    assert answer.usage is not None
    assert answer.usage.prompt_tokens > plain.usage.prompt_tokens + 100
    raw = client.chat.completions.with_raw_response.create(
        model=MODEL, messages=HELLO, tools=TOOLS, tool_choice="auto", extra_headers=ECHO
    )
    assert echoed(raw)["tools"] == TOOLS
    assert echoed(raw)["tool_choice"] == "auto"


def test_tools_are_counted_as_the_worker_counts_them(client: OpenAI, stack: Stack) -> None:
    answer = client.chat.completions.create(model=MODEL, messages=HELLO, tools=TOOLS, max_tokens=2)
    receipt = stack.gateway.explain({"model": MODEL, "messages": HELLO, "tools": TOOLS})
    assert answer.usage is not None
    assert receipt["prompt_tokens"] == answer.usage.prompt_tokens


def test_several_choices(client: OpenAI) -> None:
    answer = client.chat.completions.create(model=MODEL, messages=HELLO, n=3, seed=7, max_tokens=8)
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert len({choice.message.content for choice in answer.choices}) == 3
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 24


def test_several_choices_streamed(client: OpenAI) -> None:
    with client.chat.completions.create(model=MODEL, messages=HELLO, n=3, seed=7, max_tokens=8, stream=True) as stream:
        said = {0: "", 1: "", 2: ""}
        for chunk in stream:
            for choice in chunk.choices:
                said[choice.index] += choice.delta.content or ""
    whole = client.chat.completions.create(model=MODEL, messages=HELLO, n=3, seed=7, max_tokens=8)
    assert list(said.values()) == [choice.message.content for choice in whole.choices]


def test_logprobs(client: OpenAI) -> None:
    answer = client.chat.completions.create(model=MODEL, messages=HELLO, max_tokens=5, logprobs=True, top_logprobs=2)
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert len(logprobs.content) == 5
    assert logprobs.content[0].logprob == -0.125
    assert [len(entry.top_logprobs) for entry in logprobs.content] == [2] * 5
    assert logprobs.content[0].top_logprobs[0].token == logprobs.content[0].token


def image_message(data: str) -> Any:
    image = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}", "detail": "low"}}
    return [
        {"role": "system", "content": "You describe pictures."},
        {"role": "user", "content": [{"type": "text", "text": "What is this?"}, image]},
    ]


def test_image_parts_arrive_unchanged(client: OpenAI) -> None:
    messages = image_message("iVBORw0KGgo=")
    raw = client.chat.completions.with_raw_response.create(model=MODEL, messages=messages, extra_headers=ECHO)
    assert raw.headers["x-ropeway-worker"]
    assert echoed(raw)["messages"] == messages


def test_an_image_does_not_count_against_a_workers_parity(client: OpenAI, stack: Stack) -> None:
    for _ in range(5):
        client.chat.completions.create(model=MODEL, messages=image_message("iVBORw0KGgo="), max_tokens=1)
    assert {worker["parity"] for worker in stack.gateway.status()["workers"]} == {"proven"}


def test_a_body_of_five_megabytes_arrives_whole(client: OpenAI) -> None:
    messages = image_message("Q" * 5_000_000)
    raw = client.chat.completions.with_raw_response.create(model=MODEL, messages=messages, extra_headers=ECHO)
    received = echoed(raw)
    assert received.pop("cache_salt").startswith("rw1.default.")
    assert received == {"model": MODEL, "messages": messages}
    answer = client.chat.completions.create(model=MODEL, messages=messages, max_tokens=3)
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 3


def test_five_megabytes_of_text_are_the_engines_to_refuse(client: OpenAI, stack: Stack) -> None:
    body = {"model": MODEL, "messages": [{"role": "user", "content": "word " * 1_000_000}]}
    answer = httpx.post(f"{stack.gateway.url}/v1/chat/completions", json=body, timeout=30, trust_env=False)
    assert answer.status_code == 400
    assert "context" in answer.json()["error"]["message"]
    assert answer.headers["x-ropeway-worker"] in stack.fleet.names
    assert client.chat.completions.create(model=MODEL, messages=HELLO, max_tokens=1).choices


def test_a_body_over_the_limit_is_refused(stack: Stack) -> None:
    before = [len(stack.fleet.requests(worker)) for worker in stack.fleet.names]
    answer = stack.gateway.post(b"x" * (BODY_BYTES_MAX + 1))
    assert answer.status_code == 413
    assert answer.json()["error"]["code"] == "payload_too_large"
    assert [len(stack.fleet.requests(worker)) for worker in stack.fleet.names] == before


def test_models_are_listed_and_retrieved(client: OpenAI) -> None:
    (model,) = client.models.list().data
    assert model.id == MODEL
    assert model.owned_by == "ropeway"
    assert model.model_extra is not None
    # A field of the engine's own.
    assert model.model_extra["max_model_len"] == 131_072
    assert client.models.retrieve(MODEL) == model


@pytest.mark.parametrize(
    ("prompt", "prompts", "prompt_tokens"),
    [
        ("A text to go on with.", 1, 21),
        (["One text.", "And another."], 2, 21),
        (list(b"token ids of bytes"), 1, 18),
        ([list(b"several"), list(b"token lists")], 2, 18),
    ],
    ids=["text", "texts", "token-ids", "lists-of-token-ids"],
)
def test_completions_take_every_form_of_prompt(
    client: OpenAI, stack: Stack, prompt: Any, prompts: int, prompt_tokens: int
) -> None:
    answer = client.completions.create(model=MODEL, prompt=prompt, max_tokens=6)
    assert [choice.index for choice in answer.choices] == list(range(prompts))
    assert all(choice.text for choice in answer.choices)
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (prompt_tokens, 6 * prompts)
    assert {worker["parity"] for worker in stack.gateway.status()["workers"]} == {"proven"}


def test_text_and_its_token_ids_are_one_prompt(client: OpenAI, stack: Stack) -> None:
    text = "The same bytes, once as text and once as the ids of their tokens: one prefix."
    first = client.completions.with_raw_response.create(model=MODEL, prompt=text, max_tokens=1)
    ids = {"model": MODEL, "prompt": list(text.encode())}
    worker = first.headers["x-ropeway-worker"]
    stack.gateway.wait_confirmed(ids, worker, 64)
    second = client.completions.with_raw_response.create(model=MODEL, prompt=list(text.encode()), max_tokens=1)
    assert second.headers["x-ropeway-worker"] == worker
    assert int(second.headers["x-ropeway-matched-tokens"]) == 64
    usage = second.parse().usage
    assert usage is not None
    assert usage.prompt_tokens_details is not None
    assert usage.prompt_tokens_details.cached_tokens == 64
