"""Turning and quantizing keys in one pass over memory, in C: each has a twin in torch beside its use.

`kernels` is the extension, or None where it is not built. ROPEWAY_NATIVE=0 does without it, ROPEWAY_NATIVE=1 insists.
"""

import os
from types import ModuleType
from typing import Final


def _load() -> ModuleType | None:
    wish = os.environ.get("ROPEWAY_NATIVE", "")
    if wish == "0":
        return None
    try:
        from cachecore.kv.native import _kernels
    except ImportError:
        if wish == "1":
            raise
        return None
    return _kernels


kernels: Final = _load()
