"""Memory that payloads are received into.

What bites: memory fresh from the kernel is zeroed page by page at the first touch, and an allocator that hands pages of
a few megabytes back between two frames pays that for every one of them: a third of what receiving costs in all.
"""

import sys
from collections.abc import Callable
from typing import Any

import numpy

Allocate = Callable[[int], memoryview]
"""Writable bytes of that length, whatever they contain. A worker may hand in one that gives pinned memory."""


def _references(objects: list[Any], index: int) -> int:
    return sys.getrefcount(objects[index])


_UNSEEN = _references([object()], 0)
"""How many there are to what only a list refers to. Counted and not known: interpreters differ."""


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
        for index in range(len(self._arrays)):
            # Every memoryview, slice or tensor over it holds a reference.
            if size <= len(self._arrays[index]) <= 2 * size and _references(self._arrays, index) == _UNSEEN:
                return self._arrays[index].data[:size]
        made = numpy.empty(size, numpy.uint8)
        self._arrays.append(made)
        while sum(map(len, self._arrays)) > self._kept_bytes_max:
            del self._arrays[0]
        return made.data
