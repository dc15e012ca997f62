"""Client connections over real sockets: messages one after another, hot and cold, refused and cut short."""

import asyncio
import contextlib
import json
from typing import Any

import pytest

from gateway.edge.contract import Ending
from gateway.edge.http1 import HEADER_BYTES_MAX
from gateway.edge.targets import normalize_target
from gateway.errors import Unavailable

CLOSE, HANG = "close", "hang"
BODY_BYTES_MAX = 1_000_000
COLD = b"GET /cold HTTP/1.1\r\nHost: h\r\n\r\n"


def numbered(number: int) -> list[bytes]:
    body = b"answer %d" % number
    return [b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body)]


def hot(body: bytes, *headers: bytes) -> bytes:
    lines = b"".join(b"%b\r\n" % header for header in headers)
    return b"POST /v1/x HTTP/1.1\r\nHost: h\r\n%bContent-Length: %d\r\n\r\n%b" % (lines, len(body), body)


def chunked(*chunks: bytes, path: bytes = b"/v1/x", trailer: bytes = b"") -> bytes:
    body = b"".join(b"%x;ext\r\n%b\r\n" % (len(chunk), chunk) for chunk in chunks)
    head = b"POST %b HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n" % path
    return head + body + b"0\r\n" + trailer + b"\r\n"


# Targets


@pytest.mark.parametrize(
    ("target", "clean", "path"),
    [
        (b"/v1/x", b"/v1/x", "/v1/x"),
        (b"//v1///x//?a=//", b"/v1/x?a=//", "/v1/x"),
        (b"/v1/x/", b"/v1/x", "/v1/x"),
        (b"/", b"/", "/"),
        (b"//", b"/", "/"),
        (b"/?x", b"/?x", "/"),
        (b"*", b"*", "*"),
        (b"http://host:1/v1//x?y", b"/v1/x?y", "/v1/x"),
        (b"HTTPS://host", b"/", "/"),
        (b"/v1/load%5Flora", b"/v1/load%5Flora", "/v1/load_lora"),
        (b"/v1/%2Fx%2f", b"/v1/%2Fx%2f", "/v1/x"),
        (b"/v1/%255F", b"/v1/%255F", "/v1/%5F"),
        (b"/v1/%", b"/v1/%", "/v1/%"),
        (b"/v1/\xc3\xa9%C3%A9", b"/v1/\xc3\xa9%C3%A9", "/v1/\xc3\xa9\xc3\xa9"),
    ],
)
def test_targets_are_normalized(target: bytes, clean: bytes, path: str) -> None:
    assert normalize_target(target) == (clean, path)


async def test_a_worker_gets_the_normal_target(gateway: Any) -> None:
    worker = await gateway.worker(numbered(1))
    client = await gateway.client()
    client.post(b"{}", b"//v1//x/?q=1")
    await client.answer()
    client.post(b"{}", b"http://other/v1/y%20z")
    await client.answer()
    assert [request.line for request in worker.requests] == [b"POST /v1/x?q=1 HTTP/1.1", b"POST /v1/y%20z HTTP/1.1"]
    assert [journey.inbound.path for journey in gateway.handler.journeys] == ["/v1/x", "/v1/y z"]


# Receiving


async def test_requests_that_come_byte_by_byte(gateway: Any) -> None:
    worker = await gateway.worker(numbered(1))
    client = await gateway.client()
    for message in (hot(b"one"), chunked(b"tw", b"o", trailer=b"X-Sum: 1\r\n"), b"\r\n" + hot(b"three")):
        for byte in message:
            client.send(bytes([byte]))
            await asyncio.sleep(0)
        assert (await client.answer()).content == b"answer 1"
    assert [request.body for request in worker.requests] == [b"one", b"two", b"three"]
    assert [journey.inbound.body for journey in gateway.handler.journeys] == [b"one", b"two", b"three"]


@pytest.mark.parametrize("path", [b"/v1/x", b"/cold"])
async def test_chunked_requests(gateway: Any, path: bytes) -> None:
    await gateway.worker(numbered(1))
    client = await gateway.client()
    content = b"\r\n0\r\n\r\n" * 3
    client.send(chunked(content, b"x" * 70_000, content, path=path) + COLD)
    answer = await client.answer()
    if path == b"/cold":
        assert answer.content == b"cold:" + content + b"x" * 70_000 + content
    else:
        assert gateway.journey.inbound.body == content + b"x" * 70_000 + content
    assert (await client.answer()).content == b"cold:"


