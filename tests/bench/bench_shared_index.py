"""The shared index on a server of its own: what a lookup takes, and what following 64 event streams takes.

    .venv/bin/python tests/bench/bench_shared_index.py [--json FILE] [--rounds N] [--seconds S] [--binary redis|valkey]
                                                       [--query-blocks N] [--unix] [--pin]

Lookups are of 512 blocks, over 64 holders that hold 16,384 blocks each: held by one, held whole by all, held by each to
another depth. `mirror` answers in the process; `redis` asks the server (over its socket with `--unix`), and its round
trips are counted at a proxy before it. Ingest is what a gateway does with its workers' events: pre-encoded batches of
32 blocks in vLLM's dialect, decoded, named, applied to the mirror and published, on one thread; first as fast as it
goes, then at 100,000 blocks a second. The server's CPU is its process's own. ROPEWAY_NATIVE=0 measures without the
extension in C.

A machine that is busy with other things is told from slow code by controls in the same minutes. Lookups take turns with
PINGs, with ECHOes of as many bytes, and with a fixed loop in plain Python that touches nothing of ours; around ingest
goes the same loop, by its CPU time. On an idle machine the loop's median and 99th percentile are close to its minimum,
and a PING takes some 40 us. Of each lookup, PING and ECHO it is told where the time went: CPU of this process, CPU of
the server, and `elsewhere`, which is to fall asleep and be woken, and to wait for a core while others have it.
`undisturbed` are those of which little went elsewhere, and `share` is how many they are. `--pin` gives each of the two
processes a core of its own.
"""

import argparse
import asyncio
import gc
import json
import math
import os
import random
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, NamedTuple, Self

from cachecore.blocks import HASH_BYTES, Chain, PrefixHash
from cachecore.events import BlockStored, Dialect, EventBatch, decode_batch, encode_batch
from cachecore.holders import Epoch, Worker, WorkerName
from cachecore.index.contract import Stored
from cachecore.index.mirror import MirrorIndex
from cachecore.index.publisher import Publisher
from cachecore.index.redis import RedisIndex
from cachecore.index.schema import Schema
from cachecore.native import native
from cachecore.rekey import Rekeyer
from cachecore.scope import DEFAULT_TENANT, IdentityScope, Keyring, Naming
from cachecore.store import RedisStore, parse_address
from tests.cachecore.store.proxy import FaultProxy
from tests.cachecore.store.servers import BINARIES, Server, start_server

HOLDERS = 64
HOLDER_BLOCKS = 16_384
EVENT_BLOCKS = 32
QUERY_BLOCKS = 512
BLOCK_TOKENS = 16
PACED_BLOCKS_PER_SECOND = 100_000
TURN = 50
"""Lookups in a row before the controls have theirs."""
BUDGET_SECONDS = 30.0
"""Of no consequence here: a lookup that takes long is to be seen."""
ELSEWHERE_MS_MAX = 0.1
"""Two wake-ups on an idle machine take less. In an exchange that took more, others had the core."""
ROOT = PrefixHash(bytes(HASH_BYTES))


def holder(number: int) -> Worker:
    return Worker(WorkerName(f"w{number}"), Epoch(1))


class Member:
    """A gateway, as far as the index goes."""

    def __init__(self, url: str, schema: Schema) -> None:
        self.store = RedisStore(parse_address(url), budget_seconds=BUDGET_SECONDS)
        self.publisher = Publisher(self.store, schema)
        self.direct = RedisIndex(self.store, schema, self.publisher)
        self.mirror = MirrorIndex(self.store, schema, self.publisher, self.direct, 2 * HOLDERS * HOLDER_BLOCKS)
        self._writing: asyncio.Task[None] | None = None

    async def __aenter__(self) -> "Member":
        await self.store.start()
        self.mirror.start()
        self._writing = asyncio.create_task(self.publisher.run())
        while not self.mirror.ready:
            await asyncio.sleep(0.01)
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._writing is not None:
            self._writing.cancel()
            await asyncio.gather(self._writing, return_exceptions=True)
        await self.mirror.stop()
        await self.store.close()


# ---- lookups ---------------------------------------------------------------------------------------------------------


