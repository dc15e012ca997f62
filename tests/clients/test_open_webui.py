"""The requests that Open WebUI makes of an OpenAI server, written down as bytes.

It lists models when it starts and when somebody opens the selector; it streams chats with its own fields beside
OpenAI's (which its backend mostly strips, but plugins send: `chat_id`, `metadata`, `features`), asks for usage, and
in the background, not streamed, for a title, tags and follow-ups. Its backend is aiohttp: `Accept: */*`, compressed
answers welcome, one `Authorization` even where there is no key.
"""

import gzip
import json
import socket
from collections.abc import Iterator
from urllib.parse import urlsplit

import pytest

from tests.clients.conftest import Stand
from tests.clients.talking import ENTRY, MODEL, SAID, USAGE
from tests.gateway.api.events import EVENT_SEPARATOR

HEAD = (
    "{method} /v1{path} HTTP/1.1\r\n"
    "Host: gateway:8000\r\n"
    "Authorization: Bearer sk-none\r\n"
    "Content-Type: application/json\r\n"
    "X-OpenWebUI-User-Name: Ada%20Lovelace\r\n"
    "X-OpenWebUI-User-Id: 0a1b\r\n"
    "X-OpenWebUI-Chat-Id: 9c8d\r\n"
    "Accept: */*\r\n"
    "Accept-Encoding: gzip, deflate, br, zstd\r\n"
    "User-Agent: Python/3.11 aiohttp/3.12.15\r\n"
)
CHAT = {
    "stream": True,
    "model": MODEL,
    "messages": [
        {"role": "system", "content": "User Context:\n\n"},
        {"role": "user", "content": "How is the weather?"},
    ],
    "stream_options": {"include_usage": True},
    "max_tokens": 64,
    "temperature": 0.8,
    "chat_id": "9c8d",
    "session_id": "s1",
    "id": "m1",
    "features": {"image_generation": False, "web_search": False, "memory": False},
    "variables": {"{{USER_NAME}}": "Ada"},
    "background_tasks": {"title_generation": True},
}
TITLE = {
    "model": MODEL,
    "messages": [{"role": "user", "content": "### Task:\nGenerate a concise, 3-5 word title with an emoji."}],
    "stream": False,
    "max_completion_tokens": 1000,
    "metadata": {"task": "title_generation", "chat_id": "9c8d"},
}


@pytest.fixture
def wire(stand: Stand) -> Iterator[socket.socket]:
    parts = urlsplit(stand.gateway.url)
    with socket.create_connection((parts.hostname or "", parts.port or 0), timeout=30) as wire:
        yield wire


def ask(wire: socket.socket, method: str, path: str, body: object = None) -> tuple[int, dict[str, str], bytes]:
    """Send a request as it stands; the status, the headers and the whole body."""
    content = b"" if body is None else json.dumps(body).encode()
    head = HEAD.format(method=method, path=path) + (f"Content-Length: {len(content)}\r\n" if content else "")
    wire.sendall(head.encode() + b"\r\n" + content)
    received = wire.makefile("rb")
    status = int(received.readline().split()[1])
    headers: dict[str, str] = {}
    while line := received.readline().decode().strip():
        name, _, value = line.partition(":")
        headers[name.lower()] = value.strip()
    if headers.get("transfer-encoding") == "chunked":
        data = b""
        while size := int(received.readline(), 16):
            data += received.read(size)
            received.readline()
        received.readline()
    else:
        data = received.read(int(headers["content-length"]))
    return status, headers, gzip.decompress(data) if headers.get("content-encoding") == "gzip" else data


def test_models_are_listed(wire: socket.socket) -> None:
    status, headers, body = ask(wire, "GET", "/models")
    assert (status, headers["content-type"]) == (200, "application/json")
    assert json.loads(body) == {"object": "list", "data": [ENTRY]}


def test_a_chat_is_streamed_with_the_fields_that_are_its_own(wire: socket.socket, stand: Stand) -> None:
    status, headers, body = ask(wire, "POST", "/chat/completions", CHAT)
    assert (status, headers["content-type"]) == (200, "text/event-stream")
    events = [event.removeprefix("data: ") for event in body.decode().split(EVENT_SEPARATOR) if event]
    assert events[-1] == "[DONE]"
    chunks = [json.loads(event) for event in events[:-1]]
    assert "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks if chunk["choices"]) == SAID
    assert chunks[-1]["usage"] == USAGE
    assert stand.bodies() == [CHAT]


def test_one_connection_carries_all_of_a_chats_requests(wire: socket.socket, stand: Stand) -> None:
    assert ask(wire, "GET", "/models")[0] == 200
    assert ask(wire, "POST", "/chat/completions", CHAT)[0] == 200
    status, _, body = ask(wire, "POST", "/chat/completions", TITLE)
    assert status == 200
    assert json.loads(body)["choices"][0]["message"]["content"] == SAID
    assert stand.bodies() == [CHAT, TITLE]


def test_a_model_that_is_gone_is_an_error_it_can_show(wire: socket.socket) -> None:
    status, _, body = ask(wire, "POST", "/chat/completions", {**CHAT, "model": "gone"})
    assert status == 404
    assert json.loads(body)["error"]["message"] == "the model 'gone' does not exist here"
