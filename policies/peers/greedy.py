"""The least predicted time to first token, with the gateway's own predictions and no price on work: what a latency
predictor alone is worth. Past saturation it spends cache to save queueing, and collapses."""

from random import Random

from policies.contract import Decision, Query, Snapshot
from policies.peers.picking import cheapest
from policies.pricing import expected_each


class GreedyTtft:
    name = "greedy-ttft"

    def decide(self, query: Query, snapshot: Snapshot, random: Random) -> Decision:
        waits, works = expected_each(query.prompt_tokens, snapshot.workers, snapshot.now)
        costs = [wait + work for wait, work in zip(waits, works, strict=True)]
        best = cheapest(costs, random)
        ttft_ms = costs[best] * 1e3
        return Decision(snapshot.workers[best], f"starts in {ttft_ms:,.0f} ms", ttft_ms, works[best], waits, costs)
