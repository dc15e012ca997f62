"""What a gateway does block by block, in C: naming blocks, finding them, comparing chains.

Everything here has a twin in Python beside its use, which says what is right and serves where the extension is not
built. `native` is the extension, or None. ROPEWAY_NATIVE=0 does without it, ROPEWAY_NATIVE=1 insists on it.
"""

import os
from types import ModuleType
from typing import Final


def _load() -> ModuleType | None:
    wish = os.environ.get("ROPEWAY_NATIVE", "")
    if wish == "0":
        return None
    try:
        from cachecore.native import _native
    except ImportError:
        if wish == "1":
            raise
        return None
    return _native


native: Final = _load()
