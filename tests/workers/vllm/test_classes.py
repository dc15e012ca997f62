"""Who reads whose KV: a vLLM instance and the reference worker are one class where they have loaded the same."""

from pathlib import Path
from typing import Any

import pytest
import torch

from cachecore.kv.rope import rope_table
from tests.workers.vllm.checkpoints import save_checkpoint
from workers.reference.compatibility import shape_of
from workers.reference.config import ModelConfig
from workers.reference.weights import load_weights
from workers.vllm.classes import Checkpoint, KvClass, class_of
from workers.vllm.settings import SettingsError


def saved(directory: Path, dtype: torch.dtype = torch.float32, positions: int = 256, **changes: Any) -> KvClass:
    return class_of(Checkpoint(directory, save_checkpoint(directory, **changes), dtype, positions))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("changes", [{}, {"tie_word_embeddings": False}, {"num_hidden_layers": 3}])
def test_the_class_is_the_reference_workers(tmp_path: Path, dtype: torch.dtype, changes: dict[str, Any]) -> None:
    found = saved(tmp_path, dtype, **changes)
    config = ModelConfig.load(tmp_path)
    weights = load_weights(tmp_path, config, dtype, torch.device("cpu"))
    shape = shape_of(config, weights, 4, 256)
    assert found.shape(config.layers, config.kv_heads, config.head_dim, 4, dtype) == shape
    assert found.rope is not None
    assert torch.equal(found.rope.cos, rope_table(config.rope, 256).cos)


def test_rope_in_its_newer_spelling_is_the_same(tmp_path: Path) -> None:
    """As vLLM's own configuration has it, whatever is written in the file."""
    document = dict(save_checkpoint(tmp_path))
    older = class_of(Checkpoint(tmp_path, document, torch.float32, 256))
    theta = document.pop("rope_theta")
    document["rope_parameters"] = {"rope_type": "default", "rope_theta": theta}
    assert class_of(Checkpoint(tmp_path, document, torch.float32, 256)).compatibility == older.compatibility


@pytest.mark.parametrize(
    "changes", [{"seed": 1}, {"dtype": torch.bfloat16}, {"rope_theta": 5000.0}, {"rms_norm_eps": 1e-6}]
)
@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "UnheardForCausalLM"])
def test_what_changes_the_numbers_changes_the_class(tmp_path: Path, changes: dict[str, Any], architecture: str) -> None:
    plain = saved(tmp_path, architectures=[architecture])
    again = saved(tmp_path, architectures=[architecture])
    assert again.compatibility == plain.compatibility
    assert saved(tmp_path, architectures=[architecture], **changes).compatibility != plain.compatibility


def test_models_that_only_vllm_knows_have_a_class_and_no_table(tmp_path: Path) -> None:
    found = saved(tmp_path, architectures=["UnheardForCausalLM"])
    assert found.rope is None
    elsewhere = saved(tmp_path, architectures=["UnheardForCausalLM"], _name_or_path="/other", transformers_version="9")
    assert elsewhere.compatibility == found.compatibility


def test_weights_that_cannot_be_read_are_refused(tmp_path: Path) -> None:
    document = save_checkpoint(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(SettingsError, match=r"no model\.safetensors"):
        class_of(Checkpoint(tmp_path, document, torch.float32, 256))
