"""What a gateway does block by block, in C: naming blocks, finding them, comparing chains."""

from typing import Final

from cachecore.extensions import extension

native: Final = extension("cachecore.native._native")
"""None where `cachecore.extensions` does without it."""
