"""Workers' comparisons of reused KV with exact KV reach the guard, once each, over real sockets."""

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest

from cachecore.holders import Epoch, Worker, WorkerName
from gateway.config import WorkerConfig
from gateway.fleet.engines.contract import Discovery, TransferAbility
from gateway.fleet.quality import QualityFollower
from gateway.fleet.worker import ModelPool, WorkerRecord
from policies.state.guard import GuardSettings, QualityGuard

BAD = {"tenant": "t", "codec": "i8", "fidelity": "quantized", "recompute_fraction": 0.0, "kl": 0.5, "top1": 0.8}


@dataclass
class Journal:
    """A worker that serves nothing else."""

    samples: list[dict[str, Any]] = field(default_factory=list)
    status: int = 200
    asked: list[str] = field(default_factory=list)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        path = (await reader.readuntil(b"\r\n\r\n")).split()[1].decode()
        self.asked.append(path)
        since = int(path.partition("since=")[2])
        body = json.dumps({"next": len(self.samples), "samples": self.samples[since:]}).encode()
        head = f"HTTP/1.1 {self.status} x\r\nconnection: close\r\ncontent-length: {len(body)}\r\n\r\n"
        writer.write(head.encode() + body)
        await writer.drain()
        writer.close()


@dataclass
class Stack:
    journal: Journal
    record: WorkerRecord
    guard: QualityGuard
    follower: QualityFollower


@pytest.fixture
async def stack() -> AsyncIterator[Stack]:
    journal = Journal()
    server = await asyncio.start_server(journal.serve, "127.0.0.1", 0)
    record = WorkerRecord.of(WorkerConfig(url=f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"))
    record.discovery = Discovery({}, epoch=1)
    holder = Worker(WorkerName("w"), Epoch(1), 0)
    record.discovery.transfer = TransferAbility(holder, (), "ab" * 16, frozenset(), 1)
    record.healthy, record.epoch = True, Epoch(1)
    pool = ModelPool("m", workers=[record])
    guard = QualityGuard(GuardSettings({"i8": 1e-3}, samples_min=4, window=20))
    async with server, httpx.AsyncClient(trust_env=False) as http:
        yield Stack(journal, record, guard, QualityFollower(guard, {"m": pool}, lambda: http, lambda: 0.0))


def counted(stack: Stack) -> int:
    return sum(report.samples for report in stack.guard.report(0.0))


async def test_each_sample_counts_once(stack: Stack) -> None:
    stack.journal.samples = [{**BAD, "kl": 1e-4}] * 3
    for _ in range(3):
        await stack.follower.read_all()
    assert counted(stack) == 3
    stack.journal.samples += [{**BAD, "kl": 1e-4}] * 2
    await stack.follower.read_all()
    assert counted(stack) == 5
    assert [path.partition("=")[2] for path in stack.journal.asked] == ["0", "3", "3", "3"]


async def test_a_bad_codec_goes_off(stack: Stack) -> None:
    assert stack.guard.allows("m", "t", "i8", 0.0)
    stack.journal.samples = [BAD] * 10
    await stack.follower.read_all()
    assert not stack.guard.allows("m", "t", "i8", 0.0)
    assert stack.guard.allows("m", "other", "i8", 0.0)


async def test_another_life_begins_another_journal(stack: Stack) -> None:
    stack.journal.samples = [{**BAD, "kl": 1e-4}] * 3
    await stack.follower.read_all()
    stack.record.epoch = Epoch(2)
    stack.journal.samples = [{**BAD, "kl": 1e-4}]
    await stack.follower.read_all()
    assert counted(stack) == 4


async def test_who_keeps_no_journal_is_asked_once(stack: Stack) -> None:
    stack.journal.status = 404
    for _ in range(3):
        await stack.follower.read_all()
    assert len(stack.journal.asked) == 1


@pytest.mark.parametrize("sample", [{}, {**BAD, "kl": "high"}, 7])
async def test_what_is_no_sample_is_left_alone(stack: Stack, sample: Any) -> None:
    stack.journal.samples = [sample]
    await stack.follower.read_all()
    assert counted(stack) == 0


async def test_it_follows_until_it_is_stopped(stack: Stack) -> None:
    stack.follower._interval_seconds = 0.01
    stack.journal.samples = [{**BAD, "kl": 1e-4}]
    await stack.follower.start()
    while len(stack.journal.asked) < 3:
        await asyncio.sleep(0.01)
    await stack.follower.stop()
    assert counted(stack) == 1
