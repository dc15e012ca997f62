"""Repairing a stitched context: choose tokens, recompute them, and correct the others by what they show."""

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from cachecore.kv.fuser.context import Context, FusableModel
from cachecore.kv.fuser.passes import recompute
from cachecore.kv.fuser.propagation import Propagation
from cachecore.kv.fuser.selectors import (
    Selector,
    first_k,
    hybrid,
    kv_deviation,
    query_and_anchors,
    query_attention,
)

DEFAULT_METHOD = "residual_propagation"
DEFAULT_FRACTION = 0.15


@dataclass(frozen=True, slots=True)
class Method:
    select: Selector
    propagates: bool = False


METHODS: Mapping[str, Method] = {
    "query_attention": Method(query_attention),
    "first_k": Method(first_k),
    "kv_deviation": Method(kv_deviation),
    "hybrid": Method(hybrid),
    "residual_propagation": Method(query_and_anchors, propagates=True),
}


def fuse(
    model: FusableModel,
    context: Context,
    question: Tensor,
    method: Method = METHODS[DEFAULT_METHOD],
    fraction: float = DEFAULT_FRACTION,
) -> Context:
    """The context with `fraction` of its tokens recomputed; the one given stays as it is, for the next question.

    `question` is what follows it. At 1.0 every token that is not exact is recomputed, and the result is exact.
    """
    fused = context.copy()
    rows, anchors = method.select(model, context, question, context.budget(fraction))
    propagation = Propagation.plan(context, rows, anchors, model.rope) if method.propagates else None
    recompute(model, fused, rows, propagation)
    return fused
