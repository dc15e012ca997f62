"""Who may be chosen at all. Filters steer and never refuse: when nobody passes, everybody does."""

from collections.abc import Sequence

from policies.contract import WorkerView


def with_room(workers: Sequence[WorkerView]) -> Sequence[WorkerView]:
    """Workers that are below the number of requests they take at once."""
    free = [view for view in workers if not view.capacity_requests or view.load.inflight < view.capacity_requests]
    return free or workers
