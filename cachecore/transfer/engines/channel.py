"""Channels whose long sends travel by an engine: the source puts them into registered memory, the puller reads them.

On the connection beside the engine everything is in records, kind (u8) | length (u32 LE) | body:

    INLINE   bytes of the stream, as they are: short ones, and long ones for which no slot is free
    ENGINE   key epoch (u32) | MAC (32) | the source's description of its engine and memory; before the first LOCATED
    LOCATED  address (u64) | size (u32): the next bytes of the stream lie there
    TAKEN    the puller has read the oldest slot that it was told of

Only a source is read from: a puller cannot make it read. An engine's parser sees a description only once its MAC, under
a key of the deployment, has matched. Nothing depends on LOCATED being true: what lies there passes as a frame or not.
What is read is copied out before it is looked at, so nobody who can write there changes it afterwards; and a read that
was given up and still writes does so where nobody looks.
"""

import asyncio
import hmac
import struct
from collections import deque
from collections.abc import Sequence
from enum import IntEnum

from cachecore.scope import PUBLIC, KeyId, Keyring
from cachecore.transfer.engines.contract import Engine, Peer, Reading, Region
from cachecore.transfer.engines.memory import Landings, Slots, fill
from cachecore.transfer.errors import Reason, WireError
from cachecore.transfer.frames import Buffer
from cachecore.transfer.tcp.channel import Channel, receive_exactly

_DESCRIPTION_BYTES_MAX = 64 << 10
_SPIN_SECONDS = 0.0005
_NAP_SECONDS = 0.001

_HEAD = struct.Struct("<BI")
_LOCATED = struct.Struct("<QI")
_INTRODUCTION = struct.Struct("<I32s")


class Record(IntEnum):
    INLINE = 1
    ENGINE = 2
    LOCATED = 3
    TAKEN = 4


def record(kind: Record, body: bytes = b"") -> bytes:
    return _HEAD.pack(kind, len(body)) + body


def introduce(description: bytes, keyring: Keyring) -> bytes:
    """The body of an ENGINE record."""
    epoch = keyring.current_epoch
    return _INTRODUCTION.pack(epoch, _mac(keyring, epoch, description)) + description


def read_introduction(body: bytes, keyring: Keyring) -> bytes:
    """The description in it. Raises WireError for one that is not of this deployment's making."""
    epoch, mac = _INTRODUCTION.unpack_from(body)
    description = body[_INTRODUCTION.size :]
    try:
        expected = _mac(keyring, epoch, description)
    except KeyError:
        raise WireError(f"no key of epoch {epoch}", Reason.FORGED) from None
    if not hmac.compare_digest(expected, mac):
        raise WireError("a description of an engine does not authenticate", Reason.FORGED)
    return description


def _mac(keyring: Keyring, epoch: int, description: bytes) -> bytes:
    return hmac.digest(keyring.capability_key(KeyId(PUBLIC, epoch)), b"engine.v1" + description, "sha256")


class _RecordChannel:
    """What both ends share: bytes of the stream come in INLINE records."""

    def __init__(self, inner: Channel, batch_bytes: int) -> None:
        self.batch_bytes = batch_bytes
        self._inner = inner
        self._inline_left = 0

    async def receive_into(self, room: memoryview) -> int:
        while not self._inline_left:
            await self._next_record()
        count = await self._inner.receive_into(room[: self._inline_left])
        self._inline_left -= count
        return count

    async def send(self, parts: Sequence[Buffer]) -> None:
        await self._inner.send([_HEAD.pack(Record.INLINE, sum(map(len, parts))), *parts])

    def is_quiet(self) -> bool:
        return not self._inline_left and self._inner.is_quiet()

    def has_ended(self) -> bool:
        return self._inner.has_ended()

    def close(self) -> None:
        self._inner.close()

    async def _next_record(self) -> None:
        kind, length = _HEAD.unpack(await receive_exactly(self._inner, _HEAD.size))
        if kind == Record.INLINE and length:
            self._inline_left = length
        else:
            await self._take(kind, length)

    async def _take(self, kind: int, length: int) -> None:
        """Another kind of record. Raises WireError for one that has no business here."""
        raise WireError(f"a record of kind {kind}, {length} bytes, out of place", Reason.MALFORMED)


