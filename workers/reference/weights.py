"""Weights as the forward pass wants them, from the safetensors of a Hugging Face directory.

Matrices are kept transposed, [in, out]: on CPU `x @ w` then runs 2-4x faster for the batches of a decode step and as
fast as ever for long prompts. Query, key and value are one matrix, gate and up another: fewer, larger multiplications.
"""

import json
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from workers.reference.config import ModelConfig, ModelError


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One block. D = head_dim, H = hidden, F = intermediate; biases are None where the model has none."""

    attention_norm: Tensor
    """[H]"""
    qkv: Tensor
    """[H, (heads + 2 * kv_heads) * D]: queries, then keys, then values."""
    qkv_bias: Tensor | None
    output: Tensor
    """[heads * D, H]"""
    output_bias: Tensor | None
    mlp_norm: Tensor
    """[H]"""
    gate_up: Tensor
    """[H, 2 * F]: gate, then up."""
    down: Tensor
    """[F, H]"""

    def tensors(self) -> Iterator[Tensor]:
        parts = (getattr(self, name) for name in self.__slots__)
        return (part for part in parts if part is not None)


@dataclass(frozen=True, slots=True)
class Weights:
    embedding: Tensor
    """[vocabulary, H]"""
    layers: tuple[LayerWeights, ...]
    norm: Tensor
    """[H]"""
    head: Tensor
    """[vocabulary, H]; the embedding itself where they are tied."""

    def tensors(self) -> Iterator[Tensor]:
        yield from (self.embedding, self.norm)
        if self.head is not self.embedding:
            yield self.head
        for layer in self.layers:
            yield from layer.tensors()


class TensorReader:
    """Tensors of a directory by name, whether in one file or sharded with an index. A context manager."""

    def __init__(self, directory: Path, dtype: torch.dtype, device: torch.device) -> None:
        self._dtype = dtype
        self._device = device
        self._stack = ExitStack()
        self._files = {}
        for path in _weight_files(directory):
            try:
                handle = self._stack.enter_context(safe_open(path, framework="pt"))
            except (OSError, SafetensorError) as error:
                raise ModelError(f"{path.name} cannot be read: {error}") from error
            self._files.update(dict.fromkeys(handle.keys(), handle))

    def __enter__(self) -> "TensorReader":
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def __contains__(self, name: str) -> bool:
        return name in self._files

    def read(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """The tensor, converted to the engine's dtype and device. Raises ModelError when absent or misshapen."""
        if name not in self._files:
            raise ModelError(f"the weights have no tensor {name!r}")
        tensor: Tensor = self._files[name].get_tensor(name)
        if tuple(tensor.shape) != shape:
            raise ModelError(f"tensor {name!r} has shape {tuple(tensor.shape)}, the configuration says {shape}")
        return tensor.to(device=self._device, dtype=self._dtype)

    def names(self) -> list[str]:
        return sorted(self._files)

    def read_any(self, name: str) -> Tensor:
        """One of `names`, of whatever shape; converted where it is of numbers with a point."""
        tensor: Tensor = self._files[name].get_tensor(name)
        return tensor.to(self._device, self._dtype) if tensor.is_floating_point() else tensor.to(self._device)

    def read_optional(self, name: str, shape: tuple[int, ...]) -> Tensor | None:
        return self.read(name, shape) if name in self else None


def load_weights(directory: Path, config: ModelConfig, dtype: torch.dtype, device: torch.device) -> Weights:
    """Read all weights. Raises ModelError naming what is missing or does not fit."""
    with TensorReader(directory, dtype, device) as reader:
        embedding = reader.read("model.embed_tokens.weight", (config.vocab_size, config.hidden_size))
        tied = config.tied_embeddings or "lm_head.weight" not in reader
        return Weights(
            embedding=embedding,
            layers=tuple(_layer(reader, config, index) for index in range(config.layers)),
            norm=reader.read("model.norm.weight", (config.hidden_size,)),
            head=embedding if tied else reader.read("lm_head.weight", (config.vocab_size, config.hidden_size)),
        )


