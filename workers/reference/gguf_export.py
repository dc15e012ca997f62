"""From a GGUF file of the llama family to a Hugging Face directory that every tool can read, in fp32.

What bites:

* llama.cpp stores query and key rows permuted, so that its rotary pairs are neighbours. They go back to neox halves.
* A GGUF names its pre-tokenizer and does not describe it. Only the named ones below are known to be rebuilt right;
  any other is refused, since a tokenizer that is almost right names the wrong KV for ever.
* Llama 3's frequency scaling is a tensor (`rope_freqs`) of divisors. LongRoPE divides likewise: it is written so.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFReader, ReaderTensor
from gguf.quants import dequantize
from numpy.typing import NDArray
from safetensors.numpy import save_file
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors

from workers.reference.config import ModelError

Array = NDArray[np.float32]
Progress = Callable[[int, int], None]
"""Called with (tensors done, tensors in all)."""

_LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_TOKEN_CONTROL = 3
_TOKEN_USER_DEFINED = 4

_GLOBAL_TENSORS = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER_TENSORS = {
    "attn_norm.weight": "input_layernorm.weight",
    "attn_q.weight": "self_attn.q_proj.weight",
    "attn_k.weight": "self_attn.k_proj.weight",
    "attn_v.weight": "self_attn.v_proj.weight",
    "attn_output.weight": "self_attn.o_proj.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "ffn_gate.weight": "mlp.gate_proj.weight",
    "ffn_up.weight": "mlp.up_proj.weight",
    "ffn_down.weight": "mlp.down_proj.weight",
}
_ROPE_FREQUENCIES = "rope_freqs.weight"


def export_gguf(source: Path, directory: Path, progress: Progress = lambda done, total: None) -> None:
    """Write config.json, model.safetensors (fp32), tokenizer files and generation_config.json into `directory`.

    Raises ModelError for a file that cannot be read, another architecture or an unknown pre-tokenizer.
    """
    try:
        reader = GGUFReader(source)
    except (OSError, ValueError, IndexError, KeyError) as error:
        raise ModelError(f"{source.name} is no readable GGUF file: {error!r}") from error
    fields = {name: field.contents() for name, field in reader.fields.items()}
    config = hf_config(fields, _tensor(reader, _ROPE_FREQUENCIES), _tensor(reader, "output.weight") is None)
    tokenizer = build_tokenizer(fields)
    directory.mkdir(parents=True, exist_ok=True)
    _write_json(directory / "config.json", config)
    _write_json(directory / "generation_config.json", _generation_config(fields))
    _write_json(directory / "tokenizer_config.json", _tokenizer_config(fields, config["max_position_embeddings"]))
    tokenizer.save(str(directory / "tokenizer.json"))
    tensors = dict(_hf_tensors(reader, config, progress))
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})


def hf_config(fields: Mapping[str, Any], rope_frequencies: Array | None, tied: bool) -> dict[str, Any]:
    """The `config.json` that describes the same model."""
    architecture = fields.get("general.architecture")
    if architecture != "llama":
        raise ModelError(f"GGUF architecture {architecture!r} is not served here (only 'llama')")
    if fields.get("llama.expert_count"):
        raise ModelError("mixture-of-experts models are not supported")
    try:
        heads = int(fields["llama.attention.head_count"])
        hidden_size = int(fields["llama.embedding_length"])
        head_dim = int(fields.get("llama.attention.key_length") or hidden_size // heads)
        config: dict[str, Any] = {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "vocab_size": len(fields["tokenizer.ggml.tokens"]),
            "hidden_size": hidden_size,
            "intermediate_size": int(fields["llama.feed_forward_length"]),
            "num_hidden_layers": int(fields["llama.block_count"]),
            "num_attention_heads": heads,
            "num_key_value_heads": int(fields.get("llama.attention.head_count_kv") or heads),
            "head_dim": head_dim,
            "hidden_act": "silu",
            "rms_norm_eps": float(fields["llama.attention.layer_norm_rms_epsilon"]),
            "max_position_embeddings": int(fields["llama.context_length"]),
            "rope_theta": float(fields.get("llama.rope.freq_base") or 10_000.0),
            "tie_word_embeddings": tied,
            "attention_bias": False,
            "mlp_bias": False,
            "torch_dtype": "float32",
            **_special_token_ids(fields),
        }
    except (KeyError, TypeError, ValueError) as error:
        raise ModelError(f"the GGUF file lacks what a llama model needs: {error!r}") from error
    if int(fields.get("llama.rope.dimension_count") or head_dim) != head_dim:
        raise ModelError("GGUF files with partial rotary embeddings are not supported")
    scaling = _rope_scaling(fields, rope_frequencies, config["max_position_embeddings"])
    return {**config, "rope_scaling": scaling} if scaling else config


def build_tokenizer(fields: Mapping[str, Any]) -> Tokenizer:
    """The byte-level BPE tokenizer of a GGUF file. Raises ModelError for other kinds."""
    kind, name = fields.get("tokenizer.ggml.model"), str(fields.get("tokenizer.ggml.pre"))
    if kind != "gpt2":
        raise ModelError(f"GGUF tokenizer kind {kind!r} is not supported: use the model's Hugging Face directory")
    if name not in _PRE_TOKENIZERS:
        raise ModelError(f"GGUF pre-tokenizer {name!r} is not known (only {', '.join(_PRE_TOKENIZERS)})")
    if "tokenizer.ggml.merges" not in fields:
        raise ModelError("the GGUF file's tokenizer has no merges")
    tokens: list[str] = fields["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    model = models.BPE(vocab=vocabulary, merges=merges, ignore_merges=name in _IGNORING_MERGES)
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = _PRE_TOKENIZERS[name]()
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = _post_processor(fields, tokens)
    tokenizer.add_special_tokens([_added(token, special=True) for token in _tokens_of_type(fields, _TOKEN_CONTROL)])
    tokenizer.add_tokens([_added(token, special=False) for token in _tokens_of_type(fields, _TOKEN_USER_DEFINED)])
    return tokenizer


def unpermute(rows: Array, heads: int) -> Array:
    """Query or key rows [heads * D, H] from neighbouring rotary pairs back to neox halves."""
    per_head = rows.reshape(heads, -1, 2, rows.shape[-1])
    return per_head.swapaxes(1, 2).reshape(rows.shape)


def _smollm() -> pre_tokenizers.PreTokenizer:
    """Every digit stands alone, then GPT-2's split."""
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _gpt2()])