@pytest.mark.parametrize("path", [b"/v1/x", b"/cold"])
async def test_a_client_that_waits_for_100(gateway: Any, path: bytes) -> None:
    await gateway.worker(numbered(1))
    client = await gateway.client()
    client.send(b"POST %b HTTP/1.1\r\nHost: h\r\nExpect: 100-continue\r\nContent-Length: 4\r\n\r\n" % path)
    async with asyncio.timeout(3):
        assert await client.reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
    client.send(b"body")
    answer = await client.answer()
    assert answer.content == (b"cold:body" if path == b"/cold" else b"answer 1")
    assert answer.interim == []


async def test_a_client_that_does_not_wait_for_100(gateway: Any) -> None:
    worker = await gateway.worker(numbered(1))
    client = await gateway.client()
    client.send(hot(b"body", b"Expect: 100-continue"))
    assert (await client.answer()).interim == []
    client.send(hot(b"", b"Expect: 100-continue"))
    assert (await client.answer()).interim == []
    client.send(b"POST /v1/x HTTP/1.0\r\nExpect: 100-continue\r\nContent-Length: 2\r\n\r\n")
    await asyncio.sleep(0.05)
    client.send(b"{}")
    assert (await client.answer()).interim == []
    assert all(name != b"expect" for request in worker.requests for name, _ in request.headers)


async def test_apachebench(gateway: Any) -> None:
    await gateway.worker(numbered(1))
    client = await gateway.client()
    client.send(b"POST /v1/x HTTP/1.0\r\nContent-length: 2\r\nContent-type: text/plain\r\nAccept: */*\r\n\r\n{}")
    answer = await client.answer()
    assert (answer.status, answer.content) == (200, b"answer 1")
    assert await client.at_end()


async def test_eight_requests_on_four_connections(gateway: Any) -> None:
    worker = await gateway.worker(numbered(1))
    clients = [await gateway.client() for _ in range(4)]
    bodies = [b"x" * (10**length) for length in range(4)] + [b"y" * length for length in (0, 7, 70_000, 300_000)]

    async def two(number: int) -> None:
        for body in (bodies[number], bodies[number + 4]):
            clients[number].post(body)
            assert (await clients[number].answer()).content == b"answer 1"

    await asyncio.gather(*map(two, range(4)))
    assert sorted(request.body for request in worker.requests) == sorted(bodies)


# Pipelining


@pytest.mark.parametrize("order", ["hh", "hc", "ch", "cc", "hchhcch", "chchc"])
async def test_pipelined_messages_are_answered_in_order(gateway: Any, order: str) -> None:
    await gateway.worker(*[[0.02, *numbered(number)] for number in range(len(order))])
    client = await gateway.client()
    messages = {"h": hot(b'{"a":1}'), "c": b"POST /cold HTTP/1.1\r\nHost: h\r\nContent-Length: 3\r\n\r\nabc"}
    client.send(b"".join(messages[kind] for kind in order))
    numbers = iter(range(len(order)))
    for kind in order:
        expected = b"cold:abc" if kind == "c" else b"answer %d" % next(numbers)
        assert (await client.answer()).content == expected


@pytest.mark.parametrize("size", [1, 7, 64])
async def test_pipelined_messages_in_pieces(gateway: Any, size: int) -> None:
    await gateway.worker(*[numbered(number) for number in range(3)])
    client = await gateway.client()
    data = hot(b"a") + COLD + chunked(b"bc") + COLD + hot(b"d")
    for start in range(0, len(data), size):
        client.send(data[start : start + size])
        await asyncio.sleep(0)
    contents = [(await client.answer()).content for _ in range(5)]
    assert contents == [b"answer 0", b"cold:", b"answer 1", b"cold:", b"answer 2"]
    assert [journey.inbound.body for journey in gateway.handler.journeys] == [b"a", b"bc", b"d"]


