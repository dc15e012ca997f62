"""Running a model over KV that lies in plain tensors: chosen rows of a context, or tokens behind it.

The mask is exact: a row sees the keys at its own position and before, however the rows are scattered. (A causal mask
aligned to the last row, as in the published blenders, lets almost every recomputed token see the future.)
"""

import torch
from torch import Tensor
from torch.nn import functional

from cachecore.kv.fuser.context import Context, FusableModel, Projected
from cachecore.kv.fuser.propagation import Propagation


def attend(projected: Projected, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
    """Queries [n, Q, D] over [T, K, D] -> [n, Q, D]. `mask` [G * n, T] is what `causal_mask` makes.

    The G queries of a key-value head go in as G times as many rows of one head: a third faster than sharing keys.
    """
    rows = rows_by_head(projected)
    mixed = functional.scaled_dot_product_attention(
        rows.unsqueeze(0), keys.transpose(0, 1).unsqueeze(0), values.transpose(0, 1).unsqueeze(0), attn_mask=mask
    )
    return rows_by_token(mixed.squeeze(0), projected)


def rows_by_head(projected: Projected) -> Tensor:
    """Queries as [K, G * n, D]."""
    count, _, dim = projected.queries.shape
    return projected.queries.view(count, projected.keys.shape[1], -1, dim).permute(1, 2, 0, 3).flatten(1, 2)


def rows_by_token(mixed: Tensor, projected: Projected) -> Tensor:
    """[K, G * n, D] -> [n, Q, D]."""
    count, heads, dim = projected.queries.shape
    return mixed.reshape(heads, count, dim).transpose(0, 1)


def causal_mask(projected: Projected, positions: Tensor, keys: int) -> Tensor:
    """[G * n, keys] for rows at `positions` [n]: 0 where a row sees a key, -inf where not."""
    groups = projected.queries.shape[1] // projected.keys.shape[1]
    unseen = torch.arange(keys, device=positions.device) > positions.unsqueeze(1)
    mask = torch.zeros(unseen.shape, dtype=projected.keys.dtype, device=positions.device)
    return mask.masked_fill_(unseen, float("-inf")).repeat(groups, 1)


@torch.inference_mode()
def recompute(model: FusableModel, context: Context, rows: Tensor, propagation: Propagation | None = None) -> None:
    """Compute the tokens at `rows` [m] (ascending) anew, in place, seeing what stands before them in `context`.

    `propagation` corrects the other tokens' KV of a layer, before its attention, by what the rows have shown. Layer 0
    needs none: its KV depends on the token alone.
    """
    if not len(rows):
        return
    turns = model.rope.rows(rows)
    hidden = model.embed(context.token_ids[rows])
    reach = int(rows[-1]) + 1
    mask = None
    for layer in range(model.layers):
        projected = model.project(layer, hidden, turns)
        keys, values = context.keys[layer], context.values[layer]
        if propagation is not None and layer > 0:
            propagation.apply(keys, values, projected)
        keys.index_copy_(0, rows, projected.keys)
        values.index_copy_(0, rows, projected.values)
        if layer == model.layers - 1:
            return
        mask = causal_mask(projected, rows, reach) if mask is None else mask
        hidden = model.absorb(layer, hidden, attend(projected, keys[:reach], values[:reach], mask))


@torch.inference_mode()
def extend(model: FusableModel, context: Context, token_ids: Tensor, logit_rows: int = 1) -> Tensor:
    """Compute tokens that follow the context, which stays as it is. Logits of the last `logit_rows`, fp32."""
    count, size = len(token_ids), len(context)
    positions = torch.arange(size, size + count, device=token_ids.device)
    turns = model.rope.span(size, count)
    hidden = model.embed(token_ids)
    mask = None
    for layer in range(model.layers):
        projected = model.project(layer, hidden, turns)
        keys = torch.cat((context.keys[layer], projected.keys))
        values = torch.cat((context.values[layer], projected.values))
        mask = causal_mask(projected, positions, size + count) if mask is None else mask
        hidden = model.absorb(layer, hidden, attend(projected, keys, values, mask))
    return model.logits(hidden[-logit_rows:])
