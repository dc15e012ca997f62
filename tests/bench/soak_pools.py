"""Several writers and readers on one pool, killed at random while it evicts: no wrong block, and the bound is kept.

    python tests/bench/soak_pools.py --seconds 300 [--kind directory redis s3] [--writers 3] [--readers 3] [--json F]

Each writer and reader is a process of its own; every second or two one of them is killed (SIGKILL) and replaced. Every
writing of a run has bytes of its own, which follow from the run's key and from a number drawn for that writing: a
reader thus finds out bytes of another run, of another place in the run, and of two writings mixed. A watcher looks, ten
times a second, at what the store really holds. Exits with 1 when anything was wrong.
"""

import argparse
import asyncio
import contextlib
import hashlib
import json
import random
import secrets
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from cachecore.blocks import HASH_BYTES, Chain, PrefixHash
from cachecore.scope import KeyId, TenantId
from cachecore.store import RedisStore, parse_address
from cachecore.store.pools import (
    Accepted,
    Bucket,
    BucketPool,
    DirectoryPool,
    Extent,
    KvPool,
    Missed,
    PoolBounds,
    PoolRun,
    RedisPool,
    RunKey,
    SealedFrame,
)

KINDS = ("directory", "redis", "s3")
RUNS = 400
"""Distinct ones; the pool holds about a sixth of them."""
LAYERS = 12
BYTES_MAX = 16 << 20
TENANTS = [TenantId(name) for name in ("ann", "bob", "cat")]
QUOTA = 4 << 20
"""Of the last of them."""
WRITING_BYTES = 8
DEAD_SECONDS = 20.0
"""A tenth of the usual: here someone dies every other second."""


