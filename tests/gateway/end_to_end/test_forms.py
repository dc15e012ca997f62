"""Routes besides chats and completions, through a real gateway: asked as chats, or left as they are."""

import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from tests.clients.talking import MODEL as TALKING
from tests.clients.talking import SAID, TalkingWorker
from tests.gateway.api.events import parsed
from tests.gateway.end_to_end.conftest import Stack
from tests.gateway.end_to_end.processes import MODEL, Gateway, full_hit, matched_tokens, worker_of

MESSAGES, RESPONSES = "/v1/messages", "/v1/responses"
LONG = "What is asked in every form alike, long enough for several blocks of tokens. " * 3


def message(content: str = LONG, **fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "max_tokens": 4, "messages": [{"role": "user", "content": content}], **fields}


# Asked as chats


def test_one_prompt_in_three_forms_is_one_prefix(stack: Stack) -> None:
    chat = {"model": MODEL, "messages": [{"role": "user", "content": LONG}], "max_tokens": 4}
    first = stack.gateway.post(chat)
    stack.gateway.wait_confirmed(chat, worker_of(first), full_hit(chat))
    for path, body in (
        (MESSAGES, message()),
        (RESPONSES, {"model": MODEL, "input": LONG, "max_output_tokens": 4}),
    ):
        answer = stack.gateway.post(body, path=path)
        assert answer.status_code == 200, answer.text
        assert (worker_of(answer), matched_tokens(answer)) == (worker_of(first), full_hit(chat))
    usage = answer.json()["usage"]
    assert usage["input_tokens_details"]["cached_tokens"] == full_hit(chat)


def test_a_stream_tells_its_input_ahead_and_its_usage_at_the_end(stack: Stack) -> None:
    answer = stack.gateway.post(message(stream=True), path=MESSAGES)
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert answer.headers["request-id"] == answer.headers["x-request-id"]
    events = parsed(answer.content)
    usage = events[-2]["usage"]
    total = usage["input_tokens"] + usage["cache_read_input_tokens"]
    assert events[0]["message"]["usage"]["input_tokens"] == total
    assert usage["output_tokens"] == 4


def test_a_client_of_http_1_0_gets_events_until_the_end(stack: Stack) -> None:
    parts = urlsplit(stack.gateway.url)
    body = json.dumps(message("hi", stream=True)).encode()
    head = f"POST {MESSAGES} HTTP/1.0\r\ncontent-length: {len(body)}\r\n\r\n".encode()
    with socket.create_connection((parts.hostname or "", parts.port or 0), timeout=30) as wire:
        wire.sendall(head + body)
        answer = b"".join(iter(lambda: wire.recv(65_536), b""))
    head, _, events = answer.partition(b"\r\n\r\n")
    assert b"connection: close" in head
    assert parsed(events)[-1] == {"type": "message_stop"}


def test_tokens_are_counted_as_the_worker_counts_them(stack: Stack) -> None:
    counted = stack.gateway.post(message(system="Be kind."), path="/v1/messages/count_tokens").json()
    usage = stack.gateway.post(message(system="Be kind."), path=MESSAGES).json()["usage"]
    assert counted == {"input_tokens": usage["input_tokens"] + usage["cache_read_input_tokens"]}


def test_a_worker_that_is_out_of_order_is_told_in_the_clients_form(stack: Stack) -> None:
    fault = {"x-simulate": json.dumps({"status": 400, "body": {"error": {"message": "too long", "type": "x"}}})}
    answer = stack.gateway.post(message(), fault, MESSAGES)
    assert answer.status_code == 400
    assert answer.json() == {"type": "error", "error": {"type": "invalid_request_error", "message": "too long"}}
    answer = stack.gateway.post({"model": MODEL, "input": "hi"}, fault, RESPONSES)
    assert answer.json()["error"]["message"] == "too long"


