"""The gateway in a replay: its policy on its state, without its I/O.

What happens here is what `gateway.pipeline` does between a complete body and a dispatch, and at a first token and an
end; every rule of it lies in `policies`, and is run, not imitated.
"""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import NamedTuple

from cachecore.blocks import HASH_BYTES, Chain, PrefixHash
from cachecore.holders import Epoch, Worker, WorkerName
from cachecore.index.chains import ChainMultiset
from cachecore.index.contract import IndexEvent, Match, Removed, Stored
from cachecore.index.memory import MemoryIndex
from loadtest.audit.engine import Journal
from loadtest.audit.prepared import PreparedRequest
from policies.contract import Decision, Policy, Query, Snapshot
from policies.estimates import FleetEstimates, LinkModel, LinkPrior, PrefillPrior
from policies.peers.contract import Asked, Observer, observes
from policies.pricing import prefill_seconds, queue_key_seconds
from policies.state.beliefs import NO_DEPTHS, Beliefs, Inquiry, WorkerBelief, blocks_by_holder
from policies.state.sources import SourceAccounts
from policies.transfer import Candidate, DeadlineBounds, PullOption, Pulls, Supply

ROOT = PrefixHash(b"ropeway.audit.rt")
"""The parent of every first block; no block of a trace is called so."""
SOURCES_MAX = 3
"""Holders that a decision weighs, deepest first."""
_EPOCH = Epoch(1)


@dataclass(frozen=True, slots=True)
class RouterSettings:
    block_size_tokens: int
    worker_count: int
    capacity_requests: int
    """That a worker runs at once."""
    capacity_blocks: int
    """Of its KV memory."""
    wire_bytes_per_token: float = 0.0
    """Of KV on its way between workers, as the codec leaves it; 0 where nothing is pulled."""
    prior: PrefillPrior | None = None
    """What prefill is taken to cost before anything was seen; None for the gateway's own."""
    link_prior: LinkPrior | None = None
    """What links are taken to be like; None for the gateway's own."""
    priorities: bool = False
    """Whether engines take a priority key."""


class Routed(NamedTuple):
    """Where a request goes."""

    worker: int
    priority: float
    predicted_seconds: float | None
    """To its first token; None where the policy does not predict."""
    pull: PullOption | None
    best_matched_tokens: int
    """Of all workers; what the chosen one lacks of it is regret."""
    matched_tokens: int


class Held(NamedTuple):
    """A request goes nowhere yet, and is to be routed again."""

    seconds: float


