"""A request of the gateway's own over real sockets: what ends it, and what is left of its connection."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from gateway.edge.errand import Errand, ErrandFailed
from gateway.edge.upstream import UpstreamPool
from tests.gateway.edge.conftest import CLOSE, HANG, RESET, Script, Worker, eventually

OK = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"
PARTS = [b"POST /v1/completions HTTP/1.1\r\nhost: w\r\ncontent-length: 2\r\n\r\n", b"{}"]


@pytest.fixture
async def worker() -> AsyncIterator[Worker]:
    worker = Worker()
    yield worker
    await worker.stop()


async def connections_to(worker: Worker, *scripts: Script) -> UpstreamPool:
    worker.scripts = list(scripts)
    return await worker.start()


@pytest.mark.parametrize(
    "script",
    [
        [OK],
        [b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n", 0.01, b"o", 0.01, b"k"],
        [b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n", 0.01, b"2\r\nok\r\n", 0.01, b"0\r\n\r\n"],
    ],
)
async def test_the_answer_is_waited_for_and_its_connection_kept(worker: Worker, script: Script) -> None:
    connections = await connections_to(worker, script)
    for _ in range(2):
        head = await Errand(connections, PARTS).run(1.0)
        assert head.status == 200
    assert (len(worker.connections), connections.idle) == (1, 1)
    assert [request.body for request in worker.requests] == [b"{}", b"{}"]
    connections.close_idle()
    await eventually(lambda: worker.open == 0)


async def test_an_error_is_an_answer(worker: Worker) -> None:
    connections = await connections_to(worker, [b"HTTP/1.1 500 Oh\r\ncontent-length: 0\r\n\r\n", CLOSE])
    assert (await Errand(connections, PARTS).run(1.0)).status == 500


async def test_the_end_of_the_answer_is_at_hand(worker: Worker) -> None:
    body = b"x" * 10_000 + b"the end"
    head = b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(body)
    errand = Errand(await connections_to(worker, [head + body[:100], 0.01, body[100:], CLOSE]), PARTS)
    await errand.run(1.0)
    assert errand.tail == body[-4096:]


async def test_a_connection_that_went_stale_says_nothing(worker: Worker) -> None:
    connections = await connections_to(worker, [OK], [RESET], [OK, CLOSE])
    await Errand(connections, PARTS).run(1.0)
    assert (await Errand(connections, PARTS).run(1.0)).status == 200
    assert len(worker.connections) == 2


@pytest.mark.parametrize("script", [[CLOSE], [RESET], [OK[:20], CLOSE], [OK[:-1], RESET]])
async def test_a_worker_that_breaks_off(worker: Worker, script: Script) -> None:
    connections = await connections_to(worker, script)
    with pytest.raises(ErrandFailed, match="broke off: "):
        await Errand(connections, PARTS).run(1.0)
    assert len(worker.requests) == 1
    assert len(connections) == 0


async def test_nobody_listens(worker: Worker) -> None:
    connections = await connections_to(worker, [OK])
    await worker.stop()
    with pytest.raises(ErrandFailed, match="could not be reached: the connection was refused"):
        await Errand(connections, PARTS).run(1.0)


async def test_who_no_longer_waits_drops_the_connection(worker: Worker) -> None:
    connections = await connections_to(worker, [HANG])
    waiting = asyncio.create_task(Errand(connections, PARTS).run(1.0))
    await eventually(lambda: len(worker.requests) == 1)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    await eventually(lambda: worker.open == 0)
    assert (len(connections), connections.idle) == (0, 0)


async def test_a_deadline_is_the_callers(worker: Worker) -> None:
    connections = await connections_to(worker, [OK[:10], HANG])
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.05):
            await Errand(connections, PARTS).run(1.0)
    await eventually(lambda: worker.open == 0)