def run_of(number: int) -> PoolRun:
    rng = random.Random(number // 2)
    chain = Chain(rng.randbytes(HASH_BYTES * 4))
    tenant = TENANTS[number // 2 % len(TENANTS)]
    codec = ("raw", "i8")[number % 2]  # two runs of one name, but for the codec
    tail = PrefixHash(chain[-HASH_BYTES:])
    key = RunKey(b"c" * 16, b"s" * 16, KeyId(tenant, 0), tail, 4, Extent(0, LAYERS), Extent(0, 8), codec)
    return PoolRun(key, PrefixHash(rng.randbytes(HASH_BYTES)), chain, 4 * number)


def payload(key: RunKey, layers: Extent, writing: bytes) -> bytes:
    seed = writing + key.canonical() + bytes(layers)
    size = 4_000 + int.from_bytes(hashlib.sha256(seed).digest()[:2], "little")
    return writing + hashlib.shake_128(seed).digest(size)


def frames_of(run: PoolRun) -> list[SealedFrame]:
    writing = secrets.token_bytes(WRITING_BYTES)
    spans = [Extent(start, start + 3) for start in range(0, LAYERS, 3)]
    return [SealedFrame(span, [payload(run.key, span, writing)]) for span in spans]


def fault_of(key: RunKey, wanted: Extent, frames: tuple[SealedFrame, ...]) -> str:
    """What is wrong with an answer; empty when nothing is."""
    contents = [b"".join(bytes(buffer) for buffer in frame.buffers) for frame in frames]
    if len({content[:WRITING_BYTES] for content in contents}) != 1:
        return "writings are mixed"
    if not frames[0].layers.start <= wanted.start < wanted.end <= frames[-1].layers.end:
        return "layers are missing"
    for frame, content in zip(frames, contents, strict=True):
        if content != payload(key, frame.layers, content[:WRITING_BYTES]):
            return f"bytes of layers {frame.layers} are wrong"
    return ""


# ---- one writer or reader --------------------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def opened(kind: str, where: str, bytes_max: int = BYTES_MAX) -> AsyncIterator[KvPool]:
    bounds = PoolBounds(bytes_max, quotas={TENANTS[-1]: QUOTA})
    store = None
    pool: KvPool
    if kind == "directory":
        pool = DirectoryPool("soak", Path(where), bounds, dead_seconds=DEAD_SECONDS)
    elif kind == "redis":
        store = RedisStore(parse_address(where), budget_seconds=5.0)
        await store.start()
        pool = RedisPool("soak", store, bounds)
    else:
        bucket = Bucket("ropeway-pool", "soak", where, "us-east-1", "test", "test")
        pool = BucketPool("soak", bucket, bounds, dead_seconds=DEAD_SECONDS)
    await pool.start()
    yield pool
    await pool.close()
    if store is not None:
        await store.close()


async def work(role: str, kind: str, where: str) -> None:
    """Until killed, or until its input ends; tells what it did every half second."""
    counts: Counter[str] = Counter()
    ending = threading.Event()
    threading.Thread(target=lambda: (sys.stdin.read(), ending.set()), daemon=True).start()
    async with opened(kind, where) as pool:
        step = write if role == "writer" else read
        told_at = time.monotonic()
        while not ending.is_set():
            await asyncio.gather(*(step(pool, counts) for _ in range(2)))
            if time.monotonic() - told_at > 0.5:
                print(json.dumps(counts), flush=True)
                counts.clear()
                told_at = time.monotonic()
        print(json.dumps(counts), flush=True)


def draw() -> int:
    """Some are asked for much more often than others."""
    return int(RUNS * random.random() ** 2)


async def write(pool: KvPool, counts: Counter[str]) -> None:
    run = run_of(draw())
    outcome = await pool.put(run, frames_of(run))
    if isinstance(outcome, Accepted):
        counts["stored" if outcome.new else "present"] += 1
    else:
        counts[f"declined {outcome.reason}"] += 1


async def read(pool: KvPool, counts: Counter[str]) -> None:
    key = run_of(draw()).key
    start = random.randrange(LAYERS)
    wanted = random.choice([Extent(0, LAYERS), Extent(start, random.randint(start + 1, LAYERS))])
    answer = await pool.get(key, wanted)
    if isinstance(answer, Missed):
        counts[f"missed {answer.reason}"] += 1
        return
    counts["hits"] += 1
    counts["read bytes"] += sum(frame.size_bytes for frame in answer.frames)
    if fault := fault_of(key, wanted, answer.frames):
        counts[f"WRONG {fault}"] += 1


# ---- the whole -------------------------------------------------------------------------------------------------------


@dataclass
class Soak:
    kind: str
    where: str
    held: Callable[[], int]
    """Bytes that the store holds now."""
    counts: Counter[str] = field(default_factory=Counter)
    held_max: int = 0
    looks: int = 0
    processes: list[tuple[str, subprocess.Popen[str]]] = field(default_factory=list)
    threads: list[threading.Thread] = field(default_factory=list)

    def run(self, seconds: float, writers: int, readers: int) -> None:
        for role in ["writer"] * writers + ["reader"] * readers:
            self.processes.append((role, self.start(role)))
        ending = time.monotonic() + seconds
        kill_at = time.monotonic() + 2
        while time.monotonic() < ending:
            self.held_max = max(self.held_max, self.held())
            self.looks += 1
            if time.monotonic() > kill_at:
                self.kill_one()
                kill_at = time.monotonic() + random.uniform(0.5, 2.5)
            time.sleep(0.1)
        for _, process in self.processes:
            process.stdin.close()
        for _, process in self.processes:
            process.wait(30)
            self.ended(process.returncode)
        for thread in self.threads:
            thread.join()
        self.held_max = max(self.held_max, self.held())

    def start(self, role: str) -> subprocess.Popen[str]:
        command = [sys.executable, __file__, "--role", role, "--kind", self.kind, "--where", self.where]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        thread = threading.Thread(target=self.gather, args=(process,))
        thread.start()
        self.threads.append(thread)
        return process

    def gather(self, process: subprocess.Popen[str]) -> None:
        for line in process.stdout:
            with contextlib.suppress(json.JSONDecodeError):  # killed while it spoke
                self.counts.update(json.loads(line))

    def kill_one(self) -> None:
        place = random.randrange(len(self.processes))
        role, process = self.processes[place]
        self.ended(process.poll())
        process.send_signal(signal.SIGKILL)
        process.wait()
        self.counts[f"killed {role}s"] += 1
        self.processes[place] = (role, self.start(role))

    def ended(self, code: int | None) -> None:
        """None is one that still ran, 0 one that was told to end."""
        if code:
            self.counts[f"ENDED with {code}"] += 1

    def faults(self) -> list[str]:
        found = [f"{what}: {count}" for what, count in self.counts.items() if what.startswith(("WRONG", "ENDED"))]
        if self.held_max > BYTES_MAX:
            found.append(f"the pool held {self.held_max} bytes, {BYTES_MAX} are allowed")
        if not (self.counts["stored"] and self.counts["hits"] and self.held_max > BYTES_MAX // 2):
            found.append("too little happened to say anything")
        return found


@contextlib.contextmanager
def stores(kind: str, directory: Path) -> Iterator[tuple[str, Callable[[], int]]]:
    """Where the pool is, and how to weigh it."""
    if kind == "directory":
        yield str(directory), lambda: weigh_directory(directory)
    elif kind == "redis":
        from tests.cachecore.store.servers import start_server

        with start_server(directory, persist=False) as server:
            yield server.url, lambda: weigh_server(server)
    else:
        from tests.cachecore.store.pools.buckets import contents, start_s3

        with start_s3(directory) as server:
            store = server.store("soak")
            yield server.url, lambda: sum(size for path, size in contents(store).items() if path.endswith(".hckv"))


def weigh_directory(root: Path) -> int:
    """Runs, and what is being written."""
    total = 0
    for path in [*root.glob("*/runs/*/*/*.hckv"), *root.glob("*/drafts/*")]:
        with contextlib.suppress(FileNotFoundError):
            about = path.stat()
            total += about.st_size // about.st_nlink  # for a moment a run has two names
    return total


def weigh_server(server) -> int:  # type: ignore[no-untyped-def]
    total = 0
    for key in server.command("KEYS", "ropeway:pool:soak:*"):
        flat = server.command("HGETALL", key)
        total += sum(len(value) for name, value in zip(flat[::2], flat[1::2], strict=True) if name != b"token")
    return total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--kind", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--writers", type=int, default=3)
    parser.add_argument("--readers", type=int, default=3)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--role", choices=("writer", "reader"), help=argparse.SUPPRESS)
    parser.add_argument("--where", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.role:
        asyncio.run(work(options.role, options.kind[0], options.where))
        return
    results, failed = [], False
    for kind in options.kind:
        with tempfile.TemporaryDirectory() as directory, stores(kind, Path(directory)) as (where, held):
            soak = Soak(kind, where, held)
            soak.run(options.seconds, options.writers, options.readers)
        faults = soak.faults()
        failed = failed or bool(faults)
        share = soak.held_max / BYTES_MAX
        print(f"{kind}: {options.seconds:g} s, held at most {share:.1%} of the bound in {soak.looks} looks")
        print(f"  {dict(sorted(soak.counts.items()))}")
        print(f"  {'; '.join(faults) or 'nothing wrong'}", flush=True)
        results.append({"kind": kind, "held_max": soak.held_max, "counts": soak.counts, "faults": faults})
    if options.json:
        options.json.write_text(json.dumps({"seconds": options.seconds, "pools": results}, indent=2))
    sys.exit(failed)


if __name__ == "__main__":
    main()
