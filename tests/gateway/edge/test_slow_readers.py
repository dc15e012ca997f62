"""Clients that take nothing of what they are owed, or little: what is kept for them, and for how long."""

import asyncio
from typing import Any

import pytest

from gateway.edge.contract import Ending
from gateway.edge.http1 import HEADER_BYTES_MAX

HANG = "hang"
REFUSED = b"POST /v1/x HTTP/1.1\r\nHost: h\r\nContent-Length: 6\r\n\r\nrefuse"
LARGE_HEAD = b"HTTP/1.1 200 OK\r\ncontent-length: 9000000\r\n\r\n"


async def test_a_client_that_takes_nothing_is_reset_and_its_worker_told(gateway: Any, settled: Any) -> None:
    gateway.limit(write_seconds_max=0.2)
    worker = await gateway.worker([LARGE_HEAD + b"x" * 4_000_000, HANG])
    client = await gateway.client(receive_buffer_bytes=16_384)
    client.writer.transport.pause_reading()
    client.post()
    await settled(lambda: bool(gateway.edge.connections) and next(iter(gateway.edge.connections))._writing_paused)
    await asyncio.sleep(0.5)
    assert worker.open == 1, "nobody has swept yet"
    gateway.sweep()
    await settled(lambda: worker.open == 0)
    assert [end.ending for end in gateway.journey.ends] == [Ending.CLIENT_GONE]
    assert gateway.edge.stalled_count == 1
    client.writer.transport.resume_reading()
    with pytest.raises((ConnectionResetError, asyncio.IncompleteReadError)):
        await client.reader.readexactly(9_000_000)


async def test_a_client_that_reads_slowly_gets_everything(gateway: Any) -> None:
    """It takes a piece from time to time, all of it in many times the time in which it must take something."""
    gateway.limit(write_seconds_max=0.3)
    gateway.sweep()
    size = 1_000_000
    await gateway.worker([b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % size + b"x" * size])
    client = await gateway.client(receive_buffer_bytes=16_384)
    client.post()
    head = await client.reader.readuntil(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 OK")
    received, started = 0, asyncio.get_running_loop().time()
    while received < size:
        received += len(await client.reader.read(100_000))
        await asyncio.sleep(0.05)
    assert received == size
    assert asyncio.get_running_loop().time() - started > 0.5
    assert gateway.edge.stalled_count == 0


async def test_what_is_kept_for_a_client_that_reads_nothing_is_bounded(gateway: Any, settled: Any) -> None:
    """64 KiB, asyncio's mark, and one read of the worker, which is 256 KiB at most."""
    await gateway.worker([LARGE_HEAD, *[b"x" * 50_000] * 180])
    clients = [await gateway.client(receive_buffer_bytes=16_384) for _ in range(8)]
    for client in clients:
        client.writer.transport.pause_reading()
        client.post()
    await settled(lambda: len(gateway.edge.connections) == 8)
    await settled(lambda: all(connection._writing_paused for connection in gateway.edge.connections))
    await settled(lambda: gateway.read_workers == 0)
    await asyncio.sleep(0.2)
    kept = [connection._transport.get_write_buffer_size() for connection in gateway.edge.connections]
    assert max(kept) <= 65_536 + 262_144
    assert gateway.read_workers == 0, "the workers wait"
    for client in clients:
        client.writer.transport.resume_reading()
        answer = await client.answer()
        assert (answer.complete, len(answer.content)) == (True, 9_000_000)


async def test_refusals_that_nobody_reads_end_the_reading(gateway: Any, settled: Any) -> None:
    """Whoever sends requests and takes no answer is not answered further: what it is owed would grow without end."""
    client = await gateway.client(receive_buffer_bytes=16_384)
    client.writer.transport.pause_reading()
    sender = asyncio.create_task(_send_for_ever(client, REFUSED * 200))
    await settled(lambda: bool(gateway.edge.connections) and next(iter(gateway.edge.connections))._writing_paused)
    await asyncio.sleep(0.5)
    (connection,) = gateway.edge.connections
    assert connection._transport.get_write_buffer_size() < 100_000
    assert len(connection._buffer) <= HEADER_BYTES_MAX + 300_000
    sender.cancel()
    client.writer.transport.resume_reading()
    for _ in range(1000):
        assert (await client.answer()).status == 400
    client.reset()


async def _send_for_ever(client: Any, data: bytes) -> None:
    while True:
        client.send(data)
        await client.writer.drain()
