"""Each codec: sizes to the byte, error of one quantization, rotation, and payloads that are not what they say."""

from dataclasses import replace

import pytest
import torch

from cachecore.kv.codecs.contract import CodecError, KvFacts, Origin
from cachecore.kv.codecs.quantizers import _pack_bits, _unpack_bits, hadamard
from cachecore.kv.codecs.registry import CODECS, codec_named
from cachecore.kv.layout import LayerKv
from cachecore.kv.rope import RopeTable, rope_table
from cachecore.kv.variants import Pairing, RopeConfig, RopeError, RotaryLayout
from cachecore.scope import Fidelity

TOKENS, HEADS, DIM = 300, 3, 64
LATER = Origin(layer=7, position=64)
LOSSY = [name for name in CODECS if name != "raw"]
ERRORS = {"i8": 0.008, "fp8": 0.03, "i4h": 0.11, "lm3h": 0.19}
"""Relative L2 of values that are normal numbers: 3-bit Lloyd-Max has distortion 0.0345 = 0.186^2 (Max 1960)."""
KEY_ERRORS = {**ERRORS, "lm3h": ERRORS["i4h"]}


@pytest.fixture(scope="module")
def table() -> RopeTable:
    return rope_table(RopeConfig("yarn", 10_000.0, DIM, factor=8.0, original_max_positions=256), 2048)


def kv_of(dtype: torch.dtype = torch.bfloat16, tokens: int = TOKENS, seed: int = 3) -> LayerKv:
    generator = torch.Generator().manual_seed(seed)
    keys, values = torch.randn(2, tokens, HEADS, DIM, generator=generator).to(dtype)
    return LayerKv(keys, values)


def relative(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got.double() - want.double()).norm() / want.double().norm())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_raw_at_the_same_position_is_a_copy(table: RopeTable, dtype: torch.dtype) -> None:
    kv = kv_of(dtype)
    payload, facts = CODECS["raw"].encode(kv, LATER, table)
    assert payload.nbytes == CODECS["raw"].payload_bytes(facts) == 2 * TOKENS * HEADS * DIM * dtype.itemsize
    got = CODECS["raw"].decode(payload, facts, 64, table)
    assert torch.equal(got.keys, kv.keys)
    assert torch.equal(got.values, kv.values)
    assert bytes(payload[: 2 * dtype.itemsize]) == kv.keys.view(torch.uint8).numpy().tobytes()[: 2 * dtype.itemsize]


def test_raw_turns_keys_for_another_position(table: RopeTable) -> None:
    before = kv_of(torch.float32)
    stored = LayerKv(table.span(64, TOKENS).turn(before.keys), before.values)
    payload, facts = CODECS["raw"].encode(stored, LATER, table)
    got = CODECS["raw"].decode(payload, facts, 1500, table)
    assert relative(got.keys, table.span(1500, TOKENS).turn(before.keys)) < 1e-6
    assert torch.equal(got.values, before.values)


@pytest.mark.parametrize("position", [64, 1500])
@pytest.mark.parametrize("name", LOSSY)
def test_lossy_codecs_err_as_their_levels_do_wherever_the_keys_go(table: RopeTable, name: str, position: int) -> None:
    before = kv_of(torch.float32)
    stored = LayerKv(table.span(64, TOKENS).turn(before.keys), before.values)
    payload, facts = CODECS[name].encode(stored, LATER, table)
    got = CODECS[name].decode(payload, facts, position, table)
    wanted = table.span(position, TOKENS).turn(before.keys)
    for part, true, bound in zip(got, (wanted, before.values), (KEY_ERRORS[name], ERRORS[name]), strict=True):
        assert 0.3 * bound < relative(part, true) < bound
    assert got.keys.dtype is torch.float32


@pytest.mark.parametrize("name", LOSSY)
def test_encoding_decoded_kv_again_changes_no_key_by_more_than_rounding(table: RopeTable, name: str) -> None:
    """The grid is position-neutral: what was decoded elsewhere lies on it, up to its scale's last bit."""
    stored = kv_of(torch.float32)
    payload, facts = CODECS[name].encode(stored, LATER, table)
    elsewhere = CODECS[name].decode(payload, facts, 900, table)
    again, _ = CODECS[name].encode(elsewhere, LATER._replace(position=900), table)
    twice = CODECS[name].decode(again, replace(facts, position=900), 64, table)
    once = CODECS[name].decode(payload, facts, 64, table)
    assert relative(twice.keys, once.keys) < ERRORS[name]


@pytest.mark.parametrize(
    ("name", "ratio"), [("raw", 1.0), ("i8", 1.939), ("fp8", 1.939), ("i4h", 3.556), ("lm3h", 4.129)]
)
def test_sizes_against_bf16(table: RopeTable, name: str, ratio: float) -> None:
    kv = kv_of()
    payload, facts = CODECS[name].encode(kv, LATER, table)
    assert payload.nbytes == CODECS[name].payload_bytes(facts)
    assert 2 * TOKENS * HEADS * DIM * 2 / payload.nbytes == pytest.approx(ratio, rel=1e-3)


@pytest.mark.parametrize("name", ["i4h", "lm3h"])
def test_sinks_are_kept_at_eight_bits(table: RopeTable, name: str) -> None:
    kv, codec = kv_of(torch.float32), CODECS[name]
    payload, facts = codec.encode(kv, Origin(7, 2), table)
    assert payload.nbytes == codec.payload_bytes(facts) > codec.payload_bytes(replace(facts, position=4))
    got = codec.decode(payload, facts, 2, table)
    for part, wanted in zip(got, kv, strict=True):
        assert relative(part[:2], wanted[:2]) < ERRORS["i8"]
        assert relative(part[2:4], wanted[2:4]) > 8 * ERRORS["i8"]


