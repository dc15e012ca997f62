"""What a routing policy sees and what it answers.

A policy filters, scores and picks over a frozen snapshot: numbers, never requests or sockets. It does no I/O and no
logging; clock and random numbers are handed in. The gateway and the audit run the same policies on the same state.

"Frozen" is by agreement: a decision is one synchronous call, and nothing changes a `WorkerView` or its `load` (the live
accounting record of `policies.state.inflight`) while it runs. Making 64 of them for each request would cost more than
the decision.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from random import Random
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from policies.legs import Legs
from policies.transfer import PullOption, PullReport, Pulls

if TYPE_CHECKING:
    from policies.bursts import Burst


class Evidence(StrEnum):
    """Where a policy's knowledge of matched tokens came from, best first."""

    EXACT = "exact"
    """The index, fed by the worker's own events."""
    PREDICTED = "predicted"
    """Our own dispatches, not yet confirmed by events."""
    HISTORY = "history"
    """Where prompts like this went before; the worker reports no events we trust."""
    NONE = "none"

    # Enum's own hash is a Python function, and evidence is a dictionary key on the hot path.
    __hash__ = str.__hash__


class WorkerLoad(Protocol):
    """What the gateway's own accounting says of a worker (`policies.state.inflight.WorkerAccount`)."""

    inflight: int
    """Requests dispatched and not finished."""
    waiting: int
    """Of those, requests without a first token."""
    outstanding_prefill_seconds: float
    """Predicted prefill of the requests without a first token."""
    inflight_tokens: int
    """Prompt tokens of the requests in flight."""
    running_context_tokens: int
    """Prompt and output tokens of the requests that decode now."""
    placed: float
    """Seconds of work it has been given lately, in units of `FleetRates.placed_unit`: of each request its prefill, or
    its share of the engine's slots for as long as it holds one, whichever is more."""
    kv_tokens: int
    """Its KV memory; zero while unknown."""
    fill: float
    """Share of its KV memory that cached blocks take, used or not; one while unknown."""

    @property
    def kv_share(self) -> float:
        """Share of its KV memory that requests in flight need; zero while its size is unknown."""
        ...

    def kv_pressure(self) -> float:
        """Requests held up for want of KV memory, for each unit by which work on it lasts longer."""
        ...

    def wait_seconds(self, now: float) -> float:
        """Predicted time until a request dispatched now would start its prefill."""
        ...


class PrefillEstimate(Protocol):
    """Predicts prefill time for one worker (`policies.estimates.PrefillModel`)."""

    def prior_seconds(self, new_tokens: int, context_tokens: int, decoding_tokens: int = 0) -> float:
        """What the uncalibrated prior says."""
        ...

    def prefill_seconds(self, new_tokens: int, context_tokens: int, decoding_tokens: int = 0) -> float:
        """Seconds for `new_tokens` after `context_tokens` cached ones, while the worker decodes `decoding_tokens` of
        context for others (`WorkerLoad.running_context_tokens`)."""
        ...


@dataclass(slots=True, eq=False)
class WorkerView:
    """One candidate, as the gateway knows it at this moment; told apart by identity.

    The gateway keeps one for each worker and writes into it, for each request anew, what is known about that request's
    prompt: a policy may read it while it decides and no later. What is to be remembered of it is a `Candidate`.
    """

    name: str
    rank: int
    load: WorkerLoad
    prefill: PrefillEstimate
    matched_tokens: int = 0
    """Leading prompt tokens it need not compute, by the best evidence, capped as the engine caps a full hit."""
    confirmed_tokens: int = 0
    """Of those, tokens that the worker's own events confirm."""
    tier_tokens: tuple[int, int, int] = (0, 0, 0)
    """Confirmed leading tokens reachable using L0; L0 and L1; and all tiers."""
    evidence: Evidence = Evidence.NONE
    capacity_requests: int = 0
    """Requests it takes at once; 0 when unknown."""
    context_tokens_max: int = 0
    """Prompt and output that it takes; 0 when unknown."""


class Query(NamedTuple):
    """What is to be placed."""

    prompt_tokens: int
    output_tokens_max: int = 0
    """What the client allows; 0 when it does not say."""
    session: str = ""
    """Key of a conversation or user, for policies that stick to it."""
    priority: int = 0
    held_seconds: float | None = None
    """How long it has been made to wait for a prefill of others (`Decision.hold_seconds`); None where it cannot be."""


class FleetRates(NamedTuple):
    """Recent rates over the whole fleet, per worker (decayed with tau; see policies.state.inflight)."""

    arrivals_per_second: float = 0.0
    utilisation: float = 0.0
    """Dispatched prefill seconds per worker and second."""
    arrivals_in_window: float = 0.0
    """tau * arrivals_per_second."""
    tau_seconds: float = 30.0
    placed_unit: float = 1.0
    """What one second counts in `WorkerLoad.placed`, if placed now; what was placed before has decayed with tau."""


class Snapshot(NamedTuple):
    now: float
    workers: Sequence[WorkerView]
    """Candidates that passed the filters: they serve the model, are healthy, have room. Never empty."""
    rates: FleetRates = FleetRates()
    pulls: Pulls | None = None
    """What could be pulled instead of computed; None when nothing can."""
    burst: "Burst | None" = None
    """Who computes now what nobody has of the prompt; None where nothing can be pulled, or somebody has all of it."""


