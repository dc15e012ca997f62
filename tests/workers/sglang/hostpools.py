"""SGLang's host pools in plain bytes: where pages lie by each layout, from the published `get_page_buffer_meta`.

A page's bytes follow from a seed, written into a pool token by token and read back so, past whatever is tested.
"""

import ctypes
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

PAGE = 4
LAYERS = 3
ROW_BYTES = 16
"""Of one token, one layer, keys or values."""
PAGES = 16


class Indices(list[int]):
    """What is used of a torch tensor of integers."""

    def __getitem__(self, place: Any) -> Any:
        found = super().__getitem__(place)
        return Indices(found) if isinstance(place, slice) else found

    def tolist(self) -> list[int]:
        return list(self)


class Tensor:
    """What is used of a flat torch tensor of bytes."""

    def __init__(self, size: int, contiguous: bool = True) -> None:
        self.memory = bytearray(size)
        self._contiguous = contiguous

    @classmethod
    def of(cls, data: bytes) -> "Tensor":
        tensor = cls(len(data))
        tensor.memory[:] = data
        return tensor

    def data_ptr(self) -> int:
        return ctypes.addressof((ctypes.c_char * len(self.memory)).from_buffer(self.memory))

    def numel(self) -> int:
        return len(self.memory)

    def element_size(self) -> int:
        return 1

    def is_contiguous(self) -> bool:
        return self._contiguous


@dataclass
class HostPool:
    """Keys and values (`MHATokenToKVPoolHost`), or one of the two (`MLATokenToKVPoolHost`, `halves` 1)."""

    layout: str = "page_first"
    halves: int = 2
    dtype: str = "torch.bfloat16"
    head_num: int = 2
    head_dim: int = 4
    page_size: int = PAGE
    layer_num: int = LAYERS
    start_layer: int = 0
    end_layer: int = LAYERS
    kv_buffer: Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.kv_buffer = Tensor(PAGES * self.page_bytes)
        self.size_per_token = self.halves * self.layer_num * ROW_BYTES

    @property
    def page_bytes(self) -> int:
        return self.page_size * self.halves * self.layer_num * ROW_BYTES

    # ---- published ---------------------------------------------------------------------------------------------------

    def get_page_buffer_element_size(self, split_factor: int = 1) -> int | None:
        return self.get_page_buffer_meta(Indices(range(self.page_size)))[1][0]

    def get_page_buffer_meta(self, indices: Indices) -> tuple[list[int], list[int]]:
        assert len(indices) % self.page_size == 0
        pieces = [piece for index in indices.tolist()[:: self.page_size] for piece in self._pieces(index)]
        base = self.kv_buffer.data_ptr()
        return [base + start for start, _ in pieces], [size for _, size in pieces]

    def get_data_page(self, index: int, flat: bool = True) -> Tensor:
        """All keys, then all values; each in the order of the layout."""
        return Tensor.of(b"".join(bytes(self.kv_buffer.memory[place]) for place in self._flat(index)))

    def get_dummy_flat_data_page(self) -> Tensor:
        return Tensor(self.page_bytes)

    def set_from_flat_data_page(self, index: int, data_page: Tensor) -> None:
        start = 0
        for place in self._flat(index):
            size = place.stop - place.start
            self.kv_buffer.memory[place] = data_page.memory[start : start + size]
            start += size

    # ---- the layouts -------------------------------------------------------------------------------------------------

    def _pieces(self, index: int) -> Iterator[tuple[int, int]]:
        """Where each piece of a page begins, and its size."""
        half = PAGES * self.page_size * self.layer_num * ROW_BYTES
        if self.layout == "layer_first":
            for layer in range(self.layer_num):
                start = (layer * PAGES * self.page_size + index) * ROW_BYTES
                for number in range(self.halves):
                    yield number * half + start, self.page_size * ROW_BYTES
        elif self.layout in ("page_first", "page_first_direct", "page_head"):
            for number in range(self.halves):
                yield number * half + index * self.layer_num * ROW_BYTES, self.page_size * self.layer_num * ROW_BYTES
        else:
            raise ValueError(f"Unsupported layout: {self.layout}")

    def _flat(self, index: int) -> list[slice]:
        half = PAGES * self.page_size * self.layer_num * ROW_BYTES
        pieces = sorted(self._pieces(index), key=lambda piece: (piece[0] // half, piece[0]))
        return [slice(start, start + size) for start, size in pieces]

    # ---- for tests ---------------------------------------------------------------------------------------------------

    def places(self, *pages: int) -> Indices:
        """The indices of these pages' tokens."""
        return Indices(page * self.page_size + token for page in pages for token in range(self.page_size))

    def write(self, page: int, seed: object) -> None:
        self.set_from_flat_data_page(page * self.page_size, Tensor.of(content(seed, self.page_bytes)))

    def read(self, page: int) -> bytes:
        return bytes(self.get_data_page(page * self.page_size).memory)


class FlatOnly(HostPool):
    """One that cannot say where the pieces of a page lie (`MambaPoolHost` where layers come first)."""

    def get_page_buffer_element_size(self, split_factor: int = 1) -> int | None:
        raise ValueError("storage zero-copy requires page_first layout")

    def get_page_buffer_meta(self, indices: Indices) -> tuple[list[int], list[int]]:
        raise ValueError("storage zero-copy requires page_first layout")


class Logical:
    """One that has no memory and stands for those beside it (`LogicalHostPool`)."""

    kv_buffer = None
    page_size = PAGE
    layout = "layer_first"

    def get_page_buffer_element_size(self, split_factor: int = 1) -> int | None:
        return None

    def get_page_buffer_meta(self, indices: Indices) -> None:
        return None


def content(seed: object, size: int) -> bytes:
    return random.Random(f"page {seed}").randbytes(size)
