"""What is believed of every worker's cache, and the snapshot of it that a policy gets.

Three sources say what a worker has of a prompt: confirmed depths (its own events, through an index), predictions (what
it was sent and has not announced yet) and history (what it was sent, where nothing is announced). Which of them count
for a worker is its `Basis`, and the caller's business, as is the index. The gateway and the audit run this very code.

What an index says is handed in as numbers by holder: whatever object the index calls a life of a worker by. A life that
has ended is another object, so nothing that is known of it can be mistaken for the present one's.
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from enum import Enum
from typing import Any, NamedTuple

from policies.bursts import Burst
from policies.contract import Decision, Evidence, FleetRates, Snapshot, WorkerView
from policies.estimates import FleetEstimates
from policies.state.chains import HASH_BYTES, ChainStore
from policies.state.history import RoutingHistory
from policies.state.inflight import InflightAccounting, WorkerKey
from policies.state.leases import LEASES_MAX, Leases
from policies.state.pins import PinnedChains
from policies.state.predictions import PredictedInsertions

# A named tuple's own constructor is a function in Python.
_new = tuple.__new__
RATES_SECONDS = 0.02
"""Fleet rates are that old at most: they move in half a minute."""

Depths = Mapping[Hashable, Sequence[int]]
"""By holder: blocks reachable with L0; with L0 and L1; with all tiers."""
NO_DEPTHS: Depths = {}
_TIERS = 3


class Basis(Enum):
    """By what it is judged what a worker has cached."""

    EVENTS = 0
    """What its events confirm, and what it was sent since."""
    GUESSES = 1
    """What it was sent before, or its events said once, whichever is more."""
    HISTORY = 2
    """What it was sent before."""
    NOTHING = 3


class Inquiry(NamedTuple):
    """A prompt about which it is asked who has how much of it."""

    chain: bytes
    prompt_tokens: int
    block_size_tokens: int
    exact: bool = True
    """Whether nothing but exact KV is accepted: predictions of other KV then do not count."""
    history_only: bool = False
    """For a policy that goes by nothing but what was sent where."""
    units_differ: bool = False
    """Whether some worker hits other units than whole blocks of this size (`WorkerBelief.unit_tokens`)."""


class WorkerBelief:
    """One worker in one of its lives: a view for each rank, which every snapshot writes anew."""

    __slots__ = ("basis", "holders", "keyed", "unit_tokens", "views")

    def __init__(self, views: Sequence[WorkerView], holders: Sequence[Hashable], basis: Basis = Basis.EVENTS) -> None:
        self.views = views
        self.holders = holders
        self.basis = basis
        self.unit_tokens = 0
        """It has multiples of this cached, and of a whole hit computes that much again; 0 for the inquiry's blocks."""
        self.keyed = [(view, (view.name, view.rank), holder) for view, holder in zip(views, holders, strict=True)]

    def __repr__(self) -> str:
        return f"WorkerBelief({[key for _, key, _ in self.keyed]}, {self.basis.name})"


def blocks_by_holder(depths: Mapping[Any, int], fidelity: int = 0) -> dict[Hashable, list[int]]:
    """`Depths` of an index's answer, depths by (holder, tier, fidelity), from what is as good as `fidelity` or better.

    An index counts nearer tiers in: a farther one without an entry of its own reaches as deep.
    """
    found: dict[Hashable, list[int]] = {}
    for (holder, tier, held), depth in depths.items():
        if held > fidelity:
            continue
        reached = found.get(holder)
        if reached is None:
            if tier == 0:
                found[holder] = [depth, depth, depth]
                continue
            reached = found[holder] = [0, 0, 0]
        for farther in range(tier, _TIERS):
            if depth > reached[farther]:
                reached[farther] = depth
    return found


