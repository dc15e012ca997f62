"""The compatibility class: equal exactly where workers read each other's KV."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.workers.reference.support import TINY
from workers.reference.compatibility import compatibility_of, shape_of
from workers.reference.config import ModelConfig
from workers.reference.weights import Weights, random_weights

CONFIG = ModelConfig.parse(TINY)
WEIGHTS = random_weights(CONFIG, 0)
LONGROPE: dict[str, Any] = {
    "rope_type": "longrope",
    "short_factor": [1.0] * 4,
    "long_factor": [4.0] * 4,
    "original_max_position_embeddings": 64,
    "factor": 4.0,
}


def digest(config: ModelConfig = CONFIG, weights: Weights = WEIGHTS, positions: int = 256) -> bytes:
    return compatibility_of(config, weights, positions)


def test_the_same_model_is_one_class_whatever_room_it_has() -> None:
    assert len(digest()) == 16
    assert digest(weights=random_weights(CONFIG, 0)) == digest(positions=100) == digest()
    shapes = [shape_of(CONFIG, WEIGHTS, size, 256) for size in (4, 16)]
    assert shapes[0].compatibility == shapes[1].compatibility == digest()


def test_the_digest_is_what_it_was() -> None:
    """It is stored in pools: another one makes them useless."""
    weights = Weights(torch.ones(97, 32), (), torch.ones(32), torch.ones(97, 32))
    assert digest(weights=weights).hex() == "3f07bb3ba351c2b8ebcc8c6a434b9518"


def test_every_bit_of_every_tensor_counts() -> None:
    for place, tensor in enumerate(WEIGHTS.tensors()):
        words = tensor.view(torch.int32).flatten()
        at = (7 * place + 3) % len(words)
        words[at] ^= 1
        changed = digest()
        words[at] ^= 1
        assert changed != digest()


def test_exchanged_words_count() -> None:
    """They add up to the same."""
    words = WEIGHTS.layers[0].qkv.view(torch.int32).flatten()
    before = digest()
    words[:2] = words[:2].flip(0)
    changed = digest()
    words[:2] = words[:2].flip(0)
    assert changed != before == digest()


@pytest.mark.parametrize(
    "change",
    [{"rope_theta": 10_001.0}, {"rms_norm_eps": 1e-6}, {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}],
)
def test_what_changes_the_numbers_changes_the_class(change: dict[str, Any]) -> None:
    assert digest(ModelConfig.parse({**TINY, **change})) != digest()


def test_the_dtype_is_part_of_it() -> None:
    assert digest(weights=random_weights(CONFIG, 0, torch.bfloat16)) != digest()


def test_longropes_factors_depend_on_the_length() -> None:
    config = ModelConfig.parse({**TINY, "rope_scaling": LONGROPE})
    assert digest(config, positions=64) != digest(config, positions=65)
    assert digest(config, positions=65) == digest(config, positions=256)


def test_heads_are_part_of_it() -> None:
    assert digest(replace(CONFIG, heads=8, head_dim=4)) != digest()
