"""The whole way of an event: HTTP request, engine, ZeroMQ, a subscriber that missed everything and asks for replay."""

import asyncio
from collections import Counter
from random import Random
from typing import Any

import httpx
import pytest
import zmq

from cachecore.events import AllBlocksCleared, BlockRemoved, BlockStored, Dialect, decode_batch
from workers.publisher import END_OF_REPLAY
from workers.simulated.fleet import SimulatedWorker


def replayed_payloads(worker: SimulatedWorker) -> list[bytes]:
    """Every batch of the stream so far, by the worker's replay socket; sequence numbers are checked on the way."""
    assert worker.publisher is not None
    assert worker.publisher.replay_endpoint is not None
    context: zmq.Context[Any] = zmq.Context()
    dealer = context.socket(zmq.DEALER)
    dealer.connect(worker.publisher.replay_endpoint)
    dealer.send_multipart([b"", bytes(8)])
    payloads: list[bytes] = []
    try:
        while True:
            assert dealer.poll(5000)
            *_, sequence, payload = dealer.recv_multipart()
            if sequence == END_OF_REPLAY:
                return payloads
            assert int.from_bytes(sequence, "big") == len(payloads)
            payloads.append(payload)
    finally:
        dealer.close(linger=0)
        context.term()


def holdings(payloads: list[bytes]) -> Counter[int]:
    held: Counter[int] = Counter()
    for payload in payloads:
        for event in decode_batch(payload).events:
            match event:
                case BlockStored():
                    held.update(event.block_hashes)
                case BlockRemoved():
                    held.subtract(event.block_hashes)
                case AllBlocksCleared():
                    held.clear()
    return held


@pytest.mark.parametrize("dialect", list(Dialect))
async def test_a_late_subscriber_learns_what_the_engine_holds(start_worker: Any, dialect: Dialect) -> None:
    worker = await start_worker(blocks_total=80, dialect=dialect)
    random = Random(3)
    async with httpx.AsyncClient(base_url=worker.url, timeout=30) as http:

        async def ask(number: int) -> None:
            stem = [number % 5] * random.randrange(20, 200)
            body = {"prompt": [*stem, number], "max_tokens": 20, "cache_salt": random.choice("ab")}
            assert (await http.post("/v1/completions", json=body)).status_code == 200

        for first in range(0, 60, 12):
            await asyncio.gather(*map(ask, range(first, first + 12)))
    held = holdings(replayed_payloads(worker))
    assert min(held.values()) >= 0
    assert +held == worker.engine.cached_handles()
    assert sum(worker.engine.cached_handles().values()) > 40
    assert worker.engine.metrics.prefix_cache_hits > 0


async def test_the_salt_and_the_adapter_are_in_the_stream(start_worker: Any) -> None:
    worker = await start_worker()
    async with httpx.AsyncClient(base_url=worker.url) as http:
        await http.post("/v1/completions", json={"prompt": [1] * 40, "max_tokens": 1, "cache_salt": "rw1.x"})
    (stored,) = [event for payload in replayed_payloads(worker) for event in decode_batch(payload).events]
    assert isinstance(stored, BlockStored)
    assert stored.cache_salt == "rw1.x"
    assert stored.parent_block_hash is None
    assert list(stored.token_ids) == [1] * 32
    assert (stored.block_size, stored.medium, stored.kv_cache_spec_kind) == (16, "GPU", "full_attention")
