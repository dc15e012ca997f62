"""What a request costs on each candidate, in C: its users have the twins, which say what is right."""

from types import ModuleType

native: ModuleType | None = None
"""None where it is not built, and with ROPEWAY_NATIVE=0: it refuses to be imported then."""
try:
    from policies.native import _deciding

    native = _deciding
except ImportError:
    pass
