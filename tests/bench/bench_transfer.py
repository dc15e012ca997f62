"""Frames over loopback beside plain sockets in the same run, and pulls of small runs.

    PYTHONPATH=. .venv/bin/python tests/bench/bench_transfer.py [--json FILE] [--rounds N] [--loop asyncio|uvloop]
        [--wire tcp|nixl|mooncake]      (the last two in .venv-transports, which `make test-transports` makes)

Source and puller are processes of their own. `plain` is the same layers through blocking sockets, received into the
same memory one after the other: what the kernel moves when nothing else is done. `frames` are whole pulls:
capability, headers, MACs made and checked. Rounds alternate; `share` is the median of each round's frames over its
plain. `cpu` is what both ends together spend for a gigabyte: on a machine that is busy with other things, where two
processes seldom run at the same time, it says more than the rates. Then the MACs that frames could have used, over
memory and over what a core's cache holds, and the time of pulls of small runs.
"""

import argparse
import asyncio
import hashlib
import hmac
import json
import multiprocessing
import os
import socket
import sys
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import uvloop
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import AES
from cryptography.hazmat.primitives.ciphers.modes import GCM
from cryptography.hazmat.primitives.poly1305 import Poly1305

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from cachecore.transfer.frames import PIECE_BYTES, Frame
from cachecore.transfer.header import Span
from cachecore.transfer.tcp.channel import TcpWire, Wire
from cachecore.transfer.tcp.client import ClientSettings, TcpTransport
from cachecore.transfer.tcp.server import TcpServer
from cachecore.transfer.transport import Draft, Fetched, Request
from cachecore.transfer.wires import ENGINES, make_wire
from tests.cachecore.transfer.world import EXPECTATION, HEADER, KEYRING, SOURCE, make_plan, make_pull

BAR = 0.5
LAYERS = 30
RUNS = {
    "1,900 tokens of SmolLM2, bf16": (1900 * 768, 1),
    "the same, 3 layers to a frame": (1900 * 768, 3),
    "8,192 tokens of Llama-3-8B, i8": (8192 * 2112, 1),
}
"""Bytes of a layer, layers to a frame."""
SMALL_BYTES = {"1 block": 32 * 768, "8 blocks": 8 * 32 * 768}
PIECE = 1 << 20
PER_ROUND = 4


class MemoryHolder:
    """A source whose layers all lie ready in memory."""

    holder = SOURCE

    def __init__(self, sizes: list[int]) -> None:
        self._layers = [memoryview(bytearray(size)) for size in (max(sizes),) * LAYERS]

    async def serve(self, request: Request) -> AsyncGenerator[Draft, None]:
        run, wanted = request.capability.run, request.wanted
        size, count = run.first_block, run.blocks  # the run's place says what to send
        for layer in range(wanted.layers.first, wanted.layers.end, max(count, wanted.stride)):
            span = Span(layer, count, LAYERS)
            header = HEADER._replace(first_block=size, blocks=count, layers=span, layer_bytes=(size,) * count)
            yield Draft(header, [part[:size] for part in self._layers[layer : layer + count]])


class Discard:
    """A sink that keeps nothing."""

    async def take(self, frame: Frame) -> None:
        pass


def wire_of(name: str) -> Wire:
    return TcpWire() if name == "tcp" else make_wire(name, KEYRING, "127.0.0.1")


def run_source(sizes: list[int], pipe: Any, loop: str, wire: str = "tcp") -> None:
    async def serve() -> None:
        server = TcpServer(MemoryHolder(sizes), KEYRING, wire=wire_of(wire))
        await server.start()
        pipe.send(server.address)
        while not pipe.poll():
            await asyncio.sleep(0.2)

    run(serve(), loop)


def run_plain_source(size: int, pipe: Any) -> None:
    """Sends LAYERS * size bytes for each byte it gets."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        pipe.send(listener.getsockname()[1])
        connection, _ = listener.accept()
        layers = [memoryview(bytearray(size)) for _ in range(LAYERS)]
        with connection:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            while connection.recv(1):
                for layer in layers:
                    connection.sendall(layer)


def plain_seconds(connection: socket.socket, size: int, room: memoryview) -> float:
    began = time.perf_counter()
    connection.send(b"x")
    for _ in range(LAYERS):
        at = 0
        while at < size:
            at += connection.recv_into(room[at : min(size, at + PIECE)])
    return time.perf_counter() - began


async def pull_seconds(transport: TcpTransport, address: str, size: int, layers_per_frame: int = 1) -> float:
    plan = make_plan(address)
    plan = plan._replace(run=plan.run._replace(first_block=size, blocks=layers_per_frame))
    expectation = replace(EXPECTATION, layers=Span.all(LAYERS))
    pull = make_pull(plan)
    began = time.perf_counter()
    outcome = await transport.fetch(pull, expectation, Discard(), asyncio.get_running_loop().time() + 60)
    seconds = time.perf_counter() - began
    if not isinstance(outcome, Fetched) or outcome.payload_bytes != size * LAYERS:
        raise RuntimeError(f"a pull brought {outcome}")
    return seconds


async def transfers(transport: TcpTransport, address: str, pid: int, rounds: int) -> list[dict[str, Any]]:
    async def row(name: str, size: int, count: int) -> dict[str, Any]:
        return await transfer(lambda: pull_seconds(transport, address, size, count), pid, name, size, rounds)

    return [await row(name, size, count) for name, (size, count) in RUNS.items()]


def cpu_seconds(pid: int) -> float:
    """Of another process, so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


