"""64 event streams through the gateway's real intake: sockets, order, decoding, naming, index, on one loop.

    PYTHONPATH=. .venv/bin/python tests/bench/bench_events.py [--blocks N] [--rate N] [--transport ipc|tcp]

A publisher process beside sends captures (`cachecore.captures`) of 64 workers in vLLM's dialect, encoded beforehand:
conversations of 512 blocks of 16 tokens, 32 blocks a batch. A worker has room for 16,384 blocks; from then on each
batch also removes as many as it stores. First the streams are sent at a steady rate, 100,000 stored blocks a second,
then as fast as they are taken.

What counts is whether the intake keeps up: `behind` is what has been sent and is not yet in the index, sampled every
50 ms, in seconds of the stream. `loop_late_ms` is how late a bystander on the same loop is woken, as a request is.
Memory is the process's resident set, before and after; `loop_cpu_ms` is a fixed loop in plain Python by its CPU time,
which tells a busy machine from slow code. ROPEWAY_NATIVE=0 measures without the extension in C.
"""

import argparse
import asyncio
import json
import multiprocessing
import os
import random
import resource
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from ctypes import c_int64
from pathlib import Path
from typing import Any

import uvloop
import zmq
import zmq.asyncio

from cachecore.captures import Capture, CapturedMessage, CaptureHeader, write_capture
from cachecore.events import BlockRemoved, BlockStored, Dialect, EventBatch, KvEvent, encode_batch
from cachecore.holders import Epoch, Tier, Worker, WorkerName
from cachecore.index.memory import MemoryIndex
from cachecore.native import native
from cachecore.rekey import Rekeyer
from cachecore.scope import DEFAULT_TENANT, IdentityScope, Keyring, Naming
from gateway.fleet.framing import Message
from gateway.fleet.intake import EventIntake, EventSource

STREAMS = 64
BLOCKS = 2_000_000
RATE = 100_000
BLOCK_TOKENS = 16
BATCH_BLOCKS = 32
CONVERSATION_BLOCKS = 512
WORKER_BLOCKS = 16_384
SAMPLE_SECONDS = 0.05
TICK_SECONDS = 0.005


# ---- captures --------------------------------------------------------------------------------------------------------


