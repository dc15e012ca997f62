"""Whether a shared index stays the size it is while workers come and go.

    PYTHONPATH=. .venv/bin/python tests/bench/bench_shared_churn.py [--json FILE] [--lives N] [--runs N]

Eight workers begin a thousand lives, in front of two gateways. Each life stores a hundred runs, splits every one with a
branch, and takes half of them back; the other half goes with the life. Before, meanwhile and after, with eight workers
up and everything settled: keys and memory of a real Valkey, holdings and resident memory of a gateway, and the tasks of
another one, which runs in this process.
"""

import argparse
import asyncio
import gc
import json
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import yaml
import zmq

from cachecore.events import BlockRemoved, BlockStored, EventBatch
from cachecore.holders import Epoch, Worker, WorkerName
from gateway.server import Gateway as GatewayInProcess
from gateway.settings.loading import load
from tests.cachecore.store.servers import Server, start_server
from tests.gateway.end_to_end.processes import BLOCK_TOKENS, HOST, Gateway, free_ports, new_keyring
from tests.gateway.end_to_end.sharing import SharedCopy, resident_bytes, sharing_config, used_memory
from workers.simulated.engine import SimulatedConfig
from workers.simulated.fleet import SimulatedWorker, WorkerOptions

WORKERS = 8
LIFE_SECONDS_MAX = 300.0
"""Until its history is shared: on a machine that does other things besides."""

Row = dict[str, Any]


class Slot:
    """A port on which one worker's lives follow each other."""

    def __init__(self, port: int, context: "zmq.Context[Any]", seed: int) -> None:
        self.name = f"{HOST}:{port}"
        self._port = port
        self._context = context
        self._random = Random(seed)
        self._worker: SimulatedWorker | None = None

    async def begin(self, runs: int) -> Worker:
        """Another life, with a history. Returns it as a holder."""
        options = WorkerOptions(port=self._port)
        worker = self._worker = SimulatedWorker(SimulatedConfig(), options, context=self._context)
        await worker.start()
        assert worker.publisher is not None
        for events in self._history(runs):
            worker.publisher.publish(EventBatch(time.time(), tuple(events)))
        return Worker(WorkerName(self.name), Epoch(worker.engine.info.epoch))

    async def end(self) -> None:
        worker, self._worker = self._worker, None
        if worker is not None:
            await worker.stop()

    @property
    def last_sequence(self) -> int:
        assert self._worker is not None
        assert self._worker.publisher is not None
        return self._worker.publisher.next_sequence - 1

    def _history(self, runs: int) -> Iterator[list[BlockStored | BlockRemoved]]:
        """Runs of eight blocks, each split by a branch from its middle; every other one is taken back."""
        for number in range(runs):
            trunk, branch = self._handles(8), self._handles(4)
            yield [self._stored(trunk, None), self._stored(branch, trunk[3])]
            if number % 2:
                yield [BlockRemoved(tuple(reversed(trunk + branch)))]

    def _handles(self, count: int) -> tuple[int, ...]:
        return tuple(self._random.getrandbits(63) for _ in range(count))

    def _stored(self, handles: tuple[int, ...], parent: int | None) -> BlockStored:
        tokens = [self._random.randrange(256) for _ in range(len(handles) * BLOCK_TOKENS)]
        return BlockStored(handles, parent, tokens, BLOCK_TOKENS)


class Sizes(NamedTuple):
    keys: int
    server_bytes: int
    holdings: int
    tasks: int
    """Of the gateway that runs in this process."""
    resident_bytes: int
    """Of the other gateway."""


def gateway_tasks() -> int:
    """Tasks of this process that run code of the gateway's."""
    rooms = ("/gateway/", "/cachecore/")
    codes = [getattr(task.get_coro(), "cr_code", None) for task in asyncio.all_tasks()]
    return sum(code is not None and any(room in code.co_filename for room in rooms) for code in codes)


