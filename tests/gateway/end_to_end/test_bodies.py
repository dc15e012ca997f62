"""What clients write in bodies, and what has become of it at the worker and in the gateway's idea of the prompt."""

import base64
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from cachecore.prompts.plain import PlainRenderer
from tests.gateway.end_to_end.conftest import Stack
from tests.gateway.end_to_end.processes import (
    MODEL,
    Gateway,
    cached_tokens,
    candidate,
    chat,
    full_hit,
    matched_tokens,
    token_count,
    whole_blocks,
    worker_of,
)
from tests.gateway.end_to_end.scripted import ScriptedWorker

ECHO = {"x-simulate": '{"echo": true}'}
COMPLETIONS = "/v1/completions"


def received(
    stack: Stack, body: Any, headers: Mapping[str, str] | None = None, path: str = "/v1/chat/completions"
) -> Any:
    """What the worker was sent: the answer of one that echoes, with the body parsed."""
    answer = stack.gateway.post(body, {**ECHO, **(headers or {})}, path)
    assert answer.status_code == 200, answer.text
    document = answer.json()
    document["fields"] = {name.lower(): value for name, value in document["headers"]}
    document["body"] = base64.b64decode(document["body_base64"])
    return document


# One prompt, however it is written


def test_a_chat_and_its_token_ids_are_one_prompt(stack: Stack) -> None:
    body = chat("A chat that is rendered by its template, and asked for once more by its token ids. " * 3)
    answer = stack.gateway.post(body)
    worker = worker_of(answer)
    stack.gateway.wait_confirmed(body, worker, full_hit(body))
    renderer = PlainRenderer()
    tokens = [token for segment in renderer.chat(body).segments for token in renderer.encode(segment)]
    again = stack.gateway.post({"model": MODEL, "prompt": tokens, "max_tokens": 1}, path=COMPLETIONS)
    assert worker_of(again) == worker
    assert matched_tokens(again) == cached_tokens(again) == full_hit(body) > 0


def test_text_in_parts_is_what_the_template_makes_of_it(stack: Stack) -> None:
    texts = ["The first part of what a user says. " * 4, "And a second one. " * 4]
    parts = [{"type": "text", "text": text} for text in texts]
    listed = {"model": MODEL, "messages": [{"role": "user", "content": parts}], "max_tokens": 2}
    assert json.loads(received(stack, listed)["body"])["messages"] == listed["messages"]
    twin = chat("\n".join(texts))
    answer = stack.gateway.post(listed)
    assert answer.json()["usage"]["prompt_tokens"] == token_count(twin["messages"])
    stack.gateway.wait_confirmed(twin, worker_of(answer), full_hit(twin))
    assert stack.gateway.explain(listed)["matched_tokens"] == full_hit(twin)


def test_the_route_says_what_the_prompt_is(stack: Stack) -> None:
    body = chat("Whatever else a chat holds, its messages are its prompt. " * 2)
    for path in ("/v1/chat/completions", "//v1/chat/completions", "/v1/chat/completions/"):
        answer = stack.gateway.post({**body, "prompt": "not this"}, path=f"{stack.gateway.url}{path}")
        assert answer.status_code == 200, answer.text
        assert answer.json()["usage"]["prompt_tokens"] == token_count(body["messages"])
        assert stack.gateway.status()["receipts"][0]["prompt_tokens"] == token_count(body["messages"])
    answer = stack.gateway.post({**body, "prompt": "this text"}, path=COMPLETIONS)
    assert answer.json()["usage"]["prompt_tokens"] == len("this text")


def test_text_before_an_image_is_found_whatever_the_image(stack: Stack) -> None:
    def ask(picture: str) -> dict[str, Any]:
        image = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{picture}"}}
        content = [{"type": "text", "text": "what?"}, image]
        return {"model": MODEL, "messages": [rules, {"role": "user", "content": content}], "max_tokens": 2}

    rules = {"role": "system", "content": "You describe pictures, carefully and in few words. " * 4}
    before = whole_blocks(token_count([rules]) - len("<|assistant|>\n"))
    answer = stack.gateway.post(ask("iVBORw0KGgo="))
    stack.gateway.wait_confirmed(ask("R0lGODdh"), worker_of(answer), before)
    other = stack.gateway.post(ask("R0lGODdh"))
    assert (worker_of(other), matched_tokens(other)) == (worker_of(answer), before)
    assert before > 0


