"""Clients that leave, each in its own way and at its own moment, on raw sockets; and what the worker saw of each."""

import asyncio
import json
import socket
import struct
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import httpx

from tests.gateway.end_to_end.processes import chat

PATH = "/v1/chat/completions"
RECEIVE_BUFFER_BYTES = 16_384
SETTLE_SECONDS_MAX = 20.0
HALF_CLOSED_SECONDS = 0.4
_RESET_ON_CLOSE = struct.pack("ii", 1, 0)


class How(StrEnum):
    RESET = "reset"
    CLOSE = "close"
    HALF_CLOSE_FIRST = "half-close, then close"
    """The worker must go on in between."""


class When(StrEnum):
    BEFORE = "before the first token"
    AFTER = "after the first token"
    PAUSED = "while everything is full"
    """The client reads nothing; the worker's own writing waits."""


@dataclass(frozen=True)
class Scenario:
    when: When
    streams: bool
    how: How

    def __str__(self) -> str:
        return f"{'streamed' if self.streams else 'whole'}, {self.when}, {self.how}"


class Left(NamedTuple):
    """One client that left; wall-clock seconds."""

    number: int
    left_at: float
    seen_at: float
    """When the worker saw it."""

    @property
    def ms(self) -> float:
        return (self.seen_at - self.left_at) * 1e3


@dataclass
class Log:
    """What a worker says that it was asked, by the number that each client puts into its query."""

    url: str
    http: httpx.AsyncClient = field(default_factory=lambda: httpx.AsyncClient(trust_env=False, timeout=20))

    def metrics(self) -> str:
        return httpx.get(f"{self.url}/metrics", trust_env=False).text

    async def clear(self) -> None:
        """It is read as a whole, and the worker that tells it is the one that is measured."""
        (await self.http.delete(f"{self.url}/simulate/log")).raise_for_status()

    async def entry(self, number: int) -> Mapping[str, Any] | None:
        requests = (await self.http.get(f"{self.url}/simulate/log")).json()["requests"]
        found = [entry for entry in requests if entry["path"] == f"{PATH}?client={number}"]
        assert len(found) <= 1, f"client {number} asked once and is here {len(found)} times"
        return found[0] if found else None

    async def until(self, number: int, condition: Callable[[Mapping[str, Any]], Any], what: str) -> Mapping[str, Any]:
        limit = time.monotonic() + SETTLE_SECONDS_MAX
        while True:
            entry = await self.entry(number)
            if entry is not None and condition(entry):
                return entry
            assert time.monotonic() < limit, f"client {number}: it did not come true: {what}; {entry}"
            await asyncio.sleep(0.02)

    async def until_still(self, number: int, seconds: float = 0.3) -> None:
        """Until the worker has begun to write and writes no more."""
        written, since = -1, time.monotonic()
        while time.monotonic() - since < seconds or written <= 0:
            entry = await self.entry(number)
            if entry is not None and entry["sent_bytes"] != written:
                written, since = entry["sent_bytes"], time.monotonic()
            await asyncio.sleep(0.05)


class Leaver:
    def __init__(self, gateway: str, log: Log, number: int, scenario: Scenario) -> None:
        self._gateway = urlsplit(gateway)
        self._log = log
        self._number = number
        self._scenario = scenario

    async def run(self) -> Left:
        loop = asyncio.get_running_loop()
        with socket.socket() as opened:
            opened.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVE_BUFFER_BYTES)
            opened.setblocking(False)
            await loop.sock_connect(opened, (self._gateway.hostname, self._gateway.port))
            await loop.sock_sendall(opened, self._request())
            await self._wait(opened)
            left_at = await self._leave(opened)
        seen = await self._log.until(self._number, lambda entry: entry["disconnected_at"], "the worker is told")
        assert seen["finished_at"] is None
        assert seen["arrived_at"] <= left_at
        return Left(self._number, left_at, seen["disconnected_at"])

    def _request(self) -> bytes:
        text = f"Client {self._number} will not hear the end of this."
        return written(self._number, chat(text, max_tokens=20_000, stream=self._scenario.streams))

    async def _wait(self, opened: socket.socket) -> None:
        match self._scenario.when:
            case When.BEFORE:
                await self._log.until(self._number, lambda entry: entry["body_bytes"], "the worker has it")
            case When.AFTER if self._scenario.streams:
                await _receive_until(opened, b'"content":"')
            case When.AFTER:
                await self._log.until(self._number, lambda entry: entry["body_bytes"], "the worker has it")
                # Tokens that the client does not see.
                await asyncio.sleep(0.2)
            case When.PAUSED:
                await self._log.until_still(self._number)

    async def _leave(self, opened: socket.socket) -> float:
        how = self._scenario.how
        if how is How.HALF_CLOSE_FIRST:
            opened.shutdown(socket.SHUT_WR)
            await asyncio.sleep(HALF_CLOSED_SECONDS)
            entry = await self._log.entry(self._number)
            assert entry is not None
            assert entry["disconnected_at"] is None, "a client that has only finished asking waits for its answer"
        if how is How.RESET:
            opened.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)
        left_at = time.time()
        opened.close()
        return left_at


def written(number: int, document: Mapping[str, Any]) -> bytes:
    """A client's request."""
    body = json.dumps(document).encode()
    head = f"POST {PATH}?client={number} HTTP/1.1\r\nhost: gateway\r\ncontent-length: {len(body)}\r\n\r\n"
    return head.encode() + body


async def _receive_until(opened: socket.socket, wanted: bytes) -> None:
    loop, received = asyncio.get_running_loop(), b""
    async with asyncio.timeout(SETTLE_SECONDS_MAX):
        while wanted not in received:
            data = await loop.sock_recv(opened, 65_536)
            assert data, received
            received += data


def distribution(left: Sequence[Left]) -> dict[str, Any]:
    """Nearest ranks."""
    ms = sorted(one.ms for one in left)

    def percentile(share: float) -> float:
        return round(ms[max(-(-len(ms) * int(share * 1000) // 1000), 1) - 1], 2)

    return {
        "clients": len(ms),
        "p50_ms": percentile(0.5),
        "p90_ms": percentile(0.9),
        "p99_ms": percentile(0.99),
        "max_ms": round(ms[-1], 2),
    }
