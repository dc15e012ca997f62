"""How much somebody may ask for in a while: token buckets of requests and of tokens.

A bucket holds what its rate brings in `burst_seconds` and refills at that rate. A request is let in when there is one
request in the bucket and as many tokens as its prompt has; what it said is taken once that is known, and what was let
in elsewhere when it is heard of. Both may leave a bucket in debt, which its rate pays off before anybody is let in
again: over any long time nobody gets more than the rate, whoever counts late.
"""

from collections import OrderedDict
from collections.abc import Callable
from math import inf
from typing import NamedTuple

BURST_SECONDS = 60.0
SUBJECTS_MAX = 16_384
_SECONDS_PER_MINUTE = 60.0


class Rates(NamedTuple):
    """What a subject may use. None is no limit."""

    requests_per_minute: float | None = None
    tokens_per_minute: float | None = None
    burst_seconds: float = BURST_SECONDS
    """So many seconds' worth may be used at once by who has rested."""


class Level(NamedTuple):
    """Where a bucket stands."""

    limit: float
    """What it holds when it is full."""
    remaining: float
    """Not below 0."""
    reset_seconds: float
    """Until it is full."""


class Bucket:
    """`per_minute` flows in, up to what `burst_seconds` bring; one unit at least fits in. It begins full."""

    __slots__ = ("_at", "_level", "capacity", "per_second")

    def __init__(self, per_minute: float, burst_seconds: float, now: float) -> None:
        if per_minute <= 0 or burst_seconds <= 0:
            raise ValueError("per_minute and burst_seconds must be positive")
        self.per_second = per_minute / _SECONDS_PER_MINUTE
        self.capacity = max(self.per_second * burst_seconds, 1.0)
        self._level = self.capacity
        self._at = now

    def __repr__(self) -> str:
        return f"Bucket({self._level:.1f} of {self.capacity:.1f}, {self.per_second:.2f}/s)"

    def wait_seconds(self, amount: float, now: float) -> float:
        """Until `amount` is there; 0 when it is, infinite when it never fits."""
        if amount > self.capacity:
            return inf
        missing = amount - self._settled(now)
        return missing / self.per_second if missing > 0 else 0.0

    def take(self, amount: float, now: float) -> None:
        """Whether it is there or not."""
        self._level = self._settled(now) - amount

    def level(self, now: float) -> Level:
        settled = self._settled(now)
        return Level(self.capacity, max(settled, 0.0), (self.capacity - settled) / self.per_second)

    def tuned(self, per_minute: float, burst_seconds: float, now: float) -> "Bucket":
        """One of another rate that has as much, or owes as much, as far as it fits in."""
        bucket = Bucket(per_minute, burst_seconds, now)
        bucket._level = min(self._settled(now) - self.capacity + bucket.capacity, bucket.capacity)
        return bucket

    def _settled(self, now: float) -> float:
        if now > self._at:  # clocks of callers may lag each other
            self._level = min(self._level + (now - self._at) * self.per_second, self.capacity)
            self._at = now
        return self._level


class Spent(NamedTuple):
    """What a subject has used since the count began; only grows."""

    requests: float = 0.0
    tokens: float = 0.0


class Account:
    """One subject: its buckets, and what it has used here."""

    __slots__ = ("rates", "requests", "spent", "tokens")

    def __init__(self, rates: Rates, now: float) -> None:
        self.rates = rates
        self.spent = Spent()
        self.requests = _bucket(None, rates.requests_per_minute, rates.burst_seconds, now)
        self.tokens = _bucket(None, rates.tokens_per_minute, rates.burst_seconds, now)

    def __repr__(self) -> str:
        return f"Account(requests={self.requests}, tokens={self.tokens}, {self.spent})"

    def tune(self, rates: Rates, now: float) -> None:
        """Other rates from now on; what was used stays used."""
        self.rates = rates
        self.requests = _bucket(self.requests, rates.requests_per_minute, rates.burst_seconds, now)
        self.tokens = _bucket(self.tokens, rates.tokens_per_minute, rates.burst_seconds, now)

    def spend(self, requests: float, tokens: float, now: float) -> None:
        """Used here."""
        self.spent = Spent(self.spent.requests + requests, self.spent.tokens + tokens)
        self.owe(requests, tokens, now)

    def owe(self, requests: float, tokens: float, now: float) -> None:
        """Used elsewhere."""
        if requests and self.requests is not None:
            self.requests.take(requests, now)
        if tokens and self.tokens is not None:
            self.tokens.take(tokens, now)


def _bucket(old: Bucket | None, per_minute: float | None, burst_seconds: float, now: float) -> Bucket | None:
    if per_minute is None:
        return None
    return Bucket(per_minute, burst_seconds, now) if old is None else old.tuned(per_minute, burst_seconds, now)


class Accounts:
    """Accounts by subject, at most `subjects_max`: those that rested longest go first, and begin anew.

    `rates_of` says what a subject may use now; None for what is not limited, which has no account.
    """

    def __init__(self, rates_of: Callable[[str], Rates | None], subjects_max: int = SUBJECTS_MAX) -> None:
        if subjects_max < 1:
            raise ValueError("subjects_max must be positive")
        self._rates_of = rates_of
        self._subjects_max = subjects_max
        self._accounts: OrderedDict[str, Account] = OrderedDict()

    def __len__(self) -> int:
        return len(self._accounts)

    def of(self, subject: str, now: float) -> Account | None:
        account = self._accounts.get(subject)
        if account is not None:
            self._accounts.move_to_end(subject)
            return account
        rates = self._rates_of(subject)
        if rates is None:
            return None
        account = self._accounts[subject] = Account(rates, now)
        if len(self._accounts) > self._subjects_max:
            self._accounts.popitem(last=False)
        return account

    def retune(self, now: float) -> None:
        """Ask again what each subject may use."""
        for subject, account in list(self._accounts.items()):
            rates = self._rates_of(subject)
            if rates is None:
                del self._accounts[subject]
            elif rates != account.rates:
                account.tune(rates, now)

    def spent(self, subjects_max: int) -> dict[str, Spent]:
        """What was used here, by those that asked last."""
        latest = list(self._accounts)[-subjects_max:]
        return {subject: self._accounts[subject].spent for subject in latest}


class Elsewhere:
    """What was used at other gateways, by their reports of totals that only grow."""

    def __init__(self, accounts: Accounts, gateways_max: int = 1024) -> None:
        self._accounts = accounts
        self._gateways_max = gateways_max
        self._heard: OrderedDict[str, tuple[str, dict[str, Spent]]] = OrderedDict()

    def hear(self, gateway: str, run: str, spent: dict[str, Spent], now: float) -> None:
        """A report; `run` names the life of the gateway whose totals it tells. Of a first one nobody knows how much is
        new."""
        earlier_run, earlier = self._heard.pop(gateway, ("", {}))
        if earlier_run != run:
            earlier = {}
        known = earlier | spent  # a report names those that asked last: who is not in it may be in the next
        self._heard[gateway] = (run, known if len(known) <= SUBJECTS_MAX else spent)
        if len(self._heard) > self._gateways_max:
            self._heard.popitem(last=False)
        if earlier_run != run:
            return
        for subject, (requests, tokens) in spent.items():
            before = earlier.get(subject, Spent())
            if requests > before.requests or tokens > before.tokens:
                account = self._accounts.of(subject, now)
                if account is not None:
                    account.owe(max(requests - before.requests, 0.0), max(tokens - before.tokens, 0.0), now)
