"""The extension in C gives what torch gives, up to the last bit, and leaves to torch what it does not take."""

import pytest
import torch

from cachecore.kv import kernels
from cachecore.kv.codecs.contract import Origin
from cachecore.kv.codecs.registry import CODECS
from cachecore.kv.layout import LayerKv
from cachecore.kv.rope import RopeRows, RopeTable, rope_table
from cachecore.kv.variants import Pairing, RopeConfig, RotaryLayout

pytestmark = pytest.mark.skipif(not kernels.AVAILABLE, reason="the extension is not built")

TOKENS, HEADS = 70, 3
LOSSY = [name for name in CODECS if name != "raw"]
LAYOUTS = [
    RotaryLayout(),
    RotaryLayout(Pairing.INTERLEAVED),
    RotaryLayout(Pairing.HALVES, offset=6),
    RotaryLayout(Pairing.INTERLEAVED, offset=6),
]
WIDTHS = [(64, 64), (80, 64), (576, 64), (22, 14)]
"""Of vectors, and of what is rotated."""


def rows_of(layout: RotaryLayout, rotary_dim: int, heads: int = 1) -> RopeRows:
    config = RopeConfig("yarn", 10_000.0, rotary_dim, factor=16.0, original_max_positions=128)
    table = rope_table(config, 256)
    rows = RopeTable(table.cos, table.sin, layout).span(100, TOKENS)
    return rows.for_heads(heads) if heads > 1 else rows


def vectors_of(dim: int, dtype: torch.dtype) -> torch.Tensor:
    drawn = torch.randn(TOKENS, HEADS, dim, generator=torch.Generator().manual_seed(dim))
    return (drawn * torch.logspace(-3, 3, TOKENS).view(-1, 1, 1)).to(dtype)


def assert_same(got: torch.Tensor, wanted: torch.Tensor, tolerance: float = 1.2e-7) -> None:
    """Up to the last bit: a sum of two products may have been rounded once less. Where they nearly cancel, that bit is
    one of the products'."""
    assert got.dtype is wanted.dtype
    tolerance = tolerance if got.dtype is torch.float32 else 2**-8
    largest = wanted.float().abs().amax(-1, keepdim=True)
    assert bool(((got.float() - wanted.float()).abs() <= tolerance * largest).all())
    if got.dtype is torch.bfloat16:
        assert float((got != wanted).float().mean()) < 1e-2


def without(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "kernels", None)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("dim", "rotary_dim"), WIDTHS)
@pytest.mark.parametrize("turn_heads", [1, HEADS])
def test_turns_are_torchs(
    monkeypatch: pytest.MonkeyPatch,
    dtype: torch.dtype,
    layout: RotaryLayout,
    dim: int,
    rotary_dim: int,
    turn_heads: int,
) -> None:
    if layout.offset + rotary_dim > dim:
        layout = RotaryLayout(layout.pairing)
    rows, vectors = rows_of(layout, rotary_dim, turn_heads), vectors_of(dim, dtype)
    out = torch.empty_like(vectors)
    assert kernels.turn(vectors, rows, out)
    in_place = vectors.clone()
    assert rows.turn(in_place, in_place) is in_place
    without(monkeypatch)
    by_torch = rows.turn(vectors)
    assert_same(out, by_torch)
    assert torch.equal(in_place, out)
    assert not torch.equal(out, vectors)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("layout", LAYOUTS[:2])
@pytest.mark.parametrize("name", LOSSY)
def test_payloads_and_what_is_read_from_them_are_torchs(
    monkeypatch: pytest.MonkeyPatch, name: str, dtype: torch.dtype, layout: RotaryLayout
) -> None:
    table = rope_table(RopeConfig("default", 10_000.0, 64, layout=layout), 2048)
    kv = LayerKv(vectors_of(64, dtype), vectors_of(48, dtype))
    kv.values[3] = 0.0
    kv.values[4, 1] = 1e-36
    codec, origin = CODECS[name], Origin(4, 2)
    payload, facts = codec.encode(kv, origin, table)
    decoded = [codec.decode(payload, facts, 9, rope) for rope in (table, None)]
    without(monkeypatch)
    by_torch = codec.encode(kv, origin, table).payload
    # A code differs now and then, where a number lay between two; and a scale, where two were as good.
    codes, torchs = (torch.frombuffer(bytearray(one), dtype=torch.uint8) for one in (payload, by_torch))
    assert float((codes != torchs).float().mean()) < 4e-3
    for got, rope in zip(decoded, (table, None), strict=True):
        wanted = codec.decode(payload, facts, 9, rope)
        for ours, theirs in zip(got, wanted, strict=True):
            assert_same(ours, theirs, 4e-7)


