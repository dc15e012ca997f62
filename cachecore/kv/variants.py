"""Which rotary embedding a model has, and whether its cached keys may be moved to other positions. Needs no torch.

A key is stored rotated by its position. Where the rotation is a known turn of pairs of dimensions, it can be undone and
done anew at another position, and the result is what the engine would have stored there for the same hidden state. The
registry answers for a Hugging Face `config.json`:

* exact: one scalar position turns every pair (llama3, linear, NTK, YaRN, longrope change the angles and nothing else);
* exact per section: pairs follow several positions (mRoPE). Text moves all of them by the same shift;
* refused: the rotation depends on the sequence's length, is learned, or what is cached is not per token at all.

How pairs are formed is as important as the angles, and `config.json` does not say it: it is known here per model
family, or told by whoever runs the engine. An unknown family is refused, as the wrong pairing is silent garbage.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

ROPE_KINDS = frozenset({"default", "linear", "ntk", "llama3", "yarn", "longrope", "proportional"})

_INTERLEAVED_FAMILIES = frozenset(
    {"chatglm", "codegen", "cohere", "cohere2", "deepseek_v2", "deepseek_v3", "ernie4_5", "ernie4_5_moe", "glm", "glm4"}
    | {"gptj", "helium", "llama4", "llama4_text"}
)
_HALVES_FAMILIES = frozenset(
    {"exaone4", "falcon", "gemma", "gemma2", "gemma3", "gemma3_text", "gemma4_text", "glm4_moe", "gpt_neox", "gpt_oss"}
    | {"granite", "granitemoe", "hunyuan_v1_dense", "hunyuan_v1_moe", "internlm2", "llama", "minicpm", "mistral"}
    | {"mixtral", "nemotron", "olmo", "olmo2", "olmo3", "phi", "phi3", "phimoe", "qwen2", "qwen2_moe", "qwen2_vl"}
    | {"qwen2_5_vl", "qwen3", "qwen3_moe", "qwen3_vl", "qwen3_vl_moe", "seed_oss", "smollm3", "stablelm", "starcoder2"}
)
_LEARNED_FAMILIES = frozenset({"bert", "biogpt", "gpt2", "gpt_bigcode", "gpt_neo", "opt", "xglm"})
_BIASED_FAMILIES = frozenset({"bloom", "mpt"})
_RECURRENT_FAMILIES = frozenset(
    {"bamba", "falcon_h1", "falcon_mamba", "granitemoehybrid", "jamba", "kimi_linear", "lfm2", "mamba", "mamba2"}
    | {"minimax", "nemotron_h", "plamo2", "qwen3_next", "recurrent_gemma", "rwkv", "rwkv7", "xlstm", "zamba", "zamba2"}
)
_ATTENTION_LAYERS = frozenset({"full_attention", "sliding_attention", "chunked_attention", "attention"})


class RopeError(ValueError):
    """A rotary embedding that is not understood, or whose keys cannot be moved. The message is the reason."""


class Pairing(Enum):
    """Which dimensions of the rotated part, r wide, turn together."""

    HALVES = "halves"
    """i with i + r/2 (GPT-NeoX, Llama)."""
    INTERLEAVED = "interleaved"
    """2i with 2i + 1 (GPT-J, DeepSeek)."""


@dataclass(frozen=True, slots=True)
class RotaryLayout:
    """Where in a cached vector the rotation acts. The table says how wide it is."""

    pairing: Pairing = Pairing.HALVES
    offset: int = 0
    """Dimensions before the rotated part (the latent of MLA, or a head whose last dimensions turn)."""
    sections: tuple[int, ...] = ()
    """mRoPE: pairs that follow time, height and width; empty when all follow one position."""
    sections_interleaved: bool = False
    """Pairs take turns (thwthw...t) instead of standing in blocks."""


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """A rotary embedding. Fields a `kind` does not use keep their defaults; names are those of `config.json`."""

    kind: str
    theta: float
    rotary_dim: int
    """Dimensions of a head that are rotated; the rest pass unchanged (partial rotary)."""
    factor: float = 1.0
    original_max_positions: int = 0
    attention_factor: float | None = None
    """Multiplies cos AND sin; None derives it as the kind's paper does."""
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 0.0
    mscale_all_dim: float = 0.0
    truncate: bool = True
    short_factor: tuple[float, ...] = ()
    long_factor: tuple[float, ...] = ()
    proportion: float = 1.0
    """Share of the pairs that turn at all; the others have frequency 0 (kind `proportional`)."""
    layout: RotaryLayout = RotaryLayout()