class ServingChannel(_RecordChannel):
    """A source's end."""

    def __init__(self, inner: Channel, slots: Slots, window: int, inline_bytes_max: int, introduction: bytes) -> None:
        super().__init__(inner, slots.slot_bytes)
        self._slots = slots
        self._window = window
        self._inline_bytes_max = inline_bytes_max
        self._introduction = record(Record.ENGINE, introduction)
        self._held: deque[Region] = deque()

    async def send(self, parts: Sequence[Buffer]) -> None:
        size = sum(map(len, parts))
        slot = await self._slot() if self._inline_bytes_max < size <= self._slots.slot_bytes else None
        if slot is None:
            await super().send(parts)
            return
        self._held.append(slot)
        fill(slot, parts)
        located = record(Record.LOCATED, _LOCATED.pack(slot.address, size))
        introduction, self._introduction = self._introduction, b""
        await self._inner.send([introduction + located])
        await asyncio.sleep(0)  # the connection has seen too little of it to give way to others by itself

    def close(self) -> None:
        super().close()
        while self._held:
            self._slots.give_back(self._held.popleft())

    async def _slot(self) -> Region | None:
        """A free one, once the puller has taken all but `window`; None when others use them all."""
        while len(self._held) >= self._window:
            await self._next_record()
            if self._inline_left:
                raise WireError("a puller spoke out of turn", Reason.MALFORMED)
        return self._slots.take()

    async def _take(self, kind: int, length: int) -> None:
        if kind != Record.TAKEN or length or not self._held:
            await super()._take(kind, length)
        self._slots.give_back(self._held.popleft())


class PullingChannel(_RecordChannel):
    """A puller's end."""

    def __init__(self, inner: Channel, engine: Engine, landings: Landings, slot_bytes: int, keyring: Keyring) -> None:
        super().__init__(inner, slot_bytes)
        self._engine = engine
        self._landings = landings
        self._keyring = keyring
        self._peer: Peer | None = None
        self._landing: Region | None = None
        self._landed = memoryview(b"")

    async def receive_into(self, room: memoryview) -> int:
        while not self._inline_left and not self._landed:
            await self._next_record()
        if self._inline_left:
            return await super().receive_into(room)
        count = min(len(room), len(self._landed))
        room[:count] = self._landed[:count]
        self._landed = self._landed[count:]
        if not self._landed:
            self._leave_landing()
        return count

    def is_quiet(self) -> bool:
        return not self._landed and super().is_quiet()

    def close(self) -> None:
        super().close()
        self._leave_landing()

    def _leave_landing(self) -> None:
        self._landed = memoryview(b"")
        if self._landing is not None:
            self._landings.give_back(self._landing)
            self._landing = None

    async def _take(self, kind: int, length: int) -> None:
        if kind == Record.ENGINE and _INTRODUCTION.size < length <= _DESCRIPTION_BYTES_MAX:
            description = read_introduction(await receive_exactly(self._inner, length), self._keyring)
            self._peer = await asyncio.to_thread(self._engine.meet, description)
        elif kind == Record.LOCATED and length == _LOCATED.size and self._peer is not None:
            address, size = _LOCATED.unpack(await receive_exactly(self._inner, length))
            await self._land(self._peer, address, size)
            await self._inner.send([record(Record.TAKEN)])
            await asyncio.sleep(0)
        else:
            await super()._take(kind, length)

    async def _land(self, peer: Peer, address: int, size: int) -> None:
        if not 0 < size <= self.batch_bytes:
            raise WireError(f"{size} bytes where at most {self.batch_bytes} are read at a time", Reason.MALFORMED)
        region = self._landings.take()
        reading: Reading | None = None
        try:
            reading = self._engine.read(peer, address, region, size)
            await _until_over(reading)
        except BaseException:
            self._landings.give_back(region, reading)
            raise
        self._landing, self._landed = region, region.memory[:size]


async def _until_over(reading: Reading) -> None:
    """Engines tell nobody that they are done. Most reads take less than a loop's timers resolve."""
    loop = asyncio.get_running_loop()
    spin_until = loop.time() + _SPIN_SECONDS
    while not reading.is_over():  # noqa: ASYNC110  there is nothing to wait for
        await asyncio.sleep(0 if loop.time() < spin_until else _NAP_SECONDS)
