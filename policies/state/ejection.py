"""Which workers do so much worse than their fleet that they are left out for a while.

A circuit breaker judges a worker by itself, and opens when half of its requests fail. A worker that fails a fifth of
them while its neighbours fail none stays below that for ever, and one that takes ten times as long fails nothing. So
each is held beside the others:

    failing:  its share of failures >= that of all others together + `failure_margin`
    slow:     its slowness          >= `slowness_factor` * the median of the others'

Slowness is whatever the caller measures alike for all. What is learned of it is learned only by requests: a worker is
not ejected for it again before it has been seen `SEEN_MIN` times since its return.

An ejection lasts `seconds`, and as much longer for each before it, up to a limit; a worker that has gone without one
for as long as that limit begins anew. At most `share_max` of the fleet, rounded down, is out at any time, those whose
circuits are open among them: a fleet that does badly as a whole is not made smaller. Nobody is ejected out of a fleet
of one.
"""

from collections.abc import Sequence
from statistics import median
from typing import NamedTuple

from policies.state.breakers import Outcomes

SEEN_MIN = 8
"""Measurements of slowness before it is believed."""


class EjectionSettings(NamedTuple):
    share_max: float = 0.5
    failure_margin: float | None = 0.2
    """None judges no failures."""
    slowness_factor: float | None = None
    """None judges no slowness: policies send slow workers less."""
    requests_min: int = 20
    """In a window, of a worker and of the others together, before failures are compared."""
    seconds: float = 30.0
    seconds_max: float = 300.0


class Slowness(NamedTuple):
    """How slow a worker is, in a unit common to all, and how often that has been measured so far."""

    value: float
    seen: int


class Member(NamedTuple):
    """One worker of a fleet whose workers serve the same."""

    name: str
    outcomes: Outcomes
    slowness: Slowness | None = None
    barred: bool = False
    """Something else keeps requests away from it."""


class Ejection(NamedTuple):
    reason: str
    ends_at: float
    in_a_row: int
    seen: int = 0
    """How often its slowness had been measured."""


class Ejections:
    """Who is out. Names are unique; whoever leaves the fleet is to be forgotten."""

    def __init__(self, settings: EjectionSettings | None = None) -> None:
        self.settings = settings or EjectionSettings()
        self.total = 0
        self._ejections: dict[str, Ejection] = {}
        """Present ones, and the last of each worker that had one, until it is forgiven."""

    def reason(self, name: str, now: float) -> str:
        """Why a worker is out; empty when it is not."""
        ejection = self._ejections.get(name)
        return ejection.reason if ejection is not None and now < ejection.ends_at else ""

    def forget(self, name: str) -> None:
        self._ejections.pop(name, None)

    def judge(self, members: Sequence[Member], now: float) -> list[str]:
        """Compare the workers of one fleet, and name those that are ejected by it, the worst first."""
        self._forgive(now)
        out = [member for member in members if member.barred or self.reason(member.name, now)]
        room = int(len(members) * self.settings.share_max) - len(out)
        if room <= 0:
            return []
        # Those that are out are no measure for the others, nor are they judged.
        present = [member for member in members if member not in out]
        faults = sorted((fault for member in present if (fault := self._fault(member, present))), reverse=True)
        for _, name, reason, seen in faults[:room]:
            self._eject(name, reason, seen, now)
        return [name for _, name, _, _ in faults[:room]]

    def _eject(self, name: str, reason: str, seen: int, now: float) -> None:
        settings, earlier = self.settings, self._ejections.get(name)
        in_a_row = earlier.in_a_row + 1 if earlier is not None else 1
        seconds = min(settings.seconds * in_a_row, settings.seconds_max)
        self._ejections[name] = Ejection(reason, now + seconds, in_a_row, seen)
        self.total += 1

    def _forgive(self, now: float) -> None:
        limit = now - self.settings.seconds_max
        for name in [name for name, ejection in self._ejections.items() if ejection.ends_at < limit]:
            del self._ejections[name]

    def _fault(self, member: Member, present: Sequence[Member]) -> tuple[float, str, str, int] | None:
        """(How bad, name, reason, times its slowness was measured)."""
        others = [other for other in present if other is not member]
        return self._failing(member, others) or self._slow(member, others)

    def _failing(self, member: Member, others: Sequence[Member]) -> tuple[float, str, str, int] | None:
        settings = self.settings
        own = member.outcomes
        rest = Outcomes(sum(o.outcomes.requests for o in others), sum(o.outcomes.failures for o in others))
        if settings.failure_margin is None or min(own.requests, rest.requests) < settings.requests_min:
            return None
        excess = own.failure_share - rest.failure_share
        if excess < settings.failure_margin:
            return None
        reason = f"fails {own.failure_share:.0%} of its requests, the others {rest.failure_share:.0%}"
        return 1.0 + excess, member.name, reason, self._seen(member)

    def _slow(self, member: Member, others: Sequence[Member]) -> tuple[float, str, str, int] | None:
        factor, own = self.settings.slowness_factor, member.slowness
        earlier = self._ejections.get(member.name)
        if factor is None or own is None or own.seen - (earlier.seen if earlier else 0) < SEEN_MIN:
            return None
        known = [other.slowness.value for other in others if other.slowness and other.slowness.seen >= SEEN_MIN]
        usual = median(known) if known else 0.0
        if usual <= 0.0 or own.value < factor * usual:
            return None
        times = own.value / usual
        return 1.0 - 1.0 / times, member.name, f"is {times:.1f} times as slow as the others", own.seen

    @staticmethod
    def _seen(member: Member) -> int:
        return member.slowness.seen if member.slowness is not None else 0
