"""The class of workers that can read each other's KV, as a digest of what the KV depends on."""

from collections.abc import Iterable
from hashlib import blake2b

import torch
from torch import Tensor

from cachecore.kv.rope import attention_factor, inverse_frequencies
from workers.reference.config import ModelConfig
from workers.reference.weights import Weights
from workers.transfer.shape import KvShape

_LAYOUT = b"rotated keys, values: [tokens, kv_heads, head_dim].v1"
_SAMPLES = 4096
"""Words of each tensor that are hashed as they are, beside the sum of all."""
_WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def shape_of(config: ModelConfig, weights: Weights, block_size_tokens: int, positions: int) -> KvShape:
    """Of a worker that serves `positions` tokens at most."""
    dtype = str(weights.embedding.dtype).removeprefix("torch.")
    digest = compatibility_of(config, weights, positions)
    return KvShape(digest, config.layers, config.kv_heads, config.head_dim, block_size_tokens, dtype)


def compatibility_of(config: ModelConfig, weights: Weights, positions: int) -> bytes:
    """Of weights in memory; see `digest_of`."""
    return digest_of(config, weights.embedding.dtype, weights.tensors(), positions)


def digest_of(config: ModelConfig, dtype: torch.dtype, tensors: Iterable[Tensor], positions: int) -> bytes:
    """Digest of all that a block's bytes depend on besides tokens: shape, weights, RoPE, dtype and layout.

    `tensors` are those of `Weights.tensors`, in `dtype`; each may be gone once the next is asked for.

    RoPE goes in by the frequencies that its table is made of: two workers with tables of different lengths agree where
    both reach. (Longrope's frequencies depend on the length, and so does the digest.)
    """
    digest = blake2b(_LAYOUT, digest_size=16, person=b"ropeway.class.v1")
    shape = (config.layers, config.heads, config.kv_heads, config.head_dim, config.norm_epsilon)
    layout = config.rope.layout
    turned = (layout.pairing.value, layout.offset, layout.sections, layout.sections_interleaved)
    rope = (*turned, attention_factor(config.rope))
    digest.update(repr((shape, rope, str(dtype))).encode())
    digest.update(inverse_frequencies(config.rope, positions).numpy().tobytes())
    for tensor in tensors:
        digest.update(fingerprint_of(tensor))
    return digest.digest()


def fingerprint_of(tensor: Tensor) -> bytes:
    """Every bit of the tensor moves the sum; samples tell apart what merely sums up to the same."""
    words = tensor.contiguous().flatten().view(_WORDS[tensor.dtype.itemsize])
    total = int(words.sum(dtype=torch.int64))
    step = max(1, len(words) // _SAMPLES)
    samples = words[::step][: _SAMPLES + 1].cpu().numpy().tobytes()
    return repr((tuple(tensor.shape), total)).encode() + samples
