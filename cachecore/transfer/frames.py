"""Frames: KV as it travels and as it lies on disk. No I/O here.

    head      the header (`cachecore.transfer.header`) | nonce (16) | head tag (16)
    payload   each layer's part, in order, and the run's token ids where the header says so
    tag       16 bytes over the payload, under a key that the head decides (`cachecore.transfer.mac`)

Writing: `FrameWriter.seal` puts head and tag around payload parts that it does not copy. Who sends seals piece by piece
instead (`begin`, `pieces`), so that a piece is in the core's cache when the kernel copies it.

Reading: the reader says where the next bytes go, they are received there, and a frame comes out once both tags match;
nothing of a frame is shown before. A head is checked before memory is set aside for its payload, so only who has the
tenant's key can make a reader allocate, and never more than the limits allow. A reader that has raised is at no frame's
boundary any more and takes nothing further.
"""

import secrets
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from cachecore.scope import KeyId
from cachecore.transfer.errors import ForgedFrame, FrameError
from cachecore.transfer.header import HEADER_BYTES_MAX, PREFIX, FrameHeader, header_bytes
from cachecore.transfer.mac import NONCE_BYTES, TAG_BYTES, FrameSecrets, PayloadMac, equal
from cachecore.transfer.memory import Allocate, fresh

Buffer = bytes | bytearray | memoryview
KeyOf = Callable[[KeyId], bytes]
"""`Keyring.frame_key`: raises KeyError for a key that is not there."""
Check = Callable[[FrameHeader], None]
"""Sees every authentic header before memory is set aside for its payload; raises FrameError for what is not wanted."""

HEAD_BYTES_MAX = HEADER_BYTES_MAX + NONCE_BYTES + TAG_BYTES
PIECE_BYTES = 512 << 10
"""What is authenticated and copied at a time: it stays in a core's cache, and an event loop waits some 0.1 ms."""
_MAC_STEP_BYTES = 256
"""Pieces that do not begin and end at multiples of this take a slower way through the MAC."""
_SCRATCH_BYTES = 2 * HEAD_BYTES_MAX


class Frame(NamedTuple):
    """An authentic frame, whole."""

    header: FrameHeader
    head: bytes
    payload: memoryview
    tag: bytes

    @property
    def sealed(self) -> list[Buffer]:
        """What was received, to be passed on as it is."""
        return [self.head, self.payload, self.tag]

    def layer_payloads(self) -> Iterator[tuple[int, memoryview]]:
        """Each layer's number and part of the payload."""
        start = 0
        for layer, size in enumerate(self.header.layer_bytes, self.header.layers.first):
            yield layer, self.payload[start : start + size]
            start += size

    @property
    def token_ids(self) -> memoryview:
        """u32 LE each; empty where the frame has none."""
        return self.payload[len(self.payload) - self.header.token_bytes :]


@dataclass(frozen=True, slots=True)
class FrameLimits:
    payload_bytes_max: int = 256 << 20


def cut(parts: Iterable[Buffer]) -> Iterator[memoryview]:
    """Pieces of at most PIECE_BYTES, without a copy."""
    for part in parts:
        view = memoryview(part).cast("B")
        for start in range(0, len(view), PIECE_BYTES):
            yield view[start : start + PIECE_BYTES]


class Sealing:
    """A frame being written: `head` goes out first, then every piece that `update` took, then `finish`."""

    def __init__(self, header: FrameHeader, frame_key: bytes, nonce: bytes) -> None:
        unsigned = header.encode() + nonce
        own = FrameSecrets.derive(frame_key, unsigned)
        self.head = unsigned + own.head_tag
        self.frame_bytes = len(self.head) + header.payload_bytes + TAG_BYTES
        self._mac = PayloadMac(own.payload_key)
        self._left = header.payload_bytes

    def update(self, piece: Buffer) -> None:
        self._mac.update(piece)
        self._left -= len(piece)

    def pieces(self, parts: Sequence[Buffer]) -> Iterator[Buffer]:
        """The payload's `parts`, cut into pieces, each authenticated when it is asked for; and the tag."""
        for piece in cut(parts):
            self.update(piece)
            yield piece
        yield self.finish()

    def finish(self) -> bytes:
        """The tag. Raises FrameError when the pieces were not as long as the header says."""
        if self._left:
            raise FrameError(f"a payload is {abs(self._left)} bytes {'short' if self._left > 0 else 'long'}")
        return self._mac.finalize()


