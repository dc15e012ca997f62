"""Everything the gateway believes about its workers' caches and load, and the view of it that a policy gets."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from cachecore.blocks import Chain
from cachecore.holders import Tier, Worker
from cachecore.index.chains import ChainMultiset
from cachecore.index.contract import Match, PrefixIndex
from cachecore.scope import Fidelity
from gateway.fleet.worker import EngineLoad, ModelPool, Parity, WorkerRecord
from policies.contract import Evidence, Snapshot, WorkerView
from policies.estimates import FleetEstimates, PrefillModel
from policies.state.history import RoutingHistory
from policies.state.inflight import InflightAccounting, WorkerAccount, WorkerKey
from policies.state.predictions import PredictedInsertions


class Knowledge:
    """The index and the pure state of `policies/`, wired together. Nothing in here does I/O."""

    def __init__(self, index: PrefixIndex) -> None:
        self.index = index
        self.accounting = InflightAccounting()
        self.estimates = FleetEstimates()
        self.predictions = PredictedInsertions(ChainMultiset())
        self.history = RoutingHistory(ChainMultiset())
        self._ranks: dict[WorkerRecord, tuple[tuple[Worker, ...], list[_Rank]]] = {}

    def forget(self, worker: Worker) -> None:
        """One rank of one life of a worker has ended: nothing known of its cache holds any longer."""
        key = (worker.name, worker.rank)
        self.index.forget(worker)
        self.predictions.forget(key)
        self.history.forget(key)

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

    def report_load(self, worker: Worker, load: EngineLoad, inflight_max: int, until: float) -> None:
        """What an engine said of its queue; see `WorkerAccount.report`."""
        account = self.accounting.account(worker.name, worker.rank)
        account.report(load.running, load.waiting, inflight_max, until)

    def snapshot(
        self,
        pool: ModelPool,
        candidates: Sequence[WorkerRecord],
        match: Match,
        chain: Chain,
        prompt_tokens: int,
        now: float,
        own_history_only: bool,
    ) -> Snapshot:
        """What is known of each candidate about a prompt with this chain."""
        block = pool.block_size_tokens
        # A full hit still computes its last token, and engines give up that token's whole block.
        cap = max(prompt_tokens - 1, 0) // block * block
        confirmed = _confirmed_blocks(match) if match.depths else _NOT_CONFIRMED
        predicted = recorded = None
        views: list[WorkerView] = []
        for record in candidates:
            # Of a worker whose events we follow we know what it will have; of another, what we sent it.
            followed = record.events_trusted and not own_history_only
            foreign = record.parity is _FAILED
            if chain and not foreign:
                if followed:
                    predicted = self.predictions.depths(chain, now) if predicted is None else predicted
                else:
                    recorded = self.history.depths(chain) if recorded is None else recorded
            for holder, key, account, prefill in self._ranks_of(record):
                matched, tiers, evidence = 0, _NO_TIERS, _NONE
                if foreign:
                    pass
                elif not followed:
                    if recorded and key in recorded:
                        matched, evidence = min(recorded[key] * block, cap), _HISTORY
                else:
                    evidence = _EXACT
                    if confirmed and (depths := confirmed.get(holder)) is not None:
                        l0, l1, l2 = depths
                        tiers = (min(l0 * block, cap), min(l1 * block, cap), min(l2 * block, cap))
                        matched = tiers[2]
                    expected = predicted.get(key, 0) * block if predicted else 0
                    if expected > matched < cap:
                        matched, evidence = min(expected, cap), _PREDICTED
                name, rank = key
                capacity = account.capacity_requests
                views.append(WorkerView(name, rank, account, prefill, matched, tiers[2], tiers, evidence, capacity))
        return Snapshot(now, views, self.accounting.rates(now, len(views)))

    def _ranks_of(self, record: WorkerRecord) -> "list[_Rank]":
        """The live records of a worker's ranks, looked up once in each of its lives."""
        known = self._ranks.get(record)
        if known is not None and known[0] is record.holders:
            return known[1]
        ranks: list[_Rank] = []
        for holder in record.holders:
            key = (holder.name, holder.rank)
            ranks.append(_Rank(holder, key, self.accounting.account(*key), self.estimates.prefill(key)))
        self._ranks[record] = (record.holders, ranks)
        return ranks


class _Rank(NamedTuple):
    holder: Worker
    key: WorkerKey
    account: WorkerAccount
    prefill: PrefillModel


# Members of enumerations are looked up by a slow path.
_FAILED = Parity.FAILED
_EXACT, _PREDICTED, _HISTORY, _NONE = Evidence.EXACT, Evidence.PREDICTED, Evidence.HISTORY, Evidence.NONE
_NOT_CONFIRMED: "Mapping[Worker, list[int]]" = {}
_NO_TIERS = (0, 0, 0)


def _confirmed_blocks(match: Match) -> dict[Worker, list[int]]:
    """Exact blocks of each worker by tier, from the index's answer."""
    confirmed: dict[Worker, list[int]] = {}
    for (holder, tier, fidelity), depth in match.depths.items():
        if fidelity is not Fidelity.EXACT or not isinstance(holder, Worker):
            continue
        depths = confirmed.get(holder)
        if depths is None:
            depths = confirmed[holder] = [0, 0, 0]
        # The index counts nearer tiers in: a farther one without an entry of its own reaches as deep.
        for reached in range(tier, Tier.L2 + 1):
            if depth > depths[reached]:
                depths[reached] = depth
    return confirmed
