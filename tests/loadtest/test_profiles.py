"""Profiles that are derived from data sheets, against those written by hand and against what others have measured."""

import pytest

from loadtest.hardware import GPUS, LINKS, MACHINES, hardware_of, link_of
from loadtest.models import MODELS, model_named
from loadtest.profiles import KNOWN, derive, profile_for, ranks_for
from workers.timing import LLAMA_3_8B, LLAMA_3_70B_TP8

COEFFICIENTS = (
    "prefill_linear_seconds",
    "prefill_pair_seconds",
    "decode_constant_seconds",
    "decode_context_seconds",
    "kv_tokens",
)


@pytest.mark.parametrize(("model", "gpu", "ranks"), list(KNOWN))
def test_the_formula_comes_to_what_was_written_by_hand(model: str, gpu: str, ranks: int) -> None:
    derived, written = derive(MODELS[model], GPUS[gpu], ranks), KNOWN[model, gpu, ranks]
    for name in COEFFICIENTS:
        assert getattr(derived, name) == pytest.approx(getattr(written, name), rel=0.07), name
    assert derived.prefill_constant_seconds == written.prefill_constant_seconds
    assert derived.kv_bytes_per_token == written.kv_bytes_per_token


def test_names_mean_the_profiles_that_published_tables_were_made_with() -> None:
    assert profile_for("llama-3-70b", "h100") is LLAMA_3_70B_TP8
    assert profile_for("Llama-3.1-70B", "p5.48xlarge") is LLAMA_3_70B_TP8
    assert profile_for("llama-3-8b", "H100") is LLAMA_3_8B


@pytest.mark.parametrize(
    ("tokens", "measured_ms"), [(8_192, 205.4), (16_384, 426.3), (32_768, 983.0), (49_152, 1_695.0)]
)
def test_gpt_oss_on_an_h200_computes_prompts_as_llm_d_measured(tokens: int, measured_ms: float) -> None:
    """llm-d, guides/p2p-kv-cache-sharing, gpt-oss-120b on one H200 with vLLM: medians of five recomputed prefixes."""
    assert 1e3 * profile_for("gpt-oss-120b", "h200").prompt_seconds(tokens) == pytest.approx(measured_ms, rel=0.06)


def test_gpt_oss_keeps_about_the_tokens_that_vllm_said_it_keeps() -> None:
    """The same page: 1.22 million at 85 % of the memory, which activations and graphs are taken from as well."""
    at_85_percent = (0.85 * 141e9 - 65.2e9) / 36_864
    assert profile_for("gpt-oss-120b", "h200").kv_bytes_per_token == 36_864
    assert at_85_percent == pytest.approx(1.22e6, rel=0.25)


def test_qwen3_32b_on_two_h100_reaches_the_rate_that_llm_d_was_calibrated_with() -> None:
    """llm-d-router's peakPrefillThroughput, 15,928 tokens/s: one chunk of 8,192 on two idle H100, vLLM 0.19."""
    assert 8_192 / profile_for("qwen3-32b", "h100", 2).prompt_seconds(8_192) == pytest.approx(15_928, rel=0.16)


def test_llama_8b_on_an_h100_computes_20000_tokens_in_about_0_9_seconds() -> None:
    """ai-dynamo/dynamo#6101: vLLM 0.12, one H100, prompts of 20,000 tokens."""
    assert profile_for("llama-3-8b", "h100").prompt_seconds(20_000) == pytest.approx(0.9, rel=0.05)


def test_kv_of_each_architecture_has_its_published_size() -> None:
    sizes = {name: model.kv_bytes_per_token for name, model in MODELS.items()}
    assert sizes == {
        "llama-3-8b": 131_072,
        "llama-3-70b": 327_680,
        "qwen3-8b": 147_456,
        "qwen3-32b": 262_144,
        "gpt-oss-120b": 36_864,
        "deepseek-v3": 70_272,
    }


