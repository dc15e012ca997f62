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
from torch.nn import functional

from cachecore.kv.fuser.context import Context, Projected
from cachecore.kv.rope import RopeRows, RopeTable

_RIDGE = 3.0
_INTERCEPT = 0.1**0.5
"""How large a feature it is that all tokens, or all of a passage, share: such shifts are to be believed sooner."""
_CLIP = 2.0
"""Times the median length."""
_FIT_ROWS_MAX = 256
_FIT_ROWS_MIN = 8


@dataclass(frozen=True, slots=True, eq=False)
class Propagation:
    """What stays the same from layer to layer of one fusion.

    Tokens are corrected as one stretch, without gathering and scattering them: what else lies in it has been recomputed
    and is put in its place afterwards.
    """

    measured: Tensor
    """[f]: fitted rows, as indices into the recomputed ones."""
    fitted: Tensor
    """[f]: the same, as tokens of the context."""
    unbiased: Tensor
    """Those of the fitted that no selector has chosen for their importance, as indices into them."""
    stretch: slice
    """Of the context, s tokens: from the first that is fitted or corrected to the last."""
    known: Tensor
    """[f + u]: the fitted and those to correct, as tokens of the stretch."""
    features: Tensor
    """[s, K * D + 1 + passages]: room for a layer's values, then one and which passage a token is of."""
    ridge: Tensor
    """[f, f]: the intercepts' part of the Gram matrix, and the penalty."""
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
        known = torch.cat((fitted, corrected))
        start, end = int(known.min()), int(known.max()) + 1
        unbiased = anchors[measured]
        intercepts = _intercepts(context.passage[start:end])
        ridge = intercepts[fitted - start] @ intercepts[fitted - start].t()
        ridge.diagonal().add_(1.0)
        return cls(
            measured=measured,
            fitted=fitted,
            unbiased=(unbiased if unbiased.any() else ~unbiased).nonzero().squeeze(1),
            stretch=slice(start, end),
            known=known - start,
            features=functional.pad(intercepts, (context.values[0, 0].numel(), 0)),
            ridge=ridge,
            undo=rope.rows(fitted).inverse(),
            redo=rope.span(start, end - start),
        )

    def apply(self, keys: Tensor, values: Tensor, projected: Projected) -> None:
        """Correct one layer's stale keys and values [T, K, D] in place, from its recomputed rows.

        Of the stretch's recomputed rows it leaves nothing to be used: theirs are to follow.
        """
        residual = self._residuals(keys, values, projected)
        keys, values = keys[self.stretch], values[self.stretch]
        by_key, by_value = self._fit(values, residual).chunk(2, dim=1)
        key_shift = (self.features @ by_key).view(keys.shape)
        keys += self.redo.turn(key_shift, out=key_shift)
        values += (self.features @ by_value).view(values.shape)

    def _residuals(self, keys: Tensor, values: Tensor, projected: Projected) -> Tensor:
        """[f, 2K, D]: keys' before rotation, then values'."""
        key_residual = projected.keys[self.measured].float() - keys[self.fitted].float()
        value_residual = projected.values[self.measured].float() - values[self.fitted].float()
        residual = torch.cat((self.undo.turn(key_residual), value_residual), dim=1)
        lengths = _lengths(residual)
        return residual * _shrinking(lengths, lengths)

    def _fit(self, values: Tensor, residual: Tensor) -> Tensor:
        """Ridge regression with a penalty of 1: what to multiply features by, [K * D + 1 + passages, 2K * D].

        A value counts as its difference from the fitted rows' mean, scaled so that one penalty fits all. Features are
        left as they are: scale and mean go into the result.
        """
        width, lengths = values[0].numel(), _lengths(values.float())
        shrunk = values * _shrinking(lengths, lengths[self.known])
        self.features[:, :width] = shrunk.flatten(1)
        of_values, intercepts = self.features[self.known[: len(self.fitted)]].tensor_split((width,), dim=1)
        mean = of_values.mean(0)
        centered = of_values - mean
        scale = (_RIDGE * centered.square().sum(1).mean()).rsqrt()
        scaled = centered * scale
        dual = _gated_dual(torch.addmm(self.ridge, scaled, scaled.t()), residual, self.unbiased).flatten(1)
        slope, shifts = scaled.t() @ dual * scale, intercepts.t() @ dual
        shifts[0] -= mean @ slope / _INTERCEPT
        return torch.cat((slope, shifts))


def _intercepts(passage: Tensor) -> Tensor:
    """[n, 1 + passages]"""
    members = passage.unsqueeze(1) == torch.arange(int(passage.max()) + 1, device=passage.device)
    return functional.pad(members.float(), (1, 0), value=1.0) * _INTERCEPT


def _gated_dual(gram: Tensor, residual: Tensor, unbiased: Tensor) -> Tensor:
    """The dual form's coefficients [f, groups, D], each group scaled by how well it predicts rows that are left out."""
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(gram))
    dual = (inverse @ residual.flatten(1)).view_as(residual)
    actual = residual[unbiased]
    left_out = actual - dual[unbiased] / inverse.diagonal()[unbiased, None, None]
    return dual * _agreement(left_out, actual).unsqueeze(1)


def _agreement(predicted: Tensor, actual: Tensor) -> Tensor:
    """[groups], 0..1: what to multiply predictions by so that they come closest."""
    product = (predicted * actual).sum((0, 2))
    return (product / predicted.square().sum((0, 2)).clamp_min(1e-20)).clamp(0.0, 1.0)


def _lengths(vectors: Tensor) -> Tensor:
    """[n, groups, 1] of [n, groups, D]."""
    return vectors.square().sum(-1, keepdim=True).sqrt_()


def _shrinking(lengths: Tensor, usual: Tensor) -> Tensor:
    """What to multiply vectors by so that none is longer than `_CLIP` times the median of its group's `usual` ones."""
    limit = _CLIP * usual.median(dim=0, keepdim=True).values
    return (limit / lengths.clamp_min(1e-20)).clamp_max(1.0)


def _near_private_sinks(context: Context) -> Tensor:
    """The first two tokens of passages computed alone."""
    sinks = context.private_sinks
    after = torch.zeros_like(sinks)
    after[1:] = sinks[:-1]
    return sinks | after
