"""Many clients at once: none waits behind a limit that nobody set, and none costs the workers more than one request."""

import asyncio
from typing import Any

import pytest

from gateway.edge.contract import Ending

HANG, CLOSE = "hang", "close"
EVENT = b"9\r\ndata: a\n\n\r\n"
STREAM_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
OK = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"
RETRIES = 5


@pytest.mark.parametrize("count", [150, 600])
async def test_a_worker_sees_all_streams_at_once(gateway: Any, settled: Any, count: int) -> None:
    gateway.limit(connections_max=count)
    worker = await gateway.worker([STREAM_HEAD + EVENT, HANG])
    clients = [await gateway.client() for _ in range(count)]
    for client in clients:
        client.post()
    async with asyncio.timeout(20):
        for client in clients:
            await client.reader.readuntil(EVENT)
    assert (len(worker.requests), worker.open) == (count, count)
    assert len(gateway.handler.pools[0]) == count
    for client in clients:
        client.reset()
    await settled(lambda: worker.open == 0)
    assert [journey.ends[0].ending for journey in gateway.handler.journeys] == [Ending.CLIENT_GONE] * count


async def test_connections_are_used_again_by_whoever_comes(gateway: Any) -> None:
    gateway.limit(connections_max=100)
    worker = await gateway.worker([OK])
    clients = [await gateway.client() for _ in range(100)]
    for _ in range(6):
        for client in clients:
            client.post()
        for client in clients:
            assert (await client.answer()).content == b"ok"
    assert len(worker.requests) == 600
    assert len(worker.connections) <= 100


@pytest.mark.parametrize("script", [[HANG], [STREAM_HEAD + EVENT, HANG]], ids=["unanswered", "streaming"])
async def test_retries_of_impatient_clients_do_not_pile_up(gateway: Any, settled: Any, script: list[Any]) -> None:
    """Clients that give up and ask again: never more requests at the worker than clients that still wait."""
    count = 20
    worker = await gateway.worker(script)
    for attempt in range(1, 1 + RETRIES):
        clients = [await gateway.client() for _ in range(count)]
        for client in clients:
            client.post()
        await settled(lambda asked=attempt * count: len(worker.requests) == asked)
        assert worker.open == len(gateway.handler.pools[0]) == count
        for number, client in enumerate(clients):
            if number % 2:
                client.reset()
            else:
                await client.close()
        await settled(lambda: worker.open == 0)
    assert len(gateway.handler.journeys) == len(worker.requests) == RETRIES * count
    assert {journey.ends[0].ending for journey in gateway.handler.journeys} == {Ending.CLIENT_GONE}


async def test_a_request_that_is_tried_elsewhere_is_at_one_worker_at_a_time(gateway: Any) -> None:
    """Before another worker is asked, the one that failed has no connection of this request left."""
    first = await gateway.worker([CLOSE])
    second = await gateway.worker([OK])
    pools = list(gateway.handler.pools)
    held: list[tuple[int, int]] = []
    begin = gateway.handler._journey

    def watched(inbound: Any) -> Any:
        journey = begin(inbound)
        failed = journey.failed

        def counted(failure: Any) -> bool:
            held.append((len(pools[0]) - pools[0].idle, len(pools[1]) - pools[1].idle))
            return failed(failure)  # type: ignore[no-any-return]

        journey.failed = counted
        return journey

    gateway.handler._journey = watched
    client = await gateway.client()
    for _ in range(10):
        client.post()
        assert (await client.answer()).content == b"ok"
    assert held == [(0, 0)] * 10
    assert (len(first.requests), len(second.requests)) == (10, 10)
