"""What a client writes is what a worker reads; what another reader could read differently is refused."""

import base64
import json
import re
from collections.abc import Sequence
from typing import Any

import httpx
import pytest

from tests.gateway.end_to_end.conftest import Stack
from tests.gateway.end_to_end.processes import MODEL, chat

ECHO = {"x-simulate": '{"echo": true}'}
# Numbers that a float cannot hold or would write otherwise, nulls, order, spacing and escapes, all as written.
ODD_MEMBERS = (
    b'"zeta": 1, "alpha" :9007199254740993,\n\t"tiny":1e-7, "huge": 123456789012345678901234567890, "negative": -0.0, '
    b'"nested": {"b": null, "a": [null, {"x": null, "1": [ ]}], "b2": 1.10}, "text": "\\u00e9 \xc3\xa9 '
    b'\xe6\x95\xb0 \xf0\x9f\x99\x82 \\/ \\ud83d\\ude42", "Model": "not the model", "empty": {}, "twice": 1, "twice": 2'
)
PLAIN = b'"model":"simulated","messages":[{"role":"user","content":"hi","x-custom":12345678901234567890}]'


def echo(stack: Stack, content: bytes, headers: dict[str, str] | None = None) -> dict[str, Any]:
    answer = stack.gateway.post(content, {**ECHO, **(headers or {})})
    assert answer.status_code == 200, answer.text
    document: dict[str, Any] = answer.json()
    document["body"] = base64.b64decode(document["body_base64"])
    document["fields"] = {name.lower(): value for name, value in document["headers"]}
    return document


def without_salt(body: bytes) -> bytes:
    """The body as it was before the gateway set its salt, which it does at the front."""
    match = re.match(rb'\{"cache_salt":"rw1\.default\.0\.[0-9]\.[^"]+",', body)
    assert match, body[:120]
    return b"{" + body[match.end() :]


def test_every_unknown_field_arrives_byte_for_byte(stack: Stack) -> None:
    sent = b" {" + PLAIN + b", " + ODD_MEMBERS + b" } \n"
    received = echo(stack, sent)["body"]
    assert received.startswith(b" {")
    assert without_salt(received[1:]) == sent[1:]


def test_large_and_small_numbers_stay_exact(stack: Stack) -> None:
    received = echo(stack, b"{" + PLAIN + b"," + ODD_MEMBERS + b"}")["body"]
    document = json.loads(received, parse_float=str)
    assert document["alpha"] == 2**53 + 1
    assert document["tiny"] == "1e-7"
    assert document["nested"] == {"b": None, "a": [None, {"x": None, "1": []}], "b2": "1.10"}
    assert list(document)[:5] == ["cache_salt", "model", "messages", "zeta", "alpha"]


def test_a_clients_salt_is_replaced_where_it_stands(stack: Stack) -> None:
    received = echo(stack, b'{"cache_salt": "mine", ' + PLAIN + b', "last": 1e-7}')["body"]
    match = re.fullmatch(rb'\{"cache_salt": "(rw1\.default\.0\.0\.[^"]+)", (.*), "last": 1e-7\}', received)
    assert match
    assert match[2] == PLAIN
    assert b"mine" not in match[1]
    # Equal salts mint equal strings, so that engines can share; others do not.
    again = json.loads(echo(stack, b'{"cache_salt": "mine", ' + PLAIN + b"}")["body"])["cache_salt"]
    other = json.loads(echo(stack, b'{"cache_salt": "other", ' + PLAIN + b"}")["body"])["cache_salt"]
    assert again == match[1].decode()
    assert other != again


def test_kv_transfer_params_are_stripped_and_nothing_else(stack: Stack) -> None:
    received = echo(stack, b'{"kv_transfer_params": {"do_remote_prefill": true}, ' + PLAIN + b',"tiny":1e-7}')["body"]
    assert without_salt(received) == b"{" + PLAIN + b',"tiny":1e-7}'