class Router:
    """One gateway's view of one fleet."""

    def __init__(self, policy: Policy, settings: RouterSettings, random: Random) -> None:
        self.policy = policy
        self.settings = settings
        self.index = MemoryIndex()
        self.beliefs = Beliefs(ChainMultiset, FleetEstimates(settings.prior, link=settings.link_prior))
        self.sources = SourceAccounts()
        self._random = random
        self._history_only = policy.name == "prefix-aware"
        self._observer: Observer | None = policy if observes(policy) else None
        self._holders = [Worker(WorkerName(f"worker-{number}"), _EPOCH) for number in range(settings.worker_count)]
        self._numbers: Mapping[str, int] = {holder.name: number for number, holder in enumerate(self._holders)}
        self._sequences = [0] * settings.worker_count
        self._cached_blocks = [0] * settings.worker_count
        self._workers = [self._introduce(holder) for holder in self._holders]

    def _introduce(self, holder: Worker) -> WorkerBelief:
        key, settings = (holder.name, holder.rank), self.settings
        account = self.beliefs.accounting.account(*key)
        account.new_life(settings.capacity_requests, settings.capacity_blocks * settings.block_size_tokens)
        return self.beliefs.worker([key], [holder])

    # A request

    def route(self, request: PreparedRequest, now: float, held_seconds: float = 0.0) -> Routed | Held:
        """Decide where a request goes, and count it there. `held_seconds`: that it has been made to wait already."""
        query = Query(request.prompt_tokens, session=request.session, held_seconds=held_seconds)
        decision, snapshot = self._decide(request, query, now)
        if decision.hold_seconds > 0.0:
            return Held(decision.hold_seconds)
        view, pull = decision.worker, decision.pull
        seconds = decision.prefill_seconds
        if seconds is None:
            seconds = prefill_seconds(query, view)
        matched = view.matched_tokens
        prior_seconds: float | None = view.prefill.prior_seconds(
            request.prompt_tokens - matched, matched, view.load.running_context_tokens
        )
        if pull is not None:
            # How long its first token takes says little of prefill.
            seconds, prior_seconds = pull.prefill_seconds, None
            self.sources.begin(request.request_id, pull.source, pull.size_bytes, now + pull.load_seconds)
        beliefs, key = self.beliefs, (view.name, view.rank)
        if snapshot.burst is not None:
            beliefs.lease(request.request_id, snapshot.burst, decision, seconds, now)
        beliefs.accounting.dispatch(
            request.request_id, *key, now, request.prompt_tokens, seconds, prior_seconds=prior_seconds
        )
        if self._observer is not None:
            self._observer.dispatched(request.request_id, self._asked(request), view, now)
        if request.chain:
            beliefs.accounting.pin(request.request_id, request.chain, self.settings.block_size_tokens)
            beliefs.predictions.predict(request.request_id, key, request.chain, now)
            if self._history_only:
                beliefs.history.record(key, request.chain)
        predicted = decision.predicted_ttft_ms
        return Routed(
            self._numbers[view.name],
            queue_key_seconds(now, seconds) if self.settings.priorities else 0.0,
            None if predicted is None else predicted / 1e3,
            pull,
            max([other.matched_tokens for other in snapshot.workers]),
            matched,
        )

    def _decide(self, request: PreparedRequest, query: Query, now: float) -> tuple[Decision, Snapshot]:
        settings, chain, tokens = self.settings, request.chain, request.prompt_tokens
        match = self.index.match(chain)
        confirmed = blocks_by_holder(match.depths) if match.depths else NO_DEPTHS
        inquiry = Inquiry(chain, tokens, settings.block_size_tokens, history_only=self._history_only)
        snapshot = self.beliefs.answer(inquiry, self._workers, confirmed, now)
        if settings.wire_bytes_per_token:
            burst = self.beliefs.burst(inquiry, snapshot.workers, now, self._pull_seconds)
            pulls = self._pulls(match, tokens, now) if match.depths else None
            snapshot = snapshot._replace(pulls=pulls, burst=burst)
        if self._observer is not None:
            self._observer.asked(self._asked(request))
        decision = self.policy.decide(query, snapshot, self._random)
        if snapshot.pulls is not None and decision.pull is None:
            decision.pull = snapshot.pulls.option(decision.worker, decision.worker.load.wait_seconds(now))
        return decision, snapshot

    def _pull_seconds(self, tokens: int) -> float:
        """Over a link that nothing is known of but what the others are like."""
        return self.beliefs.estimates.link("", "").transfer_seconds(round(tokens * self.settings.wire_bytes_per_token))

    def _asked(self, request: PreparedRequest) -> Asked:
        return Asked(request.chain, request.prompt_tokens, self.settings.block_size_tokens)

    def _pulls(self, match: Match, prompt_tokens: int, now: float) -> Pulls:
        block = self.settings.block_size_tokens
        cap = max(prompt_tokens - 1, 0) // block
        self.beliefs.estimates.relax_links(now)
        offers = _Offers(self, match, cap, now)
        return Pulls(prompt_tokens, min(max(match.depths.values()), cap) * block, offers, DeadlineBounds())

    # What workers show

    def first_token(self, request_id: str, now: float) -> None:
        self.beliefs.release_leases(request_id)
        sample = self.beliefs.accounting.first_token(request_id, now)
        if sample is not None:
            self.beliefs.estimates.observe_prefill(sample)
        if self._observer is not None:
            self._observer.first_token(request_id, now)

    def finish(self, request_id: str, output_tokens: int, now: float) -> None:
        self.beliefs.accounting.finish(request_id, now, output_tokens, answered=True)
        if self._observer is not None:
            self._observer.finished(request_id, now)

    def pulled(
        self, request_id: str, pull: PullOption, target: int, size_bytes: int, seconds: float, now: float
    ) -> None:
        """What was pulled has come. It took so long."""
        source, name = pull.source, self._holders[target].name
        self.sources.end(request_id)
        self.sources.delivered(source, name)
        self.beliefs.estimates.observe_link(str(source), name, pull.ahead_bytes + size_bytes, seconds, now)

    def pull_failed(self, request_id: str, pull: PullOption, target: int, reason: str, now: float) -> None:
        source, name = pull.source, self._holders[target].name
        self.sources.end(request_id)
        self.sources.failed(source, name, reason, now)
        if reason == "deadline" and pull.deadline_seconds > pull.load_seconds:
            # It takes at least as long.
            size = pull.ahead_bytes + pull.size_bytes
            self.beliefs.estimates.observe_link(str(source), name, size, pull.deadline_seconds, now)

    def number_of(self, source: Hashable) -> int:
        """The worker that a pull names."""
        return self._numbers[str(source)]

    def heard(self, worker: int, journal: Journal, requests: Sequence[PreparedRequest]) -> None:
        """A worker's KV events have come."""
        events: list[IndexEvent] = []
        if journal.evicted:
            events.append(Removed(Chain(b"".join(journal.evicted))))
        for job, first, end in journal.stored:
            chain = requests[job.number].chain
            at = first * HASH_BYTES
            parent = PrefixHash(chain[at - HASH_BYTES : at]) if first else ROOT
            events.append(Stored(parent, Chain(chain[at : end * HASH_BYTES])))
        self._sequences[worker] += 1
        holder = self._holders[worker]
        self.index.apply(holder, self._sequences[worker], events)
        self._cached_blocks[worker] += sum(end - first for _, first, end in journal.stored) - len(journal.evicted)
        account = self.beliefs.accounting.account(holder.name, holder.rank)
        account.fill = self._cached_blocks[worker] / self.settings.capacity_blocks


