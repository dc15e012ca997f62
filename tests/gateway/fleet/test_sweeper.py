"""What nobody holds any more is given up; what somebody may still hold is not."""

from types import SimpleNamespace
from typing import Any, cast

from cachecore.holders import Epoch, Pool, Worker, WorkerName
from cachecore.index.leases import Leases
from cachecore.index.publisher import Publisher
from cachecore.index.redis import read_records
from cachecore.index.schema import Schema
from cachecore.store import RedisStore
from gateway.config import WorkerConfig
from gateway.fleet.engines.contract import Discovery
from gateway.fleet.registry import Fleet
from gateway.fleet.sweeper import ABANDONED_SECONDS, Sweeper
from gateway.fleet.worker import WorkerRecord
from tests.cachecore.index.histories import chain_of
from tests.cachecore.index.publishing import stored


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def known(name: str, epoch: int) -> WorkerRecord:
    record = WorkerRecord.of(WorkerConfig(url="http://127.0.0.1:1", name=name))
    record.epoch, record.discovery = Epoch(epoch), Discovery({})
    return record


def worker(name: str, epoch: int) -> Worker:
    return Worker(WorkerName(name), Epoch(epoch), 0)


def sweeper(store: RedisStore, schema: Schema, clock: Clock, *records: WorkerRecord) -> Sweeper:
    fleet: Any = SimpleNamespace(workers={record.name: record for record in records})
    return Sweeper(store, schema, Leases(store, schema, "g"), cast(Fleet, fleet), 1000, clock)


async def test_earlier_lives_go_and_later_ones_stay(store: RedisStore, schema: Schema) -> None:
    publisher = Publisher(store, schema)
    pool = Pool("shared", 1)
    for holder in (worker("w", 4), worker("w", 5), worker("w", 6), pool):
        publisher.apply(holder, 0, [stored(chain_of(1, 2))])
    await publisher.flush()
    sweep = sweeper(store, schema, Clock(), known("w", 5))
    await sweep.sweep()
    assert sweep.swept == 1
    assert set(await read_records(store, schema)) == {worker("w", 5), worker("w", 6), pool}
    assert await store.command(b"EXISTS", schema.runs(worker("w", 4), b"a")) == 0
    assert await store.command(b"EXISTS", schema.runs(worker("w", 5), b"a")) == 1


async def test_a_stranger_goes_when_nobody_has_followed_it_for_long(store: RedisStore, schema: Schema) -> None:
    publisher, clock = Publisher(store, schema), Clock()
    led, left = worker("led", 1), worker("left", 1)
    for holder in (led, left):
        publisher.apply(holder, 0, [stored(chain_of(1, 2))])
    await publisher.flush()
    await Leases(store, schema, "other", 60.0).ask([led], [True])
    sweep = sweeper(store, schema, clock)
    await sweep.sweep()
    clock.now += ABANDONED_SECONDS - 1
    await sweep.sweep()
    assert set(await read_records(store, schema)) == {led, left}
    clock.now += 2
    await sweep.sweep()
    assert set(await read_records(store, schema)) == {led}


async def test_a_worker_without_a_known_life_is_left_alone(store: RedisStore, schema: Schema) -> None:
    publisher = Publisher(store, schema)
    publisher.apply(worker("w", 4), 0, [stored(chain_of(1, 2))])
    await publisher.flush()
    record = known("w", 9)
    record.discovery = None
    clock = Clock()
    sweep = sweeper(store, schema, clock, record)
    await sweep.sweep()
    clock.now += 2 * ABANDONED_SECONDS
    await sweep.sweep()
    assert set(await read_records(store, schema)) == {worker("w", 4)}