def test_a_request_id_in_the_body_is_replaced_by_the_unique_one(stack: Stack) -> None:
    document = echo(stack, b'{"request_id": "again", ' + PLAIN + b"}", {"x-request-id": "client-1"})
    body = json.loads(document["body"])
    assert body["request_id"] == document["fields"]["x-request-id"]
    assert body["request_id"] != "again"


def test_headers_that_belong_to_the_connection_do_not_travel(stack: Stack) -> None:
    sent = {
        "connection": "x-hop, keep-alive",
        "x-hop": "1",
        "keep-alive": "timeout=5",
        "te": "trailers",
        "proxy-authorization": "Basic eDp5",
        "x-kept": "yes",
        "accept": "application/json",
        "authorization": "Bearer engine-key",
        "x-ropeway-session": "me",
    }
    document = echo(stack, b"{" + PLAIN + b"}", sent)
    fields = document["fields"]
    gone = ("connection", "x-hop", "keep-alive", "te", "proxy-authorization", "transfer-encoding", "x-ropeway-session")
    assert [name for name in gone if name in fields] == []
    assert fields["host"] in stack.fleet.names
    assert fields["x-kept"] == "yes"
    assert fields["accept"] == "application/json"
    # Without tenants the key is not ours: it is the engine's.
    assert fields["authorization"] == "Bearer engine-key"
    assert int(fields["content-length"]) == len(document["body"])
    assert document["path"] == "/v1/chat/completions"


def test_the_client_gets_its_request_id_and_the_worker_a_unique_one(stack: Stack) -> None:
    upstream = []
    for _ in range(2):
        answer = stack.gateway.post(b"{" + PLAIN + b"}", {**ECHO, "x-request-id": "my-id"})
        assert answer.headers.get_list("x-request-id") == ["my-id"]
        upstream.append({name.lower(): value for name, value in answer.json()["headers"]}["x-request-id"])
    assert all(re.fullmatch(r"my-id-[0-9a-f]{16}", value) for value in upstream), upstream
    assert upstream[0] != upstream[1]
    unnamed = stack.gateway.post(b"{" + PLAIN + b"}", ECHO)
    assert re.fullmatch(r"req-[0-9a-f]{16}", unnamed.headers["x-request-id"])
    unfit = stack.gateway.post(b"{" + PLAIN + b"}", {**ECHO, "x-request-id": "no spaces please"})
    assert re.fullmatch(r"req-[0-9a-f]{16}", unfit.headers["x-request-id"])


def test_the_query_string_travels(stack: Stack) -> None:
    answer = stack.gateway.post(b"{" + PLAIN + b"}", ECHO, "/v1/chat/completions?api-version=1&x=%20")
    assert answer.json()["path"] == "/v1/chat/completions?api-version=1&x=%20"


# Refusals


def refused(answer: httpx.Response, status: int, **expected: Any) -> dict[str, Any]:
    """An OpenAI error object with everything that belongs to it."""
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/json"
    assert answer.headers["x-request-id"]
    error: dict[str, Any] = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    assert {name: error[name] for name in expected} == expected
    return error


CONTROL_KEYS = (
    "model",
    "messages",
    "stream",
    "cache_salt",
    "kv_transfer_params",
    "priority",
    "request_id",
    "user",
    "n",
)


def escaped(key: str) -> bytes:
    return f'"\\u{ord(key[0]):04x}{key[1:]}"'.encode()


@pytest.mark.parametrize("key", CONTROL_KEYS)
def test_a_control_key_spelled_twice_is_refused(stack: Stack, key: str) -> None:
    values: Sequence[bytes] = (b'"a"', b'"b"')
    members = b",".join(b'"%b":%b' % (key.encode(), value) for value in values)
    refused(stack.gateway.post(b"{" + PLAIN + b"," + members + b"}"), 400, param=key, code="duplicate_key")


