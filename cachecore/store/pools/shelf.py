"""A pool over a store that only keeps named bytes: a directory, a bucket.

    generation                                  which one is current
    <generation>/runs/<tenant>/.../<name>.hckv  runs
    <generation>/claims/...                     what writers are about to write (see ledger.py)

What makes it safe without locks: a run appears under its name at once and whole, one of several writers makes it
appear, one of several removers makes it go, and each of these knows that it was the one.
"""

import asyncio
import logging
import re
import secrets
import time
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import suppress
from typing import NamedTuple, Protocol

from cachecore.scope import TenantId
from cachecore.store.errors import StoreError
from cachecore.store.pools import hckv
from cachecore.store.pools.contract import (
    Accepted,
    Announce,
    Declined,
    DeclineReason,
    PoolBounds,
    PoolRun,
    PoolStats,
    RemovalReason,
    RunKey,
    renewed,
)
from cachecore.store.pools.front import Opened, PooledRuns
from cachecore.store.pools.ledger import Claim, Item, Ledger, Listing, Victim

logger = logging.getLogger("ropeway.pools")

DEAD_SECONDS = 180.0
"""After which what a writer was about to write is taken for left by one that died. A claim is not used for longer than
a third of that, which leaves a put the other two thirds."""
WRITE_BYTES_PER_SECOND_MIN = 10e6
"""A store that is slower than this is away."""
GENERATION_RECORD = re.compile(rb"hckv 1 (\d{1,18})\n")
ATTEMPTS_MAX = 3
"""To make room, while others take it."""


class Full(StoreError):
    """The store has no room left, whatever the pool's bounds say."""


class Vanished(StoreError):
    """The generation is not there any more."""


class Place(NamedTuple):
    """Of a run in the store."""

    generation: int
    tenant: TenantId
    name: str


class Shelf(Protocol):
    """Named bytes. Every method raises StoreError when the store does not answer, and Vanished when its generation is
    not there."""

    async def generation(self) -> int:
        """The current one; made when there is none."""
        ...

    async def new_generation(self) -> int:
        """Begin another one; what is in the others is of no use any more and may go."""
        ...

    async def listing(self, generation: int) -> Listing: ...

    async def create(self, place: Place, encoded: hckv.Encoded) -> bool:
        """All of it under its name at once; False when there is something already. Raises Full."""
        ...

    async def open(self, place: Place) -> Opened | None:
        """Raises Broken for what is no run."""
        ...

    async def exists(self, place: Place) -> bool: ...

    async def remove(self, place: Place) -> bool:
        """False when it was not there; a store that cannot tell says True."""
        ...

    async def renew(self, place: Place, worth: Callable[[float], float]) -> None:
        """Its worth becomes a function of what it was."""
        ...

    async def claim(self, generation: int, claim: Claim) -> None: ...

    async def release(self, generation: int, claim: Claim) -> None: ...

    async def sweep(self, generation: int, dead_seconds: float) -> None:
        """Remove claims, unfinished runs and other generations that are older than that."""
        ...

    async def close(self) -> None: ...


