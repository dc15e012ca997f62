"""How long an engine takes: the timing model of the simulated worker and of the audit simulator.

An engine works in steps. A step prefills some chunks and decodes one token for each running sequence, and lasts

    prefill = constant + linear * t + square * t^2 + sum over chunks of pair * new * (context + new / 2)
    decode  = constant + per_sequence * batch + per_context_token * context + polynomial(context / kv capacity)
    step    = prefill + decode

with t = all tokens prefilled in the step. A part is zero when the step has none of its kind. `pair` counts attention
between every new token and the tokens before it, which is what makes long prompts cost more than their length. Pure
arithmetic: no clock, no sleep, no I/O.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple


class Chunk(NamedTuple):
    """One sequence's share of a step's prefill."""

    new_tokens: int
    """Tokens computed in this step."""
    context_tokens: int = 0
    """Tokens before them whose KV exists already (cached, or computed in earlier steps)."""


class DecodeLoad(NamedTuple):
    """The decoding half of a step."""

    sequences: int
    context_tokens: int
    """Sum over the sequences of prompt and output tokens so far."""
    kv_tokens: int = 0
    """KV capacity of the engine; needed only by profiles with a usage polynomial."""


NO_DECODE = DecodeLoad(0, 0)


@dataclass(frozen=True, slots=True)
class TimingProfile:
    """Coefficients of one engine on one machine; all times in seconds. See the module's opening."""

    name: str
    source: str
    """Where the coefficients come from."""
    prefill_constant_seconds: float
    prefill_linear_seconds: float
    prefill_square_seconds: float = 0.0
    prefill_pair_seconds: float = 0.0
    decode_constant_seconds: float = 0.0
    decode_sequence_seconds: float = 0.0
    decode_context_seconds: float = 0.0
    decode_usage_seconds: tuple[float, ...] = ()
    """Coefficients, constant first, of a polynomial in the share of KV capacity that running sequences occupy."""
    batch_tokens_max: int = 8192
    """Tokens a step may compute, prefill and decode together."""
    sequences_max: int = 256
    kv_tokens: int = 0
    """KV capacity in tokens."""
    kv_bytes_per_token: int = 0

    def prefill_seconds(self, chunks: Sequence[Chunk]) -> float:
        """The prefill part of a step."""
        if not chunks:
            return 0.0
        total = sum(chunk.new_tokens for chunk in chunks)
        pairs = sum(chunk.new_tokens * (chunk.context_tokens + chunk.new_tokens / 2) for chunk in chunks)
        return (
            self.prefill_constant_seconds
            + self.prefill_linear_seconds * total
            + self.prefill_square_seconds * total * total
            + self.prefill_pair_seconds * pairs
        )

    def decode_seconds(self, load: DecodeLoad) -> float:
        """The decode part of a step."""
        if load.sequences == 0:
            return 0.0
        seconds = (
            self.decode_constant_seconds
            + self.decode_sequence_seconds * load.sequences
            + self.decode_context_seconds * load.context_tokens
        )
        if self.decode_usage_seconds:
            usage = load.context_tokens / (load.kv_tokens or self.kv_tokens)
            seconds += sum(factor * usage**power for power, factor in enumerate(self.decode_usage_seconds))
        return seconds

    def step_seconds(self, chunks: Sequence[Chunk], load: DecodeLoad = NO_DECODE) -> float:
        return self.prefill_seconds(chunks) + self.decode_seconds(load)

    def prompt_seconds(self, new_tokens: int, context_tokens: int = 0) -> float:
        """Prefill of one prompt alone on the engine, in as many chunks as the batch budget makes of it."""
        seconds = 0.0
        for start in range(0, new_tokens, self.batch_tokens_max):
            size = min(self.batch_tokens_max, new_tokens - start)
            seconds += self.prefill_seconds((Chunk(size, context_tokens + start),))
        return seconds

    def kv_blocks(self, block_size_tokens: int) -> int:
        """Blocks of that size in the engine's KV memory."""
        return self.kv_tokens // block_size_tokens


def blocks_for(tokens: int, block_size_tokens: int) -> int:
    """Blocks that hold `tokens` tokens, the last one perhaps partly filled."""
    return -(-tokens // block_size_tokens)


_H100_FLOPS = 989e12
"""Dense bf16 of one H100 SXM (NVIDIA's data sheet). Half of it is reached in prefill."""
_L70_FLOPS = 3.96e15

LLAMA_3_70B_TP8 = TimingProfile(
    name="llama-3-70b-tp8",
    source="Llama-3-70B, tensor parallel over 8 H100 at half of peak: 2 FLOP per weight and token (140e9), "
    "4 x 80 layers x 8,192 per pair of tokens (2.62e6), over 3.96e15 FLOP/s",
    prefill_constant_seconds=0.004,
    prefill_linear_seconds=140e9 / _L70_FLOPS,
    prefill_pair_seconds=2.62e6 / _L70_FLOPS,
    decode_constant_seconds=0.0105,
    decode_context_seconds=17.4e-9,
    kv_tokens=2_500 * 512,
    kv_bytes_per_token=327_680,
)

LLAMA_3_8B = TimingProfile(
    name="llama-3-8b",
    source="derived as llama-3-70b-tp8 is, for Llama-3-8B on one H100: 2 FLOP per weight and token (16e9), 4 x 32 "
    "layers x 4,096 per pair, half of 989e12 FLOP/s; decode reads 16 GB of weights at half and 131,072 B of KV per "
    "token at 70 % of 3.35e12 B/s; KV fills what 90 % of 80 GB leaves",
    prefill_constant_seconds=0.004,
    prefill_linear_seconds=16e9 / (_H100_FLOPS / 2),
    prefill_pair_seconds=4 * 32 * 4_096 / (_H100_FLOPS / 2),
    decode_constant_seconds=16e9 / (3.35e12 * 0.5),
    decode_context_seconds=131_072 / (3.35e12 * 0.7),
    kv_tokens=26_624 * 16,
    kv_bytes_per_token=131_072,
)

DYNAMO_POLYNOMIAL = TimingProfile(
    name="dynamo-polynomial",
    source="the polynomials of Dynamo 1.6.1's mock engine, recovered by probing single requests, exact to a "
    "microsecond; context costs nothing in prefill, and decode depends on the share of KV in use",
    prefill_constant_seconds=16.50142e-3,
    prefill_linear_seconds=1.518344e-5,
    prefill_square_seconds=4.209989e-10,
    decode_usage_seconds=(5.74e-3, 54.01e-3, -25.74e-3),
    kv_tokens=16_384 * 64,
)

PROFILES = {profile.name: profile for profile in (LLAMA_3_8B, LLAMA_3_70B_TP8, DYNAMO_POLYNOMIAL)}
DEFAULT_PROFILE = LLAMA_3_8B.name


def profile_named(name: str) -> TimingProfile:
    """Raises ValueError that lists the profiles there are."""
    profile = PROFILES.get(name)
    if profile is None:
        raise ValueError(f"no timing profile {name!r}; there are {', '.join(sorted(PROFILES))}")
    return profile
