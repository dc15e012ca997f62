"""What a worker says that it can do with KV, over a real socket."""

import asyncio
import json
from typing import Any

import httpx
import pytest

from cachecore.holders import Epoch, Worker, WorkerName
from gateway.config import WorkerConfig
from gateway.fleet.engines.contract import Discovery, OpenPool
from gateway.fleet.engines.discovery import discover as discover_worker
from gateway.fleet.engines.questions import Questions

SAID = {
    "holder": "w/worker-a/7/0",
    "addresses": ["tcp://0.0.0.0:7101", "tcp://10.0.0.7:7101"],
    "compatibility": "0123456789abcdef" * 2,
    "codecs": ["raw", "i8"],
    "bytes_per_token": 46_080,
    "shifted": True,
    "pools": [{"name": "shared", "generation": 3, "run_blocks": 16, "codec": "i8", "free_bytes": 7}],
    "something_new": {},
}


async def discover(transfer: Any) -> Discovery:
    answers = {"/v1/models": {"data": [{"id": "m"}]}, "/server_info": {"epoch": 7, "transfer": transfer}}

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        body = json.dumps(answers[head.split()[1].decode()]).encode()
        writer.write(b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body))
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server, httpx.AsyncClient(trust_env=False) as http:
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        return (await discover_worker(Questions(http, url), WorkerConfig(url=url))).discovery


async def test_what_it_can_do() -> None:
    ability = (await discover(SAID)).transfer
    assert ability is not None
    assert ability.holder == Worker(WorkerName("worker-a"), Epoch(7), 0)
    # A wildcard is reached where the worker itself is.
    assert ability.addresses == ("tcp://127.0.0.1:7101", "tcp://10.0.0.7:7101")
    assert (ability.compatibility, ability.codecs) == (SAID["compatibility"], {"raw", "i8"})
    assert (ability.bytes_per_token, ability.shifted) == (46_080, True)
    assert ability.pools == (OpenPool("shared", 3, 16, "i8"),)


async def test_most_workers_say_nothing() -> None:
    discovery = await discover(None)
    assert (discovery.transfer, discovery.transfer_problem) == (None, "")


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"holder": "worker-a"}, "not a holder id"),
        ({"holder": "p/shared/3"}, "no worker"),
        ({"compatibility": "abc"}, "compatibility"),
        ({"bytes_per_token": 0}, "bytes_per_token"),
        ({"addresses": ["tcp://a:1"] * 9}, "addresses"),
        ({"codecs": "raw"}, "codecs"),
        ({"pools": [{"name": "shared"}]}, "pools"),
    ],
)
async def test_what_is_not_said_right_is_not_believed(change: dict[str, Any], problem: str) -> None:
    discovery = await discover({**SAID, **change})
    assert discovery.transfer is None
    assert problem in discovery.transfer_problem
