"""AIBrix's prefix-cache router (vllm-project/aibrix, `pkg/plugins/gateway/algorithms/prefix_cache.go`).

imbalanced      max - min > 8 running requests                       ->  the fewest requests
balanced        by match, longest first, then by running requests    ->  the first with
                running <= mean + 1 standard deviation
no match, or nobody within the bound                                 ->  the fewest requests
"""

from random import Random
from statistics import fmean, pstdev

from policies.choice import label
from policies.contract import Decision, Query, Snapshot
from policies.peers.picking import fewest_inflight

BALANCE_REQUESTS = 8
DEVIATIONS = 1.0


class PrefixCache:
    name = "aibrix"

    def decide(self, query: Query, snapshot: Snapshot, random: Random) -> Decision:
        workers = snapshot.workers
        loads = [view.load.inflight for view in workers]
        if max(loads) - min(loads) > BALANCE_REQUESTS:
            return Decision(fewest_inflight(workers, random), "imbalanced: the fewest requests")
        limit = fmean(loads) + DEVIATIONS * pstdev(loads)
        matching = [view for view in workers if view.matched_tokens and view.load.inflight <= limit]
        if not matching:
            return Decision(fewest_inflight(workers, random), "no match within bounds: the fewest requests")
        best = min(matching, key=lambda view: (-view.matched_tokens, view.load.inflight, random.random()))
        return Decision(best, f"{label(best)} has the longest match within bounds, {best.matched_tokens:,} tokens")