async def test_a_long_pipeline_is_neither_deep_nor_unbounded(gateway: Any) -> None:
    gateway.handler.failure = Unavailable("not now")
    client = await gateway.client()
    count = 1_500
    client.send(hot(b"x" * 400) * count)
    assert len(hot(b"x" * 400)) * count > 4 * HEADER_BYTES_MAX
    for _ in range(count):
        assert (await client.answer()).status == 503


async def test_what_waits_behind_an_answer_is_bounded(gateway: Any) -> None:
    await gateway.worker([0.5, *numbered(1)], numbered(2))
    client = await gateway.client()
    client.send(hot(b"first"))
    client.send(hot(b"x" * 900_000) * 8)
    await asyncio.sleep(0.3)
    (connection,) = gateway.edge.connections
    assert len(connection._buffer) <= HEADER_BYTES_MAX + 300_000
    assert (await client.answer()).content == b"answer 1"
    for _ in range(8):
        assert (await client.answer()).content == b"answer 2"
    assert {len(journey.inbound.body) for journey in gateway.handler.journeys} == {5, 900_000}


async def test_a_half_closed_pipeline_is_answered_whole(gateway: Any) -> None:
    await gateway.worker(*[[0.05, *numbered(number)] for number in range(2)])
    client = await gateway.client()
    client.send(hot(b"a") + COLD + hot(b"b"))
    client.writer.write_eof()
    assert [(await client.answer()).content for _ in range(3)] == [b"answer 0", b"cold:", b"answer 1"]
    assert await client.at_end()


@pytest.mark.parametrize("half", [b"POST /v1/x HT", b"POST /v1/x HTTP/1.1\r\nHost: h\r\nContent-Length: 9\r\n\r\nhal"])
async def test_half_a_message_ends_with_its_client(gateway: Any, half: bytes) -> None:
    await gateway.worker([0.1, *numbered(0)])
    client = await gateway.client()
    client.send(hot(b"a") + half)
    client.writer.write_eof()
    assert (await client.answer()).content == b"answer 0"
    assert await client.at_end()


async def test_nothing_follows_connection_close(gateway: Any) -> None:
    worker = await gateway.worker(numbered(0))
    client = await gateway.client()
    client.send(hot(b"a", b"Connection: close") + hot(b"b") + COLD)
    answer = await client.answer()
    assert answer.get(b"connection") == b"close"
    assert await client.at_end()
    assert len(worker.requests) == 1


# Cold routes


async def test_hot_and_cold_share_a_connection(gateway: Any) -> None:
    await gateway.worker(numbered(1))
    client = await gateway.client()
    for _ in range(3):
        client.post(b"{}")
        assert (await client.answer()).content == b"answer 1"
        client.post(b"x" * 100_000, b"/cold")
        assert (await client.answer()).content == b"cold:" + b"x" * 100_000
    assert len(gateway.edge.connections) == 1


async def test_an_application_may_answer_before_it_has_read(gateway: Any) -> None:
    client = await gateway.client()
    client.send(b"POST /early HTTP/1.1\r\nHost: h\r\nContent-Length: 6\r\n\r\nabc")
    assert (await client.answer()).content == b"cold:"
    client.send(b"def" + COLD)
    assert (await client.answer()).content == b"cold:"


async def test_an_upgrade_is_declined(gateway: Any) -> None:
    client = await gateway.client()
    client.send(COLD.replace(b"\r\n\r\n", b"\r\nConnection: Upgrade\r\nUpgrade: h2c\r\n\r\n") + COLD)
    assert [(await client.answer()).content for _ in range(2)] == [b"cold:", b"cold:"]


async def test_a_large_cold_answer_waits_for_its_reader(gateway: Any) -> None:
    await gateway.worker(numbered(1))
    client = await gateway.client(receive_buffer_bytes=16_384)
    client.send(COLD.replace(b"/cold", b"/large") * 4 + hot(b"{}"))
    await asyncio.sleep(0.2)
    assert [len((await client.answer()).content) for _ in range(4)] == [500_000] * 4
    assert (await client.answer()).content == b"answer 1"


async def test_a_half_closed_cold_client_gets_its_answer(gateway: Any) -> None:
    client = await gateway.client()
    client.send(b"GET /slow HTTP/1.1\r\nHost: h\r\n\r\n")
    client.writer.write_eof()
    assert (await client.answer()).content == b"cold:"
    assert await client.at_end()


