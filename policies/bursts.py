"""Siblings of a burst: a long prompt that nobody has yet is computed by few workers, and the others come by it.

Each sibling by itself would compute the prompt wherever a worker is idle: nothing is sooner, and ten workers do one
worker's work. Where prefixes can be pulled there is another way, so a prompt that `BUILDERS_MAX` workers compute
already (`policies.state.leases`) is computed by no further one: its siblings wait until the first of them has it, and
are decided then, when it can be pulled and costs are what they are. To join a builder meanwhile would be as soon for
the sibling; but engines batch, and the prompt that all wait for would be there later by what joins it. So a few join,
as long as they start there sooner than the prompt could be pulled to somebody who is idle.

Who goes where the prompt is being pulled to waits for that in the same way: an engine that is asked before the KV has
come computes it. Prompts that are sooner computed than pulled are left alone, and nobody is held for long.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from policies.contract import Query, WorkerView
from policies.state.leases import BUILDERS_MAX, Lease

SHARED_SHARE = 0.9
"""Whoever has this much of what a builder will have need not wait for the rest."""
HOLD_SECONDS_MIN = 0.002
HOLD_SHARE = 1 / 16
"""Who has waited for long waits so much of that longer, until it is decided again: builders that are late are so by
nobody knows how much. A third of the decisions, for the same times to first tokens."""
HOLD_SECONDS_MAX = 10.0
"""Of all waits of one request together."""


class Burst(NamedTuple):
    """What is under way of a prompt that not everybody has whole."""

    block: bytes
    """The first block that no worker has confirmed; empty where somebody has all."""
    tail: bytes
    """The last one before it; empty where there is none."""
    confirmed_tokens: int
    """What comes before `block`."""
    builders: Sequence[Lease]
    """Who computes `block`."""
    pulls: Sequence[Lease]
    """Who pulls `tail`."""
    pull_seconds: Callable[[int], float]
    """What it takes to pull so many tokens, over a usual link."""


class Verdict(NamedTuple):
    place: int
    hold_seconds: float = 0.0
    """Positive: not now, ask again after so long."""


def await_pulls(workers: Sequence[WorkerView], now: float, burst: Burst, waits: list[float]) -> None:
    """Whoever pulls the prompt just now will have it when it has come, and not before."""
    arrivals: dict[tuple[str, int], float] = {}
    for lease in burst.pulls:
        arrivals[lease.key] = min(arrivals.get(lease.key, lease.ready_at), lease.ready_at)
    for place, view in enumerate(workers):
        ready_at = arrivals.get((view.name, view.rank))
        if ready_at is not None and view.matched_tokens > view.confirmed_tokens:
            waits[place] = max(waits[place], ready_at - now)


def go_or_wait(
    query: Query,
    workers: Sequence[WorkerView],
    now: float,
    burst: Burst,
    waits: Sequence[float],
    works: Sequence[float],
    costs: Sequence[float],
    best: int,
) -> Verdict:
    """Where a request goes whose cheapest worker would be `best`, and when."""
    view, held = workers[best], query.held_seconds
    ready_in = max(min([lease.ready_at for lease in burst.builders], default=now) - now, 0.0)
    if view.matched_tokens > view.confirmed_tokens:
        key = (view.name, view.rank)
        arrivals = [lease.ready_at for lease in burst.pulls if lease.key == key]
        if arrivals:
            return _held(Verdict(best), held, min(arrivals) - now)
        joins = len(burst.builders) >= BUILDERS_MAX and any(lease.key == key for lease in burst.builders)
        if joins and waits[best] > ready_in + burst.pull_seconds(view.matched_tokens - burst.confirmed_tokens):
            return _held(Verdict(best), held, ready_in)
        return Verdict(best)
    if len(burst.builders) < BUILDERS_MAX:
        return Verdict(best)
    keys = {lease.key for lease in burst.builders}
    places = [place for place, one in enumerate(workers) if (one.name, one.rank) in keys]
    depth = max([workers[place].matched_tokens for place in places], default=0)
    if not places or best in places or view.matched_tokens >= SHARED_SHARE * depth:
        return Verdict(best)
    rest = view.prefill.prefill_seconds(query.prompt_tokens - depth, depth, view.load.running_context_tokens)
    if burst.pull_seconds(depth - view.confirmed_tokens) >= works[best] - rest:
        return Verdict(best)
    builder = min(places, key=costs.__getitem__)
    return _held(Verdict(builder), held, ready_in)


def _held(otherwise: Verdict, held: float | None, seconds: float) -> Verdict:
    """Wait, unless that is not possible any longer."""
    if held is None or held + seconds > HOLD_SECONDS_MAX:
        return otherwise
    return Verdict(otherwise.place, max(seconds, HOLD_SECONDS_MIN, held * HOLD_SHARE))
