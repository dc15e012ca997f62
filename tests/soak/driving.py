"""What a gateway is put through in a soak: prompts that nobody has asked before, clients that leave or do not read,
workers and adapters that come and go."""

import asyncio
import json
import os
import socket
import struct
import time
from collections import Counter, deque
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import NamedTuple

import httpx

from tests.faults.accounts import Answer
from tests.faults.asker import READ_BYTES, Connection
from tests.faults.instances import GatewayInstance, WorkerInstance
from tests.gateway.end_to_end.processes import HOST, MODEL

PATH = "/v1/chat/completions"
PROMPT_CHARACTERS = 8_192
"""A token each."""
HUNG_AFTER_SECONDS = 60.0
ABORTED_SHARE = 0.15
STREAMED_SHARE = 0.5
ADAPTED_SHARE = 0.3
ADAPTERS_AT_ONCE = 3
ADAPTERS = 24
"""They come again, as what is unloaded and loaded does: what is kept of each (bounded, at thousands of names) is there
within the warm-up."""
SLOW_READ_SECONDS = 15.0
LATENCIES_KEPT = 1_000_000
_RESET_ON_CLOSE = struct.pack("ii", 1, 0)


class Answered(NamedTuple):
    sent_at: float
    """On the monotonic clock."""
    seconds: float