class Spent:
    """CPU time of this process and another one within the blocks."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self.seconds = 0.0

    def __enter__(self) -> None:
        self.seconds -= cpu_seconds(self._pid) + time.process_time()

    def __exit__(self, *error: object) -> None:
        self.seconds += cpu_seconds(self._pid) + time.process_time()


async def transfer(
    pull: Callable[[], Awaitable[float]], source_pid: int, name: str, size: int, rounds: int
) -> dict[str, Any]:
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=run_plain_source, args=(size, theirs))
    process.start()
    room = memoryview(bytearray(size))
    shares, plain, frames = [], [], []
    plain_cpu, frames_cpu = Spent(process.pid or 0), Spent(source_pid)
    with socket.create_connection(("127.0.0.1", ours.recv())) as connection:
        plain_seconds(connection, size, room)
        await pull()
        for _ in range(rounds):
            with plain_cpu:
                plain.append(min(plain_seconds(connection, size, room) for _ in range(PER_ROUND)))
            with frames_cpu:
                frames.append(min([await pull() for _ in range(PER_ROUND)]))
            shares.append(plain[-1] / frames[-1])
    process.join()
    moved = size * LAYERS
    gigabytes = moved * rounds * PER_ROUND / 1e9
    return {
        "run": name,
        "megabytes": moved / 1e6,
        "plain_gb_per_second": moved / median(plain) / 1e9,
        "frames_gb_per_second": moved / median(frames) / 1e9,
        "share": median(shares),
        "plain_cpu_seconds_per_gb": plain_cpu.seconds / gigabytes,
        "frames_cpu_seconds_per_gb": frames_cpu.seconds / gigabytes,
    }


async def small_pulls(transport: TcpTransport, address: str, rounds: int) -> dict[str, float]:
    figures = {}
    for name, size in SMALL_BYTES.items():
        seconds = sorted([await pull_seconds(transport, address, size) for _ in range(rounds * 20)])
        figures[f"pull of {name} ms_p50"] = median(seconds) * 1e3
        figures[f"pull of {name} ms_p99"] = seconds[int(len(seconds) * 0.99)] * 1e3
    return figures


def macs(size: int = 1900 * 768, rounds: int = 40) -> dict[str, float]:
    """GB/s of one core, in pieces as frames take them: over layers in memory, and over one piece in its cache."""
    layers = [memoryview(bytearray(size)) for _ in range(64)]
    key = bytes(32)
    kinds: dict[str, Callable[[], Any]] = {
        "Poly1305": lambda: Poly1305(key),
        "AES-256-GMAC": lambda: Gmac(key),
        "HMAC-SHA256": lambda: hmac.new(key, digestmod="sha256"),
        "keyed BLAKE2b": lambda: hashlib.blake2b(key=key, digest_size=16),
    }
    figures = {}
    for name, make in kinds.items():
        figures[f"{name}, memory"] = size / min(_mac_seconds(make, layers[n % 64]) for n in range(rounds)) / 1e9
        hot = layers[0][: 256 << 10]
        figures[f"{name}, cache"] = len(hot) / min(_mac_seconds(make, hot) for _ in range(rounds)) / 1e9
    return figures


class Gmac:
    def __init__(self, key: bytes) -> None:
        self.update = Cipher(AES(key), GCM(bytes(12))).encryptor().authenticate_additional_data


def _mac_seconds(make: Callable[[], Any], data: memoryview) -> float:
    began = time.thread_time()
    mac = make()
    for start in range(0, len(data), PIECE_BYTES):
        mac.update(data[start : start + PIECE_BYTES])
    return time.thread_time() - began


def run(work: Any, loop: str) -> Any:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop if loop == "uvloop" else None) as runner:
        return runner.run(work)


def measure(rounds: int, loop: str, streams: int, wire: str = "tcp") -> dict[str, Any]:
    ours, theirs = multiprocessing.Pipe()
    sizes = [*(size for size, _ in RUNS.values()), *SMALL_BYTES.values()]
    process = multiprocessing.get_context("spawn").Process(target=run_source, args=(sizes, theirs, loop, wire))
    process.start()
    address = ours.recv()
    try:
        # Kept connections belong to a loop, so there is a transport for each.
        settings, wires = ClientSettings(streams=streams, stall_seconds=30, connect_seconds=10), [wire_of(wire)]
        transport = TcpTransport(KEYRING, settings, wires=wires)
        rows = run(transfers(transport, address, process.pid or 0, rounds), loop)
        transport = TcpTransport(KEYRING, settings, wires=wires)
        small = run(small_pulls(transport, address, rounds), loop)
    finally:
        ours.send("stop")
        process.join()
    return {
        "wire": wire,
        "loop": loop,
        "streams": streams,
        "transfers": rows,
        "small": small,
        "mac_gb_per_second": macs(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there too")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--loop", choices=("asyncio", "uvloop"), default="asyncio")
    parser.add_argument("--streams", type=int, default=1)
    parser.add_argument("--wire", choices=("tcp", *ENGINES), default="tcp")
    arguments = parser.parse_args()
    figures = measure(arguments.rounds, arguments.loop, arguments.streams, arguments.wire)
    for row in figures["transfers"]:
        met = "" if row["share"] >= BAR else f"  below {BAR:.0%}"
        rates = f"plain {row['plain_gb_per_second']:6.2f} GB/s   frames {row['frames_gb_per_second']:6.2f} GB/s"
        cpu = f"cpu {row['plain_cpu_seconds_per_gb']:.2f} and {row['frames_cpu_seconds_per_gb']:.2f} s/GB"
        print(f"{row['run']:<32} {row['megabytes']:7.1f} MB   {rates}   share {row['share']:.2f}   {cpu}{met}")
    for name, value in {**figures["small"], **figures["mac_gb_per_second"]}.items():
        print(f"{name:<32} {value:8.3f}")
    if arguments.json:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
