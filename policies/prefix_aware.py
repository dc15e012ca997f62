"""Affinity without events: back to the worker that had the longest prefix of this prompt before, within bounds of load.

What bites, and is avoided here: a first block that every prompt shares must not draw all traffic to one worker (a short
match is a miss); a miss goes by load and not to the smallest tree, or a worker busy with unique prompts attracts yet
more; and a preferred worker that is far busier than the rest is passed over for the next longest match.
"""

from collections.abc import Sequence
from random import Random

from policies.choice import label, least_loaded
from policies.contract import Decision, Query, Snapshot, WorkerView
from policies.filters import with_room

MATCH_SHARE_MIN = 0.25
"""Of the prompt; a shorter match counts as a miss."""
IMBALANCE_RATIO = 1.5
IMBALANCE_REQUESTS = 4
"""A worker is overloaded beyond 1.5 times the fleet's mean of requests in flight and four."""


class PrefixAware:
    """Longest match of own history, bounded by load. The gateway hands the history in as `matched_tokens`, and
    records every routed request in it."""

    name = "prefix-aware"

    def decide(self, query: Query, snapshot: Snapshot, random: Random) -> Decision:
        workers = with_room(snapshot.workers)
        least = max(MATCH_SHARE_MIN * query.prompt_tokens, 1.0)
        matching = [view for view in workers if view.matched_tokens >= least]
        eligible = _within_bounds(matching, workers)
        if not eligible:
            chosen = least_loaded(workers, random)
            why = "every worker with a match is overloaded" if matching else "no match worth following"
            return Decision(chosen, f"{why}; {label(chosen)} has the least outstanding")
        longest = max([view.matched_tokens for view in eligible])
        chosen = least_loaded([view for view in eligible if view.matched_tokens == longest], random)
        passed = f", {len(matching) - len(eligible)} overloaded passed over" if len(eligible) < len(matching) else ""
        return Decision(chosen, f"{longest:,} of {query.prompt_tokens:,} tokens went there before{passed}")


def _within_bounds(matching: Sequence[WorkerView], workers: Sequence[WorkerView]) -> Sequence[WorkerView]:
    if not matching:
        return matching
    mean = sum([view.load.inflight for view in workers]) / len(workers)
    limit = IMBALANCE_RATIO * mean + IMBALANCE_REQUESTS
    return [view for view in matching if view.load.inflight <= limit]