class Driver:
    """Everything that happens to one gateway until `stop`."""

    def __init__(self, gateway: GatewayInstance, directory: Path, ports: range, flags: tuple[str, ...], rate: float):
        self.endings: Counter[str] = Counter()
        self.churned: Counter[str] = Counter()
        self.answered: deque[Answered] = deque(maxlen=LATENCIES_KEPT)
        self._gateway = gateway
        self._rate = rate
        self._directory = directory
        self._flags = flags
        self._random = Random(7)
        self._idle: list[Connection] = []
        self._adapters: list[str] = []
        self._adapters_made = 0
        self._asked = 0
        self._stopping = asyncio.Event()
        self._running: list[asyncio.Task[None]] = []
        self.workers = [self._worker(port) for port in ports]

    def _worker(self, port: int) -> WorkerInstance:
        return WorkerInstance(self._directory, f"worker-{port}", port, *self._flags)

    async def start(self, churn_seconds: float) -> None:
        loops: list[Callable[[], Awaitable[None]]] = [self._read_slowly, self._read_nothing, self._read_nothing]
        self._running = [asyncio.create_task(self._ask_all())]
        self._running += [asyncio.create_task(self._again_and_again(step, 0.5)) for step in loops]
        self._running += [
            asyncio.create_task(self._again_and_again(step, churn_seconds))
            for step in (self._restart_a_worker, self._move_a_guest, self._learn_adapters)
        ]

    async def stop(self) -> None:
        """Ask nothing more, and let what is under way end."""
        self._stopping.set()
        async with asyncio.timeout(2 * HUNG_AFTER_SECONDS):
            await asyncio.gather(*self._running)
        while self._idle:
            await self._idle.pop().leave(resets=False)

    async def _again_and_again(self, step: Callable[[], Awaitable[None]], pause_seconds: float) -> None:
        while not self._stopping.is_set():
            await step()
            with suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), pause_seconds)

    # Requests

    async def _ask_all(self) -> None:
        """Open loop."""
        started = time.monotonic()
        async with asyncio.TaskGroup() as group:
            while not self._stopping.is_set():
                await asyncio.sleep(max(started + self._asked / self._rate - time.monotonic(), 0.0))
                group.create_task(self._ask(self._asked))
                self._asked += 1

    async def _ask(self, number: int) -> None:
        leaves_after = self._random.random() if self._random.random() < ABORTED_SHARE else None
        try:
            async with asyncio.timeout(HUNG_AFTER_SECONDS):
                ending = await self._exchange(number, leaves_after)
        except TimeoutError:
            ending = "hung"
        except OSError as error:
            ending = type(error).__name__
        self.endings[ending] += 1

    async def _exchange(self, number: int, leaves_after: float | None) -> str:
        connection = self._idle.pop() if self._idle else await Connection.open(HOST, self._gateway.port)
        answer, sent_at = Answer(), time.monotonic()
        connection.writer.write(self._request(number, streams=self._random.random() < STREAMED_SHARE, tokens=16))
        with suppress(ConnectionError, TimeoutError):
            async with asyncio.timeout(leaves_after):
                while not answer.complete and (data := await connection.reader.read(READ_BYTES)):
                    answer.feed(data)
        left = leaves_after is not None and not answer.complete and not connection.reader.at_eof()
        if answer.keeps_alive:
            self._idle.append(connection)
        else:
            await connection.leave(resets=left and number % 2 == 0)
        if left:
            return "left"
        if answer.complete and answer.status == 200:
            self.answered.append(Answered(sent_at, time.monotonic() - sent_at))
        return f"{answer.status or 'no answer'}{'' if answer.complete else ', broken off'}"

    def _request(self, number: int, streams: bool, tokens: int, connection: str = "keep-alive") -> bytes:
        model = MODEL
        if self._adapters and self._random.random() < ADAPTED_SHARE:
            model = self._random.choice(self._adapters)
        text = f"{number:09d} " + self._random.randbytes(PROMPT_CHARACTERS // 2).hex()
        messages = [{"role": "user", "content": text[:PROMPT_CHARACTERS]}]
        body = json.dumps({"model": model, "messages": messages, "max_tokens": tokens, "stream": streams}).encode()
        fields = f"host: gateway\r\nconnection: {connection}\r\ncontent-length: {len(body)}\r\n"
        return f"POST {PATH} HTTP/1.1\r\n{fields}\r\n".encode() + body

    # Readers

    async def _open_narrow(self) -> socket.socket:
        loop, opened = asyncio.get_running_loop(), socket.socket()
        opened.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 16_384)
        opened.setblocking(False)
        await loop.sock_connect(opened, (HOST, self._gateway.port))
        await loop.sock_sendall(opened, self._request(self._asked, streams=True, tokens=4_000, connection="close"))
        return opened

    async def _read_slowly(self) -> None:
        """A kilobyte now and then, and gone after a while."""
        loop, until = asyncio.get_running_loop(), time.monotonic() + SLOW_READ_SECONDS
        with suppress(OSError), await self._open_narrow() as opened:
            while time.monotonic() < until and not self._stopping.is_set() and await loop.sock_recv(opened, 1_024):
                await asyncio.sleep(0.2)
        self.churned["slow readers"] += 1

    async def _read_nothing(self) -> None:
        """Until the gateway has enough of it."""
        loop = asyncio.get_running_loop()
        with suppress(OSError), await self._open_narrow() as opened:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), SLOW_READ_SECONDS)
            while await loop.sock_recv(opened, READ_BYTES):
                pass
            self.churned["non-readers that were served to an end"] += 1
            return
        self.churned["non-readers that were reset"] += 1

    # Workers and adapters

    async def _restart_a_worker(self) -> None:
        """Killed or told to stop, in turn; the next life serves other adapters."""
        number = sum(self.churned[how] for how in ("killed", "stopped"))
        worker, how = self.workers[number % len(self.workers)], ("stopped", "killed")[number // len(self.workers) % 2]
        if how == "killed" and worker.process is not None:
            worker.process.kill()
        else:
            await worker.stop()
        worker.flags = (*self._flags, *self.adapter_flags())
        worker.start()
        await worker.ready()
        self.churned[how] += 1

    def adapter_flags(self) -> list[str]:
        names = [f"lora-{(self._adapters_made + offset) % ADAPTERS}" for offset in range(ADAPTERS_AT_ONCE)]
        self._adapters_made += ADAPTERS_AT_ONCE
        return [part for name in names for part in ("--adapter", name)]

    async def _learn_adapters(self) -> None:
        def told() -> list[str]:
            return [entry["id"] for entry in self._gateway.get("/v1/models").json()["data"] if entry["parent"]]

        with suppress(httpx.HTTPError):
            self._adapters = await asyncio.to_thread(told)

    async def _move_a_guest(self) -> None:
        """The last worker is known by one name after another."""
        turn = self.churned["renamed"]

        def move() -> None:
            http = httpx.Client(base_url=self._gateway.url, trust_env=False, timeout=30)
            with http, suppress(httpx.HTTPError):
                http.post("/admin/workers", json={"url": self.workers[-1].url, "name": f"guest-{turn}"})

        await asyncio.to_thread(move)
        self.churned["renamed"] += 1


def resident_bytes(pid: int) -> int:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")
