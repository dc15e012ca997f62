"""What moving KV costs on this machine: `ropeway benchmark`, part one. Every rate stands beside a plain copy (or plain
socket, or file) of the same bytes in the same run.

Work is cut into pieces of some milliseconds, all kinds of work take turns, and a work's time is the sum of its pieces'
least: on a busy machine, some rounds leave a piece undisturbed. A rate is bytes of the KV as the engine holds it (bf16)
a second, whatever a codec makes of them.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from cachecore.kv.calibration import KL_BUDGETS
from cachecore.kv.codecs.contract import KvFacts, Origin
from cachecore.kv.codecs.registry import CODECS
from cachecore.kv.layout import LayerKv
from cachecore.kv.rope import RopeTable, rope_table
from cachecore.kv.variants import Pairing, RopeConfig, RotaryLayout
from workers.reference.model import LlamaModel
from workers.reference.quality import Case, Prompt, computed, measure

SHIFTS = ((1024, 8192), (100_000, 37))
"""Source and target positions at which re-rotation is checked."""
ERROR_BARS = {"float32": 1e-6, "bfloat16": 3e-3}
ROTATION_BAR, I8_BAR = 0.25, 0.15
"""Shares of a plain copy's rate that are meant to be reached."""
SIZE_BARS = {"i8": 1.9, "fp8": 1.9, "i4h": 3.5, "lm3h": 4.0}
_POSITIONS = 131_072
_ERROR_TOKENS = 128
_SOURCE, _TARGET = SHIFTS[0]

Progress = Callable[[str, int, int], None]
"""Called with (what is being measured, done, in all)."""


class Shape(NamedTuple):
    """Of the KV that rates are taken with: more than the machine's caches hold."""

    layers: int = 30
    kv_heads: int = 3
    head_dim: int = 64
    tokens: int = 2048

    @property
    def bytes_each(self) -> int:
        """Of a layer's keys, or values, in bf16."""
        return self.tokens * self.kv_heads * self.head_dim * 2


class RotationError(NamedTuple):
    """Relative L2 of moved keys from what the engine itself would have stored at the target."""

    variant: str
    dtype: str
    source: int
    target: int
    relative_l2: float
    bar: float


class Rate(NamedTuple):
    what: str
    gb_per_second: float
    share: float
    beside: str
    """What `share` is of: measured in the same run over the same bytes."""
    bar: float | None = None


class CodecFigures(NamedTuple):
    codec: str
    size_ratio: float
    size_bar: float | None
    kl: float | None
    """Mean over prompts and answer tokens; None without a model."""
    kl_bar: float | None
    cosine: float
    """Mean over tokens and heads, of keys and values: of the model's own KV where there is one."""
    encode_gb_per_second: float
    encode_share: float
    decode_gb_per_second: float
    decode_share: float
    share_bar: float | None


@dataclass(frozen=True, slots=True)
class BenchmarkReport:
    model: str | None
    threads: int
    megabytes: float
    """Of KV that rates were taken with."""
    copy_gb_per_second: float
    rotation_errors: Sequence[RotationError]
    rates: Sequence[Rate]
    codecs: Sequence[CodecFigures]

    def as_json(self) -> dict[str, Any]:
        document = asdict(self)
        for name in ("rotation_errors", "rates", "codecs"):
            document[name] = [row._asdict() for row in getattr(self, name)]
        return document


# ---- re-rotation: what it changes ------------------------------------------------------------------------------------

_STRETCHED = tuple(1.0 + pair / 2 for pair in range(32))
ROPE_VARIANTS: Mapping[str, RopeConfig] = {
    "default": RopeConfig("default", 100_000.0, 64),
    "linear": RopeConfig("linear", 100_000.0, 64, factor=4.0),
    "ntk": RopeConfig("ntk", 100_000.0, 64, factor=4.0),
    "llama3": RopeConfig("llama3", 500_000.0, 64, factor=8.0, original_max_positions=8192),
    "yarn": RopeConfig("yarn", 100_000.0, 64, factor=16.0, original_max_positions=8192),
    "yarn, mscale": RopeConfig(
        "yarn", 10_000.0, 64, factor=40.0, original_max_positions=4096, mscale=0.707, mscale_all_dim=1.2
    ),
    "longrope": RopeConfig(
        "longrope", 10_000.0, 64, factor=32.0, original_max_positions=4096,
        short_factor=(1.0,) * 32, long_factor=_STRETCHED,
    ),
    "proportional": RopeConfig("proportional", 1_000_000.0, 64, proportion=0.25),
    "mrope, text": RopeConfig("default", 1_000_000.0, 64, layout=RotaryLayout(sections=(8, 12, 12))),
    "partial (half of a head)": RopeConfig("default", 10_000.0, 32),
    "mla (last 64 of 576)": RopeConfig(
        "yarn", 10_000.0, 64, factor=40.0, original_max_positions=4096, mscale=1.0, mscale_all_dim=1.0,
        layout=RotaryLayout(Pairing.INTERLEAVED, offset=512),
    ),
}  # fmt: skip
"""One of each kind that can be moved."""


