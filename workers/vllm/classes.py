"""To which class of workers a vLLM instance belongs: whose KV it may read.

The reference worker's digest, made of the same checkpoint in the same dtype, where that worker could serve the model:
then both are one class. Any other model has a digest of all that is in its checkpoint and its configuration.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

import torch

from cachecore.kv.rope import RopeTable, rope_table
from workers.reference.compatibility import digest_of, fingerprint_of
from workers.reference.config import ModelConfig, ModelError
from workers.reference.weights import TensorReader, stream_weights
from workers.transfer.shape import KvShape
from workers.vllm.settings import SettingsError

_BESIDE_THE_POINT = re.compile(r"_|transformers_version$")
"""Of a configuration: who wrote it, and where it lay."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """What vLLM has loaded."""

    directory: Path
    document: Mapping[str, Any]
    """Its `config.json`, as vLLM has it after all overrides."""
    dtype: torch.dtype
    positions: int
    """The longest context that is served."""


@dataclass(frozen=True, slots=True)
class KvClass:
    compatibility: bytes
    rope: RopeTable | None
    """None where it is not known how keys are turned."""

    def shape(self, layers: int, kv_heads: int, head_dim: int, block_size_tokens: int, dtype: torch.dtype) -> KvShape:
        name = str(dtype).removeprefix("torch.")
        return KvShape(self.compatibility, layers, kv_heads, head_dim, block_size_tokens, name)


def class_of(checkpoint: Checkpoint) -> KvClass:
    """Reads all weights once. Raises SettingsError."""
    try:
        config = ModelConfig.parse(checkpoint.document)
        tensors = stream_weights(checkpoint.directory, config, checkpoint.dtype)
        digest = digest_of(config, checkpoint.dtype, tensors, checkpoint.positions)
        return KvClass(digest, rope_table(config.rope, checkpoint.positions))
    except ModelError:
        return KvClass(_digest_of_all(checkpoint), None)


def _digest_of_all(checkpoint: Checkpoint) -> bytes:
    try:
        said = {key: value for key, value in checkpoint.document.items() if not _BESIDE_THE_POINT.match(key)}
        facts = json.dumps(said, sort_keys=True, default=str)
        digest = blake2b(facts.encode(), digest_size=16, person=b"ropeway.vllm.v1")
        digest.update(repr((str(checkpoint.dtype), checkpoint.positions)).encode())
        with TensorReader(checkpoint.directory, checkpoint.dtype, torch.device("cpu")) as reader:
            for name in reader.names():
                digest.update(name.encode() + fingerprint_of(reader.read_any(name)))
    except (ModelError, KeyError) as error:
        raise SettingsError(f"the weights cannot be told from others: {error}") from error
    return digest.digest()