class Beliefs:
    """The pure state that routing decides on, but for the index. `new_store` makes an empty `ChainStore`."""

    def __init__(self, new_store: Callable[[], ChainStore], estimates: FleetEstimates | None = None) -> None:
        self.accounting = InflightAccounting(pins=PinnedChains(new_store()))
        self.estimates = estimates or FleetEstimates()
        self.predictions = PredictedInsertions(new_store())
        self.inexact_predictions = PredictedInsertions(new_store())
        """Of blocks that will be there, but not exact: they are pulled as something less."""
        self.history = RoutingHistory(new_store())
        self.prefills = Leases()
        self.arrivals = Leases(LEASES_MAX)
        self._rates, self._rates_at, self._rated_workers = FleetRates(), -1.0, 0

    def worker(self, keys: Sequence[WorkerKey], holders: Sequence[Hashable] | None = None) -> WorkerBelief:
        """A worker's ranks with their live records. `holders`: how the index calls each; as their keys when None."""
        views: list[WorkerView] = []
        for key in keys:
            account, prefill = self.accounting.account(*key), self.estimates.prefill(key)
            views.append(WorkerView(*key, account, prefill, capacity_requests=account.capacity_requests))
        return WorkerBelief(views, keys if holders is None else holders)

    def forget_cache(self, key: WorkerKey) -> None:
        """A life of a worker has ended, and nothing that was known of its cache holds any longer."""
        self.predictions.forget(key)
        self.inexact_predictions.forget(key)
        self.history.forget(key)
        self.prefills.forget(key)
        self.arrivals.forget(key)

    def cancel_predictions(self, request_id: str) -> None:
        """The request failed before its prefill."""
        self.predictions.cancel(request_id)
        self.inexact_predictions.cancel(request_id)

    def answer(
        self,
        inquiry: Inquiry,
        workers: Sequence[WorkerBelief],
        confirmed: Depths,
        now: float,
        rated_workers: int = 0,
    ) -> Snapshot:
        """What is known of each worker about a prompt. Rates are per worker, of `rated_workers` (these here when 0)."""
        chain, prompt_tokens, block, exact, history_only, units_differ = inquiry
        # A full hit still computes its last token, and engines give up that token's whole block.
        cap = (prompt_tokens - 1) // block * block if prompt_tokens else 0
        predicted = recorded = None
        views: list[WorkerView] = []
        for worker in workers:
            views += worker.views
            basis = worker.basis
            if units_differ:
                unit = worker.unit_tokens or block
                cap = (prompt_tokens - 1) // unit * unit if prompt_tokens else 0
            if basis is _EVENTS and not history_only:
                # Of a worker whose events we follow we know what it will have; of another, what we sent it.
                if predicted is None:
                    predicted = self._predicted(chain, now, exact)
                _know(worker, confirmed, predicted, block, cap)
            elif basis is _NOTHING:
                _believe(worker, _NO_CHAINS, block, cap)
            else:
                if recorded is None:
                    recorded = self.history.depths(chain)
                _believe(worker, recorded, block, cap)
                if basis is _GUESSES and confirmed and not history_only:
                    _guess(worker, confirmed, block, cap)
            if units_differ and worker.unit_tokens > block:
                _round_down(worker)
        return _new(Snapshot, (now, views, self.rates(now, rated_workers or len(views)), None, None))

    def burst(
        self, inquiry: Inquiry, views: Sequence[WorkerView], now: float, pull_seconds: Callable[[int], float]
    ) -> Burst:
        """What is under way of a prompt, beside what `answer` has said of it."""
        confirmed, chain = max([view.confirmed_tokens for view in views]), inquiry.chain
        at = confirmed // inquiry.block_size_tokens * HASH_BYTES
        block, tail = chain[at : at + HASH_BYTES], chain[max(at - HASH_BYTES, 0) : at]
        builders, pulls = self.prefills.of(block, now), self.arrivals.of(tail, now)
        return Burst(block, tail, confirmed, builders, pulls, pull_seconds)

    def lease(self, request_id: str, burst: Burst, decision: Decision, prefill_seconds: float, now: float) -> None:
        """A request is about to be dispatched. What it brings to its worker, others may want to wait for."""
        view, pull = decision.worker, decision.pull
        key = (view.name, view.rank)
        if pull is not None:
            if burst.tail and pull.end_token >= burst.confirmed_tokens:
                self.arrivals.acquire(burst.tail, request_id, key, now + pull.load_seconds, now)
        elif burst.block and view.matched_tokens <= burst.confirmed_tokens:
            ready_at = now + view.load.wait_seconds(now) + prefill_seconds
            self.prefills.acquire(burst.block, request_id, key, ready_at, now)

    def release_leases(self, request_id: str) -> None:
        """The first token has come, or the request has ended."""
        self.prefills.release(request_id)
        self.arrivals.release(request_id)

    def rates(self, now: float, workers: int) -> FleetRates:
        """The fleet's rates, a moment old at most."""
        if not 0.0 <= now - self._rates_at < RATES_SECONDS or workers != self._rated_workers:
            self._rates = self.accounting.rates(now, workers)
            self._rates_at, self._rated_workers = now, workers
        return self._rates

    def _predicted(self, chain: bytes, now: float, exact: bool) -> Mapping[WorkerKey, int]:
        predicted = self.predictions.depths(chain, now)
        if exact or not len(self.inexact_predictions):
            return predicted
        inexact = self.inexact_predictions.depths(chain, now)
        return {key: max(predicted.get(key, 0), inexact.get(key, 0)) for key in predicted.keys() | inexact.keys()}


