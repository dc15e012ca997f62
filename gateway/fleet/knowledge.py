"""Everything the gateway believes about its workers' caches and load, and the view of it that a policy gets."""

from collections.abc import Sequence

from cachecore.blocks import Chain
from cachecore.holders import Tier, Worker
from cachecore.index.chains import ChainMultiset
from cachecore.index.contract import Match, PrefixIndex
from cachecore.index.memory import MemoryIndex
from cachecore.index.mirror import MirrorIndex
from cachecore.scope import Fidelity
from gateway.fleet.engines.contract import EngineLoad
from gateway.fleet.trust import TrustLevel
from gateway.fleet.worker import ModelPool, Parity, WorkerRecord
from policies.contract import Snapshot
from policies.estimates import FleetEstimates, LinkPrior
from policies.state.beliefs import NO_DEPTHS, Basis, Beliefs, Inquiry, WorkerBelief, blocks_by_holder

# A named tuple's own constructor is a function in Python.
_new = tuple.__new__

CONTEXT_TOKENS_MAX = 1 << 40
"""More than anybody takes."""


class Knowledge(Beliefs):
    """The index and the pure state of `policies/`, wired together. Nothing in here does I/O."""

    def __init__(self, index: PrefixIndex, link: LinkPrior | None = None) -> None:
        """`link`: what every link is taken for before anything was moved over it."""
        super().__init__(ChainMultiset, FleetEstimates(link=link))
        self.index = index
        self._workers: dict[WorkerRecord, WorkerBelief] = {}
        """Made once in each life of a worker."""
        self.context_tokens_min = CONTEXT_TOKENS_MAX
        """Prompt and output that every worker takes that says how much."""

    def forget(self, worker: Worker) -> None:
        """One rank of one life of a worker has ended: nothing known of its cache holds any longer."""
        self.index.forget(worker)
        self.forget_cache((worker.name, worker.rank))

    def remove(self, worker: Worker) -> None:
        """The worker leaves the fleet for good."""
        self.forget(worker)
        key = (worker.name, worker.rank)
        self._workers.clear()
        self.accounting.remove_worker(*key)
        self.estimates.forget(key)

    def declare_capacity(self, worker: Worker, requests: int, kv_tokens: int = 0) -> None:
        """How many requests a new life runs at once, and how much KV it has room for; 0 when it does not say. Its
        reports have to show the former then."""
        self.accounting.account(worker.name, worker.rank).new_life(requests, kv_tokens)
        self._workers.clear()

    def report_load(self, worker: Worker, load: EngineLoad, inflight_max: int, until: float) -> None:
        """What an engine said of its queue; see `WorkerAccount.report`."""
        account = self.accounting.account(worker.name, worker.rank)
        known = account.capacity_requests
        account.report(load.running, load.waiting, inflight_max, until)
        if account.kv_tokens and account.block_size_tokens and isinstance(self.index, MemoryIndex | MirrorIndex):
            cached = self.index.blocks_held(worker, Tier.L0) * account.block_size_tokens
            account.fill = min(cached / account.kv_tokens, 1.0)
        if account.capacity_requests != known:
            self._workers.clear()

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
        block, units_differ = pool.block_size_tokens, pool.caps_differ
        known, workers = self._workers, []
        for record in candidates:
            worker = known.get(record)
            if worker is None or worker.holders is not record.holders:
                worker = self._look_up(record)
            level = record.trust.level
            worker.basis = _EVENTS if level is _BELIEVED and record.parity is not _FAILED else _doubted(record)
            if units_differ:
                worker.unit_tokens = record.hit_unit_tokens(block)
            workers.append(worker)
        exact = accepted is _EXACT
        inquiry = _new(Inquiry, (chain, prompt_tokens, block, exact, own_history_only, units_differ))
        confirmed = blocks_by_holder(match.depths, accepted) if match.depths else NO_DEPTHS
        # Where workers divide the work, a request is counted at two of them.
        return self.answer(inquiry, workers, confirmed, now, len(pool.workers) if pool.prefill_workers else 0)

    def confirmed_tokens(self, match: Match, record: WorkerRecord, rank: int, prompt_tokens: int, block: int) -> int:
        """Leading tokens of a prompt that the index says a worker has unchanged, as in `snapshot`."""
        holder, unit = record.holders[rank], record.hit_unit_tokens(block)
        depth = max(
            (depth for (place, _, fidelity), depth in match.depths.items() if place == holder and fidelity is _EXACT),
            default=0,
        )
        return min(depth * block // unit * unit, record.hit_tokens_max(prompt_tokens, block))

    def _look_up(self, record: WorkerRecord) -> WorkerBelief:
        holders = record.holders
        worker = self._workers[record] = self.worker([(holder.name, holder.rank) for holder in holders], holders)
        length = record.discovery.max_model_len if record.discovery is not None else 0
        for view in worker.views:
            view.context_tokens_max = length
        lengths = [view.context_tokens_max for known in self._workers.values() for view in known.views]
        self.context_tokens_min = min(filter(None, lengths), default=CONTEXT_TOKENS_MAX)
        return worker


# Members of enumerations are looked up by a slow path.
_EXACT = Fidelity.EXACT
_FAILED = Parity.FAILED
_BELIEVED, _LOAD = TrustLevel.EXACT, TrustLevel.LOAD
_EVENTS, _GUESSES, _HISTORY, _NOTHING = Basis.EVENTS, Basis.GUESSES, Basis.HISTORY, Basis.NOTHING


def _doubted(record: WorkerRecord) -> Basis:
    """By what a worker is judged whose events, or token ids, are not believed."""
    trust = record.trust
    if record.parity is _FAILED or trust.level is _LOAD:
        return _NOTHING
    return _GUESSES if trust.guesses_by_index else _HISTORY