@pytest.mark.parametrize("part", [b"Content-Length: 10\r\n\r\nhalf", b"Transfer-Encoding: chunked\r\n\r\n5\r\nha"])
async def test_a_cold_body_cut_short_leaves_nothing(gateway: Any, settled: Any, part: bytes) -> None:
    client = await gateway.client()
    client.send(b"POST /cold HTTP/1.1\r\nHost: h\r\n" + part)
    await asyncio.sleep(0.05)
    client.writer.write_eof()
    await settled(lambda: not gateway.edge.connections)
    await settled(lambda: not gateway.server.server_state.tasks)


@pytest.mark.parametrize("path", [b"/v1/x", b"/cold"])
async def test_malformed_chunks_are_refused(gateway: Any, settled: Any, path: bytes) -> None:
    client = await gateway.client()
    client.send(b"POST %b HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n" % path)
    await asyncio.sleep(0.05)
    client.send(b"2\r\nab\r\nzz\r\n" + COLD)
    answer = await client.answer()
    assert (answer.status, answer.get(b"connection")) == (400, b"close")
    assert await client.at_end()
    await client.close()
    await settled(lambda: not gateway.server.server_state.tasks)
    assert gateway.handler.journeys == []


# Refusals


@pytest.mark.parametrize(
    "head",
    [
        b"POST /v1/x HTTP/1.1\r\nHost: h\r\nContent-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n",
        b"POST /v1/x HTTP/1.1\r\nHost: h\r\nContent-Length: 2\r\nContent-Length: 3\r\n\r\n",
        b"POST /v1/x HTTP/1.1\r\nHost: h\r\nContent-Length : 2\r\n\r\n",
        b"POST /v1/x HTTP/1.1\r\nHost: h\r\nX: a\r\n b\r\n\r\n",
        b"GET /cold HTTP/1.1\r\n\r\n",
        b"GET /cold HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: gzip\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    ],
)
async def test_what_follows_a_malformed_head_is_not_read(gateway: Any, head: bytes) -> None:
    await gateway.worker(numbered(1))
    client = await gateway.client()
    client.send(head + hot(b"smuggled"))
    answer = await client.answer()
    assert (answer.status, answer.get(b"connection")) == (400, b"close")
    assert json.loads(answer.content)["error"]["type"] == "invalid_request_error"
    assert answer.get(b"x-request-id") == b"none"
    assert await client.at_end()
    assert gateway.handler.journeys == []


async def test_a_refusal_in_a_pipeline_ends_it(gateway: Any) -> None:
    await gateway.worker(numbered(1))
    client = await gateway.client()
    client.send(hot(b"{}") + b"nonsense\r\n\r\n" + hot(b"{}"))
    assert (await client.answer()).status == 200
    assert (await client.answer()).status == 400
    assert await client.at_end()


async def test_heads_are_bounded(gateway: Any) -> None:
    for head in (
        b"POST /v1/x HTTP/1.1\r\nHost: h\r\nX: " + b"x" * HEADER_BYTES_MAX,
        b"POST /v1/x HTTP/1.1\r\nHost: h\r\nX: " + b"x" * HEADER_BYTES_MAX + b"\r\n\r\n",
        b"POST /v1/x HTTP/1.1\r\nHost: h\r\n" + b"X: 1\r\n" * 300 + b"\r\n",
        b"x" * (HEADER_BYTES_MAX + 1),
    ):
        client = await gateway.client()
        client.send(head)
        answer = await client.answer()
        assert (answer.status, answer.get(b"connection")) == (431, b"close")
        assert await client.at_end()


async def test_the_bound_on_heads_can_be_chosen(gateway: Any) -> None:
    await gateway.worker(numbered(1))
    gateway.limit(header_bytes_max=1_000)
    client = await gateway.client()
    client.send(hot(b"x" * 100_000, b"X: " + b"x" * 900) * 2)
    for _ in range(2):
        assert (await client.answer()).status == 200
    client.send(hot(b"{}", b"X: " + b"x" * 1_000))
    assert (await client.answer()).status == 431


@pytest.mark.parametrize("size", [BODY_BYTES_MAX, BODY_BYTES_MAX + 1])
async def test_bodies_are_bounded(gateway: Any, size: int) -> None:
    await gateway.worker(numbered(1))
    client = await gateway.client()
    client.post(b"x" * size)
    answer = await client.answer()
    assert answer.status == (200 if size == BODY_BYTES_MAX else 413)


async def test_a_refused_sender_gets_to_read_why(gateway: Any) -> None:
    # More than the sockets between hold: the answer must survive what is still being sent.
    client = await gateway.client()
    client.send(b"POST /v1/x HTTP/1.1\r\nHost: h\r\nContent-Length: 30000000\r\n\r\n")
    for _ in range(30):
        client.send(b"x" * 1_000_000)
        await asyncio.wait_for(client.writer.drain(), 5)
    answer = await client.answer()
    assert (answer.status, answer.get(b"connection")) == (413, b"close")
    assert json.loads(answer.content)["error"]["code"] == "payload_too_large"


async def test_chunked_bodies_are_bounded(gateway: Any) -> None:
    client = await gateway.client()
    client.send(chunked(*[b"x" * 100_000] * 20))
    assert (await client.answer()).status == 413
    client = await gateway.client()
    client.send(chunked(b"x")[:-5] + b"fffffffff\r\n" + b"x" * 1_100_000)
    assert (await client.answer()).status == 413


async def test_bodies_of_all_together_are_bounded(gateway: Any, settled: Any) -> None:
    worker = await gateway.worker([0.2, *numbered(1)])
    gateway.limit(requests_bytes_max=250_000)
    first, second, third = [await gateway.client() for _ in range(3)]
    first.post(b"x" * 100_000)
    await settled(lambda: len(worker.requests) == 1)
    second.send(b"POST /v1/x HTTP/1.1\r\nHost: h\r\nContent-Length: 120000\r\n\r\n" + b"x" * 119_000)
    await settled(lambda: gateway.edge.requests_bytes == 219_000)
    for client in (third, await gateway.client()):
        client.post(b"x" * (40_000 if client is third else 400_000))
        answer = await client.answer()
        assert (answer.status, answer.get(b"retry-after")) == (503, b"1")
        assert json.loads(answer.content)["error"]["code"] == "overloaded"
    assert (await first.answer()).status == 200
    second.send(b"x" * 1_000)
    assert (await second.answer()).status == 200
    for client in gateway.clients:
        await client.close()
    await settled(lambda: not gateway.edge.connections)
    assert gateway.edge.requests_bytes == 0


async def test_strangers_are_refused_before_their_body(gateway: Any) -> None:
    client = await gateway.client()
    client.send(
        b"POST /v1/x HTTP/1.1\r\nHost: h\r\nAuthorization: Bearer unknown\r\nExpect: 100-continue\r\n"
        b"Content-Length: 9\r\n\r\n"
    )
    answer = await client.answer()
    assert (answer.status, answer.interim) == (401, [])
    assert answer.get(b"www-authenticate") == b"Bearer"
    assert await client.at_end()


async def test_a_refused_request_keeps_the_connection(gateway: Any) -> None:
    await gateway.worker(numbered(1))
    client = await gateway.client()
    for _ in range(2):
        client.post(b"refuse")
        answer = await client.answer()
        assert (answer.status, answer.get(b"connection")) == (400, None)
        client.post(b"{}")
        assert (await client.answer()).status == 200


# Deadlines


@pytest.mark.parametrize(
    "part",
    [
        b"POST /v1/x HT",
        b"POST /v1/x HTTP/1.1\r\nHost: h\r\nContent-Length: 5\r\n\r\nab",
        b"POST /cold HTTP/1.1\r\nHost: h\r\nContent-Length: 5\r\n\r\nab",
    ],
)
async def test_a_client_that_does_not_finish(gateway: Any, part: bytes) -> None:
    gateway.limit(receive_seconds_max=0.1)
    gateway.sweep()
    client = await gateway.client()
    client.send(part)
    answer = await client.answer()
    assert (answer.status, answer.get(b"connection")) == (408, b"close")
    assert await client.at_end()


async def test_time_between_requests_is_not_time_within_one(gateway: Any) -> None:
    await gateway.worker(numbered(1))
    gateway.limit(receive_seconds_max=0.3)
    gateway.sweep()
    client = await gateway.client()
    client.post(b"{}")
    await client.answer()
    await asyncio.sleep(0.4)
    message = hot(b"{}")
    client.send(message[:9])
    await asyncio.sleep(0.1)
    client.send(message[9:])
    assert (await client.answer()).status == 200


async def test_idle_connections_are_closed(gateway: Any) -> None:
    await gateway.worker(numbered(1))
    gateway.limit(keep_alive_seconds=0.1)
    gateway.sweep()
    client, silent = await gateway.client(), await gateway.client()
    client.post(b"{}")
    assert (await client.answer()).status == 200
    assert await client.at_end()
    assert await silent.at_end()


async def test_connections_are_bounded(gateway: Any, settled: Any) -> None:
    await gateway.worker(numbered(1))
    gateway.limit(connections_max=2)
    clients = [await gateway.client() for _ in range(2)]
    for client in clients:
        client.post(b"{}")
        assert (await client.answer()).status == 200
    over = await gateway.client()
    await asyncio.sleep(0.05)
    over.post(b"{}")
    answer = await over.answer()
    assert (answer.status, answer.get(b"retry-after"), answer.get(b"connection")) == (503, b"1", b"close")
    assert (answer.get(b"content-type"), answer.get(b"x-request-id")) == (b"application/json", b"none")
    assert json.loads(answer.content)["error"]["type"] == "service_unavailable_error"
    assert await over.at_end()
    assert gateway.edge.turned_away_count == 1
    clients[0].post(b"{}")
    assert (await clients[0].answer()).status == 200
    await clients[0].close()
    await settled(lambda: len(gateway.edge.connections) == 1)
    another = await gateway.client()
    another.post(b"{}")
    assert (await another.answer()).status == 200


async def test_a_connection_too_many_may_be_sending_much(gateway: Any) -> None:
    gateway.limit(connections_max=1)
    await gateway.client()
    over = await gateway.client()
    over.send(b"POST /v1/x HTTP/1.1\r\nHost: h\r\nContent-Length: 8000000\r\n\r\n" + b"x" * 8_000_000)
    assert (await over.answer()).status == 503
    assert await over.at_end()


async def test_connections_too_many_are_few_and_short(gateway: Any, settled: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr("gateway.edge.refusing.AT_ONCE_MAX", 3)
    monkeypatch.setattr("gateway.edge.refusing.SECONDS_MAX", 0.3)
    gateway.limit(connections_max=1)
    first = await gateway.client()
    silent = [await gateway.client() for _ in range(3)]
    await settled(lambda: len(gateway.edge.turned_away) == 3)
    over = await gateway.client()
    over.post(b"{}")
    with pytest.raises((ConnectionResetError, asyncio.IncompleteReadError)):
        await over.answer()
    await settled(lambda: not gateway.edge.turned_away)
    for client in silent:
        with contextlib.suppress(ConnectionResetError):
            assert await client.at_end()
    assert gateway.edge.turned_away_count == 4
    await first.close()


async def test_a_sweep_survives_a_fault(gateway: Any, caplog: pytest.LogCaptureFixture) -> None:
    client = await gateway.client()
    client.post(b"x", b"/cold")
    await client.answer()
    (connection,) = gateway.edge.connections
    connection.check = lambda now: 1 / 0
    gateway.sweep()
    await asyncio.sleep(0.05)
    del connection.check
    assert "cannot check" in caplog.text
    caplog.clear()
    gateway.limit(keep_alive_seconds=0.0)
    assert await client.at_end()


async def test_many_clients_leave_nothing_behind(gateway: Any) -> None:
    stream = [b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"]
    stream += [step for number in range(5) for step in (b"9\r\ndata: %d\n\n\r\n" % number, 0.01)]
    await gateway.worker([*stream, b"0\r\n\r\n"])
    clients = [await gateway.client() for _ in range(60)]
    for number, client in enumerate(clients):
        client.post(b"{}")
        if number % 3 == 0:
            await asyncio.sleep(0.001)
            client.reset()
    for number, client in enumerate(clients):
        if number % 3:
            answer = await client.answer()
            assert (answer.complete, answer.content.count(b"data: ")) == (True, 5)
    await gateway.settle()
    endings = [journey.ends[0].ending for journey in gateway.handler.journeys]
    assert endings.count(Ending.COMPLETE) >= 40
    assert set(endings) <= {Ending.COMPLETE, Ending.CLIENT_GONE}
