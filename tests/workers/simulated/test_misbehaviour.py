"""A worker that does wrong when told to."""

import asyncio
import base64
import json
import struct
import time
from typing import Any

import httpx
import pytest
import zmq

from cachecore.events import AllBlocksCleared, BlockStored, decode_batch
from workers.publisher import END_OF_REPLAY
from workers.simulated.fleet import SimulatedWorker

BODY: dict[str, Any] = {"prompt": "x", "max_tokens": 10, "stream": True}


def simulate(**faults: Any) -> dict[str, str]:
    return {"x-simulate": json.dumps(faults)}


async def raw_answer(worker: SimulatedWorker, request: bytes) -> bytes:
    """Every byte that comes back. Raises ConnectionResetError when the connection is reset."""
    reader, writer = await asyncio.open_connection("127.0.0.1", worker.server.port)
    try:
        writer.write(request)
        return await reader.read()
    finally:
        writer.close()


def raw_request(faults: dict[str, Any]) -> bytes:
    payload = json.dumps(BODY).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\nx-simulate: %s\r\n" % (
        json.dumps(faults).encode()
    )
    return head + b"content-length: %d\r\n\r\n" % len(payload) + payload


async def test_echo_gives_back_every_byte(worker: SimulatedWorker) -> None:
    body = b'{"a": 9007199254740993, "a":"\\u0041" ,\xff}'
    head = b'PUT /v1/any%2Fpath?q=1&q=%20 HTTP/1.1\r\nHost: h\r\nX-Simulate: {"echo":true}\r\nX-CaSe:  kept \r\n'
    request = head + b"Connection: close\r\nContent-Length: %d\r\n\r\n" % len(body) + body
    answer = json.loads((await raw_answer(worker, request)).split(b"\r\n\r\n", 1)[1])
    assert answer["method"] == "PUT"
    assert answer["path"] == "/v1/any%2Fpath?q=1&q=%20"
    assert base64.b64decode(answer["body_base64"]) == body
    assert ["X-CaSe", "kept"] in [[name, value.strip()] for name, value in answer["headers"]]
    assert answer["headers"][0] == ["Host", "h"]


async def test_the_echo_route(http: httpx.AsyncClient) -> None:
    answer = await http.get("/echo", params={"a": "b"})
    assert answer.json()["path"] == "/echo?a=b"
    assert answer.headers["x-request-id"]


async def test_status_and_body(http: httpx.AsyncClient) -> None:
    plain = await http.post("/v1/completions", json=BODY, headers=simulate(status=503, body="busy"))
    assert (plain.status_code, plain.text) == (503, "busy")
    error = await http.post("/v1/completions", json=BODY, headers=simulate(status=429))
    assert (error.status_code, error.json()["error"]["message"]) == (429, "simulated fault")
    document = await http.post("/v1/completions", json=BODY, headers=simulate(status=500, body={"a": [1]}))
    assert (document.status_code, document.json()) == (500, {"a": [1]})
    assert (await http.post("/v1/completions", json=BODY)).status_code == 200


async def test_delays(http: httpx.AsyncClient) -> None:
    began = time.monotonic()
    await http.post("/v1/completions", json=BODY, headers=simulate(delay_first_ms=150))
    assert time.monotonic() - began >= 0.15
    began = time.monotonic()
    await http.post("/v1/completions", json=BODY, headers=simulate(chunk_gap_ms=20))
    assert time.monotonic() - began >= 0.02 * 10


async def test_dying_after_some_chunks(worker: SimulatedWorker) -> None:
    with pytest.raises(ConnectionResetError):
        await raw_answer(worker, raw_request({"die_after_chunks": 0, "chunk_gap_ms": 20}))
    reader, writer = await asyncio.open_connection("127.0.0.1", worker.server.port)
    writer.write(raw_request({"die_after_chunks": 3, "chunk_gap_ms": 20}))
    # The last event is followed by the chunk's end alone, so only whole events are read here.
    for _ in range(3):
        assert b"data: " in await reader.readuntil(b"\n\n")
    with pytest.raises(ConnectionResetError):
        await reader.readuntil(b"\n\n")
    writer.close()
    assert worker.engine.metrics.requests_running == 0