class Verdict(Enum):
    EXACT = "exact"
    EXACT_PER_SECTION = "exact per section"
    REFUSED = "refused"


@dataclass(frozen=True, slots=True)
class RopeSupport:
    """The registry's answer for one model."""

    verdict: Verdict
    reason: str
    layers: tuple[RopeConfig | None, ...] = ()
    """One per layer; None for a layer whose keys carry no position. Empty when refused."""


def rope_support(document: Mapping[str, Any], pairing: Pairing | None = None) -> RopeSupport:
    """Whether the keys of a model may be moved, from its parsed `config.json`.

    `pairing` is what the engine does; without it, the model's family decides. Never raises: what cannot be read is
    refused with the reason.
    """
    document = {**document, **(document.get("text_config") or {})}
    if reason := _obstacle(document):
        return RopeSupport(Verdict.REFUSED, reason)
    try:
        count = int(document.get("num_hidden_layers") or document.get("n_layer") or document["num_layers"])
        if _is_biased(document):
            return RopeSupport(Verdict.EXACT, "keys carry no position: ALiBi biases the scores", (None,) * count)
        layers = _per_layer(document, count, pairing or _family_pairing(document))
    except (KeyError, TypeError, ValueError) as error:
        return RopeSupport(Verdict.REFUSED, str(error) if isinstance(error, RopeError) else f"config.json: {error!r}")
    if any(layer is not None and layer.layout.sections for layer in layers):
        reason = "mRoPE: one shift moves text; images need a shift each for time, height and width"
        return RopeSupport(Verdict.EXACT_PER_SECTION, reason, layers)
    return RopeSupport(Verdict.EXACT, _describe(layers), layers)


def parse_rope(document: Mapping[str, Any], head_dim: int, pairing: Pairing = Pairing.HALVES) -> RopeConfig:
    """The rotary embedding of a `config.json`, in its older (`rope_scaling`) or newer (`rope_parameters`) spelling.

    Raises RopeError with the reason.
    """
    scaling: Mapping[str, Any] = document.get("rope_parameters") or document.get("rope_scaling") or {}
    kind, factor = _kind(scaling), _factor(document, scaling)
    partial = float(
        scaling.get("partial_rotary_factor")
        or document.get("partial_rotary_factor")
        or document.get("rotary_pct")
        or 1.0
    )
    rope = RopeConfig(
        kind=kind,
        theta=float(
            scaling.get("rope_theta") or document.get("rope_theta") or document.get("rotary_emb_base") or 10_000.0
        ),
        rotary_dim=head_dim if kind == "proportional" else int(document.get("rotary_dim") or head_dim * partial),
        original_max_positions=_original_max_positions(document, scaling),
        factor=float(scaling["alpha"]) if kind == "ntk" and scaling.get("alpha") else factor,
        attention_factor=_optional_float(scaling.get("attention_factor")),
        low_freq_factor=float(scaling.get("low_freq_factor") or 1.0),
        high_freq_factor=float(scaling.get("high_freq_factor") or 4.0),
        beta_fast=float(scaling.get("beta_fast") or 32.0),
        beta_slow=float(scaling.get("beta_slow") or 1.0),
        mscale=float(scaling.get("mscale") or 0.0),
        mscale_all_dim=float(scaling.get("mscale_all_dim") or 0.0),
        truncate=bool(scaling.get("truncate", True)),
        short_factor=tuple(float(value) for value in scaling.get("short_factor") or ()),
        long_factor=tuple(float(value) for value in scaling.get("long_factor") or ()),
        proportion=partial if kind == "proportional" else 1.0,
        layout=RotaryLayout(
            pairing,
            sections=tuple(int(count) for count in scaling.get("mrope_section") or ()),
            sections_interleaved=bool(scaling.get("mrope_interleaved", False)),
        ),
    )
    _check(rope)
    return rope


