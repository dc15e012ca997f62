"""Real processes for the end-to-end tests: workers and gateways, started as a user starts them."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

import httpx
import yaml

from cachecore.prompts.plain import PlainRenderer
from cachecore.scope import Keyring
from cachecore.store.children import dies_with_parent
from gateway.ports import free_port_range

REPOSITORY = Path(__file__).parents[3]
HOST = "127.0.0.1"
MODEL = "simulated"
BLOCK_TOKENS = 16
LOG_LINES_SHOWN = 30

LIVE: list["Process"] = []
"""Whose logs a failing test shows."""

_ports_from = 11_000 + os.getpid() * 61 % 18_000


def free_ports(count: int) -> range:
    """Consecutive free ports below the ephemeral ones, never the same twice."""
    global _ports_from
    ports = free_port_range(HOST, count, _ports_from)
    _ports_from = ports.stop
    return ports


def eventually(condition: Callable[[], Any], what: str, seconds_max: float = 10.0) -> Any:
    """Wait until `condition` gives something true, and return it."""
    limit = time.monotonic() + seconds_max
    while not (result := condition()):
        assert time.monotonic() < limit, f"it did not come true: {what}"
        time.sleep(0.02)
    return result


class Process:
    """`ropeway ...` with its output in a file, or another module's program."""

    module = "ropeway"
    ends_by = signal.SIGTERM
    start_seconds_max = 30.0
    stop_seconds_max = 15.0

    def __init__(
        self, name: str, arguments: Sequence[str], directory: Path, environment: Mapping[str, str] | None = None
    ) -> None:
        self.name = name
        self.log = directory / f"{name}.log"
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                self._command(arguments),
                cwd=REPOSITORY,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, "OMP_NUM_THREADS": "1", **(environment or {})},
                process_group=0,
                preexec_fn=dies_with_parent(signal.SIGKILL),
            )
        LIVE.append(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _command(self, arguments: Sequence[str]) -> list[str]:
        return [sys.executable, "-m", self.module, *arguments]

    def said(self) -> str:
        return self.log.read_text(errors="replace")

    def tail(self) -> str:
        return "\n".join(self.said().splitlines()[-LOG_LINES_SHOWN:])

    def wait_for(self, condition: Callable[[], Any], what: str) -> None:
        """Wait for the process to become what it should; fail at once when it ends instead."""

        def come_true() -> bool:
            assert self.process.poll() is None, f"{self.name} ended with {self.process.returncode}:\n{self.tail()}"
            try:
                return bool(condition())
            except httpx.HTTPError:
                return False

        eventually(come_true, f"{self.name}: {what}", self.start_seconds_max)

    def stop(self) -> None:
        self._end(self.ends_by)

    def kill(self) -> None:
        """As a machine dies: no goodbye."""
        self._end(signal.SIGKILL)

    def freeze(self) -> None:
        self.process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def _end(self, number: signal.Signals) -> None:
        if self in LIVE:
            LIVE.remove(self)
        if self.process.poll() is None:
            self.process.send_signal(number)
        try:
            self.process.wait(self.stop_seconds_max)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            raise
        finally:
            # Children of its own, of a program that was killed.
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)


class Fleet(Process):
    """Simulated workers in one process."""

    def __init__(
        self, directory: Path, *flags: str, count: int = 2, ports: range | None = None, name: str = ""
    ) -> None:
        self.ports = ports or free_ports(count)
        where = ["--port", str(self.ports[0]), "--count", str(len(self.ports))]
        super().__init__(name or f"workers-{self.ports[0]}", ["worker", "simulated", *where, *flags], directory)
        self.urls = [f"http://{HOST}:{port}" for port in self.ports]
        self.names = [f"{HOST}:{port}" for port in self.ports]
        self.wait_for(lambda: "ready http" in self.said(), "listening")

    def url_of(self, worker: str) -> str:
        assert worker in self.names
        return f"http://{worker}"

    def simulate(self, worker: str, faults: Mapping[str, Any]) -> None:
        httpx.post(f"http://{worker}/simulate", json=faults, trust_env=False).raise_for_status()

    def requests(self, worker: str, path: str = "/v1/chat/completions") -> list[dict[str, Any]]:
        """What the worker's own log says it was asked."""
        log = httpx.get(f"http://{worker}/simulate/log", trust_env=False).json()["requests"]
        return [exchange for exchange in log if exchange["path"] == path]

    def sample(self, worker: str, metric: str) -> float:
        text = httpx.get(f"http://{worker}/metrics", trust_env=False).text
        return sum(float(line.rpartition(" ")[2]) for line in text.splitlines() if line.startswith(metric))