def _gpt2() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


def _llama3() -> pre_tokenizers.PreTokenizer:
    split = pre_tokenizers.Split(Regex(_LLAMA3_SPLIT), behavior="isolated")
    return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


_PRE_TOKENIZERS: Mapping[str, Callable[[], pre_tokenizers.PreTokenizer]] = {
    "smollm": _smollm,
    "gpt-2": _gpt2,
    "llama-bpe": _llama3,
}
_IGNORING_MERGES = frozenset({"llama-bpe"})


def _post_processor(fields: Mapping[str, Any], tokens: list[str]) -> processors.PostProcessor:
    bytes_only = processors.ByteLevel(trim_offsets=True)
    # Llama 3's files often leave the flag out; the pre-tokenizer implies it.
    adds_begin = fields.get("tokenizer.ggml.add_bos_token", fields["tokenizer.ggml.pre"] == "llama-bpe")
    if not adds_begin:
        return bytes_only
    begin = tokens[int(fields["tokenizer.ggml.bos_token_id"])]
    special = [(begin, int(fields["tokenizer.ggml.bos_token_id"]))]
    pair = f"{begin} $A {begin}:1 $B:1"
    template = processors.TemplateProcessing(single=f"{begin} $A", pair=pair, special_tokens=special)
    return processors.Sequence([bytes_only, template])


def _tokens_of_type(fields: Mapping[str, Any], kind: int) -> list[str]:
    types = fields.get("tokenizer.ggml.token_type") or []
    return [token for token, found in zip(fields["tokenizer.ggml.tokens"], types, strict=False) if found == kind]


