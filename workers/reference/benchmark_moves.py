"""KV through a `.hckv` file and over loopback, with frames, MACs and rotation, beside plain files and plain sockets."""

import asyncio
import multiprocessing
import os
import secrets
import socket
import time
from collections.abc import AsyncGenerator, Awaitable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import torch

from cachecore.blocks import HASH_BYTES, Chain, PrefixHash
from cachecore.holders import Epoch, Worker, WorkerName
from cachecore.kv.codecs.contract import KvFacts, Origin
from cachecore.kv.codecs.registry import CODECS
from cachecore.kv.layout import LayerKv
from cachecore.kv.rope import RopeTable, rope_table
from cachecore.kv.variants import RopeConfig
from cachecore.scope import DEFAULT_TENANT, Fidelity, Keyring
from cachecore.store.pools import Accepted, DirectoryPool, PoolBounds, PoolRun, SealedFrame
from cachecore.store.pools.transport import to_store
from cachecore.transfer.capability import Run
from cachecore.transfer.frames import Frame, FrameWriter, open_frame
from cachecore.transfer.header import FrameHeader, Span
from cachecore.transfer.plan import Grant, Plan, Pull, read_plan, sign
from cachecore.transfer.tcp.client import ClientSettings, TcpTransport
from cachecore.transfer.tcp.server import TcpServer
from cachecore.transfer.transport import Draft, Expectation, Fetched, Request, Sealed
from workers.reference.benchmark import SHIFTS, Progress, Rate, Shape

_BLOCK_TOKENS = 16
_CODECS = ("raw", "i8")
_SOURCE_POSITION, _TARGET_POSITION = SHIFTS[0]
_SOURCE = Worker(WorkerName("benchmark-source"), Epoch(1), 0)
_TARGET = Worker(WorkerName("benchmark-target"), Epoch(1), 0)
_STALL_SECONDS, _DEADLINE_SECONDS = 30.0, 120.0
_PIECE_BYTES = 1 << 20


class MoveError(ValueError):
    """KV did not arrive, or not as it was sent."""


