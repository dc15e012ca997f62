"""A prompt's KV from passages that were computed at other positions: turned to where they stand now, and repaired.

    exact prefix | passage | gap | passage | ... | question
                 └────────────── computed ──────────────┘

The prefix is this engine's own and stays as it is. Passages come as they were stored, for tokens that have been
compared. Gaps and the question have no KV and go through the model with the tokens that the fuser chooses, in one pass:
at every layer all of them see corrected keys, and the weights are read once. What comes out belongs to this one prompt:
tokens were chosen by its question.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from cachecore.kv.fuser.context import Context, FusableModel, Passage, Projected, stitch
from cachecore.kv.fuser.fuse import DEFAULT_FRACTION, DEFAULT_METHOD, METHODS, Method
from cachecore.kv.fuser.passes import attend, causal_mask
from cachecore.kv.fuser.propagation import Propagation

QUESTION_TOKENS_MAX = 64
"""Of a prompt's last tokens, those that are asked which others matter to them."""
FOLLOWING_TOKENS_MAX = 512
"""What follows the last passage is computed with the rest when it is no longer than this."""
_GROUP_ROWS = 64
"""Rows attend in groups, each as far as its last one stands: a mask over everything would cost twice as much."""


class Kv(NamedTuple):
    """[layers, tokens, kv_heads, head_dim] each."""

    keys: Tensor
    values: Tensor


class Found(NamedTuple):
    """KV of consecutive tokens of a prompt, from elsewhere."""

    start: int
    """In the prompt."""
    kv: Kv
    position: int
    """That the keys are turned to."""
    alone: bool
    """Nothing came before it where it was computed."""

    @property
    def end(self) -> int:
        return self.start + self.kv.keys.shape[1]


class Repaired(NamedTuple):
    kv: Kv
    """Of the tokens behind the prefix."""
    logits: Tensor | None
    """fp32 [1, vocabulary] of the prompt's last token; None when more follows the passages than was computed."""


@dataclass(frozen=True, slots=True)
class Repair:
    """How passages are repaired."""

    fraction: float = DEFAULT_FRACTION
    """Of turned tokens, those that are recomputed."""
    method: Method = METHODS[DEFAULT_METHOD]
    answers: bool = True
    """Whether what follows the last passage is computed with the rest, as far as that is short."""

    @torch.inference_mode()
    def __call__(
        self, model: FusableModel, token_ids: Sequence[int], prefix: Kv, passages: Sequence[Found]
    ) -> Repaired:
        """KV of what follows the exact `prefix`: up to the prompt's end, or else to that of the last passage.

        Passages are in the order of the prompt, neither overlapping each other nor the prefix, and something of the
        prompt follows the last one. Raises ValueError when they are not.
        """
        _check(token_ids, prefix, passages)
        end = passages[-1].end
        whole = self.answers and len(token_ids) - end <= FOLLOWING_TOKENS_MAX
        context, absent = _context(model, token_ids if whole else token_ids[:end], prefix, passages)
        rows, propagation = self._choose(model, context, absent, token_ids, end)
        hidden = _compute(model, context, rows, propagation)
        start = prefix.keys.shape[1]
        kv = Kv(context.keys[:, start:], context.values[:, start:])
        return Repaired(kv, model.logits(hidden) if whole else None)

    def _choose(
        self, model: FusableModel, context: Context, absent: Tensor, token_ids: Sequence[int], end: int
    ) -> tuple[Tensor, Propagation | None]:
        """The rows to compute, and what is made of what they show."""
        # A gap shows nothing and must not be chosen; nor may the question look at it before it is there.
        exact, sinks = context.exact | absent, context.private_sinks | absent
        asked = Context(
            context.token_ids[:end],
            context.keys[:, :end],
            context.values[:, :end],
            context.passage[:end],
            exact[:end],
            sinks[:end],
            context.system_tokens,
        )
        question = torch.tensor(token_ids[end:][-QUESTION_TOKENS_MAX:], device=absent.device)
        selection = self.method.select(model, asked, question, round(self.fraction * int((~exact).sum())))
        chosen, anchors = absent.clone(), torch.zeros_like(absent)
        chosen[selection.rows] = True
        anchors[selection.rows] = selection.anchors
        rows = chosen.nonzero().squeeze(1)
        if not self.method.propagates:
            return rows, None
        known = replace(context, exact=exact, private_sinks=sinks)
        return rows, Propagation.plan(known, rows, anchors[rows], model.rope)


