"""What recomputing sampled answers has shown about the KV they started from: a worker's journal of it."""

import threading
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from cachecore.scope import Fidelity

_SAMPLES_MAX = 1024


class Approximation(NamedTuple):
    """The KV that an answer started from, where it was not exact."""

    tenant: str
    codec: str
    fidelity: Fidelity
    recompute_fraction: float = 0.0
    """Of what was fused."""


class QualitySample(NamedTuple):
    """One answer, compared with exact KV token for token."""

    used: Approximation
    kl: float
    """Mean KL divergence from exact KV's distribution, in nats a token."""
    top1: float
    """Share of tokens whose likeliest one is the same."""

    def document(self) -> dict[str, Any]:
        """As `GET /kv_quality` gives it."""
        used = {**self.used._asdict(), "fidelity": self.used.fidelity.name.lower()}
        return {**used, "kl": self.kl, "top1": self.top1}


@dataclass(slots=True)
class QualityTotals:
    """Of samples with the same codec and fidelity, ever."""

    samples: int = 0
    kl: float = 0.0
    top1: float = 0.0


class Told(NamedTuple):
    next: int
    """What to ask for the next time."""
    samples: list[QualitySample]


@dataclass(slots=True, eq=False)
class QualityJournal:
    """The latest samples, numbered from 0. Written by the engine's thread and read by others."""

    totals: dict[tuple[str, Fidelity], QualityTotals] = field(default_factory=dict)
    skipped: int = 0
    """Answers that were drawn and could not be recomputed: too long, or too many were waiting."""
    _next: int = 0
    _samples: deque[QualitySample] = field(default_factory=lambda: deque(maxlen=_SAMPLES_MAX))
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def record(self, sample: QualitySample) -> None:
        with self._lock:
            self._samples.append(sample)
            self._next += 1
            totals = self.totals.setdefault((sample.used.codec, sample.used.fidelity), QualityTotals())
            totals.samples += 1
            totals.kl += sample.kl
            totals.top1 += sample.top1

    def skip(self) -> None:
        with self._lock:
            self.skipped += 1

    def since(self, number: int) -> Told:
        """Samples from `number` on. A number that has not been given yet is of a worker before this one."""
        with self._lock:
            samples, oldest = list(self._samples), self._next - len(self._samples)
            first = number - oldest if oldest <= number <= self._next else 0
            return Told(self._next, samples[first:])

    def snapshot(self) -> Mapping[tuple[str, Fidelity], QualityTotals]:
        with self._lock:
            return {key: QualityTotals(one.samples, one.kl, one.top1) for key, one in self.totals.items()}
