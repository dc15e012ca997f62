"""Pages in browsers: who may read what, asked ahead and with every answer."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.clients.talking import MODEL, TalkingWorker
from tests.gateway.end_to_end.conftest import Stack
from tests.gateway.end_to_end.processes import Gateway
from tests.gateway.end_to_end.test_tenants import new_key

PAGE = "https://chat.example.com"
AHEAD = {"access-control-request-method": "POST", "access-control-request-headers": "authorization,content-type"}
CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}
ALLOWED = "access-control-allow-origin"


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Gateway, str]]:
    """With keys, so that it shows who needs none."""
    directory = tmp_path_factory.mktemp("cors")
    key = new_key(directory / "keys.jsonl", "acme")
    config = {"cors": {"origins": [PAGE]}, "tenants": {"api_keys_file": str(directory / "keys.jsonl")}}
    with TalkingWorker() as worker, Gateway(directory, [worker.url], config) as gateway:
        yield gateway, key


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/v1/models", "/anything"])
def test_a_browser_asks_ahead_without_a_key(pages: tuple[Gateway, str], path: str) -> None:
    answer = pages[0].http.options(path, headers={"origin": PAGE, **AHEAD})
    assert (answer.status_code, answer.content) == (204, b"")
    assert answer.headers[ALLOWED] == PAGE
    assert answer.headers["access-control-allow-methods"] == "GET, POST, DELETE, OPTIONS"
    assert answer.headers["access-control-allow-headers"] == "authorization,content-type"
    assert (answer.headers["access-control-max-age"], answer.headers["vary"]) == ("600", "origin")


def test_another_page_is_told_nothing(pages: tuple[Gateway, str]) -> None:
    gateway, key = pages
    other = {"origin": "https://evil.example.com"}
    ahead = gateway.http.options("/v1/chat/completions", headers={**other, **AHEAD})
    answer = gateway.post(CHAT, {**other, "authorization": f"Bearer {key}"})
    assert answer.status_code == 200
    for told in (ahead, answer):
        assert not [name for name in told.headers if name.startswith("access-control-")]
        assert told.headers["vary"] == "origin"


@pytest.mark.parametrize("fields", [{}, {"stream": True}])
def test_answers_may_be_read_with_the_gateways_headers(pages: tuple[Gateway, str], fields: dict[str, bool]) -> None:
    gateway, key = pages
    for path in ("/v1/chat/completions", "/v1/messages"):
        body = {**CHAT, "max_tokens": 8, **fields}
        answer = gateway.post(body, {"origin": PAGE, "authorization": f"Bearer {key}"}, path)
        assert answer.status_code == 200
        assert answer.headers[ALLOWED] == PAGE
        exposed = answer.headers["access-control-expose-headers"].split(", ")
        assert {"x-ropeway-worker", "x-ropeway-matched-tokens", "x-request-id"} <= set(exposed)


def test_refusals_may_be_read(pages: tuple[Gateway, str]) -> None:
    gateway, key = pages
    unknown = gateway.post(CHAT, {"origin": PAGE})
    assert (unknown.status_code, unknown.headers[ALLOWED]) == (401, PAGE)
    models = gateway.http.get("/v1/models", headers={"origin": PAGE})
    assert (models.status_code, models.headers[ALLOWED]) == (401, PAGE)
    missing = gateway.post({**CHAT, "model": "x"}, {"origin": PAGE, "authorization": f"Bearer {key}"})
    assert (missing.status_code, missing.headers[ALLOWED]) == (404, PAGE)


def test_a_key_may_come_as_anthropics_clients_send_it(pages: tuple[Gateway, str]) -> None:
    gateway, key = pages
    body = {**CHAT, "max_tokens": 8}
    assert gateway.post(body, {"x-api-key": key}, "/v1/messages").status_code == 200
    assert gateway.http.get("/v1/models", headers={"x-api-key": key}).status_code == 200
    refused = gateway.post(body, {"x-api-key": "wrong"}, "/v1/messages")
    assert refused.status_code == 401
    assert refused.json()["error"]["type"] == "authentication_error"


def test_all_origins(tmp_path: Path) -> None:
    with TalkingWorker() as worker, Gateway(tmp_path, [worker.url], {"cors": {"origins": ["*"]}}) as gateway:
        answer = gateway.post(CHAT, {"origin": "null"})
        assert answer.headers[ALLOWED] == "*"
        assert "vary" not in answer.headers


def test_without_origins_nothing_is_said(stack: Stack) -> None:
    ahead = stack.gateway.http.options("/v1/chat/completions", headers={"origin": PAGE, **AHEAD})
    assert ahead.status_code == 405
    assert ALLOWED not in ahead.headers
    assert ALLOWED not in stack.gateway.http.get("/v1/models", headers={"origin": PAGE}).headers