def _check(token_ids: Sequence[int], prefix: Kv, passages: Sequence[Found]) -> None:
    end = prefix.keys.shape[1]
    for passage in passages:
        if passage.start < end or passage.end <= passage.start:
            raise ValueError(f"a passage of {passage.start}..{passage.end} behind {end}")
        end = passage.end
    if not passages or end >= len(token_ids):
        raise ValueError(f"{len(passages)} passages up to {end} of {len(token_ids)} tokens")


def _context(
    model: FusableModel, token_ids: Sequence[int], prefix: Kv, passages: Sequence[Found]
) -> tuple[Context, Tensor]:
    """All of it in a row, and which tokens have no KV: [T] bool."""
    start = prefix.keys.shape[1]
    parts = [Passage(token_ids[:start], *prefix, position=0, exact=True)]
    if not passages[0].alone:
        # The fuser leaves alone what stands right behind the first part. Here that stood behind other passages, and
        # differs from what it should be as much as any.
        parts.append(_gap(token_ids[:0], prefix, start))
    absent = torch.zeros(len(token_ids), dtype=torch.bool, device=prefix.keys.device)
    absent[start:] = True
    for passage in passages:
        if start < passage.start:
            parts.append(_gap(token_ids[start : passage.start], prefix, start))
        said = token_ids[passage.start : passage.end]
        parts.append(Passage(said, *passage.kv, position=passage.position, alone=passage.alone))
        absent[passage.start : passage.end] = False
        start = passage.end
    if start < len(token_ids):
        parts.append(_gap(token_ids[start:], prefix, start))
    return stitch(parts, model.rope), absent


def _gap(token_ids: Sequence[int], like: Kv, position: int) -> Passage:
    layers, _, heads, dim = like.keys.shape
    nothing = like.keys.new_zeros(()).expand(layers, len(token_ids), heads, dim)
    return Passage(token_ids, nothing, nothing, position)


def _compute(model: FusableModel, context: Context, rows: Tensor, propagation: Propagation | None) -> Tensor:
    """As `cachecore.kv.fuser.passes.recompute`, all the way for the last row: its last hidden state, [1, H]."""
    turns = model.rope.rows(rows)
    hidden = model.embed(context.token_ids[rows])
    groups: list[_Group] = []
    for layer in range(model.layers):
        projected = model.project(layer, hidden, turns)
        keys, values = context.keys[layer], context.values[layer]
        if propagation is not None and layer > 0:
            propagation.apply(keys, values, projected)
        keys.index_copy_(0, rows, projected.keys)
        values.index_copy_(0, rows, projected.values)
        if layer == model.layers - 1:
            last = _rows_of(projected, slice(-1, None))
            [group] = _groups(last, rows[-1:])
            return model.absorb(layer, hidden[-1:], group.attend(last, keys, values))
        groups = groups or _groups(projected, rows)
        hidden = model.absorb(layer, hidden, torch.cat([group.attend(projected, keys, values) for group in groups]))
    return hidden[-1:]


class _Group(NamedTuple):
    rows: slice
    reach: int
    """Keys that any of them sees."""
    mask: Tensor

    def attend(self, projected: Projected, keys: Tensor, values: Tensor) -> Tensor:
        return attend(_rows_of(projected, self.rows), keys[: self.reach], values[: self.reach], self.mask)


def _groups(projected: Projected, rows: Tensor) -> list[_Group]:
    groups = []
    for start in range(0, len(rows), _GROUP_ROWS):
        part = slice(start, min(start + _GROUP_ROWS, len(rows)))
        reach = int(rows[part.stop - 1]) + 1
        groups.append(_Group(part, reach, causal_mask(_rows_of(projected, part), rows[part], reach)))
    return groups


def _rows_of(projected: Projected, rows: slice) -> Projected:
    return Projected(*(part[rows] for part in projected))
