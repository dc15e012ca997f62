"""Accidents that happen to bytes, for the parsers: flips, cuts, repeats, moves, and lies about the CRCs."""

import random
import struct
import zlib

from cachecore.store.pools import hckv

INTERESTING = [b"\0", b"\xff", b"\x7f", b"\x80", bytes(2), b"\xff\xff", bytes(4), b"\xff" * 4, bytes(8), b"\xff" * 8]


def mutate(rng: random.Random, file: bytes) -> bytes:
    """One to four of them; often with the index's CRC made right again, so that what it guards is reached."""
    data = bytearray(file)
    for _ in range(rng.randint(1, 4)):
        _mutate_once(rng, data)
    return bytes(_reseal(data) if rng.random() < 0.7 else data)


def _mutate_once(rng: random.Random, data: bytearray) -> None:
    at = rng.randrange(len(data) + 1)
    # The index and the trailer are small beside the frames, and more may go wrong there.
    if rng.random() < 0.8:
        at = max(0, len(data) - rng.randrange(1, 300))
    match rng.randrange(6):
        case 0:
            if at < len(data):
                data[at] ^= 1 << rng.randrange(8)
        case 1:
            del data[at : at + rng.choice([1, 2, 4, 14, 16, 100])]
        case 2:
            data[at:at] = rng.randbytes(rng.choice([1, 2, 4, 14, 16, 100]))
        case 3:
            piece = rng.choice(INTERESTING)
            data[at : at + len(piece)] = piece
        case 4:
            end = at + rng.choice([2, 14, 16])
            data[at:at] = data[at:end]
        case 5:
            del data[at:]


def _reseal(data: bytearray) -> bytearray:
    """A right trailer behind whatever there is, with the index where it was said to be."""
    if len(data) < hckv.TRAILER_BYTES:
        return data
    frames_bytes, index_bytes, _, magic = struct.unpack("<QII8s", data[-hckv.TRAILER_BYTES :])
    start = len(hckv.MAGIC) + frames_bytes
    if not start <= len(data) - hckv.TRAILER_BYTES:
        start = max(len(hckv.MAGIC), len(data) - hckv.TRAILER_BYTES - index_bytes)
    body = data[start : -hckv.TRAILER_BYTES]
    trailer = struct.pack("<QII8s", start - len(hckv.MAGIC), len(body), zlib.crc32(body), magic)
    return data[: -hckv.TRAILER_BYTES] + trailer
