"""The `.hckv` format: one run's sealed frames, and an index at the end by which some of them can be read alone.

    magic     8   b"hckv" | version (u32 LE)
    frames        back to back, as they were sealed
    index         as below
    trailer  24   size of the frames (u64) | size of the index (u32) | CRC-32 of the index (u32) | the magic again

    index     compatibility (16) | scope (16) | parent (16) | identity (8) | first block (u32) | key epoch (u32)
              | blocks, layers' start and end, heads' start and end (u16 each)
              | fidelity, bytes of codec, bytes of tenant (u8 each) | codec | tenant | names of the blocks (16 each)
              | for each frame: end of its layers (u16) | its size (u64) | its CRC-32 (u32)

All numbers are little-endian. Frames cover the run's layers in order, so each one begins where the one before it ends,
in layers and in bytes: nothing can overlap, and there is no offset to lie about. CRC-32 is for accidents; against
tampering each frame carries a MAC, which only those who have the tenant's key can check. `identity` is drawn for each
writing of a run.

Parsing is strict: whatever does not say exactly what a writer could have written is a `Broken`, and no declared size is
believed beyond the limits and the size of the file.
"""

import secrets
import struct
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from cachecore.blocks import HASH_BYTES, Chain, PrefixHash
from cachecore.scope import Fidelity, KeyId, TenantId
from cachecore.store.pools.contract import BLOCKS_MAX, Buffer, Extent, PoolRun, RunKey, SealedFrame

VERSION = 1
MAGIC = b"hckv" + VERSION.to_bytes(4, "little")
FRAME_BYTES_MAX = 1 << 32
IDENTITY_BYTES = 8
TAIL_GUESS_BYTES = 16 * 1024
"""Read first from the end: as much as nearly every index and its trailer take."""

_TRAILER = struct.Struct("<QII8s")
_HEAD = struct.Struct("<16s16s16s8sIIHHHHHBBB")
_FRAME = struct.Struct("<HQI")
_CODEC_BYTES_MAX, _TENANT_BYTES_MAX, _FRAMES_MAX = 32, 64, 4096
INDEX_BYTES_MAX = (
    _HEAD.size + _CODEC_BYTES_MAX + _TENANT_BYTES_MAX + BLOCKS_MAX * HASH_BYTES + _FRAMES_MAX * _FRAME.size
)
TRAILER_BYTES = _TRAILER.size


class Broken(ValueError):
    """Bytes that are no `.hckv`, or not all of one."""


class FrameRecord(NamedTuple):
    layers: Extent
    offset: int
    """From the beginning of the file."""
    size: int
    crc: int


class RunIndex(NamedTuple):
    run: PoolRun
    identity: bytes
    frames: tuple[FrameRecord, ...]

    def overlapping(self, layers: Extent | None) -> list[FrameRecord]:
        return [frame for frame in self.frames if layers is None or frame.layers.overlaps(layers)]


@dataclass(frozen=True, slots=True)
class Encoded:
    """A file in pieces; those of the frames are the caller's own memory."""

    buffers: list[Buffer]
    size: int
    index: RunIndex
    tail: bytes
    """Index and trailer, which are the last of the buffers."""


# ---- writing ---------------------------------------------------------------------------------------------------------


def encode(run: PoolRun, frames: Sequence[SealedFrame], identity: bytes | None = None) -> Encoded:
    """Looks at every byte, for the CRCs. Raises ValueError when the frames do not cover the run's layers in order."""
    records = tuple(_records(run.key, frames))
    index = RunIndex(run, identity or secrets.token_bytes(IDENTITY_BYTES), records)
    body = _encode_index(index)
    frames_bytes = sum(record.size for record in records)
    tail = body + _TRAILER.pack(frames_bytes, len(body), zlib.crc32(body), MAGIC)
    buffers: list[Buffer] = [MAGIC, *(memoryview(piece).cast("B") for frame in frames for piece in frame.buffers), tail]
    return Encoded(buffers, len(MAGIC) + frames_bytes + len(tail), index, tail)


def _records(key: RunKey, frames: Sequence[SealedFrame]) -> Iterator[FrameRecord]:
    layer, offset = key.layers.start, len(MAGIC)
    if len(frames) > _FRAMES_MAX:
        raise ValueError(f"a run has at most {_FRAMES_MAX} frames")
    for layers, buffers in frames:
        size = sum(memoryview(buffer).nbytes for buffer in buffers)
        if layers.start != layer or not layer < layers.end <= key.layers.end or not 1 <= size <= FRAME_BYTES_MAX:
            raise ValueError(
                f"a frame of layers {layers} and {size} bytes does not follow layer {layer} in {key.layers}"
            )
        crc = 0
        for buffer in buffers:
            crc = zlib.crc32(buffer, crc)
        yield FrameRecord(layers, offset, size, crc)
        layer, offset = layers.end, offset + size
    if layer != key.layers.end:
        raise ValueError(f"the frames end at layer {layer}, the run at {key.layers.end}")


def _encode_index(index: RunIndex) -> bytes:
    run = index.run
    key, codec, tenant = run.key, run.key.codec.encode(), run.key.tenant.encode()
    head = _HEAD.pack(
        key.compatibility,
        key.scope,
        run.parent,
        index.identity,
        run.first_block,
        key.key_id.epoch,
        key.blocks,
        *key.layers,
        *key.heads,
        key.fidelity,
        len(codec),
        len(tenant),
    )
    frames = b"".join(_FRAME.pack(frame.layers.end, frame.size, frame.crc) for frame in index.frames)
    return b"".join((head, codec, tenant, run.chain, frames))


