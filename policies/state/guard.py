"""Budgets for the quality of reused KV: which codecs may be planned, and how much of fused prompts to recompute.

Workers compute some answers again from exact KV and report how far they diverged. Samples count for one (model, tenant,
way): the codec of KV that was quantized and nothing else, or `fused` for KV that stood elsewhere. Mean KL over a window
beyond the way's budget trips it: a codec goes off for that model and tenant, fused prompts go on to the next larger
fraction and, beyond the largest, off. A bad codec is recognized long before the window is full, as soon as the mean
exceeds the budget by more than chance would explain; single answers diverge widely also where all is well.

What is off is tried again after a rest that doubles each time.
"""

import math
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import NamedTuple

FUSED = "fused"
"""The way of KV that was moved to other positions, repaired or not."""
_QUANTIZED = "quantized"
_KL_MAX = 20.0
"""An answer cannot be worse than useless: beyond this, one would weigh more than all others together."""
_DOUBLINGS_MAX = 16


class Sample(NamedTuple):
    """One answer: how far it was from what exact KV would have given."""

    tenant: str
    codec: str
    fidelity: str
    """`quantized`, `rotated` or `fused`."""
    recompute_fraction: float
    kl: float
    top1: float

    @property
    def way(self) -> str:
        return self.codec if self.fidelity == _QUANTIZED else FUSED


class Way(NamedTuple):
    """What has a budget of its own."""

    model: str
    tenant: str
    way: str


class Trip(NamedTuple):
    """A budget was exceeded."""

    way: Way
    kl_mean: float
    budget: float
    samples: int
    recompute_fraction: float | None
    """What fused prompts are to recompute from now on; None when the way is off."""


@dataclass(frozen=True, slots=True)
class GuardSettings:
    budgets: Mapping[str, float]
    """Mean KL in nats a token, by codec and for `FUSED`. A way without one is never tripped."""
    fractions: Sequence[float] = (0.15, 0.3, 0.5)
    """What fused prompts recompute: the first until a budget trips."""
    window: int = 100
    samples_min: int = 8
    """Fewer are never enough."""
    errors: float = 2.0
    """Standard errors that the mean must be above the budget while the window is not full."""
    rest_seconds: float = 3600.0
    rest_seconds_max: float = 86_400.0
    ways_max: int = 10_000

    def __post_init__(self) -> None:
        if not 2 <= self.samples_min <= self.window or not self.fractions or self.ways_max < 1:
            raise ValueError("the window holds at least samples_min, and there is at least one fraction")
        object.__setattr__(self, "budgets", MappingProxyType(dict(self.budgets)))


@dataclass(slots=True)
class _State:
    kl: deque[float] = field(default_factory=deque)
    step: int = 0
    """Which of the fractions fused prompts recompute."""
    trips: int = 0
    off_until: float = 0.0
    last_seen: float = 0.0


class WayReport(NamedTuple):
    """For metrics."""

    way: Way
    samples: int
    kl_mean: float
    allowed: bool
    trips: int


class QualityGuard:
    """See the module's opening. Times are seconds of any one clock."""

    def __init__(self, settings: GuardSettings) -> None:
        self._settings = settings
        self._states: dict[Way, _State] = {}

    def __repr__(self) -> str:
        tripped = sum(bool(state.trips) for state in self._states.values())
        return f"QualityGuard({len(self._states)} ways, {tripped} tripped)"

    def record(self, model: str, sample: Sample, now: float) -> Trip | None:
        """Count a sample. Those that say nothing of what is done now (of another fraction, or a way that is off) are
        ignored."""
        way = Way(model, sample.tenant, sample.way)
        budget = self._settings.budgets.get(way.way)
        if budget is None:
            return None
        state = self._state(way, now)
        if state.off_until > now or not self._is_current(way, state, sample):
            return None
        state.kl.append(sample.kl if sample.kl < _KL_MAX else _KL_MAX)  # also what is no number
        if len(state.kl) > self._settings.window:
            state.kl.popleft()
        if not self._exceeds(state.kl, budget):
            return None
        return self._trip(way, state, budget, now)

    def allows(self, model: str, tenant: str, way: str, now: float) -> bool:
        """Whether a codec, or `FUSED`, may be planned for a tenant's request."""
        state = self._states.get(Way(model, tenant, way))
        return state is None or state.off_until <= now

    def recompute_fraction(self, model: str, tenant: str) -> float:
        """What a fused prompt of the tenant is to recompute."""
        state = self._states.get(Way(model, tenant, FUSED))
        return self._settings.fractions[0 if state is None else state.step]

    def report(self, now: float) -> Iterator[WayReport]:
        for way, state in self._states.items():
            mean = sum(state.kl) / len(state.kl) if state.kl else 0.0
            yield WayReport(way, len(state.kl), mean, state.off_until <= now, state.trips)

    def _state(self, way: Way, now: float) -> _State:
        state = self._states.get(way)
        if state is None:
            if len(self._states) >= self._settings.ways_max:
                del self._states[min(self._states, key=lambda known: self._states[known].last_seen)]
            state = self._states[way] = _State()
        state.last_seen = now
        return state

    def _is_current(self, way: Way, state: _State, sample: Sample) -> bool:
        if way.way != FUSED or sample.fidelity != FUSED:
            return True
        return sample.recompute_fraction >= self._settings.fractions[state.step] - 1e-6

    def _exceeds(self, kl: Sequence[float], budget: float) -> bool:
        count = len(kl)
        if count < self._settings.samples_min:
            return False
        mean = sum(kl) / count
        if count >= self._settings.window:
            return mean > budget
        variance = sum((value - mean) ** 2 for value in kl) / (count - 1)
        return mean - self._settings.errors * math.sqrt(variance / count) > budget

    def _trip(self, way: Way, state: _State, budget: float, now: float) -> Trip:
        mean, samples = sum(state.kl) / len(state.kl), len(state.kl)
        state.trips += 1
        state.kl.clear()
        fraction = None
        if way.way == FUSED and state.step + 1 < len(self._settings.fractions):
            state.step += 1
            fraction = self._settings.fractions[state.step]
        else:
            rest = self._settings.rest_seconds * 2.0 ** min(state.trips - 1, _DOUBLINGS_MAX)
            state.off_until = now + min(rest, self._settings.rest_seconds_max)
        return Trip(way, mean, budget, samples, fraction)
