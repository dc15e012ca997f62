"""Memory that payloads are received into.

What bites: memory fresh from the kernel is zeroed page by page at the first touch, and an allocator that hands pages of
a few megabytes back between two frames pays that for every one of them: a third of what receiving costs in all.
"""

import sys
from collections.abc import Callable

import numpy

Allocate = Callable[[int], memoryview]
"""Writable bytes of that length, whatever they contain. A worker may hand in one that gives pinned memory."""

_REFERENCES = 3
"""To an array that only the list, the loop's variable and the call of `getrefcount` itself refer to."""


def fresh(size: int) -> memoryview:
    return numpy.empty(size, numpy.uint8).data  # not a bytearray, which would be zeroed once more


class RecycledMemory:
    """An `Allocate` that gives memory again once no view of it is left. For one thread.

    `kept_bytes_max` bounds what is kept while nobody uses it; what is in use is not this one's to bound.
    """

    def __init__(self, kept_bytes_max: int = 64 << 20) -> None:
        self._kept_bytes_max = kept_bytes_max
        self._arrays: list[numpy.ndarray[tuple[int], numpy.dtype[numpy.uint8]]] = []

    def __call__(self, size: int) -> memoryview:
        for array in self._arrays:
            # Every memoryview, slice or tensor over it holds a reference.
            if size <= len(array) <= 2 * size and sys.getrefcount(array) == _REFERENCES:
                return array.data[:size]
        made = numpy.empty(size, numpy.uint8)
        self._arrays.append(made)
        while sum(map(len, self._arrays)) > self._kept_bytes_max:
            del self._arrays[0]
        return made.data