@pytest.mark.parametrize(
    ("keys", "path"), [({"prompt_logprobs": 0}, "/v1/chat/completions"), ({"echo": True, "logprobs": 1}, COMPLETIONS)]
)
def test_a_request_that_reads_no_cache_is_promised_nothing(stack: Stack, keys: dict[str, Any], path: str) -> None:
    is_chat = path != COMPLETIONS
    text = f"A prompt whose own probabilities are asked for, with {sorted(keys)}. " * 3
    body: dict[str, Any] = chat(text) if is_chat else {"model": MODEL, "prompt": text, "max_tokens": 1}
    expected = full_hit(body) if is_chat else whole_blocks(len(text) - 1)
    worker = worker_of(stack.gateway.post(body, path=path))
    stack.gateway.wait_confirmed(body, worker, expected)
    receipt = stack.gateway.explain({**body, **keys})
    assert (receipt["matched_tokens"], candidate(receipt, worker)["confirmed_tokens"]) == (0, 0)
    answer = stack.gateway.post({**body, **keys}, path=path)
    assert matched_tokens(answer) == 0
    # What it computes is there for others.
    assert stack.gateway.explain(body)["matched_tokens"] == expected


# What is not the gateway's passes


def test_many_tools_one_of_them_without_parameters(stack: Stack) -> None:
    function = {"name": "f", "description": "d" * 2_400, "parameters": {"type": "object", "properties": {}}}
    tools = [{"type": "function", "function": {**function, "name": f"f{number}"}} for number in range(46)]
    tools.append({"type": "function", "function": {"name": "noargs", "description": "d"}})
    body = chat("Use one of your tools.", tools=tools)
    assert len(json.dumps(body)) > 110_000
    assert json.loads(received(stack, body)["body"])["tools"] == tools
    answer = stack.gateway.post(body)
    assert answer.status_code == 200
    assert stack.gateway.status()["receipts"][0]["prompt_tokens"] == answer.json()["usage"]["prompt_tokens"]


def test_parameters_of_engines_keep_their_values_and_types(stack: Stack) -> None:
    sent = {
        **chat("hello"),
        "return_token_ids": True,
        "chat_template_kwargs": {"enable_thinking": False},
        "add_generation_prompt": False,
        "continue_final_message": True,
        "min_p": 0.05,
        "seed": 2**53 + 1,
        "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "object"}}},
        "guided_choice": ["positive", "negative"],
        "tokens": {"token_ids": [1, 2, 3]},
        "x_unknown": {"a": [1, None, 1e-7], "model": "m"},
    }
    got = json.loads(received(stack, {**sent, "cache_salt": "s", "kv_transfer_params": {"a": 1}})["body"])
    assert got.pop("cache_salt").startswith("rw1.default.")
    assert got == sent


@pytest.mark.parametrize(
    "stop", ["", None, "a", ["a"], list("abcd"), list("abcde"), ["x"] * 32, ["x"] * 33, [1, 2, 3, 4, 5], {"a": 1}]
)
def test_stop_sequences_are_the_engines_to_judge(stack: Stack, stop: Any) -> None:
    body = chat("Stop somewhere.", stop=stop)
    assert json.loads(received(stack, body)["body"])["stop"] == stop
    answer = stack.gateway.post(body)
    assert answer.status_code in (200, 400)
    assert worker_of(answer) in stack.fleet.names


@pytest.mark.parametrize("role", ["assistant", "user"])
def test_parts_of_unknown_types_pass_and_so_does_what_the_engine_says_of_them(stack: Stack, role: str) -> None:
    thinking = {"type": "thinking", "thinking": "hm", "signature": "s"}
    first = {"role": role, "content": [thinking, {"type": "text", "text": "ok"}]}
    body = {"model": MODEL, "messages": [first, {"role": "user", "content": "go on"}], "max_tokens": 2}
    assert json.loads(received(stack, body)["body"])["messages"] == body["messages"]
    refusal = {"error": {"message": "no such part: " + "x" * 2_000, "type": "BadRequestError", "code": 400}}
    answer = stack.gateway.post(body, {"x-simulate": json.dumps({"status": 400, "body": refusal})})
    assert (answer.status_code, answer.json()) == (400, refusal)


@pytest.mark.parametrize("stream", [{}, {"stream": False}, {"stream": None}, {"stream": True}])
@pytest.mark.parametrize("options", [{}, {"stream_options": {"include_usage": True}}])
def test_options_of_streams_are_neither_added_nor_lost(
    stack: Stack, stream: dict[str, Any], options: dict[str, Any]
) -> None:
    got = json.loads(received(stack, chat("hi", **stream, **options))["body"])
    del got["cache_salt"]
    assert got == chat("hi", **stream, **options)


def test_line_ends_and_wide_characters_stay(stack: Stack) -> None:
    text = "one\\r\\ntwo\\tthree \u2028 four \u6e10 \U0001f30d"
    raw = f'{{\r\n\t"model": "{MODEL}",\r\n"messages": [{{"role": "user", "content": "{text}"}}]\r\n}}\r\n'.encode()
    document = received(stack, raw)
    assert document["body"].endswith(raw[1:])
    assert int(document["fields"]["content-length"]) == len(document["body"])
    answer = stack.gateway.post(raw)
    assert answer.json()["usage"]["prompt_tokens"] == token_count(json.loads(raw)["messages"])


# One policy of headers on every route