def test_lm3h_is_a_quarter_from_the_beginning_of_a_prompt_on() -> None:
    facts = KvFacts("lm3h", 0, 0, 800, HEADS, DIM, DIM, "bfloat16")
    assert 2 * 800 * HEADS * DIM * 2 / CODECS["lm3h"].payload_bytes(facts) > 4.0


@pytest.mark.parametrize("name", CODECS)
@pytest.mark.parametrize("tokens", [0, 1, 3])
def test_short_runs_and_layers_without_positions(name: str, tokens: int) -> None:
    kv = kv_of(torch.float32, tokens)
    payload, facts = CODECS[name].encode(kv, LATER, None)
    got = CODECS[name].decode(bytes(payload), facts, 9999, None)
    assert got.keys.shape == (tokens, HEADS, DIM)
    torch.testing.assert_close(got.keys, kv.keys, atol=0.8, rtol=0.2)


@pytest.mark.parametrize("name", CODECS)
def test_zeros_outliers_and_tiny_numbers_stay_finite(table: RopeTable, name: str) -> None:
    keys = torch.zeros(4, 1, DIM)
    keys[1, 0, 5] = 3e4
    keys[2] = 1e-30
    payload, facts = CODECS[name].encode(LayerKv(keys, keys.clone()), LATER, table)
    got = CODECS[name].decode(payload, facts, 64, table)
    assert torch.isfinite(got.keys).all()
    torch.testing.assert_close(got.values[0], keys[0], rtol=0, atol=1e-29)
    assert float(got.values[1, 0, 5]) == pytest.approx(3e4, rel=0.35)


@pytest.mark.parametrize("name", CODECS)
def test_mla_has_a_latent_and_no_values(name: str) -> None:
    layout = RotaryLayout(Pairing.INTERLEAVED, offset=512)
    table = rope_table(RopeConfig("default", 10_000.0, 64, layout=layout), 256)
    latent = torch.randn(20, 1, 576, generator=torch.Generator().manual_seed(1))
    stored = LayerKv(table.span(3, 20).turn(latent), torch.empty(20, 1, 0))
    payload, facts = CODECS[name].encode(stored, Origin(5, 3), table)
    got = CODECS[name].decode(payload, facts, 100, table)
    assert got.values.shape == (20, 1, 0)
    # More numbers under one scale spread further: even levels lie a little wider apart.
    assert relative(got.keys, table.span(100, 20).turn(latent)) < 1.2 * ERRORS.get(name, 1e-6)


@pytest.mark.parametrize("name", CODECS)
def test_payloads_of_another_size_or_codec_are_refused(table: RopeTable, name: str) -> None:
    payload, facts = CODECS[name].encode(kv_of(), LATER, table)
    for wrong in (payload[:-1], bytes(payload) + b"\0"):
        with pytest.raises(CodecError, match="its header says"):
            CODECS[name].decode(wrong, facts, 64, table)
    with pytest.raises(CodecError, match="cannot read other"):
        CODECS[name].decode(payload, replace(facts, codec="other"), 64, table)
    with pytest.raises(RopeError, match="leave"):
        CODECS[name].decode(payload, facts, 2000, table)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"dtype": "int8"}, "dtype 'int8'"),
        ({"layer": -1}, "not negative"),
        ({"tokens": -1}, "not negative"),
    ],
)
def test_facts_that_make_no_sense_are_refused(change: dict, reason: str) -> None:
    facts = KvFacts("i8", 0, 0, 16, HEADS, DIM, DIM, "bfloat16")
    with pytest.raises(CodecError, match=reason):
        replace(facts, **change)


def test_shapes_that_do_not_fit_are_refused() -> None:
    keys = torch.zeros(4, 2, 12)
    with pytest.raises(CodecError, match="no multiple"):
        CODECS["lm3h"].encode(LayerKv(keys, keys), LATER, None)
    with pytest.raises(CodecError, match="no KV of one layer"):
        CODECS["raw"].encode(LayerKv(keys, keys[:3]), LATER, None)
    with pytest.raises(CodecError, match="'zip' is not one of raw, i8"):
        codec_named("zip")


def test_fidelity_follows_codec_and_position() -> None:
    raw = KvFacts("raw", 0, 64, 16, HEADS, DIM, DIM, "float32")
    assert raw.fidelity_at(64) is Fidelity.EXACT
    assert replace(raw, codec="i8").fidelity_at(64) is Fidelity.QUANTIZED
    assert replace(raw, codec="i8").fidelity_at(65) is raw.fidelity_at(65) is Fidelity.ROTATED


@pytest.mark.parametrize("dim", [1, 8, 64, 96, 576])
def test_the_hadamard_transform_undoes_itself(dim: int) -> None:
    matrix = hadamard(dim)
    torch.testing.assert_close(matrix @ matrix, torch.eye(dim))
    assert torch.equal(matrix, matrix.t())


def test_bits_are_packed_first_lowest() -> None:
    flags = torch.tensor([[1, 0, 0, 0, 0, 0, 0, 0, 1, 1, 0, 0, 0, 0, 0, 1]], dtype=torch.uint8)
    assert _pack_bits(flags).tolist() == [[1, 0b10000011]]
    every = torch.arange(256, dtype=torch.uint8)
    assert torch.equal(_pack_bits(_unpack_bits(every).to(torch.uint8)), every)
