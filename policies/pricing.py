"""What a request costs on a worker, and what its work costs everyone else.

The price has no tuned weights. A unit of prefill work delays other requests; how many seconds of delay it causes in all
is what queueing theory says, from two numbers that the gateway measures (arrivals and dispatched work per worker):

    price = Lq(rho)                     the mean queue that every unit of work passes on; in M/M/1 it is
                                        rho^2 / (1 - rho): nothing when idle, large near saturation
          + lam * h(shortest wait)      arrivals that come before the present backlog has cleared
          + least kv pressure           requests held up because those that decode give their KV memory back later
                                        (`policies.state.inflight`)

An engine also runs so many requests at once (`slot_price`). The dearer counts.

That price is one for the whole fleet. The work that one worker was given compared with the others multiplies it
(`crowding_each`): a cost that is right for each request alone still lets a fleet lean to one side, where every request
of a shared prefix goes to the one worker that has it, never finds a queue that would repay a copy, and decodes in ever
larger company.
"""

from collections.abc import Sequence
from math import sqrt

from policies.contract import Evidence, FleetRates, Query, WorkerView
from policies.estimates import PrefillModel
from policies.native import native
from policies.state.inflight import WorkerAccount

PREDICTED_CREDIT = 0.98
HISTORY_CREDIT = 0.95
"""The share of an unconfirmed match that is counted on: about the chance that it holds. Our own dispatches rarely fail;
of history nobody knows what the engine has evicted since. Less than this costs more than it saves: at 0.7 long prompts
look like half recomputed, and a history that is right loses 6 points of its hits."""

CROWDING_SLACK_REQUESTS = 1.0
"""Keeps the ratio finite where a worker was given nothing yet: it is then as if it had been given one mean request."""
KV_PRESSURE_MIN = 1e-3
"""Less is nothing: KV memory is ample."""
TIE_SECONDS = 0.0002
TIE_SHARE = 0.05
"""Costs this close are equal: calibrations of like workers differ by as much, and an idle fleet would send every short
prompt to whoever was measured a percent faster. No cached token is given up for it (`python_tied`)."""
PRIORITY_SLOPE = 20.0
"""Found by trying, and flat: 5 has a point less goodput at the knee of the conversation trace, and elsewhere they are
the same, p99 as well."""

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


def expected_each(prompt_tokens: int, workers: Sequence[WorkerView], now: float) -> tuple[list[float], list[float]]:
    """Of every candidate the predicted wait and `prefill_seconds`: the inner loop of a decision, so what takes a call
    elsewhere is written out."""
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


def work_price(rates: FleetRates, wait_seconds_min: float, pulls: bool = False) -> float:
    """Seconds of delay to others for each second of prefill work:

        Lq(rho)     = rho^2 / (1 - rho + 1/N)             N arrivals in the window; 1/N only keeps it finite
                      rho^2                               where prefixes can be pulled
        lam * h(x)  = lam * x / (1 - rho + x / tau)       a backlog x stands this long while work keeps coming

    With pulls Lq proper would hold requests to caches that could as well be copied; rho^2 is the one term here that was
    found by trying.

    `wait_seconds_min` is the shortest wait of the fleet: the best alternative counts. The mean would let one hot worker
    raise everybody's price and make everything stick to it.
    """
    arrivals_per_second, utilisation, arrivals, tau, _ = rates
    if arrivals <= 0.0:
        return 0.0
    rho = utilisation if utilisation < 1.0 else 1.0
    price = rho * rho if pulls else rho * rho / (1.0 - rho + 1.0 / arrivals)
    if wait_seconds_min > 0.0:
        price += arrivals_per_second * wait_seconds_min / (1.0 - rho + wait_seconds_min / tau)
    return price


def kv_price(workers: Sequence[WorkerView]) -> float:
    """Seconds of delay to others for each second of work, for want of KV memory: the least pressure of the fleet, as
    for waits. Workers whose memory is not known are left out."""
    least = 0.0
    for view in workers:
        load = view.load
        if load.kv_tokens:
            pressure = load.kv_pressure()
            if pressure < KV_PRESSURE_MIN:
                return 0.0
            if pressure < least or not least:
                least = pressure
    return least