class _Offers:
    """Who could give what of one prompt to one candidate: called by `Pulls`, for few."""

    __slots__ = ("_ahead", "_cap", "_match", "_now", "_router", "_suppliers")

    def __init__(self, router: Router, match: Match, cap: int, now: float) -> None:
        self._router = router
        self._match = match
        self._cap = cap
        self._now = now
        self._ahead: Mapping[Hashable, int] = {}
        self._suppliers: list[tuple[str, int]] | None = None

    def __call__(self, view: Candidate) -> Sequence[tuple[Supply, LinkModel]]:
        if self._suppliers is None:
            self._ahead = self._router.sources.ahead_bytes(self._now)
            self._suppliers = self._deepest()
        return [self._offer(name, depth, view.name) for name, depth in self._suppliers if self._may_give(name, view)]

    def _deepest(self) -> list[tuple[str, int]]:
        """Of those that hold as much the ones with the least to send."""
        held = [(place.holder.name, depth) for place, depth in self._match.depths.items()]
        held.sort(key=lambda one: (-one[1], self._ahead.get(one[0], 0)))
        return held[:SOURCES_MAX]

    def _may_give(self, name: str, view: Candidate) -> bool:
        return name != view.name and not self._router.sources.paused(name, view.name, self._now)

    def _offer(self, name: str, depth: int, target: str) -> tuple[Supply, LinkModel]:
        settings = self._router.settings
        tokens = min(depth, self._cap) * settings.block_size_tokens
        supply = Supply(name, tokens, 0, "raw", settings.wire_bytes_per_token, self._ahead.get(name, 0))
        return supply, self._router.beliefs.estimates.link(name, target)
