"""What it costs that gateways know each other's load: `python tests/bench/bench_notes.py [--json FILE]`.

First the parts in one process, CPU time per request: leaving its notes (beside the plain accounts), writing them,
reading and applying them. Then gateways as processes of their own around a real Valkey: delay until another one counts
a request, messages, bytes, and CPU per request at the sender, at each reader and at the server, over what the same
requests cost without a store. Every prompt has 512 blocks of its own to predict.
"""

import argparse
import asyncio
import gc
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from random import Random
from statistics import median
from time import thread_time
from typing import Any

import uvloop

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from cachecore.holders import Epoch, Worker, WorkerName
from cachecore.index.chains import ChainMultiset
from cachecore.index.memory import MemoryIndex
from cachecore.store import RedisStore, parse_address
from gateway.fleet.knowledge import Knowledge
from gateway.fleet.noted import NotedAccounting, NotedHistory, NotedPredictions, Outbox
from gateway.fleet.notes import encode
from gateway.fleet.peerbook import PeerBook
from gateway.fleet.peers import Peers
from policies.state.inflight import InflightAccounting
from policies.state.predictions import PredictedInsertions
from tests.cachecore.store.servers import start_server

BLOCKS = 512
WORKERS = [f"worker-{number}" for number in range(8)]
HOLDERS = {name: (Worker(WorkerName(name), Epoch(5), 0),) for name in WORKERS}
PER_MESSAGE = 5
"""Requests whose notes go in one message: a thousand a second."""


def holders_of(name: str) -> tuple[Worker, ...]:
    return HOLDERS.get(name, ())


class Requests:
    """Requests that begin and end at once."""

    def __init__(self, accounting: InflightAccounting, predictions: PredictedInsertions) -> None:
        self._accounting, self._predictions = accounting, predictions
        self._chains = [Random(number).randbytes(16 * BLOCKS) for number in range(64)]
        self._number = 0

    def begin(self, request_id: str, now: float) -> None:
        number = self._number = self._number + 1
        worker = WORKERS[number % 8]
        self._accounting.dispatch(request_id, worker, 0, now, 8200, 0.14, 64, 0.12, in_one_piece=False)
        self._predictions.predict(request_id, (worker, 0), self._chains[number % 64], now)

    def whole(self, now: float) -> None:
        request_id = f"req-0123456789{self._number:08x}"
        self.begin(request_id, now)
        self._accounting.first_token(request_id, now)
        self._accounting.finish(request_id, now, 20, True)


def parts(rounds: int = 2000) -> dict[str, float]:
    """Medians of CPU time per request, in microseconds; plain and noted accounts take turns."""
    outbox = Outbox(holders_of)
    accounting, predictions = NotedAccounting(outbox), NotedPredictions(ChainMultiset(), outbox)
    noted = Requests(accounting, predictions)
    plain = Requests(InflightAccounting(), PredictedInsertions(ChainMultiset()))
    there = Outbox(holders_of)
    far = NotedAccounting(there), NotedPredictions(ChainMultiset(), there), NotedHistory(ChainMultiset(), there)
    book = PeerBook("there", *far, holders_of)
    times: dict[str, list[float]] = {"plain": [], "noted": [], "write": [], "read": []}
    size = 0
    for number in range(rounds):
        now = number * 0.05
        times["plain"].append(_timed(lambda: [plain.whole(now) for _ in range(PER_MESSAGE)]))  # noqa: B023
        times["noted"].append(_timed(lambda: [noted.whole(now) for _ in range(PER_MESSAGE)]))  # noqa: B023
        data = b""

        def write() -> None:
            nonlocal data
            data = encode("here", "run", number, 0, outbox.take(200))  # noqa: B023

        times["write"].append(_timed(write))
        size = len(data)
        times["read"].append(_timed(lambda: book.receive(data, now)))  # noqa: B023
    figures = {name: median(values) / PER_MESSAGE * 1e6 for name, values in times.items()}
    if book.counts().notes != rounds * PER_MESSAGE * 4:
        raise RuntimeError(f"notes were not read: {book.counts()}")
    return {
        "plain_accounts_us": figures["plain"],
        "leaving_notes_us": figures["noted"] - figures["plain"],
        "writing_us": figures["write"],
        "reading_and_applying_us": figures["read"],
        "bytes_per_request": size / PER_MESSAGE,
    }


def _timed(work: Any) -> float:
    started = thread_time()
    work()
    return thread_time() - started


