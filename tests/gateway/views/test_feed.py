"""The feed of the status: whole first, then what changed, and nothing kept for whoever is slow."""

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import orjson
import pytest

from cachecore.holders import Epoch, Worker
from gateway.config import GatewayConfig, WorkerConfig
from gateway.errors import Unavailable
from gateway.fleet.worker import WorkerRecord
from gateway.server import Gateway
from gateway.views.feed import WATCHERS_MAX, Feed


@pytest.fixture
async def gateway() -> AsyncGenerator[Gateway]:
    gateway = Gateway(GatewayConfig())
    for number in range(20):
        add(gateway, f"w{number}")
    yield gateway
    gateway.fleet.workers.clear()
    await gateway.fleet.stop()


@pytest.fixture
def feed(gateway: Gateway) -> Feed:
    return Feed(gateway.status, interval_seconds=0.01)


def add(gateway: Gateway, name: str) -> None:
    record = WorkerRecord.of(WorkerConfig(url=f"http://{name}:1", name=name))
    record.epoch, record.healthy, record.reason = Epoch(1), True, ""
    record.holders = (Worker(record.name, record.epoch),)
    gateway.fleet.workers[record.name] = record


async def event(events: AsyncGenerator[bytes]) -> dict[str, Any]:
    async with asyncio.timeout(5):
        data = await anext(events)
    head, _, line = data.partition(b"\ndata: ")
    assert head.startswith(b"id: ")
    assert line.endswith(b"\n\n")
    document: dict[str, Any] = orjson.loads(line)
    return document


async def test_the_first_event_is_whole(gateway: Gateway, feed: Feed) -> None:
    gateway.traffic.take()
    events = feed.watch()
    first = await event(events)
    status = orjson.loads(orjson.dumps(gateway.status.now().document()))
    assert first["whole"]
    assert first["status"].pop("worker_names") == [f"w{number}" for number in range(20)]
    assert first["status"] == {name: status[name] for name in first["status"]}
    assert {"requests", "tokens", "receipts", "prefixes", "policy"} < set(first["status"])
    assert [worker["name"] for worker in first["workers"].values()] == list(first["workers"])
    assert len(first["workers"]) == 20
    assert len(first["samples"][0]) == len(first["sample_fields"])
    await events.aclose()


async def test_then_only_what_has_changed_is_told(gateway: Gateway, feed: Feed) -> None:
    events = feed.watch()
    await event(events)
    gateway.fleet.workers["w3"].draining = True
    second = await event(events)
    assert not second["whole"]
    assert list(second["workers"]) == ["w3"]
    assert second["workers"]["w3"]["draining"]
    assert second["status"] == {}
    assert second["samples"] == []
    await events.aclose()


async def test_a_worker_that_leaves_is_named_no_longer(gateway: Gateway, feed: Feed) -> None:
    events = feed.watch()
    await event(events)
    del gateway.fleet.workers["w0"]
    add(gateway, "w20")
    second = await event(events)
    assert second["status"] == {"worker_names": [f"w{number}" for number in range(1, 21)]}
    assert list(second["workers"]) == ["w20"]
    await events.aclose()


async def test_samples_are_told_once(gateway: Gateway, feed: Feed) -> None:
    events = feed.watch()
    assert (await event(events))["samples"] == []
    for _ in range(2):
        gateway.traffic.take()
        assert len((await event(events))["samples"]) == 1
    await events.aclose()


async def test_who_is_slow_skips_what_was_between(gateway: Gateway, feed: Feed) -> None:
    slow, quick = feed.watch(), feed.watch()
    await event(slow)
    await event(quick)
    seen = 0
    for requests in range(1, 6):
        gateway.fleet.workers["w1"].requests = requests
        seen = (await event(quick))["workers"]["w1"]["requests"]
    assert seen == 5
    late = await event(slow)
    assert late["workers"]["w1"]["requests"] == 5
    assert list(late["workers"]) == ["w1"]
    await slow.aclose()
    await quick.aclose()


async def test_nothing_runs_while_nobody_watches(feed: Feed) -> None:
    before = asyncio.all_tasks()
    one, other = feed.watch(), feed.watch()
    await event(one)
    await event(other)
    assert len(asyncio.all_tasks() - before) == 1
    await one.aclose()
    assert len(asyncio.all_tasks() - before) == 1
    await other.aclose()
    assert asyncio.all_tasks() == before
    assert repr(feed) == "Feed(0 watchers, 0 parts, number 0)"


async def test_it_begins_anew_for_the_next_watcher(feed: Feed) -> None:
    for _ in range(2):
        events = feed.watch()
        first = await event(events)
        assert first["whole"]
        assert len(first["workers"]) == 20
        await events.aclose()


async def test_watchers_are_bounded(feed: Feed) -> None:
    watching = [feed.watch() for _ in range(WATCHERS_MAX)]
    for events in watching:
        feed.require_room()
        await event(events)
    with pytest.raises(Unavailable, match="watch already"):
        feed.require_room()
    await watching[0].aclose()
    feed.require_room()
    for events in watching[1:]:
        await events.aclose()


async def test_closing_ends_every_stream(feed: Feed) -> None:
    events = feed.watch()
    await event(events)
    await feed.close()
    with pytest.raises(StopAsyncIteration):
        await anext(events)


async def test_a_look_that_fails_is_not_the_last(
    gateway: Gateway, feed: Feed, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    events = feed.watch()
    await event(events)
    with monkeypatch.context() as broken:
        broken.setattr(gateway.status, "summary", lambda: 1 / 0)
        await asyncio.sleep(0.05)
    assert "the status could not be told" in caplog.text
    gateway.fleet.workers["w1"].requests = 7
    assert (await event(events))["workers"]["w1"]["requests"] == 7
    await events.aclose()