def test_a_stream_that_breaks_off_ends_with_an_error_and_without_its_end(stack: Stack) -> None:
    fault = {"x-simulate": json.dumps({"die_after_chunks": 3})}
    body = json.dumps(message("A stream that breaks.", stream=True, max_tokens=64))
    headers = {"content-type": "application/json", **fault}
    pieces: list[bytes] = []
    with (
        pytest.raises(httpx.RemoteProtocolError),
        stack.gateway.http.stream("POST", MESSAGES, content=body, headers=headers) as answer,
    ):
        pieces.extend(answer.iter_raw())
    kinds = [event["type"] for event in parsed(b"".join(pieces))]
    assert kinds[0] == "message_start"
    assert kinds[-1] == "error"
    stack.gateway.wait_idle()


def test_a_client_that_leaves_takes_its_request_along(stack: Stack) -> None:
    streamed = (
        (MESSAGES, message("A long answer.", stream=True, max_tokens=100_000)),
        (RESPONSES, {"model": MODEL, "input": "Another.", "stream": True, "max_output_tokens": 100_000}),
    )
    for path, body in streamed:
        with stack.gateway.http.stream("POST", path, json=body) as answer:
            assert b"event: " in next(answer.iter_raw())
    with pytest.raises(httpx.ReadTimeout):
        stack.gateway.http.post(MESSAGES, json=message("A long whole answer.", max_tokens=100_000), timeout=0.5)
    stack.gateway.wait_idle()
    assert sum(stack.fleet.sample(name, "vllm:num_requests_running") for name in stack.fleet.names) == 0


@pytest.mark.parametrize("path", ["/v1/embeddings", "/v1/rerank", "/v1/score"])
def test_what_no_worker_computes_is_said_plainly(stack: Stack, path: str) -> None:
    answer = stack.gateway.post({"model": MODEL, "input": "x", "query": "q", "documents": ["d"]}, path=path)
    assert answer.status_code == 404
    assert answer.json()["error"]["message"] == f"there is no {path} here"
    stack.gateway.wait_idle()


def test_an_answer_that_breaks_off_whole_is_refused(stack: Stack) -> None:
    fault = {"x-simulate": json.dumps({"cut_stream_bytes": 40})}
    answer = stack.gateway.post(message("An answer that breaks."), fault, MESSAGES)
    assert answer.status_code == 502
    assert answer.json()["error"]["type"] == "api_error"


@pytest.mark.parametrize(
    ("body", "status", "kind"),
    [
        (b"{", 400, "invalid_request_error"),
        (b"", 400, "invalid_request_error"),
        (json.dumps({**message(), "model": "gone"}).encode(), 404, "not_found_error"),
        (json.dumps({**message(), "messages": []}).encode(), 400, "invalid_request_error"),
        (
            json.dumps({**message(), "messages": [{"role": "user", "content": [1]}]}).encode(),
            400,
            "invalid_request_error",
        ),
        (b'{"model":"simulated","system":"a","system":"b","messages":[],"max_tokens":1}', 400, "invalid_request_error"),
    ],
)
def test_mistakes_are_told_in_anthropics_form(stack: Stack, body: bytes, status: int, kind: str) -> None:
    answer = stack.gateway.post(body, path=MESSAGES)
    assert answer.status_code == status, answer.text
    assert (answer.json()["type"], answer.json()["error"]["type"]) == ("error", kind)


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/responses", "/v1/embeddings", "/tokenize", "/rerank"])
def test_nothing_but_posts_come_there(stack: Stack, path: str) -> None:
    answer = stack.gateway.http.get(path)
    assert (answer.status_code, answer.headers["allow"]) == (405, "POST")
    if path == "/v1/messages":
        assert answer.json()["type"] == "error"


def test_token_ids_of_a_worker(stack: Stack) -> None:
    tokens = stack.gateway.post({"model": MODEL, "prompt": "abc"}, path="/tokenize")
    assert tokens.json()["tokens"] == list(b"abc")
    assert worker_of(tokens) in stack.fleet.names
    text = stack.gateway.post({"model": MODEL, "tokens": list(b"abc")}, path="/detokenize")
    assert text.json() == {"prompt": "abc"}


# Left as they are


