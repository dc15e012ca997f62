"""Turning and quantizing keys in one pass over memory, in C."""

from typing import Final

from cachecore.extensions import extension

kernels: Final = extension("cachecore.kv.native._kernels")
"""None where `cachecore.extensions` does without it."""
