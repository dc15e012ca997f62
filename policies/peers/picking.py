"""How routers pick by score: the best, equals at random."""

from collections.abc import Sequence
from random import Random

from policies.contract import WorkerView


def cheapest(costs: Sequence[float], random: Random) -> int:
    """Place of the least cost."""
    least = min(costs)
    places = [place for place, cost in enumerate(costs) if cost == least]
    return places[int(random.random() * len(places))] if len(places) > 1 else places[0]


def fewest_inflight(workers: Sequence[WorkerView], random: Random) -> WorkerView:
    """The fewest requests in flight."""
    return workers[cheapest([view.load.inflight for view in workers], random)]


def match_share(prompt_tokens: int, view: WorkerView) -> float:
    """Of the prompt, what is matched there."""
    return view.matched_tokens / prompt_tokens if prompt_tokens else 0.0