def rotation_errors(progress: Progress = lambda what, done, total: None) -> list[RotationError]:
    """For every variant, shift and dtype; the worse of both pairings where either occurs."""
    errors = []
    for done, (name, config) in enumerate(ROPE_VARIANTS.items()):
        progress("re-rotation", done, len(ROPE_VARIANTS))
        layouts = {config.layout}
        if config.layout == RotaryLayout():
            layouts.add(RotaryLayout(Pairing.INTERLEAVED))
        table = rope_table(config, _POSITIONS)
        for source, target in SHIFTS:
            for dtype, bar in ERROR_BARS.items():
                worst = max(
                    rotation_error(RopeTable(table.cos, table.sin, layout), getattr(torch, dtype), source, target)
                    for layout in layouts
                )
                errors.append(RotationError(name, dtype, source, target, worst, bar))
    return errors


def rotation_error(table: RopeTable, dtype: torch.dtype, source: int, target: int) -> float:
    """Keys of one hidden state, stored at `source` and moved, against the same stored at `target`."""
    dim = max(64, table.layout.offset + 2 * table.cos.shape[1])
    drawn = torch.randn(_ERROR_TOKENS, 2, dim, generator=torch.Generator().manual_seed(5))
    keys = drawn * torch.linspace(0.2, 8.0, dim)  # real keys have outlier channels
    stored = table.span(source, _ERROR_TOKENS).turn(keys).to(dtype)
    wanted = table.span(target, _ERROR_TOKENS).turn(keys).to(dtype).double()
    moved = table.shift(source, target, _ERROR_TOKENS, 2).turn(stored).double()
    return float((moved - wanted).norm() / wanted.norm())


# ---- rates -----------------------------------------------------------------------------------------------------------

Work = Sequence[Callable[[], object]]
"""One kind of work in pieces, all of which are done."""


def least_seconds(
    works: Mapping[str, Work], rounds: int, progress: Progress = lambda what, done, total: None
) -> dict[str, float]:
    """See the module's opening."""
    least = {name: [float("inf")] * len(work) for name, work in works.items()}
    for number in range(rounds):
        for done, (name, work) in enumerate(works.items()):
            progress("rates", number * len(works) + done, rounds * len(works))
            for index, piece in enumerate(work):
                start = time.perf_counter()
                piece()
                least[name][index] = min(least[name][index], time.perf_counter() - start)
    return {name: sum(seconds) for name, seconds in least.items()}


class _Memory:
    """KV of a shape, and room for as much."""

    def __init__(self, shape: Shape) -> None:
        draw = torch.Generator().manual_seed(1)
        size = (2, shape.tokens, shape.kv_heads, shape.head_dim)
        self.shape = shape
        self.stored = [LayerKv(*torch.randn(size, generator=draw).bfloat16()) for _ in range(shape.layers)]
        self.room = [LayerKv(torch.empty_like(kv.keys), torch.empty_like(kv.values)) for kv in self.stored]
        self.table = rope_table(RopeConfig("default", 100_000.0, shape.head_dim), _TARGET + shape.tokens)

    def copies(self) -> Work:
        return [partial(_copy, source, target) for source, target in zip(self.stored, self.room, strict=True)]

    def turns(self) -> Work:
        """Keys turned, values copied: what it takes to put a run elsewhere."""
        shift = self.table.shift(_SOURCE, _TARGET, self.shape.tokens, self.shape.kv_heads)

        def turn(source: LayerKv, target: LayerKv) -> None:
            shift.turn(source.keys, target.keys)
            target.values.copy_(source.values)

        return [partial(turn, source, target) for source, target in zip(self.stored, self.room, strict=True)]

    def encodes(self, codec: str) -> Work:
        encode = CODECS[codec].encode
        return [partial(encode, kv, Origin(layer, _SOURCE), self.table) for layer, kv in enumerate(self.stored)]

    def decodes(self, codec: str) -> Work:
        """To another position, so that keys are turned."""
        decode = CODECS[codec].decode
        encoded = [CODECS[codec].encode(kv, Origin(layer, _SOURCE), self.table) for layer, kv in enumerate(self.stored)]
        return [partial(decode, payload, facts, _TARGET, self.table) for payload, facts in encoded]