@pytest.mark.parametrize("key", CONTROL_KEYS)
def test_a_control_key_spelled_with_escapes_is_refused(stack: Stack, key: str) -> None:
    body = b"{" + PLAIN + b"," + escaped(key) + b":null}"
    refused(stack.gateway.post(body), 400, param=key, code="duplicate_key", type="invalid_request_error")


def test_equal_values_are_refused_too(stack: Stack) -> None:
    refused(stack.gateway.post(b"{" + PLAIN + b',"model":"simulated"}'), 400, param="model", code="duplicate_key")


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b'"text"',
        b"null",
        b'{"model": simulated}',
        b"{" + PLAIN + b"} x",
        b'{"model":"\xff"}',
        b"nope",
    ],
)
def test_what_is_not_a_json_object_is_refused(stack: Stack, body: bytes) -> None:
    refused(stack.gateway.post(body), 400, type="invalid_request_error")


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"model": MODEL, "messages": []}, "messages"),
        ({"model": MODEL}, "messages"),
        ({"model": MODEL, "messages": "hi"}, "messages"),
        ({"model": MODEL, "messages": None}, "messages"),
        ({"model": MODEL, "messages": [None]}, "messages"),
        ({"model": MODEL, "messages": [], "stream": True}, "messages"),
        ({"messages": [{"role": "user", "content": "hi"}]}, "model"),
        ({**chat("hi"), "model": 7}, "model"),
        ({**chat("hi"), "model": ""}, "model"),
        ({**chat("hi"), "stream": "yes"}, "stream"),
        ({**chat("hi"), "cache_salt": ["x"]}, "cache_salt"),
    ],
)
def test_a_request_that_cannot_be_understood_names_the_field(stack: Stack, body: dict[str, Any], param: str) -> None:
    refused(stack.gateway.post(body), 400, param=param, type="invalid_request_error")


@pytest.mark.parametrize("prompt", [None, [], {}, [1, "a"], [[1], "a"], [-1], [2**40]])
def test_a_prompt_that_is_none_names_the_field(stack: Stack, prompt: Any) -> None:
    refused(stack.gateway.post({"model": MODEL, "prompt": prompt}, path="/v1/completions"), 400, param="prompt")


def test_an_unknown_model_is_not_found(stack: Stack) -> None:
    error = refused(stack.gateway.post(chat("hi", model="other")), 404, code="model_not_found", param="model")
    assert "'other'" in error["message"]
    refused(stack.gateway.http.get("/v1/models/other"), 404, code="model_not_found")


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        ("GET", "/v1/chat/completions", "POST"),
        ("DELETE", "/v1/completions", "POST"),
        ("POST", "/v1/models", "GET"),
        ("GET", "/route/explain", "POST"),
        ("PUT", "/healthz", "GET"),
    ],
)
def test_a_wrong_method_is_told_which_is_right(stack: Stack, method: str, path: str, allowed: str) -> None:
    answer = stack.gateway.http.request(method, path)
    refused(answer, 405, code="method_not_allowed")
    assert allowed in answer.headers["allow"]


@pytest.mark.parametrize(
    "path", ["/nothing", "/v1/load_lora_adapter", "/reset_prefix_cache", "/sleep", "/v1/%2e%2e/reset_prefix_cache"]
)
def test_routes_that_change_a_worker_are_not_passed_on(stack: Stack, path: str) -> None:
    refused(stack.gateway.post(chat("hi"), path=path), 404)


def test_other_inference_routes_pass_through(stack: Stack) -> None:
    answer = stack.gateway.post({"model": MODEL, "input": "embed me"}, ECHO, "/v1/embeddings")
    document = answer.json()
    assert document["path"] == "/v1/embeddings"
    assert base64.b64decode(document["body_base64"]) == json.dumps({"model": MODEL, "input": "embed me"}).encode()
    assert answer.headers["x-ropeway-worker"] in stack.fleet.names
