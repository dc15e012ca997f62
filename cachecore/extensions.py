"""The extensions in C, which need not be there: each has a twin in Python beside its use.

The twin says what is right, and serves where the extension is not built (`docs/decisions/native.md`).
"""

import os
from importlib import import_module
from types import ModuleType


def extension(name: str) -> ModuleType | None:
    """The extension of that module name; None where it is not built, or with ROPEWAY_NATIVE=0.

    Raises ImportError where it is not built and ROPEWAY_NATIVE=1 insists on it.
    """
    wish = os.environ.get("ROPEWAY_NATIVE", "")
    if wish == "0":
        return None
    try:
        return import_module(name)
    except ImportError:
        if wish == "1":
            raise
        return None
