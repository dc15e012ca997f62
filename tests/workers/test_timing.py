"""The timing model against the published figures of the engines it imitates."""

import pytest

from workers.timing import (
    DEFAULT_PROFILE,
    DYNAMO_POLYNOMIAL,
    LLAMA_3_8B,
    LLAMA_3_70B_TP8,
    Chunk,
    DecodeLoad,
    blocks_for,
    profile_named,
)


def test_dynamo_full_chunk_takes_169_ms() -> None:
    assert DYNAMO_POLYNOMIAL.prefill_seconds([Chunk(8192)]) * 1000 == pytest.approx(169.137, abs=5e-4)


def test_dynamo_context_costs_nothing_across_chunks() -> None:
    assert DYNAMO_POLYNOMIAL.prompt_seconds(65_536) == pytest.approx(8 * 0.169137, abs=1e-5)


def test_dynamo_chunks_of_one_step_count_together() -> None:
    together = DYNAMO_POLYNOMIAL.prefill_seconds([Chunk(1000), Chunk(3000, 500)])
    assert together == DYNAMO_POLYNOMIAL.prefill_seconds([Chunk(4000)])


@pytest.mark.parametrize(("share", "milliseconds"), [(0.0, 5.74), (0.5, 26.31), (1.0, 34.01)])
def test_dynamo_decode_follows_kv_usage(share: float, milliseconds: float) -> None:
    load = DecodeLoad(1, int(share * 1_048_576), 1_048_576)
    assert DYNAMO_POLYNOMIAL.decode_seconds(load) * 1000 == pytest.approx(milliseconds, abs=1e-3)


def test_llama_70b_prefill_formula() -> None:
    # .004 + t (140e9 + 2.62e6 (ctx + t / 2)) / 3.96e15
    expected = 0.004 + 8192 * (140e9 + 2.62e6 * (16_384 + 4096)) / 3.96e15
    assert LLAMA_3_70B_TP8.prefill_seconds([Chunk(8192, 16_384)]) == pytest.approx(expected, rel=1e-12)


def test_llama_70b_decode_formula() -> None:
    assert LLAMA_3_70B_TP8.decode_seconds(DecodeLoad(32, 1_000_000)) == pytest.approx(0.0105 + 17.4e-9 * 1e6)


def test_llama_70b_break_even_link_is_74_gbit() -> None:
    tokens_per_second = 1 / LLAMA_3_70B_TP8.prefill_linear_seconds
    assert tokens_per_second * LLAMA_3_70B_TP8.kv_bytes_per_token * 8 / 1e9 == pytest.approx(74, abs=0.5)


def test_llama_8b_is_derived_as_the_70b_is() -> None:
    # The 70B machine reaches half of 8 x 989e12 FLOP/s; so must the 8B on one.
    assert 16e9 / LLAMA_3_8B.prefill_linear_seconds == pytest.approx(
        140e9 / LLAMA_3_70B_TP8.prefill_linear_seconds / 8, 2e-3
    )
    assert LLAMA_3_8B.kv_blocks(16) == 26_624


def test_a_mixed_step_is_the_sum_of_its_parts() -> None:
    chunks, load = [Chunk(100, 50)], DecodeLoad(3, 900)
    profile = LLAMA_3_8B
    assert profile.step_seconds(chunks, load) == profile.prefill_seconds(chunks) + profile.decode_seconds(load)
    assert profile.step_seconds(()) == 0.0


def test_a_long_prompt_pays_for_attention_to_its_own_beginning() -> None:
    alone = LLAMA_3_70B_TP8.prompt_seconds(8192)
    assert LLAMA_3_70B_TP8.prompt_seconds(65_536) > 8 * alone
    pairs = 65_536**2 / 2 * 2.62e6 / 3.96e15
    assert LLAMA_3_70B_TP8.prompt_seconds(65_536) == pytest.approx(8 * 0.004 + 65_536 * 140e9 / 3.96e15 + pairs)


def test_profiles_are_found_by_name() -> None:
    assert profile_named("llama-3-70b-tp8") is LLAMA_3_70B_TP8
    assert profile_named(DEFAULT_PROFILE).source
    with pytest.raises(ValueError, match="dynamo-polynomial"):
        profile_named("none such")


def test_blocks_for_rounds_up() -> None:
    assert [blocks_for(tokens, 16) for tokens in (0, 1, 16, 17)] == [0, 1, 1, 2]