async def gateway(name: str, url: str, rate: float, seconds: float, gateways: int) -> dict[str, Any]:
    """One gateway process: requests at an even pace once all others are there. An empty URL is no store."""
    delays = _watch_delays()
    knowledge = Knowledge(MemoryIndex())
    peers, task, store = None, None, None
    if url:
        store = RedisStore(parse_address(url))
        await store.start()
        peers = Peers(store, "bench", name, knowledge, holders_of)
        task = asyncio.create_task(peers.run())
        while len(peers.alive()) < gateways - 1:
            await asyncio.sleep(0.01)
    await asyncio.sleep(0.5)
    requests, loop = Requests(knowledge.accounting, knowledge.predictions), asyncio.get_running_loop()
    gc.collect()
    gc.freeze()
    before, began, cpu = peers.stats() if peers else None, loop.time(), time.process_time()
    sent = 0
    while rate and loop.time() - began < seconds:
        while sent < (loop.time() - began) * rate:
            request_id = f"{time.monotonic_ns()}"
            requests.begin(request_id, time.monotonic())
            loop.call_later(0.05, lambda r=request_id: knowledge.accounting.first_token(r, time.monotonic()))
            loop.call_later(0.15, lambda r=request_id: knowledge.accounting.finish(r, time.monotonic(), 20, True))
            sent += 1
        await asyncio.sleep(0.001)
    if not rate:
        await asyncio.sleep(seconds)
    cpu = time.process_time() - cpu
    await asyncio.sleep(0.5)
    left = len(knowledge.accounting)
    result: dict[str, Any] = {"requests": sent, "cpu_seconds": cpu, "left": left, "delays_ms": sorted(delays)}
    if peers and before and task and store:
        after = peers.stats()
        result |= {
            "messages": after.sent_messages - before.sent_messages,
            "bytes": after.sent_bytes - before.sent_bytes,
            "read_messages": after.received.messages - before.received.messages,
            "differences": after.received.differences,
        }
        await asyncio.sleep(0.5)
        task.cancel()
        await asyncio.wait([task])
        await store.close()
    return result


def _watch_delays() -> list[float]:
    """Milliseconds from a dispatch elsewhere, whose time is its id, until it is counted here."""
    delays: list[float] = []
    dispatch = InflightAccounting.dispatch

    def watched(self: InflightAccounting, request_id: str, *arguments: Any, **options: Any) -> None:
        sent_at = request_id.partition("/")[2]
        if sent_at:
            delays.append((time.monotonic_ns() - int(sent_at)) / 1e6)
        dispatch(self, request_id, *arguments, **options)

    InflightAccounting.dispatch = watched  # type: ignore[method-assign]
    return delays


def start(name: str, url: str, rate: float, seconds: float, gateways: int) -> subprocess.Popen[bytes]:
    arguments = [name, url, str(rate), str(seconds), str(gateways)]
    return subprocess.Popen([sys.executable, __file__, "--gateway", *arguments], stdout=subprocess.PIPE)


def result_of(process: subprocess.Popen[bytes]) -> dict[str, Any]:
    output, _ = process.communicate()
    return dict(json.loads(output))


def over_a_server(gateways: int, rate: float, seconds: float) -> dict[str, float]:
    """One gateway sends at `rate`, the others only read: so the costs can be told apart."""
    alone = result_of(start("alone", "", rate, seconds, 1))
    with tempfile.TemporaryDirectory() as folder, start_server(Path(folder), persist=False) as server:
        processes = [start(f"gw{n}", server.url, 0 if n else rate, seconds, gateways) for n in range(gateways)]
        time.sleep(2.0)
        idle = server.cpu_seconds()
        sender, *readers = [result_of(process) for process in processes]
        server_seconds = server.cpu_seconds() - idle
    delays = sorted(delay for reader in readers for delay in reader["delays_ms"])
    if any(reader["left"] or reader["differences"] for reader in readers) or not delays:
        raise RuntimeError("the accounts of the readers are not the sender's")
    requests = sender["requests"]
    return {
        "requests_per_second": requests / seconds,
        "messages_per_second": sender["messages"] / seconds,
        "bytes_per_request": sender["bytes"] / requests,
        "sender_us_per_request": (sender["cpu_seconds"] - alone["cpu_seconds"]) / requests * 1e6,
        "reader_us_per_request": median(reader["cpu_seconds"] for reader in readers) / requests * 1e6,
        "server_us_per_request": server_seconds / requests * 1e6,
        "delay_ms_p50": median(delays),
        "delay_ms_p99": delays[int(len(delays) * 0.99)],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there too")
    parser.add_argument("--seconds", type=float, default=5.0, help="of each run over a server")
    parser.add_argument("--gateway", nargs=5, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.gateway:
        name, url, rate, seconds, gateways = arguments.gateway
        print(json.dumps(uvloop.run(gateway(name, url, float(rate), float(seconds), int(gateways)))))
        return
    figures = parts()
    for gateways, rate in ((2, 200.0), (2, 1000.0), (4, 200.0)):
        run = over_a_server(gateways, rate, arguments.seconds)
        figures |= {f"{gateways}_gateways_{rate:.0f}_per_second_{name}": value for name, value in run.items()}
    if arguments.json:
        arguments.json.write_text(json.dumps({name: round(value, 3) for name, value in figures.items()}))
    for name, value in figures.items():
        print(f"{name:<60} {value:10.2f}")


if __name__ == "__main__":
    main()