def stream_weights(directory: Path, config: ModelConfig, dtype: torch.dtype) -> Iterator[Tensor]:
    """What `Weights.tensors` gives for a directory, with no more than one layer in memory. Raises ModelError."""
    with TensorReader(directory, dtype, torch.device("cpu")) as reader:
        vocabulary = config.vocab_size, config.hidden_size
        yield reader.read("model.embed_tokens.weight", vocabulary)
        yield reader.read("model.norm.weight", (config.hidden_size,))
        if not config.tied_embeddings and "lm_head.weight" in reader:
            yield reader.read("lm_head.weight", vocabulary)
        for index in range(config.layers):
            yield from _layer(reader, config, index).tensors()


def random_weights(config: ModelConfig, seed: int, dtype: torch.dtype = torch.float32) -> Weights:
    """Weights drawn at random, for tests and dry runs: no biases, and a head of its own, since a tied one repeats
    the last token whatever came before."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        values: Tensor = torch.randn(*shape, generator=generator) * shape[0] ** -0.5
        return values.to(dtype)

    hidden, query, key = config.hidden_size, config.heads * config.head_dim, config.kv_heads * config.head_dim
    layers = tuple(
        LayerWeights(
            attention_norm=torch.ones(hidden, dtype=dtype),
            qkv=draw(hidden, query + 2 * key),
            qkv_bias=None,
            output=draw(query, hidden),
            output_bias=None,
            mlp_norm=torch.ones(hidden, dtype=dtype),
            gate_up=draw(hidden, 2 * config.intermediate_size),
            down=draw(config.intermediate_size, hidden),
        )
        for _ in range(config.layers)
    )
    embedding = draw(config.vocab_size, hidden) * config.vocab_size**0.5
    head = draw(hidden, config.vocab_size).t().contiguous()
    return Weights(embedding, layers, torch.ones(hidden, dtype=dtype), head)


def _layer(reader: TensorReader, config: ModelConfig, index: int) -> LayerWeights:
    name = f"model.layers.{index}."
    hidden, middle = config.hidden_size, config.intermediate_size
    query, key = config.heads * config.head_dim, config.kv_heads * config.head_dim
    rows = {"q": query, "k": key, "v": key}
    qkv = [reader.read(f"{name}self_attn.{part}_proj.weight", (rows[part], hidden)) for part in rows]
    biases = [reader.read_optional(f"{name}self_attn.{part}_proj.bias", (rows[part],)) for part in rows]
    present = [bias for bias in biases if bias is not None]
    if present and len(present) < len(biases):
        raise ModelError(f"layer {index} has a bias for some of q, k, v and not for others")
    gate_up = [reader.read(f"{name}mlp.{part}_proj.weight", (middle, hidden)) for part in ("gate", "up")]
    return LayerWeights(
        attention_norm=reader.read(f"{name}input_layernorm.weight", (hidden,)),
        qkv=torch.cat(qkv).t().contiguous(),
        qkv_bias=torch.cat(present) if present else None,
        output=reader.read(f"{name}self_attn.o_proj.weight", (hidden, query)).t().contiguous(),
        output_bias=reader.read_optional(f"{name}self_attn.o_proj.bias", (hidden,)),
        mlp_norm=reader.read(f"{name}post_attention_layernorm.weight", (hidden,)),
        gate_up=torch.cat(gate_up).t().contiguous(),
        down=reader.read(f"{name}mlp.down_proj.weight", (hidden, middle)).t().contiguous(),
    )


def _weight_files(directory: Path) -> list[Path]:
    """The files that hold weights. A shard named by the index must lie in the directory itself."""
    index = directory / "model.safetensors.index.json"
    if index.exists():
        try:
            names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ModelError(f"{index.name} cannot be read: {error!r}") from error
        if any(Path(name).name != name for name in names):
            raise ModelError(f"{index.name} names a file outside its directory")
        return [directory / name for name in names]
    if (directory / "model.safetensors").exists():
        return [directory / "model.safetensors"]
    raise ModelError(f"{directory} has no model.safetensors and no model.safetensors.index.json")
