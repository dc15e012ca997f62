"""The forward pass beside transformers, on tiny random models written to disk as transformers writes them."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel, Qwen2Config

from tests.workers.reference.support import TINY
from workers.reference.config import ModelConfig, ModelError
from workers.reference.model import KvTensors, LlamaModel, Segment
from workers.reference.weights import load_weights

CPU = torch.device("cpu")
SIZE = 4
SHAPE = {name: value for name, value in TINY.items() if name not in ("architectures", "rope_theta")}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {"rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0, "original_max_position_embeddings": 32}
VARIANTS: dict[str, Any] = {
    "tied": LlamaConfig(**SHAPE),
    "untied": LlamaConfig(**{**SHAPE, "tie_word_embeddings": False}),
    "biases": LlamaConfig(**SHAPE, attention_bias=True),
    "llama3": LlamaConfig(**SHAPE, rope_parameters=LLAMA3),
    "yarn": LlamaConfig(**SHAPE, rope_parameters=YARN),
    "one kv head": LlamaConfig(**{**SHAPE, "num_key_value_heads": 1}),
    "qwen2": Qwen2Config(**SHAPE, use_sliding_window=False),
}
PROMPT = [(index * 37 + 11) % 97 for index in range(50)]


def write_model(config: Any, directory: Path, **saving: Any) -> PreTrainedModel:
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.3)
    model.save_pretrained(directory, **saving)
    return model


def read_model(directory: Path, dtype: torch.dtype = torch.float32) -> LlamaModel:
    config = ModelConfig.load(directory)
    return LlamaModel(config, load_weights(directory, config, dtype, CPU), 256)


def kv_of(model: LlamaModel, blocks: int = 64) -> KvTensors:
    return KvTensors(model.config, blocks, SIZE, model.dtype, CPU)


@pytest.mark.parametrize("name", VARIANTS)
def test_logits_equal_those_of_transformers(name: str, tmp_path: Path) -> None:
    theirs = write_model(VARIANTS[name], tmp_path)
    with torch.inference_mode():
        expected = theirs(torch.tensor([PROMPT])).logits[0]
    ours = read_model(tmp_path)
    blocks = list(range(20))
    logits = ours.forward([Segment(PROMPT, 0, blocks, all_logits=True)], kv_of(ours))
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)


def test_chunks_decodes_and_neighbours_change_nothing(tmp_path: Path) -> None:
    write_model(VARIANTS["tied"], tmp_path)
    model = read_model(tmp_path)
    alone = model.forward([Segment(PROMPT, 0, list(range(13)), all_logits=True)], kv_of(model))
    kv = kv_of(model)
    first, second = [40, 3, 44, 9, 45, 1, 30, 12, 5, 33, 50, 60, 7], list(range(13, 26))
    other = PROMPT[::-1]
    # Chunks that end within a block, beside another sequence's; then both decode, at unequal lengths.
    got = [model.forward([Segment(PROMPT[:7], 0, first, True), Segment(other[:21], 0, second)], kv)[:7]]
    got.append(model.forward([Segment(other[21:23], 21, second), Segment(PROMPT[7:31], 7, first, True)], kv)[1:])
    for index in range(31, 50):
        decoded = model.forward(
            [Segment([PROMPT[index]], index, first), Segment([other[index - 8]], index - 8, second)], kv
        )
        got.append(decoded[:1])
    torch.testing.assert_close(torch.cat(got), alone, rtol=1e-4, atol=1e-4)


def test_sharded_and_half_precision_weights(tmp_path: Path) -> None:
    theirs = write_model(VARIANTS["untied"], tmp_path / "whole")
    theirs.to(torch.bfloat16).save_pretrained(tmp_path / "shards", max_shard_size="10KB")
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 2
    with torch.inference_mode():
        reread = AutoModelForCausalLM.from_pretrained(tmp_path / "shards", dtype=torch.float32)
        expected = reread(torch.tensor([PROMPT])).logits[0, -1:]
    ours = read_model(tmp_path / "shards")
    logits = ours.forward([Segment(PROMPT, 0, list(range(13)))], kv_of(ours))
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)


def test_bfloat16_runs_and_stays_near(tmp_path: Path) -> None:
    write_model(VARIANTS["tied"], tmp_path)
    exact, rounded = read_model(tmp_path), read_model(tmp_path, torch.bfloat16)
    logits = [model.forward([Segment(PROMPT, 0, list(range(13)))], kv_of(model)) for model in (exact, rounded)]
    assert logits[1].dtype == torch.float32
    assert float(torch.cosine_similarity(*logits)) > 0.99


def test_weights_that_do_not_fit_are_named(tmp_path: Path) -> None:
    write_model(VARIANTS["tied"], tmp_path)
    config = ModelConfig.load(tmp_path)
    with pytest.raises(ModelError, match=r"layers.2.*no tensor|no tensor.*layers.2"):
        load_weights(tmp_path, ModelConfig.parse({**TINY, "num_hidden_layers": 3}), torch.float32, CPU)
    with pytest.raises(ModelError, match="has shape"):
        load_weights(tmp_path, ModelConfig.parse({**TINY, "vocab_size": 98}), torch.float32, CPU)
    (tmp_path / "model.safetensors").write_bytes(b"not tensors")
    with pytest.raises(ModelError, match="cannot be read"):
        load_weights(tmp_path, config, torch.float32, CPU)
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"a": "../elsewhere.safetensors"}}')
    with pytest.raises(ModelError, match="outside its directory"):
        load_weights(tmp_path, config, torch.float32, CPU)