@dataclass(slots=True)
class Decision:
    """Whom a policy chose and why: the numbers from which a `Receipt` is written."""

    worker: WorkerView
    explanation: str | Callable[[], str]
    """Why, in words; a function where putting it into words costs more than deciding did."""
    predicted_ttft_ms: float | None = None
    prefill_seconds: float | None = None
    """Expected prefill there (`policies.pricing.prefill_seconds`), where the policy looked at it."""
    waits_seconds: Sequence[float] = ()
    """Predicted wait of each candidate, where the policy looked at it: the live records move on."""
    costs: Sequence[float] = ()
    """One for each worker of the snapshot, in its order; empty when the policy does not score. Smaller is better."""
    pull: PullOption | None = None
    """What the worker had best pull, where the policy looked at that."""
    hold_seconds: float = 0.0
    """Positive: it had best not be sent anywhere yet, but decided again after so long."""
    burst: "Burst | None" = None
    """What is under way of its prompt, where the policy looked at that."""

    @property
    def reason(self) -> str:
        return self.explanation if isinstance(self.explanation, str) else self.explanation()


class Policy(Protocol):
    name: str

    def decide(self, query: Query, snapshot: Snapshot, random: Random) -> Decision:
        """Pick one of `snapshot.workers`. Deterministic but for `random`."""
        ...


class Candidate(NamedTuple):
    """What was known of one worker when it was decided."""

    worker: str
    rank: int
    matched_tokens: int
    confirmed_tokens: int
    tier_tokens: tuple[int, int, int]
    evidence: Evidence


def candidate_fields(views: Sequence[WorkerView]) -> list[tuple[Any, ...]]:
    """The fields of each view's `Candidate`: they are put to their names when somebody looks."""
    return [
        (view.name, view.rank, view.matched_tokens, view.confirmed_tokens, view.tier_tokens, view.evidence)
        for view in views
    ]


@dataclass(slots=True, eq=False)
class Receipt:
    """The explanation a decision leaves: what was known, what was chosen, what it was expected to cost.

    Every request leaves one and few are ever read: it keeps what is at hand, and `document` makes sense of it.
    """

    request_id: str
    model: str
    policy: str
    query: Query
    block_size_tokens: int
    decision: Decision
    """Of which the worker is the gateway's live view, and may not be read."""
    chosen: int
    """Place among the candidates."""
    candidate_fields: Sequence[tuple[Any, ...]]
    """Of each `Candidate`."""
    decided_at: float
    """Wall-clock seconds."""
    decision_us: float
    renderer: str = ""
    tenant: str = ""
    seen_ttft_ms: float | None = None
    reported_cached_tokens: int | None = None
    reported_prompt_tokens: int | None = None
    pull_report: PullReport | None = None
    trust: str = "exact"
    """How far the chosen worker's events were believed."""
    legs: Legs | None = None
    """None where no worker does nothing but prefill."""
    chain: bytes = b""
    """Names of the prompt's first blocks, as far as they are kept (`policies.state.chains`)."""

    @property
    def candidate(self) -> Candidate:
        """The chosen one."""
        return Candidate._make(self.candidate_fields[self.chosen])

    def document(self, others_max: int | None = None) -> dict[str, Any]:
        """JSON form, as `POST /route/explain` answers it. `others_max`: of the candidates, the chosen one and the best
        so many others by cost alone."""
        decision, candidates = self.decision, [*map(Candidate._make, self.candidate_fields)]
        shown = range(len(candidates)) if others_max is None else self._best(others_max)
        chosen = self.candidate
        costs: Sequence[float | None] = decision.costs or [None] * len(candidates)
        waits: Sequence[float | None] = decision.waits_seconds or [None] * len(candidates)
        return {
            "request_id": self.request_id,
            "model": self.model,
            "policy": self.policy,
            "worker": chosen.worker,
            "rank": chosen.rank,
            "reason": decision.reason if self.legs is None else f"{decision.reason}; {self.legs}",
            "prompt_tokens": self.query.prompt_tokens,
            "matched_tokens": chosen.matched_tokens,
            "confirmed_tokens": chosen.confirmed_tokens,
            "evidence": chosen.evidence.value,
            "trust": self.trust,
            "block_size_tokens": self.block_size_tokens,
            "predicted_ttft_ms": decision.predicted_ttft_ms,
            "seen_ttft_ms": self.seen_ttft_ms,
            "reported_prompt_tokens": self.reported_prompt_tokens,
            "reported_cached_tokens": self.reported_cached_tokens,
            "pull": self._pull(),
            "legs": None if self.legs is None else self.legs.document(),
            "renderer": self.renderer,
            "tenant": self.tenant,
            "decided_at": self.decided_at,
            "decision_us": self.decision_us,
            "candidates": [
                {
                    "worker": candidate.worker,
                    "rank": candidate.rank,
                    "matched_tokens": candidate.matched_tokens,
                    "confirmed_tokens": candidate.confirmed_tokens,
                    "tier_tokens": list(candidate.tier_tokens),
                    "evidence": candidate.evidence.value,
                    "wait_ms": None if wait is None else wait * 1e3,
                    "cost": cost,
                }
                for candidate, cost, wait in ((candidates[index], costs[index], waits[index]) for index in shown)
            ],
        }

    def _best(self, others_max: int) -> list[int]:
        """Places among the candidates, the chosen one's first."""
        costs = self.decision.costs
        others = [index for index in range(len(self.candidate_fields)) if index != self.chosen]
        if costs:
            others.sort(key=costs.__getitem__)
        return [self.chosen, *others[:others_max]]

    def _pull(self) -> dict[str, Any] | None:
        if self.decision.pull is None:
            return None
        report = self.pull_report
        return {**self.decision.pull.document(), **(report.document() if report is not None else {})}