def _kind(scaling: Mapping[str, Any]) -> str:
    kind = str(scaling.get("rope_type") or scaling.get("type") or "default")
    if kind == "mrope" and scaling.get("mrope_section"):
        return "default"
    if kind == "dynamic" and scaling.get("alpha"):
        return "ntk"  # HunYuan: the name is dynamic, the base is not
    if kind == "dynamic":
        raise RopeError("dynamic NTK RoPE depends on the sequence's length: its cached keys cannot be shared")
    if kind in ("fope", "fourier"):
        raise RopeError("FoPE's learned coefficients are no rotation: its keys cannot be moved")
    if kind not in ROPE_KINDS:
        raise RopeError(f"RoPE kind {kind!r} is not supported (only {', '.join(sorted(ROPE_KINDS))})")
    return kind


def _check(rope: RopeConfig) -> None:
    if rope.rotary_dim % 2 or rope.rotary_dim < 2:
        raise RopeError(f"RoPE rotates pairs: {rope.rotary_dim} dimensions is no positive even number")
    if rope.kind in ("linear", "llama3", "ntk", "yarn") and rope.factor <= 0:
        raise RopeError(f"RoPE kind {rope.kind!r} needs a positive `factor`")
    if rope.kind == "ntk" and rope.rotary_dim == 2:
        raise RopeError("NTK scaling needs more than one pair")
    if rope.kind == "longrope" and not len(rope.short_factor) == len(rope.long_factor) == rope.rotary_dim // 2:
        raise RopeError(f"longrope needs {rope.rotary_dim // 2} short and long factors")
    if rope.layout.sections and sum(rope.layout.sections) != rope.rotary_dim // 2:
        raise RopeError(f"mRoPE sections {rope.layout.sections} do not add up to {rope.rotary_dim // 2} pairs")


def _obstacle(document: Mapping[str, Any]) -> str:
    """Why nothing of this model can be moved, or ""."""
    family = str(document.get("model_type", ""))
    kinds = set(document.get("layer_types") or document.get("layers_block_type") or ()) - _ATTENTION_LAYERS
    if family in _RECURRENT_FAMILIES or kinds or document.get("ssm_state_size") or document.get("mamba_d_state"):
        return "recurrent state belongs to the prefix it was computed from: it has no position to move"
    if family in _LEARNED_FAMILIES or document.get("position_embedding_type") in ("absolute", "learned_absolute"):
        return "learned positions are added to the hidden state: keys cannot be moved"
    if document.get("dual_chunk_attention_config"):
        return "dual chunk attention stores positions modulo its chunk: keys move only by whole chunks"
    if document.get("fope") or document.get("use_fope"):
        return "FoPE's learned coefficients are no rotation: its keys cannot be moved"
    return ""


def _is_biased(document: Mapping[str, Any]) -> bool:
    attention = document.get("attn_config") or {}
    return bool(document.get("model_type") in _BIASED_FAMILIES or document.get("alibi") or attention.get("alibi"))


def _family_pairing(document: Mapping[str, Any]) -> Pairing:
    family = document.get("model_type")
    if family in _INTERLEAVED_FAMILIES:
        return Pairing.INTERLEAVED
    if family in _HALVES_FAMILIES:
        return Pairing.HALVES
    raise RopeError(f"how the model family {family!r} pairs dimensions is not known: name the engine's pairing")


