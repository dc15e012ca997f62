"""GGUF files written as llama.cpp writes them, from models of transformers, and exported back."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFReader, GGUFWriter
from gguf.quants import dequantize, quantize
from tokenizers import Tokenizer
from transformers import LlamaConfig, LlamaForCausalLM

from tests.workers.reference.support import TINY
from tests.workers.reference.test_model import PROMPT, kv_of, read_model, write_model
from workers.reference.config import ModelError
from workers.reference.gguf_export import build_tokenizer, export_gguf, unpermute
from workers.reference.model import Segment

SHAPE = {name: value for name, value in TINY.items() if name not in ("architectures", "rope_theta")}
NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
}


def permuted(rows: np.ndarray, heads: int) -> np.ndarray:
    """As llama.cpp's converter stores query and key rows."""
    return rows.reshape(heads, 2, -1, rows.shape[-1]).swapaxes(1, 2).reshape(rows.shape)


def gguf_name(name: str) -> str:
    stem = name.removesuffix(".weight")
    if stem.startswith("model.layers."):
        _, _, layer, part = stem.split(".", 3)
        return f"blk.{layer}.{NAMES[part]}.weight"
    return f"{NAMES[stem]}.weight"


def byte_tokens() -> list[str]:
    """GPT-2's alphabet of 256 printable stand-ins for bytes, by byte."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]


def write_gguf(path: Path, model: LlamaForCausalLM, **changes: Any) -> None:
    """`changes` override or add tensors (arrays) and scalar fields."""
    config = model.config
    writer = GGUFWriter(path, changes.get("architecture", "llama"))
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(changes.get("pre", "smollm"))
    writer.add_token_list(["a", "b", "ab", *(f"t{index}" for index in range(3, config.vocab_size))])
    writer.add_token_types([1] * config.vocab_size)
    writer.add_token_merges(["a b"])
    writer.add_eos_token_id(1)
    if "rope_freqs" in changes:
        writer.add_tensor("rope_freqs.weight", changes["rope_freqs"])
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        array = tensor.numpy()
        if "q_proj" in name or "k_proj" in name:
            array = permuted(array, config.num_attention_heads if "q_proj" in name else config.num_key_value_heads)
        if array.ndim == 2 and "quantization" in changes:
            kind = changes["quantization"]
            writer.add_tensor(gguf_name(name), quantize(array, kind), raw_dtype=kind)
        else:
            writer.add_tensor(gguf_name(name), array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def logits_of(directory: Path) -> torch.Tensor:
    ours = read_model(directory)
    return ours.forward([Segment(PROMPT, 0, list(range(13)), all_logits=True)], kv_of(ours))


@pytest.mark.parametrize("tied", [True, False])
def test_an_exported_model_computes_what_the_original_did(tied: bool, tmp_path: Path) -> None:
    theirs = write_model(LlamaConfig(**{**SHAPE, "tie_word_embeddings": tied}), tmp_path / "original")
    write_gguf(tmp_path / "model.gguf", theirs)
    steps = []
    export_gguf(tmp_path / "model.gguf", tmp_path / "export", lambda done, total: steps.append((done, total)))
    assert torch.equal(logits_of(tmp_path / "export"), logits_of(tmp_path / "original"))
    total = 2 + 9 * 2 + (not tied)
    assert steps == [(done, total) for done in range(1, total + 1)]


def test_quantized_weights_are_dequantized(tmp_path: Path) -> None:
    theirs = write_model(LlamaConfig(**{**SHAPE, "intermediate_size": 64}), tmp_path / "original")
    write_gguf(tmp_path / "model.gguf", theirs, quantization=GGMLQuantizationType.Q8_0)
    export_gguf(tmp_path / "model.gguf", tmp_path / "export")
    exact, rounded = logits_of(tmp_path / "original"), logits_of(tmp_path / "export")
    assert not torch.equal(exact, rounded)
    assert float(torch.cosine_similarity(exact, rounded).min()) > 0.98


def test_frequency_divisors_survive_in_ours_and_in_transformers(tmp_path: Path) -> None:
    scaling = {
        "rope_type": "llama3",
        "rope_theta": 10_000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    theirs = write_model(LlamaConfig(**SHAPE, rope_parameters=scaling), tmp_path / "original")
    plain = 10_000.0 ** -(np.arange(0, 8, 2, dtype=np.float32) / 8)
    divisors = (plain / theirs.model.rotary_emb.inv_freq.numpy()).astype(np.float32)
    write_gguf(tmp_path / "model.gguf", theirs, rope_freqs=divisors)
    export_gguf(tmp_path / "model.gguf", tmp_path / "export")
    torch.testing.assert_close(logits_of(tmp_path / "export"), logits_of(tmp_path / "original"), rtol=1e-4, atol=1e-4)
    with torch.inference_mode():
        reread = LlamaForCausalLM.from_pretrained(tmp_path / "export")(torch.tensor([PROMPT])).logits[0]
    torch.testing.assert_close(reread, logits_of(tmp_path / "original"), rtol=1e-4, atol=1e-4)


def test_unpermute_undoes_the_converter() -> None:
    rows = np.arange(4 * 8 * 3, dtype=np.float32).reshape(32, 3)
    assert np.array_equal(unpermute(permuted(rows, 4), 4), rows)


@pytest.mark.parametrize(
    ("changes", "reason"), [({"architecture": "gemma"}, "'gemma' is not served"), ({"pre": "tekken"}, "'tekken'")]
)
def test_unknown_kinds_are_refused(changes: dict, reason: str, tmp_path: Path) -> None:
    theirs = write_model(LlamaConfig(**SHAPE), tmp_path / "original")
    write_gguf(tmp_path / "model.gguf", theirs, **changes)
    with pytest.raises(ModelError, match=reason):
        export_gguf(tmp_path / "model.gguf", tmp_path / "export")
    assert not (tmp_path / "export").exists()


def test_what_is_no_gguf_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.gguf").write_bytes(b"GARBAGE" * 10)
    with pytest.raises(ModelError, match=r"x\.gguf is no readable GGUF file"):
        export_gguf(tmp_path / "x.gguf", tmp_path / "export")


def tokenizer_of(pre: str, **fields: Any) -> Tokenizer:
    tokens = [*byte_tokens(), "12", "ab", "Ġab", "123", "<|end|>"]
    return build_tokenizer(
        {
            "tokenizer.ggml.model": "gpt2",
            "tokenizer.ggml.pre": pre,
            "tokenizer.ggml.tokens": tokens,
            "tokenizer.ggml.token_type": [1] * (len(tokens) - 1) + [3],
            "tokenizer.ggml.merges": ["1 2", "a b", "Ġ ab", "12 3"],
            **{f"tokenizer.ggml.{name}": value for name, value in fields.items()},
        }
    )


def test_pre_tokenizers_split_digits_as_their_models_do() -> None:
    text = "ab 123ab<|end|>12"
    assert tokenizer_of("smollm").encode(text).tokens == ["ab", "Ġ", "1", "2", "3", "ab", "<|end|>", "1", "2"]
    assert tokenizer_of("gpt-2").encode(text).tokens == ["ab", "Ġ", "123", "ab", "<|end|>", "12"]
    llama3 = tokenizer_of("llama-bpe", bos_token_id=260)
    assert llama3.encode("ab 1234").tokens == ["<|end|>", "ab", "Ġ", "123", "4"]
    assert tokenizer_of("llama-bpe", add_bos_token=False).encode("12").tokens == ["12"]


@pytest.mark.parametrize("pre", ["smollm", "gpt-2"])
def test_every_text_survives_a_round_trip(pre: str) -> None:
    tokenizer = tokenizer_of(pre)
    for text in ("  two  spaces\n\n\tand ½ ٣ Ⅷ 漢字 🙂 don't", "\x00\x7f", "naïve café 12345"):
        assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text


def test_dequantized_rows_keep_their_shape(tmp_path: Path) -> None:
    theirs = write_model(LlamaConfig(**SHAPE), tmp_path / "original")
    write_gguf(tmp_path / "model.gguf", theirs, quantization=GGMLQuantizationType.F16)
    tensor = next(
        tensor for tensor in GGUFReader(tmp_path / "model.gguf").tensors if tensor.name == "token_embd.weight"
    )
    assert dequantize(tensor.data, tensor.tensor_type).shape == (97, 32)
    export_gguf(tmp_path / "model.gguf", tmp_path / "export")
    assert read_model(tmp_path / "export").weights.embedding.shape == (97, 32)
