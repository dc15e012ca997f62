"""Can somebody who measures times tell two kinds of trials apart? Ranks, permutations, and no assumption on noise."""

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

import numpy as np


@dataclass(frozen=True)
class Pair:
    """Two trials next to each other in time, so that drift falls on both alike."""

    cached_seconds: float
    """Of the trial whose text the victim had asked."""
    fresh_seconds: float


@dataclass(frozen=True)
class Verdict:
    trials: int
    auc: float
    """How likely a trial that was cached is faster than one that was not: 0.5 is chance, 1 is certainty."""
    pairs_told_apart: float
    """Share of the pairs of which the cached one was the faster."""
    p: float
    """How often labels that mean nothing look as telling as these, or more (two-sided)."""
    cached_ms: float
    """Median."""
    fresh_ms: float

    def __str__(self) -> str:
        return (
            f"{self.trials} trials: AUC {self.auc:.3f}, {self.pairs_told_apart:.1%} of pairs told apart, "
            f"p = {self.p:.4f}; median {self.cached_ms:.2f} ms cached, {self.fresh_ms:.2f} ms fresh"
        )


def judge(pairs: Sequence[Pair], random: Random, rounds: int = 20_000) -> Verdict:
    """A permutation test on the sum of ranks: under the null hypothesis the two labels of each pair may be swapped."""
    cached = np.array([pair.cached_seconds for pair in pairs])
    fresh = np.array([pair.fresh_seconds for pair in pairs])
    ranks = _ranks(np.concatenate([cached, fresh]))
    differences = ranks[len(cached) :] - ranks[: len(cached)]
    signs = np.random.default_rng(random.getrandbits(64)).choice([-1.0, 1.0], (rounds, len(pairs)))
    permuted = np.abs(signs @ differences)
    p = (1 + int((permuted >= abs(differences.sum()) - 1e-9).sum())) / (1 + rounds)
    auc = 0.5 + differences.sum() / (2 * len(cached) * len(fresh))
    told_apart = float((np.sign(fresh - cached) + 1).mean() / 2)
    medians = (float(np.median(times)) * 1e3 for times in (cached, fresh))
    return Verdict(2 * len(pairs), float(auc), told_apart, p, *medians)


def _ranks(values: "np.ndarray[tuple[int], np.dtype[np.float64]]") -> "np.ndarray[tuple[int], np.dtype[np.float64]]":
    """From 1 on; equal values share the mean of theirs."""
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    return (last - (counts - 1) / 2)[inverse]
