"""The file format: a golden file, strictness, and bytes of all kinds."""

import hashlib
import random
import struct
import tracemalloc
import zlib
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cachecore.scope import Fidelity
from cachecore.store.pools import Extent, SealedFrame, hckv
from tests.cachecore.store.pools.mutations import mutate
from tests.cachecore.store.pools.runs import BOB, content, make_frames, make_run

RUN = make_run(
    1, blocks=3, layers=Extent(2, 7), heads=Extent(4, 8), codec="i8", fidelity=Fidelity.QUANTIZED, tenant=BOB
)
FRAMES = make_frames(RUN, 100)
FILE = b"".join(hckv.encode(RUN, FRAMES, identity=b"identity").buffers)


def with_index(change) -> bytes:  # type: ignore[no-untyped-def]
    """The file with another index, whose CRC and size are right."""
    trailer = hckv.read_trailer(FILE, len(FILE))
    frames = FILE[: len(hckv.MAGIC) + trailer.frames_bytes]
    body = change(FILE[len(frames) : -hckv.TRAILER_BYTES])
    return frames + body + struct.pack("<QII8s", trailer.frames_bytes, len(body), zlib.crc32(body), hckv.MAGIC)


def put(body: bytes, offset: int, data: bytes) -> bytes:
    return body[:offset] + data + body[offset + len(data) :]


def test_the_golden_file() -> None:
    """What older versions have written must stay readable, so this may only change together with VERSION."""
    assert len(FILE) == 504
    assert hashlib.sha256(FILE).hexdigest() == "8cde28e26e42287050f5103003018190d31c7171b73ca2c29412e0204761d6c3"
    assert FILE.startswith(b"hckv\x01\0\0\0")
    assert FILE.endswith(b"hckv\x01\0\0\0")


def test_a_file_is_read_as_it_was_written() -> None:
    index, frames = hckv.decode(FILE)
    assert index.run == RUN
    assert index.identity == b"identity"
    assert [(frame.layers, content(frame)) for frame in frames] == [(frame.layers, content(frame)) for frame in FRAMES]
    assert [record.layers for record in index.overlapping(Extent(3, 5))] == [Extent(2, 4), Extent(4, 6)]
    assert [record.layers for record in index.overlapping(Extent(6, 7))] == [Extent(6, 7)]
    assert index.overlapping(Extent(7, 9)) == []


def test_what_lies_in_the_callers_memory_is_not_copied() -> None:
    data = bytearray(b"abc")
    encoded = hckv.encode(make_run(1, layers=Extent(0, 1)), [SealedFrame(Extent(0, 1), [data])])
    data[0] = ord("x")
    assert bytes(encoded.buffers[1]) == b"xbc"


@pytest.mark.parametrize(
    "file",
    [
        b"",
        FILE[:-1],
        FILE[1:],
        FILE + b"\0",
        FILE[: len(FILE) // 2],
        b"HCKV" + FILE[4:],
        FILE[:-4] + b"\2\0\0\0",
        FILE[:200] + FILE[201:],
        FILE + FILE,
        FILE[:8] + FILE[-hckv.TRAILER_BYTES :],
        with_index(lambda body: body + b"\0"),
        with_index(lambda body: body[:-1]),
        with_index(lambda body: body[:-14]),
        with_index(lambda body: body[:70]),
        with_index(lambda body: put(body, 64, b"\0\0")),
        with_index(lambda body: put(body, 64, b"\xff\xff")),
        with_index(lambda body: put(body, 66, b"\7\0")),
        with_index(lambda body: put(body, 70, b"\x08\0")),
        with_index(lambda body: put(body, 74, b"\4")),
        with_index(lambda body: put(body, 75, b"\0")),
        with_index(lambda body: put(body, 77, b"\xff")),
        with_index(lambda body: put(body, 79, b"/")),
        with_index(lambda body: put(body, len(body) - 14, b"\x08\0")),
        with_index(lambda body: put(body, len(body) - 12, bytes(8))),
        with_index(lambda body: put(body, len(body) - 12, b"\xff" * 8)),
        with_index(lambda body: put(body, len(body) - 4, b"\0\0\0\0")),
    ],
)
def test_whatever_is_not_a_file_is_broken(file: bytes) -> None:
    with pytest.raises(hckv.Broken):
        hckv.decode(file)


def test_every_flipped_bit_is_found() -> None:
    for bit in range(8 * len(FILE)):
        file = bytearray(FILE)
        file[bit // 8] ^= 1 << bit % 8
        with pytest.raises(hckv.Broken):
            hckv.decode(file)


def test_every_cut_is_found() -> None:
    for size in range(len(FILE)):
        with pytest.raises(hckv.Broken):
            hckv.decode(FILE[:size])


@settings(max_examples=300, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_a_mutated_file_is_broken_or_says_what_a_writer_could_have_written(seed: int) -> None:
    file = mutate(random.Random(seed), FILE)
    try:
        index, frames = hckv.decode(file)
    except hckv.Broken:
        return
    assert b"".join(hckv.encode(index.run, frames, index.identity).buffers) == file


def test_a_declared_size_costs_no_memory() -> None:
    huge = struct.pack("<QII8s", 1 << 60, hckv.INDEX_BYTES_MAX, 0, hckv.MAGIC)
    tracemalloc.start()
    for file in (huge, bytes(300) + huge, FILE[:-24] + huge):
        with pytest.raises(hckv.Broken):
            hckv.decode(file)
    with pytest.raises(hckv.Broken):
        hckv.decode(with_index(lambda body: put(body, len(body) - 12, struct.pack("<Q", 1 << 32))))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 100_000


def test_the_end_alone_describes_a_run() -> None:
    encoded = hckv.encode(RUN, FRAMES, b"identity")
    assert hckv.read_tail(encoded.tail) == encoded.index == hckv.decode(FILE)[0]
    for tail in (b"", encoded.tail[1:], encoded.tail[:-1], encoded.tail[-hckv.TRAILER_BYTES :]):
        with pytest.raises(hckv.Broken):
            hckv.read_tail(tail)


def test_names_of_runs_do_not_change() -> None:
    """They are the names of files that outlive this version."""
    assert RUN.key.name == "07256fd7295f706e8c11955494b70402-1-b37b7512b77dcf7a2be4838467f01e8a"
    assert replace(RUN.key, codec="i8b").name != RUN.key.name