def test_a_small_batch_reads_few_experts_and_a_large_one_nearly_all() -> None:
    model = MODELS["gpt-oss-120b"]
    assert model.weight_bytes_read(1) == pytest.approx(65.2e9 * (1 - 0.93 * 31 / 32))
    assert model.weight_bytes_read(256) == pytest.approx(model.weight_bytes, rel=1e-3)
    assert MODELS["llama-3-8b"].weight_bytes_read(1) == MODELS["llama-3-8b"].weight_bytes


def test_ranks_that_hold_copies_of_latent_kv_hold_no_more_tokens() -> None:
    h200, model = GPUS["h200"], MODELS["deepseek-v3"]
    kv_bytes = 8 * 141e9 * 0.9 - 671e9
    assert derive(model, h200, 8).kv_tokens == int(kv_bytes / (8 * 70_272))


def test_gpus_without_nvlink_pay_for_what_they_exchange() -> None:
    alone, together = (derive(MODELS["qwen3-8b"], GPUS["l40s"], ranks) for ranks in (1, 2))
    computing = alone.prefill_linear_seconds / 2
    exchanged = 2 * 36 * 4_096 * 2 * 2 * (1 / 2) / 25e9
    assert together.prefill_linear_seconds == pytest.approx(computing + exchanged)


def test_fp8_weights_are_multiplied_as_bf16_where_a_gpu_has_no_fp8() -> None:
    assert GPUS["a100"].flops("fp8") == GPUS["a100"].bf16_flops
    assert GPUS["h100"].flops("fp8") == 1_979e12


@pytest.mark.parametrize(
    ("model", "gpu", "ranks"),
    [
        ("llama-3-8b", "l40s", 1),
        ("qwen3-32b", "l40s", 2),
        ("gpt-oss-120b", "l40s", 2),
        ("llama-3-8b", "g6e.48xlarge", 1),
        ("qwen3-32b", "g6e.12xlarge", 2),
        ("llama-3-70b", "g6e.12xlarge", 4),
        ("deepseek-v3", "b200", 8),
    ],
)
def test_a_model_takes_as_many_gpus_as_it_needs(model: str, gpu: str, ranks: int) -> None:
    assert ranks_for(model_named(model), hardware_of(gpu)) == ranks
    assert profile_for(model, gpu).kv_tokens > 50_000


@pytest.mark.parametrize(
    ("model", "gpu", "message"),
    [
        ("deepseek-v3", "h100", "deepseek-v3 does not fit on 8 x h100: weights and some KV need 785 GB, there are 640"),
        ("qwen3-32b", "g6e.xlarge", "does not fit on 1 x l40s"),
        ("gpt-4", "h100", "no model profile 'gpt-4'; there are llama-3-8b,"),
        ("llama-3-8b", "tpu", "no GPU or machine 'tpu'; there are a100, h100,"),
    ],
)
def test_what_cannot_be_is_said(model: str, gpu: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        profile_for(model, gpu)


def test_every_model_has_a_profile_on_every_gpu_that_holds_it() -> None:
    for gpu in (*GPUS, *MACHINES):
        for model in MODELS:
            try:
                profile = profile_for(model, gpu)
            except ValueError as error:
                assert "does not fit" in str(error)  # noqa: PT017
                continue
            assert profile.prompt_seconds(1_000) < profile.prompt_seconds(2_000)
            assert profile.source


def test_a_family_of_machines_names_its_gpu() -> None:
    assert hardware_of("g6e").gpu is hardware_of("G6E.48xlarge").gpu is GPUS["l40s"]
    assert hardware_of("g6e").gpus is None
    assert hardware_of("g6e.12xlarge").gpus == 4


def test_a_link_may_be_a_number() -> None:
    assert link_of("25gbe") is LINKS["25gbe"]
    assert link_of("400").bytes_per_second == LINKS["roce-400"].bytes_per_second == pytest.approx(45e9)
    assert link_of("10").latency_seconds == LINKS["10gbe"].latency_seconds
    for wrong in ("0", "-1", "nan", "carrier-pigeon"):
        with pytest.raises(ValueError, match="link"):
            link_of(wrong)
