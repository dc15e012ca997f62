"""The last receipts, for `/status`, the dashboard and whoever asks why a request went where it went."""

from collections import deque
from collections.abc import Iterator

from policies.contract import Receipt

RECEIPTS_MAX = 256
"""Enough to look at. Of thousands each would be long out of the processor's caches when it makes room."""


class Receipts:
    """Newest first; the oldest make room."""

    def __init__(self, receipts_max: int = RECEIPTS_MAX) -> None:
        self._receipts: deque[Receipt] = deque(maxlen=receipts_max)

    def __len__(self) -> int:
        return len(self._receipts)

    def __iter__(self) -> Iterator[Receipt]:
        return reversed(self._receipts)

    def add(self, receipt: Receipt) -> None:
        self._receipts.append(receipt)
