"""Send each request where it costs least: its own predicted time to first token, and the delay its work causes others.

    cost = wait + (1 + price) * crowding * S        less what a pull saves (`policies.transfer`)

S is the predicted prefill of the tokens that the worker does not have, `wait` its backlog, `price` the load-dependent
worth of a second of work, `crowding` how much more work the worker was given of late than the least used one
(`policies.pricing`). When idle the price is nothing and a request simply starts soonest, which also replicates hot
prefixes; near saturation work is dear and cached tokens win over short queues.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from random import Random

from policies.bursts import await_pulls, go_or_wait
from policies.choice import fewest_requests, label, milliseconds, stickiest
from policies.contract import Decision, Evidence, Query, Snapshot, WorkerView
from policies.pricing import costs_each, tied, weigh
from policies.transfer import PullOption

_CACHED = {
    Evidence.EXACT.value: "cached",
    Evidence.PREDICTED.value: "on their way into its cache",
    Evidence.HISTORY.value: "sent there before",
    Evidence.NONE.value: "cached",
}
_NO_PULLS: Mapping[int, PullOption] = {}


class KvAware:
    """Predicted time to first token plus the price of the work. Stateless."""

    name = "kv-aware"

    def decide(self, query: Query, snapshot: Snapshot, random: Random) -> Decision:
        now, workers, rates, options, burst = snapshot
        pulled = options is not None or burst is not None
        waits, works, costs = weigh(query.prompt_tokens, workers, now, rates, pulled)
        if burst is not None and burst.pulls:
            await_pulls(workers, now, burst, waits)
            costs = costs_each(workers, rates, waits, works, pulled)
        pulls = options.lower(workers, waits, works, costs) if options is not None else _NO_PULLS
        best, hold_seconds = _pick(query, workers, costs, random), 0.0
        if burst is not None and (burst.builders or burst.pulls) and best not in pulls:
            best, hold_seconds = go_or_wait(query, workers, now, burst, waits, works, costs, best)
        pull = pulls.get(best)
        view, work = workers[best], works[best]
        explain = partial(_explain, query, workers, view.matched_tokens, view.evidence, waits, works, costs, best, pull)
        ttft = waits[best] + work - (pull.saved_seconds if pull is not None else 0.0)
        return Decision(view, explain, ttft * 1e3, work, waits, costs, pull, hold_seconds, burst)


def _pick(query: Query, workers: Sequence[WorkerView], costs: Sequence[float], random: Random) -> int:
    """Index of the cheapest. Among equals the session's own worker, or one with the fewest requests."""
    places = tied(workers, costs)
    if len(places) == 1:
        return places[0]
    if query.session:
        return workers.index(stickiest(query.session, [workers[place] for place in places]))
    return fewest_requests(workers, places, random)


def _explain(
    query: Query,
    workers: Sequence[WorkerView],
    matched_tokens: int,
    evidence: Evidence,
    waits: Sequence[float],
    works: Sequence[float],
    costs: Sequence[float],
    best: int,
    pull: PullOption | None,
) -> str:
    """In words. Of the views, which are about other requests by now, nothing but the names is read."""
    ttft = waits[best] + works[best] - (pull.saved_seconds if pull is not None else 0.0)
    cached, starts = _CACHED[evidence.value], milliseconds(ttft)
    reason = f"{matched_tokens:,} of {query.prompt_tokens:,} tokens {cached}, starts in {starts}"
    if pull is not None:
        reason = f"{reason}; {pull}"
    if len(workers) == 1:
        return reason
    other = min((index for index in range(len(workers)) if index != best), key=costs.__getitem__)
    return f"{reason}; next best {label(workers[other])}: {milliseconds(waits[other] + works[other])}"
