"""Where gateways divide the event streams among them: every gateway reads all of them once more, for their texts.

What a block says cannot be derived from its name, and names are all that a shared index holds. Publishing contents
beside them would double what every change costs the server, for a lookup that few requests need. So a gateway that
looks texts up subscribes to the workers themselves: their sockets serve any number of readers, and its content index is
its own. It pays with naming the blocks of streams that others own, which is why texts are off unless asked for. Texts
of workers that tell each event once are not looked up.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from cachecore.blocks import Chain, PrefixHash
from cachecore.holders import Holder, Tier
from cachecore.index.content_feed import ContentFeed
from cachecore.index.contract import NO_MATCH, IndexEvent, IndexStats, Match
from gateway.fleet.intake import Intake
from gateway.fleet.streams import EventStreams, Intakes, NamingFor, stop_intake
from gateway.fleet.worker import ModelPool, WorkerRecord


class NoIndex:
    """A `PrefixIndex` that remembers nothing but how far each holder's stream has come."""

    def __init__(self) -> None:
        self._sequences: dict[Holder, int] = {}
        self._stats = IndexStats()

    def apply(self, holder: Holder, sequence: int, events: Sequence[IndexEvent]) -> bool:
        if sequence <= self._sequences.get(holder, sequence - 1):
            self._stats.stale_batches += 1
            return False
        self._sequences[holder] = sequence
        return True

    def match(self, chain: Chain) -> Match:
        return NO_MATCH

    def forget(self, holder: Holder) -> None:
        self._sequences.pop(holder, None)

    def sequence(self, holder: Holder) -> int | None:
        return self._sequences.get(holder)

    def holdings(self, holder: Holder, tier: Tier) -> Iterator[PrefixHash]:
        return iter(())

    def stats(self) -> IndexStats:
        return replace(self._stats, holders=len(self._sequences))


class TextStreams:
    """Implements `EventStreams`: what `inner` does, and an intake of its own for each stream, for `contents` alone."""

    def __init__(self, inner: EventStreams, naming_for: NamingFor, contents: ContentFeed) -> None:
        self._inner = inner
        self._index = NoIndex()
        self._intakes = Intakes(self._index, naming_for, contents)
        self._followed: dict[str, list[Intake]] = {}

    async def follow(self, record: WorkerRecord, pool: ModelPool) -> None:
        await self._inner.follow(record, pool)
        endpoints = record.discovery.events if record.discovery else None
        if endpoints is None or endpoints.told_once:
            return
        await self._stop_intakes(record.name)
        opened = [await self._intakes.open(holder, endpoints, pool) for holder in record.holders]
        self._followed[record.name] = [intake for intake in opened if intake is not None]

    async def leave(self, record: WorkerRecord) -> None:
        await self._stop_intakes(record.name)
        await self._inner.leave(record)

    async def stop(self) -> None:
        for name in list(self._followed):
            await self._stop_intakes(name)
        self._intakes.close()
        await self._inner.stop()

    async def _stop_intakes(self, name: str) -> None:
        for intake in self._followed.pop(name, ()):
            await stop_intake(intake)
            self._index.forget(intake.holder)
