"""Drawing the next token from logits.

Order of the filters is vLLM's: temperature, min_p, top_k, top_p. Log probabilities are those of the unfiltered,
unscaled distribution. Draws are made on the CPU, so a seed means the same tokens on every device.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from workers.engine import Sampling, TokenLogprob

_TEMPERATURE_MIN = 1e-5
"""Below this the softmax overflows and the draw is greedy anyway."""


def sample(logits: Tensor, samplings: Sequence[Sampling], generators: Sequence[torch.Generator]) -> list[int]:
    """One token id for each row of `logits` [rows, vocabulary], fp32; row i is drawn with `generators[i]` (CPU)."""
    chosen: list[int] = logits.argmax(dim=-1).tolist()
    for row, (sampling, generator) in enumerate(zip(samplings, generators, strict=True)):
        if sampling.temperature >= _TEMPERATURE_MIN:
            probabilities = filtered_probabilities(logits[row].cpu(), sampling)
            chosen[row] = int(torch.multinomial(probabilities, 1, generator=generator))
    return chosen


def filtered_probabilities(logits: Tensor, sampling: Sampling) -> Tensor:
    """What is drawn from: [vocabulary], summing to 1, zero for every token that a filter excludes."""
    scaled = logits / sampling.temperature
    if sampling.min_p > 0:
        probabilities = scaled.softmax(dim=-1)
        scaled = scaled.masked_fill(probabilities < sampling.min_p * probabilities.max(), float("-inf"))
    if 0 < sampling.top_k < scaled.numel():
        # By index, not by value: ties at the edge must not let more than k pass.
        kept = scaled.topk(sampling.top_k)
        scaled = torch.full_like(scaled, float("-inf")).scatter(0, kept.indices, kept.values)
    probabilities = scaled.softmax(dim=-1)
    if sampling.top_p < 1:
        probabilities = _nucleus(probabilities, sampling.top_p)
    return probabilities


def logprobs_of(logits: Tensor, token_ids: Sequence[int], alternatives: int) -> list[TokenLogprob]:
    """For each row of `logits` the log probability of the row's token, and the best `alternatives`."""
    logprobs = logits.log_softmax(dim=-1)
    rows = torch.tensor(token_ids, device=logits.device).unsqueeze(1)
    chosen: list[float] = logprobs.gather(1, rows).squeeze(1).tolist()
    best = logprobs.topk(min(alternatives, logits.shape[-1]))
    return [
        TokenLogprob(token_id, logprob, tuple(zip(indices, values, strict=True)))
        for token_id, logprob, indices, values in zip(
            token_ids, chosen, best.indices.tolist(), best.values.tolist(), strict=True
        )
    ]


def _nucleus(probabilities: Tensor, top_p: float) -> Tensor:
    """The smallest set of most probable tokens whose mass reaches `top_p`; at least one."""
    ordered, indices = probabilities.sort(descending=True)
    before = ordered.cumsum(0) - ordered
    kept = ordered.masked_fill(before >= top_p, 0.0)
    kept[0] = ordered[0]
    return torch.zeros_like(probabilities).scatter(0, indices, kept / kept.sum())
