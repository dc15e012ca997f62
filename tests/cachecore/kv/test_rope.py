"""Tables and re-rotation against an implementation of their own: numpy in fp64, from the papers' formulas.

What an engine "would have stored" is a key of one hidden state, rotated by the engine's own table in fp32 and rounded
to its dtype: the measure for moved keys.
"""

import math
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from cachecore.kv import kernels
from cachecore.kv.rope import RopeTable, attention_factor, inverse_frequencies, rope_table, rotate
from cachecore.kv.variants import Pairing, RopeConfig, RopeError, RotaryLayout, parse_rope

HEAD_DIM = 64
THETA = 100_000.0
POSITIONS = 131_072
SHORT = [1.0 + 0.05 * pair for pair in range(HEAD_DIM // 2)]
LONG = [1.0 + 0.5 * pair for pair in range(HEAD_DIM // 2)]
SHIFTS = [(1024, 8192), (100_000, 37)]

VARIANTS: dict[str, dict[str, Any]] = {
    "default": {},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "ntk": {"rope_type": "ntk", "factor": 4.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "yarn": {"rope_type": "yarn", "factor": 16.0, "original_max_position_embeddings": 8192},
    "yarn-mscale": {
        "rope_type": "yarn",
        "factor": 40.0,
        "original_max_position_embeddings": 4096,
        "mscale": 0.707,
        "mscale_all_dim": 1.2,
    },
    "longrope": {
        "rope_type": "longrope",
        "short_factor": SHORT,
        "long_factor": LONG,
        "original_max_position_embeddings": 4096,
    },
    "proportional": {"rope_type": "proportional", "partial_rotary_factor": 0.5},
}


def document(scaling: dict) -> dict:
    return {"rope_theta": THETA, "max_position_embeddings": POSITIONS, "rope_scaling": scaling or None}


def papers_table(scaling: dict, positions: np.ndarray) -> tuple[np.ndarray, float]:
    """Angles [positions, pairs] and what multiplies cos and sin, from the formulas, in fp64."""
    pair = np.arange(HEAD_DIM // 2, dtype=np.float64)
    frequency = THETA ** (-2 * pair / HEAD_DIM)
    factor, scale = scaling.get("factor", 1.0), 1.0
    original = scaling.get("original_max_position_embeddings", 0)
    match scaling.get("rope_type"):
        case "linear":
            frequency = frequency / factor
        case "ntk":
            frequency = (THETA * factor ** (HEAD_DIM / (HEAD_DIM - 2))) ** (-2 * pair / HEAD_DIM)
        case "llama3":
            wavelength = 2 * np.pi / frequency
            smooth = (original / wavelength - 1.0) / (4.0 - 1.0)
            frequency = np.select(
                [wavelength < original / 4.0, wavelength > original / 1.0],
                [frequency, frequency / factor],
                (1 - smooth) * frequency / factor + smooth * frequency,
            )
        case "yarn":
            # The published code turns rotations into pairs, rounded outwards: beta_fast 32, beta_slow 1.
            bound = [HEAD_DIM * math.log(original / (beta * 2 * math.pi)) / (2 * math.log(THETA)) for beta in (32, 1)]
            low, high = math.floor(bound[0]), math.ceil(bound[1])
            ramp = np.clip((pair - low) / (high - low), 0, 1)
            frequency = ramp * frequency / factor + (1 - ramp) * frequency
            if "mscale" in scaling:
                scale = (0.1 * scaling["mscale"] * math.log(factor) + 1) / (
                    0.1 * scaling["mscale_all_dim"] * math.log(factor) + 1
                )
            else:
                scale = 0.1 * math.log(factor) + 1
        case "longrope":
            frequency = frequency / np.array(LONG)
            scale = math.sqrt(1 + math.log(POSITIONS / original) / math.log(original))
        case "proportional":
            frequency = np.where(pair < HEAD_DIM // 4, frequency, 0.0)
    return np.outer(positions, frequency), scale


@cache
def engine_table(name: str, pairing: Pairing = Pairing.HALVES) -> RopeTable:
    return rope_table(parse_rope(document(VARIANTS[name]), HEAD_DIM, pairing), POSITIONS)


def states(tokens: int = 128, seed: int = 5) -> torch.Tensor:
    """Keys before rotation, with the outlier channels of real models."""
    drawn = torch.randn(tokens, 3, HEAD_DIM, generator=torch.Generator().manual_seed(seed))
    return drawn * torch.linspace(0.2, 8.0, HEAD_DIM)


def relative(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got.double() - want.double()).norm() / want.double().norm())


@pytest.mark.parametrize("name", VARIANTS)
def test_tables_are_those_of_the_papers(name: str) -> None:
    positions = np.array([0, 1, 2, 37, 511, 1024])
    angles, scale = papers_table(VARIANTS[name], positions)
    table = engine_table(name)
    # Angles of 1,000 in fp32 are off by 6e-5 at most: the engines' tables are as well.
    np.testing.assert_allclose(table.cos[positions].double().numpy(), np.cos(angles) * scale, atol=2e-4)
    np.testing.assert_allclose(table.sin[positions].double().numpy(), np.sin(angles) * scale, atol=2e-4)


@pytest.mark.parametrize("name", [name for name in VARIANTS if name not in ("default", "ntk")])
@pytest.mark.parametrize("length", [2048, POSITIONS])
def test_frequencies_and_factor_are_those_of_transformers(name: str, length: int) -> None:
    theirs = LlamaConfig(
        hidden_size=HEAD_DIM * 2,
        num_attention_heads=2,
        head_dim=HEAD_DIM,
        max_position_embeddings=POSITIONS,
        rope_parameters={"rope_theta": THETA, **VARIANTS[name]},
    )
    expected, factor = ROPE_INIT_FUNCTIONS[VARIANTS[name]["rope_type"]](theirs, torch.device("cpu"), seq_len=length)
    ours = parse_rope(document(VARIANTS[name]), HEAD_DIM)
    torch.testing.assert_close(inverse_frequencies(ours, length), expected, rtol=3e-7, atol=0)
    assert attention_factor(ours) == pytest.approx(factor, rel=1e-12)


@pytest.mark.parametrize("pairing", Pairing)
def test_rotation_turns_the_pairs_of_its_layout(pairing: Pairing) -> None:
    table, keys = engine_table("yarn-mscale", pairing), states(16)
    angles, scale = papers_table(VARIANTS["yarn-mscale"], np.arange(500, 516))
    members = keys.double().numpy()
    halves = pairing is Pairing.HALVES
    first, second = np.split(members, 2, -1) if halves else (members[..., 0::2], members[..., 1::2])
    turned = (first + 1j * second) * np.exp(1j * angles)[:, None] * scale
    got = table.span(500, 16).turn(keys).double().numpy()
    got_first, got_second = np.split(got, 2, -1) if halves else (got[..., 0::2], got[..., 1::2])
    np.testing.assert_allclose(got_first + 1j * got_second, turned, atol=2e-3)


@pytest.mark.parametrize(("source", "target"), SHIFTS)
@pytest.mark.parametrize("pairing", Pairing)
@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-6), (torch.bfloat16, 3e-3), (torch.float16, 5e-4)])
def test_moved_keys_are_what_the_engine_would_have_stored(
    name: str, pairing: Pairing, source: int, target: int, dtype: torch.dtype, bound: float
) -> None:
    table, keys = engine_table(name, pairing), states()
    stored = table.span(source, 128).turn(keys).to(dtype)
    wanted = table.span(target, 128).turn(keys).to(dtype)
    moved = table.span(source, 128).towards(table.span(target, 128)).turn(stored)
    assert moved.dtype is dtype
    assert relative(moved, wanted) <= bound


@pytest.mark.parametrize(("source", "target"), SHIFTS)
def test_a_table_rounded_by_its_engine_is_matched(source: int, target: int) -> None:
    """vLLM rounds cos and sin to the model's dtype: no rotation any more, and undone all the same."""
    whole = engine_table("yarn-mscale")
    table = RopeTable(whole.cos.bfloat16().float(), whole.sin.bfloat16().float(), whole.layout)
    keys = states()
    stored, wanted = table.span(source, 128).turn(keys), table.span(target, 128).turn(keys)
    moved = table.span(source, 128).towards(table.span(target, 128)).turn(stored)
    assert relative(moved, wanted) <= 1e-6
    turned_only = whole.span(source, 128).towards(whole.span(target, 128)).turn(stored)
    assert relative(turned_only, wanted) > 1e-4


def test_the_wrong_pairing_is_far_off() -> None:
    keys = states()
    halves, interleaved = engine_table("default"), engine_table("default", Pairing.INTERLEAVED)
    stored, wanted = halves.span(1024, 128).turn(keys), halves.span(8192, 128).turn(keys)
    moved = interleaved.span(1024, 128).towards(interleaved.span(8192, 128)).turn(stored)
    assert relative(moved, wanted) > 0.1


def test_shifts_are_kept_and_in_torch_written_out_for_each_head() -> None:
    table, keys = engine_table("yarn"), states()
    source, target = table.span(7, 128), table.span(900, 128)
    stored = source.turn(keys)
    shift = table.shift(7, 900, 128, 3)
    assert shift.cos.shape == (128, 1 if kernels.AVAILABLE else 3, HEAD_DIM // 2)
    assert torch.equal(shift.turn(stored), source.towards(target).turn(stored))
    assert torch.equal(table.shift(7, None, 128, 3).turn(stored), source.inverse().turn(stored))
    assert torch.equal(table.shift(None, 900, 128, 3).turn(keys), target.turn(keys))
    assert table.shift(7, 900, 128, 3) is shift


def test_unrotating_gives_the_key_before_rotation() -> None:
    table, keys = engine_table("longrope"), states()
    rows = table.span(100_000, 128)
    assert relative(rows.inverse().turn(rows.turn(keys)), keys) <= 1e-6


def test_partial_rotary_and_the_latent_of_mla_pass_unchanged() -> None:
    layout = RotaryLayout(Pairing.INTERLEAVED, offset=40)
    plain = rope_table(RopeConfig("default", THETA, 16), 64)
    rows = RopeTable(plain.cos, plain.sin, layout).span(9, 32)
    keys = states(32)
    turned = rows.turn(keys)
    assert torch.equal(turned[..., :40], keys[..., :40])
    assert torch.equal(turned[..., 56:], keys[..., 56:])
    inner = rotate(keys[..., 40:56].contiguous(), rows.cos, rows.sin, RotaryLayout(Pairing.INTERLEAVED))
    assert torch.equal(turned[..., 40:56], inner)
    assert not torch.equal(inner, keys[..., 40:56])


def mrope_table(interleaved: bool) -> RopeTable:
    scaling = {"type": "mrope", "mrope_section": [12, 10, 10], "mrope_interleaved": interleaved}
    return rope_table(parse_rope(document(scaling), HEAD_DIM), 4096)


def axes_of(interleaved: bool) -> list[int]:
    """Which of time, height, width each pair follows: in blocks (Qwen2-VL), or in turn, time last (Qwen3-VL)."""
    if not interleaved:
        return [0] * 12 + [1] * 10 + [2] * 10
    return [0, 1, 2] * 10 + [0, 0]


@pytest.mark.parametrize("interleaved", [False, True])
def test_sections_follow_their_own_positions(interleaved: bool) -> None:
    table = mrope_table(interleaved)
    positions = torch.tensor([[5, 6], [70, 80], [900, 1000]])
    rows = table.rows(positions)
    for pair, axis in enumerate(axes_of(interleaved)):
        assert torch.equal(rows.cos[:, 0, pair], table.cos[positions[axis], pair])
        assert torch.equal(rows.sin[:, 0, pair], table.sin[positions[axis], pair])


def test_text_moves_all_sections_by_one_shift() -> None:
    table, keys = mrope_table(True), states(8)
    positions = torch.arange(100, 108)
    text = table.rows(positions.expand(3, -1))
    assert torch.equal(text.cos, table.rows(positions).cos)
    image = torch.stack((positions, positions + 3, positions + 11))
    moved = table.rows(image).towards(table.rows(image + 2000)).turn(table.rows(image).turn(keys))
    assert relative(moved, table.rows(image + 2000).turn(keys)) <= 1e-6


def test_slices_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "kernels", None)
    rows, keys = engine_table("default").span(50, 128), states()
    whole = rows.turn(keys)
    monkeypatch.setattr("cachecore.kv.slicing._SLICE_ELEMENTS", 1000)
    assert torch.equal(rows.turn(keys), whole)
    in_place = keys.clone()
    assert rows.turn(in_place, out=in_place) is in_place
    assert torch.equal(in_place, whole)
    assert rows.turn(keys[:0]).shape == (0, 3, HEAD_DIM)


def test_positions_beyond_the_table_are_refused() -> None:
    table = mrope_table(False)
    for positions in ([4096], [-1]):
        with pytest.raises(RopeError, match=r"leave 0\.\.4095"):
            table.rows(torch.tensor(positions))
    with pytest.raises(RopeError, match=r"4090\.\.4100"):
        table.span(4090, 11)


def test_fingerprints_tell_tables_and_layouts_apart() -> None:
    tables = [engine_table("default"), engine_table("linear"), engine_table("default", Pairing.INTERLEAVED)]
    assert len({table.fingerprint() for table in tables}) == 3
    assert engine_table("default").fingerprint() == tables[0].fingerprint()
