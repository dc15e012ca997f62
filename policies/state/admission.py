"""Who may start now, who waits, who is told to come back later, and who is next: one model's queue at the gateway.

Nothing here waits or knows a clock: `offer` takes a request in or refuses it, `take` hands out the next one once a
worker has room, `expire` gives back those whose time has passed. The rules:

* **Shares order tenants.** Deficit round robin (Shreedhar and Varghese, 1995): each tenant that waits is given
  `quantum * weight` tokens a round and is served as long as they last. Whoever comes in the middle of a round gets its
  tokens of that round at once and is next (as new flows are in RFC 8290): a tenant that asks seldom waits for nobody's
  round. A flood lengthens its own tenant's line alone.
* **Priorities order a tenant's own requests**, and age: `rank = arrival + priority * ageing`, smallest first. A request
  is overtaken by later ones of a higher priority for so many seconds a level and no longer; the rank never changes, so
  nothing is sorted anew.
* **Whoever cannot make it is told at once.** What a tenant waits is its own tokens ahead, and of every other tenant as
  much as fair shares let pass in that time, over the rate at which the queue has drained of late. Longer than a request
  can wait, it is refused on arrival. What was let in and does not make it is refused at `start_by`.
* **A full queue sheds from the longest line.** The tenant with the most waiting tokens for its weight loses its last
  request, be it the one that has just come: no flood keeps another tenant out.
"""

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable
from enum import StrEnum
from math import ceil, exp, inf
from typing import NamedTuple

RETRY_SECONDS_MAX = 60.0
DEBT_QUANTA_MAX = 16.0
"""What a tenant was served elsewhere sets it back by so many quanta at most."""
_DRAIN_TAU_SECONDS = 10.0
_DRAIN_SECONDS_MIN = 0.5
"""Of draining, before a rate is believed."""
_LATE_SHARE = 0.98
_LATENESS_WEIGHT = 0.05
_LATENESS_STEP = 0.2
_LATENESS_TAU_SECONDS = 30.0
_LATENESS_SECONDS_MAX = 5.0
"""Of one observation: a worker that hangs is not how late workers are."""


class Reason(StrEnum):
    """Why a request is not served."""

    QUEUE_FULL = "queue_full"
    OVER_SHARE = "over_share"
    """Its tenant's own line is what it would wait for, while others wait too."""
    DEADLINE = "deadline"
    """No worker can start it in time."""
    CLOSING = "closing"
    """Whoever keeps the queue stops."""

    # Enum's own hash is a Python function, and refusals are counted by key.
    __hash__ = str.__hash__


class Refusal(NamedTuple):
    reason: Reason
    retry_after_seconds: float
    """When the queue will have drained far enough, as it is drained now; 0 where that is not known."""


class Limits(NamedTuple):
    requests_max: int = 1024
    """Waiting at once."""
    bytes_max: int = 256 * 1024 * 1024
    """Of their bodies."""
    ageing_seconds: float = 5.0
    """What one level of priority is worth, in seconds of waiting."""
    quantum_tokens: float = 2048.0
    """What a tenant of weight one may start in a round."""


class Held:
    """What waits in all queues that share their limit of bytes."""

    __slots__ = ("bytes", "requests")

    def __init__(self) -> None:
        self.requests = 0
        self.bytes = 0


class Ticket:
    """A request that waits, or asks to. Told apart by identity."""

    __slots__ = ("group", "order", "rank", "size_bytes", "start_by", "tenant", "tokens", "waiting")

    def __init__(
        self, tenant: str, tokens: float, size_bytes: int, start_by: float, rank: float, group: str = ""
    ) -> None:
        self.tenant = tenant
        self.tokens = tokens
        """What its tenant is charged."""
        self.size_bytes = size_bytes
        self.start_by = start_by
        """After this it cannot be served in time."""
        self.rank = rank
        """See the module's opening."""
        self.group = group
        """Requests of one group can be served by the same workers."""
        self.order = 0
        self.waiting = False

    def __repr__(self) -> str:
        return f"Ticket({self.tenant}, {self.tokens:.0f} tokens, by {self.start_by:.3f}, waiting={self.waiting})"


_Entry = tuple[float, int, Ticket]
"""(what it is sorted by, order of arrival, ticket): no two have the same beginning."""


