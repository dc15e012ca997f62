"""Which tokens to recompute. A selector looks at a context and a question and names at most `count` tokens.

Exact tokens are never chosen: nothing would change. Where passages were computed alone, the first two tokens of each
are always among the chosen: alone, they were the sink of their sequence, and as such they draw attention wherever they
come to stand.
"""

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from cachecore.kv.fuser.context import Context, FusableModel, Projected
from cachecore.kv.fuser.passes import attend, causal_mask, rows_by_head, rows_by_token

_ANCHOR_SHARE = 0.25
_FIRST_SHARE = 1 / 3


class Selection(NamedTuple):
    rows: Tensor
    """[m] ascending."""
    anchors: Tensor
    """[m] bool: chosen for no reason, evenly over the context: what they show holds for others."""


Selector = Callable[[FusableModel, Context, Tensor, int], Selection]
"""(model, context, question's token ids, count) -> what to recompute."""


def query_attention(model: FusableModel, context: Context, question: Tensor, count: int) -> Selection:
    """The tokens that the question looks at most."""
    return _chosen(context, _best(context, attention_scores(model, context, question), count))


def first_k(model: FusableModel, context: Context, question: Tensor, count: int) -> Selection:
    """The first tokens of every passage, as many of each (EPIC, arXiv 2410.15332)."""
    return _chosen(context, _firsts(context, count))


def kv_deviation(model: FusableModel, context: Context, question: Tensor, count: int) -> Selection:
    """The tokens whose KV of layer 1 is furthest from what computing gives (CacheBlend, arXiv 2405.16444)."""
    return _chosen(context, _best(context, deviation_scores(model, context), count))


def hybrid(model: FusableModel, context: Context, question: Tensor, count: int) -> Selection:
    """A third of them first tokens, the others by the question's attention."""
    first = _firsts(context, round(count * _FIRST_SHARE))
    scores = attention_scores(model, context, question)
    return _chosen(context, _best(context, scores, count, first))


def query_and_anchors(model: FusableModel, context: Context, question: Tensor, count: int) -> Selection:
    """Three quarters by the question's attention, the others strided evenly: what residual propagation learns from."""
    anchors = round(count * _ANCHOR_SHARE)
    best = _best(context, attention_scores(model, context, question), count - anchors)
    rest = (~context.exact & ~best).nonzero().squeeze(1)
    strided = torch.zeros_like(best)
    if anchors and len(rest):
        strided[rest[torch.linspace(0, len(rest) - 1, min(anchors, len(rest))).round().long()]] = True
    return _chosen(context, best, strided)


SELECTORS: Mapping[str, Selector] = {
    "query_attention": query_attention,
    "first_k": first_k,
    "kv_deviation": kv_deviation,
    "hybrid": hybrid,
    "query_and_anchors": query_and_anchors,
}


@torch.inference_mode()
def attention_scores(model: FusableModel, context: Context, question: Tensor) -> Tensor:
    """[T]: the question's attention over the stale context, weighed by how much a token's value moves the hidden state.

    Mean over the question's tokens, all heads, and the layers in the middle two thirds. Private sinks are hidden, or
    they would take most of it.
    """
    size, count = len(context), len(question)
    turns = model.rope.span(size, count)
    hidden = model.embed(question)
    positions = torch.arange(size, size + count, device=question.device)
    mask = None
    first, last = model.layers // 6, model.layers - model.layers // 6
    scores = torch.zeros(size, device=question.device)
    keys, values = (context.keys.new_empty((size + count, *context.keys.shape[2:])) for _ in range(2))
    for layer in range(last):
        projected = model.project(layer, hidden, turns)
        torch.cat((context.keys[layer], projected.keys), out=keys)
        torch.cat((context.values[layer], projected.values), out=values)
        if mask is None:
            mask = causal_mask(projected, positions, size + count)
            mask[:, :size].masked_fill_(context.private_sinks, float("-inf"))
        if layer < first:
            mixed = attend(projected, keys, values, mask)
        else:
            weights, mixed = _attention(projected, keys, values, mask)
            lengths = _value_lengths(model.output_weight(layer), context.values[layer])
            scores += (weights[..., :size].float().mean(1) * lengths).sum(0)
        if layer < last - 1:
            hidden = model.absorb(layer, hidden, mixed)
    return scores


