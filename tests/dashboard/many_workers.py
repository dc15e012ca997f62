"""A gateway that takes two hundred workers to be there, busy: `python -m tests.dashboard.many_workers PORT`.

None of them is: two hundred real ones, and asking after them, would take more than the machine has. What the page is
shown is made by the gateway's own parts.
"""

import asyncio
import sys
import time
from contextlib import suppress
from random import Random

from cachecore.blocks import HASH_BYTES, Chain, PrefixHash
from cachecore.holders import Epoch, Tier, Worker
from cachecore.index.contract import Stored
from gateway.config import GatewayConfig, WorkerConfig
from gateway.fleet.worker import WorkerRecord
from gateway.server import Gateway

WORKERS = 200
CAPACITY = 16
KV_TOKENS = 100_000
BLOCK_TOKENS = 16
CHANGES_PER_SECOND = 50


def add_workers(gateway: Gateway, random: Random) -> None:
    for number in range(WORKERS):
        url, name = f"http://127.0.0.1:{20_000 + number}", f"gpu-{number:03}"
        record = WorkerRecord.of(WorkerConfig(url=url, name=name, block_size_tokens=BLOCK_TOKENS))
        record.epoch = Epoch(1)
        record.holders = (Worker(record.name, record.epoch),)
        record.healthy = number % 50 != 7
        record.reason = "" if record.healthy else "/health: ConnectTimeout"
        record.draining = number % 60 == 11
        gateway.fleet.workers[record.name] = record
        gateway.knowledge.declare_capacity(record.holders[0], CAPACITY, KV_TOKENS)
        for tier in (Tier.L0, Tier.L1):
            blocks = random.randrange(KV_TOKENS // BLOCK_TOKENS)
            chain = Chain(random.randbytes(HASH_BYTES * blocks))
            stored = Stored(PrefixHash(random.randbytes(HASH_BYTES)), chain, tier)
            gateway.knowledge.index.apply(record.holders[0], 1 + tier, [stored])


async def change(gateway: Gateway, random: Random) -> None:
    accounting, names, running = gateway.knowledge.accounting, list(gateway.fleet.workers), []
    for number in range(1 << 30):
        identity = f"request-{number}"
        accounting.dispatch(identity, random.choice(names), 0, time.monotonic(), 2000, 0.2)
        running.append(identity)
        if len(running) > WORKERS * 4:
            accounting.finish(running.pop(random.randrange(len(running))), time.monotonic(), 10)
        if number > WORKERS * 4:
            await asyncio.sleep(1 / CHANGES_PER_SECOND)


async def main() -> None:
    gateway, random = Gateway(GatewayConfig(port=int(sys.argv[1]))), Random(1)
    add_workers(gateway, random)
    changing = asyncio.create_task(change(gateway, random))
    try:
        await gateway.serve()
    finally:
        changing.cancel()
        with suppress(asyncio.CancelledError):
            await changing


if __name__ == "__main__":
    asyncio.run(main())
