"""Runs of blocks that an engine holds by name, as transfers see them."""

from collections.abc import Sequence
from typing import NamedTuple

from cachecore.blocks import PrefixHash
from cachecore.scope import Fidelity, Naming


class Held(NamedTuple):
    """What is known of a named block."""

    name: PrefixHash
    fidelity: Fidelity
    parent: PrefixHash | None
    """None at the beginning of a prompt."""
    number: int
    """In its prompt, from 0."""
    token_ids: Sequence[int]
    naming: Naming | None
    parent_fidelity: Fidelity = Fidelity.EXACT
    cache_salt: str = ""
    """What it is announced with; empty where it inherits its parent's."""


class HeldRun(NamedTuple):
    """Consecutive named blocks of one chain, in order."""

    blocks: Sequence[int]
    held: Sequence[Held]

    @property
    def fidelity(self) -> Fidelity:
        return max(block.fidelity for block in self.held)


class Edges(NamedTuple):
    """Blocks beside a run, each with its tokens."""

    before: tuple[int, Sequence[int]] | None
    after: Sequence[tuple[int, Sequence[int]]]
    """Prompts may have gone on in several ways."""
