"""What a request asks for, read off its head and its body."""

import json
from typing import Any

import pytest

from cachecore.scope import TenantId
from gateway.edge.http1 import parse_request_head
from gateway.edge.server import Inbound
from gateway.edge.targets import normalize_target
from gateway.errors import BadRequest, DuplicateKey, Unavailable
from gateway.requests import SESSION_CHARACTERS_MAX, Kind, Request, read_request, request_id_of
from gateway.tenants import Tenant

TENANT = Tenant(TenantId("acme"))
CHAT = "/v1/chat/completions"


class OnlyModel:
    def only_model(self) -> str:
        return "the-only-one"


class SeveralModels:
    def only_model(self) -> str:
        raise Unavailable("say which")


def inbound(body: bytes = b"", path: str = CHAT, *headers: str, method: str = "POST") -> Inbound:
    lines = [f"{method} {path} HTTP/1.1", "Host: h", f"Content-Length: {len(body)}", *headers]
    head = parse_request_head("\r\n".join(lines).encode("latin-1"))
    return Inbound(head, normalize_target(head.target)[1], body, "127.0.0.1")


def read(document: Any, path: str = CHAT, *headers: str) -> Request:
    return read_request(inbound(json.dumps(document).encode(), path, *headers), TENANT, SeveralModels())


# Budgets


@pytest.mark.parametrize(("stated", "seconds"), [("1", 0.001), ("2500", 2.5), ("3600000", 3600.0)])
def test_a_budget_is_read_in_milliseconds(stated: str, seconds: float) -> None:
    request = read({"model": "m", "messages": []}, CHAT, f"x-ropeway-ttft-budget-ms: {stated}")
    assert request.ttft_budget_seconds == seconds
    assert read({"model": "m", "messages": []}).ttft_budget_seconds is None


@pytest.mark.parametrize("stated", ["", "0", "-1", "1.5", "soon", "3600001", "9" * 50, "\xb2"])
def test_a_budget_that_is_none_is_refused(stated: str) -> None:
    with pytest.raises(BadRequest) as caught:
        read({"model": "m", "messages": []}, CHAT, f"x-ropeway-ttft-budget-ms: {stated}")
    assert caught.value.param == "x-ropeway-ttft-budget-ms"


# Kinds


@pytest.mark.parametrize(
    ("method", "target", "kind"),
    [
        ("POST", "/v1/chat/completions", Kind.CHAT),
        ("POST", "/v1/chat/completions/", Kind.CHAT),
        ("POST", "//v1//chat/completions", Kind.CHAT),
        ("POST", "/v1/chat/completions?x=1", Kind.CHAT),
        ("POST", "/v1/chat%2Fcompletions", Kind.CHAT),
        ("POST", "/v1/completions", Kind.COMPLETION),
        ("POST", "//v1/completions/", Kind.COMPLETION),
        ("GET", "/v1/chat/completions", None),
        ("GET", "/v1/completions/", None),
        ("POST", "/v1/embeddings", Kind.EMBEDDING),
        ("POST", "/v1/responses", Kind.RESPONSES),
        ("POST", "/v1/responses/", Kind.RESPONSES),
        ("POST", "/v1/messages", Kind.MESSAGES),
        ("POST", "/v1//messages/count_tokens", Kind.TOKENS),
        ("POST", "/v1/rerank", Kind.SCORING),
        ("POST", "/v2/rerank", Kind.SCORING),
        ("POST", "/rerank", Kind.SCORING),
        ("POST", "/v1/score", Kind.SCORING),
        ("POST", "/score", Kind.SCORING),
        ("POST", "/tokenize", Kind.TOKENS),
        ("POST", "/detokenize", Kind.TOKENS),
        ("GET", "/tokenize", None),
        ("GET", "/v1/messages", None),
        ("POST", "/v1/pooling", Kind.OTHER),
        ("GET", "/v1/responses/resp_1", Kind.OTHER),
        ("DELETE", "/v1/files/f", Kind.OTHER),
        ("POST", "/v1/audio/transcriptions", Kind.OTHER),
        ("PUT", "/v1/files/f", None),
        ("OPTIONS", "/v1/embeddings", None),
        ("HEAD", "/v1/embeddings", None),
        ("GET", "/v1/models", None),
        ("GET", "/v1/models/", None),
        ("GET", "/v1/models/org/model", None),
        ("DELETE", "/v1/models/m", None),
        ("POST", "/v1/load_lora_adapter", None),
        ("POST", "/v1/load_lora_adapter/", None),
        ("POST", "//v1//load_lora_adapter", None),
        ("POST", "/v1/load%5Flora%5Fadapter", None),
        ("POST", "/v1/%2Fload_lora_adapter", None),
        ("POST", "/v1/load_lora_adapter%2F", None),
        ("POST", "/v1/unload_lora_adapter?x", None),
        ("POST", "http://host/v1/load_lora_adapter", None),
        ("POST", "/v1/./load_lora_adapter", None),
        ("POST", "/v1/files/../load_lora_adapter", None),
        ("POST", "/v1/%2e%2e/sleep", None),
        ("POST", "/v1/..", None),
        ("GET", "/v1/files/.hidden", Kind.OTHER),
        ("POST", "/v1", None),
        ("POST", "/v1/", None),
        ("POST", "/v10/x", None),
        ("POST", "/sleep", None),
        ("POST", "/reset_prefix_cache", None),
        ("GET", "/healthz", None),
        ("POST", "/", None),
    ],
)
def test_kinds(method: str, target: str, kind: Kind | None) -> None:
    assert Kind.of(method, normalize_target(target.encode())[1]) is kind