class _LastKey:
    """Deriving a key costs as much as all else about a small frame, and neighbours have the same one."""

    def __init__(self, key_of: KeyOf) -> None:
        self._key_of = key_of
        self._key_id: KeyId | None = None
        self._key = b""

    def __call__(self, key_id: KeyId) -> bytes:
        if key_id != self._key_id:
            self._key = self._key_of(key_id)
            self._key_id = key_id
        return self._key


class FrameWriter:
    """Seals frames for whatever tenant their headers name."""

    def __init__(self, key_of: KeyOf, nonce: Callable[[int], bytes] = secrets.token_bytes) -> None:
        self._key_of = _LastKey(key_of)
        self._nonce = nonce

    def begin(self, header: FrameHeader) -> Sealing:
        """Raises KeyError when the keyring lacks the tenant's key."""
        return Sealing(header, self._key_of(header.key_id), self._nonce(NONCE_BYTES))

    def seal(self, header: FrameHeader, parts: Sequence[Buffer]) -> list[Buffer]:
        """The frame as buffers to write one after the other; those between head and tag are views of the parts.

        Parts are contiguous bytes, cut anywhere. Raises FrameError unless they are as long as the header says.
        """
        sealing = self.begin(header)
        return [sealing.head, *sealing.pieces(parts)]


class FrameReader:
    """Bytes in, authentic frames out. See the module's opening.

    Receive into `buffer()` and tell `advance` how much came; or hand bytes to `feed`, which copies.
    """

    def __init__(
        self,
        key_of: KeyOf,
        limits: FrameLimits | None = None,
        check: Check | None = None,
        allocate: Allocate = fresh,
    ) -> None:
        self._key_of = _LastKey(key_of)
        self._allocate = allocate
        self._limits = limits or FrameLimits()
        self._check = check
        self._scratch = memoryview(bytearray(_SCRATCH_BYTES))
        self._filled = 0
        self._payload: _Payload | None = None
        self._dead = False

    @property
    def idle(self) -> bool:
        """Between two frames: where a stream may end."""
        return self._payload is None and not self._filled and not self._dead

    def buffer(self) -> memoryview:
        """Where the next bytes go: writable, never empty, at most PIECE_BYTES."""
        if self._payload is not None:
            return self._payload.room()
        return self._scratch[self._filled :]

    def advance(self, count: int) -> list[Frame]:
        """`count` bytes are in `buffer()`. Frames that are complete with them. Raises FrameError."""
        if self._dead:
            raise FrameError("a stream of frames that has failed before")
        try:
            if self._payload is None:
                return self._read_scratch(count)
            self._payload.take(count)
            return self._finish() if self._payload.complete else []
        except BaseException:
            self._dead = True
            self._payload = None
            raise

    def feed(self, data: Buffer) -> list[Frame]:
        """The same for bytes that lie elsewhere."""
        frames: list[Frame] = []
        view = memoryview(data)
        while view:
            room = self.buffer()[: len(view)]
            room[:] = view[: len(room)]
            view = view[len(room) :]
            frames += self.advance(len(room))
        return frames

    def _finish(self) -> list[Frame]:
        payload, self._payload = self._payload, None
        return [payload.frame()] if payload is not None else []

    def _read_scratch(self, count: int) -> list[Frame]:
        self._filled += count
        frames: list[Frame] = []
        start, held = 0, self._scratch[: self._filled]
        while (end := _head_end(held[start:])) is not None:
            head = _Head.read(bytes(held[start : start + end]), self._key_of, self._limits)
            if self._check is not None:
                self._check(head.header)
            payload = _Payload(head, self._allocate)
            start += end
            start += payload.copy(held[start:])
            if not payload.complete:
                self._payload = payload
                break
            frames.append(payload.frame())
        rest = bytes(held[start:])
        self._scratch[: len(rest)] = rest
        self._filled = len(rest)
        return frames


