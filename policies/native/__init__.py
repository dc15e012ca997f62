"""What a request costs on each candidate, in C: its users have the twins, which say what is right."""

import os
from importlib import import_module
from types import ModuleType
from typing import Final


def _extension(name: str) -> ModuleType | None:
    """As `cachecore.extensions.extension`, whose room this one does not know."""
    wish = os.environ.get("ROPEWAY_NATIVE", "")
    if wish == "0":
        return None
    try:
        return import_module(name)
    except ImportError:
        if wish == "1":
            raise
        return None


native: Final = _extension("policies.native._deciding")
"""None where it is not built, or with ROPEWAY_NATIVE=0."""
