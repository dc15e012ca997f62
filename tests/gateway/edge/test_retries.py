"""What is tried elsewhere, what is passed on, and a request's own time."""

import json
from typing import Any

import pytest

from gateway.edge.contract import Ending, Patience
from gateway.reliability.failures import (
    TIME_OVER,
    TIME_OVER_MIDWAY,
    WORKER_BUSY,
    WORKER_ERROR,
    WORKER_UNAVAILABLE,
    Failure,
)

HANG = "hang"
OK = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"
STREAM_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


def event(text: str) -> bytes:
    data = f'data: {{"text":"{text}"}}\n\n'.encode()
    return b"%x\r\n%b\r\n" % (len(data), data)


def answer_of(status: int, body: bytes = b'{"error":{}}') -> bytes:
    return b"HTTP/1.1 %d No\r\nretry-after: 7\r\ncontent-length: %d\r\n\r\n%b" % (status, len(body), body)


ELSEWHERE = [(429, WORKER_BUSY), (502, WORKER_UNAVAILABLE), (503, WORKER_UNAVAILABLE), (504, WORKER_UNAVAILABLE)]


@pytest.mark.parametrize(("status", "failure"), ELSEWHERE)
@pytest.mark.parametrize("in_one_read", [True, False])
async def test_a_worker_that_cannot_now_is_replaced(
    gateway: Any, status: int, failure: Failure, in_one_read: bool
) -> None:
    whole = answer_of(status)
    script = [whole] if in_one_read else [whole[:-5], 0.02, whole[-5:]]
    first = await gateway.worker(script)
    second = await gateway.worker([OK])
    client = await gateway.client()
    for _ in range(2):
        client.post(b"body")
        answer = await client.answer()
        assert (answer.status, answer.content) == (200, b"ok")
    assert [journey.failures for journey in gateway.handler.journeys] == [[failure]] * 2
    assert [request.body for request in first.requests + second.requests] == [b"body"] * 4


@pytest.mark.parametrize(("status", "failure"), ELSEWHERE)
async def test_if_nobody_else_is_left_its_own_answer_is_passed_on(gateway: Any, status: int, failure: Failure) -> None:
    await gateway.worker([answer_of(503)])
    await gateway.worker([answer_of(status, b'{"error":{"message":"mine"}}')])
    client = await gateway.client()
    client.post()
    answer = await client.answer()
    assert (answer.status, answer.content) == (status, b'{"error":{"message":"mine"}}')
    assert answer.get(b"retry-after") == b"7"
    assert gateway.journey.failures == [WORKER_UNAVAILABLE, failure]
    assert gateway.journey.ends[0].ending is Ending.COMPLETE


@pytest.mark.parametrize("status", [400, 404, 413, 422])
async def test_what_is_the_clients_fault_is_nobodys_failure(gateway: Any, status: int) -> None:
    await gateway.worker([answer_of(status)])
    elsewhere = await gateway.worker([OK])
    client = await gateway.client()
    client.post()
    assert (await client.answer()).status == status
    assert (gateway.journey.failures, elsewhere.requests) == ([], [])


@pytest.mark.parametrize("status", [500, 505, 599])
async def test_a_workers_error_is_told_of_and_passed_on(gateway: Any, status: int) -> None:
    await gateway.worker([answer_of(status)])
    elsewhere = await gateway.worker([OK])
    client = await gateway.client()
    client.post()
    assert (await client.answer()).status == status
    assert (gateway.journey.failures, elsewhere.requests) == ([WORKER_ERROR], [])


# A request's own time


async def test_a_request_whose_time_is_over_is_refused(gateway: Any, settled: Any) -> None:
    gateway.handler.patience = Patience(total_seconds=0.1)
    worker = await gateway.worker([HANG])
    elsewhere = await gateway.worker([OK])
    client = await gateway.client()
    client.post()
    answer = await client.answer()
    assert (answer.status, json.loads(answer.content)["error"]["code"]) == (504, "deadline_exceeded")
    await settled(lambda: worker.open == 0)
    assert (gateway.journey.failures, elsewhere.requests) == ([TIME_OVER], [])
    assert gateway.journey.ends == [(Ending.REFUSED, 504, 0, b"")]


async def test_an_answer_whose_time_is_over_breaks_off(gateway: Any, settled: Any) -> None:
    gateway.handler.patience = Patience(total_seconds=0.1)
    worker = await gateway.worker([STREAM_HEAD + event("a"), HANG])
    client = await gateway.client()
    client.post()
    answer = await client.answer()
    assert (answer.status, answer.complete) == (200, False)
    assert answer.wire.startswith(event("a"))
    assert json.loads(answer.content.split(b"data: ")[-1])["error"]["code"] == "deadline_exceeded"
    await settled(lambda: worker.open == 0)
    assert gateway.journey.failures == [TIME_OVER_MIDWAY]


async def test_time_enough_is_nothing_to_speak_of(gateway: Any, settled: Any) -> None:
    gateway.handler.patience = Patience(total_seconds=0.15)
    await gateway.worker([OK])
    client = await gateway.client()
    client.post()
    assert (await client.answer()).content == b"ok"
    gateway.handler.patience = None
    gateway.handler.pools[0].close_idle()
    gateway.workers[0].scripts = [[0.3, OK]]
    client.post()  # the first one's time is over within this one's
    assert (await client.answer()).content == b"ok"


async def test_no_time_at_all(gateway: Any) -> None:
    gateway.handler.patience = Patience(total_seconds=0.0)
    await gateway.worker([0.05, OK])
    client = await gateway.client()
    client.post()
    assert (await client.answer()).status == 504