def _per_layer(document: Mapping[str, Any], count: int, pairing: Pairing) -> tuple[RopeConfig | None, ...]:
    kinds = _layer_kinds(document, count)
    rotating = _rotating_layers(document, kinds)
    known: dict[str, RopeConfig] = {}
    for kind in dict.fromkeys(kinds):
        known[kind] = _rope_of_kind(document, kind, pairing)
    return tuple(known[kind] if turns else None for kind, turns in zip(kinds, rotating, strict=True))


def _layer_kinds(document: Mapping[str, Any], count: int) -> Sequence[str]:
    kinds = document.get("layer_types")
    if kinds:
        if len(kinds) != count:
            raise RopeError(f"{len(kinds)} layer types for {count} layers")
        return [str(kind) for kind in kinds]
    period = int(document.get("sliding_window_pattern") or 0)
    if period and document.get("rope_local_base_freq"):
        return ["sliding_attention" if (index + 1) % period else "full_attention" for index in range(count)]
    return ["full_attention"] * count


def _rotating_layers(document: Mapping[str, Any], kinds: Sequence[str]) -> Sequence[bool]:
    """Which layers rotate at all; `no_rope_layers` holds 1 for those that do."""
    if flags := document.get("no_rope_layers"):
        return [bool(flag) for flag in flags]
    if interval := int(document.get("no_rope_layer_interval") or 0):
        return [bool((index + 1) % interval) for index in range(len(kinds))]
    if document.get("model_type") == "cohere2":
        return [kind == "sliding_attention" for kind in kinds]
    return [True] * len(kinds)


def _rope_of_kind(document: Mapping[str, Any], kind: str, pairing: Pairing) -> RopeConfig:
    by_kind = document.get("rope_parameters") or {}
    if kind in by_kind:
        document = {**document, "rope_parameters": by_kind[kind]}
    elif kind == "sliding_attention" and document.get("rope_local_base_freq"):
        document = {**document, "rope_theta": document["rope_local_base_freq"], "rope_scaling": None}
    latent, rotary = int(document.get("kv_lora_rank") or 0), int(document.get("qk_rope_head_dim") or 0)
    if latent and rotary:
        rope = parse_rope(document, rotary, pairing)
        return replace(rope, layout=replace(rope.layout, offset=latent))
    return parse_rope(document, _head_dim(document, kind), pairing)


def _head_dim(document: Mapping[str, Any], kind: str) -> int:
    if kind == "full_attention" and document.get("global_head_dim"):
        return int(document["global_head_dim"])
    hidden = document.get("hidden_size") or document.get("n_embd")
    heads = document.get("num_attention_heads") or document.get("n_head")
    if document.get("head_dim"):
        return int(document["head_dim"])
    if not hidden or not heads:
        raise RopeError("config.json names neither head_dim nor hidden_size and num_attention_heads")
    return int(hidden) // int(heads)


def _describe(layers: Sequence[RopeConfig | None]) -> str:
    ropes = [layer for layer in dict.fromkeys(layers) if layer is not None]
    parts = [f"{rope.kind}, {rope.layout.pairing.value}, {rope.rotary_dim} dimensions" for rope in ropes]
    if any(rope.layout.offset for rope in ropes):
        parts.append("the latent before them carries no position")
    if None in layers:
        parts.append(f"{layers.count(None)} layers without rotation")
    return "; ".join(parts)


def _original_max_positions(document: Mapping[str, Any], scaling: Mapping[str, Any]) -> int:
    key = "original_max_position_embeddings"
    return int(scaling.get(key) or document.get(key) or document.get("max_position_embeddings") or 2048)


def _factor(document: Mapping[str, Any], scaling: Mapping[str, Any]) -> float:
    if scaling.get("factor") is not None:
        return float(scaling["factor"])
    return int(document.get("max_position_embeddings") or 2048) / _original_max_positions(document, scaling)


def _optional_float(value: Any) -> float | None:
    if value is None:
        return None
    if not math.isfinite(number := float(value)):
        raise RopeError(f"attention factor {value!r} is not finite")
    return number
