"""Checkpoints of random weights on disk, as Hugging Face lays them out."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from tests.workers.reference.support import TINY


def save_checkpoint(directory: Path, seed: int = 0, **changes: Any) -> Mapping[str, Any]:
    """The tiny model of the reference worker's tests, changed; its configuration."""
    document = {**TINY, **changes}
    (directory / "config.json").write_text(json.dumps(document))
    save_file(tensors_of(document, seed), directory / "model.safetensors")
    return document


def tensors_of(document: Mapping[str, Any], seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator) * shape[-1] ** -0.5

    hidden, middle = document["hidden_size"], document["intermediate_size"]
    query, key = (document[f"num_{kind}_heads"] * document["head_dim"] for kind in ("attention", "key_value"))
    found = {
        "model.embed_tokens.weight": drawn(document["vocab_size"], hidden) * hidden**0.5,
        "model.norm.weight": torch.ones(hidden),
    }
    for number in range(document["num_hidden_layers"]):
        layer = f"model.layers.{number}."
        found |= {
            f"{layer}input_layernorm.weight": torch.ones(hidden),
            f"{layer}self_attn.q_proj.weight": drawn(query, hidden),
            f"{layer}self_attn.k_proj.weight": drawn(key, hidden),
            f"{layer}self_attn.v_proj.weight": drawn(key, hidden),
            f"{layer}self_attn.o_proj.weight": drawn(hidden, query),
            f"{layer}post_attention_layernorm.weight": torch.ones(hidden),
            f"{layer}mlp.gate_proj.weight": drawn(middle, hidden),
            f"{layer}mlp.up_proj.weight": drawn(middle, hidden),
            f"{layer}mlp.down_proj.weight": drawn(hidden, middle),
        }
    return found
