"""Engines that cannot run here, as scripts of their answers' bytes."""

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from typing import Any, NamedTuple

from gateway.config import WorkerConfig
from gateway.fleet.engines.discovery import Found, discover
from gateway.fleet.engines.questions import Questions

Reply = Any
"""A JSON document, text, a status, `(status, document)`, or what makes one of these of the request's document."""


class Asked(NamedTuple):
    path: str
    document: Any


class ScriptedEngine:
    """Answers each route as scripted, any other with 404, and remembers what it was asked."""

    def __init__(self, script: Mapping[str, Reply], server: str = "") -> None:
        self.script = dict(script)
        self.server = server
        self.asked: list[Asked] = []
        self.url = ""
        self.connections = 0
        """That are open."""
        self.keeps_alive = False
        """Whether connections stay open after an answer."""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            while await self._answer(reader, writer):
                pass
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()
            with suppress(ConnectionError):
                await writer.wait_closed()
            self.connections -= 1

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """One question. Whether another may follow on this connection."""
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        path = head.split()[1]
        length = next((int(line[15:]) for line in head.splitlines() if line.lower().startswith("content-length:")), 0)
        body = await reader.readexactly(length)
        document = json.loads(body) if body else None
        self.asked.append(Asked(path, document))
        status, content = self._reply(path, document)
        server = f"server: {self.server}\r\n" if self.server else ""
        kept = "" if self.keeps_alive else "connection: close\r\n"
        writer.write(f"HTTP/1.1 {status} x\r\n{server}{kept}content-length: {len(content)}\r\n\r\n".encode())
        writer.write(content)
        await writer.drain()
        return self.keeps_alive

    def _reply(self, path: str, document: Any) -> tuple[int, bytes]:
        reply = self.script.get(path, 404)
        if callable(reply):
            reply = reply(document)
        if isinstance(reply, int):
            reply = reply, ""
        status, content = reply if isinstance(reply, tuple) else (200, reply)
        return status, content.encode() if isinstance(content, str) else json.dumps(content).encode()

    def questions(self, path: str) -> list[Any]:
        return [asked.document for asked in self.asked if asked.path == path]


@asynccontextmanager
async def running(engine: ScriptedEngine) -> AsyncIterator[ScriptedEngine]:
    server = await asyncio.start_server(engine.serve, "127.0.0.1", 0)
    engine.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield engine
    finally:
        server.close()


class Asker(NamedTuple):
    """A scripted engine and the way to ask it."""

    engine: ScriptedEngine
    ask: Questions

    async def discover(self, **config: Any) -> Found:
        return await discover(self.ask, WorkerConfig(url=self.engine.url, **config))
