"""What a pool costs: runs put and read, beside the same bytes written to and read from a plain file in the same run.

    python tests/bench/bench_pools.py [--kind directory redis s3] [--megabytes 16] [--rounds 10] [--json F]

Medians. A run has 30 frames. `first` is the time from the question to the first frame. The directory and the plain file
lie in the same (temporary) file system and are read from the page cache; both are synced when they are written. s3 is
moto's server, which is Python: it says what the protocol costs here, not what a bucket does.
"""

import argparse
import asyncio
import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from cachecore.store.pools import Accepted, Extent, KvPool, PoolRun, SealedFrame
from tests.bench.soak_pools import KINDS, opened, stores
from tests.cachecore.store.pools.runs import make_run

FRAMES = 30


def timed_file(path: Path, data: bytes, rounds: int) -> dict[str, float]:
    writes, reads = [], []
    for number in range(rounds):
        started = time.perf_counter()
        with (path / f"plain-{number}").open("wb", buffering=0) as file:
            file.write(data)
            os.fsync(file.fileno())
        writes.append(time.perf_counter() - started)
        started = time.perf_counter()
        (path / f"plain-{number}").read_bytes()
        reads.append(time.perf_counter() - started)
    return {"put": statistics.median(writes), "get": statistics.median(reads)}


async def timed_pool(pool: KvPool, frames: Callable[[PoolRun], list[SealedFrame]], rounds: int) -> dict[str, float]:
    puts, firsts, gets = [], [], []
    for number in range(rounds):
        run = make_run(number, layers=Extent(0, FRAMES))
        sealed = frames(run)
        started = time.perf_counter()
        outcome = await pool.put(run, sealed)
        puts.append(time.perf_counter() - started)
        assert outcome == Accepted(new=True), outcome
        started, seen = time.perf_counter(), 0
        async for frame in pool.stream(run.key):
            assert isinstance(frame, SealedFrame), frame
            if not seen:
                firsts.append(time.perf_counter() - started)
            seen += 1
        gets.append(time.perf_counter() - started)
        assert seen == FRAMES
        await pool.evict(run.key)
    return {"put": statistics.median(puts), "first": statistics.median(firsts), "get": statistics.median(gets)}


async def measure(kind: str, where: str, data: bytes, rounds: int) -> dict[str, float]:
    size = len(data) // FRAMES
    pieces = [memoryview(data)[start : start + size] for start in range(0, size * FRAMES, size)]

    def frames(run: PoolRun) -> list[SealedFrame]:
        return [SealedFrame(Extent(layer, layer + 1), [piece]) for layer, piece in enumerate(pieces)]

    async with opened(kind, where, bytes_max=1 << 30) as pool:
        return await timed_pool(pool, frames, rounds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kind", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--megabytes", type=float, default=16)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    data = random.Random(0).randbytes(int(options.megabytes * 1e6))
    results = {}
    with tempfile.TemporaryDirectory() as directory:
        results["plain file"] = timed_file(Path(directory), data, options.rounds)
    for kind in options.kind:
        with tempfile.TemporaryDirectory() as directory, stores(kind, Path(directory)) as (where, _):
            results[kind] = asyncio.run(measure(kind, where, data, options.rounds))
    print(f"{'':12}{'put MB/s':>10}{'get MB/s':>10}{'first ms':>10}   of {len(data) / 1e6:g} MB in {FRAMES} frames")
    for name, seconds in results.items():
        first = f"{seconds['first'] * 1e3:10.2f}" if "first" in seconds else ""
        print(f"{name:12}{len(data) / 1e6 / seconds['put']:10.0f}{len(data) / 1e6 / seconds['get']:10.0f}{first}")
    if options.json:
        options.json.write_text(json.dumps({"bytes": len(data), "seconds": results}, indent=2))


if __name__ == "__main__":
    main()
