"""Prompts from passages that were computed elsewhere: exact where everything is recomputed, close where a little is."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from cachecore.kv.fuser.fuse import METHODS
from tests.workers.reference.support import TINY
from workers.reference import fusing
from workers.reference.config import ModelConfig
from workers.reference.fusing import Found, Kv, Repair
from workers.reference.model import KvTensors, LlamaModel, Segment
from workers.reference.weights import random_weights

WIDE: dict[str, Any] = {**TINY, "num_hidden_layers": 6, "max_position_embeddings": 512}
BLOCK = 4


@pytest.fixture(scope="module")
def model() -> LlamaModel:
    torch.set_num_threads(1)
    config = ModelConfig.parse(WIDE)
    return LlamaModel(config, random_weights(config, 2), 512)


def text(seed: int, count: int) -> list[int]:
    return [(index * index * 31 + index * (7 + seed) + seed * 11) % 97 for index in range(count)]


SYSTEM, PASSAGES, QUESTION = text(9, 18), [text(seed, 40) for seed in range(4)], text(5, 11)
SERVED = [*SYSTEM, *(token for passage in PASSAGES for token in passage)]
GAP = text(7, 13)


def logits_of(model: LlamaModel, kv: KvTensors, token_ids: Sequence[int], start: int) -> Tensor:
    """Of the tokens from `start` on, by the engine's own pass over what is in its pages before."""
    segment = Segment(token_ids[start:], start, list(range(128)), all_logits=True)
    return model.forward([segment], kv)


def pages(model: LlamaModel) -> KvTensors:
    return KvTensors(model.config, 128, BLOCK, model.dtype, model.device)


def served(model: LlamaModel, token_ids: Sequence[int]) -> Kv:
    kv = pages(model)
    logits_of(model, kv, token_ids, 0)
    return Kv(*(pool.flatten(1, 2)[:, : len(token_ids)] for pool in (kv.keys, kv.values)))


def cut(kv: Kv, start: int, end: int) -> Kv:
    return Kv(kv.keys[:, start:end], kv.values[:, start:end])


def found(kv: Kv, source: int, count: int, target: int) -> Found:
    return Found(target, cut(kv, source, source + count), source, alone=source == 0)


def answer(model: LlamaModel, prompt: Sequence[int], prefix: Kv, repaired: Kv, end: int) -> Tensor:
    """The logits of the tokens from `end` on, from pages that hold the prefix and what was repaired before it."""
    kv = pages(model)
    repaired = cut(repaired, 0, end - prefix.keys.shape[1])
    for layer in range(model.layers):
        keys, values = (torch.cat(parts) for parts in zip(*((p[0][layer], p[1][layer]) for p in (prefix, repaired))))  # noqa: B905
        kv.write(layer, torch.arange(end), keys, values)
    return logits_of(model, kv, prompt, end)


def kl(wanted: Tensor, got: Tensor) -> float:
    wanted, got = wanted.log_softmax(-1), got.log_softmax(-1)
    return float((wanted.exp() * (wanted - got)).sum(-1).mean())


@pytest.fixture(scope="module")
def cache(model: LlamaModel) -> Kv:
    return served(model, SERVED)


def reordered(cache: Kv, gap: Sequence[int] = ()) -> tuple[list[int], list[Found]]:
    """Passages 2, 0, 3 behind the system prompt, at offsets that blocks know nothing of, and a question."""
    prompt, passages = [*SYSTEM, *gap], []
    for number in (2, 0, 3):
        passages.append(found(cache, len(SYSTEM) + 40 * number, 40, len(prompt)))
        prompt += [*PASSAGES[number], *gap]
    return [*prompt, *QUESTION], passages