class Gateway(Process):
    """`ropeway serve` with a configuration file."""

    def __init__(
        self,
        directory: Path,
        workers: Iterable[str] = (),
        config: Mapping[str, Any] | None = None,
        name: str = "gateway",
        admin_key: str | None = None,
        has_status: bool = True,
    ) -> None:
        """`has_status`: its own port serves `/status`, so that its workers can be waited for."""
        (port,) = free_ports(1)
        workers = list(workers)
        document = {"port": port, "workers": workers, "probes": {"interval_seconds": 0.2}, **(config or {})}
        path = directory / f"{name}.yaml"
        path.write_text(yaml.safe_dump(document))
        super().__init__(name, ["serve", "-c", str(path)], directory)
        self.url = f"http://{HOST}:{port}"
        operator = {} if admin_key is None else {"authorization": f"Bearer {admin_key}"}
        self.http = httpx.Client(base_url=self.url, timeout=30, trust_env=False)
        self.operator = httpx.Client(base_url=self.url, timeout=30, trust_env=False, headers=operator)
        try:
            self.wait_for(lambda: self.http.get("/healthz").status_code == 200, "listening")
            if has_status:
                self.wait_for(lambda: self.healthy() == len(workers), "all workers healthy")
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        self.http.close()
        self.operator.close()
        super().stop()

    def status(self) -> dict[str, Any]:
        document: dict[str, Any] = self.operator.get("/status").raise_for_status().json()
        return document

    def worker(self, name: str) -> dict[str, Any]:
        (found,) = [worker for worker in self.status()["workers"] if worker["name"] == name]
        return found  # type: ignore[no-any-return]

    def healthy(self) -> int:
        return sum(worker["healthy"] for worker in self.status()["workers"])

    def post(self, body: Any, headers: Mapping[str, str] | None = None, path: str = "/v1/chat/completions") -> Any:
        """A JSON body, or bytes as they are."""
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        return self.http.post(path, content=content, headers={"content-type": "application/json", **(headers or {})})

    def explain(self, body: Any, headers: Mapping[str, str] | None = None) -> dict[str, Any]:
        answer = self.post(body, headers, "/route/explain")
        assert answer.status_code == 200, answer.text
        return answer.json()  # type: ignore[no-any-return]

    def wait_confirmed(
        self, body: Any, worker: str, tokens: int, headers: Mapping[str, str] | None = None
    ) -> dict[str, Any]:
        """Until the worker's events confirm that it holds so many leading tokens of a prompt. The receipt."""

        def receipt() -> dict[str, Any] | None:
            receipt = self.explain(body, headers)
            return receipt if candidate(receipt, worker)["confirmed_tokens"] == tokens else None

        return eventually(receipt, f"{tokens} tokens confirmed at {worker}")  # type: ignore[no-any-return]

    def wait_idle(self) -> None:
        def idle() -> bool:
            status = self.status()
            return not status["requests"]["inflight"] and not any(w["inflight"] for w in status["workers"])

        eventually(idle, "nothing in flight")


def candidate(receipt: Mapping[str, Any], worker: str) -> dict[str, Any]:
    (found,) = [entry for entry in receipt["candidates"] if entry["worker"] == worker]
    return found  # type: ignore[no-any-return]


def new_keyring(directory: Path) -> Path:
    path = directory / "keyring.json"
    if not path.exists():
        Keyring.generate().save(path)
    return path


def chat(content: str, **fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": [{"role": "user", "content": content}], "max_tokens": 4, **fields}


def token_count(messages: Sequence[Mapping[str, Any]]) -> int:
    """Prompt tokens of a chat under the plain rendering."""
    renderer = PlainRenderer()
    return sum(len(renderer.encode(segment)) for segment in renderer.chat({"messages": messages}).segments)


def whole_blocks(tokens: int) -> int:
    return tokens // BLOCK_TOKENS * BLOCK_TOKENS


def full_hit(body: Mapping[str, Any]) -> int:
    """Tokens of a chat that can be cached at all: its last one is computed again, and with it that token's block."""
    return whole_blocks(token_count(body["messages"]) - 1)


def cached_tokens(answer: Any) -> int:
    details = answer.json()["usage"]["prompt_tokens_details"]
    return int(details["cached_tokens"]) if details else 0


def matched_tokens(answer: Any) -> int:
    return int(answer.headers["x-ropeway-matched-tokens"])


def worker_of(answer: Any) -> str:
    return str(answer.headers["x-ropeway-worker"])
