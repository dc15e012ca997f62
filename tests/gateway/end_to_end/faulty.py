"""A scripted worker that fails on demand, whatever its probes say, and knows who is with it."""

import json
import select
import socket
import struct
import threading
from http.server import BaseHTTPRequestHandler
from typing import Any

from tests.gateway.end_to_end.scripted import ScriptedWorker

_RESET_ON_CLOSE = struct.pack("ii", 1, 0)


class FaultyWorker(ScriptedWorker):
    """`mode` says what completions get: `ok`, a status, `reset` (no answer), or `hang` (until the client leaves)."""

    def __init__(self) -> None:
        self.mode: str | int = "ok"
        self.every = 1
        """Of so many requests one fails."""
        self.asked = 0
        self.left = 0
        """Clients that left before they were answered."""
        self.live = self.live_max = 0
        self._lock = threading.Lock()
        super().__init__()

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        worker, answering = self, super()._handler()

        class Handler(answering):  # type: ignore[misc,valid-type]
            def do_POST(self) -> None:
                if self.path != "/v1/completions":
                    super().do_POST()
                    return
                with worker._lock:
                    worker.asked += 1
                    worker.live += 1
                    worker.live_max = max(worker.live_max, worker.live)
                    fails = worker.asked % worker.every == 0
                try:
                    self._act(worker.mode if fails else "ok")
                finally:
                    with worker._lock:
                        worker.live -= 1

            def _act(self, mode: str | int) -> None:
                if mode == "ok":
                    super().do_POST()
                    return
                self.rfile.read(int(self.headers["content-length"]))
                if isinstance(mode, int):
                    self._refuse(mode)
                elif mode == "hang":
                    self._wait_for_departure()
                else:
                    self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)
                    self.connection.close()
                    self.close_connection = True

            def _refuse(self, status: int) -> None:
                data = json.dumps({"error": {"message": f"{status} of {worker.name}"}}).encode()
                self.send_response(status)
                self.send_header("content-length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def _wait_for_departure(self) -> None:
                while not select.select([self.connection], [], [], 10.0)[0]:
                    pass
                self.close_connection = True
                with worker._lock:
                    worker.left += 1

            def finish(self) -> None:
                try:
                    super().finish()
                except (OSError, ValueError):
                    self.connection.close()

        return Handler


def completion(prompt: str = "x", **fields: Any) -> dict[str, Any]:
    return {"model": "scripted", "prompt": prompt, "max_tokens": 1, **fields}