# Members of enumerations are looked up by a slow path.
_EVENTS, _GUESSES, _NOTHING = Basis.EVENTS, Basis.GUESSES, Basis.NOTHING
_EXACT, _PREDICTED, _HISTORY, _NONE = Evidence.EXACT, Evidence.PREDICTED, Evidence.HISTORY, Evidence.NONE
_NO_CHAINS: Mapping[Any, int] = {}
_NO_TIERS = (0, 0, 0)


def _know(worker: WorkerBelief, confirmed: Depths, predicted: Mapping[WorkerKey, int], block: int, cap: int) -> None:
    """Write down what each rank has confirmed, and what it will have."""
    for view, key, holder in worker.keyed:
        tiers, matched, evidence = _NO_TIERS, 0, _EXACT
        if confirmed and (depths := confirmed.get(holder)) is not None:
            l0, l1, l2 = depths
            l0, l1, matched = l0 * block, l1 * block, l2 * block
            if matched > cap:
                l0, l1, matched = l0 if l0 < cap else cap, l1 if l1 < cap else cap, cap
            tiers = (l0, l1, matched)
        view.confirmed_tokens, view.tier_tokens = matched, tiers
        expected = predicted.get(key, 0) * block if predicted else 0
        if expected > matched < cap:
            matched, evidence = expected if expected < cap else cap, _PREDICTED
        view.matched_tokens, view.evidence = matched, evidence


def _believe(worker: WorkerBelief, recorded: Mapping[WorkerKey, int], block: int, cap: int) -> None:
    """Write down what each rank may have, by no events of its own."""
    for view, key, _ in worker.keyed:
        matched = recorded.get(key, 0) * block
        view.matched_tokens = matched if matched < cap else cap
        view.evidence = _HISTORY if matched else _NONE
        view.confirmed_tokens = 0
        view.tier_tokens = _NO_TIERS


def _guess(worker: WorkerBelief, confirmed: Depths, block: int, cap: int) -> None:
    """Write down what events said of it once, where that is more."""
    for view, _, holder in worker.keyed:
        depths = confirmed.get(holder)
        matched = min(depths[-1] * block, cap) if depths is not None else 0
        if matched > view.matched_tokens:
            view.matched_tokens, view.evidence = matched, _HISTORY


def _round_down(worker: WorkerBelief) -> None:
    """An engine whose blocks are several of ours hits whole ones of its own."""
    unit = worker.unit_tokens
    for view, _, _ in worker.keyed:
        view.matched_tokens -= view.matched_tokens % unit
        view.confirmed_tokens -= view.confirmed_tokens % unit
        l0, l1, l2 = view.tier_tokens
        view.tier_tokens = l0 - l0 % unit, l1 - l1 % unit, l2 - l2 % unit