@pytest.fixture(params=[512, 0], ids=["with the question", "without it"])
def following_max(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(fusing, "FOLLOWING_TOKENS_MAX", request.param)
    return int(request.param)


@pytest.mark.parametrize("gap", [[], GAP], ids=["passages only", "with gaps"])
def test_everything_recomputed_is_full_prefill(
    model: LlamaModel, cache: Kv, gap: list[int], following_max: int
) -> None:
    prompt, passages = reordered(cache, gap)
    prefix, end = cut(cache, 0, len(SYSTEM)), passages[-1].end
    repaired = Repair(1.0)(model, prompt, prefix, passages)
    exact = cut(served(model, prompt), len(SYSTEM), len(prompt) if following_max else end)
    torch.testing.assert_close(repaired.kv, exact, rtol=1e-3, atol=1e-4)
    wanted = logits_of(model, pages(model), prompt, 0)[end:]
    assert abs(kl(wanted, answer(model, prompt, prefix, repaired.kv, end))) <= 1e-5
    assert (repaired.logits is not None) is bool(following_max)
    if repaired.logits is not None:
        torch.testing.assert_close(repaired.logits, wanted[-1:], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("gap", [[], GAP], ids=["passages only", "with gaps"])
def test_a_little_recomputed_is_closer_than_turning_alone(model: LlamaModel, cache: Kv, gap: list[int]) -> None:
    prompt, passages = reordered(cache, gap)
    prefix, end = cut(cache, 0, len(SYSTEM)), passages[-1].end
    wanted = logits_of(model, pages(model), prompt, 0)[end:]
    turned, repaired = (
        kl(wanted, answer(model, prompt, prefix, Repair(fraction)(model, prompt, prefix, passages).kv, end))
        for fraction in (0.0, 0.15)
    )
    assert 0 < repaired < 0.8 * turned


def test_the_question_in_the_same_pass_or_behind_it(model: LlamaModel, cache: Kv) -> None:
    """What is chosen and what is corrected does not depend on it, so neither do the answers."""
    prompt, passages = reordered(cache, GAP)
    prefix, end = cut(cache, 0, len(SYSTEM)), passages[-1].end
    repaired = Repair()(model, prompt, prefix, passages)
    assert repaired.logits is not None
    behind = answer(model, prompt, prefix, repaired.kv, end)
    torch.testing.assert_close(repaired.logits, behind[-1:], rtol=1e-4, atol=1e-4)


def test_many_rows_attend_in_groups(model: LlamaModel, cache: Kv, monkeypatch: pytest.MonkeyPatch) -> None:
    prompt, passages = reordered(cache, GAP)
    prefix = cut(cache, 0, len(SYSTEM))
    together = Repair()(model, prompt, prefix, passages)
    monkeypatch.setattr(fusing, "_GROUP_ROWS", 7)
    torch.testing.assert_close(Repair()(model, prompt, prefix, passages), together, rtol=1e-4, atol=1e-4)


def test_gaps_are_computed_and_never_guessed(model: LlamaModel, cache: Kv) -> None:
    """Layer 0 depends on tokens alone: there, all of it is exact. So is a gap with nothing stale before it."""
    prompt, passages = reordered(cache, GAP)
    start = len(SYSTEM)
    exact = cut(served(model, prompt), start, len(prompt))
    repaired = Repair(0.0)(model, prompt, cut(cache, 0, start), passages).kv
    torch.testing.assert_close(repaired.keys[0], exact.keys[0], rtol=1e-4, atol=1e-5)
    first_gap = passages[0].start - start
    torch.testing.assert_close(cut(repaired, 0, first_gap), cut(exact, 0, first_gap), rtol=1e-3, atol=1e-4)


def test_passages_computed_alone_and_no_prefix(model: LlamaModel) -> None:
    prompt = [*PASSAGES[1], *PASSAGES[0], *QUESTION]
    passages = [Found(at * 40, served(model, PASSAGES[number]), 0, alone=True) for at, number in enumerate((1, 0))]
    nothing = cut(passages[0].kv, 0, 0)
    wanted = logits_of(model, pages(model), prompt, 0)[80:]
    turned, repaired, exact = (
        kl(wanted, answer(model, prompt, nothing, Repair(fraction)(model, prompt, nothing, passages).kv, 80))
        for fraction in (0.0, 0.15, 1.0)
    )
    assert abs(exact) <= 1e-5
    assert repaired < turned


@pytest.mark.parametrize("method", METHODS)
def test_every_method_takes_prompts_with_gaps(model: LlamaModel, cache: Kv, method: str) -> None:
    prompt, passages = reordered(cache, GAP)
    prefix = cut(cache, 0, len(SYSTEM))
    exact = cut(served(model, prompt), len(SYSTEM), len(prompt))
    repaired = Repair(0.15, METHODS[method])(model, prompt, prefix, passages).kv
    assert repaired.keys.shape == exact.keys.shape
    assert bool(repaired.keys.isfinite().all())
    assert not torch.allclose(repaired.values[-1], exact.values[-1])


def test_what_is_given_stays_as_it_was(model: LlamaModel, cache: Kv) -> None:
    prompt, passages = reordered(cache)
    before = Kv(cache.keys.clone(), cache.values.clone())
    Repair()(model, prompt, cut(cache, 0, len(SYSTEM)), passages)
    assert torch.equal(cache.keys, before.keys)
    assert torch.equal(cache.values, before.values)


def test_passages_must_fit_the_prompt(model: LlamaModel, cache: Kv) -> None:
    prompt, passages = reordered(cache)
    prefix = cut(cache, 0, len(SYSTEM))
    wrong = [
        [],
        passages[::-1],
        [passages[0]._replace(start=len(SYSTEM) - 1)],
        [passages[0]._replace(start=len(prompt) - 40)],
    ]
    for given in wrong:
        with pytest.raises(ValueError, match="passage"):
            Repair()(model, prompt, prefix, given)