async def live(slots: Sequence[Slot], lives: int, runs: int, copy: SharedCopy) -> None:
    """Each slot ends its life and begins another, so many times; a life lasts until all of its history is shared."""
    wanted: dict[Worker, int] = {}
    reached: dict[Worker, asyncio.Event] = {}

    async def watch() -> None:
        while True:
            records = await asyncio.to_thread(copy.records)
            for holder, event in reached.items():
                record = records.get(holder)
                if record is not None and record.sequence == wanted[holder]:
                    event.set()
            await asyncio.sleep(0.05)

    async def run(slot: Slot) -> None:
        for _ in range(lives):
            await slot.end()
            holder = await slot.begin(runs)
            wanted[holder], reached[holder] = slot.last_sequence, asyncio.Event()
            async with asyncio.timeout(LIFE_SECONDS_MAX):
                await reached[holder].wait()
            del reached[holder]

    watcher = asyncio.create_task(watch())
    await asyncio.gather(*map(run, slots))
    watcher.cancel()


async def churn(directory: Path, server: Server, options: argparse.Namespace, report: Callable[[Row], None]) -> None:
    ring = new_keyring(directory)
    context: zmq.Context[Any] = zmq.Context()
    slots = [Slot(port, context, seed) for seed, port in enumerate(free_ports(WORKERS))]
    copy = SharedCopy(server)
    urls = [f"http://{slot.name}" for slot in slots]
    config = {
        "workers": urls,
        "probes": {"interval_seconds": 0.2},
        **sharing_config(server.url, ring, "inside", stream_entries_max=256),
    }
    (port,) = free_ports(1)
    path = directory / "inside.yaml"
    path.write_text(yaml.safe_dump({**config, "port": port}))
    inside = asyncio.create_task(GatewayInProcess(load(path, {})).serve())
    config["sharing"] = {**config["sharing"], "gateway": "outside"}
    for slot in slots:
        await slot.begin(options.runs)
    outside = await asyncio.to_thread(Gateway, directory, urls, {**config, "workers": urls}, "outside")

    async def sizes() -> Sizes:
        """Once nothing moves any more."""
        await asyncio.sleep(options.settle_seconds)
        gc.collect()
        status = await asyncio.to_thread(outside.status)
        return Sizes(
            int(server.command("DBSIZE")),
            used_memory(server),
            status["index"]["holdings"],
            gateway_tasks(),
            resident_bytes(outside),
        )

    started = time.monotonic()
    try:
        await live(slots, 2, options.runs, copy)
        before = await sizes()
        report({"case": "churn, base line", "lives": 2 * WORKERS, **before._asdict()})
        per_slot = options.lives // WORKERS
        for quarter in range(1, 5):
            await live(slots, per_slot // 4, options.runs, copy)
            now = await sizes()
            report(
                {
                    "case": "churn",
                    "lives": quarter * (per_slot // 4) * WORKERS,
                    "runs": quarter * (per_slot // 4) * WORKERS * options.runs,
                    "seconds": round(time.monotonic() - started, 1),
                    **now._asdict(),
                }
            )
    finally:
        await asyncio.to_thread(outside.stop)
        inside.cancel()
        with suppress(asyncio.CancelledError):
            await inside
        for slot in slots:
            await slot.end()
        context.term()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there too")
    parser.add_argument("--lives", type=int, default=1000, help="of all workers together (default 1,000)")
    parser.add_argument("--runs", type=int, default=100, help="of each life (default 100)")
    parser.add_argument("--settle-seconds", type=float, default=5.0, help="before sizes are taken (default 5)")
    options = parser.parse_args()
    rows: list[Row] = []

    def report(row: Row) -> None:
        rows.append(row)
        print(json.dumps(row), flush=True)

    with tempfile.TemporaryDirectory() as name, start_server(Path(name)) as server:
        asyncio.run(churn(Path(name), server, options, report))
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps({"rows": rows}, indent=1))


if __name__ == "__main__":
    main()