def _copy(source: LayerKv, target: LayerKv) -> None:
    target.keys.copy_(source.keys)
    target.values.copy_(source.values)


class KvSeconds(NamedTuple):
    """For all layers of a shape."""

    copy: float
    rotation: float
    encode: Mapping[str, float]
    decode: Mapping[str, float]


def kv_seconds(shape: Shape, rounds: int, progress: Progress = lambda what, done, total: None) -> KvSeconds:
    memory = _Memory(shape)
    works: dict[str, Work] = {"copy": memory.copies(), "rotation": memory.turns()}
    for codec in CODECS:
        works |= {f"encode {codec}": memory.encodes(codec), f"decode {codec}": memory.decodes(codec)}
    seconds = least_seconds(works, rounds, progress)
    ways = [{codec: seconds[f"{way} {codec}"] for codec in CODECS} for way in ("encode", "decode")]
    return KvSeconds(seconds["copy"], seconds["rotation"], *ways)


def rotation_rate(shape: Shape, seconds: KvSeconds) -> Rate:
    rate = 2 * shape.layers * shape.bytes_each / seconds.rotation / 1e9
    return Rate(
        "re-rotation: keys turned, values copied", rate, seconds.copy / seconds.rotation, "memcpy", ROTATION_BAR
    )


# ---- codecs: what they change ----------------------------------------------------------------------------------------


def codec_kl(
    model: LlamaModel, prompts: Sequence[Prompt], progress: Progress = lambda what, done, total: None
) -> dict[str, float]:
    """Mean KL from full prefill over the answers to `prompts`, of every codec that loses something."""
    wanted = [Case("none", 0.0, codec, "in_place") for codec in CODECS if codec != "raw"]
    rows = measure(model, prompts, wanted, lambda done: progress("KL", done, len(prompts)))
    return {row.case.codec: sum(row.kl) / len(row.kl) for row in rows}


def model_kv(model: LlamaModel, prompt: Prompt) -> list[LayerKv]:
    """KV as the engine has computed it."""
    passage = computed(model, [], prompt.context)
    return [LayerKv(keys, values) for keys, values in zip(passage.keys, passage.values, strict=True)]


def drawn_kv(shape: Shape) -> list[LayerKv]:
    return _Memory(shape._replace(layers=1, tokens=512)).stored


def cosines(stored: Sequence[LayerKv], table: RopeTable | None) -> dict[str, float]:
    """Mean cosine of what each codec brings back with what it was given."""
    return {codec: _cosine(codec, stored, table) for codec in CODECS}


def _cosine(codec: str, stored: Sequence[LayerKv], table: RopeTable | None) -> float:
    total = torch.zeros(())
    for layer, kv in enumerate(stored):
        payload, facts = CODECS[codec].encode(kv, Origin(layer, 0), table)
        decoded = CODECS[codec].decode(payload, facts, 0, table)
        total += sum((_similarity(got, true) for got, true in zip(decoded, kv, strict=True)), torch.zeros(()))
    return float(total / (2 * len(stored)))


def _similarity(got: Tensor, true: Tensor) -> Tensor:
    return functional.cosine_similarity(got.float(), true.float().cpu(), dim=-1).mean()


def codec_figures(
    shape: Shape, seconds: KvSeconds, kl: Mapping[str, float], cosine: Mapping[str, float]
) -> list[CodecFigures]:
    size = 2 * shape.layers * shape.bytes_each
    figures = []
    for name, codec in CODECS.items():
        facts = KvFacts(name, 0, _SOURCE, shape.tokens, shape.kv_heads, shape.head_dim, shape.head_dim, "bfloat16")
        encode, decode = seconds.encode[name], seconds.decode[name]
        figures.append(
            CodecFigures(
                codec=name,
                size_ratio=2 * shape.bytes_each / codec.payload_bytes(facts),
                size_bar=SIZE_BARS.get(name),
                kl=kl.get(name),
                kl_bar=KL_BUDGETS.get(name),
                cosine=cosine[name],
                encode_gb_per_second=size / encode / 1e9,
                encode_share=seconds.copy / encode,
                decode_gb_per_second=size / decode / 1e9,
                decode_share=seconds.copy / decode,
                share_bar=I8_BAR if name == "i8" else None,
            )
        )
    return figures