# ---- reading ---------------------------------------------------------------------------------------------------------


class Trailer(NamedTuple):
    frames_bytes: int
    index_bytes: int
    index_crc: int

    @property
    def tail_bytes(self) -> int:
        return self.index_bytes + TRAILER_BYTES


def read_trailer(tail: Buffer, file_bytes: int) -> Trailer:
    """`tail` is the end of a file of `file_bytes`, TRAILER_BYTES of it or more. Raises Broken."""
    if len(tail) < TRAILER_BYTES or file_bytes < len(tail):
        raise Broken("too short for an .hckv file")
    frames_bytes, index_bytes, index_crc, magic = _TRAILER.unpack(tail[-TRAILER_BYTES:])
    trailer = Trailer(frames_bytes, index_bytes, index_crc)
    if magic != MAGIC:
        raise Broken("it does not end as an .hckv file of this version does")
    if not _HEAD.size <= index_bytes <= INDEX_BYTES_MAX:
        raise Broken(f"an index of {index_bytes} bytes")
    if len(MAGIC) + frames_bytes + trailer.tail_bytes != file_bytes:
        raise Broken(f"a file of {file_bytes} bytes whose trailer says another size")
    return trailer


def read_tail(tail: bytes) -> RunIndex:
    """Of `Encoded.tail`, kept apart from the frames. Raises Broken."""
    if len(tail) < TRAILER_BYTES:
        raise Broken("too short for the end of an .hckv file")
    frames_bytes = _TRAILER.unpack(tail[-TRAILER_BYTES:])[0]
    return read_index(tail, read_trailer(tail, len(MAGIC) + frames_bytes + len(tail)))


def read_index(tail: Buffer, trailer: Trailer) -> RunIndex:
    """`tail` is the end of the file, `trailer.tail_bytes` of it or more. Raises Broken."""
    body = bytes(tail[-trailer.tail_bytes : -TRAILER_BYTES])
    if len(body) != trailer.index_bytes or zlib.crc32(body) != trailer.index_crc:
        raise Broken("the CRC of the index does not match")
    try:
        index = _decode_index(body)
    except (ValueError, struct.error) as error:  # a description that contradicts itself
        raise Broken(f"no index: {error}") from None
    if sum(frame.size for frame in index.frames) != trailer.frames_bytes:
        raise Broken("the sizes of the frames do not add up")
    return index


def _decode_index(body: bytes) -> RunIndex:
    head = _HEAD.unpack_from(body)
    compatibility, scope, parent, identity, first_block, epoch, blocks = head[:7]
    layers, heads, fidelity, codec_bytes, tenant_bytes = Extent(*head[7:9]), Extent(*head[9:11]), *head[11:]
    names = _HEAD.size + codec_bytes + tenant_bytes
    end = names + blocks * HASH_BYTES
    if end > len(body) or blocks == 0:
        raise ValueError("it ends within the names")
    codec = body[_HEAD.size : _HEAD.size + codec_bytes].decode("ascii")
    tenant = TenantId(body[_HEAD.size + codec_bytes : names].decode("ascii"))
    chain = Chain(body[names:end])
    tail = PrefixHash(chain[-HASH_BYTES:])
    key = RunKey(compatibility, scope, KeyId(tenant, epoch), tail, blocks, layers, heads, codec, Fidelity(fidelity))
    run = PoolRun(key, PrefixHash(parent), chain, first_block)
    return RunIndex(run, identity, tuple(_decode_frames(key, body[end:])))


def _decode_frames(key: RunKey, table: bytes) -> Iterator[FrameRecord]:
    layer, offset = key.layers.start, len(MAGIC)
    for layer_end, size, crc in _FRAME.iter_unpack(table):
        if not layer < layer_end <= key.layers.end or not 1 <= size <= FRAME_BYTES_MAX:
            raise ValueError(f"a frame that ends at layer {layer_end} and has {size} bytes")
        yield FrameRecord(Extent(layer, layer_end), offset, size, crc)
        layer, offset = layer_end, offset + size
    if layer != key.layers.end:
        raise ValueError("frames are missing")


def split(data: memoryview, records: Sequence[FrameRecord]) -> list[SealedFrame]:
    """The frames in `data`, which begins where the first of the records does. Raises Broken at the first that is not
    what was written."""
    frames, base = [], records[0].offset
    for record in records:
        piece = data[record.offset - base : record.offset - base + record.size]
        if len(piece) != record.size or zlib.crc32(piece) != record.crc:
            raise Broken(f"the CRC of layers {record.layers.start} to {record.layers.end} does not match")
        frames.append(SealedFrame(record.layers, (piece,)))
    return frames


def decode(file: Buffer) -> tuple[RunIndex, list[SealedFrame]]:
    """A whole file. Raises Broken."""
    view = memoryview(file).cast("B")
    trailer = read_trailer(view, len(view))
    if bytes(view[: len(MAGIC)]) != MAGIC:
        raise Broken("it does not begin as an .hckv file of this version does")
    index = read_index(view, trailer)
    return index, split(view[len(MAGIC) : len(MAGIC) + trailer.frames_bytes], index.frames)
