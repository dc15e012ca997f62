"""`least_load` of smg-project/smg (once sglang-router; `policies/least_load.rs`), the least of

    (queued + in-flight tokens) / throughput + 0.15 s * k / (1 - k)

with k the share of KV memory in use, an M/M/1 barrier. Throughput is 2,000 tokens a second unless measured. Its polls
are 10 s apart and in-flight tokens fill the gap; here the tokens are the gateway's own, all of them.
"""

from random import Random

from policies.contract import Decision, Query, Snapshot, WorkerView
from policies.peers.picking import cheapest

THROUGHPUT_TOKENS_PER_SECOND = 2000.0
KV_BARRIER_SECONDS = 0.15
_KV_SHARE_MAX = 0.999


class LeastTokens:
    name = "least-tokens"

    def decide(self, query: Query, snapshot: Snapshot, random: Random) -> Decision:
        costs = [_score(view) for view in snapshot.workers]
        best = cheapest(costs, random)
        return Decision(snapshot.workers[best], f"{costs[best]:.2f} s of tokens", costs=costs)


def _score(view: WorkerView) -> float:
    share = min(view.load.kv_share, _KV_SHARE_MAX)
    tokens = view.load.inflight_tokens
    return tokens / THROUGHPUT_TOKENS_PER_SECOND + KV_BARRIER_SECONDS * share / (1.0 - share)
