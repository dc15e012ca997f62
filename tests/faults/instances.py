"""Processes that are restarted under load, each at an address of its own, and none waited for by blocking the loop."""

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import yaml

from tests.gateway.end_to_end.processes import HOST, Fleet, Process

WAIT_SECONDS_MAX = 120.0


async def until(condition: Callable[[], Any], what: str) -> None:
    limit = time.monotonic() + WAIT_SECONDS_MAX
    while True:
        with suppress(httpx.HTTPError):
            if await asyncio.to_thread(condition):
                return
        assert time.monotonic() < limit, f"it did not come true: {what}"
        await asyncio.sleep(0.05)


class Worker(Fleet):
    """Started without waiting for it: the load goes on."""

    def wait_for(self, condition: Callable[[], Any], what: str) -> None:
        pass


class Instance:
    """One life after another of a process at one address."""

    def __init__(self, directory: Path, name: str, port: int) -> None:
        self.name = name
        self.port = port
        self.url = f"http://{HOST}:{port}"
        self.process: Process | None = None
        self._directory = directory
        self._lives = 0

    def start(self) -> None:
        self._lives += 1
        self.process = self._started(self._directory, f"{self.name}-life-{self._lives}")

    async def stop(self) -> None:
        """As an operator does, and it must end well."""
        process, self.process = self.process, None
        assert process is not None
        await ended(process)

    def get(self, path: str) -> httpx.Response:
        assert self.process is None or self.process.process.poll() is None, self.process.tail()
        return httpx.get(f"{self.url}{path}", trust_env=False, timeout=30)

    def _started(self, directory: Path, name: str) -> Process:
        raise NotImplementedError


async def ended(process: Process) -> None:
    process.process.terminate()
    assert await asyncio.to_thread(process.process.wait, WAIT_SECONDS_MAX) == 0, process.tail()
    process.stop()


class WorkerInstance(Instance):
    def __init__(self, directory: Path, name: str, port: int, *flags: str) -> None:
        super().__init__(directory, name, port)
        self.flags = flags

    def _started(self, directory: Path, name: str) -> Process:
        return Worker(directory, *self.flags, ports=range(self.port, self.port + 1), name=name)

    async def ready(self) -> None:
        await until(lambda: self.get("/health").status_code == 200, f"{self.name} serves")


class GatewayInstance(Instance):
    def __init__(
        self, directory: Path, name: str, port: int, workers: Sequence["WorkerInstance"], **config: Any
    ) -> None:
        super().__init__(directory, name, port)
        self._document = {"port": port, "workers": [worker.url for worker in workers], **config}

    def _started(self, directory: Path, name: str) -> Process:
        path = directory / f"{self.name}.yaml"
        path.write_text(yaml.safe_dump(self._document))
        return Process(name, ["serve", "-c", str(path)], directory)

    async def ready(self) -> None:
        await until(lambda: self.get("/readyz").status_code == 200, f"{self.name} is ready")

    async def knows(self, worker: WorkerInstance) -> None:
        """Until it would send the worker requests."""
        await until(lambda: self.worker(worker)["healthy"], f"{self.name} knows {worker.name}")

    def worker(self, worker: WorkerInstance) -> Mapping[str, Any]:
        entries = self.get("/status").json()["workers"]
        return next(entry for entry in entries if entry["url"] == worker.url)

    def refusals(self) -> dict[str, float]:
        """Requests that it answered with an error of its own, by status, as its metrics have them."""
        lines = [line for line in self.get("/metrics").text.splitlines() if line.startswith("ropeway_refusals_total{")]
        return {line.partition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines}
