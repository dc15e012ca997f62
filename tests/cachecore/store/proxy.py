"""A TCP proxy on loopback that makes a network misbehave: late, narrow, silent, ended, cut; and counts what passes."""

import asyncio
from collections import deque
from math import inf
from types import TracebackType
from typing import Any, Self


class FaultProxy:
    """`async with FaultProxy(port) as proxy:`, then connect to 127.0.0.1:`proxy.port` and turn faults on and off.

    `latency_seconds` delays each direction by that much without narrowing it; `bytes_per_second` narrows each direction
    of each connection. While `silent`, connections stay open and new ones are accepted, but nothing passes; it is held
    back, not lost. `cut` resets the connections, `end_answers` ends them in good order towards the clients, whatever
    was under way; `close` refuses them, `listen` accepts them again at the same port.
    """

    def __init__(self, target_port: int) -> None:
        self.target_port = target_port
        self.port = 0
        self.latency_seconds = 0.0
        self.bytes_per_second = inf
        self.sent_bytes = 0
        """From clients to the server."""
        self.received_bytes = 0
        self.round_trips = 0
        """How often a client spoke first or after the server did: a pipeline counts once."""
        self.connections = 0
        """Accepted in all."""
        self.links: set[_Link] = set()
        self._silent = False
        self._listener: asyncio.Server | None = None

    @property
    def silent(self) -> bool:
        return self._silent

    @silent.setter
    def silent(self, value: bool) -> None:
        self._silent = value
        for link in self.links:
            link.flush()

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}"

    async def __aenter__(self) -> Self:
        await self.listen()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def listen(self) -> None:
        loop = asyncio.get_running_loop()
        self._listener = await loop.create_server(lambda: _Link(self), "127.0.0.1", self.port)
        self.port = self._listener.sockets[0].getsockname()[1]

    def cut(self) -> None:
        for link in list(self.links):
            link.abort()

    def end_answers(self) -> None:
        """As a server that closes: the clients see the end of what they are being sent."""
        for link in list(self.links):
            link.end_answer()

    async def close(self) -> None:
        if self._listener is not None:
            self._listener.close()
        self.cut()
        await asyncio.gather(*(link.connecting for link in self.links if link.connecting), return_exceptions=True)

    def reset_counts(self) -> None:
        self.sent_bytes = self.received_bytes = self.round_trips = self.connections = 0


class _Link(asyncio.Protocol):
    """A client's connection and the one made for it."""

    def __init__(self, proxy: FaultProxy) -> None:
        self.proxy = proxy
        self.connecting: asyncio.Task[None] | None = None
        self.sending: _Way | None = None
        self.receiving: _Way | None = None
        self.client_has_the_word = True

    def connection_made(self, transport: Any) -> None:
        self.proxy.connections += 1
        self.proxy.links.add(self)
        self.receiving = _Way(self.proxy)
        self.receiving.target = transport
        self.sending = _Way(self.proxy)
        self.connecting = asyncio.get_running_loop().create_task(self._connect())

    def data_received(self, data: bytes) -> None:
        assert self.sending is not None
        self.proxy.sent_bytes += len(data)
        if self.client_has_the_word:
            self.client_has_the_word = False
            self.proxy.round_trips += 1
        self.sending.carry(data)

    def answer(self, data: bytes) -> None:
        assert self.receiving is not None
        self.proxy.received_bytes += len(data)
        self.client_has_the_word = True
        self.receiving.carry(data)

    def connection_lost(self, error: Exception | None) -> None:
        self.abort()

    def flush(self) -> None:
        for way in (self.sending, self.receiving):
            if way is not None:
                way.flush()

    def end_answer(self) -> None:
        way = self.receiving
        if way is not None and way.target is not None and not way.ended and not way.target.is_closing():
            way.ended = True
            way.target.write_eof()

    def abort(self) -> None:
        self.proxy.links.discard(self)
        if self.connecting is not None:
            self.connecting.cancel()
        for way in (self.sending, self.receiving):
            if way is not None and way.target is not None:
                way.target.abort()

    async def _connect(self) -> None:
        assert self.sending is not None
        try:
            far = _Far(self)
            loop = asyncio.get_running_loop()
            self.sending.target, _ = await loop.create_connection(lambda: far, "127.0.0.1", self.proxy.target_port)
        except OSError:
            self.abort()
        else:
            self.sending.flush()


class _Far(asyncio.Protocol):
    def __init__(self, link: _Link) -> None:
        self.link = link

    def data_received(self, data: bytes) -> None:
        self.link.answer(data)

    def connection_lost(self, error: Exception | None) -> None:
        self.link.abort()


class _Way:
    """One direction of a link: what is under way, and how much of it has travelled long enough."""

    def __init__(self, proxy: FaultProxy) -> None:
        self.proxy = proxy
        self.target: Any = None
        self.under_way: deque[bytes] = deque()
        self.arrived = 0
        self.free_at = 0.0
        self.ended = False

    def carry(self, data: bytes) -> None:
        self.under_way.append(data)
        loop = asyncio.get_running_loop()
        self.free_at = max(self.free_at, loop.time()) + len(data) / self.proxy.bytes_per_second
        arrives_at = self.free_at + self.proxy.latency_seconds
        if arrives_at > loop.time():
            loop.call_at(arrives_at, self._arrive)
        else:
            self._arrive()

    def _arrive(self) -> None:
        self.arrived += 1
        self.flush()

    def flush(self) -> None:
        while self.arrived and self.target is not None and not self.proxy.silent:
            self.arrived -= 1
            data = self.under_way.popleft()
            if not self.target.is_closing() and not self.ended:
                self.target.write(data)
