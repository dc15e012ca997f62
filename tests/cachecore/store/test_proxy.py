"""The network that misbehaves on command does what it says, and nothing else."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from tests.cachecore.store.proxy import FaultProxy


@asynccontextmanager
async def echo() -> AsyncIterator[int]:
    """A server that says what it hears. Its port."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(65_536):
                writer.write(data)
        except ConnectionError:
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        yield server.sockets[0].getsockname()[1]


@pytest.fixture
async def proxy() -> AsyncIterator[FaultProxy]:
    async with echo() as port, FaultProxy(port) as proxy:
        yield proxy


async def test_a_narrow_way_takes_its_time_and_loses_nothing(proxy: FaultProxy) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", proxy.port)
    proxy.bytes_per_second = 10_000
    began = asyncio.get_running_loop().time()
    for _ in range(4):
        writer.write(b"x" * 500)
        await asyncio.sleep(0.01)
    assert await reader.readexactly(2_000) == b"x" * 2_000
    # 2,000 bytes there, and the last 500 back again.
    assert asyncio.get_running_loop().time() - began >= 0.24
    proxy.bytes_per_second = float("inf")
    writer.write(b"again")
    assert await reader.readexactly(5) == b"again"
    writer.close()


async def test_order_is_kept_when_a_way_widens(proxy: FaultProxy) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", proxy.port)
    proxy.bytes_per_second = 2_000
    writer.write(b"a" * 200)
    await asyncio.sleep(0.02)
    proxy.bytes_per_second = float("inf")
    writer.write(b"b" * 200)
    assert await reader.readexactly(400) == b"a" * 200 + b"b" * 200
    writer.close()


async def test_answers_end_in_good_order(proxy: FaultProxy) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", proxy.port)
    writer.write(b"one")
    assert await reader.readexactly(3) == b"one"
    proxy.end_answers()
    assert await reader.read() == b""
    writer.write(b"two")
    writer.close()
    again, writer = await asyncio.open_connection("127.0.0.1", proxy.port)
    writer.write(b"three")
    assert await again.readexactly(5) == b"three"
    writer.close()
