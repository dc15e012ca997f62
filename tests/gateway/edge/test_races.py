"""What crosses on the way: a farewell and a request, the end of a client's input and its last messages."""

from typing import Any

from gateway.edge.contract import Ending

CLOSE = "close"
OK = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"
FAREWELL = b"HTTP/1.1 408 Request Timeout\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"


def post(body: bytes) -> bytes:
    return b"POST /v1/x HTTP/1.1\r\nHost: h\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)


async def test_a_farewell_to_an_idle_connection_is_no_answer(gateway: Any) -> None:
    worker = await gateway.worker([OK], [FAREWELL, CLOSE], [OK])
    client = await gateway.client()
    for _ in range(2):
        client.post()
        assert (await client.answer()).content == b"ok"
    # The request that it has crossed was asked again, on a new connection.
    assert len(worker.requests) == 3
    assert len(worker.connections) == 2
    assert [journey.ends[0].ending for journey in gateway.handler.journeys] == [Ending.COMPLETE] * 2


async def test_a_farewell_on_a_new_connection_is_passed_on(gateway: Any) -> None:
    await gateway.worker([FAREWELL, CLOSE])
    client = await gateway.client()
    client.post()
    assert (await client.answer()).status == 408


async def test_what_a_half_closed_client_has_asked_is_answered_to_the_last(gateway: Any) -> None:
    """Also behind a message that is answered at once."""
    await gateway.worker([0.02, OK])
    client = await gateway.client()
    client.send(post(b"{}") + post(b"refuse") + post(b"refuse") + post(b"{}"))
    client.writer.write_eof()
    assert [(await client.answer()).status for _ in range(4)] == [200, 400, 400, 200]
    assert await client.at_end()


async def test_half_a_message_behind_the_last_answer_is_not_waited_for(gateway: Any) -> None:
    await gateway.worker([0.02, OK])
    for half in (b"POST /v1/x HTTP/1.1\r\nHo", post(b"{}")[:-1]):
        client = await gateway.client()
        client.send(post(b"{}") + post(b"refuse") + half)
        client.writer.write_eof()
        assert [(await client.answer()).status for _ in range(2)] == [200, 400]
        assert await client.at_end()
