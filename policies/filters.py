"""Who may be chosen at all. Filters steer and never refuse: when nobody passes, everybody does.

Who serves the model and the adapter, is well and answers clients, the caller knows and hands in nobody else. Policies
that know no queue keep to workers `with_room`; `kv-aware` does not: it weighs the wait for a slot against what is
cached behind it.
"""

from collections.abc import Sequence

from policies.contract import Query, WorkerView
from policies.pricing import expected_each


def with_room(workers: Sequence[WorkerView]) -> Sequence[WorkerView]:
    """Workers that are below the number of requests they take at once."""
    free = [view for view in workers if not view.capacity_requests or view.load.inflight < view.capacity_requests]
    return free or workers


def long_enough(query: Query, workers: Sequence[WorkerView]) -> Sequence[WorkerView]:
    """Workers whose context takes the query with all of the output that it may have. Nobody is left out for a length
    that is not known."""
    tokens = query.prompt_tokens + query.output_tokens_max
    able = [view for view in workers if not view.context_tokens_max or tokens <= view.context_tokens_max]
    return able or workers


def in_time(query: Query, workers: Sequence[WorkerView], now: float, seconds_max: float) -> Sequence[WorkerView]:
    """Workers that bring the query's first token within a time, what they might pull left out."""
    waits, works = expected_each(query.prompt_tokens, workers, now)
    early = [view for view, wait, work in zip(workers, waits, works, strict=True) if wait + work <= seconds_max]
    return early or workers
