"""llm-d's endpoint picker (llm-d/llm-d-router, `pkg/epp/framework/plugins/`): the prefix-cache-affinity filter, then
weighted scorers.

    sticky      endpoints with at least 0.80 of the prompt cached, unless the best of them would start more than 18 s
                after the best other one; time = tokens in flight / 15,928 tokens a second
    score       3 * share of the prompt cached + 2 * (1 - queue, scaled from the shortest to the longest)
                + 2 * (1 - share of KV memory in use)

The largest score wins, equals at random. Queue and KV use are polled every 50 ms there; here they are the gateway's own
accounts, which lag behind nothing.
"""

from collections.abc import Sequence
from random import Random

from policies.contract import Decision, Query, Snapshot, WorkerView
from policies.peers.picking import cheapest, match_share

STICKY_SHARE = 0.80
BREAK_SECONDS = 18.0
TOKENS_PER_SECOND = 15_928.0
PREFIX_WEIGHT, QUEUE_WEIGHT, KV_WEIGHT = 3.0, 2.0, 2.0


class StickyThenScored:
    name = "llm-d"

    def decide(self, query: Query, snapshot: Snapshot, random: Random) -> Decision:
        kept = _sticky(query, snapshot.workers)
        costs = [-score for score in _scores(query, kept)]
        best = cheapest(costs, random)
        stuck = "sticky" if len(kept) < len(snapshot.workers) else "all"
        return Decision(kept[best], f"score {-costs[best]:.2f}, the best of {len(kept)} ({stuck})")


def _sticky(query: Query, workers: Sequence[WorkerView]) -> Sequence[WorkerView]:
    sticky = [view for view in workers if match_share(query.prompt_tokens, view) >= STICKY_SHARE]
    others = [view for view in workers if match_share(query.prompt_tokens, view) < STICKY_SHARE]
    if not sticky or not others:
        return workers
    return workers if _start_seconds(sticky) - _start_seconds(others) > BREAK_SECONDS else sticky


def _start_seconds(workers: Sequence[WorkerView]) -> float:
    return min(view.load.inflight_tokens for view in workers) / TOKENS_PER_SECOND


def _scores(query: Query, workers: Sequence[WorkerView]) -> list[float]:
    queues = [view.load.waiting for view in workers]
    shortest, span = min(queues), max(queues) - min(queues)
    return [
        PREFIX_WEIGHT * match_share(query.prompt_tokens, view)
        + QUEUE_WEIGHT * (1.0 - (queue - shortest) / span if span else 1.0)
        + KV_WEIGHT * (1.0 - min(view.load.kv_share, 1.0))
        for view, queue in zip(workers, queues, strict=True)
    ]