class _Line:
    """One tenant's tickets, a sorted list for each group."""

    __slots__ = ("deficit", "groups", "tenant", "tokens", "weight")

    def __init__(self, tenant: str, weight: float) -> None:
        self.tenant = tenant
        self.weight = weight
        self.deficit = 0.0
        self.tokens = 0.0
        self.groups: dict[str, list[_Entry]] = {}

    def add(self, ticket: Ticket) -> None:
        insort(self.groups.setdefault(ticket.group, []), (ticket.rank, ticket.order, ticket))
        self.tokens += ticket.tokens

    def remove(self, ticket: Ticket) -> None:
        entries = self.groups[ticket.group]
        del entries[bisect_left(entries, (ticket.rank, ticket.order, ticket))]
        if not entries:
            del self.groups[ticket.group]
        self.tokens -= ticket.tokens

    def head(self, has_room: Callable[[str, str], bool]) -> Ticket | None:
        """The first of those that some worker has room for."""
        heads = [entries[0] for group, entries in self.groups.items() if has_room(self.tenant, group)]
        return min(heads)[2] if heads else None

    def last(self) -> Ticket:
        return max(entries[-1] for entries in self.groups.values())[2]

    def tokens_ahead(self, rank: float) -> float:
        """Tokens of those that come before a newcomer of that rank."""
        if all(entries[-1][0] <= rank for entries in self.groups.values()):
            return self.tokens
        return sum(entry[2].tokens for entries in self.groups.values() for entry in entries if entry[0] <= rank)


class _Drain:
    """Tokens a second that a queue hands out while somebody waits in it: sums that decay with tau."""

    __slots__ = ("_seconds", "_tokens")

    def __init__(self) -> None:
        self._seconds = self._tokens = 0.0

    def pass_time(self, seconds: float) -> None:
        factor = exp(-seconds / _DRAIN_TAU_SECONDS)
        self._seconds = self._seconds * factor + seconds
        self._tokens *= factor

    def add(self, tokens: float) -> None:
        self._tokens += tokens

    @property
    def rate(self) -> float | None:
        """None while it has not been seen for long enough."""
        return self._tokens / self._seconds if self._seconds >= _DRAIN_SECONDS_MIN else None


class Lateness:
    """How much later than predicted first tokens come, at worst: the 98th percentile, followed by small steps up and
    down (Robbins and Monro, 1951), and forgotten where nothing is seen any more."""

    __slots__ = ("_at", "_scale", "_seconds")

    def __init__(self) -> None:
        self._seconds = self._scale = 0.0
        self._at = 0.0

    def observe(self, predicted_seconds: float, seen_seconds: float, now: float) -> None:
        late = min(max(seen_seconds - predicted_seconds, -_LATENESS_SECONDS_MAX), _LATENESS_SECONDS_MAX)
        self._scale += _LATENESS_WEIGHT * (abs(late) - self._scale)
        step = _LATENESS_STEP * self._scale
        known = self.seconds(now)
        self._seconds = max(known + step * (_LATE_SHARE if late > known else _LATE_SHARE - 1.0), 0.0)
        self._at = now

    def seconds(self, now: float) -> float:
        """What to allow for."""
        return self._seconds * exp((self._at - now) / _LATENESS_TAU_SECONDS) if self._seconds else 0.0


