"""Cutting text into words and looking them up, in C: `cachecore/prompts/words.py` has the twin in Python.

`words` is the extension, or None where it is not built. ROPEWAY_NATIVE=0 does without it, ROPEWAY_NATIVE=1 insists.
"""

import os
from types import ModuleType
from typing import Final


def _load() -> ModuleType | None:
    wish = os.environ.get("ROPEWAY_NATIVE", "")
    if wish == "0":
        return None
    try:
        from cachecore.prompts.native import _words
    except ImportError:
        if wish == "1":
            raise
        return None
    return _words


words: Final = _load()