# Ids


@pytest.mark.parametrize("value", ["abc", "A.b_c:d-9", "x" * 128])
def test_a_safe_id_is_kept(value: str) -> None:
    request = read({"model": "m"}, CHAT, f"X-Request-Id: {value}")
    assert request.id == value
    assert request.upstream_id.startswith(f"{value}-")


@pytest.mark.parametrize("value", ["", "x" * 129, "a b", "a%0aERROR forged?", "caf\xe9", 'a"b', "a/b", "a;b"])
def test_an_unsafe_id_is_replaced(value: str) -> None:
    message = inbound(b'{"model":"m"}', CHAT, f"X-Request-Id: {value}")
    request = read_request(message, TENANT, SeveralModels())
    assert request.id.startswith("req-")
    assert len(request.id) == 20
    assert request.upstream_id == request.id
    assert request_id_of(message.head).startswith("req-")


def test_ids_on_refusals() -> None:
    assert request_id_of(inbound(b"", CHAT, "X-Request-Id: abc").head) == "abc"
    assert request_id_of(None) != request_id_of(None)


def test_upstream_ids_are_unique() -> None:
    requests = [read({"model": "m", "request_id": "mine"}, CHAT, "X-Request-Id: same") for _ in range(50)]
    assert {request.id for request in requests} == {"same"}
    assert len({request.upstream_id for request in requests}) == 50
    sent = {json.loads(b"".join(request.upstream_body(None, False)))["request_id"] for request in requests}
    assert sent == {request.upstream_id for request in requests}


# Bodies


def test_the_keys_of_a_chat() -> None:
    request = read(
        {
            "model": "m",
            "messages": [],
            "cache_salt": "salt",
            "priority": -3,
            "max_tokens": 5,
            "max_completion_tokens": 7,
            "user": "u" * 300,
            "stream": True,
        },
        CHAT,
        "X-Ropeway-Policy: least-loaded",
    )
    assert (request.kind, request.path, request.model, request.tenant) == (Kind.CHAT, CHAT, "m", TENANT)
    assert (request.client_salt, request.priority, request.output_tokens_max) == ("salt", -3, 7)
    assert (request.session, request.policy) == ("u" * SESSION_CHARACTERS_MAX, "least-loaded")
    assert (request.prompts_count, request.skips_cache) == (1, False)


def test_absent_and_null_keys() -> None:
    nulls = dict.fromkeys(("cache_salt", "priority", "max_tokens", "user", "stream", "stream_options", "echo"))
    for document in ({"model": "m"}, {"model": "m", **nulls}):
        request = read(document)
        assert (request.client_salt, request.priority, request.output_tokens_max, request.session) == ("", 0, 0, "")
        assert not request.skips_cache


def test_a_session_header_goes_before_the_user() -> None:
    request = read({"model": "m", "user": "u"}, CHAT, "X-Ropeway-Session: s" + "s" * 300)
    assert request.session == "s" * SESSION_CHARACTERS_MAX
    assert read({"model": "m", "user": 5}).session == ""


