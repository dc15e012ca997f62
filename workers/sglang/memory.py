"""A page's bytes in the memory that SGLang keeps them in, read and written in place.

SGLang's host pools tell where the pieces of a page lie (`get_page_buffer_meta`: addresses and sizes), in an order that
follows from the layout: keys and values of the whole page where pages come first, of one layer after another where
layers do. A pool that cannot tell for its layout gives and takes a page as one flat tensor instead. The two orders
differ, so a page has the form in its name.

Addresses are SGLang's word, and believed; that the pieces add up to what was stored is not.
"""

import ctypes
from collections.abc import Sequence
from enum import StrEnum
from typing import Any, Protocol


class Form(StrEnum):
    PIECES = "pieces"
    FLAT = "flat"
    NONE = "none"
    """The pool has no memory of its own: it stands for others beside it."""


class MemoryMismatch(ValueError):
    """What was asked for does not fit the memory that it is about."""


class FlatTensor(Protocol):
    """What is used of a torch tensor in host memory."""

    def data_ptr(self) -> int: ...

    def numel(self) -> int: ...

    def element_size(self) -> int: ...

    def is_contiguous(self) -> bool: ...


def memory_of(tensor: FlatTensor) -> memoryview:
    """The tensor's own bytes, writable. Raises MemoryMismatch where they do not lie side by side."""
    if not tensor.is_contiguous():
        raise MemoryMismatch("a tensor that is not contiguous")
    return _memory_at(tensor.data_ptr(), tensor.numel() * tensor.element_size())


def _memory_at(address: int, size: int) -> memoryview:
    if not address or size < 1:
        raise MemoryMismatch(f"{size} bytes at {address:#x}")
    return memoryview((ctypes.c_char * size).from_address(address)).cast("B")


class HostPages:
    """Pages of one of SGLang's host pools."""

    def __init__(self, host_pool: Any, flat: bool = False) -> None:
        """`flat`: whatever the pool can do, its pages come and go as tensors."""
        self._pool = host_pool
        form = _form_of(host_pool)
        self.form = Form.FLAT if flat and form is Form.PIECES else form
        self.page_size_tokens = int(getattr(host_pool, "page_size", 1) or 1)

    def __repr__(self) -> str:
        return f"HostPages({type(self._pool).__name__}, {self.form}, page_size_tokens={self.page_size_tokens})"

    def places(self, pages: int, host_indices: Any) -> list[Any]:
        """Of that many pages, what the pool wants to hear to find each. Raises MemoryMismatch."""
        size = self.page_size_tokens
        if host_indices is None or len(host_indices) != pages * size:
            given = "none" if host_indices is None else len(host_indices)
            raise MemoryMismatch(f"{pages} pages of {size} tokens, and {given} places")
        return [host_indices[start : start + size] for start in range(0, pages * size, size)]

    def pieces(self, place: Any) -> list[memoryview]:
        """A page's bytes, to be read."""
        if self.form is Form.PIECES:
            return self._located(place)
        page = self._pool.get_data_page(_first(place), flat=True)
        return [memoryview(bytes(memory_of(page)))]  # a copy: the tensor may be one as well, and ends here

    def fill(self, place: Any, payload: memoryview) -> None:
        """Write a page. Raises MemoryMismatch when it is not as long as the memory."""
        if self.form is Form.PIECES:
            scatter(payload, self._located(place))
            return
        page = self._pool.get_dummy_flat_data_page()
        scatter(payload, [memory_of(page)])
        self._pool.set_from_flat_data_page(_first(place), page)

    def page_bytes(self, place: Any) -> int:
        if self.form is Form.PIECES:
            return sum(map(len, self._located(place)))
        return len(memory_of(self._pool.get_dummy_flat_data_page()))

    def _located(self, place: Any) -> list[memoryview]:
        addresses, sizes = self._pool.get_page_buffer_meta(place)
        return [_memory_at(address, size) for address, size in zip(addresses, sizes, strict=True)]


def scatter(payload: memoryview, pieces: Sequence[memoryview]) -> None:
    """Raises MemoryMismatch before anything is written."""
    if sum(map(len, pieces)) != len(payload):
        raise MemoryMismatch(f"a page of {len(payload)} bytes where {sum(map(len, pieces))} were to come")
    start = 0
    for piece in pieces:
        piece[:] = payload[start : start + len(piece)]
        start += len(piece)


def _form_of(host_pool: Any) -> Form:
    try:
        size = host_pool.get_page_buffer_element_size()
    except (AttributeError, AssertionError, NotImplementedError, ValueError):  # not for this layout, or not at all
        return Form.FLAT
    if size is not None:
        return Form.PIECES
    # Only who has no memory either is taken for one that has no pages: all of them would count as restored.
    return Form.NONE if host_pool.kv_buffer is None else Form.FLAT


def _first(place: Any) -> int:
    return int(place[0])
