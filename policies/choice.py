"""Choosing among equals, and the words for it."""

from collections.abc import Sequence
from functools import lru_cache
from hashlib import blake2b
from math import inf
from random import Random

from policies.contract import WorkerView


def least_loaded(workers: Sequence[WorkerView], random: Random) -> WorkerView:
    """The worker with the fewest outstanding tokens, then the fewest requests; equals at random."""
    least = min([(view.load.inflight_tokens, view.load.inflight) for view in workers])
    return any_of([view for view in workers if (view.load.inflight_tokens, view.load.inflight) == least], random)


def fewest_requests(workers: Sequence[WorkerView], places: Sequence[int], random: Random) -> int:
    """Of some places among the workers the one with the fewest requests; of those that have none the one that was given
    the least of late, since chance alone sends eleven of twelve prompts that come one by one to one of two idle workers
    now and then. Of equals each has the same chance."""
    best, fewest, least, equals = places[0], workers[places[0]].load.inflight, inf, 0
    for place in places:
        load = workers[place].load
        inflight, placed = load.inflight, 0.0 if load.inflight else load.placed
        if inflight < fewest or (inflight == fewest and placed < least):
            best, fewest, least, equals = place, inflight, placed, 1
        elif inflight == fewest and placed == least:
            equals += 1
            if random.random() * equals < 1.0:
                best = place
    return best


def any_of(workers: Sequence[WorkerView], random: Random) -> WorkerView:
    """`random.choice` for few, at a tenth of its price."""
    return workers[int(random.random() * len(workers))] if len(workers) > 1 else workers[0]


def stickiest(session: str, workers: Sequence[WorkerView]) -> WorkerView:
    """The worker a session always gets among these: the highest draw of (session, worker), so that a fleet change
    moves only the sessions of the worker that came or went."""
    seed = _digest(session)
    return max(workers, key=lambda view: _draw(seed, _worker_digest(view.name, view.rank)))


def _draw(seed: int, worker: int) -> int:
    """Mixes two random 64-bit words (the finalizer of MurmurHash3): a digest for each pair would cost 1 us each."""
    mixed = seed ^ worker
    mixed = (mixed ^ (mixed >> 33)) * 0xFF51AFD7ED558CCD & 0xFFFFFFFFFFFFFFFF
    mixed = (mixed ^ (mixed >> 33)) * 0xC4CEB9FE1A85EC53 & 0xFFFFFFFFFFFFFFFF
    return mixed ^ (mixed >> 33)


def _digest(text: str) -> int:
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little")


@lru_cache(maxsize=4096)
def _worker_digest(name: str, rank: int) -> int:
    return _digest(f"{name}/{rank}")


def label(view: WorkerView) -> str:
    """A worker's name for a reader; the rank only where there is more than one."""
    return f"{view.name}/{view.rank}" if view.rank else view.name


def milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:,.0f} ms" if seconds >= 0.01 else f"{seconds * 1e3:.1f} ms"
