"""Rate limits: what a tenant, and a key of it, may ask for in a minute (`policies.state.limits`).

A request counts when it has come, its prompt's tokens once the prompt is named, before it waits or is sent
anywhere. What is said in answer is counted when the answer tells it (`usage`), and whoever said more than he had waits
for longer. Nothing is held back here: over the limit is 429, with the time after which it is worth another try.

Gateways that share an index tell each other what they have let in (`gateway.standings`), about once a second: for so
long a tenant can have at several gateways what it should have at all of them together.
"""

import time
from collections import Counter
from collections.abc import Callable, Mapping
from math import ceil, inf
from operator import attrgetter
from typing import Annotated

from msgspec import Meta

from gateway.config import RateLimitsConfig, RatesConfig
from gateway.errors import TooManyRequests
from gateway.tenants import Tenant
from policies.state.limits import Account, Accounts, Elsewhere, Level, Rates, Spent

SUBJECTS_TOLD_MAX = 512
_Total = Annotated[float, Meta(ge=0.0, le=1e18)]
Told = dict[Annotated[str, Meta(max_length=128)], tuple[_Total, _Total]]
"""What gateways tell each other: (requests, tokens) by subject."""
HeaderLines = list[tuple[bytes, bytes]]
_UNLIMITED = Rates()
_REMAINING = attrgetter("remaining")


class RateLimits:
    """The limits of one gateway. `apply` changes them while it serves."""

    def __init__(self, config: RateLimitsConfig, clock: Callable[[], float] = time.monotonic) -> None:
        self.refused: Counter[tuple[str, str]] = Counter()
        """By tenant and resource."""
        self.on_refused: Callable[[int], None] = lambda status: None
        """Told the status of each refusal."""
        self._clock = clock
        self._key_rates: Mapping[str, Rates] = {}
        self._accounts = Accounts(self._rates_of)
        self.elsewhere = Elsewhere(self._accounts)
        self._configure(config)

    def apply(self, config: RateLimitsConfig) -> None:
        """Other limits from now on; what was used stays used."""
        self._configure(config)
        self._accounts.retune(self._clock())

    def apply_keys(self, tenants: list[Tenant]) -> None:
        """The keys' own limits."""
        rates = {tenant.key_id: tenant.key_rates for tenant in tenants if tenant.key_rates is not None}
        self._key_rates = {_key_subject(key_id): key_rates for key_id, key_rates in rates.items()}
        self._accounts.retune(self._clock())

    @property
    def active(self) -> bool:
        """Whether anybody is limited."""
        return bool(self._key_rates) or any(
            rates.requests_per_minute is not None or rates.tokens_per_minute is not None
            for rates in (self._rates, *self._tenant_rates.values())
        )

    # For the pipeline

    def admit(self, tenant: Tenant) -> None:
        """Count a request. Raises TooManyRequests."""
        now = self._clock()
        accounts = self._accounts_of(tenant, now)
        for account in accounts:
            if account.requests is not None and (wait := account.requests.wait_seconds(1.0, now)):
                raise self._refusal(tenant, "requests", wait, now)
        for account in accounts:
            account.spend(1.0, 0.0, now)

    def charge(self, tenant: Tenant, prompt_tokens: int) -> None:
        """Count a prompt. Raises TooManyRequests; the request stays counted."""
        now = self._clock()
        accounts = self._accounts_of(tenant, now)
        for account in accounts:
            if account.tokens is not None and (wait := account.tokens.wait_seconds(prompt_tokens, now)):
                raise self._refusal(tenant, "tokens", wait, now)
        for account in accounts:
            account.spend(0.0, prompt_tokens, now)

    def said(self, tenant: Tenant, output_tokens: int) -> None:
        """Count an answer."""
        now = self._clock()
        for account in self._accounts_of(tenant, now):
            account.spend(0.0, output_tokens, now)

    def header_lines(self, tenant: Tenant) -> bytes:
        """Where the tenant stands, as lines of an answer's head."""
        return b"".join(b"%b: %b\r\n" % field for field in self._standing(tenant, self._clock()))

    # For the other gateways

    def told(self) -> Told:
        return {subject: (spent[0], spent[1]) for subject, spent in self._accounts.spent(SUBJECTS_TOLD_MAX).items()}

    def hear(self, gateway: str, run: str, told: Told) -> None:
        spent = {subject: Spent(*totals) for subject, totals in told.items()}
        self.elsewhere.hear(gateway, run, spent, self._clock())

    # Steps

    def _configure(self, config: RateLimitsConfig) -> None:
        self._rates = _rates(config)
        self._tenant_rates = {tenant: _rates(rates) for tenant, rates in config.tenants.items()}

    def _rates_of(self, subject: str) -> Rates | None:
        if subject.startswith(_KEY):
            return self._key_rates.get(subject)
        rates = self._tenant_rates.get(subject, self._rates)
        return rates if rates[:2] != _UNLIMITED[:2] else None

    def _accounts_of(self, tenant: Tenant, now: float) -> list[Account]:
        account = self._accounts.of(tenant.id, now)
        accounts = [] if account is None else [account]
        if tenant.key_rates is not None:
            own = self._accounts.of(_key_subject(tenant.key_id), now)
            if own is not None:
                accounts.append(own)
        return accounts

    def _refusal(self, tenant: Tenant, resource: str, wait_seconds: float, now: float) -> TooManyRequests:
        self.refused[tenant.id, resource] += 1
        self.on_refused(TooManyRequests.status)
        if wait_seconds == inf:
            message = f"The request is larger than the limit on {resource} allows at any time."
        else:
            message = f"The limit on {resource} per minute is reached; try again in {shown_duration(wait_seconds)}."
        retry_after_seconds = None if wait_seconds == inf else max(ceil(wait_seconds), 1)
        standing = self._standing(tenant, now)
        return TooManyRequests(message, retry_after_seconds=retry_after_seconds, standing=standing)

    def _standing(self, tenant: Tenant, now: float) -> HeaderLines:
        """The tightest bucket of each resource."""
        accounts = self._accounts_of(tenant, now)
        requests = [account.requests.level(now) for account in accounts if account.requests is not None]
        tokens = [account.tokens.level(now) for account in accounts if account.tokens is not None]
        return [*_shown(b"requests", requests), *_shown(b"tokens", tokens)]


