"""Each worker in turn, whatever it costs: the baseline."""

from collections.abc import Sequence
from random import Random

from policies.contract import Decision, Query, Snapshot, WorkerView
from policies.filters import with_room
from policies.state.inflight import WorkerKey

_FORGOTTEN_MIN = 256


class RoundRobin:
    """Picks the worker whose last turn is longest ago, those that never had one first (at random).

    A counter modulo the number of candidates would skip and repeat whenever a worker drops out or a request has fewer
    candidates; a turn remembered per worker does not.
    """

    name = "round-robin"

    def __init__(self) -> None:
        self._turns: dict[WorkerKey, int] = {}
        self._turn = 0

    def decide(self, query: Query, snapshot: Snapshot, random: Random) -> Decision:
        workers, last = with_room(snapshot.workers), self._turns
        turns = [last.get((view.name, view.rank), 0) for view in workers]
        oldest = min(turns)
        chosen = workers[turns.index(oldest)]
        if not oldest:
            chosen = random.choice([view for view, turn in zip(workers, turns, strict=True) if not turn])
        self._turn += 1
        last[chosen.name, chosen.rank] = self._turn
        if len(last) > _FORGOTTEN_MIN + 2 * len(workers):
            self._forget_absent(workers)
        return Decision(chosen, f"turn {self._turn:,}, round robin over {len(workers)}")

    def _forget_absent(self, workers: Sequence[WorkerView]) -> None:
        present = {(view.name, view.rank) for view in workers}
        self._turns = {key: turn for key, turn in self._turns.items() if key in present}
