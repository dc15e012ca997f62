"""Everything the gateway believes about its workers' caches and load, and the view of it that a policy gets."""

from collections.abc import Mapping, Sequence

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
        self._accounts: dict[WorkerKey, tuple[WorkerAccount, PrefillModel]] = {}

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
        self._accounts.pop(key, None)
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
        rates = self.accounting.rates(now, sum(len(record.holders) for record in candidates))
        confirmed = _confirmed_blocks(match) if match.depths else {}
        predicted = recorded = _NOTHING
        if chain:
            # Of a worker whose events we follow we know what it will have; of another, what we sent it.
            believed = [record.events_trusted and not own_history_only for record in candidates]
            predicted = self.predictions.depths(chain, now) if any(believed) else _NOTHING
            recorded = _NOTHING if all(believed) else self.history.depths(chain)
        views: list[WorkerView] = []
        for record in candidates:
            trusted = record.events_trusted and not own_history_only
            for holder in record.holders:
                key = (holder.name, holder.rank)
                tiers, evidence = _NO_TIERS, Evidence.NONE
                matched = 0
                if record.parity is Parity.FAILED:
                    pass
                elif trusted:
                    evidence = Evidence.EXACT
                    depths = confirmed.get(holder)
                    if depths is not None:
                        l0, l1, l2 = depths
                        tiers = (min(l0 * block, cap), min(l1 * block, cap), min(l2 * block, cap))
                        matched = tiers[2]
                    expected = predicted.get(key, 0) * block
                    if expected > matched < cap:
                        matched, evidence = min(expected, cap), Evidence.PREDICTED
                elif key in recorded:
                    matched, evidence = min(recorded[key] * block, cap), Evidence.HISTORY
                account, prefill = self._account(key)
                capacity = account.capacity_requests
                views.append(
                    WorkerView(holder.name, holder.rank, account, prefill, matched, tiers[2], tiers, evidence, capacity)
                )
        return Snapshot(now, views, rates)

    def _account(self, key: WorkerKey) -> tuple[WorkerAccount, PrefillModel]:
        """The live records of one rank, looked up once in its membership."""
        known = self._accounts.get(key)
        if known is None:
            known = self._accounts[key] = (self.accounting.account(*key), self.estimates.prefill(key))
        return known


_NOTHING: Mapping[WorkerKey, int] = {}
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
