"""A pool in a Redis or Valkey, or in a cluster of them: another one than the index's, since KV fills it.

    {P}:runs            HASH  run -> "state size tenant since token"; state: w being written, s stored, d doomed
    {P}:worths          ZSET  stored runs by what they are worth; and one for each tenant, {P}:worths:<tenant>
    {P}:bytes           HASH  generation, total, doomed, tenant:<tenant>, doomed:<tenant>
    {P}:tails           HASH  run -> the end of its file, which describes it
    {P}:pending         ZSET  runs being written and doomed ones, by when that began
    P:<generation>:<run>   HASH  token, tail, and the file's frames in chunks: 0, 1, 2, ...

P is `<prefix>:<name of the pool>`. The first five lie in one slot, each run in a slot of its own: a cluster shares the
bytes, one node counts them. A run's way in: `admit` counts it, the chunks are written, `finish` makes it readable,
`settle` evictable. Its way out: `admit` dooms it for another's sake, `drop` deletes the bytes, `bury` ends its being
counted and tells who may announce it. So the count is never below what is there. Every step names the writing by its
token, so that a late step cannot hit the run's next writing; who dies on the way leaves something that expires, or that
`collect` finds.

The server should run with `noeviction`, or with a volatile policy: every run expires when nobody reads it, the count
does not. A run that the server evicts by itself is noticed, and announced, when somebody looks for it.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from enum import Enum, auto
from pathlib import Path
from typing import Any, NamedTuple

from cachecore.scope import TenantId
from cachecore.store.connection import RedisStore
from cachecore.store.errors import Refused as ServerRefused
from cachecore.store.errors import StoreError
from cachecore.store.pools import hckv
from cachecore.store.pools.contract import (
    CREDITS_MAX,
    Accepted,
    Announce,
    Buffer,
    Declined,
    DeclineReason,
    PoolBounds,
    PoolRun,
    PoolStats,
    RemovalReason,
    RunKey,
)
from cachecore.store.pools.front import COLLECT_SECONDS, Gone, Opened, PooledRuns
from cachecore.store.script import Call, Script

CHUNK_BYTES = 1 << 20
DEAD_SECONDS = 120
"""After which a writer, or a remover, is taken for dead."""
ADMISSIONS_MAX = 50
WAIT_SECONDS = 0.02
"""For removals of others."""
SCAN_COUNT = 500
TOGETHER = 64
DUE_MAX = 1000

_LUA = Path(__file__).with_name("lua")
_ADMIT, _SETTLE, _BURY, _RENEW, _RESET, _DUE, _WRITE, _FINISH, _DROP = (
    Script.load(_LUA / f"{name}.lua")
    for name in ("admit", "settle", "bury", "renew", "reset", "due", "write", "finish", "drop")
)


class _Verdict(Enum):
    ADMITTED = auto()
    """The run is counted, and to be written now."""
    OVER = auto()
    """The generation is."""


class _Writing(NamedTuple):
    """One writing of one run."""

    generation: int
    name: str
    token: str


class _Entry(NamedTuple):
    """What `{P}:runs` says of a run."""

    state: str
    size: int
    tenant: TenantId
    since: int
    token: str

    @classmethod
    def decode(cls, text: bytes) -> "_Entry":
        state, size, tenant, since, token = text.decode().split(" ")
        return cls(state, int(size), TenantId(tenant), int(since), token)


class RedisPool(PooledRuns):
    """`store` is started and closed by whoever made it. Every step has `budget_seconds`."""

    def __init__(
        self,
        name: str,
        store: RedisStore,
        bounds: PoolBounds,
        announce: Announce = lambda announcement: None,
        *,
        prefix: str = "ropeway:pool",
        budget_seconds: float = 5.0,
        clock: Callable[[], float] = time.time,
    ) -> None:
        super().__init__(name, bounds, announce, clock)
        self._server = store
        self._budget_seconds = budget_seconds
        self._prefix = f"{prefix}:{name}"
        parts = ("runs", "worths", "bytes", "tails", "pending")
        self._keys = [f"{{{self._prefix}}}:{part}".encode() for part in parts]
        self._runs_key, _, self._bytes_key, self._tails_key, _ = self._keys
        self._occupied: dict[bytes, bytes] = {}
        """Fields of `bytes`, when last read."""
        self._run_count = 0

    @property
    def _generation(self) -> int:
        if self._holder is None:
            raise StoreError(self._reason)
        return self._holder.generation

    def _value(self, name: str, generation: int | None = None) -> bytes:
        return f"{self._prefix}:{self._generation if generation is None else generation}:{name}".encode()

    # What the front asks for

    async def _find_generation(self) -> int:
        current = await self._command("HGET", self._bytes_key, "generation")
        if current is None:
            current = await self._run(_RESET, self._keys, "", time.time_ns() // 1000)
        return int(current)

    async def _store(self, run: PoolRun, encoded: hckv.Encoded) -> Accepted | Declined:
        for _ in range(2):
            if self._holder is None:
                await self._meet()
            writing = _Writing(self._generation, run.key.name, encoded.index.identity.hex())
            outcome = await self._put(run.key, writing, encoded)
            if outcome is not None:
                return outcome
            await self._meet()
        return Declined(DeclineReason.BUSY, "the pool is being wiped")

    async def _put(self, key: RunKey, writing: _Writing, encoded: hckv.Encoded) -> Accepted | Declined | None:
        """None when the generation is over."""
        try:
            outcome = await self._admit(key, writing, encoded.size)
            if outcome is _Verdict.OVER:
                return None
            if outcome is not _Verdict.ADMITTED:
                return outcome
            if await self._write(writing, encoded):
                return Accepted(new=True)
        except ServerRefused as error:
            await self._undo(writing)
            if error.code != "OOM":
                raise
            return Declined(DeclineReason.FULL, str(error))
        except BaseException:
            self._spawn(self._undo, writing)
            raise
        await self._undo(writing)
        return Declined(DeclineReason.FULL, "the server removed it while it was being written")

    async def _open(self, key: RunKey) -> Opened | None:
        value = self._value(key.name)
        token, tail = await self._command("HMGET", value, "token", "tail")
        if tail is None:
            self._spawn(self._notice_loss, key.name)
            return None
        index = hckv.read_tail(tail)
        if token != index.identity.hex().encode():
            raise hckv.Broken("its parts are of different writings")
        return OpenedValue(self, value, token, index)

    async def _renew(self, key: RunKey) -> None:
        await self._run(_RENEW, self._keys, key.name, str(self.bounds.reuse_credit_seconds), CREDITS_MAX)
        await self._command("PEXPIRE", self._value(key.name), self._lasting_ms)

    async def _present(self, key: RunKey) -> bool:
        return bool(await self._command("HEXISTS", self._value(key.name), "tail"))

    async def _remove(self, key: RunKey, reason: RemovalReason) -> bool:
        generation, entry = self._generation, await self._entry(key.name)
        if entry is None or entry.state == "w":
            return False
        return await self._end([(_Writing(generation, key.name, entry.token), reason)]) > 0

    async def _collect(self) -> None:
        generation = self._generation
        due = await self._run(_DUE, self._keys, str(self.bounds.idle_seconds_max), DEAD_SECONDS, DUE_MAX)
        await self._end(_victims(generation, due))
        self._run_count = await self._command("HLEN", self._tails_key)
        fields = await self._command("HGETALL", self._bytes_key)
        self._occupied = dict(zip(fields[::2], fields[1::2], strict=True))

    async def _wipe(self) -> int:
        ending = await self._find_generation()
        names = [name async for name, _ in self._scan(self._runs_key)]
        values = [self._value(name.decode(), ending) for name in names]
        beginning = max(time.time_ns() // 1000, ending + 1)
        current = int(await self._run(_RESET, self._keys, ending, beginning))
        for value in values:
            await self._command("UNLINK", value)
        return current

    async def _list(self) -> AsyncIterator[PoolRun]:
        async for name, tail in self._scan(self._tails_key):
            run = _described(name.decode(), tail)
            if run is not None:
                yield run

    def _occupancy(self, stats: PoolStats) -> None:
        stats.runs = self._run_count
        stats.bytes = int(self._occupied.get(b"total", b"0"))
        stats.tenant_bytes = {
            TenantId(name.decode().removeprefix("tenant:")): int(held)
            for name, held in self._occupied.items()
            if name.startswith(b"tenant:")
        }

    # The way in

    async def _admit(self, key: RunKey, writing: _Writing, size: int) -> Accepted | Declined | _Verdict:
        """Makes room where there is none."""
        quota = self.bounds.quota(key.tenant)
        numbers = (size, key.tenant, self.bounds.bytes_max, quota, writing.token, DEAD_SECONDS)
        for _ in range(ADMISSIONS_MAX):
            verdict, *details = await self._run(_ADMIT, self._keys, writing.generation, writing.name, *numbers)
            match verdict:
                case b"admitted":
                    return _Verdict.ADMITTED
                case b"present":
                    return Accepted(new=False)
                case b"busy":
                    return Declined(DeclineReason.BUSY, "another writer is at this run")
                case b"over":
                    return _Verdict.OVER
                case b"victims":
                    await self._end(_victims(writing.generation, details))
                case _:
                    await asyncio.sleep(WAIT_SECONDS)
        return Declined(DeclineReason.FULL, "no room was made in time")

    async def _write(self, writing: _Writing, encoded: hckv.Encoded) -> bool:
        """False when the server did not keep what was written."""
        value, token = self._value(writing.name, writing.generation), writing.token
        chunks = 0
        for chunk in _chunks(encoded.buffers[:-1]):
            if not await self._run(_WRITE, [value], token, chunks, chunk, DEAD_SECONDS * 1000):
                return False
            chunks += 1
        if not await self._run(_FINISH, [value], token, chunks, encoded.tail, self._lasting_ms):
            return False
        return bool(await self._run(_SETTLE, self._keys, writing.generation, writing.name, token, encoded.tail))

    async def _undo(self, writing: _Writing) -> None:
        """As if it had never been begun: nothing was announced yet."""
        await self._run(_DROP, [self._value(writing.name, writing.generation)], writing.token)
        await self._run(_BURY, self._keys, *writing)

    # The way out

    async def _end(self, victims: Sequence[tuple[_Writing, RemovalReason]]) -> int:
        """Delete, then bury, then announce runs of one generation; how many this call has buried."""
        ended = 0
        for start in range(0, len(victims), TOGETHER):
            some = victims[start : start + TOGETHER]
            drops = [
                Call(_DROP, [self._value(writing.name, writing.generation)], [writing.token]) for writing, _ in some
            ]
            for answer in await self._server.run_many(drops, self._budget_seconds):
                if isinstance(answer, StoreError):
                    raise answer
            names = [part for writing, _ in some for part in (writing.name, writing.token)]
            tails = await self._run(_BURY, self._keys, some[0][0].generation, *names)
            for (writing, reason), tail in zip(some, tails, strict=True):
                if tail is not None:
                    ended += 1
                if tail:  # what was never settled was never announced
                    self._announce_removal(writing.name, _described(writing.name, tail), reason)
        return ended

    async def _notice_loss(self, name: str) -> None:
        """The server has evicted a run by itself, if it still counts and its bytes are not there."""
        generation, entry = self._generation, await self._entry(name)
        if entry is not None and entry.state == "s" and not await self._command("EXISTS", self._value(name)):
            await self._end([(_Writing(generation, name, entry.token), RemovalReason.BOUND)])

    # The server

    @property
    def _lasting_ms(self) -> int:
        """Longer than any run is left alone: for what nobody is there to collect."""
        credits = CREDITS_MAX * self.bounds.reuse_credit_seconds
        return round((self.bounds.idle_seconds_max + credits + COLLECT_SECONDS) * 1000)

    async def _entry(self, name: str) -> _Entry | None:
        text = await self._command("HGET", self._runs_key, name)
        return None if text is None else _Entry.decode(text)

    async def _scan(self, key: bytes) -> AsyncIterator[tuple[bytes, bytes]]:
        """Fields and values; those that come or go meanwhile may be missing or appear twice."""
        cursor: bytes | int = 0
        while True:
            cursor, fields = await self._command("HSCAN", key, cursor, "COUNT", SCAN_COUNT)
            for field, value in zip(fields[::2], fields[1::2], strict=True):
                yield field, value
            if int(cursor) == 0:
                return

    async def _run(self, script: Script, keys: Sequence[bytes], *arguments: bytes | int | str) -> Any:
        return await self._server.run(Call(script, keys, arguments), self._budget_seconds)

    async def _command(self, *parts: bytes | int | str) -> Any:
        return await self._server.command(*parts, budget_seconds=self._budget_seconds)

    async def read_chunks(self, value: bytes, token: bytes, offset: int, size: int) -> Buffer:
        """Bytes of a run's file. Raises Gone when they are of another writing."""
        first, last = offset // CHUNK_BYTES, (offset + size - 1) // CHUNK_BYTES
        found, *chunks = await self._command("HMGET", value, "token", *range(first, last + 1))
        if found != token:
            raise Gone(f"{self.name}: the run was removed")
        data = b"".join(chunk or b"" for chunk in chunks)
        return memoryview(data)[offset - first * CHUNK_BYTES :][:size]


