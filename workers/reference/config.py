"""What a model is: its shape and its rotary embedding, read from a Hugging Face `config.json`.

Whatever the engine would compute wrongly is refused here with the reason, before any weight is read.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cachecore.kv import variants as rope_variants
from cachecore.kv.variants import RopeConfig, RopeError

_ARCHITECTURES = frozenset({"LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM"})
"""All of them are the Llama block; Qwen2 adds a bias to q, k and v, which is taken from the weights."""


class ModelError(ValueError):
    """The model cannot be served: unreadable, of another architecture, or with a feature the engine does not have."""


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The shape of a Llama-architecture model."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    norm_epsilon: float
    max_positions: int
    tied_embeddings: bool
    rope: RopeConfig
    eos_token_ids: tuple[int, ...] = ()

    @classmethod
    def load(cls, directory: Path) -> "ModelConfig":
        """Read `config.json`, and `generation_config.json` for the end tokens. Raises ModelError."""
        document = _read_json(directory / "config.json")
        generation_path = directory / "generation_config.json"
        generation = _read_json(generation_path) if generation_path.exists() else {}
        if generation.get("eos_token_id") is not None:
            document = {**document, "eos_token_id": generation["eos_token_id"]}
        return cls.parse(document)

    @classmethod
    def parse(cls, document: Mapping[str, Any]) -> "ModelConfig":
        """Check and take over a parsed `config.json`. Raises ModelError with the reason."""
        _refuse_unsupported(document)
        try:
            heads = int(document["num_attention_heads"])
            hidden_size = int(document["hidden_size"])
            head_dim = int(document.get("head_dim") or hidden_size // heads)
            config = cls(
                vocab_size=int(document["vocab_size"]),
                hidden_size=hidden_size,
                intermediate_size=int(document["intermediate_size"]),
                layers=int(document["num_hidden_layers"]),
                heads=heads,
                kv_heads=int(document.get("num_key_value_heads") or heads),
                head_dim=head_dim,
                norm_epsilon=float(document.get("rms_norm_eps", 1e-6)),
                max_positions=int(document.get("max_position_embeddings", 2048)),
                tied_embeddings=bool(document.get("tie_word_embeddings", False)),
                rope=parse_rope(document, head_dim),
                eos_token_ids=_token_ids(document.get("eos_token_id")),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise error if isinstance(error, ModelError) else ModelError(f"config.json: {error!r}") from error
        if config.heads % config.kv_heads:
            raise ModelError(f"{config.heads} query heads cannot share {config.kv_heads} key-value heads")
        return config

    @property
    def kv_elements_per_token(self) -> int:
        """Numbers kept per token: a key and a value for each layer and key-value head."""
        return 2 * self.layers * self.kv_heads * self.head_dim


def parse_rope(document: Mapping[str, Any], head_dim: int) -> RopeConfig:
    """The rotary embedding of a `config.json`: every model served here pairs halves. Raises ModelError."""
    try:
        rope = rope_variants.parse_rope(document, head_dim)
    except RopeError as error:
        raise ModelError(str(error)) from error
    if rope.layout.sections:
        raise ModelError("mRoPE with sections is not supported")
    return rope


def _refuse_unsupported(document: Mapping[str, Any]) -> None:
    architectures = document.get("architectures") or ["LlamaForCausalLM"]
    if not _ARCHITECTURES & set(architectures):
        raise ModelError(f"{', '.join(architectures)} is not served here (only {', '.join(sorted(_ARCHITECTURES))})")
    # Qwen2 carries a window it does not use unless told to; Mistral has no such switch.
    if document.get("sliding_window") and document.get("use_sliding_window", True):
        raise ModelError("sliding-window attention is not supported")
    if document.get("hidden_act", "silu") != "silu":
        raise ModelError(f"activation {document['hidden_act']!r} is not supported (only silu)")
    if document.get("quantization_config"):
        raise ModelError("quantized safetensors are not supported: use the unquantized weights or a GGUF file")


def _token_ids(value: Any) -> tuple[int, ...]:
    if value is None:
        return ()
    return tuple(int(token) for token in value) if isinstance(value, list) else (int(value),)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        document = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ModelError(f"{path.name} cannot be read: {error}") from error
    if not isinstance(document, dict):
        raise ModelError(f"{path.name} is not a JSON object")
    return document
