"""Preble's E2, exploit or explore (Srivatsa and others, "Preble: Efficient Distributed Prompt Scheduling", 2024;
arXiv:2407.00023, section 3).

    exploit     where more of the prompt is cached than not: the least loaded of the workers with the longest match
    explore     otherwise the least of L + P
                L   work given to the worker in the last three minutes: prefill of what it had to compute, and decode
                P   prefill of what the worker lacks of it

Loads are seconds, by the gateway's estimates (AIBrix's port has the times of one model on one GPU built in). Not
rebuilt: the cost of what is evicted for the prompt, the moving of load between workers, and the autoscaling of hot
prefixes.
"""

from collections import defaultdict, deque
from collections.abc import Sequence
from random import Random

from policies.choice import label
from policies.contract import Decision, Query, Snapshot, WorkerView
from policies.peers.contract import Asked
from policies.peers.picking import cheapest
from policies.pricing import prefill_seconds
from policies.state.inflight import WorkerKey

WINDOW_SECONDS = 180.0
DECODE_SECONDS_PRIOR = 2.0
_DECODE_WEIGHT = 0.05


class Preble:
    """Implements `policies.peers.contract.Observer`."""

    name = "preble"

    def __init__(self) -> None:
        self._work: defaultdict[WorkerKey, float] = defaultdict(float)
        self._placed: deque[tuple[float, WorkerKey, float]] = deque()
        self._decoding: dict[str, float] = {}
        self._decode_seconds = DECODE_SECONDS_PRIOR

    def asked(self, asked: Asked) -> None:
        """It goes by the match alone."""

    def decide(self, query: Query, snapshot: Snapshot, random: Random) -> Decision:
        workers = snapshot.workers
        longest = max(view.matched_tokens for view in workers)
        loads = self._loads(workers, snapshot.now)
        if 2 * longest > query.prompt_tokens:
            costs = [
                load if view.matched_tokens == longest else float("inf")
                for view, load in zip(workers, loads, strict=True)
            ]
        else:
            costs = [load + prefill_seconds(query, view) for view, load in zip(workers, loads, strict=True)]
        best = cheapest(costs, random)
        way = "exploit" if 2 * longest > query.prompt_tokens else "explore"
        return Decision(workers[best], f"{way}: {label(workers[best])}, {costs[best]:.1f} s of work", costs=costs)

    def dispatched(self, request_id: str, asked: Asked, view: WorkerView, now: float) -> None:
        key = (view.name, view.rank)
        seconds = prefill_seconds(Query(asked.prompt_tokens), view) + self._decode_seconds
        self._work[key] += seconds
        self._placed.append((now + WINDOW_SECONDS, key, seconds))

    def first_token(self, request_id: str, now: float) -> None:
        self._decoding[request_id] = now

    def finished(self, request_id: str, now: float) -> None:
        started = self._decoding.pop(request_id, None)
        if started is not None:
            self._decode_seconds += _DECODE_WEIGHT * (now - started - self._decode_seconds)

    def _loads(self, workers: Sequence[WorkerView], now: float) -> list[float]:
        while self._placed and self._placed[0][0] <= now:
            _, key, seconds = self._placed.popleft()
            self._work[key] -= seconds
        return [self._work[view.name, view.rank] for view in workers]