class OpenedValue:
    """Of one writing, by its token."""

    def __init__(self, pool: RedisPool, value: bytes, token: bytes, index: hckv.RunIndex) -> None:
        self._pool = pool
        self._value = value
        self._token = token
        self.index = index

    async def read(self, offset: int, size: int) -> Buffer:
        return await self._pool.read_chunks(self._value, self._token, offset, size)

    async def close(self) -> None:
        pass


def _described(name: str, tail: bytes) -> PoolRun | None:
    try:
        run = hckv.read_tail(tail).run
    except hckv.Broken:
        return None
    return run if run.key.name == name else None


def _victims(generation: int, flat: Sequence[bytes]) -> list[tuple[_Writing, RemovalReason]]:
    triples = zip(flat[::3], flat[1::3], flat[2::3], strict=True)
    return [
        (_Writing(generation, name.decode(), token.decode()), RemovalReason(reason.decode()))
        for name, token, reason in triples
    ]


def _chunks(buffers: Sequence[Buffer]) -> Iterator[bytes]:
    """The bytes of all of them, CHUNK_BYTES at a time."""
    chunk = bytearray()
    for buffer in buffers:
        view = memoryview(buffer)
        while view:
            taken = view[: CHUNK_BYTES - len(chunk)]
            chunk += taken
            view = view[len(taken) :]
            if len(chunk) == CHUNK_BYTES:
                yield bytes(chunk)
                chunk.clear()
    if chunk:
        yield bytes(chunk)
