"""What a process knows of a pool that has no server to count for it: a directory, or a bucket.

Nobody holds a lock, so each writer first says how much it is about to write: a claim, an empty file with the number in
its name. Then it lists the pool, sees all runs and all claims, evicts until both fit, and only then writes. Of any two
writers the one that lists later sees the other's claim or what became of it, so together they never exceed the bound.
A claim is larger than one run, so that not every put has to list; it counts until it is replaced, also the part that
has been written meanwhile: a pool of W busy writers holds up to W / CLAIMS_PER_POOL less than it might.

No I/O here: listings come in, decisions go out.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from cachecore.scope import TenantId
from cachecore.store.pools.contract import PoolBounds, RemovalReason

CLAIMS_PER_POOL = 64
"""A claim is this fraction of the pool, or what is needed at once when that is more."""


class Item(NamedTuple):
    """A stored run, as a listing shows it."""

    name: str
    tenant: TenantId
    size: int
    worth: float


class Claim(NamedTuple):
    writer: str
    number: int
    """Counts the writer's claims."""
    bytes: int


class Listing(NamedTuple):
    items: list[Item]
    claims: list[Claim]


class Victim(NamedTuple):
    item: Item
    reason: RemovalReason


@dataclass
class Ledger:
    """One writer's. `writer` is a name of its own, drawn anew for each process."""

    bounds: PoolBounds
    writer: str
    items: dict[tuple[TenantId, str], Item] = field(default_factory=dict)
    tenant_bytes: dict[TenantId, int] = field(default_factory=dict)
    bytes: int = 0
    """Of all items."""
    foreign_bytes: int = 0
    """Claimed by others, when last listed."""
    claim: Claim | None = None
    claims_made: int = 0
    spent: int = 0
    """Of the claim: by puts that are done or under way."""
    pending: dict[TenantId, int] = field(default_factory=dict)
    """Bytes of puts under way."""
    _spent_next: int = 0
    """Of the next claim, should it come into force now."""
    _unlisted: dict[tuple[TenantId, str], Item] | None = None
    """Stored since the listing under way began, which may have missed it; None where none is."""

    def begin_listing(self) -> None:
        """What `load` will bring is being read from now on. One at a time."""
        self._unlisted = {}

    def load(self, listing: Listing) -> None:
        """What was there when it was listed, and what was stored meanwhile. Puts under way stay under way."""
        unlisted = (self._unlisted or {}).values()
        self._unlisted = None
        self.items.clear()
        self.tenant_bytes.clear()
        self.bytes = 0
        for item in (*listing.items, *unlisted):
            self.add(item)
        self.foreign_bytes = sum(claim.bytes for claim in listing.claims if claim.writer != self.writer)

    def add(self, item: Item) -> None:
        self.remove(item.tenant, item.name)
        self.items[item.tenant, item.name] = item
        if self._unlisted is not None:
            self._unlisted[item.tenant, item.name] = item
        self.bytes += item.size
        self.tenant_bytes[item.tenant] = self.tenant_bytes.get(item.tenant, 0) + item.size

    def remove(self, tenant: TenantId, name: str) -> None:
        if self._unlisted is not None:
            self._unlisted.pop((tenant, name), None)
        item = self.items.pop((tenant, name), None)
        if item is not None:
            self.bytes -= item.size
            self.tenant_bytes[tenant] -= item.size

    # Puts

    def begin(self, tenant: TenantId, size: int) -> bool:
        """Count a put as under way. False when a new listing is needed first.

        Others may have stored as much for the tenant as they had claimed.
        """
        if self.claim is None or self.spent + size > self.claim.bytes:
            return False
        most = self._held_by(tenant) + self.foreign_bytes + size
        if not self._unbounded(tenant) and most > self.bounds.quota(tenant):
            return False
        self._start(tenant, size)
        return True

    def begin_fresh(self, tenant: TenantId, size: int) -> bool:
        """The same just after a listing and its evictions."""
        if self.claim is None or self.spent + size > self.claim.bytes:
            return False
        if not self._unbounded(tenant) and self._held_by(tenant) + size > self.bounds.quota(tenant):
            return False
        self._start(tenant, size)
        return True

    def end(self, tenant: TenantId, size: int) -> None:
        """A put is not under way any more; `add` says that it was stored."""
        self.pending[tenant] -= size
        if not self.pending[tenant]:
            del self.pending[tenant]

    def next_claim(self, size: int, least: bool) -> Claim:
        """To be made before the listing that makes room for a put of `size`; `least` asks for no more than that."""
        self.claims_made += 1
        self._spent_next = sum(self.pending.values())
        wanted = size if least else max(self.bounds.bytes_max // CLAIMS_PER_POOL, size)
        return Claim(self.writer, self.claims_made, wanted + self._spent_next)

    def can_hold(self, claim: Claim) -> bool:
        """Whether it would fit beside the others' claims, were nothing stored."""
        return self.foreign_bytes + claim.bytes <= self.bounds.bytes_max

    def replace_claim(self, claim: Claim) -> Claim | None:
        """The new one is in force, and covers what was under way when it was made or began since: the listing may have
        missed that, also where it is done. The claim before it, if any, is to be released."""
        before, self.claim, self.spent = self.claim, claim, self._spent_next
        return before

    def take_spent_claim(self, size: int) -> Claim | None:
        """The claim, when nothing is under way and it has no room for another put of `size`: give it back."""
        claim = self.claim
        if claim is None or self.pending or claim.bytes - self.spent >= size:
            return None
        self.claim = None
        return claim

    # Evictions

    def victims(self, claim: Claim, tenant: TenantId, size: int) -> list[Victim]:
        """What to evict so that the claim fits the pool and a put of `size` its tenant's quota."""
        ranked = self._ranked()
        over = 0 if self._unbounded(tenant) else self._held_by(tenant) + size - self.bounds.quota(tenant)
        own = list(_until(over, (item for item in ranked if item.tenant == tenant)))
        gone = set(own)
        over = self.bytes_over(claim) - sum(item.size for item in own)
        others = _until(over, (item for item in ranked if item not in gone))
        return [Victim(item, RemovalReason.QUOTA) for item in own] + [
            Victim(item, RemovalReason.BOUND) for item in others
        ]

    def bytes_over(self, claim: Claim) -> int:
        """By how much all that is stored and claimed would exceed the bound."""
        return self.bytes + self.foreign_bytes + claim.bytes - self.bounds.bytes_max

    def cheapest(self, size: int) -> list[Victim]:
        """For a store that is full before its bound is reached: what is worth least, `size` bytes of it."""
        return [Victim(item, RemovalReason.BOUND) for item in _until(size, self._ranked())]

    def overdue(self, now: float) -> list[Victim]:
        """What nobody has read for too long, and what exceeds a bound that was lowered."""
        limit = now - self.bounds.idle_seconds_max
        victims = {item: RemovalReason.IDLE for item in self.items.values() if item.worth < limit}
        ranked = [item for item in self._ranked() if item not in victims]
        for tenant in filter(lambda tenant: not self._unbounded(tenant), self.tenant_bytes):
            own = [item for item in ranked if item.tenant == tenant]
            over = sum(item.size for item in own) - self.bounds.quota(tenant)
            victims |= dict.fromkeys(_until(over, own), RemovalReason.QUOTA)
        over = self.bytes - sum(item.size for item in victims) - self.bounds.bytes_max
        victims |= dict.fromkeys(_until(over, (item for item in ranked if item not in victims)), RemovalReason.BOUND)
        return [Victim(item, reason) for item, reason in victims.items()]

    def _ranked(self) -> list[Item]:
        return sorted(self.items.values(), key=lambda item: item.worth)

    def _start(self, tenant: TenantId, size: int) -> None:
        self.spent += size
        self._spent_next += size
        self.pending[tenant] = self.pending.get(tenant, 0) + size

    def _held_by(self, tenant: TenantId) -> int:
        return self.tenant_bytes.get(tenant, 0) + self.pending.get(tenant, 0)

    def _unbounded(self, tenant: TenantId) -> bool:
        """The claims see to the pool's own bound."""
        return self.bounds.quota(tenant) == self.bounds.bytes_max


def _until(size: int, items: Iterable[Item]) -> Iterator[Item]:
    """As many as make up `size` bytes."""
    for item in items:
        if size <= 0:
            return
        size -= item.size
        yield item