class ShelfPool(PooledRuns):
    """A KvPool on a shelf. `clock` is wall-clock time in seconds, which all processes should roughly agree on."""

    def __init__(
        self,
        name: str,
        shelf: Shelf,
        bounds: PoolBounds,
        announce: Announce = lambda announcement: None,
        *,
        dead_seconds: float = DEAD_SECONDS,
        clock: Callable[[], float] = time.time,
    ) -> None:
        super().__init__(name, bounds, announce, clock)
        self._shelf = shelf
        self._ledger = self._new_ledger()
        self._dead_seconds = dead_seconds
        self._claim_ends_at = 0.0
        """In the loop's time."""
        self._turn = asyncio.Lock()
        """One of this process's puts at a time makes room."""

    async def close(self) -> None:
        await super().close()
        claim, self._ledger.claim = self._ledger.claim, None
        if claim is not None:
            with suppress(StoreError):
                await self._shelf.release(self._generation, claim)
        await self._shelf.close()

    @property
    def _generation(self) -> int:
        if self._holder is None:
            raise StoreError(self._reason)
        return self._holder.generation

    def _new_ledger(self) -> Ledger:
        return Ledger(self.bounds, secrets.token_hex(8))

    def _place(self, key: RunKey) -> Place:
        return Place(self._generation, key.tenant, key.name)

    # What the front asks for

    async def _find_generation(self) -> int:
        return await self._shelf.generation()

    def _enter(self, generation: int) -> None:
        before = self._holder
        super()._enter(generation)
        if before != self._holder:
            self._ledger = self._new_ledger()

    async def _store(self, run: PoolRun, encoded: hckv.Encoded) -> Accepted | Declined:
        if self._holder is None:
            await self._meet()
        try:
            return await self._put(run.key, encoded)
        except Vanished:
            await self._meet()
            return await self._put(run.key, encoded)

    async def _open(self, key: RunKey) -> Opened | None:
        return await self._shelf.open(self._place(key))

    async def _renew(self, key: RunKey) -> None:
        place, now = self._place(key), self._clock()
        await self._shelf.renew(place, lambda worth: renewed(worth, now, self.bounds.reuse_credit_seconds))

    async def _present(self, key: RunKey) -> bool:
        return await self._shelf.exists(self._place(key))

    async def _remove(self, key: RunKey, reason: RemovalReason) -> bool:
        return await self._take(self._place(key), reason)

    async def _collect(self) -> None:
        generation, ledger = self._generation, self._ledger
        await self._give_back(ledger, generation, self.bounds.bytes_max + 1)
        async with self._turn:
            await self._load(ledger, generation)
        await self._evict(generation, ledger.overdue(self._clock()))
        await self._shelf.sweep(generation, self._dead_seconds)

    async def _load(self, ledger: Ledger, generation: int) -> None:
        """In this process's turn: one listing at a time."""
        ledger.begin_listing()
        ledger.load(await self._shelf.listing(generation))

    async def _wipe(self) -> int:
        return await self._shelf.new_generation()

    async def _list(self) -> AsyncIterator[PoolRun]:
        generation = self._generation
        for item in (await self._shelf.listing(generation)).items:
            _, run = await self._describe(Place(generation, item.tenant, item.name))
            if run is not None:
                yield run

    def _occupancy(self, stats: PoolStats) -> None:
        ledger = self._ledger
        stats.runs, stats.bytes = len(ledger.items), ledger.bytes
        # A copy first: whoever asks may be another thread.
        stats.tenant_bytes = {tenant: held for tenant, held in dict(ledger.tenant_bytes).items() if held}

    # Puts

    async def _put(self, key: RunKey, encoded: hckv.Encoded) -> Accepted | Declined:
        place, size, ledger = self._place(key), encoded.size, self._ledger
        if await self._shelf.exists(place):
            return Accepted(new=False)
        if not self._begin(ledger, place, size) and (declined := await self._make_room(ledger, place, size)):
            return declined
        try:
            new = await self._shelf.create(place, encoded)
        except Full as error:
            await self._evict(place.generation, ledger.cheapest(size))
            return Declined(DeclineReason.FULL, str(error))
        finally:
            ledger.end(place.tenant, size)
            self._spawn(self._give_back, ledger, place.generation, size)
        if new:
            ledger.add(Item(place.name, place.tenant, size, self._clock()))
        return Accepted(new)

    def _begin(self, ledger: Ledger, place: Place, size: int) -> bool:
        return asyncio.get_running_loop().time() < self._claim_ends_at and ledger.begin(place.tenant, size)

    async def _make_room(self, ledger: Ledger, place: Place, size: int) -> Declined | None:
        """Until the put is under way (None), or it is clear that it cannot be now."""
        async with self._turn:
            for attempt in range(ATTEMPTS_MAX):
                if self._begin(ledger, place, size):
                    return None  # by what the put before this one has claimed
                granted = await self._claim(ledger, place, size, least=attempt > 0)
                if granted and ledger.begin_fresh(place.tenant, size):
                    return None
        return Declined(DeclineReason.FULL, "other writers take what room there is")

    async def _claim(self, ledger: Ledger, place: Place, size: int, least: bool) -> bool:
        """Claim, list, evict: in this order (see ledger.py)."""
        generation = place.generation
        useless: Claim | None
        claim, ends_at = ledger.next_claim(size, least), asyncio.get_running_loop().time() + self._dead_seconds / 3
        granted, useless = False, claim  # until it is in force
        try:
            await self._shelf.claim(generation, claim)
            await self._load(ledger, generation)
            if ledger.can_hold(claim):
                await self._evict(generation, ledger.victims(claim, place.tenant, size))
            granted = ledger.bytes_over(claim) <= 0
            if granted:
                self._claim_ends_at = ends_at
                useless = ledger.replace_claim(claim)
        finally:
            if useless is not None:
                self._spawn(self._shelf.release, generation, useless)
        return granted

    async def _give_back(self, ledger: Ledger, generation: int, size: int) -> None:
        claim = ledger.take_spent_claim(size)
        if claim is not None:
            await self._shelf.release(generation, claim)

    # Removals

    async def _evict(self, generation: int, victims: Iterable[Victim]) -> None:
        for item, reason in victims:
            await self._take(Place(generation, item.tenant, item.name), reason)

    async def _take(self, place: Place, reason: RemovalReason) -> bool:
        """Remove and announce; a run that another one removed is not announced here."""
        found, run = await self._describe(place)
        removed = found and await self._shelf.remove(place)
        self._ledger.remove(place.tenant, place.name)
        if removed:
            self._announce_removal(place.name, run, reason)
        return removed

    async def _describe(self, place: Place) -> tuple[bool, PoolRun | None]:
        """Whether something is there, and which run it says it is, where it is one."""
        try:
            opened = await self._shelf.open(place)
        except hckv.Broken:
            return True, None
        if opened is None:
            return False, None
        await opened.close()
        run = opened.index.run
        return True, run if run.key.name == place.name else None
