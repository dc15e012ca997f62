"""The fewest outstanding tokens, blind to caches."""

from random import Random

from policies.choice import least_loaded
from policies.contract import Decision, Query, Snapshot
from policies.filters import with_room


class LeastLoaded:
    """Picks the worker with the fewest prompt tokens in flight, counted at dispatch; equals at random."""

    name = "least-loaded"

    def decide(self, query: Query, snapshot: Snapshot, random: Random) -> Decision:
        chosen = least_loaded(with_room(snapshot.workers), random)
        load = chosen.load
        reason = f"{load.inflight_tokens:,} tokens in {load.inflight} requests outstanding, the least of the fleet"
        return Decision(chosen, reason, costs=[float(view.load.inflight_tokens) for view in snapshot.workers])
