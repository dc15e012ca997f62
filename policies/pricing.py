"""What a request costs on a worker, and what its work costs everyone else.

The price has no tuned weights. A unit of prefill work delays other requests; how many seconds of delay it causes in all
is what queueing theory says, from two numbers that the gateway measures (arrivals and dispatched work per worker):

    price = Lq(rho)                     the mean queue that every unit of work passes on; in M/M/1 it is
                                        rho^2 / (1 - rho): nothing when idle, large near saturation
          + lam * h(shortest wait)      arrivals that come before the present backlog has cleared
"""

from collections.abc import Sequence

from policies.contract import Evidence, FleetRates, Query, WorkerView

PREDICTED_CREDIT = 0.98
HISTORY_CREDIT = 0.95
"""The share of an unconfirmed match that is counted on: about the chance that it holds. Our own dispatches rarely fail;
of history nobody knows what the engine has evicted since. Less than this costs more than it saves: at 0.7 long prompts
look like half recomputed, and a history that is right loses 6 points of its hits."""

_EXACT, _PREDICTED, _HISTORY = Evidence.EXACT, Evidence.PREDICTED, Evidence.HISTORY


def credited_tokens(view: WorkerView) -> int:
    """Matched tokens to count on: confirmed ones in full, of the rest a share that depends on the evidence."""
    evidence, matched = view.evidence, view.matched_tokens
    if evidence is _EXACT:
        return matched
    confirmed = view.confirmed_tokens
    if evidence is _PREDICTED:
        return confirmed + int(PREDICTED_CREDIT * (matched - confirmed))
    if evidence is _HISTORY:
        return confirmed + int(HISTORY_CREDIT * (matched - confirmed))
    return confirmed


def prefill_seconds(query: Query, view: WorkerView) -> float:
    """Expected prefill of the query on the worker: what `InflightAccounting.dispatch` wants, whatever policy chose.

    Where the match is a guess it is a mean of two outcomes: good to route by, nothing to calibrate with.
    """
    return prefill_seconds_each(query, (view,))[0]


def prefill_seconds_each(query: Query, workers: Sequence[WorkerView]) -> list[float]:
    """`prefill_seconds` of every candidate; the inner loop of a decision, so exact evidence takes no call."""
    prompt_tokens, seconds = query.prompt_tokens, []
    for view in workers:
        cached = view.matched_tokens if view.evidence is _EXACT else credited_tokens(view)
        seconds.append(view.prefill.prefill_seconds(prompt_tokens - cached, cached, view.load.running_context_tokens))
    return seconds


def work_price(rates: FleetRates, wait_seconds_min: float) -> float:
    """Seconds of delay to others for each second of prefill work:

        Lq(rho)     = rho^2 / (1 - rho + 1/N)             N arrivals in the window; 1/N only keeps it finite
        lam * h(x)  = lam * x / (1 - rho + x / tau)       a backlog x stands this long while work keeps coming

    `wait_seconds_min` is the shortest wait of the fleet: the best alternative counts. The mean would let one hot worker
    raise everybody's price and make everything stick to it.
    """
    arrivals_per_second, utilisation, arrivals, tau = rates
    if arrivals <= 0.0:
        return 0.0
    rho = utilisation if utilisation < 1.0 else 1.0
    price = rho * rho / (1.0 - rho + 1.0 / arrivals)
    if wait_seconds_min > 0.0:
        price += arrivals_per_second * wait_seconds_min / (1.0 - rho + wait_seconds_min / tau)
    return price
