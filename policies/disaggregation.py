"""One leg or two: whether a prompt is computed where it is answered, or by a worker that does nothing else.

With w a worker's backlog, S its prefill, D the worker that answers and P one that prefills,

    one leg      w_D + S_D, less what a pull saves              and the delay to others:  price_D * (what D computes)
    two legs     w_P + S_P, then the pull of `policies.transfer`                          price_P * S_P
                 with what is left of D's backlog                                         price_D * (what D has left)

A price is the delay to others of a second of work. Those who come later wait behind it (`policies.pricing`), and on D
the requests that decode stand still for as long: that is what workers are divided for. The price there is larger by
their number, and by one where D is meant for decoding alone: somebody is about to decode there, or nobody would have
divided the work. A worker of both roles that stands idle computes by itself, and no number here is a threshold.

Who is thought slow would be sent nothing, and could not prove the contrary; and where nobody has streamed yet, all
estimates may be off alike, and by a hundred. So some prefill workers are tried (`trials`), with prompts of which D has
less than half, one at a time.

A first leg may fail, and then D computes after all. It gets as long as one leg costs, or twice what it should take.
"""

from collections.abc import Callable, Collection, Sequence
from random import Random
from typing import NamedTuple

from policies.choice import fewest_requests
from policies.contract import FleetRates, Query, Snapshot, WorkerView
from policies.legs import Legs, Outcome
from policies.pricing import crowding_each, expected_each, prefill_seconds, slot_price, work_price
from policies.transfer import DeadlineBounds, LinkEstimate, Need, PullOption, Supply, arrival

TIE_SHARE = 0.05
"""Costs this close are equal; of the workers the one with the fewest requests is taken."""
PATIENCE = 2.0

Offer = Callable[[WorkerView], tuple[Supply, LinkEstimate] | None]
"""How the KV of a prompt would come to the worker that answers, once a prefill worker has it; None where it cannot."""


class Whole(NamedTuple):
    """The one leg, as a policy has decided it."""

    worker: WorkerView
    pull: PullOption | None = None
    decodes_alone: bool = False
    """Whether it is meant for decoding and nothing else."""


class _Side(NamedTuple):
    wait_seconds: float
    weight: float
    """What a second of work costs, the request's own time counted in."""


def divide(
    query: Query,
    whole: Whole,
    prefills: Snapshot | None,
    offer: Offer,
    bounds: DeadlineBounds,
    random: Random,
    trials: Collection[str] = (),
) -> Legs:
    """Weigh one leg against two. `prefills`: the prefill workers that are well, None where there are none; `trials`:
    the names of those to be tried. Of the answer, `outcome` is TWO_LEGS, BYPASS or NO_SOURCE."""
    offers = [(view, found) for view in prefills.workers if (found := offer(view))] if prefills is not None else []
    if prefills is None or not offers:
        return Legs(Outcome.NO_SOURCE)
    now, rates = prefills.now, prefills.rates
    target = _decode_side(whole, rates, now)
    cost = _whole_cost(query, whole, target)
    views = [view for view, _ in offers]
    waits, works = expected_each(query.prompt_tokens, views, now)
    crowding = crowding_each(views, rates)
    costs = [
        _divided_cost(query, whole, target, _Side(wait, _weight(view, rates, wait) * crowded), work, *supplied)
        for (view, supplied), wait, work, crowded in zip(offers, waits, works, crowding, strict=True)
    ]
    tried = [
        index
        for index, (view, (supply, _)) in enumerate(offers)
        if view.name in trials and not view.load.inflight and 2 * whole.worker.matched_tokens < supply.tokens
    ]
    best = _pick(views, costs, tried or range(len(views)), random)
    leg, view = waits[best] + works[best], views[best]
    computed = query.prompt_tokens - view.matched_tokens
    return Legs(
        Outcome.TWO_LEGS if tried or costs[best] < cost else Outcome.BYPASS,
        view.name,
        view.rank,
        cost,
        costs[best],
        leg,
        works[best],
        view.prefill.prior_seconds(computed, view.matched_tokens, view.load.running_context_tokens),
        view.matched_tokens,
        min(max(cost, PATIENCE * leg, bounds.seconds_min), bounds.seconds_max),
        bool(tried),
    )


def _decode_side(whole: Whole, rates: FleetRates, now: float) -> _Side:
    view = whole.worker
    wait = view.load.wait_seconds(now)
    decoding = view.load.inflight - view.load.waiting
    return _Side(wait, _weight(view, rates, wait) + decoding + whole.decodes_alone)


def _weight(view: WorkerView, rates: FleetRates, wait_seconds: float) -> float:
    return 1.0 + max(work_price(rates, wait_seconds), slot_price([view]))


def _whole_cost(query: Query, whole: Whole, target: _Side) -> float:
    before, pull = prefill_seconds(query, whole.worker), whole.pull
    own = target.wait_seconds + before - (pull.saved_seconds if pull is not None else 0.0)
    return own + (target.weight - 1.0) * (pull.prefill_seconds if pull is not None else before)


def _divided_cost(
    query: Query, whole: Whole, target: _Side, source: _Side, work: float, supply: Supply, link: LinkEstimate
) -> float:
    view, leg = whole.worker, source.wait_seconds + work
    if supply.tokens <= view.matched_tokens:
        return leg + _whole_cost(query, whole, target)
    need = need_of(query, view, max(target.wait_seconds - leg, 0.0))
    expected = arrival(need, supply, link)
    others = (source.weight - 1.0) * work + (target.weight - 1.0) * expected.after_seconds
    return leg + expected.first_token_seconds + others


def need_of(query: Query, view: WorkerView, wait_seconds: float) -> Need:
    """What the worker lacks of the prompt, as `policies.transfer` weighs it."""
    decoding = view.load.running_context_tokens
    return Need(query.prompt_tokens, view.matched_tokens, view.confirmed_tokens, wait_seconds, view.prefill, decoding)


def _pick(views: Sequence[WorkerView], costs: Sequence[float], places: Sequence[int], random: Random) -> int:
    limit = min(costs[place] for place in places) * (1.0 + TIE_SHARE)
    return fewest_requests(views, [place for place in places if costs[place] <= limit], random)