@pytest.fixture(scope="module")
def native(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[TalkingWorker, Gateway]]:
    """An engine that is taken for vLLM, and answers these routes itself."""
    paths = (MESSAGES, "/v1/messages/count_tokens", RESPONSES, "/v1/embeddings", "/v1/rerank", "/v1/score")
    with (
        TalkingWorker(native=paths, engine="vllm") as worker,
        Gateway(tmp_path_factory.mktemp("native"), [worker.url]) as gateway,
    ):
        yield worker, gateway


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (MESSAGES, {"model": TALKING, "max_tokens": 4, "messages": [{"role": "user", "content": "hi"}], "odd": [1]}),
        (RESPONSES, {"model": TALKING, "input": "hi", "previous_response_id": "resp_1"}),
        ("/v1/embeddings", {"model": TALKING, "input": ["a", "b"], "encoding_format": "base64"}),
        ("/v1/rerank", {"model": TALKING, "query": "q", "documents": ["a", "b"]}),
        ("/v1/score", {"model": TALKING, "text_1": "a", "text_2": ["b"]}),
    ],
)
def test_what_an_engine_serves_itself_reaches_it_with_a_salt_alone(
    native: tuple[TalkingWorker, Gateway], path: str, body: dict[str, Any]
) -> None:
    _, gateway = native
    received = gateway.post(body, path=path).json()["native"]
    assert received.pop("cache_salt").startswith("rw1.default.")
    assert received == body


def test_tokens_of_messages_are_counted_by_who_answers_them(native: tuple[TalkingWorker, Gateway]) -> None:
    _, gateway = native
    body = {"model": TALKING, "messages": [{"role": "user", "content": "hi"}]}
    assert gateway.post(body, path="/v1/messages/count_tokens").json() == {"native": body}


def test_one_worker_that_serves_it_not_has_all_asked_alike(tmp_path: Path) -> None:
    body = {"model": TALKING, "max_tokens": 4, "messages": [{"role": "user", "content": "hi"}]}
    with (
        TalkingWorker(native=(MESSAGES,), engine="vllm") as able,
        TalkingWorker(engine="vllm") as unable,
        Gateway(tmp_path, [able.url, unable.url]) as gateway,
    ):
        for _ in range(4):
            assert gateway.post(body, path=MESSAGES).json()["content"][0]["text"] == SAID


def test_an_engine_that_takes_no_salt_there_is_asked_for_a_chat(tmp_path: Path) -> None:
    with TalkingWorker(native=(MESSAGES,), engine="sglang") as worker, Gateway(tmp_path, [worker.url]) as gateway:
        body = {"model": TALKING, "max_tokens": 4, "messages": [{"role": "user", "content": "hi"}]}
        assert gateway.post(body, path=MESSAGES).json()["content"][0]["text"] == SAID
    assert [asked[2]["cache_salt"][:4] for asked in worker.asked if asked[0] == "/v1/chat/completions"] == ["rw1."]


def test_never_translated_whatever_comes_of_it(tmp_path: Path) -> None:
    with TalkingWorker() as worker, Gateway(tmp_path, [worker.url], {"api": {"translation": "never"}}) as gateway:
        body = {"model": TALKING, "max_tokens": 4, "messages": [{"role": "user", "content": "hi"}]}
        assert gateway.post(body, path=MESSAGES).status_code == 404


# Lists of models


def test_a_model_has_every_field_that_some_worker_says(tmp_path: Path) -> None:
    with (
        TalkingWorker(entry={"max_model_len": 8192, "first": {"a": [1]}}) as one,
        TalkingWorker(entry={"second": True, "owned_by": "ropeway"}) as other,
        Gateway(tmp_path, [one.url, other.url]) as gateway,
    ):
        (entry,) = gateway.http.get("/v1/models").json()["data"]
        assert (entry["first"], entry["second"], entry["max_model_len"]) == ({"a": [1]}, True, 4096)
        assert entry["permission"] == [{"id": "p", "allow_sampling": True}]
        assert gateway.http.get(f"/v1/models/{TALKING}").json() == entry
        missing = gateway.http.get("/v1/models/other")
        assert (missing.status_code, missing.json()["error"]["code"]) == (404, "model_not_found")
