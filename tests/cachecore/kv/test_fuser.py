"""The fuser on a small random model: exactness where it is promised, selectors against naive ones, and propagation."""

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from cachecore.kv.fuser.context import Context, Passage, Projected, stitch
from cachecore.kv.fuser.fuse import METHODS, fuse
from cachecore.kv.fuser.passes import extend, recompute
from cachecore.kv.fuser.propagation import Propagation
from cachecore.kv.fuser.selectors import SELECTORS, attention_scores, deviation_scores
from cachecore.kv.rope import rope_table
from cachecore.kv.variants import RopeConfig
from workers.reference.config import ModelConfig
from workers.reference.model import KvTensors, LlamaModel, Segment
from workers.reference.weights import random_weights

LAYERS = 6
CONFIG: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
}
SYSTEM = [3, 1, 4, 1, 5, 9]
PASSAGES = [[(index * 31 + start * 7 + 11) % 97 for index in range(24)] for start in range(4)]
QUESTION = [8, 80, 18, 42, 7]


@pytest.fixture(scope="module")
def model() -> LlamaModel:
    torch.set_num_threads(1)
    config = ModelConfig.parse(CONFIG)
    return LlamaModel(config, random_weights(config, 2), 256)


def prefill(model: LlamaModel, token_ids: Sequence[int], first: int = 0) -> Tensor:
    """Logits of tokens `first` to the last, by the engine's own forward pass."""
    kv = KvTensors(model.config, 64, 4, model.dtype, model.device)
    return model.forward([Segment(token_ids, 0, list(range(64)), all_logits=True)], kv)[first:]


def computed(model: LlamaModel, before: Sequence[int], token_ids: Sequence[int]) -> Passage:
    """KV out of the engine's pages, computed behind `before`."""
    kv = KvTensors(model.config, 64, 4, model.dtype, model.device)
    whole = [*before, *token_ids]
    model.forward([Segment(whole, 0, list(range(64)))], kv)
    keys, values = (pool.flatten(1, 2)[:, len(before) : len(whole)] for pool in (kv.keys, kv.values))
    return Passage(token_ids, keys, values, len(before))


def context_of(model: LlamaModel, alone: bool = False) -> Context:
    """Passages cached behind the system prompt (the first is exact) or alone, put in a row."""
    passages = [computed(model, [], SYSTEM)._replace(exact=True)]
    for index, token_ids in enumerate(PASSAGES):
        passage = computed(model, [] if alone else SYSTEM, token_ids)
        passages.append(passage._replace(exact=index == 0 and not alone, alone=alone))
    return stitch(passages, model.rope)


def kl(wanted: Tensor, got: Tensor) -> float:
    wanted, got = wanted.log_softmax(-1), got.log_softmax(-1)
    return float((wanted.exp() * (wanted - got)).sum(-1).mean())


WHOLE = [*SYSTEM, *(token for passage in PASSAGES for token in passage)]


