"""Who holds KV, and where: workers, pools, tiers, places."""

from enum import IntEnum
from typing import NamedTuple, NewType

from cachecore.scope import Fidelity

WorkerName = NewType("WorkerName", str)
Epoch = NewType("Epoch", int)
"""One life of a worker. What is known of an earlier epoch is void."""


class Tier(IntEnum):
    """Distance of a holding from the engine's compute; smaller starts sooner."""

    L0 = 0
    """The engine's own memory."""
    L1 = 1
    """Host memory of a worker."""
    L2 = 2
    """A pool that every worker can read."""

    __hash__ = int.__hash__  # Enum's own is a Python function; places are hashed 64 at a time in a match


# Tuples, not dataclasses: holders are dictionary keys on the hot path and a tuple hashes and compares in C.
class Worker(NamedTuple):
    """One data-parallel rank of one life of a worker: each rank has its own KV and its own event stream."""

    name: WorkerName
    epoch: Epoch
    rank: int = 0


class Pool(NamedTuple):
    """A shared store; outlives workers."""

    name: str
    generation: int


Holder = Worker | Pool


class Place(NamedTuple):
    """Where exactly a holding lies, and how good it is."""

    holder: Holder
    tier: Tier
    fidelity: Fidelity = Fidelity.EXACT
