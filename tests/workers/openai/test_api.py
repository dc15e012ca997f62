"""The HTTP surface through the official client and raw requests, over a simulated engine."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

from workers.openai import requests
from workers.simulated.engine import SimulatedConfig
from workers.simulated.fleet import SimulatedWorker, WorkerOptions

MESSAGES: Any = [{"role": "user", "content": "Where does the cable end? Tell me in many words, please."}]


@pytest.fixture
async def client(worker: SimulatedWorker) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{worker.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def events_of(text: str) -> list[Any]:
    """The data of a stream of server-sent events."""
    payloads = [line.removeprefix("data: ") for line in text.splitlines() if line]
    return [payload if payload == "[DONE]" else json.loads(payload) for payload in payloads]


async def test_a_chat_answers_and_counts(client: openai.AsyncOpenAI) -> None:
    answer = await client.chat.completions.create(model="simulated", messages=MESSAGES, max_tokens=12)
    choice = answer.choices[0]
    assert choice.message.role == "assistant"
    assert len(choice.message.content or "") == 12
    assert choice.finish_reason == "length"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 12
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 12


async def test_a_repeated_prompt_is_cached_but_for_its_last_block(client: openai.AsyncOpenAI) -> None:
    prompt = list(range(64))
    for cached in (0, 48):
        answer = await client.completions.create(model="simulated", prompt=prompt, max_tokens=1)
        assert answer.usage is not None
        assert answer.usage.prompt_tokens_details is not None
        assert answer.usage.prompt_tokens_details.cached_tokens == cached


async def test_a_stream_says_what_the_whole_answer_says(client: openai.AsyncOpenAI) -> None:
    whole = await client.chat.completions.create(model="simulated", messages=MESSAGES, max_tokens=40)
    stream = await client.chat.completions.create(
        model="simulated", messages=MESSAGES, max_tokens=40, stream=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
    assert text == whole.choices[0].message.content
    reasons = [choice.finish_reason for chunk in chunks for choice in chunk.choices if choice.finish_reason]
    assert reasons == ["length"]
    assert chunks[-2].choices[0].finish_reason == "length"
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert whole.usage is not None
    assert chunks[-1].usage.prompt_tokens == whole.usage.prompt_tokens
    assert all(chunk.usage is None for chunk in chunks[:-1])


async def test_a_stream_ends_with_done(http: httpx.AsyncClient) -> None:
    answer = await http.post("/v1/completions", json={"prompt": "x", "max_tokens": 3, "stream": True})
    events = events_of(answer.text)
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert events[-1] == "[DONE]"
    assert [event["choices"][0]["finish_reason"] for event in events[:-1]] == [None, None, None, "length"]
    assert len({event["id"] for event in events[:-1]}) == 1


async def test_three_choices_interleave_and_differ_by_seed(client: openai.AsyncOpenAI) -> None:
    stream = await client.chat.completions.create(
        model="simulated", messages=MESSAGES, max_tokens=20, n=3, seed=5, stream=True
    )
    order: list[int] = []
    texts = {0: "", 1: "", 2: ""}
    async for chunk in stream:
        for choice in chunk.choices:
            order.append(choice.index)
            texts[choice.index] += choice.delta.content or ""
    assert set(order[:6]) == {0, 1, 2}
    assert all(order.count(index) == 22 for index in range(3))
    assert len(set(texts.values())) == 3
    whole = await client.chat.completions.create(model="simulated", messages=MESSAGES, max_tokens=20, n=3, seed=5)
    assert {choice.index: choice.message.content for choice in whole.choices} == texts
    assert whole.usage is not None
    assert whole.usage.completion_tokens == 60


async def test_chat_logprobs(client: openai.AsyncOpenAI) -> None:
    answer = await client.chat.completions.create(
        model="simulated", messages=MESSAGES, max_tokens=5, logprobs=True, top_logprobs=2
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert "".join(entry.token for entry in logprobs.content) == answer.choices[0].message.content
    first = logprobs.content[0]
    assert first.bytes == list(first.token.encode())
    assert [top.logprob for top in first.top_logprobs] == [-0.125, -1.125]
    assert first.top_logprobs[0].token == first.token
    stream = await client.chat.completions.create(
        model="simulated", messages=MESSAGES, max_tokens=5, logprobs=True, stream=True
    )
    streamed = [
        entry.token
        async for chunk in stream
        for choice in chunk.choices
        if choice.logprobs is not None
        for entry in choice.logprobs.content or ()
    ]
    assert streamed == [entry.token for entry in logprobs.content]


async def test_completion_logprobs_and_echo(client: openai.AsyncOpenAI) -> None:
    answer = await client.completions.create(model="simulated", prompt="abc", max_tokens=2, logprobs=1, echo=True)
    choice = answer.choices[0]
    assert choice.text.startswith("abc")
    assert len(choice.text) == 5
    assert choice.logprobs is not None
    assert choice.logprobs.tokens == list(choice.text)
    assert choice.logprobs.text_offset == [0, 1, 2, 3, 4]
    assert choice.logprobs.token_logprobs == [None, -0.125, -0.125, -0.125, -0.125]


async def test_max_tokens_zero_with_echo_gives_the_prompt_alone(http: httpx.AsyncClient) -> None:
    body = {"prompt": "abc", "max_tokens": 0, "echo": True, "logprobs": 0}
    answer = (await http.post("/v1/completions", json=body)).json()
    assert answer["choices"][0]["text"] == "abc"
    assert answer["choices"][0]["logprobs"]["tokens"] == ["a", "b", "c"]


async def test_prompt_logprobs(http: httpx.AsyncClient) -> None:
    body = {"prompt": "abc", "max_tokens": 1, "prompt_logprobs": 2}
    answer = (await http.post("/v1/completions", json=body)).json()
    scores = answer["choices"][0]["prompt_logprobs"]
    assert scores[0] is None
    assert scores[1]["98"] == {"logprob": -0.125, "rank": 1, "decoded_token": "b"}
    assert len(scores) == 3


@pytest.mark.parametrize("stream", [False, True])
async def test_a_stop_string_across_tokens_ends_the_answer(http: httpx.AsyncClient, stream: bool) -> None:
    body: dict[str, Any] = {"prompt": "x", "max_tokens": 60}
    text = (await http.post("/v1/completions", json=body)).json()["choices"][0]["text"]
    stop = text[20:25]
    assert text.index(stop) == 20
    answer = await http.post("/v1/completions", json={**body, "stop": ["never", stop], "stream": stream})
    if stream:
        events = events_of(answer.text)[:-1]
        found = "".join(event["choices"][0]["text"] for event in events)
        last = events[-1]["choices"][0]
    else:
        last = answer.json()["choices"][0]
        found = last["text"]
        assert answer.json()["usage"]["completion_tokens"] == 25
    assert found == text[:20]
    assert (last["finish_reason"], last["stop_reason"]) == ("stop", stop)


async def test_a_stop_string_frees_the_engine(http: httpx.AsyncClient, worker: SimulatedWorker) -> None:
    await http.post("/v1/completions", json={"prompt": "x", "max_tokens": 100_000 // 2, "stop": " "})
    assert worker.engine.metrics.requests_running == 0
    assert worker.engine.metrics.generation_tokens < 50_000
    assert worker.engine.metrics.kv_cache_usage == 0


async def test_a_stop_token_ends_and_is_not_text(http: httpx.AsyncClient) -> None:
    text = (await http.post("/v1/completions", json={"prompt": "x"})).json()["choices"][0]["text"]
    body = {"prompt": "x", "stop_token_ids": [ord(text[3])]}
    choice = (await http.post("/v1/completions", json=body)).json()["choices"][0]
    assert choice["text"] == text[: text.index(text[3])]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", ord(text[3]))


@pytest.mark.parametrize(
    ("prompt", "choices", "tokens"),
    [("ab", 1, 2), (["ab", "c"], 2, 3), ([97, 98], 1, 2), ([[97], [97, 98, 99]], 2, 4), (["a", [1, 2]], 2, 3)],
)
async def test_prompts_come_in_four_forms(http: httpx.AsyncClient, prompt: Any, choices: int, tokens: int) -> None:
    answer = (await http.post("/v1/completions", json={"prompt": prompt, "max_tokens": 2, "n": 2})).json()
    assert len(answer["choices"]) == 2 * choices
    assert [choice["index"] for choice in answer["choices"]] == list(range(2 * choices))
    assert answer["usage"]["prompt_tokens"] == tokens
    assert answer["usage"]["completion_tokens"] == 4 * choices


async def test_tools_and_unknown_fields_reach_the_template(http: httpx.AsyncClient) -> None:
    tool = {"type": "function", "function": {"name": "lift", "parameters": {}}}
    plain = (await http.post("/v1/chat/completions", json={"messages": MESSAGES})).json()
    body = {"messages": MESSAGES, "tools": [tool], "an_unknown_field": {"x": 2**53 + 1}, "user": "u"}
    tooled = (await http.post("/v1/chat/completions", json=body)).json()
    assert tooled["usage"]["prompt_tokens"] > plain["usage"]["prompt_tokens"] + 40


async def test_salts_separate(http: httpx.AsyncClient) -> None:
    prompt = list(range(100))
    for salt, cached in [("a", 0), ("b", 0), ("a", 96), (None, 0)]:
        body = {"prompt": prompt, "max_tokens": 1, **({"cache_salt": salt} if salt else {})}
        usage = (await http.post("/v1/completions", json=body)).json()["usage"]
        assert usage["prompt_tokens_details"]["cached_tokens"] == cached


async def test_adapters_are_models_and_separate(start_worker: Any) -> None:
    worker = await start_worker(WorkerOptions(adapters=("tuned",)))
    async with httpx.AsyncClient(base_url=worker.url) as http:
        models = (await http.get("/v1/models")).json()["data"]
        assert [(model["id"], model["parent"]) for model in models] == [("simulated", None), ("tuned", "simulated")]
        for model, cached in [("simulated", 0), ("tuned", 0), ("tuned", 32)]:
            body = {"model": model, "prompt": list(range(40)), "max_tokens": 1}
            answer = (await http.post("/v1/completions", json=body)).json()
            assert answer["model"] == model
            assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == cached


BAD_REQUESTS: list[tuple[str, Any, str | None]] = [
    ("/v1/chat/completions", {"messages": []}, "messages"),
    ("/v1/chat/completions", {"messages": "hi"}, "messages"),
    ("/v1/chat/completions", {"messages": MESSAGES, "stream_options": {"include_usage": True}}, "stream_options"),
    ("/v1/chat/completions", {"messages": MESSAGES, "temperature": -1}, "temperature"),
    ("/v1/chat/completions", {"messages": MESSAGES, "top_logprobs": 2}, "top_logprobs"),
    ("/v1/chat/completions", {"messages": MESSAGES, "n": 0}, "n"),
    ("/v1/chat/completions", {"messages": MESSAGES, "cache_salt": ""}, "cache_salt"),
    ("/v1/chat/completions", {"messages": MESSAGES, "kv_transfer_params": "x"}, "kv_transfer_params"),
    ("/v1/completions", {"prompt": "x", "suffix": "y"}, "suffix"),
    ("/v1/completions", {"prompt": []}, "prompt"),
    ("/v1/completions", {"prompt": [1, -1]}, "prompt"),
    ("/v1/completions", {"prompt": [[]]}, "prompt"),
    ("/v1/completions", {"prompt": 5}, "prompt"),
    ("/v1/completions", {}, "prompt"),
    ("/v1/completions", {"prompt": ""}, None),
    ("/v1/completions", {"prompt": "x", "max_tokens": 0}, "max_tokens"),
    ("/v1/completions", {"prompt": "x", "prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
    ("/v1/completions", [1], None),
    ("/tokenize", {}, "prompt"),
    ("/detokenize", {"tokens": [700]}, "tokens"),
]


@pytest.mark.parametrize(("path", "body", "param"), BAD_REQUESTS)
async def test_what_is_malformed_gets_an_error_object(
    http: httpx.AsyncClient, path: str, body: Any, param: str | None
) -> None:
    answer = await http.post(path, json=body)
    error = answer.json()["error"]
    assert answer.status_code == 400
    assert error["type"] == "invalid_request_error"
    assert error["param"] == param
    assert error["message"]
    assert answer.headers["x-request-id"]


async def test_other_errors(http: httpx.AsyncClient, client: openai.AsyncOpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as unknown:
        await client.chat.completions.create(model="none such", messages=MESSAGES)
    assert unknown.value.code == "model_not_found"
    broken = await http.post("/v1/completions", content=b'{"prompt": "x"')
    assert (broken.status_code, broken.json()["error"]["type"]) == (400, "invalid_request_error")
    assert (await http.get("/none/such")).json()["error"]["message"] == "there is no /none/such here"
    assert (await http.get("/v1/completions")).status_code == 405


@pytest.mark.parametrize("stream", [False, True])
async def test_the_context_is_bounded(start_worker: Any, stream: bool) -> None:
    worker = await start_worker(max_model_len=100)
    async with httpx.AsyncClient(base_url=worker.url) as http:
        for prompt_tokens, max_tokens, status in [(100, 1, 400), (90, 11, 400), (90, 10, 200), (99, None, 200)]:
            body = {"prompt": [1] * prompt_tokens, "max_tokens": max_tokens, "stream": stream}
            answer = await http.post("/v1/completions", json=body)
            assert answer.status_code == status
            if status == 400:
                assert answer.json()["error"]["code"] == "context_length_exceeded"


async def test_tokenize_agrees_with_usage(http: httpx.AsyncClient) -> None:
    tokenized = (await http.post("/tokenize", json={"model": "simulated", "messages": MESSAGES})).json()
    answer = (await http.post("/v1/chat/completions", json={"messages": MESSAGES})).json()
    assert tokenized["count"] == len(tokenized["tokens"]) == answer["usage"]["prompt_tokens"]
    assert tokenized["max_model_len"] == SimulatedConfig(blocks_total=4096).info().max_model_len
    without = {"messages": MESSAGES, "add_generation_prompt": False}
    assert (await http.post("/tokenize", json=without)).json()["count"] < tokenized["count"]
    text = (await http.post("/detokenize", json={"tokens": tokenized["tokens"]})).json()["prompt"]
    assert text.endswith("<|assistant|>\n")
    plain = (await http.post("/tokenize", json={"prompt": "aé", "return_token_strs": True})).json()
    assert plain["tokens"] == [97, 195, 169]
    assert plain["token_strs"][0] == "a"


async def test_request_ids(http: httpx.AsyncClient) -> None:
    given = await http.post("/v1/completions", json={"prompt": "x"}, headers={"x-request-id": "abc-1"})
    assert given.headers["x-request-id"] == "abc-1"
    assert given.json()["id"] == "cmpl-abc-1"
    made = await http.get("/health")
    assert len(made.headers["x-request-id"]) == 24
    refused = await http.get("/health", headers={"x-request-id": "a" * 300})
    assert len(refused.headers["x-request-id"]) == 24
    bodies = [http.post("/v1/completions", json={"prompt": "x"}, headers={"x-request-id": "same"}) for _ in range(4)]
    assert [answer.status_code for answer in await asyncio.gather(*bodies)] == [200] * 4


async def test_models_and_server_info(http: httpx.AsyncClient, worker: SimulatedWorker) -> None:
    model = (await http.get("/v1/models")).json()["data"][0]
    assert set(model) == {"id", "object", "created", "owned_by", "root", "parent", "max_model_len"}
    info = (await http.get("/server_info")).json()
    assert info["engine"] == "ropeway-simulated"
    assert info["epoch"] == worker.engine.info.epoch
    assert (info["block_size"], info["blocks_total"]) == (16, 4096)
    assert info["max_num_seqs"] == worker.engine.config.limits.sequences_max
    assert info["tokenizer_fingerprint"] == "plain-bytes-1"
    assert worker.publisher is not None
    assert info["kv_events"]["endpoint"] == worker.publisher.endpoint
    assert info["kv_events"]["replay_endpoint"] == worker.publisher.replay_endpoint
    assert info["kv_events"]["topic"] == "kv-events"


async def test_metrics_have_vllms_names(http: httpx.AsyncClient) -> None:
    for _ in range(2):
        await http.post("/v1/completions", json={"prompt": list(range(40)), "max_tokens": 3})
    text = (await http.get("/metrics")).text
    samples = {
        sample.name: sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.labels.get("finished_reason", "length") == "length" and sample.name.startswith("vllm:")
    }
    assert samples == {
        "vllm:num_requests_running": 0,
        "vllm:num_requests_waiting": 0,
        "vllm:kv_cache_usage_perc": 0,
        "vllm:prefix_cache_queries_total": 80,
        "vllm:prefix_cache_hits_total": 32,
        "vllm:prompt_tokens_total": 80,
        "vllm:generation_tokens_total": 6,
        "vllm:num_preemptions_total": 0,
        "vllm:request_success_total": 2,
        "vllm:cache_config_info": 1,
    }
    assert 'block_size="16"' in text
    assert 'num_gpu_blocks="4096"' in text
    assert 'model_name="simulated"' in text


async def test_reset_prefix_cache(http: httpx.AsyncClient) -> None:
    body = {"prompt": list(range(40)), "max_tokens": 1}
    await http.post("/v1/completions", json=body)
    assert (await http.post("/reset_prefix_cache")).status_code == 200
    usage = (await http.post("/v1/completions", json=body)).json()["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] == 0


async def test_cached_blocks_are_listed(http: httpx.AsyncClient) -> None:
    await http.post("/reset_prefix_cache")
    assert (await http.get("/cached_blocks")).json()["blocks"] == []
    await http.post("/v1/completions", json={"prompt": list(range(40)), "max_tokens": 1})
    blocks = dict((await http.get("/cached_blocks")).json()["blocks"])
    assert len(blocks) == 2
    assert set(blocks.values()) == {1}
    assert all(0 <= handle < 2**64 for handle in blocks)


async def test_a_body_of_five_megabytes(http: httpx.AsyncClient) -> None:
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * 5_000_000}}
    messages = [*MESSAGES, {"role": "user", "content": [{"type": "text", "text": "look"}, image]}]
    answer = await http.post("/v1/chat/completions", json={"messages": messages, "max_tokens": 2})
    assert answer.status_code == 200
    # What comes before the image is all that this worker can name.
    assert 0 < answer.json()["usage"]["prompt_tokens"] < 200


@pytest.mark.parametrize("stated", [True, False])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize"])
async def test_a_body_beyond_the_bound_is_refused(
    http: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch, path: str, stated: bool
) -> None:
    body = json.dumps({"prompt": "x" * 1000, "max_tokens": 1}).encode()
    monkeypatch.setattr(requests, "BODY_BYTES_MAX", len(body) - 1)
    answer = await http.post(path, content=body if stated else _pieces(body))
    assert answer.status_code == 413
    assert answer.json()["error"]["code"] == "payload_too_large"
    monkeypatch.setattr(requests, "BODY_BYTES_MAX", len(body))
    assert (await http.post("/v1/completions", content=_pieces(body))).status_code == 200


async def _pieces(body: bytes) -> AsyncIterator[bytes]:
    for start in range(0, len(body), 100):
        yield body[start : start + 100]