def test_an_exact_context_extends_as_the_engine_does(model: LlamaModel) -> None:
    context = stitch([computed(model, [], WHOLE)._replace(exact=True)], model.rope)
    got = extend(model, context, torch.tensor(QUESTION), len(QUESTION))
    torch.testing.assert_close(got, prefill(model, [*WHOLE, *QUESTION], len(WHOLE)), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(extend(model, context, torch.tensor(QUESTION)), got[-1:])


@pytest.mark.parametrize("alone", [False, True])
@pytest.mark.parametrize("method", METHODS)
def test_everything_recomputed_is_full_prefill(model: LlamaModel, method: str, alone: bool) -> None:
    question = torch.tensor(QUESTION)
    wanted = prefill(model, [*WHOLE, *QUESTION], len(WHOLE))
    stale = context_of(model, alone)
    assert kl(wanted, extend(model, stale, question, len(QUESTION))) > 1e-3
    fused = fuse(model, stale, question, METHODS[method], 1.0)
    assert abs(kl(wanted, extend(model, fused, question, len(QUESTION)))) <= 1e-5
    exact = computed(model, [], WHOLE)
    torch.testing.assert_close(fused.keys, exact.keys, rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(fused.values, exact.values, rtol=1e-3, atol=1e-4)


def test_stitched_keys_are_turned_to_where_they_stand(model: LlamaModel) -> None:
    context = context_of(model)
    # Layer 0 depends on the token alone, so moving its keys is all there is to do.
    torch.testing.assert_close(context.keys[0], computed(model, [], WHOLE).keys[0], rtol=1e-4, atol=1e-5)
    assert context.exact.nonzero().squeeze(1).tolist() == list(range(len(SYSTEM) + 24))
    assert context.passage.tolist() == [0] * 6 + [1] * 24 + [2] * 24 + [3] * 24 + [4] * 24
    assert context.budget(0.15) == round(0.15 * 96)


def test_the_given_context_stays_as_it_was(model: LlamaModel) -> None:
    context = context_of(model)
    before = context.copy()
    fuse(model, context, torch.tensor(QUESTION))
    assert torch.equal(context.keys, before.keys)
    assert torch.equal(context.values, before.values)


def test_a_recomputed_row_sees_no_future(model: LlamaModel) -> None:
    """KV behind a row may be anything: the row stays the same. Rows before it matter."""
    rows = torch.tensor([35, 50, 70, 101])
    context, spoiled, other = context_of(model), context_of(model), context_of(model)
    recompute(model, context, rows)
    for token in set(range(51, 102)) - {70, 101}:
        spoiled.keys[:, token], spoiled.values[:, token] = 1e3, -1e3
    recompute(model, spoiled, rows)
    assert torch.equal(spoiled.keys[:, rows[:2]], context.keys[:, rows[:2]])
    assert torch.equal(spoiled.values[:, rows[:2]], context.values[:, rows[:2]])
    other.values[:, 34] += 1.0
    recompute(model, other, rows)
    assert not torch.allclose(other.values[2:, rows[0]], context.values[2:, rows[0]], atol=1e-4)


def test_without_propagation_only_the_chosen_change(model: LlamaModel) -> None:
    context = context_of(model)
    fused = fuse(model, context, torch.tensor(QUESTION), METHODS["query_attention"], 0.2)
    changed = (fused.values != context.values).flatten(2).any(-1)
    rows = SELECTORS["query_attention"](model, context, torch.tensor(QUESTION), context.budget(0.2)).rows
    assert len(rows) == context.budget(0.2) == 19
    assert set(changed[1:].any(0).nonzero().squeeze(1).tolist()) == set(rows.tolist())
    assert not context.exact[rows].any()


def test_propagation_leaves_exact_tokens_alone(model: LlamaModel) -> None:
    context = context_of(model)
    fused = fuse(model, context, torch.tensor(QUESTION), METHODS["residual_propagation"], 0.2)
    changed = (fused.values != context.values).flatten(2).any(-1)[1:].all(0)
    assert torch.equal(changed, ~context.exact)
    alone = context_of(model, alone=True)
    rows, anchors = SELECTORS["query_and_anchors"](model, alone, torch.tensor(QUESTION), 30)
    plan = Propagation.plan(alone, rows, anchors, model.rope)
    assert plan is not None
    sinks = {start + offset for start in (6, 30, 54, 78) for offset in (0, 1)}
    first_passage = set(range(6, 30))
    assert not (sinks | first_passage) & set(plan.fitted.tolist())
    corrected = plan.known[len(plan.fitted) :] + plan.stretch.start
    assert set(corrected.tolist()) == set(range(30, 102)) - set(rows.tolist())
    # Corrected as one stretch: what else lies in it must be recomputed, or it would be touched.
    stretch = set(range(102)[plan.stretch])
    assert set(corrected.tolist()) <= stretch <= set(corrected.tolist()) | set(rows.tolist())


def naive_attention_scores(model: LlamaModel, context: Context, question: Sequence[int]) -> Tensor:
    """Token by token, head by head; layers 1 to 4 of 6."""
    size, groups = len(context), 2
    scores = torch.zeros(size)
    hidden = model.embed(torch.tensor(question))
    turns = model.rope.span(size, len(question))
    for layer in range(LAYERS):
        queries, keys, values = model.project(layer, hidden, turns)
        keys, values = torch.cat((context.keys[layer], keys)), torch.cat((context.values[layer], values))
        mixed = torch.zeros_like(queries)
        for row in range(len(question)):
            for head in range(4):
                seen = list(range(size + row + 1))
                logits = keys[seen, head // groups] @ queries[row, head] / math.sqrt(8)
                for token in context.private_sinks.nonzero().squeeze(1).tolist():
                    logits[token] = float("-inf")
                weights = logits.softmax(0)
                mixed[row, head] = weights @ values[seen, head // groups]
                if 1 <= layer < 5:
                    lengths = (values[:size, head // groups] @ model.output_weight(layer)[head]).norm(dim=-1)
                    scores += weights[:size] * lengths / len(question)
        hidden = model.absorb(layer, hidden, mixed)
    return scores


@pytest.mark.parametrize("alone", [False, True])
def test_attention_scores_are_those_of_a_naive_pass(model: LlamaModel, alone: bool) -> None:
    context = context_of(model, alone)
    got = attention_scores(model, context, torch.tensor(QUESTION))
    torch.testing.assert_close(got, naive_attention_scores(model, context, QUESTION), rtol=1e-3, atol=1e-5)
    assert bool((got[context.private_sinks] == 0).all())


def test_deviation_is_the_distance_of_layer_one(model: LlamaModel) -> None:
    context, exact = context_of(model), computed(model, [], WHOLE)
    wanted = sum(
        (part[1] - stale[1]).square().sum((1, 2))
        for part, stale in ((exact.keys, context.keys), (exact.values, context.values))
    )
    got = deviation_scores(model, context)
    torch.testing.assert_close(got, wanted, rtol=1e-3, atol=1e-5)
    assert float(got[context.exact].max()) < 1e-6 < float(got[~context.exact].max())
    rows = SELECTORS["kv_deviation"](model, context, torch.tensor(QUESTION), 10).rows
    assert sorted(got.topk(10).indices.tolist()) == rows.tolist()


def test_first_k_takes_as_many_of_each_passage(model: LlamaModel) -> None:
    rows = SELECTORS["first_k"](model, context_of(model), torch.tensor(QUESTION), 8).rows
    assert rows.tolist() == [30, 31, 32, 54, 55, 56, 78, 79]
    alone = SELECTORS["first_k"](model, context_of(model, alone=True), torch.tensor(QUESTION), 8).rows
    assert alone.tolist() == [6, 7, 30, 31, 54, 55, 78, 79]


def test_hybrid_is_a_third_first_tokens(model: LlamaModel) -> None:
    context, question = context_of(model), torch.tensor(QUESTION)
    rows = SELECTORS["hybrid"](model, context, question, 18).rows
    first = {30, 31, 54, 55, 78, 79}
    scores = attention_scores(model, context, question).clone()
    scores[list(first)], scores[context.exact] = -1.0, -1.0
    assert set(rows.tolist()) == first | set(scores.topk(12).indices.tolist())


def test_anchors_are_a_quarter_spread_over_the_rest(model: LlamaModel) -> None:
    context, question = context_of(model), torch.tensor(QUESTION)
    rows, anchors = SELECTORS["query_and_anchors"](model, context, question, 20)
    assert (len(rows), int(anchors.sum())) == (20, 5)
    best = SELECTORS["query_attention"](model, context, question, 15).rows
    assert set(rows[~anchors].tolist()) == set(best.tolist())
    passages = context.passage[rows[anchors]]
    assert passages.unique().tolist() == [2, 3, 4]


@pytest.mark.parametrize("name", SELECTORS)
def test_sinks_of_passages_computed_alone_are_always_chosen(model: LlamaModel, name: str) -> None:
    context = context_of(model, alone=True)
    rows = SELECTORS[name](model, context, torch.tensor(QUESTION), 12).rows.tolist()
    assert {6, 7, 30, 31, 54, 55, 78, 79} <= set(rows)
    assert len(rows) == 12


@pytest.mark.parametrize("name", SELECTORS)
def test_selectors_keep_to_what_there_is(model: LlamaModel, name: str) -> None:
    context, question = context_of(model), torch.tensor(QUESTION)
    assert len(SELECTORS[name](model, context, question, 0).rows) == 0
    everything = SELECTORS[name](model, context, question, 500).rows
    assert everything.tolist() == list(range(30, 102))


TOKENS, HEADS, DIM = 200, 2, 8


def stale_layer(seed: int = 1) -> tuple[Context, Tensor, Tensor]:
    """One layer of random KV in two passages behind a settled one, and rows: every fourth token of theirs."""
    generator = torch.Generator().manual_seed(seed)
    keys, values = torch.randn(2, 1, TOKENS, HEADS, DIM, generator=generator)
    passage = torch.tensor([1] * 40 + [2] * 80 + [3] * 80)
    none = torch.zeros(TOKENS, dtype=torch.bool)
    context = Context(torch.zeros(TOKENS, dtype=torch.int64), keys, values, passage, none, none, 0)
    rows = torch.arange(40, TOKENS, 4)
    return context, rows, torch.ones_like(rows, dtype=torch.bool)


def propagate(key_residual: Tensor, value_residual: Tensor) -> tuple[float, float]:
    """How much of residuals [TOKENS, HEADS, DIM] (keys before rotation) is left on the tokens not recomputed."""
    rope = rope_table(RopeConfig("default", 10_000.0, DIM), 256)
    context, rows, anchors = stale_layer()
    true_keys = context.keys[0] + rope.span(0, TOKENS).turn(key_residual)
    true_values = context.values[0] + value_residual
    plan = Propagation.plan(context, rows, anchors, rope)
    assert plan is not None
    fresh = Projected(torch.empty(0), true_keys[rows], true_values[rows])
    plan.apply(context.keys[0], context.values[0], fresh)
    left = ~torch.isin(torch.arange(TOKENS), torch.cat((rows, torch.arange(40))))
    assert torch.equal(context.keys[0, :40], stale_layer()[0].keys[0, :40])
    return tuple(
        float((true[left] - now[0, left]).norm() / residual[left].norm())
        for true, now, residual in (
            (true_keys, context.keys, key_residual),
            (true_values, context.values, value_residual),
        )
    )


def test_a_shared_shift_is_propagated_to_all() -> None:
    shift = torch.randn(2, 1, HEADS, DIM, generator=torch.Generator().manual_seed(4)).expand(2, TOKENS, HEADS, DIM)
    keys_left, values_left = propagate(*shift)
    # Shrunk as by ten more rows that saw no shift: 40 rows keep about six sevenths.
    assert max(keys_left, values_left) == pytest.approx(1 / 7, abs=0.01)


def test_a_shift_of_each_passage_and_a_linear_part_are_propagated() -> None:
    generator = torch.Generator().manual_seed(4)
    by_passage = torch.randn(4, HEADS, DIM, generator=generator)[stale_layer()[0].passage]
    mixing = 0.3 * torch.randn(HEADS * DIM, HEADS * DIM, generator=generator) / math.sqrt(HEADS * DIM)
    linear = (stale_layer()[0].values[0].flatten(1) @ mixing).view(TOKENS, HEADS, DIM)
    keys_left, values_left = propagate(by_passage, by_passage + linear)
    assert keys_left < 0.3
    assert values_left < 0.35


def test_noise_is_not_propagated() -> None:
    noise = torch.randn(2, TOKENS, HEADS, DIM, generator=torch.Generator().manual_seed(4))
    assert propagate(*noise) == pytest.approx((1.0, 1.0), abs=0.04)


def test_an_outlier_moves_the_others_little() -> None:
    quiet = 0.01 * torch.randn(2, TOKENS, HEADS, DIM, generator=torch.Generator().manual_seed(4))
    loud = quiet.clone()
    loud[:, 44] = 50.0
    assert max(propagate(*loud)) < 1.2


def test_too_few_rows_are_not_fitted() -> None:
    rope = rope_table(RopeConfig("default", 10_000.0, DIM), 256)
    context, rows, anchors = stale_layer()
    assert Propagation.plan(context, rows[:7], anchors[:7], rope) is None
    assert Propagation.plan(context, rows[:8], anchors[:8], rope) is not None
