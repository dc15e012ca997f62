"""Registered memory: slots that a source puts bytes in to be read, and landings that a puller reads into."""

import asyncio
from collections.abc import Sequence

from cachecore.transfer.engines.contract import Engine, Reading, Region
from cachecore.transfer.frames import Buffer

_PROGRESS_SECONDS = 0.001


class Slots:
    """One region, registered once, cut into equal slots. For one loop, on which the engine is kept going meanwhile."""

    def __init__(self, engine: Engine, slot_bytes: int, slots: int) -> None:
        self.slot_bytes = slot_bytes
        self._engine = engine
        self._timer: asyncio.TimerHandle | None = None
        self._region = Region.allocate(slot_bytes * slots)
        engine.register(self._region)
        self.description = engine.describe(self._region)
        self._slots = slots
        self._free = [self._slot(number) for number in range(slots)]

    def take(self) -> Region | None:
        """None when all are in use."""
        if self._timer is None:
            self._progress()
        return self._free.pop() if self._free else None

    def give_back(self, slot: Region) -> None:
        self._free.append(slot)
        if len(self._free) == self._slots and self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _progress(self) -> None:
        self._engine.progress()
        self._timer = asyncio.get_running_loop().call_later(_PROGRESS_SECONDS, self._progress)

    def _slot(self, number: int) -> Region:
        start = number * self.slot_bytes
        return Region(self._region.memory[start : start + self.slot_bytes], self._region.address + start)


def fill(slot: Region, parts: Sequence[Buffer]) -> None:
    start = 0
    for part in parts:
        slot.memory[start : start + len(part)] = part
        start += len(part)


class Landings:
    """Regions of one size, made and registered when they are first needed: as many as there ever were reads at a time.

    For one loop. A read that was given up may still write, so its landing waits until the engine says that it is over.
    """

    def __init__(self, engine: Engine, size: int) -> None:
        self._engine = engine
        self._size = size
        self._spare: list[Region] = []
        self._unfinished: list[tuple[Region, Reading]] = []

    def take(self) -> Region:
        """Raises EngineUnavailable when no more memory can be registered."""
        unfinished, self._unfinished = self._unfinished, []
        for region, reading in unfinished:
            self.give_back(region, reading)
        if self._spare:
            return self._spare.pop()
        region = Region.allocate(self._size)
        self._engine.register(region)
        return region

    def give_back(self, region: Region, reading: Reading | None = None) -> None:
        """`reading` is one into the region that may still be under way."""
        if reading is None or reading.abandon():
            self._spare.append(region)
        else:
            self._unfinished.append((region, reading))