@pytest.mark.parametrize(
    ("path", "keys", "skips"),
    [
        (CHAT, {"prompt_logprobs": 0}, True),
        ("/v1/completions", {"prompt_logprobs": 1}, True),
        (CHAT, {"prompt_logprobs": None}, False),
        ("/v1/completions", {"echo": True, "logprobs": 1}, True),
        ("/v1/completions", {"echo": True, "logprobs": 0}, True),
        ("/v1/completions", {"echo": 1, "logprobs": 0}, True),
        ("/v1/completions", {"echo": True}, False),
        ("/v1/completions", {"echo": True, "logprobs": None}, False),
        ("/v1/completions", {"echo": False, "logprobs": 1}, False),
        ("/v1/completions", {"logprobs": 1}, False),
        (CHAT, {"echo": True, "logprobs": True}, False),
    ],
)
def test_requests_that_read_no_cache(path: str, keys: dict[str, Any], skips: bool) -> None:
    assert read({"model": "m", **keys}, path).skips_cache is skips


@pytest.mark.parametrize(
    ("document", "param"),
    [
        ({}, "model"),
        ({"model": None}, "model"),
        ({"model": ""}, "model"),
        ({"model": 5}, "model"),
        ({"model": ["m"]}, "model"),
        ({"model": "m", "stream": "yes"}, "stream"),
        ({"model": "m", "cache_salt": 5}, "cache_salt"),
    ],
)
def test_keys_of_the_wrong_type(document: dict[str, Any], param: str) -> None:
    with pytest.raises(BadRequest) as caught:
        read(document)
    assert caught.value.param == param


@pytest.mark.parametrize("body", [b"", b"[]", b"nonsense", b'{"model":"m"}x', b'\xef\xbb\xbf{"model":"m"}'])
@pytest.mark.parametrize("path", [CHAT, "/v1/completions"])
def test_bodies_that_are_no_objects(path: str, body: bytes) -> None:
    with pytest.raises(BadRequest):
        read_request(inbound(body, path), TENANT, OnlyModel())


def test_the_type_of_a_named_route_does_not_matter() -> None:
    assert read({"model": "m"}, CHAT, "Content-Type: text/plain").model == "m"


# What goes upstream


def test_a_body_goes_on_as_received() -> None:
    data = b'{ "model":"m", "seed": 9007199254740993, "x_unknown":{"a":[1,null,1e-7]} }'
    request = read_request(inbound(data), TENANT, SeveralModels())
    assert request.upstream_body(None, False) == [data]
    salted = b"".join(request.upstream_body(b'"minted"', False))
    assert salted == data.replace(b"{", b'{"cache_salt":"minted",', 1)


def test_the_gateways_keys_are_set() -> None:
    data = b'{"model":"m","cache_salt":"theirs","kv_transfer_params":{"do_remote_decode":true},"n":1}'
    request = read_request(inbound(data), TENANT, SeveralModels())
    assert json.loads(b"".join(request.upstream_body(b'"minted"', False))) == {
        "model": "m",
        "cache_salt": "minted",
        "n": 1,
    }
    assert request.upstream_body(None, True) == [data]


# Other routes


@pytest.mark.parametrize(
    "content_type",
    ["", "Content-Type: application/json", "Content-Type: Application/JSON; charset=utf-8", "Content-Type: text/plain"],
)
def test_other_bodies_are_read_whatever_they_are_called(content_type: str) -> None:
    data = b'{"model":"m","input":"x","cache_salt":"stolen","kv_transfer_params":{}}'
    headers = [content_type] if content_type else []
    request = read_request(inbound(data, "/v1/responses", *headers), TENANT, SeveralModels())
    assert (request.kind, request.model) == (Kind.RESPONSES, "m")
    assert json.loads(b"".join(request.upstream_body(b'"minted"', False))) == {
        "model": "m",
        "input": "x",
        "cache_salt": "minted",
    }


def test_other_bodies_that_hide_their_keys_are_refused() -> None:
    for data in ('{"model":"m"}'.encode("utf-16"), b'{"model":"m","cache_salt":"a","cache_salt":"b"}', b"[1]"):
        with pytest.raises(BadRequest):
            read_request(inbound(data, "/v1/responses", "Content-Type: text/plain"), TENANT, OnlyModel())
    with pytest.raises(DuplicateKey):
        read_request(inbound(b'{"mod\\u0065l":"m"}', "/v1/embeddings"), TENANT, OnlyModel())


def test_other_routes_need_no_model() -> None:
    assert read_request(inbound(b'{"input":"x"}', "/v1/embeddings"), TENANT, OnlyModel()).model == "the-only-one"
    request = read_request(inbound(b"", "/v1/files/f", method="GET"), TENANT, OnlyModel())
    assert (request.model, request.body, request.upstream_body(b'"minted"', False)) == ("the-only-one", None, [])
    with pytest.raises(Unavailable):
        read_request(inbound(b"", "/v1/files/f", method="GET"), TENANT, SeveralModels())


