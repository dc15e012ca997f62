"""What a worker writes down of its requests, so that it can be known after it was killed."""

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx

from workers.simulated.access_log import AccessLog, Entry, read_entry, salt_of
from workers.simulated.engine import SimulatedConfig
from workers.simulated.fleet import SimulatedWorker, WorkerOptions

BODY: dict[str, Any] = {"prompt": "x", "max_tokens": 10, "cache_salt": "tenant's own"}


def entries(path: Path) -> list[Entry]:
    return [read_entry(line) for line in path.read_bytes().splitlines()]


def test_lines_are_there_as_soon_as_they_are_written(tmp_path: Path) -> None:
    path = tmp_path / "log"
    log = AccessLog(path, "http://w", 7)
    number = log.received("/v1/completions", "id-1", json.dumps(BODY).encode())
    (entry,) = entries(path)
    assert (entry.event, entry.worker, entry.epoch, entry.number) == ("received", "http://w", 7, 1)
    assert (entry.path, entry.request_id, entry.cache_salt) == ("/v1/completions", "id-1", "tenant's own")
    log.ended(number, "/v1/completions", "id-1", 200, 12, complete=True)
    log.close()
    log.ended(number, "/v1/completions", "id-1", 200, 12, complete=True)
    _, ended = entries(path)
    assert (ended.event, ended.number, ended.status, ended.sent_bytes, ended.complete) == ("ended", 1, 200, 12, True)
    assert path.stat().st_mode & 0o077 == 0


def test_lives_share_a_file(tmp_path: Path) -> None:
    path = tmp_path / "log"
    for epoch in (1, 2):
        AccessLog(path, "http://w", epoch).received("/", "", b"")
    assert [(entry.epoch, entry.number) for entry in entries(path)] == [(1, 1), (2, 1)]


def test_a_salt_is_read_where_there_is_one() -> None:
    assert salt_of(b'{"a": [{"cache_salt": "no"}], "cache_salt": "yes"}') == "yes"
    assert [salt_of(body) for body in (b"", b"{", b"[]", b'{"cache_salt": 1}', b'{"cache_salt": null}')] == [""] * 5


async def test_how_requests_end_is_told(tmp_path: Path) -> None:
    path = tmp_path / "log"
    worker = SimulatedWorker(SimulatedConfig(speed=50), WorkerOptions(access_log=path))
    await worker.start()
    try:
        async with httpx.AsyncClient(base_url=worker.url, trust_env=False) as client:
            whole = await client.post("/v1/completions", json=BODY, headers={"x-request-id": "whole"})
            assert whole.status_code == 200
            await client.post("/v1/completions", json={}, headers={"x-request-id": "wrong"})
            async with client.stream(
                "POST",
                "/v1/completions",
                json={**BODY, "stream": True, "max_tokens": 5_000},
                headers={"x-request-id": "left"},
            ) as answer:
                async for _ in answer.aiter_bytes():
                    break
        async with asyncio.timeout(5):
            while len(entries(path)) < 6:
                await asyncio.sleep(0.01)
    finally:
        await worker.stop()
    received = [entry for entry in entries(path) if entry.event == "received"]
    ended = {entry.request_id: entry for entry in entries(path) if entry.event == "ended"}
    assert [entry.request_id for entry in received] == ["whole", "wrong", "left"]
    assert {entry.epoch for entry in received} == {worker.engine.info.epoch}
    assert (ended["whole"].status, ended["whole"].complete) == (200, True)
    assert ended["whole"].sent_bytes == len(whole.content)
    assert ended["wrong"].status == 400
    assert (ended["left"].status, ended["left"].complete) == (200, False)
    assert ended["left"].sent_bytes > 0


async def test_nothing_is_written_unless_it_is_wanted(tmp_path: Path) -> None:
    worker = SimulatedWorker(SimulatedConfig(speed=50), WorkerOptions())
    assert worker.access_log is worker.misbehaviour.access_log is None
    await worker.stop()