def _shown(resource: bytes, levels: list[Level]) -> HeaderLines:
    if not levels:
        return []
    limit, remaining, reset_seconds = levels[0] if len(levels) == 1 else min(levels, key=_REMAINING)
    return [
        (b"x-ratelimit-limit-%b" % resource, b"%d" % limit),
        (b"x-ratelimit-remaining-%b" % resource, b"%d" % remaining),
        (b"x-ratelimit-reset-%b" % resource, shown_duration(reset_seconds).encode()),
    ]


def shown_duration(seconds: float) -> str:
    """As OpenAI's headers have it: `120ms`, `6.5s`, `1m30s`, `2h0m5s`."""
    milliseconds = ceil(seconds * 1e3 - 1e-6)
    if milliseconds < 1000:
        return f"{milliseconds}ms"
    if milliseconds < 60_000:
        return f"{milliseconds / 1e3:g}s"
    minutes, whole_seconds = divmod(ceil(milliseconds / 1e3), 60)
    hours, minutes = divmod(minutes, 60)
    return (f"{hours}h" if hours else "") + f"{minutes}m{whole_seconds}s"


_KEY = "key:"
"""No tenant's name has a colon."""


def _key_subject(key_id: str) -> str:
    return f"{_KEY}{key_id}"


def _rates(config: RatesConfig) -> Rates:
    return Rates(config.requests_per_minute, config.tokens_per_minute, config.burst_seconds)
