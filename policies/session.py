"""One worker per session, by consistent hashing with bounded loads (Mirrokni, Thorup, Zadimoghaddam 2016).

Workers stand on a ring at many points each; a session goes to the next worker after its own point that is below the
bound: `LOAD_RATIO` times the mean load. A fleet change moves only the sessions of the worker that came or went, and a
full worker's sessions move on to the next one for as long as it is full.
"""

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from hashlib import blake2b
from math import ceil
from random import Random

from policies.choice import label, least_loaded
from policies.contract import Decision, Query, Snapshot, WorkerView
from policies.filters import with_room
from policies.state.inflight import WorkerKey

LOAD_RATIO = 1.25
LOAD_SLACK_REQUESTS = 4
"""Below this many requests in flight nobody is full: an idle fleet keeps its sessions in place."""
_DIGESTS_PER_WORKER = 16
_POINTS_PER_DIGEST = 8
_ABSENT_MIN = 64


class HashRing:
    """Points of workers on a circle of 64 bits. Pure hashing: equal in every process."""

    def __init__(self) -> None:
        self._points: list[tuple[int, WorkerKey]] = []
        self._keys: set[WorkerKey] = set()

    def __len__(self) -> int:
        return len(self._keys)

    def ensure(self, keys: Sequence[WorkerKey]) -> None:
        """Add the workers that are missing. Those absent stay (they are stepped over), until they are too many."""
        missing = [key for key in keys if key not in self._keys]
        if not missing:
            return
        if len(self._keys) + len(missing) > 2 * len(keys) + _ABSENT_MIN:
            self._points, self._keys, missing = [], set(), list(keys)
        self._keys.update(missing)
        self._points = sorted([*self._points, *(point for key in missing for point in _points(key))])

    def walk(self, session: str) -> Iterator[WorkerKey]:
        """Workers in the session's order of preference, each as often as it has points."""
        start = bisect_left(self._points, (_session_point(session),))
        for _, key in self._points[start:]:
            yield key
        for _, key in self._points[:start]:
            yield key


def _points(key: WorkerKey) -> Iterator[tuple[int, WorkerKey]]:
    name, rank = key
    for number in range(_DIGESTS_PER_WORKER):
        digest = blake2b(f"{name}/{rank}#{number}".encode()).digest()
        for start in range(0, 8 * _POINTS_PER_DIGEST, 8):
            yield int.from_bytes(digest[start : start + 8], "big"), key


def _session_point(session: str) -> int:
    return int.from_bytes(blake2b(session.encode(), digest_size=8).digest(), "big")


class Session:
    """Keeps a session on one worker. Without a session key: the least loaded."""

    name = "session"

    def __init__(self) -> None:
        self._ring = HashRing()

    def decide(self, query: Query, snapshot: Snapshot, random: Random) -> Decision:
        workers = with_room(snapshot.workers)
        if not query.session:
            return Decision(least_loaded(workers, random), "no session key; the least outstanding")
        by_key = {(view.name, view.rank): view for view in workers}
        self._ring.ensure(list(by_key))
        limit = load_limit(workers)
        stepped_over: set[WorkerKey] = set()
        for key in self._ring.walk(query.session):
            view = by_key.get(key)
            if view is None:
                continue
            if view.load.inflight < limit:
                return Decision(view, _reason(view, len(stepped_over)))
            stepped_over.add(key)
        raise AssertionError("the bound is above the mean load, so somebody is below it")


def load_limit(workers: Sequence[WorkerView]) -> int:
    """Requests in flight at which a worker is full: above the mean with the new request counted, so never all are."""
    mean = (sum([view.load.inflight for view in workers]) + 1) / len(workers)
    return max(ceil(LOAD_RATIO * mean), LOAD_SLACK_REQUESTS)


def _reason(view: WorkerView, stepped_over: int) -> str:
    if not stepped_over:
        return f"{label(view)} is the session's own worker"
    return f"{label(view)} is next on the ring; {stepped_over} before it full"
