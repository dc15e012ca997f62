import json
from pathlib import Path

import pytest

from workers.reference.config import ModelConfig, ModelError

BASE = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
}


def test_defaults_follow_transformers() -> None:
    config = ModelConfig.parse(BASE)
    assert (config.kv_heads, config.head_dim, config.max_positions) == (8, 8, 2048)
    assert not config.tied_embeddings
    assert config.rope.theta == 10_000.0
    assert config.kv_elements_per_token == 2 * 3 * 8 * 8


def test_end_tokens_come_from_the_generation_config(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**BASE, "eos_token_id": 2}))
    assert ModelConfig.load(tmp_path).eos_token_ids == (2,)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 9]}))
    assert ModelConfig.load(tmp_path).eos_token_ids == (7, 9)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"architectures": ["GemmaForCausalLM"]}, "GemmaForCausalLM is not served"),
        ({"sliding_window": 4096}, "sliding-window"),
        ({"hidden_act": "gelu"}, "activation 'gelu'"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantized"),
        ({"num_key_value_heads": 3}, "cannot share"),
        ({"hidden_size": None}, "config.json"),
        ({"vocab_size": "many"}, "config.json"),
    ],
)
def test_unsupported_models_are_refused_with_the_reason(change: dict, reason: str) -> None:
    with pytest.raises(ModelError, match=reason):
        ModelConfig.parse({**BASE, **change})


def test_an_unused_window_is_no_obstacle() -> None:
    document = {**BASE, "architectures": ["Qwen2ForCausalLM"], "sliding_window": 4096, "use_sliding_window": False}
    assert ModelConfig.parse(document).layers == 3


def test_an_unreadable_directory_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"config\.json cannot be read"):
        ModelConfig.load(tmp_path)
