"""A worker that is a script: it publishes whatever events it is told to, and answers with whatever usage."""

import json
import struct
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self

import msgspec
import zmq

from tests.gateway.end_to_end.processes import HOST, free_ports

MODEL = "scripted"
END_OF_REPLAY = b"\xff" * 8


class Stream:
    """One rank's sockets: what is sent goes out as it is, and what is kept can be replayed."""

    def __init__(self, context: "zmq.Context[Any]", port: int, replay_port: int) -> None:
        self._live = context.socket(zmq.XPUB)
        self._live.setsockopt(zmq.XPUB_VERBOSE, 1)
        self._live.bind(f"tcp://{HOST}:{port}")
        self._router = context.socket(zmq.ROUTER)
        self._router.bind(f"tcp://{HOST}:{replay_port}")
        self._kept: dict[int, bytes] = {}
        self.sequence = 0
        self.due = 0
        """Batches that can be heard, live or by replay."""
        self.answering = threading.Event()
        """Replays are answered while it is set."""
        self.answering.set()
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def subscribed(self) -> None:
        """Wait for a subscription."""
        assert self._live.poll(10_000), "nobody has subscribed"
        while self._live.poll(0):
            self._live.recv()

    def say(self, *events: Any, rank: int | None = None, kept: bool = True, sent: bool = True) -> int:
        """One batch of events as the engine would encode them."""
        return self.say_bytes(msgspec.msgpack.encode([time.time(), events, rank]), kept, sent)

    def say_bytes(self, payload: bytes, kept: bool = True, sent: bool = True) -> int:
        sequence = self.sequence
        self.sequence += 1
        self.due += kept or sent
        if kept:
            self._kept[sequence] = payload
        if sent:
            self._live.send_multipart([b"kv", struct.pack(">Q", sequence), payload])
        return sequence

    def close(self) -> None:
        self._ending.set()
        self.answering.set()
        self._thread.join()
        self._live.close(linger=0)
        self._router.close(linger=0)

    def _serve(self) -> None:
        while not self._ending.is_set():
            if not self._router.poll(20):
                continue
            client, _, start = self._router.recv_multipart()
            self.answering.wait()
            (first,) = struct.unpack(">Q", start)
            for sequence in sorted(self._kept):
                if sequence >= first:
                    number = struct.pack(">Q", sequence)
                    self._router.send_multipart([client, b"", b"kv", number, self._kept[sequence]])
            self._router.send_multipart([client, b"", b"", END_OF_REPLAY, b""])


class ScriptedWorker:
    """Says of itself what our own workers say, but takes any prompt and computes nothing."""

    def __init__(
        self, block_tokens: int | None = 16, ranks: int = 1, model: str = MODEL, adapters: tuple[str, ...] = ()
    ) -> None:
        (port,) = free_ports(1)
        ports = free_ports(2 * ranks)
        self.name = f"{HOST}:{port}"
        self.url = f"http://{self.name}"
        self.cached_tokens: int | None = None
        """What every answer reports."""
        self._context: zmq.Context[Any] = zmq.Context()
        self.streams = [Stream(self._context, ports[rank], ports[ranks + rank]) for rank in range(ranks)]
        self._info: dict[str, Any] = {
            "engine": "ropeway-scripted",
            "epoch": time.time_ns() // 1000 % 2**40,
            "kv_events": {
                "endpoint": f"tcp://{HOST}:{ports[0]}",
                "replay_endpoint": f"tcp://{HOST}:{ports[ranks]}",
                "topic": "kv",
                "dp_size": ranks,
            },
        }
        if block_tokens is not None:
            self._info["block_size"] = block_tokens
        self._models = [{"id": model, "object": "model", "owned_by": "ropeway", "max_model_len": 65_536}]
        self._models += [{"id": name, "object": "model", "parent": model} for name in adapters]
        self._server = ThreadingHTTPServer((HOST, port), self._handler())
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)
        self._thread.start()

    @property
    def stream(self) -> Stream:
        return self.streams[0]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
        for stream in self.streams:
            stream.close()
        self._context.term()

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        worker = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_: object) -> None:
                pass

            def do_GET(self) -> None:
                documents = {
                    "/health": {},
                    "/v1/models": {"object": "list", "data": worker._models},
                    "/server_info": worker._info,
                }
                self._answer(documents.get(self.path))

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["content-length"])) or b"{}")
                self._answer(worker._answer(body) if self.path == "/v1/completions" else None)

            def _answer(self, document: Any) -> None:
                data = json.dumps(document if document is not None else {"error": {"message": "no"}}).encode()
                self.send_response(404 if document is None else 200)
                self.send_header("content-type", "application/json")
                self.send_header("content-length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

        return Handler

    def _answer(self, body: dict[str, Any]) -> dict[str, Any]:
        usage: dict[str, Any] = {"prompt_tokens": len(body["prompt"]), "completion_tokens": 1}
        if self.cached_tokens is not None:
            usage["prompt_tokens_details"] = {"cached_tokens": self.cached_tokens}
        choice = {"index": 0, "text": "x", "finish_reason": "length"}
        return {"id": "c", "object": "text_completion", "model": body["model"], "choices": [choice], "usage": usage}
