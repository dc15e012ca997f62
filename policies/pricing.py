"""What a request costs on a worker, and what its work costs everyone else.

The price has no tuned weights. A unit of prefill work delays other requests; how many seconds of delay it causes in all
is what queueing theory says, from two numbers that the gateway measures (arrivals and dispatched work per worker):

    price = Lq(rho)                     the mean queue that every unit of work passes on; in M/M/1 it is
                                        rho^2 / (1 - rho): nothing when idle, large near saturation
          + lam * h(shortest wait)      arrivals that come before the present backlog has cleared

Prefill is not the only thing that queues: an engine runs so many requests at once (`slot_price`). The dearer counts.

That price is one for the whole fleet. What one worker was given compared with the others multiplies it
(`crowding_each`): a cost that is right for each request alone still lets a fleet lean to one side, where every request
of a shared prefix goes to the one worker that has it, never finds a queue that would repay a copy, and decodes in ever
larger company.
"""

from collections.abc import Sequence
from math import sqrt

from policies.contract import Evidence, FleetRates, Query, WorkerView

PREDICTED_CREDIT = 0.98
HISTORY_CREDIT = 0.95
"""The share of an unconfirmed match that is counted on: about the chance that it holds. Our own dispatches rarely fail;
of history nobody knows what the engine has evicted since. Less than this costs more than it saves: at 0.7 long prompts
look like half recomputed, and a history that is right loses 6 points of its hits."""

CROWDING_SLACK_REQUESTS = 1.0
"""Keeps the ratio finite where a worker was given nothing yet: it is then as if it had been given one request."""

_EXACT = Evidence.EXACT
_CREDITS = {
    Evidence.EXACT: 1.0,
    Evidence.PREDICTED: PREDICTED_CREDIT,
    Evidence.HISTORY: HISTORY_CREDIT,
    Evidence.NONE: 0.0,
}


def credited_tokens(view: WorkerView) -> int:
    """Matched tokens to count on: confirmed ones in full, of the rest a share that depends on the evidence."""
    confirmed = view.confirmed_tokens
    return confirmed + int(_CREDITS[view.evidence] * (view.matched_tokens - confirmed))


def prefill_seconds(query: Query, view: WorkerView) -> float:
    """Expected prefill of the query on the worker: what `InflightAccounting.dispatch` wants, whatever policy chose.

    Where the match is a guess it is a mean of two outcomes: good to route by, nothing to calibrate with.
    """
    cached = credited_tokens(view)
    return view.prefill.prefill_seconds(query.prompt_tokens - cached, cached, view.load.running_context_tokens)


def expected_each(query: Query, workers: Sequence[WorkerView], now: float) -> tuple[list[float], list[float]]:
    """Of every candidate the predicted wait and `prefill_seconds`: the inner loop of a decision, so what takes a call
    elsewhere is written out."""
    prompt_tokens = query.prompt_tokens
    waits: list[float] = []
    works: list[float] = []
    for view in workers:
        load, cached = view.load, view.matched_tokens
        if cached and view.evidence is not _EXACT:  # as `credited_tokens`
            confirmed = view.confirmed_tokens
            cached = confirmed + int(_CREDITS[view.evidence] * (cached - confirmed))
        waits.append(load.wait_seconds(now))
        works.append(view.prefill.prefill_seconds(prompt_tokens - cached, cached, load.running_context_tokens))
    return waits, works


def work_price(rates: FleetRates, wait_seconds_min: float) -> float:
    """Seconds of delay to others for each second of prefill work:

        Lq(rho)     = rho^2 / (1 - rho + 1/N)             N arrivals in the window; 1/N only keeps it finite
        lam * h(x)  = lam * x / (1 - rho + x / tau)       a backlog x stands this long while work keeps coming

    `wait_seconds_min` is the shortest wait of the fleet: the best alternative counts. The mean would let one hot worker
    raise everybody's price and make everything stick to it.
    """
    arrivals_per_second, utilisation, arrivals, tau, _ = rates
    if arrivals <= 0.0:
        return 0.0
    rho = utilisation if utilisation < 1.0 else 1.0
    price = rho * rho / (1.0 - rho + 1.0 / arrivals)
    if wait_seconds_min > 0.0:
        price += arrivals_per_second * wait_seconds_min / (1.0 - rho + wait_seconds_min / tau)
    return price


def crowding_each(workers: Sequence[WorkerView], rates: FleetRates) -> list[float]:
    """How much dearer work is on each worker than on the one that was given the fewest requests of late:

        min((slack + placed) / (slack + fewest), 1 + requests in flight there)

    Work there slows more requests down, in prefill and then in every decode step. As a ratio it needs no calibration
    and no first tokens, counts the same at any load and is one where work is spread evenly. Requests placed within tau
    and not those running now: a burst of siblings belongs together, a fleet that leans to one side for half a minute
    is to be set upright (docs/decisions/balance.md). But no more requests can be held up than are there: a worker with
    nothing to do is not crowded, and a lone conversation stays where it began.
    """
    slack = CROWDING_SLACK_REQUESTS * rates.placed_unit
    fewest = workers[0].load.placed
    for view in workers:
        placed = view.load.placed
        if placed < fewest:
            fewest = placed
    base = slack + fewest
    ratios: list[float] = []
    for view in workers:
        load = view.load
        ratio, most = (slack + load.placed) / base, 1.0 + load.inflight
        ratios.append(ratio if ratio < most else most)
    return ratios


def slot_price(workers: Sequence[WorkerView]) -> float:
    """The mean queue of engines that run c requests each, by Sakasegawa's approximation of M/M/c (1977):

        Lq(rho, c) = rho^sqrt(2 (c + 1)) / (1 - rho + 1/slots)

    with rho the share of all slots that is taken now; 1/slots only keeps it finite. With c = 1 it is the M/M/1 of
    `work_price`. Work holds up all slots of its engine, so it is dear when they are what requests wait for, however
    little prefill there is. Workers of unknown capacity are left out.
    """
    known = slots = taken = 0
    for view in workers:
        if view.capacity_requests:
            known += 1
            slots += view.capacity_requests
            taken += view.load.inflight
    if not taken:
        return 0.0
    rho = taken / slots if taken < slots else 1.0
    return float(rho ** sqrt(2.0 * (slots / known + 1.0)) / (1.0 - rho + 1.0 / slots))
