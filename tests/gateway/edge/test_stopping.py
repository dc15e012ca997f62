"""A gateway that stops: what has begun is finished, and what is not finished in time breaks off honestly."""

import asyncio
import json
from typing import Any

from gateway.edge.contract import Ending

HANG = "hang"
OK = [b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"]
LARGE_HEAD = b"HTTP/1.1 200 OK\r\ncontent-length: 9000000\r\n\r\n"
STREAM_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


async def test_a_running_exchange_is_finished(gateway: Any) -> None:
    await gateway.worker([0.3, b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2\r\nab\r\n", 0.2, b"0\r\n\r\n"])
    idle, busy, cold = [await gateway.client() for _ in range(3)]
    busy.post(b"{}")
    cold.send(b"GET /slow HTTP/1.1\r\nHost: h\r\n\r\n")
    await asyncio.sleep(0.1)
    stopping = asyncio.create_task(gateway.server.shutdown())
    assert await idle.at_end()
    answer, cold_answer = await busy.answer(), await cold.answer()
    assert (answer.content, answer.complete, answer.get(b"connection")) == (b"ab", True, b"close")
    assert cold_answer.content == b"cold:"
    assert await busy.at_end()
    assert await cold.at_end()
    await asyncio.wait_for(stopping, 5)
    assert gateway.journey.ends[0].ending is Ending.COMPLETE


async def test_an_idle_connection_is_kept_for_a_moment(gateway: Any) -> None:
    """A request may be on its way to it."""
    await gateway.worker(OK)
    client, silent = await gateway.client(), await gateway.client()
    client.post(b"{}")
    assert (await client.answer()).get(b"connection") is None
    stopping = asyncio.create_task(gateway.server.shutdown())
    await asyncio.sleep(0.1)
    client.post(b"{}")
    answer = await client.answer()
    assert (answer.status, answer.get(b"connection")) == (200, b"close")
    assert await client.at_end()
    assert await silent.at_end()
    await asyncio.wait_for(stopping, 5)


async def test_what_is_not_finished_in_time_breaks_off_honestly(gateway: Any, settled: Any) -> None:
    """Who has no answer yet is refused, who has a part of one is told so or sees it cut short, half a request is not
    waited for."""
    stream = STREAM_HEAD + b"9\r\ndata: 1\n\n\r\n"
    worker = await gateway.worker([HANG], [stream, HANG], [LARGE_HEAD + b"half", HANG])
    unanswered, streaming, half_answered, half_asked, cold = [await gateway.client() for _ in range(5)]
    for number, client in enumerate((unanswered, streaming, half_answered)):
        client.post(b"{}")
        await settled(lambda number=number: len(worker.requests) == number + 1)
    half_asked.send(b"POST /v1/x HTTP/1.1\r\nHost: h\r\nContent-Length: 9\r\n\r\nhalf")
    cold.send(b"GET /slow HTTP/1.1\r\nHost: h\r\n\r\n")
    await asyncio.sleep(0.1)
    gateway.edge.stop()
    for client in (unanswered, half_asked, cold):
        answer = await client.answer()
        assert (answer.status, answer.get(b"retry-after"), answer.get(b"connection")) == (503, b"1", b"close")
        assert json.loads(answer.content)["error"]["code"] == "shutting_down"
    answer = await streaming.answer()
    assert (answer.status, answer.complete) == (200, False)
    told = json.loads(answer.content.removeprefix(b"data: 1\n\ndata: "))
    assert told["error"]["message"] == "The gateway stopped before the end of the answer."
    answer = await half_answered.answer()
    assert (answer.status, answer.complete, answer.content) == (200, False, b"half")
    for client in gateway.clients:
        assert await client.at_end()
    await settled(lambda: worker.open == 0)
    endings = [journey.ends[0].ending for journey in gateway.handler.journeys]
    assert endings == [Ending.REFUSED, Ending.STOPPED, Ending.STOPPED]


async def test_a_request_that_is_being_decided_is_refused_in_the_end(gateway: Any) -> None:
    gateway.handler.decision_seconds = 60.0
    client = await gateway.client()
    client.post(b"{}")
    await asyncio.sleep(0.05)
    gateway.edge.stop()
    assert (await client.answer()).status == 503
    assert await client.at_end()
    assert gateway.handler.journeys == []
