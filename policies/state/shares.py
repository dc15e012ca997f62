"""What each tenant is given by all gateways together, so that its share is one however many of them it asks.

Every gateway counts the tokens that it starts for each tenant, and tells the others its totals, what of each tenant
waits with it, and what it gave of late (`Standing`). Totals only grow: a report that is lost is made up for by the next
one. From the reports of others a gateway takes two things:

* what a tenant was served elsewhere since the last report is charged to it here, as if it had been served here
  (`AdmissionQueue.charge`);
* a tenant that was given more of late than its weight allows is *held back* while another one waits elsewhere that was
  given less: it only gets what leaves room for that one (`gateway.admission`). No worker idles for it.

Reports age: a gateway that is silent for `silence_seconds` counts for nothing any more, and one that hears nobody
shares fairly among those who ask itself.
"""

from collections.abc import Callable, Mapping
from math import exp
from typing import NamedTuple

TENANTS_MAX = 4096
TAU_SECONDS = 10.0
SILENCE_SECONDS = 3.0
_FORGOTTEN_TOKENS = 1.0


class Standing(NamedTuple):
    """One tenant at one gateway."""

    total_tokens: float
    """Started since the gateway began."""
    waiting_tokens: float
    recent_tokens: float
    """Of the total, with those that were started tau ago counted e times less."""


class _Report(NamedTuple):
    run: str
    heard_at: float
    standings: Mapping[str, Standing]


class TenantShares:
    """One model's tenants at one gateway. `slack_tokens`: a tenant is not held back for less than this."""

    def __init__(
        self,
        weight_of: Callable[[str], float] = lambda tenant: 1.0,
        slack_tokens: float = 4096.0,
        silence_seconds: float = SILENCE_SECONDS,
    ) -> None:
        self.totals: dict[str, float] = {}
        """Tokens started here, by tenant; add to it through `count` alone."""
        self.held_back: frozenset[str] = frozenset()
        """As of the last `settle`."""
        self._weight_of = weight_of
        self._slack_tokens = slack_tokens
        self._silence_seconds = silence_seconds
        self._recent: dict[str, float] = {}
        self._rolled: dict[str, float] = {}
        """Totals as of the last `roll`."""
        self._rolled_at: float | None = None
        self._reports: dict[str, _Report] = {}

    def __repr__(self) -> str:
        return f"TenantShares({self.totals}, heard of {sorted(self._reports)}, held back {sorted(self.held_back)})"

    def count(self, tenant: str, tokens: float) -> None:
        """Tokens are started for a tenant here. Beyond the bound on tenants they are not counted."""
        totals = self.totals
        try:
            totals[tenant] += tokens
        except KeyError:
            if len(totals) < TENANTS_MAX:
                totals[tenant] = tokens

    def roll(self, now: float) -> None:
        """Let the recent past move on to now."""
        factor = exp(-(now - self._rolled_at) / TAU_SECONDS) if self._rolled_at is not None else 1.0
        recent = {tenant: tokens * factor for tenant, tokens in self._recent.items()}
        for tenant, total in self.totals.items():
            started = total - self._rolled.get(tenant, 0.0)
            if started:
                recent[tenant] = recent.get(tenant, 0.0) + started
        self._recent = {tenant: tokens for tenant, tokens in recent.items() if tokens >= _FORGOTTEN_TOKENS}
        self._rolled = dict(self.totals)
        self._rolled_at = now

    def standings(self, waiting: Mapping[str, float], tenants_max: int) -> dict[str, Standing]:
        """What to tell others, as of the last `roll`: those who wait or were served of late, the busiest first."""
        recent = self._recent
        busy = sorted({*recent, *waiting}, key=lambda tenant: -(recent.get(tenant, 0.0) + waiting.get(tenant, 0.0)))
        return {
            tenant: Standing(self.totals.get(tenant, 0.0), waiting.get(tenant, 0.0), recent.get(tenant, 0.0))
            for tenant in busy[:tenants_max]
        }

    def hear(self, gateway: str, run: str, standings: Mapping[str, Standing], now: float) -> dict[str, float]:
        """A report of another gateway. Returns what it has started since its last one, by tenant."""
        earlier = self._reports.get(gateway)
        self._reports[gateway] = _Report(run, now, standings)
        if earlier is None or earlier.run != run:
            return {}  # how much of it is new nobody knows
        started: dict[str, float] = {}
        for tenant, standing in standings.items():
            before = earlier.standings.get(tenant)
            # A tenant that was not in the last report had rested for several tau.
            tokens = standing.total_tokens - before.total_tokens if before is not None else standing.recent_tokens
            if tokens > 0.0:
                started[tenant] = tokens
        return started

    def settle(self, now: float) -> None:
        """Forget the silent, and judge who is to be held back."""
        silent = [name for name, report in self._reports.items() if now - report.heard_at >= self._silence_seconds]
        for name in silent:
            del self._reports[name]
        self.held_back = frozenset(self._beyond_share())

    def recent_tokens(self) -> dict[str, float]:
        """By tenant, at all gateways heard of."""
        recent = dict(self._recent)
        for report in self._reports.values():
            for tenant, standing in report.standings.items():
                recent[tenant] = recent.get(tenant, 0.0) + standing.recent_tokens
        return recent

    def _beyond_share(self) -> list[str]:
        waiting = {
            tenant
            for report in self._reports.values()
            for tenant, standing in report.standings.items()
            if standing.waiting_tokens
        }
        if not waiting:
            return []
        given = {tenant: tokens / self._weight_of(tenant) for tenant, tokens in self.recent_tokens().items()}
        least = min(given.get(tenant, 0.0) for tenant in waiting)
        return [
            tenant for tenant, tokens in given.items() if tokens > least + self._slack_tokens / self._weight_of(tenant)
        ]