def form(*parts: bytes) -> bytes:
    return b"".join(b"--b\r\nContent-Disposition: form-data; %b\r\n" % part for part in parts) + b"--b--\r\n"


@pytest.mark.parametrize(
    ("parts", "model"),
    [
        ([b'name="model"\r\n\r\nwhisper'], "whisper"),
        ([b"name=model\r\n\r\nwhisper"], "whisper"),
        ([b'name="model"\r\nContent-Type: text/plain\r\n\r\nwhisper'], "whisper"),
        ([b'name="file"; filename="a.wav"\r\n\r\n\x00\xff\r\n', b'name="model"\r\n\r\norg/whisper'], "org/whisper"),
        ([b'name="file"; filename="model"\r\n\r\nwrong', b'name="model"\r\n\r\nright'], "right"),
        ([b'name="remodel"\r\n\r\nwrong'], "the-only-one"),
        ([b'name="language"\r\n\r\nen'], "the-only-one"),
    ],
)
def test_the_model_of_a_form(parts: list[bytes], model: str) -> None:
    data = form(*[part + b"\r\n" for part in parts])
    message = inbound(data, "/v1/audio/transcriptions", "Content-Type: Multipart/form-data; boundary=b")
    request = read_request(message, TENANT, OnlyModel())
    assert request.model == model
    assert request.upstream_body(b'"minted"', False) == [data]


# The first of two legs


def prefill_body(document: Any, path: str = CHAT, salt: bytes | None = b'"s"') -> Any:
    return json.loads(b"".join(read(document, path).prefill_body(salt, "leg-1")))


PROMPT = {
    "model": "m",
    "messages": [{"role": "user", "content": "hi"}],
    "tools": [{"type": "function", "function": {"name": "f"}}],
    "chat_template_kwargs": {"thinking": False},
    "seed": 7,
    "temperature": 0.5,
    "user": "u",
    "response_format": {"type": "text"},
}


def test_a_prefill_asks_for_one_token_of_the_same_prompt() -> None:
    answer = {
        "stream": True,
        "stream_options": {"include_usage": True},
        "n": 3,
        "stop": ["x"],
        "logprobs": True,
        "top_logprobs": 4,
        "min_tokens": 20,
        "kv_transfer_params": {"remote_host": "10.0.0.1"},
        "max_tokens": 900,
    }
    assert prefill_body({**PROMPT, **answer}) == {**PROMPT, "max_tokens": 1, "cache_salt": "s"}


@pytest.mark.parametrize(
    ("lengths", "asked"),
    [
        ({}, {"max_tokens": 1}),
        ({"max_completion_tokens": 50}, {"max_completion_tokens": 1}),
        ({"max_completion_tokens": 50, "max_tokens": None}, {"max_completion_tokens": 1, "max_tokens": 1}),
    ],
)
def test_the_length_is_asked_for_as_the_client_does(lengths: Any, asked: Any) -> None:
    assert prefill_body({**PROMPT, **lengths}, salt=None) == {**PROMPT, **asked}


@pytest.mark.parametrize(
    ("choice", "sent"),
    [
        ("auto", "auto"),
        ("none", "none"),
        ("required", "none"),
        ({"type": "function", "function": {"name": "f"}}, "none"),
    ],
)
def test_a_prefill_calls_no_tool(choice: Any, sent: str) -> None:
    assert prefill_body({**PROMPT, "tool_choice": choice})["tool_choice"] == sent


def test_a_completions_prefill() -> None:
    document = {"model": "m", "prompt": [1, 2, 3], "echo": True, "request_id": "mine", "cache_salt": "mine"}
    sent = prefill_body(document, "/v1/completions")
    assert sent == {"model": "m", "prompt": [1, 2, 3], "request_id": "leg-1", "cache_salt": "s", "max_tokens": 1}


def test_the_bytes_of_the_prompt_stay_as_they_are() -> None:
    raw = b'{"model" : "m",  "messages":[ {"role":"user","content":"\\u00e9  \\/"} ], "big": 12345678901234567890123}'
    request = read_request(inbound(raw, CHAT), TENANT, SeveralModels())
    assert b"".join(request.prefill_body(None, "leg")) == raw.replace(b"{", b'{"max_tokens":1,', 1)


def test_what_else_is_to_be_set_is() -> None:
    request = read({**PROMPT, "priority": 9})
    sent = json.loads(b"".join(request.prefill_body(None, "leg", {"priority": None})))
    assert "priority" not in sent
