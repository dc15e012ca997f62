"""The prefix index as its contract reads: a counter per place. Slow, unbounded and obviously right.

Tests run it beside every other index; nothing serves from it.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace

from cachecore.blocks import HASH_BYTES, Chain, PrefixHash, split_chain
from cachecore.holders import Holder, Place, Tier
from cachecore.index.contract import IndexEvent, IndexStats, Match, Removed, Stored


class NaiveIndex:
    """A `PrefixIndex` to compare others with."""

    def __init__(self) -> None:
        self._copies: dict[Place, Counter[PrefixHash]] = {}
        self._sequences: dict[Holder, int] = {}
        self._stats = IndexStats(extra={"malformed_events": 0})

    def apply(self, holder: Holder, sequence: int, events: Sequence[IndexEvent]) -> bool:
        if sequence <= self._sequences.get(holder, sequence - 1):
            self._stats.stale_batches += 1
            return False
        self._sequences[holder] = sequence
        for event in events:
            if isinstance(event, Stored):
                self._store(holder, event)
            elif isinstance(event, Removed):
                self._remove(holder, event)
            else:
                self._clear(holder, event.tier)
        return True

    def match(self, chain: Chain) -> Match:
        names = list(split_chain(Chain(chain[: len(chain) // HASH_BYTES * HASH_BYTES])))
        depths = {}
        for place, copies in self._copies.items():
            within = [held for other, held in self._copies.items() if _serves(other, place)]
            depth = 0
            while depth < len(names) and any(names[depth] in held for held in within):
                depth += 1
            if any(name in copies for name in names[:depth]):
                depths[place] = depth
        return Match(len(names), depths)

    def forget(self, holder: Holder) -> None:
        self._clear(holder, None)
        self._sequences.pop(holder, None)

    def sequence(self, holder: Holder) -> int | None:
        return self._sequences.get(holder)

    def holdings(self, holder: Holder, tier: Tier) -> Iterator[PrefixHash]:
        yield from {
            name
            for place, copies in self._copies.items()
            if place.holder == holder and place.tier == tier
            for name in copies
        }

    def stats(self) -> IndexStats:
        return replace(
            self._stats,
            blocks=len({name for copies in self._copies.values() for name in copies}),
            holdings=sum(len(copies) for copies in self._copies.values()),
            holders=len(self._sequences),
            extra=dict(self._stats.extra),
        )

    def _store(self, holder: Holder, event: Stored) -> None:
        names = list(split_chain(event.chain))
        if len(event.chain) % HASH_BYTES or len({event.parent, *names}) <= len(names):
            self._stats.extra["malformed_events"] += 1
            return
        self._copies.setdefault(Place(holder, event.tier, event.fidelity), Counter()).update(names)

    def _remove(self, holder: Holder, event: Removed) -> None:
        if len(event.chain) % HASH_BYTES:
            self._stats.extra["malformed_events"] += 1
            return
        copies = self._copies.get(Place(holder, event.tier, event.fidelity), Counter())
        for name in split_chain(event.chain):
            if name not in copies:
                self._stats.unknown_removals += 1
            elif copies[name] == 1:
                del copies[name]
            else:
                copies[name] -= 1

    def _clear(self, holder: Holder, tier: Tier | None) -> None:
        for place in [place for place in self._copies if place.holder == holder and tier in (None, place.tier)]:
            del self._copies[place]


def _serves(other: Place, place: Place) -> bool:
    """Whether what lies in `other` counts towards the depth of `place`."""
    return other.holder == place.holder and other.tier <= place.tier and other.fidelity <= place.fidelity
