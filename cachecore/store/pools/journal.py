"""What a process tells others of its pools: all that lies there, and what it has changed since.

Everyone who opens a pool announces what he himself stores and removes, so whoever wants to know a pool follows all of
them. A follower asks each teller for the number of his next change, then lists what is there, then reads the changes
from that number on. Numbers begin with the microsecond in which the teller started: one of an earlier life is older
than all that the journal has, and is told to begin again.

A listing travels as items, each preceded by its length (u32 LE), in msgpack: a `RunDocument` for each run, and at last
a truth value, which says whether it is whole. Changes travel as one JSON document, names in base64.
"""

import asyncio
import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Annotated, TypeVar

import msgspec

from cachecore.blocks import HASH_BYTES, Chain, PrefixHash
from cachecore.holders import Pool
from cachecore.index.contract import Cleared, Stored
from cachecore.scope import Fidelity, KeyId, TenantId
from cachecore.store.pools.contract import Announcement, Extent, PoolRun, RunKey

T = TypeVar("T")

CHANGES_MAX = 10_000
"""That a journal keeps."""
TOLD_TOGETHER = 500
"""Changes in one answer: some hundred kilobytes."""
ITEM_BYTES_MAX = 1 << 20
ITEM_LENGTH_BYTES = 4

_Name = Annotated[bytes, msgspec.Meta(min_length=HASH_BYTES, max_length=HASH_BYTES)]


class RunDocument(msgspec.Struct, frozen=True, array_like=True):
    """A run of a pool, as it travels."""

    pool: str
    generation: int
    compatibility: _Name
    scope: _Name
    tenant: str
    key_epoch: int
    parent: _Name
    chain: bytes
    first_block: int
    layers: Extent
    heads: Extent
    codec: str
    fidelity: int

    @classmethod
    def of(cls, holder: Pool, run: PoolRun) -> "RunDocument":
        key = run.key
        return cls(
            holder.name,
            holder.generation,
            key.compatibility,
            key.scope,
            key.tenant,
            key.key_id.epoch,
            run.parent,
            run.chain,
            run.first_block,
            key.layers,
            key.heads,
            key.codec,
            int(key.fidelity),
        )

    @property
    def holder(self) -> Pool:
        return Pool(self.pool, self.generation)

    def run(self) -> PoolRun:
        """Raises ValueError for what no run can be."""
        blocks, odd = divmod(len(self.chain), HASH_BYTES)
        if odd:
            raise ValueError(f"a chain of {len(self.chain)} bytes")
        key = RunKey(
            self.compatibility,
            self.scope,
            KeyId(TenantId(self.tenant), self.key_epoch),
            PrefixHash(self.chain[-HASH_BYTES:]),
            blocks,
            self.layers,
            self.heads,
            self.codec,
            Fidelity(self.fidelity),
        )
        return PoolRun(key, PrefixHash(self.parent), Chain(self.chain), self.first_block)


class RunStored(msgspec.Struct, frozen=True, tag="stored"):
    run: RunDocument


class RunRemoved(msgspec.Struct, frozen=True, tag="removed"):
    pool: str
    generation: int
    tail: _Name
    fidelity: int
    """Of what was removed. Every run with this tail and fidelity is to be taken for gone: one that is told of by its
    name alone, since its description could not be read any more, is one of several."""
    run: RunDocument | None = None


class PoolCleared(msgspec.Struct, frozen=True, tag="cleared"):
    """The generation is over."""

    pool: str
    generation: int


Change = RunStored | RunRemoved | PoolCleared


class Changes(msgspec.Struct, frozen=True):
    """What happened since a number."""

    next: int
    """Ask from here on the next time."""
    reset: bool
    """What was asked for is older than the journal: list everything anew."""
    changes: list[Change]