async def test_cutting_the_stream_at_a_byte(worker: SimulatedWorker) -> None:
    whole = await raw_answer(worker, raw_request({}))
    cut = await raw_answer(worker, raw_request({"cut_stream_bytes": 100}))
    head, body = cut.split(b"\r\n\r\n", 1)
    assert head.startswith(b"HTTP/1.1 200 OK")
    data = b"".join(body.split(b"\r\n")[1::2])
    assert len(data) == 100
    assert data.startswith(b'data: {"id":"cmpl-')
    assert whole.endswith(b"0\r\n\r\n")
    assert not cut.endswith(b"0\r\n\r\n")


async def test_omitting_done(http: httpx.AsyncClient) -> None:
    answer = await http.post("/v1/completions", json=BODY, headers=simulate(omit_done=True))
    assert "[DONE]" not in answer.text
    assert '"finish_reason":"length"' in answer.text


async def test_hanging_until_the_client_leaves(http: httpx.AsyncClient, worker: SimulatedWorker) -> None:
    with pytest.raises(httpx.ReadTimeout):
        await http.post("/v1/completions", json=BODY, headers=simulate(hang=True), timeout=0.2)
    async with asyncio.timeout(5):
        while worker.misbehaviour.log[-1].disconnected_at is None:
            await asyncio.sleep(0.01)
    assert worker.misbehaviour.log[-1].status == 0


async def test_standing_faults_and_their_limits(http: httpx.AsyncClient) -> None:
    standing = (await http.post("/simulate", json={"status": 500, "requests": 2})).json()
    assert standing == {"status": 500, "requests": 2}
    assert (await http.get("/health")).status_code == 200
    statuses = [(await http.post("/v1/completions", json=BODY)).status_code for _ in range(3)]
    assert statuses == [500, 500, 200]
    await http.post("/simulate", json={"status": 503, "paths": ["/health"]})
    assert (await http.get("/health")).status_code == 503
    assert (await http.request("DELETE", "/simulate")).json() == {}
    assert (await http.get("/health")).status_code == 200


async def test_unknown_faults_are_refused(http: httpx.AsyncClient) -> None:
    wrong = await http.post("/simulate", json={"explode": True})
    assert (wrong.status_code, wrong.json()["error"]["type"]) == (400, "invalid_request_error")
    header = await http.post("/v1/completions", json=BODY, headers={"x-simulate": "{"})
    assert (header.status_code, header.json()["error"]["param"]) == (400, "x-simulate")


async def test_the_log(http: httpx.AsyncClient) -> None:
    await http.post("/v1/completions", json=BODY, headers={"x-request-id": "first"})
    await http.get("/none")
    first, second = (await http.get("/simulate/log")).json()["requests"]
    assert (first["request_id"], first["status"], first["path"]) == ("first", 200, "/v1/completions")
    assert first["body_bytes"] > 30
    assert first["arrived_at"] <= first["finished_at"]
    assert first["disconnected_at"] is None
    assert second["status"] == 404
    await http.request("DELETE", "/simulate/log")
    assert (await http.get("/simulate/log")).json()["requests"] == []


async def test_the_log_is_bounded(http: httpx.AsyncClient, worker: SimulatedWorker) -> None:
    assert worker.misbehaviour.log.maxlen == 1000


def heard(socket: "zmq.Socket[bytes]", count: int) -> list[int]:
    """Sequence numbers of so many messages."""
    numbers = []
    for _ in range(count):
        assert socket.poll(5000), f"only {numbers} came"
        numbers.append(struct.unpack(">Q", socket.recv_multipart()[1])[0])
    return numbers


def replayed(worker: SimulatedWorker, context: "zmq.Context[Any]") -> list[int]:
    assert worker.publisher is not None
    assert worker.publisher.replay_endpoint is not None
    dealer = context.socket(zmq.DEALER)
    dealer.connect(worker.publisher.replay_endpoint)
    dealer.send_multipart([b"", bytes(8)])
    numbers = []
    while True:
        assert dealer.poll(5000)
        message = dealer.recv_multipart()
        if message[2] == END_OF_REPLAY:
            dealer.close(linger=0)
            return numbers
        assert decode_batch(message[3]).events
        numbers.append(struct.unpack(">Q", message[2])[0])


