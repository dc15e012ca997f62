"""Send each request where it costs least: its own predicted time to first token, and the delay its work causes others.

    cost = wait + (1 + price) * crowding * S

S is the predicted prefill of the tokens that the worker does not have, `wait` its backlog, `price` the load-dependent
worth of a second of work, `crowding` how much more the worker was given of late than the least used one
(`policies.pricing`). When idle the price is nothing and a request simply starts soonest, which also replicates hot
prefixes; near saturation work is dear and cached tokens win over short queues.
"""

from collections.abc import Sequence
from functools import partial
from random import Random

from policies.choice import fewest_requests, label, milliseconds, stickiest
from policies.contract import Decision, Evidence, Query, Snapshot, WorkerView
from policies.pricing import crowding_each, prefill_seconds_each, slot_price, work_price

TIE_SECONDS = 0.0002
TIE_SHARE = 0.05
"""Costs this close are equal: calibrations of like workers differ by as much, and an idle fleet would send every short
prompt to whoever was measured a percent faster. No cached token is given up for it (see `_pick`)."""


_CACHED = {
    Evidence.EXACT.value: "cached",
    Evidence.PREDICTED.value: "on their way into its cache",
    Evidence.HISTORY.value: "sent there before",
    Evidence.NONE.value: "cached",
}


class KvAware:
    """Predicted time to first token plus the price of the work. Stateless."""

    name = "kv-aware"

    def decide(self, query: Query, snapshot: Snapshot, random: Random) -> Decision:
        workers, now = snapshot.workers, snapshot.now
        waits = [view.load.wait_seconds(now) for view in workers]
        works = prefill_seconds_each(query, workers)
        weight = 1.0 + max(work_price(snapshot.rates, min(waits)), slot_price(workers))
        crowding = crowding_each(workers, snapshot.rates)
        costs = [wait + weight * crowd * work for wait, work, crowd in zip(waits, works, crowding, strict=True)]
        best = _pick(query, workers, costs, random)
        ttft = waits[best] + works[best]
        explain = partial(_explain, query, workers, costs, waits, works, best)
        return Decision(workers[best], explain, ttft * 1e3, works[best], waits, costs)


def _pick(query: Query, workers: Sequence[WorkerView], costs: Sequence[float], random: Random) -> int:
    """Index of the cheapest. Among equals the session's own worker, or one with the fewest requests."""
    least = min(costs)
    best = costs.index(least)
    limit = least * (1.0 + TIE_SHARE) + TIE_SECONDS
    matched = workers[best].matched_tokens
    tied = [view for view, cost in zip(workers, costs, strict=True) if cost <= limit and view.matched_tokens >= matched]
    if len(tied) == 1:
        return best
    return workers.index(stickiest(query.session, tied) if query.session else fewest_requests(tied, random))


def _explain(
    query: Query,
    workers: Sequence[WorkerView],
    costs: Sequence[float],
    waits: Sequence[float],
    works: Sequence[float],
    best: int,
) -> str:
    view = workers[best]
    cached, starts = _CACHED[view.evidence.value], milliseconds(waits[best] + works[best])
    reason = f"{view.matched_tokens:,} of {query.prompt_tokens:,} tokens {cached}, starts in {starts}"
    if len(workers) == 1:
        return reason
    other = min((index for index in range(len(workers)) if index != best), key=costs.__getitem__)
    return f"{reason}; next best {label(workers[other])}: {milliseconds(waits[other] + works[other])}"
