"""What `ropeway top` shows of a status."""

from collections.abc import AsyncGenerator
from io import StringIO
from typing import Any

import orjson
import pytest
from rich.console import Console

from cachecore.holders import Epoch, Worker
from gateway.config import GatewayConfig, WorkerConfig
from gateway.fleet.worker import WorkerRecord
from gateway.server import Gateway
from gateway.views.feed import Feed
from gateway.views.terminal import Picture, condition, render


@pytest.fixture
async def gateway() -> AsyncGenerator[Gateway]:
    gateway = Gateway(GatewayConfig())
    for number in range(12):
        name = f"gpu-{number}"
        record = WorkerRecord.of(WorkerConfig(url=f"http://{name}:1", name=name))
        record.epoch, record.healthy, record.reason = Epoch(1), number != 9, "" if number != 9 else "/health: refused"
        record.holders = (Worker(record.name, record.epoch),)
        gateway.fleet.workers[record.name] = record
    gateway.traffic.take()
    yield gateway
    gateway.fleet.workers.clear()
    await gateway.fleet.stop()


def document(gateway: Gateway) -> dict[str, Any]:
    return orjson.loads(orjson.dumps(gateway.status.now().document()))  # type: ignore[no-any-return]


def shown(picture: Picture, height: int | None = None) -> list[str]:
    output = StringIO()
    Console(file=output, width=120, highlight=False).print(render(picture, height, picture.status["started_at"] + 120))
    return [line.rstrip() for line in output.getvalue().splitlines()]


async def test_the_worst_stand_first(gateway: Gateway) -> None:
    lines = shown(Picture.of(document(gateway)))
    assert lines[0].startswith("Ropeway  kv-aware, up 2 min, ")
    assert lines[0].endswith("11 of 12 workers healthy, ready")
    assert lines[2] == "! gpu-9: /health: refused"
    assert lines[4].split() == ["worker", "state", "in", "flight", "wait", "KV", "L0", "L1", "served", "failed"]
    assert lines[5].split()[:2] == ["gpu-9", "unwell"]
    assert lines[6].split() == ["gpu-0", "well", "0", "0", "-", "0", "0", "0", "0"]
    assert len(lines) == 17


async def test_a_small_screen_says_what_it_leaves_out(gateway: Gateway) -> None:
    assert shown(Picture.of(document(gateway)), height=17)[-1] == "and 7 more"


async def test_the_feed_shows_what_the_status_does(gateway: Gateway) -> None:
    feed, picture = Feed(gateway.status, interval_seconds=0.01), Picture()
    events = feed.watch()
    for change in range(3):
        event = await anext(events)
        picture.take(orjson.loads(event.partition(b"\ndata: ")[2]))
        assert shown(picture) == shown(Picture.of(document(gateway)))
        gateway.fleet.workers[f"gpu-{change}"].draining = True
        gateway.fleet.workers.pop(f"gpu-{change + 5}")
    await events.aclose()


def worker(**changes: Any) -> dict[str, Any]:
    trust = {"level": "exact", "alarm": False, "followed": True, "doubts": []} | changes.pop("trust", {})
    usual = {"healthy": True, "draining": False, "parity": "proven", "inflight": 0, "reason": "", "parity_reason": ""}
    return {**usual, "trust": trust, **changes}


@pytest.mark.parametrize(
    ("changes", "word", "text"),
    [
        ({}, "well", "takes requests"),
        ({"inflight": 2}, "busy", "takes requests"),
        ({"healthy": False, "reason": "gone"}, "unwell", "gone"),
        ({"draining": True, "inflight": 3}, "draining", "3 requests left"),
        ({"trust": {"alarm": True}}, "silent", "answers requests, but nothing comes from its event stream"),
        ({"parity": "failed", "parity_reason": "differs"}, "parity", "differs"),
        ({"trust": {"level": "load", "doubts": [{"reason": "gap"}]}}, "doubted", "gap"),
        ({"trust": {"level": "history", "followed": False}}, "well", "takes requests"),
    ],
)
def test_a_workers_condition_in_words(changes: dict[str, Any], word: str, text: str) -> None:
    found = condition(worker(**changes))
    assert (found.word, found.text) == (word, text)
