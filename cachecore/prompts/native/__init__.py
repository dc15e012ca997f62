"""Cutting text into words and looking them up, in C: `cachecore/prompts/words.py` has the twin."""

from typing import Final

from cachecore.extensions import extension

words: Final = extension("cachecore.prompts.native._words")
"""None where `cachecore.extensions` does without it."""
