"""Residual propagation: recomputed tokens as measurements of how stale KV differs from what it should be.

At every layer the recomputed rows show the difference between stale and fused keys (before rotation) and values. Most
of it is a shift that all tokens of a context share, and a part that is linear in a token's stale value. Both are fitted
on the rows by ridge regression and added to the tokens that are not recomputed, before the layer's attention, so that
recomputed rows and the question see corrected keys.

Three things bound the harm. Each head's correction is scaled by how well the fit predicts rows that it was not fitted
on (closed-form leave-one-out, on the rows that were not chosen for what the question attends to), between 0 and 1.
Residuals and features far longer than the median are clipped. Exact tokens are neither fitted nor touched; nor is the
passage behind the system prompt, whose KV lacks next to nothing, nor the private sinks of passages computed alone.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from cachecore.kv.fuser.context import Context, Projected
from cachecore.kv.rope import RopeRows, RopeTable

_RIDGE = 3.0
_INTERCEPT_SHRINKAGE = 0.1
"""Of a ridge's: shifts that all tokens, or all of a passage, share are to be believed sooner."""
_CLIP = 2.0
"""Times the median length."""
_FIT_ROWS_MAX = 256
_FIT_ROWS_MIN = 8


@dataclass(frozen=True, slots=True, eq=False)
class Propagation:
    """What stays the same from layer to layer of one fusion."""

    measured: Tensor
    """[f]: fitted rows, as indices into the recomputed ones."""
    fitted: Tensor
    """[f]: the same, as tokens of the context."""
    corrected: Tensor
    """[u]: tokens to correct."""
    unbiased: Tensor
    """[f] bool: fitted rows that no selector has chosen for their importance."""
    intercepts: Tensor
    """[f + u, 1 + passages]: ones, and which passage a token is of."""
    undo: RopeRows
    redo: RopeRows

    @classmethod
    def plan(cls, context: Context, rows: Tensor, anchors: Tensor, rope: RopeTable) -> "Propagation | None":
        """For recomputed `rows` [m], `anchors` [m] bool among them. None when too few rows can be fitted."""
        eligible = ~(context.settled | _near_private_sinks(context))
        measured = eligible[rows].nonzero().squeeze(1)
        if len(measured) > _FIT_ROWS_MAX:
            measured = measured[torch.linspace(0, len(measured) - 1, _FIT_ROWS_MAX).long()]
        recomputed = torch.zeros_like(eligible)
        recomputed[rows] = True
        corrected = (~context.settled & ~recomputed).nonzero().squeeze(1)
        if len(measured) < _FIT_ROWS_MIN or not len(corrected):
            return None
        fitted = rows[measured]
        passage = context.passage[torch.cat((fitted, corrected))]
        members = passage.unsqueeze(1) == torch.arange(int(context.passage.max()) + 1, device=passage.device)
        unbiased = anchors[measured]
        return cls(
            measured=measured,
            fitted=fitted,
            corrected=corrected,
            unbiased=unbiased if unbiased.any() else torch.ones_like(unbiased),
            intercepts=torch.cat((torch.ones_like(members[:, :1]), members), dim=1).float(),
            undo=rope.rows(fitted).inverse(),
            redo=rope.rows(corrected),
        )

    def apply(self, keys: Tensor, values: Tensor, projected: Projected) -> None:
        """Correct one layer's stale keys and values [T, K, D] in place, from its recomputed rows."""
        residual = self._residuals(keys, values, projected)
        shift = _predict(self._features(values), residual, self.unbiased, len(self.fitted))
        key_shift, value_shift = shift.chunk(2, dim=1)
        keys[self.corrected] += self.redo.turn(key_shift.contiguous()).to(keys.dtype)
        values[self.corrected] += value_shift.to(values.dtype)

    def _residuals(self, keys: Tensor, values: Tensor, projected: Projected) -> Tensor:
        """[f, 2K, D]: keys' before rotation, then values'."""
        key_residual = projected.keys[self.measured].float() - keys[self.fitted].float()
        value_residual = projected.values[self.measured].float() - values[self.fitted].float()
        return _clip(torch.cat((self.undo.turn(key_residual), value_residual), dim=1))

    def _features(self, values: Tensor) -> Tensor:
        """[f + u, K * D + intercepts], fitted rows first, and scaled so that one ridge fits all."""
        features = _clip(values[torch.cat((self.fitted, self.corrected))].float()).flatten(1)
        features = features - features[: len(self.fitted)].mean(0)
        energy = features[: len(self.fitted)].square().sum(1).mean()
        weight = (_RIDGE * energy * _INTERCEPT_SHRINKAGE).sqrt()
        return torch.cat((features, weight * self.intercepts), dim=1) / (_RIDGE * energy).sqrt()


def _predict(features: Tensor, residual: Tensor, unbiased: Tensor, fitted: int) -> Tensor:
    """Ridge regression with a penalty of 1 in its dual form, gated per group: [u, groups, D]."""
    known, asked = features[:fitted], features[fitted:]
    gram = known @ known.t()
    gram.diagonal().add_(1.0)
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(gram))
    dual = inverse @ residual.flatten(1)
    left_out = residual - (dual / inverse.diagonal().unsqueeze(1)).view_as(residual)
    trust = _agreement(left_out[unbiased], residual[unbiased])
    predicted = asked @ (known.t() @ dual)
    return predicted.view(-1, *residual.shape[1:]) * trust.unsqueeze(1)


def _agreement(predicted: Tensor, actual: Tensor) -> Tensor:
    """[groups], 0..1: what to multiply predictions by so that they come closest."""
    product = (predicted * actual).sum((0, 2))
    return (product / predicted.square().sum((0, 2)).clamp_min(1e-20)).clamp(0.0, 1.0)


def _clip(vectors: Tensor) -> Tensor:
    """[n, groups, D] with no vector longer than `_CLIP` times its group's median."""
    lengths = torch.linalg.vector_norm(vectors, dim=-1, keepdim=True)
    limit = _CLIP * lengths.median(dim=0, keepdim=True).values
    shrunk: Tensor = vectors * (limit / lengths.clamp_min(1e-20)).clamp_max(1.0)
    return shrunk


def _near_private_sinks(context: Context) -> Tensor:
    """The first two tokens of passages computed alone."""
    sinks = context.private_sinks
    after = torch.zeros_like(sinks)
    after[1:] = sinks[:-1]
    return sinks | after
