"""A gateway beside others reads every stream for its texts, whoever follows it for its names."""

import asyncio

import pytest

from cachecore.blocks import pack_tokens
from cachecore.events import BlockStored, EventBatch
from cachecore.holders import Epoch, Worker, WorkerName
from cachecore.index.content import MemoryContentIndex
from cachecore.index.content_feed import ContentFeed
from cachecore.scope import DEFAULT_TENANT, IdentityScope, Keyring, Naming
from gateway.config import WorkerConfig
from gateway.fleet.engines.contract import Discovery, EventEndpoints
from gateway.fleet.texts import TextStreams
from gateway.fleet.trust import TrustLevel
from gateway.fleet.worker import ModelPool, WorkerRecord
from workers.publisher import EventPublisher

KEYRING = Keyring({0: bytes(32)}, 0)
NAMING = Naming.of(IdentityScope("m", KEYRING.key_id(DEFAULT_TENANT), 4), KEYRING)
POOL = ModelPool("m", block_size_tokens=4)


class Told:
    """The streams of a gateway whose index is shared, as far as they are asked."""

    def __init__(self):
        self.calls = []

    async def follow(self, record, pool):
        self.calls.append(("follow", record.name))

    async def leave(self, record):
        self.calls.append(("leave", record.name))

    async def stop(self):
        self.calls.append("stop")


@pytest.fixture
def publisher():
    publisher = EventPublisher()
    yield publisher
    publisher.close()


def record_of(publisher):
    record = WorkerRecord.of(WorkerConfig(url="http://127.0.0.1:1", name="w"))
    record.epoch, record.holders = Epoch(5), (Worker(WorkerName("w"), Epoch(5), 0),)
    endpoints = EventEndpoints.at(publisher.endpoint, publisher.replay_endpoint, publisher.config.topic)
    record.discovery = Discovery({}, events=endpoints)
    return record


async def test_texts_of_a_stream_that_another_gateway_follows(publisher):
    inner, feed, record = Told(), ContentFeed(MemoryContentIndex()), record_of(publisher)
    streams = TextStreams(inner, lambda *_: NAMING, feed)
    [content] = NAMING.hasher.contents(pack_tokens([1, 2, 3, 4]))
    publisher.publish(EventBatch(0.0, (BlockStored((7,), None, [1, 2, 3, 4], 4),), 0))
    try:
        for _ in range(2):  # a second life is followed in place of the first
            await streams.follow(record, POOL)
            async with asyncio.timeout(10):
                while not feed.index.find(content):
                    await asyncio.sleep(0.01)
            assert len(feed.index) == 1
        assert (record.intakes, record.trust.level) == ([], TrustLevel.HISTORY)
        await streams.leave(record)
        assert feed.index.find(content) == []
    finally:
        await streams.stop()
    assert inner.calls == [("follow", "w"), ("follow", "w"), ("leave", "w"), "stop"]
