"""Cutting text into words and looking them up, and the messages of chats, in C: their users have the twins."""

from typing import Final

from cachecore.extensions import extension

words: Final = extension("cachecore.prompts.native._words")
chats: Final = extension("cachecore.prompts.native._chats")
"""None, both of them, where `cachecore.extensions` does without."""
