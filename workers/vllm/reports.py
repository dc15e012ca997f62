"""What became of requests' plans, kept until their answers ask.

vLLM's answers have no place for it, and its processes no way to hand it over: the worker's side knows, and whoever
answers (`answers`) asks the sidecar. Both call a request by the capability of its first plan. Equal requests of the
same second have equal plans; each is told one of what became of them.
"""

import threading
from collections import OrderedDict
from collections.abc import Mapping
from hashlib import blake2b
from typing import NewType

from cachecore.scope import Fidelity
from cachecore.transfer.plan import PARAMETER
from workers.engine import TransferOutcome, TransferReport
from workers.openai.fidelity import FIDELITY_HEADER, TRANSFER_HEADER

ReportKey = NewType("ReportKey", str)

_KEYS_MAX = 4096
_EQUAL_MAX = 64


def key_of(params: object) -> ReportKey | None:
    """Of a request's `kv_transfer_params`, whatever they are; None where there is no plan."""
    documents = params.get(PARAMETER) if isinstance(params, dict) else None
    first = documents[0] if isinstance(documents, list) and documents else None
    capability = first.get("capability") if isinstance(first, dict) else None
    if not isinstance(capability, str):
        return None
    return ReportKey(blake2b(capability.encode(errors="replace"), digest_size=16).hexdigest())


class Reports:
    """The latest ones. Added to on the engine's thread, taken on the transfers'."""

    def __init__(self, keys_max: int = _KEYS_MAX) -> None:
        self._keys_max = keys_max
        self._untold: OrderedDict[ReportKey, list[tuple[Fidelity, TransferReport]]] = OrderedDict()
        self._lock = threading.Lock()

    def add(self, key: ReportKey | None, fidelity: Fidelity, report: TransferReport) -> None:
        """`fidelity` is the worst of the KV that the prompt may be answered from."""
        if key is None:
            return
        with self._lock:
            equal = self._untold.setdefault(key, [])
            if len(equal) < _EQUAL_MAX:
                equal.append((fidelity, report))
            # Of several prompts or choices of one request, the first to run fetches and the others find it there.
            equal.sort(key=lambda told: told[1].outcome is TransferOutcome.HELD)
            if len(self._untold) > self._keys_max:
                self._untold.popitem(last=False)

    def take(self, key: str) -> Mapping[str, str] | None:
        """As headers, which a reference worker's answers have; None for a request that nothing is known of. What was
        told once is not told again."""
        with self._lock:
            equal = self._untold.get(ReportKey(key))
            if not equal:
                return None
            fidelity, report = equal.pop(0)
            if not equal:
                del self._untold[ReportKey(key)]
        return {FIDELITY_HEADER: fidelity.name.lower(), TRANSFER_HEADER: report.header()}
