"""Which codecs a model's KV may travel in: those whose effect on its answers was measured and is small enough.

The measure is KL divergence from full prefill, teacher-forced over the answers to a canary set of prompts. A tensor's
own error says little: the same relative error of keys costs one model ten times the divergence of another.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

RAW = "raw"
DEFAULT_CODEC = "i8"
"""What goes over the wire where it is allowed."""
KL_BUDGETS: Mapping[str, float] = MappingProxyType({"i8": 3e-4, "fp8": 3e-3, "i4h": 1.5e-2, "lm3h": 5e-2})
"""Mean KL that a codec may cost, in nats a token."""


@dataclass(frozen=True, slots=True)
class Calibration:
    """What a canary set has shown for one model. Nothing lossy is allowed that has not been measured."""

    model: str
    prompts: int
    kl_by_codec: Mapping[str, float]
    budgets: Mapping[str, float] = field(default_factory=lambda: KL_BUDGETS)

    def allows(self, codec: str) -> bool:
        """A mean that is no number, or a codec without a budget, is not within it."""
        if codec == RAW:
            return True
        return self.kl_by_codec.get(codec, math.inf) <= self.budgets.get(codec, -math.inf)

    @property
    def allowed(self) -> Sequence[str]:
        """Finest first."""
        return (RAW, *(codec for codec in self.budgets if self.allows(codec)))

    @property
    def wire_codec(self) -> str:
        """What KV of this model travels in unless a plan says otherwise."""
        return DEFAULT_CODEC if self.allows(DEFAULT_CODEC) else RAW


def uncalibrated(model: str) -> Calibration:
    """A model that nobody has measured: its KV travels as it is."""
    return Calibration(model, 0, {})


def calibrate(
    model: str, prompts: int, kl_mean: Callable[[str], float], budgets: Mapping[str, float] = KL_BUDGETS
) -> Calibration:
    """Measure every codec that has a budget: `kl_mean(codec)` over `prompts` canary prompts."""
    return Calibration(model, prompts, {codec: kl_mean(codec) for codec in budgets}, budgets)