def stream(batches: int, draw: random.Random) -> Iterator[CapturedMessage]:
    held: list[int] = []
    parent: int | None = None
    for number in range(batches):
        if number % (CONVERSATION_BLOCKS // BATCH_BLOCKS) == 0:
            parent = None
        handles = tuple(draw.getrandbits(64) for _ in range(BATCH_BLOCKS))
        tokens = draw.choices(range(150_000), k=BATCH_BLOCKS * BLOCK_TOKENS)
        events: list[KvEvent] = [BlockStored(handles, parent, tokens, BLOCK_TOKENS, group_idx=0)]
        held += handles
        if len(held) > WORKER_BLOCKS:
            events += [BlockRemoved((handle,), group_idx=0) for handle in held[:BATCH_BLOCKS]]
            del held[:BATCH_BLOCKS]
        parent = handles[-1]
        payload = encode_batch(EventBatch(1.78e9 + number, tuple(events), 0), Dialect.VLLM_MAP)
        yield CapturedMessage(float(number), "kv-events", number, payload)


def write_captures(directory: Path, blocks: int) -> int:
    """Batches in each."""
    batches = blocks // STREAMS // BATCH_BLOCKS
    for number in range(STREAMS):
        write_capture(directory / f"{number}.jsonl", CaptureHeader.new(1.78e9), stream(batches, random.Random(number)))
    return batches


# ---- the publisher, in a process of its own --------------------------------------------------------------------------


def publish(directory: Path, endpoints: Sequence[str], rate: float, sent: c_int64) -> None:
    """Send all captures, one batch of each stream after the other. `sent` counts batches; below 0 it is getting ready.
    With rate 0 it sends as fast as the sockets take it."""
    streams = [
        [Message(m.sequence, m.payload, m.topic.encode()).live() for m in Capture(directory / f"{number}.jsonl")]
        for number in range(STREAMS)
    ]
    with zmq.Context(io_threads=2) as context:
        sockets = [context.socket(zmq.XPUB) for _ in endpoints]
        for socket, endpoint in zip(sockets, endpoints, strict=True):
            socket.setsockopt(zmq.SNDHWM, 100_000)
            socket.setsockopt(zmq.XPUB_NODROP, int(not rate))
            socket.bind(endpoint)
        sent.value = -1
        for socket in sockets:
            socket.recv()
        time.sleep(0.2)
        sent.value = 0
        began, done = time.perf_counter(), 0
        for frames in (each[number] for number in range(len(streams[0])) for each in streams):
            sockets[done % STREAMS].send_multipart(frames)
            done += 1
            if done % 8 == 0:
                sent.value = done
                while rate and done * BATCH_BLOCKS / rate > time.perf_counter() - began + TICK_SECONDS:
                    time.sleep(TICK_SECONDS)
        sent.value = done
        for socket in sockets:
            socket.close(linger=60_000)


# ---- the intake ------------------------------------------------------------------------------------------------------


async def run_case(directory: Path, batches: int, rate: float, transport: str) -> dict[str, Any]:
    endpoints = [
        f"ipc://{directory}/{number}-{rate}.sock" if transport == "ipc" else f"tcp://127.0.0.1:{20_200 + number}"
        for number in range(STREAMS)
    ]
    method = multiprocessing.get_context("spawn")
    sent = method.Value(c_int64, -2, lock=False)
    publisher = method.Process(target=publish, args=(directory, endpoints, rate, sent), daemon=True)
    publisher.start()
    while sent.value < -1:
        await asyncio.sleep(0.05)
    ring = Keyring.generate()
    naming = Naming.of(IdentityScope("m", ring.key_id(DEFAULT_TENANT), BLOCK_TOKENS), ring)
    context, index = zmq.asyncio.Context(), MemoryIndex()
    intakes = [
        EventIntake(
            Worker(WorkerName(f"w{number}"), Epoch(1)),
            EventSource(endpoint),
            index,
            Rekeyer(BLOCK_TOKENS, lambda *_: naming),
            context,
        )
        for number, endpoint in enumerate(endpoints)
    ]
    loops = [loop_cpu_ms() for _ in range(50)]
    memory_before = resident_bytes()
    for intake in intakes:
        await intake.start()
    while sent.value < 0:
        await asyncio.sleep(0.01)
    bystander = asyncio.create_task(lateness())
    figures = await watch(intakes, batches * STREAMS, sent)
    bystander.cancel()
    late = sorted(await bystander)
    for intake in intakes:
        await intake.stop()
    publisher.join()
    check(intakes, index, batches)
    context.destroy(linger=0)
    return {
        "case": f"{rate:,.0f} blocks/s" if rate else "as fast as it goes",
        "transport": transport,
        **figures,
        "loop_late_ms": {"p50": late[len(late) // 2], "p99": late[len(late) * 99 // 100], "max": late[-1]},
        "memory_mib": {"before": memory_before >> 20, "after": resident_bytes() >> 20},
        "memory_peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10,
        "blocks_held": index.stats().blocks,
        "loop_cpu_ms": round(statistics.median(loops + [loop_cpu_ms() for _ in range(50)]), 3),
        "load": round(os.getloadavg()[0], 1),
        "native": native is not None,
    }


async def watch(intakes: Sequence[EventIntake], total: int, sent: c_int64) -> dict[str, Any]:
    """Until all batches are in the index."""
    began, cpu = time.perf_counter(), time.process_time()
    behind: list[tuple[int, float]] = []
    while (applied := sum(intake.stats().batches for intake in intakes)) < total:
        behind.append((sent.value - applied, time.perf_counter() - began))
        await asyncio.sleep(SAMPLE_SECONDS)
        lost = sum(intake.stats().gaps for intake in intakes)
        if lost:
            raise SystemExit(f"the publisher had to drop: {lost} gaps; the intake does not keep up")
    seconds, cpu = time.perf_counter() - began, time.process_time() - cpu
    per_second = total / seconds
    shares = sorted(batches / per_second for batches, _ in behind)
    half = [batches / per_second for batches, at in behind if at > seconds / 2]
    return {
        "blocks": total * BATCH_BLOCKS,
        "seconds": round(seconds, 2),
        "blocks_per_second": round(total * BATCH_BLOCKS / seconds),
        "blocks_per_cpu_second": round(total * BATCH_BLOCKS / cpu),
        "cpu_share": round(cpu / seconds, 3),
        "behind_seconds": {
            "p50": round(shares[len(shares) // 2], 3),
            "p99": round(shares[len(shares) * 99 // 100], 3),
            "max": round(shares[-1], 3),
            "max_in_the_second_half": round(max(half, default=0.0), 3),
        },
    }


async def lateness() -> list[float]:
    """Milliseconds by which sleeps of one millisecond last longer, until cancelled."""
    found: list[float] = []
    try:
        while True:
            began = time.perf_counter()
            await asyncio.sleep(0.001)
            found.append(round((time.perf_counter() - began - 0.001) * 1e3, 3))
    except asyncio.CancelledError:
        return found


def check(intakes: Sequence[EventIntake], index: MemoryIndex, batches: int) -> None:
    """Everything was understood, and what is held is what the workers hold."""
    expected = min(batches * BATCH_BLOCKS, WORKER_BLOCKS)
    for intake in intakes:
        stats, rekeyed = intake.stats(), intake.rekey_stats()
        held = len(set(index.holdings(intake.holder, Tier.L0)))
        odd = stats.malformed + stats.gaps + stats.restarts + rekeyed.unknown_handle + rekeyed.unknown_parent
        if odd or held != expected:
            raise SystemExit(f"{intake.holder.name} holds {held} blocks of {expected}: {stats} {rekeyed}")


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def loop_cpu_ms() -> float:
    began, total = time.process_time(), 0
    for number in range(4000):
        total += number * number % 7
    return (time.process_time() - began) * 1e3


async def run(options: argparse.Namespace) -> list[dict[str, Any]]:
    rows = []
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        batches = write_captures(directory, options.blocks)
        for rate in (options.rate, 0) if options.rate else (0,):
            rows.append(await run_case(directory, batches, rate, options.transport))
            print(json.dumps(rows[-1]), flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--blocks", type=int, default=BLOCKS, help="of all streams together (default 2,000,000)")
    parser.add_argument("--rate", type=float, default=RATE, help="stored blocks a second; 0 leaves the paced case out")
    parser.add_argument("--transport", choices=("ipc", "tcp"), default="ipc")
    parser.add_argument("--json", metavar="FILE", help="write the results there too")
    options = parser.parse_args()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        rows = runner.run(run(options))
    if options.json:
        Path(options.json).write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
