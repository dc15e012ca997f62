"""Running a model over KV that lies in plain tensors: chosen rows of a context, or tokens behind it.

The mask is exact: a row sees the keys at its own position and before, however the rows are scattered. (A causal mask
aligned to the last row, as in the published blenders, lets almost every recomputed token see the future.)
"""

import torch
from torch import Tensor
from torch.nn import functional

from cachecore.kv.fuser.context import Context, FusableModel
from cachecore.kv.fuser.propagation import Propagation


def attend(queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
    """[n, Q, D] over [T, K, D] -> [n, Q, D]. `mask` [n, T] is 0 where a row sees and -inf where not."""
    groups = queries.shape[1] // keys.shape[1]
    grouped = queries.view(len(queries), -1, groups, queries.shape[2]).permute(1, 2, 0, 3)
    shape = (-1, groups, -1, -1)
    mixed = functional.scaled_dot_product_attention(
        grouped,
        keys.transpose(0, 1).unsqueeze(1).expand(shape),
        values.transpose(0, 1).unsqueeze(1).expand(shape),
        attn_mask=mask,
    )
    return mixed.permute(2, 0, 1, 3).flatten(1, 2)


def causal_mask(positions: Tensor, keys: int, dtype: torch.dtype) -> Tensor:
    """[n, keys] for rows at `positions` [n]."""
    unseen = torch.arange(keys, device=positions.device) > positions.unsqueeze(1)
    return torch.zeros(unseen.shape, dtype=dtype, device=positions.device).masked_fill_(unseen, float("-inf"))


@torch.inference_mode()
def recompute(model: FusableModel, context: Context, rows: Tensor, propagation: Propagation | None = None) -> None:
    """Compute the tokens at `rows` [m] (ascending) anew, in place, seeing what stands before them in `context`.

    `propagation` corrects the other tokens' KV of a layer, before its attention, by what the rows have shown. Layer 0
    needs none: its KV depends on the token alone.
    """
    if not len(rows):
        return
    turns = model.rope.rows(rows)
    reach = int(rows[-1]) + 1
    hidden = model.embed(context.token_ids[rows])
    mask = causal_mask(rows, reach, hidden.dtype)
    for layer in range(model.layers):
        projected = model.project(layer, hidden, turns)
        keys, values = context.keys[layer], context.values[layer]
        if propagation is not None and layer > 0:
            propagation.apply(keys, values, projected)
        keys.index_copy_(0, rows, projected.keys)
        values.index_copy_(0, rows, projected.values)
        if layer == model.layers - 1:
            return
        hidden = model.absorb(layer, hidden, attend(projected.queries, keys[:reach], values[:reach], mask))


@torch.inference_mode()
def extend(model: FusableModel, context: Context, token_ids: Tensor, logit_rows: int = 1) -> Tensor:
    """Compute tokens that follow the context, which stays as it is. Logits of the last `logit_rows`, fp32."""
    count, size = len(token_ids), len(context)
    positions = torch.arange(size, size + count, device=token_ids.device)
    turns = model.rope.span(size, count)
    hidden = model.embed(token_ids)
    mask = causal_mask(positions, size + count, hidden.dtype)
    for layer in range(model.layers):
        projected = model.project(layer, hidden, turns)
        keys = torch.cat((context.keys[layer], projected.keys))
        values = torch.cat((context.values[layer], projected.values))
        hidden = model.absorb(layer, hidden, attend(projected.queries, keys, values, mask))
    return model.logits(hidden[-logit_rows:])
