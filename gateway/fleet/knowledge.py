"""Everything the gateway believes about its workers' caches and load, and the view of it that a policy gets."""

from collections.abc import Mapping, Sequence
from typing import Any

from cachecore.blocks import Chain
from cachecore.holders import Tier, Worker
from cachecore.index.chains import ChainMultiset
from cachecore.index.contract import Match, PrefixIndex
from cachecore.scope import Fidelity
from gateway.fleet.engines.contract import EngineLoad
from gateway.fleet.trust import TrustLevel
from gateway.fleet.worker import ModelPool, Parity, WorkerRecord
from policies.contract import Evidence, FleetRates, Snapshot, WorkerView
from policies.estimates import FleetEstimates
from policies.state.history import RoutingHistory
from policies.state.inflight import InflightAccounting, WorkerKey
from policies.state.predictions import PredictedInsertions

# A named tuple's own constructor is a function in Python.
_new = tuple.__new__
_RATES_SECONDS = 0.02


class Knowledge:
    """The index and the pure state of `policies/`, wired together. Nothing in here does I/O."""

    def __init__(self, index: PrefixIndex) -> None:
        self.index = index
        self.accounting = InflightAccounting()
        self.estimates = FleetEstimates()
        self.predictions = PredictedInsertions(ChainMultiset())
        self.inexact_predictions = PredictedInsertions(ChainMultiset())
        """Of blocks that will be there, but not exact: they are pulled as something less."""
        self.history = RoutingHistory(ChainMultiset())
        self._ranks: dict[WorkerRecord, _Ranks] = {}
        self._rates, self._rates_at, self._rated_workers = FleetRates(), -1.0, 0

    def forget(self, worker: Worker) -> None:
        """One rank of one life of a worker has ended: nothing known of its cache holds any longer."""
        key = (worker.name, worker.rank)
        self.index.forget(worker)
        self.predictions.forget(key)
        self.inexact_predictions.forget(key)
        self.history.forget(key)

    def cancel_predictions(self, request_id: str) -> None:
        """The request failed before its prefill."""
        self.predictions.cancel(request_id)
        self.inexact_predictions.cancel(request_id)

    def remove(self, worker: Worker) -> None:
        """The worker leaves the fleet for good."""
        self.forget(worker)
        key = (worker.name, worker.rank)
        self._ranks.clear()
        self.accounting.remove_worker(*key)
        self.estimates.forget(key)

    def declare_capacity(self, worker: Worker, requests: int) -> None:
        """How many requests a new life runs at once; 0 when it does not say, and its reports have to show it."""
        self.accounting.account(worker.name, worker.rank).new_life(requests)
        self._ranks.clear()

    def report_load(self, worker: Worker, load: EngineLoad, inflight_max: int, until: float) -> None:
        """What an engine said of its queue; see `WorkerAccount.report`."""
        account = self.accounting.account(worker.name, worker.rank)
        known = account.capacity_requests
        account.report(load.running, load.waiting, inflight_max, until)
        if account.capacity_requests != known:
            self._ranks.clear()

    def snapshot(
        self,
        pool: ModelPool,
        candidates: Sequence[WorkerRecord],
        match: Match,
        chain: Chain,
        prompt_tokens: int,
        now: float,
        own_history_only: bool,
        accepted: Fidelity = Fidelity.EXACT,
    ) -> Snapshot:
        """What is known of each candidate about a prompt with this chain, which may be answered from such KV."""
        block = pool.block_size_tokens
        # A full hit still computes its last token, and engines give up that token's whole block.
        cap = (prompt_tokens - 1) // block * block if prompt_tokens else 0
        caps_differ = pool.caps_differ
        confirmed = _confirmed_blocks(match, accepted) if match.depths else _NOTHING
        predicted = recorded = None
        ranks, views = self._ranks, []
        for record in candidates:
            known = ranks.get(record)
            if known is None or known.holders is not record.holders:
                known = self._look_up_ranks(record)
            views += known.views
            if caps_differ:
                cap = record.hit_tokens_max(prompt_tokens, block)
            trust = record.trust
            level = trust.level
            if record.parity is _FAILED or level is _LOAD:
                known.believe(_NOTHING, block, cap, _NONE)
            elif level is _BELIEVED and not own_history_only:
                # Of a worker whose events we follow we know what it will have; of another, what we sent it.
                if predicted is None:
                    predicted = self._predicted(chain, now, accepted)
                known.know(confirmed, predicted, block, cap)
            else:
                if recorded is None:
                    recorded = self.history.depths(chain)
                known.believe(recorded, block, cap, _HISTORY)
                if confirmed and not own_history_only and trust.guesses_by_index:
                    known.guess(confirmed, block, cap)
            if caps_differ and (unit := record.hit_unit_tokens(block)) > block:
                known.round_down(unit)
        # Where workers divide the work, a request is counted at two of them.
        workers = len(pool.workers) if pool.prefill_workers else len(views)
        return _new(Snapshot, (now, views, self._rates_of(now, workers), None))

    def confirmed_tokens(self, match: Match, record: WorkerRecord, rank: int, prompt_tokens: int, block: int) -> int:
        """Leading tokens of a prompt that the index says a worker has unchanged, as in `snapshot`."""
        holder, unit = record.holders[rank], record.hit_unit_tokens(block)
        depth = max(
            (
                depth
                for (place, _, fidelity), depth in match.depths.items()
                if place == holder and fidelity is Fidelity.EXACT
            ),
            default=0,
        )
        return min(depth * block // unit * unit, record.hit_tokens_max(prompt_tokens, block))

    def _predicted(self, chain: Chain, now: float, accepted: Fidelity) -> Mapping[WorkerKey, int]:
        predicted = self.predictions.depths(chain, now)
        if accepted is Fidelity.EXACT or not len(self.inexact_predictions):
            return predicted
        inexact = self.inexact_predictions.depths(chain, now)
        return {key: max(predicted.get(key, 0), inexact.get(key, 0)) for key in predicted.keys() | inexact.keys()}

    def _rates_of(self, now: float, workers: int) -> FleetRates:
        """The fleet's rates, a moment old at most: they move in half a minute."""
        if not 0.0 <= now - self._rates_at < _RATES_SECONDS or workers != self._rated_workers:
            self._rates = self.accounting.rates(now, workers)
            self._rates_at, self._rated_workers = now, workers
        return self._rates

    def _look_up_ranks(self, record: WorkerRecord) -> "_Ranks":
        """The live records of a worker's ranks, looked up once in each of its lives."""
        views: list[WorkerView] = []
        for holder in record.holders:
            key = (holder.name, holder.rank)
            account, prefill = self.accounting.account(*key), self.estimates.prefill(key)
            views.append(WorkerView(*key, account, prefill, capacity_requests=account.capacity_requests))
        found = self._ranks[record] = _Ranks(record.holders, views)
        return found


class _Ranks:
    """What policies see of one worker in one of its lives, a view for each rank."""

    __slots__ = ("_keyed", "holders", "views")

    def __init__(self, holders: Sequence[Worker], views: list[WorkerView]) -> None:
        self.holders = holders
        self.views = views
        self._keyed = [(view, (view.name, view.rank), holder) for view, holder in zip(views, holders, strict=True)]

    def believe(self, depths: Mapping[WorkerKey, int], block: int, cap: int, evidence: Evidence) -> None:
        """Write down what each rank may have, by no events of its own."""
        for view, key, _ in self._keyed:
            matched = depths.get(key, 0) * block
            view.matched_tokens = matched if matched < cap else cap
            view.evidence = evidence if matched else _NONE
            view.confirmed_tokens = 0
            view.tier_tokens = _NO_TIERS

    def guess(self, confirmed: Mapping[Worker, list[int]], block: int, cap: int) -> None:
        """Write down what events said of it once, where that is more."""
        for view, _, holder in self._keyed:
            depths = confirmed.get(holder)
            matched = min(depths[Tier.L2] * block, cap) if depths is not None else 0
            if matched > view.matched_tokens:
                view.matched_tokens, view.evidence = matched, _HISTORY

    def round_down(self, unit: int) -> None:
        """An engine whose blocks are several of ours hits whole ones of its own."""
        for view, _, _ in self._keyed:
            view.matched_tokens -= view.matched_tokens % unit
            view.confirmed_tokens -= view.confirmed_tokens % unit
            l0, l1, l2 = view.tier_tokens
            view.tier_tokens = l0 - l0 % unit, l1 - l1 % unit, l2 - l2 % unit

    def know(
        self, confirmed: Mapping[Worker, list[int]], predicted: Mapping[WorkerKey, int], block: int, cap: int
    ) -> None:
        """Write down what each rank has confirmed, and what it will have."""
        for view, key, holder in self._keyed:
            tiers, matched, evidence = _NO_TIERS, 0, _EXACT
            if confirmed and (depths := confirmed.get(holder)) is not None:
                l0, l1, l2 = depths
                tiers = (min(l0 * block, cap), min(l1 * block, cap), min(l2 * block, cap))
                matched = tiers[2]
            view.confirmed_tokens, view.tier_tokens = matched, tiers
            expected = predicted.get(key, 0) * block if predicted else 0
            if expected > matched < cap:
                matched, evidence = expected if expected < cap else cap, _PREDICTED
            view.matched_tokens, view.evidence = matched, evidence


# Members of enumerations are looked up by a slow path.
_FAILED = Parity.FAILED
_BELIEVED, _LOAD = TrustLevel.EXACT, TrustLevel.LOAD
_EXACT, _PREDICTED, _HISTORY, _NONE = Evidence.EXACT, Evidence.PREDICTED, Evidence.HISTORY, Evidence.NONE
_NOTHING: "Mapping[Any, Any]" = {}
_NO_TIERS = (0, 0, 0)


def _confirmed_blocks(match: Match, accepted: Fidelity) -> dict[Worker, list[int]]:
    """Blocks of each worker by tier, as good as accepted or better, from the index's answer."""
    confirmed: dict[Worker, list[int]] = {}
    for (holder, tier, fidelity), depth in match.depths.items():
        if fidelity > accepted or not isinstance(holder, Worker):
            continue
        depths = confirmed.get(holder)
        if depths is None:
            depths = confirmed[holder] = [0, 0, 0]
        # The index counts nearer tiers in: a farther one without an entry of its own reaches as deep.
        for reached in range(tier, Tier.L2 + 1):
            if depth > depths[reached]:
                depths[reached] = depth
    return confirmed