def queue_key_seconds(arrived_at: float, prefill_seconds: float) -> float:
    """Where a request stands in an engine's queue, if the engine orders it by priority: the smaller first. Short
    prefills pass long ones, and nobody starves: whoever waits `PRIORITY_SLOPE` times the difference is passed no more.
    """
    return arrived_at + PRIORITY_SLOPE * prefill_seconds


def crowding_each(workers: Sequence[WorkerView], rates: FleetRates) -> list[float]:
    """How much dearer work is on each worker than on the one that was given the least of late:

        min((slack + placed) / (slack + least), 1 + requests in flight there)

    Work there slows more requests down, in prefill and then in every decode step. As a ratio it needs no calibration
    and no first tokens, counts the same at any load and is one where work is spread evenly. What was placed within tau
    and not what runs now: a burst of siblings belongs together, a fleet that leans to one side for half a minute is to
    be set upright (docs/decisions/balance.md). But no more requests can be held up than are there: a worker with
    nothing to do is not crowded, and a lone conversation stays where it began.
    """
    arrivals_per_second, utilisation, _, _, unit = rates
    slack = CROWDING_SLACK_REQUESTS * unit * utilisation / arrivals_per_second if arrivals_per_second > 0.0 else 0.0
    least = workers[0].load.placed
    for view in workers:
        placed = view.load.placed
        if placed < least:
            least = placed
    base = slack + least
    if base <= 0.0:
        return [1.0] * len(workers)
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


def costs_each(
    workers: Sequence[WorkerView], rates: FleetRates, waits: Sequence[float], works: Sequence[float], pulled: bool
) -> list[float]:
    """The cost of every candidate (`policies.kv_aware`). `pulled`: prefixes can be."""
    price, slots = work_price(rates, min(waits), pulled) + kv_price(workers), slot_price(workers)
    weight = 1.0 + (price if price > slots else slots)
    costs = crowding_each(workers, rates)
    for index, crowding in enumerate(costs):
        costs[index] = waits[index] + weight * crowding * works[index]
    return costs


def python_weigh(
    prompt_tokens: int, workers: Sequence[WorkerView], now: float, rates: FleetRates, pulled: bool
) -> tuple[list[float], list[float], list[float]]:
    """The waits and works of `expected_each`, and `costs_each`."""
    waits, works = expected_each(prompt_tokens, workers, now)
    return waits, works, costs_each(workers, rates, waits, works, pulled)


def python_tied(workers: Sequence[WorkerView], costs: Sequence[float]) -> list[int]:
    """Places of those that cost as little as the cheapest, and have no less of the prompt."""
    least = min(costs)
    matched = workers[costs.index(least)].matched_tokens
    limit = least * (1.0 + TIE_SHARE) + TIE_SECONDS
    return [index for index, cost in enumerate(costs) if cost <= limit and workers[index].matched_tokens >= matched]


def weigh(
    prompt_tokens: int, workers: Sequence[WorkerView], now: float, rates: FleetRates, pulled: bool
) -> tuple[list[float], list[float], list[float]]:
    """As `python_weigh`."""
    weighed = native.weigh(prompt_tokens, workers, now, rates, pulled) if native is not None else None
    return weighed or python_weigh(prompt_tokens, workers, now, rates, pulled)


def tied(workers: Sequence[WorkerView], costs: Sequence[float]) -> list[int]:
    """As `python_tied`."""
    places = native.tied(workers, costs) if native is not None else None
    return places or python_tied(workers, costs)


if native is not None:
    native.learn(
        WorkerView,
        WorkerAccount,
        PrefillModel,
        _CREDITS,
        CROWDING_SLACK_REQUESTS,
        KV_PRESSURE_MIN,
        TIE_SHARE,
        TIE_SECONDS,
    )