def _added(token: str, special: bool) -> AddedToken:
    return AddedToken(token, special=special, normalized=False)


def _special_token_ids(fields: Mapping[str, Any]) -> dict[str, int]:
    names = {"bos_token_id": "bos", "eos_token_id": "eos", "pad_token_id": "padding"}
    found = {name: fields.get(f"tokenizer.ggml.{kind}_token_id") for name, kind in names.items()}
    return {name: int(token_id) for name, token_id in found.items() if token_id is not None}


def _generation_config(fields: Mapping[str, Any]) -> dict[str, Any]:
    """A chat turn may end with another token than a text (`eot`)."""
    special: dict[str, Any] = dict(_special_token_ids(fields))
    turn_end = fields.get("tokenizer.ggml.eot_token_id")
    if turn_end is not None and turn_end != special.get("eos_token_id"):
        special["eos_token_id"] = [token for token in (special.get("eos_token_id"), int(turn_end)) if token is not None]
    return special


def _tokenizer_config(fields: Mapping[str, Any], length_max: int) -> dict[str, Any]:
    tokens = fields["tokenizer.ggml.tokens"]
    kinds = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    ids = {name: fields.get(f"tokenizer.ggml.{kind}_token_id") for name, kind in kinds.items()}
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": length_max,
        "clean_up_tokenization_spaces": False,
        **{name: tokens[int(token_id)] for name, token_id in ids.items() if token_id is not None},
    }
    template = fields.get("tokenizer.chat_template")
    return {**config, "chat_template": template} if template else config


def _rope_scaling(fields: Mapping[str, Any], frequencies: Array | None, positions: int) -> dict[str, Any] | None:
    if frequencies is not None:
        divisors = [float(value) for value in frequencies.ravel()]
        return {
            "rope_type": "longrope",
            "factor": 1.0,
            "attention_factor": 1.0,
            "short_factor": divisors,
            "long_factor": divisors,
            "original_max_position_embeddings": positions,
        }
    kind = fields.get("llama.rope.scaling.type", "none")
    if kind == "none":
        return None
    factor = float(fields.get("llama.rope.scaling.factor") or 1.0)
    original = int(fields.get("llama.rope.scaling.original_context_length") or positions)
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    if kind == "yarn":
        return {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original}
    raise ModelError(f"GGUF RoPE scaling {kind!r} is not supported")


def _hf_tensors(reader: GGUFReader, config: Mapping[str, Any], progress: Progress) -> Iterator[tuple[str, Array]]:
    total = len(reader.tensors)
    for done, tensor in enumerate(reader.tensors, start=1):
        if tensor.name != _ROPE_FREQUENCIES:
            array = _dequantized(tensor)
            if tensor.name.endswith("attn_q.weight"):
                array = unpermute(array, config["num_attention_heads"])
            elif tensor.name.endswith("attn_k.weight"):
                array = unpermute(array, config["num_key_value_heads"])
            yield _hf_name(tensor.name), np.ascontiguousarray(array)
        progress(done, total)


def _hf_name(name: str) -> str:
    if name in _GLOBAL_TENSORS:
        return _GLOBAL_TENSORS[name]
    match name.split(".", 2):
        case ["blk", layer, part] if part in _LAYER_TENSORS:
            return f"model.layers.{int(layer)}.{_LAYER_TENSORS[part]}"
    raise ModelError(f"the GGUF file has a tensor that a llama model does not have: {name!r}")


def _tensor(reader: GGUFReader, name: str) -> Array | None:
    return next((_dequantized(tensor) for tensor in reader.tensors if tensor.name == name), None)


def _dequantized(tensor: ReaderTensor) -> Array:
    """fp32 values, rows first."""
    try:
        values: Array = dequantize(tensor.data, tensor.tensor_type).astype(np.float32, copy=False)
    except NotImplementedError as error:
        raise ModelError(f"GGUF quantization {tensor.tensor_type.name} is not supported") from error
    return values.reshape(tuple(int(size) for size in reversed(tensor.shape)))


def _write_json(path: Path, document: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(document, indent=2, ensure_ascii=False) + "\n")
