"""Sampled answers are compared with exact KV: on a small model whose KV went through codecs good and bad."""

from collections.abc import Callable, Sequence

import pytest
import torch

from cachecore.kv.calibration import KL_BUDGETS
from cachecore.kv.codecs.contract import Origin
from cachecore.kv.codecs.registry import CODECS
from cachecore.kv.layout import LayerKv
from cachecore.scope import Fidelity
from policies.state.guard import GuardSettings, QualityGuard, Sample
from tests.workers.reference.support import TINY
from workers.kv_quality import Approximation, QualityJournal
from workers.reference.config import ModelConfig
from workers.reference.guard import Guard, GuardOptions, divergence, exact_logits
from workers.reference.model import KvTensors, LlamaModel, Segment
from workers.reference.weights import random_weights

I8 = Approximation("acme", "i8", Fidelity.QUANTIZED)
EVERY = GuardOptions(share=1.0, answer_tokens_max=4, step_tokens=8)
BLOCKS = range(8)

Spoil = Callable[[LayerKv], LayerKv]


@pytest.fixture(scope="module")
def model() -> LlamaModel:
    torch.set_num_threads(1)
    config = ModelConfig.parse(TINY)
    return LlamaModel(config, random_weights(config, 3), 128)


def prompt_of(seed: int, count: int = 30) -> list[int]:
    return torch.randint(2, 97, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def answer(
    model: LlamaModel,
    guard: Guard,
    prompt: Sequence[int],
    spoil: Spoil | None = None,
    request_id: str = "r",
    count: int = 6,
) -> None:
    """Greedily, from a prompt's KV that has been through `spoil`."""
    kv = KvTensors(model.config, len(BLOCKS), 16, model.dtype, model.device)
    logits = model.forward([Segment(prompt[:-1], 0, BLOCKS)], kv)
    for layer in range(model.layers if spoil else 0):
        keys, values = (part[layer].flatten(0, 1)[: len(prompt) - 1] for part in (kv.keys, kv.values))
        spoiled = spoil(LayerKv(keys.clone(), values.clone()))  # type: ignore[misc]
        keys.copy_(spoiled.keys)
        values.copy_(spoiled.values)
    tokens = list(prompt)
    for _ in range(count):
        logits = model.forward([Segment(tokens[-1:], len(tokens) - 1, BLOCKS)], kv)[-1]
        tokens.append(int(logits.argmax()))
        guard.observe(request_id, tokens[-1], logits)
    guard.close(request_id)


def run_idle(guard: Guard) -> int:
    steps = 0
    while guard.has_work:
        guard.step()
        steps += 1
    return steps


def through(codec: str) -> Spoil:
    def code(kv: LayerKv) -> LayerKv:
        payload, facts = CODECS[codec].encode(kv, Origin(0, 0), None)
        return CODECS[codec].decode(payload, facts, 0, None)

    return code


def ruined(kv: LayerKv) -> LayerKv:
    """A codec with its scales mixed up."""
    return LayerKv(kv.keys * 3.0, kv.values.flip(0))


def test_exact_logits_are_those_of_one_prefill(model: LlamaModel) -> None:
    prompt, forced = prompt_of(1), [5, 6, 7]
    exact = exact_logits(model, prompt, forced, step_tokens=8)
    steps = 0
    while True:
        try:
            next(exact)
            steps += 1
        except StopIteration as ended:
            logits = ended.value
            break
    kv = KvTensors(model.config, len(BLOCKS), 16, model.dtype, model.device)
    whole = model.forward([Segment([*prompt, *forced[:-1]], 0, BLOCKS, all_logits=True)], kv)
    assert steps == 4  # 29 tokens before the last one of the prompt
    torch.testing.assert_close(logits, whole[-3:], atol=1e-5, rtol=1e-5)


def test_exact_kv_shows_no_divergence_and_coarser_kv_more(model: LlamaModel) -> None:
    kl = {}
    for name, spoil in (("exact", None), ("i8", through("i8")), ("i4h", through("i4h")), ("ruined", ruined)):
        journal = QualityJournal()
        guard = Guard(model, journal, EVERY)
        for seed in range(4):
            guard.consider("r", prompt_of(seed), I8)
            answer(model, guard, prompt_of(seed), spoil)
            run_idle(guard)
        kl[name] = sum(sample.kl for sample in journal.since(0).samples) / 4
    assert abs(kl["exact"]) < 1e-6
    assert 1e-6 < kl["i8"] < kl["i4h"] < kl["ruined"]


def test_a_bad_codec_trips_the_gateways_budget_within_two_hundred_samples(model: LlamaModel) -> None:
    journal, budgets = QualityJournal(), QualityGuard(GuardSettings(KL_BUDGETS))
    guard = Guard(model, journal, EVERY)
    told, trips, sampled = 0, [], 0
    while not trips and sampled < 200:
        guard.consider("r", prompt_of(sampled), I8)
        answer(model, guard, prompt_of(sampled), ruined)
        run_idle(guard)
        sampled += 1
        told, samples = journal.since(told)
        for one in samples:
            trip = budgets.record("m", Sample(**one.document()), float(sampled))
            trips += [trip] if trip else []
    assert [trip.way for trip in trips] == [("m", "acme", "i8")]
    assert sampled <= 20
    assert not budgets.allows("m", "acme", "i8", float(sampled))


def test_only_the_first_tokens_of_drawn_answers_are_kept(model: LlamaModel) -> None:
    journal = QualityJournal()
    drawn = iter([0.4, 0.6])
    guard = Guard(model, journal, GuardOptions(share=0.5, answer_tokens_max=4), lambda: next(drawn))
    for name in ("drawn", "not drawn"):
        guard.consider(name, prompt_of(1), I8)
        answer(model, guard, prompt_of(1), request_id=name)
    assert run_idle(guard) == 2  # one piece of the prompt, and the answer
    told = journal.since(0)
    assert (told.next, [sample.used for sample in told.samples]) == (1, [I8])
    assert told.samples[0].top1 == 1.0


def test_an_idle_step_is_no_longer_than_a_step_of_the_engine(model: LlamaModel) -> None:
    guard = Guard(model, QualityJournal(), EVERY)
    guard.consider("r", prompt_of(1, 41), I8)
    answer(model, guard, prompt_of(1, 41))
    assert run_idle(guard) == 5 + 1


def test_too_many_and_too_long_answers_are_skipped_and_counted(model: LlamaModel) -> None:
    journal = QualityJournal()
    guard = Guard(model, journal, GuardOptions(share=1.0, answers_max=2, prompt_tokens_max=30))
    guard.consider("long", prompt_of(1, 31), I8)
    for name in ("a", "b", "c"):
        guard.consider(name, prompt_of(1), I8)
    assert journal.skipped == 2
    guard.close("a")  # its client left before the first token
    assert not guard.has_work
    guard.consider("d", prompt_of(1), I8)
    assert journal.skipped == 2
    guard.observe("c", 1, torch.zeros(97))
    guard.close("c")
    assert not guard.has_work


def test_a_check_that_fails_costs_that_check_alone(model: LlamaModel) -> None:
    journal = QualityJournal()
    guard = Guard(model, journal, EVERY)
    guard.consider("r", [5] * 200, I8)  # beyond the model's positions
    guard.observe("r", 5, torch.zeros(97))
    guard.close("r")
    guard.consider("s", prompt_of(2), I8)
    answer(model, guard, prompt_of(2), request_id="s")
    run_idle(guard)
    assert (journal.skipped, journal.since(0).next) == (1, 1)


def test_logits_that_are_no_numbers_are_as_bad_as_can_be() -> None:
    assert divergence(torch.zeros(2, 5), torch.full((2, 5), float("nan")))[0] == 100.0
    assert divergence(torch.zeros(2, 5), torch.zeros(2, 5)) == (0.0, 1.0)