@dataclass(frozen=True)
class _World:
    """One run of blocks, and who may read it. Both processes make the same from the same arguments."""

    shape: Shape
    secret: bytes

    @property
    def keyring(self) -> Keyring:
        return Keyring({0: self.secret}, 0)

    @property
    def chain(self) -> Chain:
        return Chain(b"".join(index.to_bytes(HASH_BYTES, "big") for index in range(1, 1 + self.blocks)))

    @property
    def blocks(self) -> int:
        return self.shape.tokens // _BLOCK_TOKENS

    @property
    def run(self) -> Run:
        parent = PrefixHash(b"p" * HASH_BYTES)
        return Run(parent, PrefixHash(self.chain[-HASH_BYTES:]), _SOURCE_POSITION // _BLOCK_TOKENS, self.blocks)

    def header(self, codec: str, layer: int, payload_bytes: int) -> FrameHeader:
        run, shape = self.run, self.shape
        return FrameHeader(
            compatibility=b"C" * 16,
            scope=b"S" * 16,
            key_id=self.keyring.key_id(DEFAULT_TENANT),
            parent=run.parent,
            tail=run.tail,
            first_block=run.first_block,
            blocks=run.blocks,
            block_size_tokens=_BLOCK_TOKENS,
            position=_SOURCE_POSITION,
            layers=Span(layer, 1, shape.layers),
            kv_heads=Span.all(shape.kv_heads),
            head_dim=shape.head_dim,
            value_dim=shape.head_dim,
            dtype="bfloat16",
            codec=codec,
            fidelity=Fidelity.EXACT if codec == "raw" else Fidelity.QUANTIZED,
            layer_bytes=(payload_bytes,),
        )

    def expectation(self) -> Expectation:
        shape = self.shape
        heads = Span.all(shape.kv_heads)
        dims = (shape.head_dim, shape.head_dim)
        return Expectation(b"C" * 16, b"S" * 16, Span.all(shape.layers), heads, *dims, _BLOCK_TOKENS, "bfloat16")

    def pull(self, codec: str, address: str) -> Pull:
        positions = (_SOURCE_POSITION, _TARGET_POSITION)
        plan = Plan(_SOURCE, (address,), self.run, *positions, codec, _DEADLINE_SECONDS)
        now = time.time()
        grant = Grant(self.keyring.key_id(DEFAULT_TENANT), _TARGET, Fidelity.ROTATED, now + _DEADLINE_SECONDS)
        return read_plan(sign(plan, grant, self.keyring), self.keyring, _TARGET, now)

    def table(self) -> RopeTable:
        return rope_table(RopeConfig("default", 100_000.0, self.shape.head_dim), _TARGET_POSITION + self.shape.tokens)

    def stored(self) -> list[LayerKv]:
        draw = torch.Generator().manual_seed(1)
        size = (2, self.shape.tokens, self.shape.kv_heads, self.shape.head_dim)
        return [LayerKv(*torch.randn(size, generator=draw).bfloat16()) for _ in range(self.shape.layers)]


class _Placing:
    """Decodes frames, turns keys, and puts them where an engine's memory would be. A sink, too."""

    def __init__(self, world: _World) -> None:
        size = (world.shape.tokens, world.shape.kv_heads, world.shape.head_dim)
        self.room = [LayerKv(*torch.empty(2, *size, dtype=torch.bfloat16)) for _ in range(world.shape.layers)]
        self.position = _TARGET_POSITION
        self._table = world.table()

    async def take(self, frame: Frame) -> None:
        await asyncio.to_thread(self.place, frame)

    def place(self, frame: Frame) -> None:
        header = frame.header
        for layer, payload in frame.layer_payloads():
            shape = (header.tokens, header.kv_heads.size, header.head_dim, header.value_dim, header.dtype)
            facts = KvFacts(header.codec, layer, header.position, *shape)
            keys, values = CODECS[header.codec].decode(payload, facts, self.position, self._table)
            self.room[layer].keys.copy_(keys)
            self.room[layer].values.copy_(values)


# ---- files -----------------------------------------------------------------------------------------------------------


def file_rates(shape: Shape, rounds: int, directory: Path, copy_gb_per_second: float, progress: Progress) -> list[Rate]:
    """A run into a directory pool and back, bit for bit. Raises MoveError, OSError."""
    return asyncio.run(
        _file_rates(_World(shape, secrets.token_bytes(32)), rounds, directory, copy_gb_per_second, progress)
    )


async def _file_rates(
    world: _World, rounds: int, directory: Path, copy_gb_per_second: float, progress: Progress
) -> list[Rate]:
    stored, placing = world.stored(), _Placing(world)
    placing.position = _SOURCE_POSITION
    run, frames = to_store(_sealed(world, stored), world.chain)
    size = 2 * world.shape.layers * world.shape.bytes_each
    plain = memoryview(bytearray(secrets.token_bytes(1 << 20) * (-(-size // (1 << 20)))))[:size]
    best = dict.fromkeys(("write", "read", "plain write", "plain read"), float("inf"))

    async def timed(name: str, work: Awaitable[object]) -> None:
        start = time.perf_counter()
        await work
        best[name] = min(best[name], time.perf_counter() - start)

    pool = DirectoryPool("benchmark", directory, PoolBounds(4 * size + (1 << 26)))
    await pool.start()
    try:
        for done in range(rounds):
            progress(".hckv", done, rounds)
            await timed("plain write", asyncio.to_thread(_write_plain, directory / "plain", plain))
            await timed("plain read", asyncio.to_thread((directory / "plain").read_bytes))
            await timed("write", _put(pool, run, frames))
            await timed("read", _get(pool, run, placing, world.keyring))
            await pool.evict(run.key)
        _check(placing.room, stored)
    finally:
        await pool.close()
    rates = {name: size / seconds / 1e9 for name, seconds in best.items()}
    return [
        Rate(".hckv written and synced", rates["write"], rates["write"] / rates["plain write"], "a plain file"),
        Rate(".hckv read, checked, put in place", rates["read"], rates["read"] / rates["plain read"], "a plain file"),
        Rate(".hckv read, checked, put in place", rates["read"], rates["read"] / copy_gb_per_second, "memcpy"),
    ]


def _sealed(world: _World, stored: Sequence[LayerKv]) -> list[Sealed]:
    writer = FrameWriter(world.keyring.frame_key)
    frames = []
    for layer, kv in enumerate(stored):
        payload = CODECS["raw"].encode(kv, Origin(layer, _SOURCE_POSITION), None).payload
        header = world.header("raw", layer, payload.nbytes)
        frames.append(Sealed(header, writer.seal(header, [payload])))
    return frames


async def _put(pool: DirectoryPool, run: PoolRun, frames: Sequence[SealedFrame]) -> None:
    outcome = await pool.put(run, frames)
    if not isinstance(outcome, Accepted):
        raise MoveError(f"the pool declined a run: {outcome}")


async def _get(pool: DirectoryPool, run: PoolRun, placing: _Placing, keyring: Keyring) -> None:
    async with aclosing(pool.stream(run.key)) as frames:
        async for sealed in frames:
            if not isinstance(sealed, SealedFrame):
                raise MoveError(f"the pool lost a run: {sealed}")
            await asyncio.to_thread(_open_and_place, placing, sealed, keyring)


def _open_and_place(placing: _Placing, sealed: SealedFrame, keyring: Keyring) -> None:
    placing.place(open_frame(sealed.buffers[0], keyring.frame_key))


def _write_plain(path: Path, data: memoryview) -> None:
    with path.open("wb", buffering=0) as file:
        left = data
        while left:
            left = left[file.write(left) :]
        os.fsync(file.fileno())


def _check(room: Sequence[LayerKv], stored: Sequence[LayerKv]) -> None:
    for got, true in zip(room, stored, strict=True):
        if not (torch.equal(got.keys, true.keys) and torch.equal(got.values, true.values)):
            raise MoveError("KV came back from a .hckv file other than it was written")


# ---- loopback --------------------------------------------------------------------------------------------------------


def fetch_rates(shape: Shape, rounds: int, progress: Progress) -> list[Rate]:
    """A run from another process to another position, beside plain sockets. Raises MoveError, OSError."""
    world = _World(shape, secrets.token_bytes(32))
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_run_source, args=(world, theirs), daemon=True)
    process.start()
    theirs.close()
    try:
        return asyncio.run(_fetch_rates(world, rounds, ours, progress))
    except EOFError:
        raise MoveError("the process that serves KV has ended") from None
    finally:
        ours.close()
        process.join(_STALL_SECONDS)


async def _fetch_rates(world: _World, rounds: int, pipe: Connection, progress: Progress) -> list[Rate]:
    address, port = await asyncio.to_thread(pipe.recv)
    transport = TcpTransport(world.keyring, ClientSettings(stall_seconds=_STALL_SECONDS))
    placing, size = _Placing(world), 2 * world.shape.layers * world.shape.bytes_each
    best = dict.fromkeys(("plain", *_CODECS), float("inf"))
    room = memoryview(bytearray(size))
    with socket.create_connection(("127.0.0.1", port)) as connection:
        for done in range(rounds):
            progress("loopback", done, rounds)
            best["plain"] = min(best["plain"], await asyncio.to_thread(_plain_seconds, connection, room))
            for codec in _CODECS:
                best[codec] = min(
                    best[codec], await _fetch_seconds(transport, world, world.pull(codec, address), placing)
                )
    transport.close()
    _check_moved(placing.room[0], world)
    return [
        Rate(
            f"loopback fetch as {codec}, keys turned",
            size / best[codec] / 1e9,
            best["plain"] / best[codec],
            "loopback TCP",
        )
        for codec in _CODECS
    ]


async def _fetch_seconds(transport: TcpTransport, world: _World, pull: Pull, placing: _Placing) -> float:
    start = time.perf_counter()
    deadline = asyncio.get_running_loop().time() + _DEADLINE_SECONDS
    outcome = await transport.fetch(pull, world.expectation(), placing, deadline)
    if not isinstance(outcome, Fetched):
        raise MoveError(f"a loopback fetch came to nothing: {outcome}")
    return time.perf_counter() - start


def _plain_seconds(connection: socket.socket, room: memoryview) -> float:
    start = time.perf_counter()
    connection.sendall(b"x")
    at = 0
    while at < len(room):
        count = connection.recv_into(room[at : at + _PIECE_BYTES])
        if not count:
            raise MoveError("the plain socket was closed")
        at += count
    return time.perf_counter() - start


def _check_moved(got: LayerKv, world: _World) -> None:
    """The last fetch was quantized."""
    true = world.stored()[0]
    shift = world.table().shift(_SOURCE_POSITION, _TARGET_POSITION, world.shape.tokens, world.shape.kv_heads)
    error = (got.keys.float() - shift.turn(true.keys).float()).norm() / true.keys.float().norm()
    if float(error) > 0.02:
        raise MoveError(f"keys arrived {float(error):.1%} off")


class _MemorySource:
    """Holds one run in every codec that is asked for."""

    holder = _SOURCE

    def __init__(self, world: _World) -> None:
        self._world = world
        table = world.table()
        self._payloads = {
            codec: [
                CODECS[codec].encode(kv, Origin(layer, _SOURCE_POSITION), table).payload
                for layer, kv in enumerate(world.stored())
            ]
            for codec in _CODECS
        }

    async def serve(self, request: Request) -> AsyncGenerator[Draft, None]:
        codec, wanted = request.capability.codec, request.wanted
        for layer in range(wanted.layers.first, wanted.layers.end, wanted.stride):
            payload = self._payloads[codec][layer]
            header = self._world.header(codec, layer, payload.nbytes)
            if wanted.with_tokens and layer == wanted.layers.first:
                yield Draft(header._replace(with_tokens=True), [payload, bytes(4 * header.tokens)])
            else:
                yield Draft(header, [payload])


def _run_source(world: _World, pipe: Connection) -> None:
    """The other process: frames at one port, plain bytes at another, until the pipe is closed."""
    asyncio.run(_serve_source(world, pipe))


async def _serve_source(world: _World, pipe: Connection) -> None:
    server = TcpServer(_MemorySource(world), world.keyring)
    await server.start()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        pipe.send((server.address, listener.getsockname()[1]))
        plain = asyncio.create_task(asyncio.to_thread(_serve_plain, listener, world.shape))
        await plain
    await server.close()


def _serve_plain(listener: socket.socket, shape: Shape) -> None:
    """Sends a run's bytes for each byte that it gets, and ends with the connection."""
    layer = memoryview(bytearray(2 * shape.bytes_each))
    connection, _ = listener.accept()
    with connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        while connection.recv(1):
            for _ in range(shape.layers):
                connection.sendall(layer)
