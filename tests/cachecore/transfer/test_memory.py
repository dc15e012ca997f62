"""Memory is given again when nobody can see it any more, and not before."""

import numpy

from cachecore.transfer.frames import FrameReader, FrameWriter
from cachecore.transfer.memory import RecycledMemory
from tests.cachecore.transfer.world import HEADER, KEYRING, layer_payload


def address(view: memoryview) -> int:
    return numpy.frombuffer(view, numpy.uint8).ctypes.data


def test_memory_is_given_again() -> None:
    allocate = RecycledMemory()
    first = allocate(1000)
    where = address(first)
    del first
    assert address(allocate(900)) == where
    assert len(allocate(900)) == 900


def test_what_is_seen_is_left_alone() -> None:
    """Through a slice of a slice, or an array over it."""
    allocate = RecycledMemory()
    kept = allocate(1000)[10:20][2:]
    array = numpy.frombuffer(allocate(1000), numpy.uint8)
    other = allocate(1000)
    places = {address(kept) - 12, array.ctypes.data, address(other)}
    assert len(places) == 3
    assert address(allocate(1000)) not in places


def test_much_larger_memory_is_not_spent_on_little() -> None:
    allocate = RecycledMemory()
    where = address(allocate(10_000))
    assert address(allocate(100)) != where


def test_what_is_kept_is_bounded() -> None:
    allocate = RecycledMemory(kept_bytes_max=2500)
    places = [address(view) for view in [allocate(1000) for _ in range(4)]]
    again = [address(view) for view in [allocate(1000), allocate(1000), allocate(1000)]]
    assert set(again[:2]) == set(places[2:])
    assert len(allocate(5000)) == 5000


def test_frames_that_are_kept_keep_their_bytes() -> None:
    reader = FrameReader(KEYRING.frame_key, allocate=RecycledMemory())
    frames = []
    for number in range(20):
        buffers = FrameWriter(KEYRING.frame_key).seal(HEADER, [layer_payload(number)])
        found = reader.feed(b"".join(buffers))
        if number % 3 == 0:
            frames += found
    assert [bytes(frame.payload) for frame in frames] == [layer_payload(number) for number in range(0, 20, 3)]
