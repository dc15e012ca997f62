"""What is asked in place of what, and which prompt a request is named by."""

from typing import Any

import orjson
import pytest

from cachecore.scope import TenantId
from gateway.api.errors import Untranslatable
from gateway.api.forms import FORMS, Asked
from gateway.api.prompts import prompt_of, weight_tokens
from gateway.api.translator import inbound_of
from gateway.edge.http1 import parse_request_head
from gateway.edge.server import Inbound
from gateway.errors import UpstreamFailed
from gateway.requests import Request, read_request
from gateway.tenants import Tenant

TURNS = [{"role": "user", "content": "hi"}]


class Models:
    def only_model(self) -> str:
        return "the-only-one"


def inbound(path: str, body: dict[str, Any], *headers: str) -> Inbound:
    data = orjson.dumps(body)
    lines = [f"POST {path} HTTP/1.1", "Host: h", f"Content-Length: {len(data)}", *headers]
    return Inbound(parse_request_head("\r\n".join(lines).encode()), path, data, "127.0.0.1")


def read(path: str, **body: Any) -> Request:
    return read_request(inbound(path, {"model": "m", **body}), Tenant(TenantId("acme")), Models())


def test_a_chat_is_asked_in_place_of_messages_with_the_clients_other_headers() -> None:
    body = {"model": "m", "max_tokens": 3, "messages": TURNS}
    given = inbound("/v1/messages", body, "x-api-key: secret", "anthropic-version: 1", "x-ropeway-session: s")
    asked = inbound_of(given, Asked(FORMS["/v1/messages"], body))
    assert (asked.path, asked.head.target) == ("/v1/chat/completions", b"/v1/chat/completions")
    assert orjson.loads(asked.body) == body
    assert asked.head.length == len(asked.body)
    fields = dict(asked.head.headers)
    assert (fields[b"authorization"], fields[b"x-ropeway-session"]) == (b"Bearer secret", b"s")
    assert {b"x-api-key", b"anthropic-version"}.isdisjoint(fields)
    again = inbound_of(given, Asked(FORMS["/v1/messages"], {**body, "max_tokens": 30}))
    assert again.head.headers is asked.head.headers
    assert again.head.length == asked.head.length + 1


def test_counting_is_asked_of_the_tokenizer() -> None:
    form = FORMS["/v1/messages/count_tokens"]
    asked = orjson.loads(Asked(form, {"model": "m", "system": "s", "messages": TURNS}).body())
    assert asked == {
        "model": "m",
        "add_generation_prompt": True,
        "messages": [{"role": "system", "content": "s"}, *TURNS],
    }
    assert form.answer({"count": 5, "tokens": []}, {}) == {"input_tokens": 5}
    with pytest.raises(UpstreamFailed):
        form.answer({"tokens": []}, {})


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/responses"])
@pytest.mark.parametrize(
    "odd",
    [
        {"messages": [{"role": "user", "content": [{"type": ["x"]}]}], "input": [{"type": ["x"]}]},
        {"messages": [{"role": "user", "content": [7]}], "input": [7]},
        {"messages": {"a": 1}, "input": {"a": 1}},
        {"messages": TURNS, "input": "hi", "tools": [{"type": "function", "input_schema": 1}, 7]},
    ],
)
def test_what_no_client_would_send_is_refused_and_has_no_name(path: str, odd: dict[str, Any]) -> None:
    request = read(path, max_tokens=3, **odd)
    with pytest.raises(Untranslatable):
        Asked(FORMS[path], request.values).body()
    assert prompt_of(request) is None


def test_arguments_nested_too_deeply_are_refused() -> None:
    deep: Any = {}
    for _ in range(900):
        deep = {"a": deep}
    for _ in range(200):
        deep = [deep]
    block = {"type": "tool_use", "id": "t", "name": "n", "input": {"a": deep}}
    body = {"model": "m", "max_tokens": 3, "messages": [{"role": "assistant", "content": [block]}]}
    with pytest.raises(Untranslatable):
        Asked(FORMS["/v1/messages"], body).body()


@pytest.mark.parametrize(
    ("path", "body", "prompt"),
    [
        ("/v1/messages", {"messages": TURNS, "system": "s"}, [{"role": "system", "content": "s"}, *TURNS]),
        ("/v1/responses", {"input": "hi"}, TURNS),
        ("/v1/responses", {"input": "hi", "previous_response_id": "r"}, None),
        ("/v1/embeddings", {"messages": TURNS}, TURNS),
        ("/v1/rerank", {"query": "q", "documents": ["d"]}, None),
        ("/tokenize", {"messages": TURNS}, None),
    ],
)
def test_chats_that_requests_are_named_by(path: str, body: dict[str, Any], prompt: Any) -> None:
    found = prompt_of(read(path, **body))
    assert (found and found["messages"]) == prompt


def test_embeddings_are_named_by_their_input_and_open_no_answer() -> None:
    assert prompt_of(read("/v1/embeddings", input=["a", "b"])) == {"prompt": ["a", "b"]}
    found = prompt_of(read("/v1/embeddings", messages=TURNS))
    assert found is not None
    assert found["add_generation_prompt"] is False
    assert prompt_of(read("/v1/embeddings", input=7)) is None


def test_what_is_not_read_weighs_what_is_computed_for_it() -> None:
    query, documents = "q" * 400, ["d" * 40] * 10
    one = weight_tokens(read("/v1/rerank", query=query, documents=documents[:1]))
    ten = weight_tokens(read("/v1/rerank", query=query, documents=documents))
    assert ten - one == pytest.approx(9 * 110, rel=0.05)
    assert weight_tokens(read("/tokenize", prompt="x" * 4000)) == 0


@pytest.mark.parametrize(
    ("path", "body", "session", "output_tokens"),
    [
        ("/v1/messages", {"metadata": {"user_id": "u"}, "max_tokens": 9}, "u", 9),
        ("/v1/responses", {"prompt_cache_key": "k", "user": "u", "max_output_tokens": 8}, "k", 8),
        ("/v1/responses", {"user": "u"}, "u", 0),
        ("/v1/embeddings", {"user": "u", "max_output_tokens": 8}, "u", 0),
    ],
)
def test_options_are_read_where_each_form_has_them(
    path: str, body: dict[str, Any], session: str, output_tokens: int
) -> None:
    request = read(path, **body)
    assert (request.session, request.output_tokens_max) == (session, output_tokens)
    assert request.foreign