FORM = b'--b\r\nContent-Disposition: form-data; name="model"\r\n\r\nsimulated\r\n--b--\r\n'
JSON = json.dumps(chat("hi")).encode()
ROUTES = {
    "/v1/chat/completions": ("application/json", JSON),
    "/v1/completions": ("application/json", json.dumps({"model": MODEL, "prompt": "hi"}).encode()),
    "/v1/embeddings": ("application/json", json.dumps({"model": MODEL, "input": "hi"}).encode()),
    "/v1/rerank": ("application/json", json.dumps({"model": MODEL, "query": "q", "documents": ["d"]}).encode()),
    "/v1/audio/transcriptions": ("multipart/form-data; boundary=b", FORM),
}


@pytest.mark.parametrize("path", ROUTES)
def test_headers_travel_alike_on_every_route(stack: Stack, path: str) -> None:
    content_type, body = ROUTES[path]
    sent = {
        "content-type": content_type,
        "authorization": "Bearer engine-key",
        "x-kept": "yes",
        "accept-encoding": "gzip",
        "x-request-id": "mine",
        "connection": "x-hop",
        "x-hop": "1",
        "x-ropeway-policy": "kv-aware",
        "x-ropeway-session": "s",
        "x-ropeway-fidelity": "exact",
        "x-ropeway-ttft-budget-ms": "60000",
    }
    fields = received(stack, body, sent, path)["fields"]
    assert fields["authorization"] == "Bearer engine-key"
    assert (fields["x-kept"], fields["content-type"]) == ("yes", content_type)
    assert fields["host"] in stack.fleet.names
    assert fields["x-request-id"].startswith("mine-")
    gone = {"accept-encoding", "connection", "x-hop", *(name for name in sent if name.startswith("x-ropeway-"))}
    assert gone.isdisjoint(fields)


INTRODUCTION = ("x-forwarded-for", "x-forwarded-proto", "x-forwarded-host")


@pytest.fixture(scope="module")
def introducing(stack: Stack, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with Gateway(tmp_path_factory.mktemp("introducing"), stack.fleet.urls, {"x_forwarded": True}) as gateway:
        yield Stack(stack.fleet, gateway)


@pytest.mark.parametrize("path", ROUTES)
def test_workers_are_told_who_asks_where_that_is_wanted(stack: Stack, introducing: Stack, path: str) -> None:
    content_type, body = ROUTES[path]
    fields = received(introducing, body, {"content-type": content_type}, path)["fields"]
    host = introducing.gateway.url.removeprefix("http://")
    assert [fields[name] for name in INTRODUCTION] == ["127.0.0.1", "http", host]
    assert set(INTRODUCTION).isdisjoint(received(stack, body, {"content-type": content_type}, path)["fields"])


def test_what_a_proxy_has_said_of_a_client_stays(stack: Stack, introducing: Stack) -> None:
    said = dict(zip(INTRODUCTION, ("203.0.113.7, 10.0.0.2", "https", "api.example.com"), strict=True))
    for asked, sees in ((introducing, "203.0.113.7, 10.0.0.2, 127.0.0.1"), (stack, "203.0.113.7, 10.0.0.2")):
        fields = received(asked, chat("hi"), said)["fields"]
        assert {name: fields[name] for name in INTRODUCTION} == {**said, "x-forwarded-for": sees}


# Nobody but the gateway writes its log


def test_clients_write_no_lines_into_the_log(stack: Stack) -> None:
    """Whatever a client names itself or what it asks for: one record is one line, and says nothing in its name."""
    forged = "x\r\nERROR forged"
    escaped = "x%0d%0aERROR forged".replace(" ", "%20")
    for headers in ({"x-request-id": escaped}, {"x-ropeway-session": escaped}, {"x-request-id": "y" * 60_000}):
        assert stack.gateway.post(chat("hi", user=forged, cache_salt=forged), headers).status_code == 200
    assert stack.gateway.post(chat("hi", model=forged)).status_code == 404
    assert stack.gateway.post(chat("hi"), path=f"/v1/{escaped}").status_code < 500
    assert stack.gateway.http.get(f"/v1/models/{escaped}").status_code == 404
    assert "forged" not in stack.gateway.said()
    assert all(re.match(r"\d{4}-\d\d-\d\d \d\d:", line) for line in stack.gateway.said().splitlines())


def test_ids_of_models_may_have_slashes(tmp_path: Path) -> None:
    with (
        ScriptedWorker(model="org/base", adapters=("org/sub/sql",)) as worker,
        Gateway(tmp_path, [worker.url]) as gateway,
    ):
        listed = {entry["id"]: entry for entry in gateway.http.get("/v1/models").json()["data"]}
        assert listed["org/sub/sql"]["parent"] == "org/base"
        assert listed["org/base"]["max_model_len"] == 65_536
        for name, entry in listed.items():
            for spelled in (name, name.replace("/", "%2F")):
                assert gateway.http.get(f"/v1/models/{spelled}").json() == entry
            answer = gateway.post({"model": name, "prompt": [1, 2, 3], "max_tokens": 1}, path=COMPLETIONS)
            assert answer.json()["model"] == name