@pytest.mark.parametrize(
    ("fault", "live", "kept"),
    [
        ("drop", [0, 3, 4], [0, 1, 2, 3, 4]),
        ("reorder", [0, 2, 1, 3, 4], [0, 1, 2, 3, 4]),
        ("duplicate", [0, 1, 1, 2, 2, 3, 4], [0, 1, 2, 3, 4]),
        ("silence", [0, 3, 4], [0, 3, 4]),
    ],
)
async def test_event_faults(
    http: httpx.AsyncClient, worker: SimulatedWorker, fault: str, live: list[int], kept: list[int]
) -> None:
    context: zmq.Context[Any] = zmq.Context()
    socket = context.socket(zmq.XSUB)
    try:
        assert worker.publisher is not None
        socket.connect(worker.publisher.endpoint)
        socket.send(b"\x01kv-events")
        await subscribed(worker, socket)

        async def store(number: int) -> None:
            # One step and one batch each: no output block fills.
            await http.post("/v1/completions", json={"prompt": [number] * 20, "max_tokens": 1})

        await store(0)
        await http.post("/simulate", json={"events": fault, "events_batches": 2})
        for number in range(1, 5):
            await store(number)
        first = heard(socket, 1)[0]
        assert [first, *heard(socket, len(live) - 1)] == [first + number for number in live]
        assert not socket.poll(50)
        assert [number - first for number in replayed(worker, context) if number >= first] == kept
    finally:
        socket.close(linger=0)
        context.term()


@pytest.mark.parametrize(("fault", "kinds"), [("mute", set()), ("hoard", {BlockStored})])
async def test_events_that_are_left_out(
    http: httpx.AsyncClient, worker: SimulatedWorker, fault: str, kinds: set[type]
) -> None:
    """Batches come, numbered as ever, and again by replay."""
    context: zmq.Context[Any] = zmq.Context()
    socket = context.socket(zmq.XSUB)
    try:
        assert worker.publisher is not None
        socket.connect(worker.publisher.endpoint)
        socket.send(b"\x01kv-events")
        await subscribed(worker, socket)
        await http.post("/simulate", json={"events": fault, "events_batches": 3})
        batches = []
        for number in range(4):
            await http.post("/v1/completions", json={"prompt": [number] * 20, "max_tokens": 1})
            await worker.engine.reset_prefix_cache()
        while len(batches) < 8:
            assert socket.poll(5000)
            batches.append(socket.recv_multipart())
        numbers = [struct.unpack(">Q", batch[1])[0] for batch in batches]
        assert numbers == list(range(numbers[0], numbers[0] + 8))
        said = [{type(event) for event in decode_batch(batch[2]).events} for batch in batches]
        assert set().union(*said[:3]) == kinds
        assert set().union(*said[3:]) == {BlockStored, AllBlocksCleared}
    finally:
        socket.close(linger=0)
        context.term()


async def test_a_socket_that_is_closed_and_opened_again(http: httpx.AsyncClient, worker: SimulatedWorker) -> None:
    context: zmq.Context[Any] = zmq.Context()
    socket = context.socket(zmq.XSUB)
    try:
        assert worker.publisher is not None
        endpoint = worker.publisher.endpoint
        socket.setsockopt(zmq.RECONNECT_IVL, 10)
        socket.connect(endpoint)
        socket.send(b"\x01kv-events")
        await subscribed(worker, socket)
        last = worker.publisher.next_sequence
        await http.post("/simulate", json={"events": "close"})
        await http.post("/v1/completions", json={"prompt": [1] * 20, "max_tokens": 1})
        assert not socket.poll(50)
        await http.delete("/simulate")
        await subscribed(worker, socket)
        assert worker.publisher.endpoint == endpoint
        await http.post("/v1/completions", json={"prompt": [2] * 20, "max_tokens": 1})
        assert heard(socket, 1)[0] > last
        assert last in replayed(worker, context), "what was said meanwhile can be asked for"
    finally:
        socket.close(linger=0)
        context.term()


async def subscribed(worker: SimulatedWorker, socket: "zmq.Socket[bytes]") -> None:
    """Until the worker's publisher knows of the subscription: cleared caches are announced until one is heard."""
    while not socket.poll(20):
        await worker.engine.reset_prefix_cache()
    while socket.poll(50):
        socket.recv_multipart()