def queries(rng: random.Random, blocks: int) -> dict[str, Chain]:
    return {kind: Chain(rng.randbytes(blocks * HASH_BYTES)) for kind in ("one holder", "hot", "staggered")}


async def fill(member: Member, wanted: dict[str, Chain], rng: random.Random) -> None:
    sequences = dict.fromkeys(range(HOLDERS), 0)

    def store(number: int, chain: bytes) -> None:
        parent = ROOT
        for start in range(0, len(chain), EVENT_BLOCKS * HASH_BYTES):
            piece = chain[start : start + EVENT_BLOCKS * HASH_BYTES]
            member.mirror.apply(holder(number), sequences[number], [Stored(parent, Chain(piece))])
            sequences[number] += 1
            parent = PrefixHash(piece[-HASH_BYTES:])

    store(0, wanted["one holder"])
    for number in range(HOLDERS):
        store(number, wanted["hot"])
        staggered = wanted["staggered"]
        store(number, staggered[: (number + 1) * (len(staggered) // HASH_BYTES // HOLDERS) * HASH_BYTES])
        for _ in range(HOLDER_BLOCKS // QUERY_BLOCKS):
            store(number, rng.randbytes(QUERY_BLOCKS * HASH_BYTES))
        await member.publisher.flush()


async def bench_lookups(server: Server, options: argparse.Namespace) -> list[dict[str, Any]]:
    rng, schema = random.Random(1), Schema("bench")
    wanted = queries(rng, options.query_blocks)
    rows = [{"case": f"lookup {kind}", "blocks": options.query_blocks} for kind in wanted]
    await bench_mirror(server, schema, wanted, rows, options.rounds)
    # As the gateway does once it has started. The mirror is gone by now.
    gc.collect()
    gc.freeze()
    for row, chain in zip(rows, wanted.values(), strict=True):
        row.update(await bench_direct(server, schema, chain, options.rounds))
        if server.socket_path is None:
            row["round_trips"] = await count_round_trips(server, schema, chain)
    return rows


async def bench_mirror(
    server: Server, schema: Schema, wanted: dict[str, Chain], rows: list[dict[str, Any]], rounds: int
) -> None:
    async with Member(server.url, schema) as member:
        await fill(member, wanted, random.Random(2))
        for row, (kind, chain) in zip(rows, wanted.items(), strict=True):
            answer = await member.direct.match(chain)
            if member.mirror.match(chain) != answer:
                raise SystemExit(f"{kind}: the answers differ")
            mirror_ms = [timed_ms(lambda c=chain: member.mirror.match(c)) for _ in range(rounds)]  # type: ignore[misc]
            row.update(holders=len(answer.depths), mirror_ms=summary(mirror_ms))


async def bench_direct(server: Server, schema: Schema, chain: Chain, rounds: int) -> dict[str, Any]:
    """Lookups at the server and, in turns with them, the controls."""
    store = RedisStore(parse_address(server.url), budget_seconds=BUDGET_SECONDS)
    await store.start()
    index = RedisIndex(store, schema, Publisher(store, schema))
    calls: dict[str, Callable[[], Awaitable[object]]] = {
        "redis": lambda: index.match(chain),
        "ping": lambda: store.command("PING"),
        "echo": lambda: store.command("ECHO", bytes(len(chain))),
    }
    for call in calls.values():
        await call()
    server.command("CONFIG", "RESETSTAT")
    samples: dict[str, list[Sample]] = {name: [] for name in calls}
    loops = list[float]()
    with Meter(server.pid) as meter:
        for _ in range(rounds // TURN):
            for name, call in calls.items():
                samples[name] += [await meter.measure(call) for _ in range(TURN)]
            loops += [timed_ms(plain_loop) for _ in range(TURN)]
    await store.close()
    statistic = server.info("commandstats")["cmdstat_evalsha"]
    script_ms = float(statistic.partition("usec_per_call=")[2].partition(",")[0]) / 1000
    return {
        **{name: report(taken) for name, taken in samples.items()},
        "script_ms_mean": round(script_ms, 4),
        "loop_ms": summary(loops),
    }


class Sample(NamedTuple):
    """Of one exchange, where the time went."""

    wall_ms: float
    client_cpu_ms: float
    server_cpu_ms: float

    @property
    def elsewhere_ms(self) -> float:
        return self.wall_ms - self.client_cpu_ms - self.server_cpu_ms


class Meter:
    """Reads the kernel's accounts of this thread and of the server's first one, which carries all commands out."""

    def __init__(self, server: int) -> None:
        self._server = os.open(f"/proc/{server}/schedstat", os.O_RDONLY)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._server)

    async def measure(self, call: Callable[[], Awaitable[object]]) -> Sample:
        server = self._server_cpu_ms()
        client = time.thread_time()
        wall_ms = await awaited_ms(call)
        client_cpu_ms = (time.thread_time() - client) * 1e3
        return Sample(wall_ms, client_cpu_ms, self._server_cpu_ms() - server)

    def _server_cpu_ms(self) -> float:
        return int(os.pread(self._server, 100, 0).split()[0]) / 1e6


def report(samples: list[Sample]) -> dict[str, Any]:
    undisturbed = [sample.wall_ms for sample in samples if sample.elsewhere_ms <= ELSEWHERE_MS_MAX]
    return {
        "wall_ms": summary([sample.wall_ms for sample in samples]),
        "undisturbed_ms": {"share": round(len(undisturbed) / len(samples), 3), **summary(undisturbed or [math.nan])},
        "client_cpu_ms": summary([sample.client_cpu_ms for sample in samples]),
        "server_cpu_ms": summary([sample.server_cpu_ms for sample in samples]),
        "elsewhere_ms": summary([sample.elsewhere_ms for sample in samples]),
    }


def plain_loop() -> int:
    total = 0
    for number in range(4000):
        total += number * number % 7
    return total


async def count_round_trips(server: Server, schema: Schema, chain: Chain) -> float:
    """Of a lookup, at a proxy in front of the server, on a connection that has been used before."""
    proxy = FaultProxy(server.port)
    await proxy.listen()
    store = RedisStore(parse_address(proxy.url), budget_seconds=BUDGET_SECONDS)
    await store.start()
    index = RedisIndex(store, schema, Publisher(store, schema))
    await index.match(chain)
    before = proxy.round_trips
    for _ in range(100):
        await index.match(chain)
    trips = (proxy.round_trips - before) / 100
    await store.close()
    await proxy.close()
    return trips


def timed_ms(call: Callable[[], object]) -> float:
    started = time.perf_counter()
    call()
    return (time.perf_counter() - started) * 1e3


async def awaited_ms(call: Callable[[], Awaitable[object]]) -> float:
    started = time.perf_counter()
    await call()
    return (time.perf_counter() - started) * 1e3


def summary(samples: list[float]) -> dict[str, float]:
    samples = sorted(samples)
    return {
        "min": round(samples[0], 4),
        "p50": round(statistics.median(samples), 4),
        "p99": round(samples[int(0.99 * len(samples))], 4),
        "max": round(samples[-1], 4),
    }


# ---- ingest ----------------------------------------------------------------------------------------------------------


def encoded_streams(blocks: int, rng: random.Random) -> list[list[bytes]]:
    """For each of the streams, its batches: conversations of 512 blocks, each batch one store of 32."""
    streams: list[list[bytes]] = []
    for _ in range(HOLDERS):
        batches: list[bytes] = []
        parent: int | None = None
        for number in range(blocks // HOLDERS // EVENT_BLOCKS):
            if number % (QUERY_BLOCKS // EVENT_BLOCKS) == 0:
                parent = None
            handles = tuple(rng.getrandbits(64) for _ in range(EVENT_BLOCKS))
            tokens = tuple(rng.choices(range(150_000), k=EVENT_BLOCKS * BLOCK_TOKENS))
            event = BlockStored(handles, parent, tokens, BLOCK_TOKENS)
            batches.append(encode_batch(EventBatch(time.time(), (event,), rank=0), Dialect.VLLM_MAP))
            parent = handles[-1]
        streams.append(batches)
    return streams


async def bench_ingest(server: Server, blocks: int, blocks_per_second: int) -> dict[str, Any]:
    """`blocks_per_second` 0 is as fast as it goes."""
    keyring = Keyring.generate()
    naming = Naming.of(IdentityScope("m", keyring.key_id(DEFAULT_TENANT), BLOCK_TOKENS), keyring)
    rekeyers = [Rekeyer(BLOCK_TOKENS, lambda *_: naming) for _ in range(HOLDERS)]
    streams = encoded_streams(blocks, random.Random(2))
    server.command("FLUSHALL")
    loops = [cpu_ms(plain_loop) for _ in range(200)]
    async with Member(server.url, Schema("ingest")) as member:
        cpu, server_cpu, started = time.process_time(), server.cpu_seconds(), time.perf_counter()
        applied = 0
        for sequence in range(len(streams[0])):
            for number, stream in enumerate(streams):
                events = rekeyers[number].rekey(decode_batch(stream[sequence]).events)
                member.mirror.apply(holder(number), sequence, events)
                applied += EVENT_BLOCKS
                if number % 8 == 7:
                    await asyncio.sleep(0)
            ahead = applied / blocks_per_second - (time.perf_counter() - started) if blocks_per_second else 0.0
            if ahead > 0:
                await asyncio.sleep(ahead)
        behind = member.publisher.stats().extra["queued_blocks"]
        await member.publisher.flush()
        seconds = time.perf_counter() - started
        row = {
            "case": f"ingest at {blocks_per_second} blocks/s" if blocks_per_second else "ingest as fast as it goes",
            "blocks": applied,
            "seconds": round(seconds, 2),
            "blocks_per_second": round(applied / seconds),
            "queued_blocks_at_the_end": behind,
            "cpu_share": round((time.process_time() - cpu) / seconds, 3),
            "blocks_per_cpu_second": round(applied / (time.process_time() - cpu)),
            "server_cpu_share": round((server.cpu_seconds() - server_cpu) / seconds, 3),
        }
        stats = member.publisher.stats()
        if stats.holdings != applied or stats.extra["restatements"]:
            raise SystemExit(f"not everything was published, or not as it should be: {stats}")
    return {
        **row,
        "loop_cpu_ms": summary(loops + [cpu_ms(plain_loop) for _ in range(200)]),
        "native": native is not None,
    }


def cpu_ms(call: Callable[[], object]) -> float:
    started = time.process_time()
    call()
    return (time.process_time() - started) * 1e3


async def run(options: argparse.Namespace) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as directory:
        server = start_server(Path(directory), binary=BINARIES[options.binary], persist=False, unix=options.unix)
        with server:
            if options.pin:
                client_core, server_core, *_ = sorted(os.sched_getaffinity(0))
                os.sched_setaffinity(server.pid, {server_core})
                os.sched_setaffinity(0, {client_core})
            for row in await bench_lookups(server, options):
                rows.append({**row, "pinned": options.pin, "unix": options.unix, "load": round(os.getloadavg()[0], 1)})
                print(json.dumps(rows[-1]), flush=True)
            for rate in (0, PACED_BLOCKS_PER_SECOND) if options.seconds else ():
                blocks = (
                    int(options.seconds * PACED_BLOCKS_PER_SECOND) // (HOLDERS * QUERY_BLOCKS) * HOLDERS * QUERY_BLOCKS
                )
                rows.append(await bench_ingest(server, blocks, rate))
                print(json.dumps(rows[-1]), flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--json", metavar="FILE", help="write the results there too")
    parser.add_argument("--rounds", type=int, default=2000, help="lookups of each kind (default 2,000)")
    parser.add_argument("--seconds", type=float, default=10.0, help="of paced ingest; 0 for none (default 10)")
    parser.add_argument("--query-blocks", type=int, default=QUERY_BLOCKS, help="of a lookup (default 512)")
    parser.add_argument("--unix", action="store_true", help="ask the server over its socket instead of over TCP")
    parser.add_argument("--pin", action="store_true", help="this process on one core, the server on another")
    parser.add_argument("--binary", default="valkey", choices=sorted(BINARIES), help="which server (default valkey)")
    options = parser.parse_args()

    import uvloop

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        rows = runner.run(run(options))
    if options.json:
        Path(options.json).write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
