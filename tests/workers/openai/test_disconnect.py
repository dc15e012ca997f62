"""A client that leaves takes its work with it, within one step."""

import asyncio
import json
from typing import Any

import pytest

from workers.simulated.fleet import SimulatedWorker


async def until(condition: Any, seconds: float = 10) -> None:
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.005)


async def send(worker: SimulatedWorker, body: dict[str, Any]) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A completion request on a connection of its own."""
    reader, writer = await asyncio.open_connection("127.0.0.1", worker.server.port)
    payload = json.dumps(body).encode()
    writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n%s" % (len(payload), payload))
    await writer.drain()
    return reader, writer


@pytest.fixture
async def slow_worker(start_worker: Any) -> SimulatedWorker:
    worker: SimulatedWorker = await start_worker(speed=0.2)
    return worker


@pytest.mark.parametrize("choices", [1, 3])
@pytest.mark.parametrize("stream", [True, False])
async def test_leaving_while_tokens_come(slow_worker: SimulatedWorker, stream: bool, choices: int) -> None:
    metrics = slow_worker.engine.metrics
    body = {"prompt": "x" * 100, "max_tokens": 10_000, "stream": stream, "n": choices}
    reader, writer = await send(slow_worker, body)
    if stream:
        await reader.readuntil(b"data: ")
    await until(lambda: slow_worker.engine.metrics.generation_tokens >= 2 * choices)
    writer.close()
    said = metrics.generation_tokens
    await until(lambda: slow_worker.engine.metrics.requests_running == 0)
    assert slow_worker.engine.metrics.generation_tokens <= said + 2 * choices
    assert metrics.requests_finished == {"abort": choices}
    assert slow_worker.engine.metrics.kv_cache_usage == 0


@pytest.mark.parametrize("stream", [True, False])
async def test_leaving_during_prefill(start_worker: Any, stream: bool) -> None:
    worker = await start_worker(speed=0.05, batch_tokens_max=512)
    _, writer = await send(worker, {"prompt": [1] * 60_000, "max_tokens": 5, "stream": stream})
    await until(lambda: worker.engine.metrics.requests_running == 1)
    writer.close()
    await until(lambda: worker.engine.metrics.requests_running == 0)
    assert worker.engine.metrics.requests_finished == {"abort": 1}
    assert worker.engine.metrics.generation_tokens == 0
    # Far from all of the prompt was computed: 117 chunks of 0.4 s were ahead.
    assert len(worker.engine.cached_handles()) < 60_000 // 16 // 2


async def test_leaving_while_waiting_in_the_queue(start_worker: Any) -> None:
    worker = await start_worker(speed=0.2, sequences_max=1)
    _, first = await send(worker, {"prompt": "a", "max_tokens": 10_000})
    await until(lambda: worker.engine.metrics.requests_running == 1)
    _, second = await send(worker, {"prompt": "b", "max_tokens": 10})
    await until(lambda: worker.engine.metrics.requests_waiting == 1)
    second.close()
    await until(lambda: worker.engine.metrics.requests_waiting == 0)
    assert worker.engine.metrics.requests_running == 1
    first.close()
    await until(lambda: worker.engine.metrics.requests_running == 0)
    assert worker.engine.metrics.requests_finished == {"abort": 2}


async def test_the_others_go_on(slow_worker: SimulatedWorker) -> None:
    reader, writer = await send(slow_worker, {"prompt": "stays", "max_tokens": 8})
    _, leaving = await send(slow_worker, {"prompt": "leaves", "max_tokens": 8})
    await until(lambda: slow_worker.engine.metrics.requests_running == 2)
    leaving.close()
    head = await reader.readuntil(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 ")
    length = int(head.split(b"content-length: ")[1].split(b"\r\n")[0])
    assert json.loads(await reader.readexactly(length))["usage"]["completion_tokens"] == 8
    writer.close()


async def test_stopping_ends_live_streams(start_worker: Any) -> None:
    worker = await start_worker(speed=0.2)
    reader, writer = await send(worker, {"prompt": "x", "max_tokens": 10_000, "stream": True})
    await reader.readuntil(b"data: ")
    await worker.server.stop()
    rest = await reader.read()
    assert b'"finish_reason":"abort"' in rest
    assert rest.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
    writer.close()