@torch.inference_mode()
def deviation_scores(model: FusableModel, context: Context) -> Tensor:
    """[T]: squared distance of keys and values at layer 1 from what they are behind a full layer 0."""
    rows = torch.arange(len(context), device=context.token_ids.device)
    turns = model.rope.rows(rows)
    hidden = model.embed(context.token_ids)
    first = model.project(0, hidden, turns)
    mask = causal_mask(first, rows, len(rows))
    hidden = model.absorb(0, hidden, attend(first, first.keys, first.values, mask))
    layer = min(1, model.layers - 1)
    fresh = model.project(layer, hidden, turns)
    keys = (fresh.keys - context.keys[layer]).float().square().sum((1, 2))
    return keys + (fresh.values - context.values[layer]).float().square().sum((1, 2))


def _attention(projected: Projected, keys: Tensor, values: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """`attend`, showing its weights: [Q, n, T] and [n, Q, D]."""
    rows = rows_by_head(projected) * keys.shape[2] ** -0.5
    scores = torch.bmm(rows, keys.permute(1, 2, 0)).add_(mask)
    weights = scores.softmax(-1)
    mixed = torch.bmm(weights, values.transpose(0, 1))
    return weights.view(-1, len(projected.queries), len(keys)), rows_by_token(mixed, projected)


def _value_lengths(output: Tensor, values: Tensor) -> Tensor:
    """[Q, T]: how long a value [T, K, D] is once head h's output projection [Q, D, H] has taken it up.

    |v W|^2 = v (W W^T) v^T, for the G heads that share a value in one product.
    """
    output, by_head = output.float(), values.float().transpose(0, 1)
    heads, _, dim = by_head.shape
    grams = (output @ output.transpose(1, 2)).view(heads, -1, dim, dim)
    products = (by_head @ grams.transpose(1, 2).flatten(2)).view(heads, len(values), -1, dim)
    squares = products.mul_(by_head.unsqueeze(2)).sum(-1)
    return squares.clamp_min_(0).sqrt_().transpose(1, 2).flatten(0, 1)


def _best(context: Context, scores: Tensor, count: int, chosen: Tensor | None = None) -> Tensor:
    """[T] bool: the tokens of the highest scores, `count` of them with those chosen already and the forced ones."""
    taken = _forced(context) if chosen is None else chosen | _forced(context)
    left = min(count - int(taken.sum()), int((~context.exact & ~taken).sum()))
    if left > 0:
        open_scores = scores.masked_fill(context.exact | taken, float("-inf"))
        taken = taken.index_fill(0, open_scores.topk(left).indices, True)
    return taken


def _firsts(context: Context, count: int) -> Tensor:
    """[T] bool: the first tokens of every passage that is not exact, `count` in all."""
    chosen = torch.zeros_like(context.exact)
    open_tokens = (~context.exact).nonzero().squeeze(1)
    passages, lengths = torch.unique_consecutive(context.passage[open_tokens], return_counts=True)
    starts = lengths.cumsum(0) - lengths
    offsets = torch.arange(len(open_tokens), device=open_tokens.device) - starts.repeat_interleave(lengths)
    # Round after round of one token from each passage.
    turn = torch.arange(len(passages), device=passages.device).repeat_interleave(lengths)
    order = torch.argsort(offsets * len(passages) + turn)
    chosen[open_tokens[order[:count]]] = True
    return chosen


def _forced(context: Context) -> Tensor:
    forced = context.private_sinks.clone()
    forced[1:] |= context.private_sinks[:-1]
    return forced & ~context.exact


def _chosen(context: Context, by_merit: Tensor, anchors: Tensor | None = None) -> Selection:
    by_merit = by_merit | _forced(context)
    every = by_merit if anchors is None else by_merit | anchors
    rows = every.nonzero().squeeze(1)
    return Selection(rows, torch.zeros_like(rows, dtype=torch.bool) if anchors is None else anchors[rows])
