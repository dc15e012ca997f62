from collections.abc import Callable, Hashable, Sequence
from typing import TypeVar

Node = TypeVar("Node")

def read_messages(
    variables: Hashable, messages: object, unread: str, /
) -> tuple[tuple[Hashable, ...], list[str]] | None:
    """As `cachecore.prompts.outlines.python_read_messages`."""

def cut(
    opening: list[str],
    befores: list[str],
    leasts: list[int],
    head: str,
    join: Callable[[str, str], str | None],
    long_characters: int,
    characters_max: int,
    long_texts_max: int,
    texts: list[str],
    /,
) -> list[str] | None:
    """`opening`, each text behind what stands before it, and what stands behind the last; None where a text holds
    `head`, is too long or one of too many long ones, where `join` gives None, or a segment is shorter than its least.
    Long texts are joined by `join`."""

def walk(node: Node, segments: Sequence[str], chains: list[bytes], /) -> Node:
    """As `cachecore.prompts.naming.python_walk`."""
