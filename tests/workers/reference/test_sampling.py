import math
from collections import Counter

import pytest
import torch

from workers.engine import Sampling
from workers.reference.sampling import filtered_probabilities, logprobs_of, sample

LOGITS = torch.tensor([0.5, 0.2, 0.15, 0.1, 0.05]).log()


def kept(**fields: float) -> list[float]:
    probabilities = filtered_probabilities(LOGITS, Sampling(max_tokens=1, **fields))
    assert float(probabilities.sum()) == pytest.approx(1.0)
    return [round(value, 4) for value in probabilities.tolist()]


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_temperature_sharpens_and_flattens() -> None:
    total = 0.25 + 0.04 + 0.0225 + 0.01 + 0.0025
    assert kept(temperature=0.5) == [round(value**2 / total, 4) for value in (0.5, 0.2, 0.15, 0.1, 0.05)]


def test_filters_keep_what_they_should() -> None:
    assert kept(top_k=2) == [round(0.5 / 0.7, 4), round(0.2 / 0.7, 4), 0, 0, 0]
    assert kept(top_k=5) == kept(top_k=0) == [0.5, 0.2, 0.15, 0.1, 0.05]
    assert kept(top_p=0.69) == [round(0.5 / 0.7, 4), round(0.2 / 0.7, 4), 0, 0, 0]
    assert kept(top_p=0.71) == [round(value / 0.85, 4) for value in (0.5, 0.2, 0.15)] + [0, 0]
    assert kept(top_p=1e-9) == [1, 0, 0, 0, 0]
    assert kept(min_p=0.25) == [round(value / 0.85, 4) for value in (0.5, 0.2, 0.15)] + [0, 0]


def test_ties_do_not_let_more_than_k_pass() -> None:
    probabilities = filtered_probabilities(torch.zeros(8), Sampling(max_tokens=1, top_k=3))
    assert int((probabilities > 0).sum()) == 3


def test_top_p_counts_what_top_k_left() -> None:
    assert kept(top_k=2, top_p=0.7) == [1, 0, 0, 0, 0]


def test_zero_temperature_is_greedy_among_drawn_rows() -> None:
    logits = torch.stack([LOGITS, LOGITS.flip(0)])
    samplings = [Sampling(max_tokens=1, temperature=0.0)] * 2
    assert sample(logits, samplings, [generator(0), generator(1)]) == [0, 4]


def test_draws_follow_the_distribution_and_the_seed() -> None:
    rows, count = LOGITS.expand(1, -1), 4000
    source = generator(7)
    drawn = [sample(rows, [Sampling(max_tokens=1)], [source])[0] for _ in range(count)]
    again = generator(7)
    assert drawn[:50] == [sample(rows, [Sampling(max_tokens=1)], [again])[0] for _ in range(50)]
    shares = Counter(drawn)
    for token, probability in enumerate(LOGITS.exp().tolist()):
        deviation = math.sqrt(count * probability * (1 - probability))
        assert abs(shares[token] - count * probability) < 5 * deviation


def test_logprobs_are_those_of_the_whole_distribution() -> None:
    chosen, best = logprobs_of(torch.stack([LOGITS, LOGITS + 3.0]), [3, 0], 2)
    assert chosen.token_id == 3
    assert chosen.logprob == pytest.approx(math.log(0.1), abs=1e-5)
    assert [token for token, _ in chosen.top] == [0, 1]
    assert best.top[0][1] == pytest.approx(math.log(0.5), abs=1e-5)
    assert logprobs_of(LOGITS.unsqueeze(0), [1], 0)[0].top == ()
