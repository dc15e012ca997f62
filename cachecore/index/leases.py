"""Who follows which holder's events: leases that expire, with fences that only grow.

A lease says who may begin to write; the fence, which a new owner puts into the holder's record at once, says who may
still: a writer that slept through the end of its lease is refused by the server, whatever its clock says.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

from cachecore.holders import Holder
from cachecore.index import lua
from cachecore.index.redis import read_snapshot
from cachecore.index.schema import HolderSnapshot, Record, Schema, holder_id, shard_of
from cachecore.store import Call, RedisStore, StoreError

_CLAIM, _RELEASE = lua.load("claim"), lua.load("release")

BUDGET_SECONDS = 1.0


class Claim(NamedTuple):
    granted: bool
    """The lease is this gateway's."""
    owner: str
    """Whose it is; empty when it is nobody's."""
    fence: int
    """The record's: the owner's, if there is one."""
    record: Record | None


class Leases:
    """One gateway's leases. `gateway` must be another one in each life of the process."""

    def __init__(self, store: RedisStore, schema: Schema, gateway: str, lease_seconds: float = 2.0) -> None:
        self.gateway = gateway
        self.lease_seconds = lease_seconds
        self._store = store
        self._schema = schema
        self._fences: dict[Holder, int] = {}

    async def ask(self, holders: Sequence[Holder], wanted: Sequence[bool]) -> list[Claim]:
        """Claim or renew the wanted leases and look at the others, all in one round trip. Raises StoreError."""
        calls = [
            _claim_call(self._schema, holder, self.gateway, self.lease_seconds, self._fences.get(holder, 0), want)
            for holder, want in zip(holders, wanted, strict=True)
        ]
        claims = [_claim_of(answer) for answer in await self._store.run_many(calls, BUDGET_SECONDS)]
        for holder, claim in zip(holders, claims, strict=True):
            if claim.granted:
                self._fences[holder] = claim.fence
        return claims

    async def release(self, holders: Sequence[Holder]) -> None:
        """Give leases back, so that somebody else may have them at once. Raises StoreError."""
        for holder in holders:
            self._fences.pop(holder, None)
        calls = [_release_call(self._schema, holder, self.gateway) for holder in holders]
        for answer in await self._store.run_many(calls, BUDGET_SECONDS):
            if isinstance(answer, StoreError):
                raise answer

    async def snapshot(self, holder: Holder) -> HolderSnapshot | None:
        """As `read_snapshot`."""
        return await read_snapshot(self._store, self._schema, holder)


async def claim(
    store: RedisStore, schema: Schema, holder: Holder, gateway: str, ttl_seconds: float, floor: int = 0
) -> Claim:
    """Have the lease, or learn who has. `floor` is the fence that this gateway last had for the holder: it keeps it if
    nobody has claimed meanwhile, and a new one lies above it. Raises StoreError."""
    return _claim_of(await store.run(_claim_call(schema, holder, gateway, ttl_seconds, floor, True), BUDGET_SECONDS))


async def release(store: RedisStore, schema: Schema, holder: Holder, gateway: str) -> bool:
    """Give the lease back; whether it was this gateway's. Raises StoreError."""
    return bool(await store.run(_release_call(schema, holder, gateway), BUDGET_SECONDS))


def _claim_call(schema: Schema, holder: Holder, gateway: str, ttl_seconds: float, floor: int, wanted: bool) -> Call:
    keys = [schema.lease(holder), schema.holders(shard_of(holder))]
    milliseconds = max(1, round(ttl_seconds * 1000))
    return Call(_CLAIM, keys, [gateway, milliseconds, holder_id(holder), floor, int(wanted)])


def _release_call(schema: Schema, holder: Holder, gateway: str) -> Call:
    return Call(_RELEASE, [schema.lease(holder)], [gateway])


def _claim_of(answer: Any) -> Claim:
    if isinstance(answer, StoreError):
        raise answer
    granted, owner, fence, text = answer
    try:
        record = Record.decode(text) if text else None
    except ValueError:
        record = None
    return Claim(bool(granted), owner.decode(errors="replace"), int(fence), record)