class Journal:
    """What one process has announced of all its pools, the last `changes_max`. An `Announce`, for any thread."""

    def __init__(self, changes_max: int = CHANGES_MAX, first: int | None = None) -> None:
        self._changes: deque[Change] = deque(maxlen=changes_max)
        self._next = time.time_ns() // 1000 if first is None else first
        self._lock = threading.Lock()
        self._waiting: set[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = set()
        self._closed = False

    def close(self) -> None:
        """Nobody is kept waiting any longer."""
        self._closed = True
        self._wake()

    def __call__(self, announcement: Announcement) -> None:
        changes = list(_changes_of(announcement))
        with self._lock:
            self._changes.extend(changes)
            self._next += len(changes)
        self._wake()

    @property
    def next(self) -> int:
        return self._next

    def since(self, number: int) -> Changes:
        """Some of the changes from `number` on, oldest first; those that follow are told the next time."""
        with self._lock:
            first = self._next - len(self._changes)
            if not first <= number <= self._next:
                return Changes(self._next, True, [])
            skipped = number - first
            changes = list(islice(self._changes, skipped, skipped + TOLD_TOGETHER))
        return Changes(number + len(changes), False, changes)

    async def wait(self, number: int, seconds: float) -> Changes:
        """The same, as soon as there is something to tell, or after `seconds`."""
        told = asyncio.Event()
        waiter = (asyncio.get_running_loop(), told)
        self._waiting.add(waiter)
        try:
            changes = self.since(number)
            if not (changes.reset or changes.changes or self._closed):
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(told.wait(), seconds)
                changes = self.since(number)
            return changes
        finally:
            self._waiting.discard(waiter)

    def _wake(self) -> None:
        for loop, told in list(self._waiting):
            with contextlib.suppress(RuntimeError):  # a loop that has been closed
                loop.call_soon_threadsafe(told.set)


def _changes_of(announcement: Announcement) -> Iterator[Change]:
    holder, event, run = announcement
    if isinstance(event, Cleared):
        yield PoolCleared(*holder)
        return
    document = None if run is None else RunDocument.of(holder, run)
    if isinstance(event, Stored):
        if document is not None:
            yield RunStored(document)
        return
    yield RunRemoved(*holder, event.chain[-HASH_BYTES:], int(event.fidelity), document)


# ---- the wire --------------------------------------------------------------------------------------------------------

_decode_item = msgspec.msgpack.Decoder(RunDocument | bool).decode
_decode_changes = msgspec.json.Decoder(Changes).decode


def encode_item(item: RunDocument | bool) -> bytes:
    """Of a listing; its end says False when the pool went away before everything was told."""
    body = msgspec.msgpack.encode(item)
    return len(body).to_bytes(ITEM_LENGTH_BYTES, "little") + body


class ListingReader:
    """Bytes of a listing in, items out."""

    def __init__(self) -> None:
        self._held = bytearray()
        self.whole = False
        """Its end came, and said that nothing is missing."""

    def feed(self, data: bytes) -> list[RunDocument]:
        """Raises ValueError for what is no listing."""
        self._held += data
        documents = []
        while (body := self._take()) is not None:
            item = _read(_decode_item, body)
            if isinstance(item, bool):
                self.whole = item
            else:
                documents.append(item)
        return documents

    def _take(self) -> bytes | None:
        if len(self._held) < ITEM_LENGTH_BYTES:
            return None
        length = int.from_bytes(self._held[:ITEM_LENGTH_BYTES], "little")
        if length > ITEM_BYTES_MAX:
            raise ValueError(f"an item of {length} bytes")
        end = ITEM_LENGTH_BYTES + length
        if len(self._held) < end:
            return None
        body = bytes(self._held[ITEM_LENGTH_BYTES:end])
        del self._held[:end]
        return body


def encode_changes(changes: Changes) -> bytes:
    return msgspec.json.encode(changes)


def read_changes(body: bytes) -> Changes:
    """Raises ValueError."""
    return _read(_decode_changes, body)


def _read(decode: Callable[[bytes], T], body: bytes) -> T:
    try:
        return decode(body)
    except msgspec.MsgspecError as error:
        raise ValueError(str(error)) from None
