"""vllm-project/production-stack (`src/vllm_router/routers/routing_logic.py`).

`LoadAware` is its loadaware router: share of the prompt matched - beta * (load - mean) / max(1, mean), beta 1, the
largest score. `PrefixOnly` is prefixaware, which takes any endpoint of the deepest match and looks at no load; where
every prompt begins alike, everything goes to one worker.
"""

from random import Random

from policies.choice import label
from policies.contract import Decision, Query, Snapshot
from policies.peers.picking import cheapest, match_share

BETA = 1.0


class LoadAware:
    name = "production-stack"

    def decide(self, query: Query, snapshot: Snapshot, random: Random) -> Decision:
        workers = snapshot.workers
        mean = sum(view.load.inflight for view in workers) / len(workers)
        costs = [
            BETA * (view.load.inflight - mean) / max(1.0, mean) - match_share(query.prompt_tokens, view)
            for view in workers
        ]
        best = cheapest(costs, random)
        return Decision(workers[best], f"score {-costs[best]:.2f}", costs=costs)


class PrefixOnly:
    name = "production-stack-prefix"

    def decide(self, query: Query, snapshot: Snapshot, random: Random) -> Decision:
        chosen = snapshot.workers[cheapest([-view.matched_tokens for view in snapshot.workers], random)]
        return Decision(chosen, f"{label(chosen)} has the longest match")
