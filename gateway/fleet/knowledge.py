"""Everything the gateway believes about its workers' caches and load, and the view of it that a policy gets."""

from collections.abc import Mapping, Sequence

from cachecore.blocks import Chain
from cachecore.holders import Tier, Worker
from cachecore.index.chains import ChainMultiset
from cachecore.index.contract import Match, PrefixIndex
from cachecore.scope import Fidelity
from gateway.fleet.worker import ModelPool, Parity, WorkerRecord
from policies.contract import Evidence, Snapshot, WorkerView
from policies.estimates import FleetEstimates
from policies.state.history import RoutingHistory
from policies.state.inflight import InflightAccounting
from policies.state.predictions import PredictedInsertions


class Knowledge:
    """The index and the pure state of `policies/`, wired together. Nothing in here does I/O."""

    def __init__(self, index: PrefixIndex) -> None:
        self.index = index
        self.accounting = InflightAccounting()
        self.estimates = FleetEstimates()
        self.predictions = PredictedInsertions(ChainMultiset())
        self.history = RoutingHistory(ChainMultiset())

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
        self.accounting.remove_worker(*key)
        self.estimates.forget(key)

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
        confirmed = _confirmed_blocks(match)
        predicted = self.predictions.depths(chain, now) if chain else {}
        recorded: Mapping[tuple[str, int], int] | None = None
        views: list[WorkerView] = []
        for record in candidates:
            trusted = record.events_trusted and not own_history_only
            for holder in record.holders:
                key = (holder.name, holder.rank)
                tiers = (0, 0, 0)
                matched_blocks, evidence = 0, Evidence.NONE
                if record.parity is Parity.FAILED:
                    pass
                elif trusted:
                    depths = confirmed.get(holder)
                    if depths is not None:
                        tiers = (min(depths[0] * block, cap), min(depths[1] * block, cap), min(depths[2] * block, cap))
                        matched_blocks = depths[2]
                    evidence = Evidence.EXACT
                    if predicted and predicted.get(key, 0) > matched_blocks:
                        matched_blocks, evidence = predicted[key], Evidence.PREDICTED
                elif chain:
                    if recorded is None:
                        recorded = self.history.depths(chain)
                    matched_blocks = recorded.get(key, 0)
                    evidence = Evidence.HISTORY if matched_blocks else Evidence.NONE
                views.append(
                    WorkerView(
                        holder.name,
                        holder.rank,
                        self.accounting.account(*key),
                        self.estimates.prefill(key),
                        min(matched_blocks * block, cap),
                        tiers[2],
                        tiers,
                        evidence,
                    )
                )
        return Snapshot(now, views, rates)


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