@pytest.mark.parametrize("name", LOSSY)
@pytest.mark.parametrize("dim", [8, 24, 40, 96, 128])
def test_widths_of_all_kinds_err_as_torch_does(monkeypatch: pytest.MonkeyPatch, name: str, dim: int) -> None:
    """By block-diagonal transforms of 8 and 32 numbers, too."""
    kv = LayerKv(*torch.randn(2, TOKENS, HEADS, dim, generator=torch.Generator().manual_seed(dim)))

    def error() -> list[float]:
        decoded = CODECS[name].decode(*CODECS[name].encode(kv, Origin(0, 9), None), 9, None)
        return [float((got - true).norm() / true.norm()) for got, true in zip(decoded, kv, strict=True)]

    ours = error()
    without(monkeypatch)
    assert ours == pytest.approx(error(), rel=1e-3)


def test_pairs_of_numbers_too_few_for_the_wide_transform(monkeypatch: pytest.MonkeyPatch) -> None:
    kv = LayerKv(*torch.randn(2, TOKENS, HEADS, 12, generator=torch.Generator().manual_seed(12)))
    payload, facts = CODECS["i4h"].encode(kv, Origin(0, 9), None)
    got = CODECS["i4h"].decode(payload, facts, 9, None)
    without(monkeypatch)
    wanted = CODECS["i4h"].decode(payload, facts, 9, None)
    torch.testing.assert_close(got.keys, wanted.keys, rtol=1e-5, atol=1e-6)
    assert float((got.keys - kv.keys).norm() / kv.keys.norm()) < 0.1


def test_special_numbers_are_rounded_as_torch_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = RopeRows(torch.ones(1, 1, 4), torch.zeros(1, 1, 4))
    specials = torch.tensor([float("nan"), float("inf"), -float("inf"), 0.0, -0.0, 1e-45, 3.4e38, 1.0]).view(1, 1, 8)
    out = torch.empty(1, 1, 8, dtype=torch.bfloat16)
    assert kernels.turn(specials.bfloat16(), rows, out)
    without(monkeypatch)
    torch.testing.assert_close(out, rows.turn(specials.bfloat16()), equal_nan=True, rtol=0, atol=0)


def test_what_is_no_number_stays_none() -> None:
    kv = LayerKv(torch.full((2, 1, 8), float("nan")), torch.ones(2, 1, 8))
    payload, facts = CODECS["i8"].encode(kv, Origin(0, 0), None)
    assert CODECS["i8"].decode(payload, facts, 0, None).keys.isnan().all()


def test_what_it_does_not_take_is_left_to_torch() -> None:
    rows, vectors = rows_of(RotaryLayout(), 64), vectors_of(64, torch.float32)
    out = torch.empty_like(vectors)
    assert not kernels.turn(vectors.half(), rows, out.half())
    assert not kernels.turn(vectors, rows, out.bfloat16())
    assert not kernels.turn(vectors.transpose(0, 1), rows, out.transpose(0, 1))
    assert not kernels.turn(vectors[:9], rows, out[:9])
    assert not kernels.turn(vectors[..., :60].contiguous(), rows, out[..., :60].contiguous())
    wide = torch.zeros(TOKENS, 1, 1032)
    assert not kernels.turn(wide, rows, wide)
    assert not kernels.quantize(0, wide, None, wide.to(torch.uint8), wide[..., :1].bfloat16())
    got = rows.turn(vectors.transpose(0, 1).contiguous().transpose(0, 1))
    assert_same(got, rows.turn(vectors))


def test_shapes_that_do_not_fit_are_refused_by_the_extension_itself() -> None:
    memory = torch.zeros(4)
    address = memory.data_ptr()
    for shape in ((1, 1, 4, address, address, 1, 2, 1, False), (1, 1, 2000, 0, 0, 1, 0, 0, False)):
        with pytest.raises(ValueError, match="not taken"):
            kernels.kernels.turn(address, address, 0, *shape)  # type: ignore[union-attr]


@pytest.mark.parametrize("tokens", [0, 1])
def test_short_runs(tokens: int) -> None:
    rows, vectors = rows_of(RotaryLayout(), 64), vectors_of(64, torch.bfloat16)[:tokens]
    out = torch.empty_like(vectors)
    assert kernels.turn(vectors, rows.of(slice(0, tokens)), out)
