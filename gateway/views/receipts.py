"""The last receipts, for `/status`, the dashboard and whoever asks why a request went where it went."""

from collections import deque
from collections.abc import Iterator
from typing import Any

from policies.contract import Receipt

RECEIPTS_MAX = 256
"""Enough to look at. Of thousands each would be long out of the processor's caches when it makes room."""


CHAIN_BYTES_MAX = 32 * 1024
"""Of a prompt's names, as many are kept with its receipt: 32,768 tokens at 16 tokens a block."""


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

    def find(self, request_id: str) -> Receipt | None:
        """The newest of a request's, while it is kept."""
        return next((receipt for receipt in self if receipt.request_id == request_id), None)


OTHERS_SHOWN = 5
"""Candidates beside the chosen one: of hundreds nobody reads the rest."""


def document(receipt: Receipt) -> dict[str, Any]:
    """As it is shown to people: beside its numbers `words`, which say what was done, why and what came of it."""
    return {
        **receipt.document(OTHERS_SHOWN),
        "candidates_count": len(receipt.candidate_fields),
        "words": words(receipt),
    }


def words(receipt: Receipt) -> str:
    """`worker-2: 1,872 of 1,904 tokens cached, starts in 41 ms; next best worker-1: 780 ms; seen after 36 ms`."""
    said = f"{receipt.candidate.worker}: {receipt.decision.reason}"
    if receipt.legs is not None:
        said += f"; {receipt.legs}"
    if receipt.seen_ttft_ms is not None:
        said += f"; seen after {receipt.seen_ttft_ms:,.0f} ms"
    return said
