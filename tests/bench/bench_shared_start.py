"""How soon a gateway is of use, and what a block costs, with a million of them in the shared index.

    PYTHONPATH=. .venv/bin/python tests/bench/bench_shared_start.py [--json FILE] [--blocks N]

The blocks of eight workers are written to a real Valkey. A gateway is started: seconds until it answers its first
request, and until its mirror has every block; once with all event streams to take over, once beside a gateway that
follows them. Memory of a block in the server and in the gateway, beside a key for each block.
"""

import argparse
import asyncio
import json
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import httpx
import yaml

from cachecore.blocks import Chain, pack_tokens
from cachecore.holders import Epoch, Worker, WorkerName
from cachecore.index.contract import Origin, Stored
from cachecore.index.publisher import Publisher
from cachecore.index.schema import Schema
from cachecore.prompts.plain import PlainRenderer
from cachecore.scope import DEFAULT_TENANT, IdentityScope, Keyring, Naming
from cachecore.store.address import parse_address
from cachecore.store.connection import RedisStore
from tests.cachecore.store.servers import Server, start_server
from tests.gateway.end_to_end.processes import (
    BLOCK_TOKENS,
    HOST,
    MODEL,
    Fleet,
    Process,
    candidate,
    chat,
    free_ports,
    new_keyring,
)
from tests.gateway.end_to_end.sharing import resident_bytes, sharing_config, used_memory

WORKERS = 8
CHAIN_BLOCKS = 250
BATCHES = 20
NAIVE_KEYS = 100_000

Row = dict[str, Any]


def naming_of(keyring: Path) -> Naming:
    """That of the gateways' open tenant."""
    ring = Keyring.load(keyring)
    scope = IdentityScope(MODEL, ring.key_id(DEFAULT_TENANT), BLOCK_TOKENS, tokenizer=PlainRenderer.fingerprint)
    return Naming.of(scope, ring)


class Filling(NamedTuple):
    """What was written, and a part of it to ask for."""

    blocks: int
    seconds: float
    asked: list[tuple[dict[str, Any], str]]
    """Prompts, and the worker that has all of each."""


