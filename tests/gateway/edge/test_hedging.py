"""Two workers for one request: who is heard, who is dropped, and that both legs are accounted for."""

from typing import Any

import pytest

from gateway.edge.contract import Ending, Patience
from gateway.reliability.failures import (
    BODY_CUT,
    CONNECT_REFUSED,
    CONNECTION_LOST,
    FIRST_BYTE_TIMEOUT,
    TIME_OVER,
    WORKER_ERROR,
    WORKER_UNAVAILABLE,
)

CLOSE, HANG = "close", "hang"
OK = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"
SECOND = b"HTTP/1.1 200 OK\r\ncontent-length: 6\r\n\r\nsecond"
STREAM_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
UNAVAILABLE = b"HTTP/1.1 503 No\r\ncontent-length: 2\r\n\r\nno"
END = b"0\r\n\r\n"
SOON = 0.05


def event(text: str) -> bytes:
    data = f'data: {{"text":"{text}"}}\n\n'.encode()
    return b"%x\r\n%b\r\n" % (len(data), data)


@pytest.fixture
def hedging(gateway: Any) -> Any:
    gateway.handler.patience = Patience(hedge_seconds=SOON)
    return gateway


def endings(gateway: Any) -> tuple[Ending, Ending | None]:
    journey = gateway.journey
    return journey.ends[0].ending, journey.second.ends[0].ending if journey.second else None


async def test_an_answer_in_time_asks_nobody_else(hedging: Any) -> None:
    await hedging.worker([OK], [STREAM_HEAD + event("a"), 0.1, END])
    second = await hedging.worker([SECOND])
    client = await hedging.client()
    client.post()
    assert (await client.answer()).content == b"ok"
    client.post()  # slow to end, but not to begin
    assert (await client.answer()).wire == event("a") + END
    assert second.requests == []
    assert [journey.second for journey in hedging.handler.journeys] == [None, None]


@pytest.mark.parametrize("script", [[HANG], [STREAM_HEAD, HANG]], ids=["nothing", "a head"])
async def test_the_second_is_heard_where_the_first_says_nothing(hedging: Any, settled: Any, script: list[Any]) -> None:
    first = await hedging.worker(script)
    second = await hedging.worker([SECOND])
    client = await hedging.client()
    client.post(b"body")
    answer = await client.answer()
    assert (answer.content, answer.get(b"x-gateway")) == (b"second", b"second")
    await settled(lambda: first.open == 0)
    assert [request.body for request in first.requests + second.requests] == [b"body"] * 2
    assert endings(hedging) == (Ending.OVERTAKEN, Ending.COMPLETE)
    client.post()  # the client's connection is sound
    assert (await client.answer()).content == b"second"


@pytest.mark.parametrize("pieces", [1, 3])
async def test_a_stream_of_the_second(hedging: Any, settled: Any, pieces: int) -> None:
    """However its head and its first event come."""
    first = await hedging.worker([STREAM_HEAD, HANG])
    script: list[Any] = [STREAM_HEAD + event("a") + END]
    if pieces == 3:
        script = [STREAM_HEAD, 0.02, event("a"), 0.02, event("b") + END]
    await hedging.worker(script)
    client = await hedging.client()
    client.post()
    answer = await client.answer()
    assert answer.wire == event("a") + (event("b") if pieces == 3 else b"") + END
    assert answer.get(b"x-gateway") == b"second"
    assert hedging.journey.second.first_bytes == 1
    assert hedging.journey.first_bytes == 0
    await settled(lambda: first.open == 0)


async def test_the_first_is_heard_where_it_is_first_after_all(hedging: Any, settled: Any) -> None:
    await hedging.worker([STREAM_HEAD, SOON * 3, event("a"), 0.02, END])
    second = await hedging.worker([STREAM_HEAD, HANG])
    client = await hedging.client()
    client.post()
    answer = await client.answer()
    assert (answer.wire, answer.get(b"x-gateway")) == (event("a") + END, b"yes")
    await settled(lambda: second.open == 0)
    assert len(second.requests) == 1
    assert endings(hedging) == (Ending.COMPLETE, Ending.OVERTAKEN)


@pytest.mark.parametrize(
    ("script", "failure"),
    [([CLOSE], CONNECTION_LOST), ([UNAVAILABLE], WORKER_UNAVAILABLE), ([STREAM_HEAD, 0.02, CLOSE], BODY_CUT)],
    ids=["lost", "503", "cut after its head"],
)
async def test_a_second_that_fails_is_not_missed(hedging: Any, script: list[Any], failure: Any) -> None:
    await hedging.worker([STREAM_HEAD, SOON * 3, event("a") + END])
    await hedging.worker(script)
    client = await hedging.client()
    client.post()
    answer = await client.answer()
    assert (answer.wire, answer.get(b"x-gateway")) == (event("a") + END, b"yes")
    assert hedging.journey.second.failures == [failure]
    assert endings(hedging) == (Ending.COMPLETE, Ending.OVERTAKEN)