def open_frame(data: Buffer, key_of: KeyOf, limits: FrameLimits | None = None) -> Frame:
    """The one frame that `data` holds, from first byte to last; its payload shares that memory. Raises FrameError."""
    view = memoryview(data).cast("B")
    end = _head_end(view)
    if end is None:
        raise FrameError(f"{len(view)} bytes hold no frame")
    head = _Head.read(bytes(view[:end]), key_of, limits or FrameLimits())
    payload, tag = view[end:-TAG_BYTES], view[-TAG_BYTES:]
    if len(view) - end != head.header.payload_bytes + TAG_BYTES:
        raise FrameError(f"a frame of {len(view)} bytes; its header says otherwise")
    mac = PayloadMac(head.own.payload_key)
    mac.update(payload)
    return head.frame(payload, mac, tag)


class _Head(NamedTuple):
    header: FrameHeader
    data: bytes
    own: FrameSecrets

    @classmethod
    def read(cls, data: bytes, key_of: KeyOf, limits: FrameLimits) -> "_Head":
        """From exactly one head. Authentic, and within the limits, or FrameError."""
        unsigned, tag = data[:-TAG_BYTES], data[-TAG_BYTES:]
        header = FrameHeader.decode(memoryview(unsigned)[:-NONCE_BYTES])
        try:
            own = FrameSecrets.derive(key_of(header.key_id), unsigned)
        except KeyError:
            raise ForgedFrame(f"no key for {header.key_id}") from None
        if not equal(own.head_tag, tag):
            raise ForgedFrame("a frame's header does not authenticate")
        if header.payload_bytes > limits.payload_bytes_max:
            raise FrameError(f"a payload of {header.payload_bytes} bytes; the limit is {limits.payload_bytes_max}")
        return cls(header, data, own)

    def frame(self, payload: memoryview, mac: PayloadMac, tag: memoryview) -> Frame:
        if not equal(mac.finalize(), tag):
            raise ForgedFrame("a frame's payload does not authenticate")
        return Frame(self.header, self.data, payload, bytes(tag))


class _Payload:
    """A frame whose head is in: memory for payload and tag, authenticated as it fills."""

    def __init__(self, head: _Head, allocate: Allocate) -> None:
        self._head = head
        self._mac = PayloadMac(head.own.payload_key)
        self._bytes = head.header.payload_bytes
        self._memory = allocate(self._bytes + TAG_BYTES)
        self._filled = 0
        self._authenticated = 0

    @property
    def complete(self) -> bool:
        return self._filled == len(self._memory)

    def room(self) -> memoryview:
        """Up to the next multiple of PIECE_BYTES, so that pieces lie in memory as the MAC likes them best: whole."""
        return self._memory[self._filled : (self._filled // PIECE_BYTES + 1) * PIECE_BYTES]

    def take(self, count: int) -> None:
        self._filled += count
        end = min(self._filled // _MAC_STEP_BYTES * _MAC_STEP_BYTES, self._bytes)
        if end > self._authenticated:
            self._mac.update(self._memory[self._authenticated : end])
            self._authenticated = end

    def copy(self, data: memoryview) -> int:
        """Take as much of `data` as belongs to the frame; how much that is."""
        count = min(len(data), len(self._memory) - self._filled)
        self._memory[self._filled : self._filled + count] = data[:count]
        self.take(count)
        return count

    def frame(self) -> Frame:
        self._mac.update(self._memory[self._authenticated : self._bytes])
        return self._head.frame(self._memory[: self._bytes], self._mac, self._memory[self._bytes :])


def _head_end(data: memoryview) -> int | None:
    """Length of the head that begins there; None while too little of it is there. Raises FrameError."""
    if len(data) < PREFIX.size:
        return None
    end = header_bytes(data) + NONCE_BYTES + TAG_BYTES
    return end if end <= len(data) else None
