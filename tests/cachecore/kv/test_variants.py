"""What the registry answers for the configurations of known model families."""

from typing import Any

import pytest

from cachecore.kv.variants import Pairing, RopeError, Verdict, parse_rope, rope_support

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "num_hidden_layers": 4,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "rope_theta": 500_000.0,
    "max_position_embeddings": 2048,
}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 512}
YARN = {"type": "yarn", "factor": 40.0, "mscale": 0.7, "mscale_all_dim": 1.0, "original_max_position_embeddings": 128}
LONGROPE = {"type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8}


@pytest.mark.parametrize(
    ("change", "kind", "rotary_dim"),
    [
        ({}, "default", 16),
        ({"rope_scaling": LLAMA3}, "llama3", 16),
        ({"rope_scaling": {"type": "linear", "factor": 4.0}}, "linear", 16),
        ({"rope_scaling": {"type": "ntk", "factor": 4.0}}, "ntk", 16),
        ({"rope_scaling": {"type": "dynamic", "alpha": 1000.0, "factor": 1.0}}, "ntk", 16),
        ({"rope_scaling": YARN}, "yarn", 16),
        ({"rope_scaling": LONGROPE, "original_max_position_embeddings": 512}, "longrope", 16),
        ({"model_type": "phi", "partial_rotary_factor": 0.5}, "default", 8),
        ({"model_type": "gpt_neox", "rotary_pct": 0.25}, "default", 4),
        ({"rope_parameters": {"rope_type": "proportional", "partial_rotary_factor": 0.5}}, "proportional", 16),
    ],
)
def test_scalings_and_partial_rotary_are_exact(change: dict, kind: str, rotary_dim: int) -> None:
    support = rope_support({**LLAMA, **change})
    assert (support.verdict, len(support.layers)) == (Verdict.EXACT, 4)
    rope = support.layers[0]
    assert rope is not None
    assert (rope.kind, rope.rotary_dim, rope.layout.pairing) == (kind, rotary_dim, Pairing.HALVES)


@pytest.mark.parametrize("family", ["gptj", "glm4", "cohere", "llama4_text"])
def test_families_that_interleave_are_known(family: str) -> None:
    rope = rope_support({**LLAMA, "model_type": family}).layers[0]
    assert rope is not None
    assert rope.layout.pairing is Pairing.INTERLEAVED


def test_the_engine_overrules_the_family() -> None:
    unknown = {**LLAMA, "model_type": "novel"}
    assert rope_support(unknown).verdict is Verdict.REFUSED
    assert "pairs dimensions" in rope_support(unknown).reason
    rope = rope_support(unknown, Pairing.INTERLEAVED).layers[0]
    assert rope is not None
    assert rope.layout.pairing is Pairing.INTERLEAVED


def test_mla_rotates_what_stands_behind_the_latent() -> None:
    deepseek = {**LLAMA, "model_type": "deepseek_v3", "kv_lora_rank": 512, "qk_rope_head_dim": 64, "rope_scaling": YARN}
    rope = rope_support(deepseek).layers[0]
    assert rope is not None
    assert (rope.layout.offset, rope.rotary_dim, rope.layout.pairing) == (512, 64, Pairing.INTERLEAVED)


def test_mrope_is_exact_per_section() -> None:
    scaling = {"type": "mrope", "mrope_section": [2, 3, 3]}
    support = rope_support({**LLAMA, "model_type": "qwen2_vl", "rope_scaling": scaling})
    assert support.verdict is Verdict.EXACT_PER_SECTION
    rope = support.layers[0]
    assert rope is not None
    assert rope.layout.sections == (2, 3, 3)


def test_sections_must_cover_the_pairs() -> None:
    with pytest.raises(RopeError, match="do not add up to 8"):
        parse_rope({"rope_scaling": {"type": "mrope", "mrope_section": [2, 3]}}, 16)


def test_layers_may_differ() -> None:
    gemma = {**LLAMA, "model_type": "gemma3_text", "sliding_window_pattern": 2, "rope_local_base_freq": 10_000.0}
    layers = rope_support({**gemma, "rope_scaling": {"rope_type": "linear", "factor": 8.0}}).layers
    assert [(layer.kind, layer.theta) for layer in layers if layer] == [
        ("default", 10_000.0),
        ("linear", 500_000.0),
    ] * 2
    by_kind = {"full_attention": {"rope_theta": 5.0}, "sliding_attention": {"rope_theta": 7.0}}
    kinds = ["sliding_attention", "full_attention"] * 2
    newer = {**LLAMA, "model_type": "gemma3_text", "layer_types": kinds, "rope_parameters": by_kind}
    assert [layer.theta for layer in rope_support(newer).layers if layer] == [7.0, 5.0, 7.0, 5.0]


@pytest.mark.parametrize(
    "change",
    [
        {"model_type": "smollm3", "no_rope_layers": [1, 1, 1, 0]},
        {"model_type": "llama4_text", "no_rope_layer_interval": 4},
    ],
)
def test_layers_without_rotation_stay_as_they_are(change: dict) -> None:
    support = rope_support({**LLAMA, **change})
    assert [layer is None for layer in support.layers] == [False, False, False, True]
    assert "1 layers without rotation" in support.reason


def test_alibi_keys_carry_no_position() -> None:
    support = rope_support({"model_type": "bloom", "n_layer": 2})
    assert (support.verdict, support.layers) == (Verdict.EXACT, (None, None))


@pytest.mark.parametrize(
    ("document", "reason"),
    [
        ({**LLAMA, "rope_scaling": {"type": "dynamic", "factor": 2.0}}, "sequence's length"),
        ({**LLAMA, "rope_scaling": {"type": "fope"}}, "no rotation"),
        ({**LLAMA, "use_fope": True}, "no rotation"),
        ({**LLAMA, "rope_scaling": {"type": "su"}}, "'su' is not supported"),
        ({**LLAMA, "position_embedding_type": "absolute"}, "learned positions"),
        ({"model_type": "gpt2", "n_layer": 2}, "learned positions"),
        ({"model_type": "mamba", "num_hidden_layers": 2}, "recurrent state"),
        ({**LLAMA, "layer_types": ["linear_attention", "full_attention"] * 2}, "recurrent state"),
        ({**LLAMA, "dual_chunk_attention_config": {"chunk_size": 8192}}, "modulo its chunk"),
        ({"model_type": "llama"}, "config.json"),
        ({**LLAMA, "layer_types": ["full_attention"]}, "1 layer types for 4 layers"),
    ],
)
def test_what_cannot_be_moved_is_refused_with_the_reason(document: dict, reason: str) -> None:
    support = rope_support(document)
    assert (support.verdict, support.layers) == (Verdict.REFUSED, ())
    assert reason in support.reason


def test_a_text_part_is_found_within_a_multimodal_model() -> None:
    document = {"model_type": "llava", "text_config": {**LLAMA, "rope_theta": 7.0}}
    rope = rope_support(document).layers[0]
    assert rope is not None
    assert rope.theta == 7.0
