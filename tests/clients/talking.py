"""A worker that says the same of everything, in the whole form of an engine's chat: thoughts, texts and calls of tools.

A chat that has tools and no result of one yet is answered with a call of its first tool; any other with a text.
"""

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self

from tests.gateway.end_to_end.processes import HOST, free_ports

MODEL = "talking"
SAID = "The weather is fine."
THOUGHT = "They want to know."
ARGUMENTS = '{"place": "Zürich"}'
USAGE = {
    "prompt_tokens": 20,
    "completion_tokens": 5,
    "total_tokens": 25,
    "prompt_tokens_details": {"cached_tokens": 16},
}
ENTRY = {
    "id": MODEL,
    "object": "model",
    "created": 7,
    "owned_by": "ropeway",
    "max_model_len": 4096,
    "permission": [{"id": "p", "allow_sampling": True}],
}


def turns(body: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The deltas of an answer."""
    tools = body.get("tools")
    if tools and not any(message["role"] == "tool" for message in body["messages"]):
        function = {"name": tools[0]["function"]["name"], "arguments": ""}
        yield {"tool_calls": [{"index": 0, "id": "call_1", "type": "function", "function": function}]}
        for part in (ARGUMENTS[:9], ARGUMENTS[9:]):
            yield {"tool_calls": [{"index": 0, "function": {"arguments": part}}]}
        return
    if body.get("reasoning_effort") == "high":
        yield {"reasoning": THOUGHT}
    for word in SAID.split(" "):
        yield {"content": word if word == "The" else f" {word}"}


def message(deltas: list[dict[str, Any]]) -> dict[str, Any]:
    whole: dict[str, Any] = {"role": "assistant", "content": "".join(d.get("content", "") for d in deltas) or None}
    if thoughts := "".join(delta.get("reasoning", "") for delta in deltas):
        whole["reasoning"] = thoughts
    calls = [call for delta in deltas for call in delta.get("tool_calls", ())]
    if calls:
        arguments = "".join(call["function"]["arguments"] for call in calls)
        function = {"name": calls[0]["function"]["name"], "arguments": arguments}
        whole["tool_calls"] = [{"id": calls[0]["id"], "type": "function", "function": function}]
    return whole


class TalkingWorker:
    """`native`: paths that it answers itself, with what it was sent. `entry`: further fields of its model."""

    def __init__(self, native: tuple[str, ...] = (), entry: dict[str, Any] | None = None, engine: str = "") -> None:
        (port,) = free_ports(1)
        self.url = f"http://{HOST}:{port}"
        self.asked: list[tuple[str, dict[str, str], Any]] = []
        """(path, headers, body) of what was posted."""
        self.broken_after: int | None = None
        """So many events into a stream the connection is lost."""
        owner = {"owned_by": engine} if engine else {}
        self._entry = {**ENTRY, **owner, **(entry or {})}
        self._native = native
        self._server = ThreadingHTTPServer((HOST, port), self._handler())
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        worker = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_: object) -> None:
                pass

            def do_GET(self) -> None:
                documents: dict[str, Any] = {
                    "/health": {},
                    "/v1/models": {"object": "list", "data": [worker._entry]},
                    "/server_info": {"engine": "ropeway-talking", "epoch": 7},
                }
                found = documents.get(self.path)
                self.answer(404 if found is None else 200, {"error": {"message": "no"}} if found is None else found)

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["content-length"])))
                worker.asked.append((self.path, {k.lower(): v for k, v in self.headers.items()}, body))
                if self.path in worker._native:
                    self.answer(200 if body else 400, {"native": body})
                elif self.path == "/tokenize":
                    self.answer(200, {"count": 20, "tokens": list(range(20)), "max_model_len": 4096})
                elif self.path != "/v1/chat/completions":
                    self.answer(404, {"error": {"message": f"nothing at {self.path}", "type": "x"}})
                elif body.get("stream"):
                    self.stream(body)
                else:
                    deltas = list(turns(body))
                    self.answer(200, self.document(message(deltas), "message", self.reason(deltas)) | {"usage": USAGE})

            def reason(self, deltas: list[dict[str, Any]]) -> str:
                return "tool_calls" if "tool_calls" in deltas[-1] else "stop"

            def document(self, said: dict[str, Any], key: str, finish: str | None) -> dict[str, Any]:
                kind = "chat.completion" if key == "message" else "chat.completion.chunk"
                choice = {"index": 0, key: said, "finish_reason": finish, "logprobs": None}
                head = {"id": "chatcmpl-1", "object": kind, "created": 7, "model": MODEL}
                return {**head, "choices": [choice]}

            def answer(self, status: int, document: Any) -> None:
                content = json.dumps(document).encode()
                self.send_response(status)
                self.send_header("content-type", "application/json")
                self.send_header("content-length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            def stream(self, body: dict[str, Any]) -> None:
                self.send_response(200)
                self.send_header("content-type", "text/event-stream")
                self.send_header("transfer-encoding", "chunked")
                self.end_headers()
                deltas = [{"role": "assistant", "content": ""}, *turns(body)]
                documents = [self.document(delta, "delta", None) for delta in deltas]
                documents.append(self.document({}, "delta", self.reason(deltas)))
                if (body.get("stream_options") or {}).get("include_usage"):
                    documents.append({**documents[0], "choices": [], "usage": USAGE})
                for number, document in enumerate(documents):
                    if number == worker.broken_after:
                        self.close_connection = True
                        return
                    self.chunk(b"data: %b\n\n" % json.dumps(document).encode())
                self.chunk(b"data: [DONE]\n\n")
                self.wfile.write(b"0\r\n\r\n")

            def chunk(self, data: bytes) -> None:
                self.wfile.write(b"%x\r\n%b\r\n" % (len(data), data))

        return Handler