class AdmissionQueue:
    """See the module's opening. `weight_of` a tenant is positive; `held` is shared by queues with one limit of bytes.

    What `take` asks costs a step for each tenant that waits, everything else a step for each ticket of a line at most.
    """

    def __init__(
        self, limits: Limits, weight_of: Callable[[str], float] = lambda tenant: 1.0, held: Held | None = None
    ) -> None:
        self.limits = limits
        self.count = 0
        """Tickets that wait."""
        self._weight_of = weight_of
        self._held = held or Held()
        self._lines: dict[str, _Line] = {}
        self._ring: deque[_Line] = deque()
        """The lines with tickets; the first one's turn it is."""
        self._given: dict[str, float] = {}
        """Tenants that have come and gone in this round, and what they had left of it."""
        self._by_time: list[_Entry] = []
        self._drain = _Drain()
        self._now = -inf
        self._orders = 0

    def __len__(self) -> int:
        return self.count

    def __repr__(self) -> str:
        return f"AdmissionQueue({self.count} waiting, {self.waiting_tokens()})"

    def waiting_tokens(self) -> dict[str, float]:
        """By tenant that waits."""
        return {line.tenant: line.tokens for line in self._ring}

    @property
    def drain_rate(self) -> float | None:
        """Tokens a second while somebody waits; None while that is not known."""
        return self._drain.rate

    # In

    def offer(self, ticket: Ticket, now: float, after_seconds: float = 0.0) -> Refusal | list[Ticket]:
        """Let a ticket wait, or say why not. Returns the tickets that have lost their places to it.

        `after_seconds`: what it will wait at its worker besides, whose queue is as long as it may be.
        """
        self._pass_time(now)
        wait = self.wait_seconds(ticket) + after_seconds
        late = now + wait - ticket.start_by
        if late > 0.0:
            reason = Reason.OVER_SHARE if self._over_share(ticket.tenant, ticket.tokens) else Reason.DEADLINE
            return Refusal(reason, _bounded(late if wait else 0.0))
        lost: list[Ticket] = []
        while self._full(ticket.size_bytes):
            victim = self._victim(ticket)
            if victim is ticket:
                for one in lost:
                    self._add(one)
                return self.full_refusal(ticket.tenant, ticket.tokens)
            self._remove(victim)
            lost.append(victim)
        self._add(ticket)
        return lost

    def would_shed(self, tenant: str, rank: float, size_bytes: int) -> bool:
        """Whether such a request would be turned away by a full queue, whatever its tokens."""
        return self._full(size_bytes) and self._victim(Ticket(tenant, 0.0, size_bytes, inf, rank)).order == 0

    def wait_seconds(self, ticket: Ticket) -> float:
        """What a newcomer would wait, if the queue drains as it has; 0 where that is not known."""
        rate = self._drain.rate
        if rate is None or not self.count:
            return 0.0
        line = self._lines.get(ticket.tenant)
        weight = line.weight if line is not None else self._weight_of(ticket.tenant)
        own = line.tokens_ahead(ticket.rank) if line is not None else 0.0
        passing = (own + ticket.tokens) / weight
        others = sum(min(other.tokens, passing * other.weight) for other in self._ring if other is not line)
        return (own + others) / rate if rate > 0.0 else inf

    def full_refusal(self, tenant: str, tokens: float = 0.0) -> Refusal:
        """Why a full queue turns a tenant's request away, and until when its line will have drained."""
        reason = Reason.OVER_SHARE if self._over_share(tenant, tokens) else Reason.QUEUE_FULL
        line, rate = self._lines.get(tenant), self._drain.rate
        if line is None or not rate:
            return Refusal(reason, 0.0)
        share = line.weight / sum(other.weight for other in self._ring)
        return Refusal(reason, _bounded(line.tokens / (rate * share)))

    def _full(self, size_bytes: int) -> bool:
        limits, held = self.limits, self._held
        return self.count >= limits.requests_max or held.bytes + size_bytes > limits.bytes_max

    def _victim(self, ticket: Ticket) -> Ticket:
        """Who goes when the queue is full: the last of the longest line for its weight, with the newcomer in it."""
        longest, length = None, -inf
        for line in self._ring:
            tokens = line.tokens + (ticket.tokens if line.tenant == ticket.tenant else 0.0)
            if tokens / line.weight > length:
                longest, length = line, tokens / line.weight
        if ticket.tenant not in self._lines and ticket.tokens / self._weight_of(ticket.tenant) > length:
            longest = None
        if longest is None:
            return ticket
        last = longest.last()
        return ticket if longest.tenant == ticket.tenant and ticket.rank >= last.rank else last

    def _over_share(self, tenant: str, tokens: float) -> bool:
        """Whether more of what waits is the tenant's than its share, where others wait too or did in this round."""
        own = self._lines.get(tenant)
        others = [line for line in self._ring if line is not own]
        weights = sum(line.weight for line in others) + sum(map(self._weight_of, self._given.keys() - {tenant}))
        if not weights:
            return False
        weight = own.weight if own is not None else self._weight_of(tenant)
        tokens += own.tokens if own is not None else 0.0
        return tokens / weight > sum(line.tokens for line in others) / weights

    # Out

    def take(self, now: float, has_room: Callable[[str, str], bool]) -> Ticket | None:
        """The next ticket, which no longer waits; None when no worker has room for any. `has_room(tenant, group)` must
        say the same throughout one call."""
        self._pass_time(now)
        ring, quantum = self._ring, self.limits.quantum_tokens
        while True:
            rounds = inf
            for _ in range(len(ring)):
                line = ring[0]
                ticket = line.head(has_room)
                if ticket is not None:
                    lacking = ticket.tokens - line.deficit
                    if lacking <= 0.0:
                        line.deficit -= ticket.tokens
                        self._drain.add(ticket.tokens)
                        self._remove(ticket)
                        return ticket
                    rounds = min(rounds, ceil(lacking / (quantum * line.weight)))
                ring.rotate(-1)
            if rounds == inf:
                return None
            self._given.clear()
            for line in ring:
                if line.head(has_room) is not None:
                    line.deficit += rounds * quantum * line.weight

    def refund(self, ticket: Ticket) -> None:
        """A ticket was taken and could not be served after all."""
        self._drain.add(-ticket.tokens)
        line = self._lines.get(ticket.tenant)
        if line is not None:
            line.deficit += ticket.tokens

    def charge(self, tenant: str, tokens: float) -> None:
        """A tenant was served so many tokens beside this queue; negative ones were charged without being served. Of no
        consequence where it does not wait: who has not waited has no claim."""
        line = self._lines.get(tenant)
        if line is not None:
            most = DEBT_QUANTA_MAX * self.limits.quantum_tokens * line.weight
            line.deficit = max(line.deficit - tokens, -most)

    def leave(self, ticket: Ticket) -> None:
        """Whoever waited does so no longer; of no consequence for one that does not wait."""
        if ticket.waiting:
            self._remove(ticket)

    def expire(self, now: float) -> list[Ticket]:
        """Those that cannot be served in time any more."""
        self._pass_time(now)
        expired: list[Ticket] = []
        while self._by_time and self._by_time[0][0] <= now:
            expired.append(self._by_time[0][2])
            self._remove(expired[-1])
        return expired

    def empty(self) -> list[Ticket]:
        """Everyone who waited."""
        tickets = [entry[2] for entry in self._by_time]
        for ticket in tickets:
            self._remove(ticket)
        return tickets

    def next_expiry(self) -> float:
        return self._by_time[0][0] if self._by_time else inf

    # Bookkeeping

    def _add(self, ticket: Ticket) -> None:
        line = self._lines.get(ticket.tenant)
        if line is None:
            line = self._lines[ticket.tenant] = self._new_line(ticket.tenant)
        if not ticket.order:
            self._orders += 1
            ticket.order = self._orders
        ticket.waiting = True
        line.add(ticket)
        insort(self._by_time, (ticket.start_by, ticket.order, ticket))
        self.count += 1
        self._held.requests += 1
        self._held.bytes += ticket.size_bytes

    def _new_line(self, tenant: str) -> _Line:
        line = _Line(tenant, self._weight_of(tenant))
        if tenant in self._given:
            line.deficit = self._given.pop(tenant)
            self._ring.append(line)
        else:
            line.deficit = self.limits.quantum_tokens * line.weight
            self._ring.appendleft(line)
        return line

    def _remove(self, ticket: Ticket) -> None:
        line = self._lines[ticket.tenant]
        line.remove(ticket)
        if not line.groups:
            del self._lines[ticket.tenant]
            self._ring.remove(line)
            self._given[line.tenant] = line.deficit
            if not self._ring:
                self._given.clear()
        del self._by_time[bisect_left(self._by_time, (ticket.start_by, ticket.order, ticket))]
        ticket.waiting = False
        self.count -= 1
        self._held.requests -= 1
        self._held.bytes -= ticket.size_bytes

    def _pass_time(self, now: float) -> None:
        if self.count and now > self._now:
            self._drain.pass_time(now - self._now)
        self._now = max(now, self._now)


def _bounded(seconds: float) -> float:
    return min(seconds, RETRY_SECONDS_MAX)
