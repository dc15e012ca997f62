"""The compatibility class: equal exactly where workers read each other's KV."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.workers.reference.support import TINY
from workers.reference.config import ModelConfig
from workers.reference.transfer.pages import Pages, Stretch, stretches_of
from workers.reference.transfer.shape import KvShape, compatibility_of
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
    shapes = [KvShape.of(CONFIG, WEIGHTS, size, 256) for size in (4, 16)]
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


# ---- pages -----------------------------------------------------------------------------------------------------------


def test_blocks_as_stretches() -> None:
    assert stretches_of([4, 5, 6, 2, 9, 8]) == [Stretch(4, 7), Stretch(2, 3), Stretch(9, 10), Stretch(8, 9)]
    assert stretches_of([]) == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("blocks", [[3, 4, 5], [5, 1, 2]])
def test_what_is_written_is_read_and_sent(blocks: list[int], dtype: torch.dtype) -> None:
    keys, values = (torch.randn(2, 7, 4, 3, 8).to(dtype) for _ in range(2))
    source, target = Pages(keys, values), Pages(torch.zeros_like(keys), torch.zeros_like(values))
    kv = source.read(1, stretches_of(blocks))
    expected = [pool[1, blocks].flatten(0, 1) for pool in (keys, values)]
    assert all(torch.equal(*pair) for pair in zip(kv, expected, strict=True))
    sent = b"".join(source.payload(1, stretches_of(blocks)))
    assert sent == b"".join(part.contiguous().view(torch.uint8).numpy().tobytes() for part in expected)
    target.write(1, stretches_of(blocks), kv)
    assert torch.equal(target.keys[1, blocks], keys[1, blocks])
    assert torch.equal(target.values[1, blocks], values[1, blocks])
    untouched = [block for block in range(7) if block not in blocks]
    assert not target.keys[1, untouched].any()
    assert not target.keys[0].any()
