"""The mean of KV over contexts, wherever each of them had it."""

from typing import Any

import pytest
import torch

from cachecore.kv.means import MeanKv
from cachecore.kv.rope import RopeTable, rope_table
from cachecore.kv.variants import RopeConfig

LAYERS, TOKENS, HEADS, DIM = 3, 20, 2, 16
TABLES: dict[str, dict[str, Any]] = {
    "default": {},
    "partial": {"rotary_dim": 8},
    "scaled": {"attention_factor": 1.4},
}


@pytest.fixture(params=TABLES)
def rope(request: pytest.FixtureRequest) -> RopeTable:
    return rope_table(
        RopeConfig(**{"kind": "default", "theta": 10_000.0, "rotary_dim": DIM, **TABLES[request.param]}), 512
    )


def stored(keys: torch.Tensor, position: int, rope: RopeTable) -> torch.Tensor:
    """As an engine would have them there."""
    rows = rope.rows(torch.arange(position, position + TOKENS))
    return torch.stack([rows.turn(layer) for layer in keys])


def drawn(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(seed)
    keys, values = torch.randn(2, LAYERS, TOKENS, HEADS, DIM)
    return keys, values


def test_it_is_the_mean_of_what_keys_are_without_rotation(rope: RopeTable) -> None:
    copies, positions = [drawn(seed) for seed in range(5)], [0, 7, 300, 491, 16]
    mean: MeanKv | None = None
    for (keys, values), position in zip(copies, positions, strict=True):
        one = MeanKv.of(stored(keys, position, rope), values, position, rope)
        mean = one if mean is None else mean.joined(one)
    assert mean is not None
    assert mean.contexts == 5
    expected = torch.stack([keys for keys, _ in copies]).mean(0)
    assert torch.allclose(mean.keys, expected, atol=1e-5)
    assert torch.allclose(mean.values, torch.stack([values for _, values in copies]).mean(0), atol=1e-6)
    assert torch.allclose(mean.keys_at(123, rope), stored(expected, 123, rope), atol=1e-5)


def test_means_join_by_what_they_are_means_of() -> None:
    rope = rope_table(RopeConfig("default", 10_000.0, DIM), 64)
    ones = [MeanKv.of(*drawn(seed), 0, rope) for seed in range(4)]
    left = ones[0].joined(ones[1]).joined(ones[2])
    both, flipped = left.joined(ones[3]), ones[3].joined(left)
    assert both.contexts == flipped.contexts == 4
    expected = torch.stack([one.values for one in ones]).mean(0)
    assert torch.allclose(both.values, expected, atol=1e-6)
    assert torch.allclose(flipped.values, expected, atol=1e-6)


def test_sums_are_fp32_whatever_the_engine_has(rope: RopeTable) -> None:
    keys, values = (part.bfloat16() for part in drawn(1))
    mean = MeanKv.of(keys, values, 5, rope).joined(MeanKv.of(keys, values, 5, rope))
    assert (mean.keys.dtype, mean.values.dtype) == (torch.float32, torch.float32)
    assert torch.equal(mean.values, values.float())
    assert torch.equal(mean.keys_at(5, rope).bfloat16(), keys)


def test_other_texts_and_models_do_not_join() -> None:
    rope = rope_table(RopeConfig("default", 10_000.0, DIM), 64)
    keys, values = drawn(1)
    with pytest.raises(ValueError, match="joins none of"):
        MeanKv.of(keys, values, 0, rope).joined(MeanKv.of(keys[:, 1:], values[:, 1:], 0, rope))
