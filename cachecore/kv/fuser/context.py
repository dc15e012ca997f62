"""What a fuser starts from: KV of passages moved to where they stand in a prompt, and what the model must offer.

Shapes: T tokens of the context, L layers, Q query heads, K key-value heads, D head_dim, H hidden.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from cachecore.kv.rope import RopeRows, RopeTable


class Projected(NamedTuple):
    """Queries [n, Q, D], keys [n, K, D] (both rotated) and values [n, K, D] of n tokens."""

    queries: Tensor
    keys: Tensor
    values: Tensor


class FusableModel(Protocol):
    """A decoder whose layers can be run on any rows of a sequence."""

    @property
    def rope(self) -> RopeTable: ...

    @property
    def layers(self) -> int: ...

    def embed(self, token_ids: Tensor) -> Tensor:
        """[n] -> [n, H]"""
        ...

    def project(self, layer: int, hidden: Tensor, rows: RopeRows) -> Projected:
        """Norm, projections, rotation."""
        ...

    def absorb(self, layer: int, hidden: Tensor, mixed: Tensor) -> Tensor:
        """What follows attention: hidden [n, H] and attention's result [n, Q, D] -> the next layer's hidden."""
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """[n, H] -> fp32 [n, vocabulary]"""
        ...

    def output_weight(self, layer: int) -> Tensor:
        """The output projection by head, [Q, D, H]."""
        ...


class Passage(NamedTuple):
    """Consecutive tokens of a prompt with KV that was computed somewhere: keys and values [L, n, K, D]."""

    token_ids: Sequence[int]
    keys: Tensor
    values: Tensor
    position: int
    """Where its first token stood then."""
    exact: bool = False
    """Everything before it is the same now as it was then, and in the same place."""
    alone: bool = False
    """Nothing came before it then: its first tokens took the part of the sequence's sink."""


@dataclass(frozen=True, slots=True, eq=False)
class Context:
    """Passages put in a row, keys turned to their new positions 0..T-1. Tensors are the context's own."""

    token_ids: Tensor
    """[T]"""
    keys: Tensor
    """[L, T, K, D]"""
    values: Tensor
    passage: Tensor
    """[T]: which passage a token belongs to, from 0."""
    exact: Tensor
    """[T] bool: tokens that are what computing would have given. A leading stretch, never recomputed."""
    private_sinks: Tensor
    """[T] bool: the first token of each passage computed alone."""
    system_tokens: int
    """Of the first passage, where that is a prompt's shared beginning: budgets do not count them."""

    def __len__(self) -> int:
        return len(self.token_ids)

    def copy(self) -> "Context":
        return replace(self, keys=self.keys.clone(), values=self.values.clone())

    def budget(self, fraction: float) -> int:
        """How many tokens `fraction` of the context (without its system prompt) is."""
        return round(fraction * (len(self) - self.system_tokens))

    @property
    def settled(self) -> Tensor:
        """[T] bool: exact tokens, and the passage right behind the system prompt: next to nothing came before it."""
        return self.exact | (self.passage <= 1)


def stitch(passages: Sequence[Passage], rope: RopeTable) -> Context:
    """Put passages in a row, the first being the system prompt. Keys are turned once, from the stored bytes."""
    starts = [0]
    for passage in passages:
        starts.append(starts[-1] + len(passage.token_ids))
    lengths = torch.tensor([len(passage.token_ids) for passage in passages])
    device = passages[0].keys.device
    alone = torch.zeros(starts[-1], dtype=torch.bool, device=device)
    alone[[start for start, passage in zip(starts, passages, strict=False) if passage.alone]] = True
    exact = torch.tensor([passage.exact for passage in passages])
    return Context(
        token_ids=torch.tensor([token for passage in passages for token in passage.token_ids], device=device),
        keys=_turned(passages, starts, rope),
        values=torch.cat([passage.values for passage in passages], dim=1),
        passage=torch.arange(len(passages)).repeat_interleave(lengths).to(device),
        exact=exact.repeat_interleave(lengths).to(device),
        private_sinks=alone,
        system_tokens=starts[1],
    )


def _turned(passages: Sequence[Passage], starts: Sequence[int], rope: RopeTable) -> Tensor:
    """Every passage's keys where they go, [L, T, K, D]: read once, written once."""
    layers, _, heads, dim = passages[0].keys.shape
    placed = passages[0].keys.new_empty((layers, starts[-1], heads, dim))
    for passage, start, end in zip(passages, starts, starts[1:], strict=False):
        if start == passage.position:
            placed[:, start:end] = passage.keys
        else:
            shift = rope.shift(passage.position, start, end - start, heads)
            for keys, out in zip(passage.keys, placed, strict=True):
                shift.turn(keys, out[start:end])
    return placed
