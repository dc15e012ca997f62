"""The event stream over real sockets: live, replayed, bounded, in both framings."""

import struct
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import zmq

from cachecore.events import BlockRemoved, Dialect, EventBatch, decode_batch
from workers.publisher import END_OF_REPLAY, EventPublisher, PublisherConfig, ReplayFraming

WAIT_MS = 5_000


@pytest.fixture
def context() -> Iterator["zmq.Context[Any]"]:
    context: zmq.Context[Any] = zmq.Context()
    yield context
    context.destroy(linger=0)


def batch(handle: int) -> EventBatch:
    return EventBatch(1.5, (BlockRemoved((handle,)),), 0)


def subscriber(publisher: EventPublisher, context: "zmq.Context[Any]") -> "zmq.Socket[bytes]":
    """A subscriber that hears what is published from now on."""
    socket = context.socket(zmq.SUB)
    socket.setsockopt_string(zmq.SUBSCRIBE, publisher.config.topic)
    socket.connect(publisher.endpoint)
    while not socket.poll(20):
        publisher.publish(batch(0))
    while socket.poll(20):
        socket.recv_multipart()
    return socket


def receive(socket: "zmq.Socket[bytes]") -> list[bytes]:
    assert socket.poll(WAIT_MS), "nothing was received"
    return socket.recv_multipart()


def replay(publisher: EventPublisher, context: "zmq.Context[Any]", first: int) -> list[list[bytes]]:
    """Every message of a replay, the end included."""
    assert publisher.replay_endpoint is not None
    dealer = context.socket(zmq.DEALER)
    dealer.connect(publisher.replay_endpoint)
    dealer.send_multipart([b"", struct.pack(">Q", first)])
    messages: list[list[bytes]] = []
    while True:
        messages.append(receive(dealer))
        if END_OF_REPLAY in messages[-1]:
            dealer.close(linger=0)
            return messages


def sequences(messages: list[list[bytes]]) -> list[int]:
    return [struct.unpack(">Q", message[-2])[0] for message in messages[:-1]]


def test_live_messages_are_topic_sequence_payload(context: "zmq.Context[Any]") -> None:
    publisher = EventPublisher()
    try:
        socket = subscriber(publisher, context)
        sequence = publisher.publish(batch(7))
        assert publisher.publish(batch(8)) == sequence + 1
        topic, number, payload = receive(socket)
        assert topic == b"kv-events"
        assert number == sequence.to_bytes(8, "big")
        assert decode_batch(payload) == batch(7)
        assert decode_batch(receive(socket)[2]) == batch(8)
        socket.close(linger=0)
    finally:
        publisher.close()


def test_replay_in_the_present_framing(context: "zmq.Context[Any]") -> None:
    publisher = EventPublisher()
    try:
        for handle in range(5):
            publisher.publish(batch(handle))
        messages = replay(publisher, context, 3)
        assert messages[0][:2] == [b"", b"kv-events"]
        assert sequences(messages) == [3, 4]
        assert [decode_batch(message[-1]) for message in messages[:-1]] == [batch(3), batch(4)]
        assert messages[-1] == [b"", b"", END_OF_REPLAY, b""]
    finally:
        publisher.close()


def test_replay_in_the_old_framing(context: "zmq.Context[Any]") -> None:
    publisher = EventPublisher(PublisherConfig(dialect=Dialect.SGLANG, framing=ReplayFraming.of(Dialect.SGLANG)))
    try:
        publisher.publish(batch(2**63 + 5))
        messages = replay(publisher, context, 0)
        assert [len(message) for message in messages] == [3, 3]
        assert decode_batch(messages[0][2]).events == (BlockRemoved((2**63 + 5,)),)
        assert messages[-1] == [b"", END_OF_REPLAY, b""]
    finally:
        publisher.close()


def test_only_the_last_batches_can_be_replayed(context: "zmq.Context[Any]") -> None:
    publisher = EventPublisher(PublisherConfig(buffer_batches=3))
    try:
        for handle in range(10):
            publisher.publish(batch(handle))
        assert sequences(replay(publisher, context, 0)) == [7, 8, 9]
        assert sequences(replay(publisher, context, 10)) == []
    finally:
        publisher.close()


def test_a_malformed_request_does_not_end_replay(context: "zmq.Context[Any]") -> None:
    publisher = EventPublisher()
    try:
        assert publisher.replay_endpoint is not None
        dealer = context.socket(zmq.DEALER)
        dealer.connect(publisher.replay_endpoint)
        dealer.send_multipart([b"", b"abc"])
        dealer.send_multipart([b""])
        publisher.publish(batch(1))
        assert sequences(replay(publisher, context, 0)) == [0]
        assert not dealer.poll(0)
        dealer.close(linger=0)
    finally:
        publisher.close()


def test_threads_publish_without_gaps(context: "zmq.Context[Any]") -> None:
    publisher = EventPublisher()
    try:
        numbers: list[int] = []
        threads = [
            threading.Thread(target=lambda: numbers.extend(publisher.publish(batch(1)) for _ in range(50)))
            for _ in range(4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sorted(numbers) == list(range(200))
        assert sequences(replay(publisher, context, 0)) == list(range(200))
    finally:
        publisher.close()


def test_a_taken_endpoint_is_an_error_and_leaves_nothing_open() -> None:
    publisher = EventPublisher()
    try:
        with pytest.raises(zmq.ZMQError, match="Address already in use"):
            EventPublisher(PublisherConfig(endpoint=publisher.endpoint))
        with pytest.raises(zmq.ZMQError, match="Address already in use"):
            EventPublisher(PublisherConfig(replay_endpoint=publisher.replay_endpoint))
    finally:
        publisher.close()


def test_a_closed_publisher_is_silent() -> None:
    publisher = EventPublisher()
    publisher.publish(batch(1))
    publisher.close()
    publisher.close()
    assert publisher.publish(batch(2)) == -1
    assert publisher.next_sequence == 1


def test_it_describes_itself() -> None:
    publisher = EventPublisher(PublisherConfig(topic="kv", replay_endpoint=None))
    try:
        described = publisher.describe(16)
        assert described["endpoint"].startswith("tcp://127.0.0.1:")
        assert described["replay_endpoint"] is None
        assert (described["topic"], described["block_size"], described["dp_size"]) == ("kv", 16, 1)
    finally:
        publisher.close()