async def test_a_second_that_cannot_be_reached(hedging: Any) -> None:
    await hedging.worker([SOON * 3, OK])
    hedging.refuse()
    client = await hedging.client()
    client.post()
    assert (await client.answer()).content == b"ok"
    assert hedging.journey.second.failures == [CONNECT_REFUSED]


@pytest.mark.parametrize(
    ("script", "failure"),
    [
        ([SOON * 2, CLOSE], CONNECTION_LOST),
        ([SOON * 2, UNAVAILABLE], WORKER_UNAVAILABLE),
        ([STREAM_HEAD, SOON * 2, CLOSE], CONNECTION_LOST),
    ],
    ids=["lost", "503", "cut after its head"],
)
async def test_a_first_that_fails_leaves_it_to_the_second(hedging: Any, script: list[Any], failure: Any) -> None:
    """Without a third attempt."""
    await hedging.worker(script)
    second = await hedging.worker([SOON * 3, SECOND])
    third = await hedging.worker([OK])
    client = await hedging.client()
    client.post()
    assert (await client.answer()).content == b"second"
    assert hedging.journey.failures == [failure]
    assert (len(second.requests), len(third.requests)) == (1, 0)
    assert endings(hedging) == (Ending.OVERTAKEN, Ending.COMPLETE)


async def test_a_second_that_has_taken_over_may_fail_in_its_turn(hedging: Any) -> None:
    await hedging.worker([SOON * 2, CLOSE])
    await hedging.worker([SOON * 3, CLOSE])
    third = await hedging.worker([OK])
    client = await hedging.client()
    client.post()
    assert (await client.answer()).content == b"ok"
    assert hedging.journey.second.failures == [CONNECTION_LOST]
    assert len(third.requests) == 1


async def test_a_first_that_fails_early_is_retried_without_a_second(hedging: Any) -> None:
    await hedging.worker([CLOSE])
    second = await hedging.worker([SOON * 2, OK])
    client = await hedging.client()
    client.post()
    assert (await client.answer()).content == b"ok"
    assert (hedging.journey.second, len(second.requests)) == (None, 1)


async def test_an_error_of_the_firsts_own_ends_both(hedging: Any, settled: Any) -> None:
    await hedging.worker([SOON * 2, b"HTTP/1.1 500 Oh\r\ncontent-length: 2\r\n\r\noh"])
    second = await hedging.worker([HANG])
    client = await hedging.client()
    client.post()
    assert (await client.answer()).status == 500
    assert hedging.journey.failures == [WORKER_ERROR]
    await settled(lambda: second.open == 0)


@pytest.mark.parametrize("script", [[HANG], [STREAM_HEAD, HANG]], ids=["nothing", "a head"])
async def test_a_client_that_leaves_leaves_both(hedging: Any, settled: Any, script: list[Any]) -> None:
    first = await hedging.worker(script)
    second = await hedging.worker(script)
    client = await hedging.client()
    client.post()
    await settled(lambda: second.requests)
    client.reset()
    await settled(lambda: first.open == second.open == 0)
    assert endings(hedging) == (Ending.CLIENT_GONE, Ending.CLIENT_GONE)


async def test_nobody_else_to_ask(hedging: Any) -> None:
    """The head that was held back is passed on."""
    await hedging.worker([STREAM_HEAD, SOON * 2, HANG])
    client = await hedging.client()
    client.post()
    answer = await client.answer(head_only=True)
    assert (answer.status, answer.get(b"x-gateway")) == (200, b"yes")
    await client.close()


async def test_never_more_than_two_at_once(hedging: Any, settled: Any) -> None:
    workers = [await hedging.worker([HANG]) for _ in range(4)]
    client = await hedging.client()
    client.post()
    await settled(lambda: workers[1].requests)
    hedging.deadlines.first_byte_seconds = 0.15
    hedging.sweep()
    await settled(lambda: hedging.journey.failures == [FIRST_BYTE_TIMEOUT])
    assert [worker.open for worker in workers][2:] == [0, 0]
    assert (await client.answer()).status == 504
    await settled(lambda: not any(worker.open for worker in workers))
    assert hedging.journey.second.failures == [FIRST_BYTE_TIMEOUT]


async def test_the_requests_own_time_ends_both(gateway: Any, settled: Any) -> None:
    gateway.handler.patience = Patience(total_seconds=0.2, hedge_seconds=SOON)
    workers = [await gateway.worker([STREAM_HEAD, HANG]) for _ in range(2)]
    client = await gateway.client()
    client.post()
    assert (await client.answer()).status == 504
    await settled(lambda: not any(worker.open for worker in workers))
    assert gateway.journey.failures == [TIME_OVER]
    assert endings(gateway) == (Ending.REFUSED, Ending.OVERTAKEN)


async def test_a_half_closed_client_is_not_told_in_the_middle_of_nothing(hedging: Any, settled: Any) -> None:
    """A head that is held back is no answer yet: `102 Processing` may still come before it."""
    await hedging.worker([STREAM_HEAD, SOON * 4, event("a") + END])
    second = await hedging.worker([HANG])
    client = await hedging.client()
    client.post()
    client.writer.write_eof()
    await settled(lambda: second.requests)
    answer = await client.answer()
    assert answer.wire == event("a") + END
    assert 102 in answer.interim
