"""Servers for tests: a real one for a source in memory, and a liar that speaks the protocol until its script begins."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from cachecore.scope import Keyring
from cachecore.transfer.frames import FrameWriter
from cachecore.transfer.tcp.client import ClientSettings, TcpTransport
from cachecore.transfer.tcp.messages import CHALLENGE_BYTES, MESSAGE_HEAD, Kind, MessageHead
from cachecore.transfer.tcp.server import ServerSettings, TcpServer
from cachecore.transfer.transport import Draft, Expectation, Outcome, Source
from tests.cachecore.transfer.world import EXPECTATION, KEYRING, ListSink, MemorySource, make_plan, make_pull

PATIENT = ClientSettings(stall_seconds=10, connect_seconds=10)
"""For pulls that are to fail for another reason than time, on a machine that may be busy."""
Script = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@contextlib.asynccontextmanager
async def serving(source: Source, settings: ServerSettings | None = None, **options: Any) -> AsyncIterator[TcpServer]:
    server = TcpServer(source, options.pop("keyring", KEYRING), settings, **options)
    await server.start()
    try:
        yield server
    finally:
        await server.close()


@contextlib.asynccontextmanager
async def listening(script: Script) -> AsyncIterator[str]:
    """The address of a server that runs a script on each connection; none is left when the block ends."""
    talks: set[asyncio.Task[Any]] = set()

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        talks.add(task)
        with contextlib.suppress(OSError, asyncio.IncompleteReadError, asyncio.CancelledError):
            await script(reader, writer)
            await writer.drain()
        writer.close()

    server = await asyncio.start_server(talk, "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()
    try:
        yield f"tcp://{host}:{port}"
    finally:
        server.close()
        for task in talks:
            task.cancel()
        await asyncio.gather(*talks)
        await asyncio.sleep(0)  # for the transports to see that they are closed


@contextlib.asynccontextmanager
async def lying(script: Script) -> AsyncIterator[str]:
    """The address of a server that greets, reads one request, and then does as it likes."""

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(MessageHead(Kind.GREETING, CHALLENGE_BYTES).encode() + bytes(CHALLENGE_BYTES))
        head = MessageHead.decode(await reader.readexactly(MESSAGE_HEAD.size), Kind.REQUEST)
        await reader.readexactly(head.length)
        await script(reader, writer)

    async with listening(talk) as address:
        yield address


def frame_bytes(draft: Draft, keyring: Keyring = KEYRING) -> bytes:
    return b"".join(FrameWriter(keyring.frame_key).seal(*draft))


def frame_message(frame: bytes) -> bytes:
    return MessageHead(Kind.FRAME, len(frame)).encode() + frame


def sending(*parts: bytes, then_hang: bool = False) -> Script:
    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for part in parts:
            writer.write(part)
        await writer.drain()
        if then_hang:
            await reader.read()

    return script


def honest(layers: range, source: MemorySource | None = None) -> list[bytes]:
    source = source or MemorySource()
    return [frame_message(frame_bytes(source.draft(layer))) for layer in layers]


END = MessageHead(Kind.END, 0).encode()


async def pull(
    address: str,
    sink: ListSink | None = None,
    *,
    settings: ClientSettings | None = None,
    keyring: Keyring = KEYRING,
    minted_by: Keyring = KEYRING,
    expectation: Expectation = EXPECTATION,
    seconds: float = 30.0,
    plan: dict[str, Any] | None = None,
    **grant: Any,
) -> Outcome:
    """One pull over a transport of its own."""
    transport = TcpTransport(keyring, settings or PATIENT)
    try:
        deadline = asyncio.get_running_loop().time() + seconds
        order = make_pull(make_plan(address, **(plan or {})), keyring=minted_by, **grant)
        return await transport.fetch(order, expectation, sink or ListSink(), deadline)
    finally:
        transport.close()
