"""`cache_aware` of SGLang's router and of vllm-project/router (`policies/cache_aware.rs`), with the CLI's defaults
(`docs/benchmarks/router_overhead.md`):

    imbalanced      max - min > 64 requests and max > 1.5 * min     ->  the fewest requests
    balanced        match > 0.3 of the prompt                       ->  the longest match
                    otherwise                                       ->  the fewest requests

Its own tree keeps every prompt sent, without events; the match handed in here is the gateway's, which is better. The
smallest tree, where the oldest versions send a miss, is no load signal once all trees are full.
"""

from random import Random

from policies.choice import label
from policies.contract import Decision, Query, Snapshot
from policies.peers.picking import cheapest, fewest_inflight, match_share

CACHE_THRESHOLD = 0.3
BALANCE_REQUESTS = 64
BALANCE_RATIO = 1.5


class CacheAware:
    name = "sglang"

    def decide(self, query: Query, snapshot: Snapshot, random: Random) -> Decision:
        workers = snapshot.workers
        loads = [view.load.inflight for view in workers]
        if max(loads) - min(loads) > BALANCE_REQUESTS and max(loads) > BALANCE_RATIO * min(loads):
            return Decision(fewest_inflight(workers, random), "imbalanced: the fewest requests")
        best = workers[cheapest([-view.matched_tokens for view in workers], random)]
        share = match_share(query.prompt_tokens, best)
        if share > CACHE_THRESHOLD:
            return Decision(best, f"{label(best)} has the longest match, {share:.0%}")
        return Decision(fewest_inflight(workers, random), f"no match above {CACHE_THRESHOLD:.0%}: the fewest requests")