async def fill(server: Server, naming: Naming, fleet: Fleet, blocks: int) -> Filling:
    """Give each worker its part of the blocks, as a gateway that follows its events would have written them."""
    store = RedisStore(parse_address(server.url), budget_seconds=10.0)
    await store.start()
    publisher = Publisher(store, Schema(), blocks_max=blocks, queue_max_blocks=10 * blocks, stream_length_max=1000)
    writer = asyncio.create_task(publisher.run())
    random, started, asked = Random(5), time.monotonic(), list[tuple[dict[str, Any], str]]()
    origin = Origin(None, None, 0, naming.root)
    for name in fleet.names:
        info = httpx.get(f"http://{name}/server_info", trust_env=False).json()
        holder = Worker(WorkerName(name), Epoch(info["epoch"]))
        last = info["kv_events"]["next_sequence"] - 1
        assert last >= BATCHES
        publisher.adopt(holder, time.time_ns() // 10**6, None)
        chains = blocks // WORKERS // CHAIN_BLOCKS
        for batch in range(BATCHES):
            events = []
            for _ in range(chains * batch // BATCHES, chains * (batch + 1) // BATCHES):
                body, stored = make_chain(random, naming, origin)
                events.append(stored)
            asked.append((body, name))
            publisher.apply(holder, last if batch == BATCHES - 1 else batch, events)
        await publisher.flush()
    writer.cancel()
    with suppress(asyncio.CancelledError):
        await writer
    await store.close()
    return Filling(chains * CHAIN_BLOCKS * WORKERS, time.monotonic() - started, asked)


def make_chain(random: Random, naming: Naming, origin: Origin) -> tuple[dict[str, Any], Stored]:
    """A prompt, and its first blocks as a store."""
    body = chat("".join(random.choices("abcdefghij klmno", k=CHAIN_BLOCKS * BLOCK_TOKENS)))
    renderer = PlainRenderer()
    tokens = [token for segment in renderer.chat(body).segments for token in renderer.encode(segment)]
    chain = naming.hasher.chain(naming.root, pack_tokens(tokens[: CHAIN_BLOCKS * BLOCK_TOKENS]))
    handles = tuple(random.getrandbits(64) for _ in range(CHAIN_BLOCKS))
    return body, Stored(naming.root, Chain(chain), handles=handles, origin=origin)


class Starting:
    """A gateway, from the moment that its process is begun."""

    def __init__(self, directory: Path, server: Server, keyring: Path, fleet: Fleet, member: str) -> None:
        (port,) = free_ports(1)
        config = {"port": port, "workers": fleet.urls, **sharing_config(server.url, keyring, member)}
        path = directory / f"{member}.yaml"
        path.write_text(yaml.safe_dump(config))
        self._began_at = time.monotonic()
        self._process = Process(f"gateway-{member}", ["serve", "-c", str(path)], directory)
        self._http = httpx.Client(base_url=f"http://{HOST}:{port}", timeout=30, trust_env=False)

    def stop(self) -> None:
        self._process.stop()
        self._http.close()

    def answer_seconds(self) -> float:
        """Until the first request was answered, from the beginning."""
        while True:
            with suppress(httpx.TransportError):
                if self._http.post("/v1/chat/completions", json=chat("hi", max_tokens=1)).status_code == 200:
                    return round(time.monotonic() - self._began_at, 2)
            time.sleep(0.01)

    def complete_seconds(self, filling: Filling) -> float:
        """Until every block was in its index, its word was taken for every worker, and every prompt that was asked for
        matched whole."""
        while self.status()["index"]["holdings"] < filling.blocks or not self.trusts_all():
            time.sleep(0.02)
        seconds = time.monotonic() - self._began_at
        for body, worker in filling.asked:
            receipt = self._http.post("/route/explain", json=body).json()
            confirmed = candidate(receipt, worker)["confirmed_tokens"]
            if confirmed != CHAIN_BLOCKS * BLOCK_TOKENS:
                raise SystemExit(f"{confirmed} tokens of a chain of {CHAIN_BLOCKS} blocks are confirmed at {worker}")
        return round(seconds, 2)

    def trusts_all(self) -> bool:
        return all(worker["events_trusted"] for worker in self.status()["workers"])

    def streams_followed(self) -> int:
        return sum(len(worker["events"]) for worker in self.status()["workers"])

    def status(self) -> dict[str, Any]:
        document: dict[str, Any] = self._http.get("/status").json()
        return document

    def resident_bytes(self) -> int:
        return resident_bytes(self._process)


def wait_for(condition: Callable[[], bool], what: str, seconds_max: float = 60.0) -> None:
    limit = time.monotonic() + seconds_max
    while not condition():
        if time.monotonic() > limit:
            raise SystemExit(f"it did not come true within {seconds_max:g} s: {what}")
        time.sleep(0.02)


def naive_bytes_per_block(directory: Path) -> float:
    """A key for each block, a hash of the pods that have it with the engine's handle: as published indexes keep it."""
    script = """
        for number = 1, tonumber(ARGV[1]) do
            local name = redis.sha1hex(number)
            redis.call('HSET', 'blocks:' .. string.sub(name, 1, 16), '127.0.0.1:8001', string.sub(name, 17, 24))
        end"""
    with start_server(directory) as server:
        before = used_memory(server)
        server.command("EVAL", script, 0, NAIVE_KEYS, seconds=60)
        return (used_memory(server) - before) / NAIVE_KEYS


def bench_start(options: argparse.Namespace) -> Iterator[Row]:
    with tempfile.TemporaryDirectory() as name, start_server(Path(name)) as server:
        directory = Path(name)
        ring = new_keyring(directory)
        with Fleet(directory, "--speed", "1000", "--blocks", "1000000", count=WORKERS) as fleet:
            for number in range(2 * BATCHES * WORKERS):
                url = fleet.urls[number % WORKERS]
                httpx.post(f"{url}/v1/chat/completions", json=chat(f"{number} " * 20, max_tokens=1), trust_env=False)
            empty = Starting(directory, server, ring, fleet, "empty")
            empty.answer_seconds()
            wait_for(lambda: empty.streams_followed() == WORKERS, "all streams are followed")
            empty_bytes = empty.resident_bytes()
            empty.stop()
            server.command("FLUSHALL")
            before = used_memory(server)
            filling = asyncio.run(fill(server, naming_of(ring), fleet, options.blocks))
            server_bytes = (used_memory(server) - before) / filling.blocks
            naive_bytes = naive_bytes_per_block(directory)
            yield {
                "case": "memory",
                "blocks": filling.blocks,
                "written_seconds": round(filling.seconds, 1),
                "server_bytes_per_block": round(server_bytes, 1),
                "key_per_block_bytes_per_block": round(naive_bytes, 1),
                "smaller_by": round(naive_bytes / server_bytes, 2),
            }
            with ExitStack() as running:
                for member, alone in (("first", True), ("second", False)):
                    starting = Starting(directory, server, ring, fleet, member)
                    running.callback(starting.stop)
                    yield time_start(starting, filling, empty_bytes, alone)


def time_start(starting: Starting, filling: Filling, empty_bytes: int, alone: bool) -> Row:
    answered, complete = starting.answer_seconds(), starting.complete_seconds(filling)
    if alone:
        wait_for(lambda: starting.streams_followed() == WORKERS, "all streams are followed")
    grown = (starting.resident_bytes() - empty_bytes) / filling.blocks
    return {
        "case": "start, takes every stream over" if alone else "start, beside a gateway",
        "blocks": filling.blocks,
        "first_answer_seconds": answered,
        "mirror_complete_seconds": complete,
        "resident_bytes_per_block": round(grown, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there too")
    parser.add_argument("--blocks", type=int, default=1_000_000, help="in the server (default 1,000,000)")
    options = parser.parse_args()
    rows: list[Row] = []
    for row in bench_start(options):
        rows.append(row)
        print(json.dumps(row), flush=True)
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps({"rows": rows}, indent=1))


if __name__ == "__main__":
    main()
