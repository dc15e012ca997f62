"""Requests that wait at the gateway, because no worker could start them soon, and the turn of each.

    begin ─► named, matched ─► passes: some worker has room and nobody waits ─► decided, as ever
                             └► wait: a place in its model's queue ─► its turn ─► decided on what is known then
                                                                   └► refused: 429, 503, with when to come back

A worker has room while what it was given before would let a newcomer start within `backlog_ms_max`: enough that it
never idles, little enough that who is next is decided here, where tenants' shares are known, and not in an engine's
queue. The order, the bounds and the early refusals are `policies.state.admission`; here are the futures that wait, and
the clock. One request is given its turn at a time, and the next one when it has been counted at its worker: a burst of
turns sees itself.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from math import ceil
from typing import Any, NamedTuple

import msgspec

from gateway.config import AdmissionConfig, PrioritiesConfig
from gateway.errors import Overloaded, ServiceError, ShuttingDown, TooManyRequests
from gateway.fleet.knowledge import Knowledge
from gateway.fleet.worker import ModelPool, WorkerRecord
from gateway.requests import Request
from gateway.views.admission import AdmissionMetrics
from policies.contract import Receipt
from policies.pricing import prefill_seconds
from policies.state.admission import AdmissionQueue, Held, Lateness, Limits, Reason, Refusal, Ticket
from policies.state.inflight import WorkerAccount
from policies.state.shares import TenantShares

logger = logging.getLogger("ropeway.admission")

POLL_SECONDS = 0.01
"""While somebody waits: backlogs fall with the clock, and nobody says so."""
KEPT_SHARE = 0.95
"""Of a budget: the rest is for the way to the client, which is not seen from here."""
HELD_BACK_SHARE = 0.25
"""Of the backlog that others may make: what a tenant beyond its share leaves free is taken by whom it kept waiting."""


class Asking(NamedTuple):
    """What is known of a request that may have to wait."""

    request: Request
    prompt_tokens: int
    matched_tokens: int
    """Of the prompt, cached at some worker."""


class Place(Ticket):
    """A ticket, and the future of whoever holds it: None when it is its turn, or why it is refused."""

    __slots__ = ("joined_at", "turn")

    def __init__(
        self, request: Request, tokens: float, start_by: float, rank: float, joined_at: float, turn: "_Verdict"
    ) -> None:
        super().__init__(request.tenant.id, tokens, len(request.data), start_by, rank, request.adapter)
        self.joined_at = joined_at
        self.turn = turn


_Verdict = asyncio.Future[ServiceError | None]


class Turn:
    """Its turn has come: while it is entered nobody else's does. Left by an exception it is given back."""

    __slots__ = ("_gate", "_place", "waited_seconds")

    def __init__(self, gate: "Gate", place: Place, waited_seconds: float) -> None:
        self._gate = gate
        self._place = place
        self.waited_seconds = waited_seconds

    def __enter__(self) -> "Turn":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._gate.decided(self._place, served=kind is None)


class Gate:
    """One model's queue."""

    def __init__(self, admission: "Admission", pool: ModelPool) -> None:
        config = admission.config
        self.pool = pool
        self.queue = AdmissionQueue(admission.limits, admission.weight_of, admission.held)
        self.shares = TenantShares(admission.weight_of, admission.limits.quantum_tokens)
        self._admission = admission
        self._accounting = admission.knowledge.accounting
        self._backlog_seconds = config.backlog_ms_max / 1e3
        self._roomy: tuple[WorkerRecord, WorkerAccount] | None = None
        """Who had room when last asked."""
        self._granted: Place | None = None
        """Whose turn it is, while it has not been decided on."""
        self._timer: asyncio.Handle | None = None
        """When to look whose turn it is, if nothing moves before."""
        self._roused = False

    # On the path of every request

    def passes(self, request: Request, clock: Callable[[], float]) -> bool:
        """See `Admission.passes`."""
        held_back = self.shares.held_back
        if self.queue.count or (held_back and request.tenant.id in held_back):
            return False
        if self._roomy is not None and not request.adapter:
            record, account = self._roomy
            if record.healthy and not record.draining and not record.barred:
                idle = not account.waiting and not account.capacity_requests
                if idle or account.wait_seconds(clock()) <= self._backlog_seconds:
                    return True
        return self._has_room(request.adapter, self._backlog_seconds, clock())

    def _has_room(self, adapter: str, seconds_max: float, now: float) -> bool:
        nobody = True
        for record in self.pool.workers:
            if not record.healthy or record.draining or record.barred or record.role == "prefill":
                continue
            if adapter and adapter not in record.models:
                continue
            nobody = False
            for holder in record.holders:
                account = self._accounting.account(holder.name, holder.rank)
                if account.wait_seconds(now) <= seconds_max:
                    self._roomy = record, account
                    return True
        return nobody

    # Waiting

    def join(self, asking: Asking, now: float) -> Place:
        """A place in the queue. Raises ServiceError."""
        admission, request = self._admission, asking.request
        if admission.closing:
            raise admission.refused(Refusal(Reason.CLOSING, 0.0), waited=False)
        tokens = admission.tokens_of(request, asking.prompt_tokens - asking.matched_tokens)
        turn: _Verdict = asyncio.get_running_loop().create_future()
        place = Place(request, tokens, self._start_by(asking, now), admission.rank_of(request, now), now, turn)
        answer = self.queue.offer(place, now, self._backlog_seconds)
        if isinstance(answer, Refusal):
            raise admission.refused(answer, waited=False)
        for lost in answer:
            self._turn_away(lost, self.queue.full_refusal(lost.tenant, lost.tokens))
        self.rouse()
        return place

    def shed(self, request: Request, now: float) -> None:
        """Raises ServiceError where a full queue would refuse the request, whatever its prompt."""
        rank = self._admission.rank_of(request, now)
        if self.queue.would_shed(request.tenant.id, rank, len(request.data)):
            raise self._admission.refused(self.queue.full_refusal(request.tenant.id), waited=False)

    def leave(self, place: Place) -> None:
        """Whoever held it is gone."""
        if place is self._granted:
            self.decided(place, served=False)
        else:
            self.queue.leave(place)

    def decided(self, place: Place, served: bool) -> None:
        """The request whose turn it was has been counted at its worker, or will not be."""
        self._granted = None
        if not served:
            self.queue.refund(place)
        if self.queue.count:
            self.rouse()

    def close(self) -> None:
        for place in self.queue.empty():
            self._turn_away(place, Refusal(Reason.CLOSING, 0.0))

    def rouse(self) -> None:
        """Something has moved: look whether it is somebody's turn, once whatever moved it is done."""
        if not self._roused:
            self._roused = True
            asyncio.get_running_loop().call_soon(self._look)

    def _look(self) -> None:
        """Refuse whose time is up, and give the next one its turn if some worker has room."""
        self._roused = False
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        try:
            self._give_turns()
        except Exception:
            logger.exception("looking whose turn it is failed; trying again")
        if self.queue.count and self._granted is None:
            wake = min(POLL_SECONDS, max(self.queue.next_expiry() - self._admission.clock(), 0.0))
            self._timer = asyncio.get_running_loop().call_later(wake, self._look)

    def _give_turns(self) -> None:
        now, queue = self._admission.clock(), self.queue
        for expired in queue.expire(now):
            self._turn_away(expired, Refusal(Reason.DEADLINE, queue.wait_seconds(expired)))
        self._accounting.rates(now, 1)  # first tokens that are not seen come with the clock
        has_room = self._room_at(now)
        while self._granted is None and (place := queue.take(now, has_room)) is not None:
            assert isinstance(place, Place)  # noqa: S101
            if place.turn.done():  # its holder is gone, and about to learn of it
                queue.refund(place)
                continue
            self._granted = place
            place.turn.set_result(None)

    def _room_at(self, now: float) -> Callable[[str, str], bool]:
        """Whether a tenant's requests for an adapter can be started, each asked of the workers once."""
        known: dict[tuple[bool, str], bool] = {}
        held_back, seconds = self.shares.held_back, self._backlog_seconds

        def has_room(tenant: str, adapter: str) -> bool:
            key = (tenant in held_back, adapter)
            room = known.get(key)
            if room is None:
                seconds_max = seconds * HELD_BACK_SHARE if key[0] else seconds
                room = known[key] = self._has_room(adapter, seconds_max, now)
            return room

        return has_room

    def _start_by(self, asking: Asking, now: float) -> float:
        """When it is too late: it has waited long enough, or its prefill would end after its deadline."""
        latest, deadline = now + self._admission.config.wait_seconds_max, asking.request.deadline
        if deadline is None:
            return latest
        return min(latest, deadline - self._prefill_seconds(asking) - self._admission.lateness.seconds(now))

    def _prefill_seconds(self, asking: Asking) -> float:
        """Of what is cached nowhere, where that is done soonest."""
        new, context = asking.prompt_tokens - asking.matched_tokens, asking.matched_tokens
        estimates = self._admission.knowledge.estimates
        holders = [holder for record in self.pool.workers if record.eligible for holder in record.holders]
        models = [estimates.prefill((holder.name, holder.rank)) for holder in holders]
        return min((model.prefill_seconds(new, context, 0) for model in models), default=0.0)

    def _turn_away(self, ticket: Ticket, refusal: Refusal) -> None:
        assert isinstance(ticket, Place)  # noqa: S101
        if not ticket.turn.done():
            ticket.turn.set_result(self._admission.refused(refusal, waited=True))


class Admission:
    """All queues of one gateway."""

    def __init__(
        self,
        config: AdmissionConfig,
        priorities: PrioritiesConfig,
        knowledge: Knowledge,
        on_refused: Callable[[int], None] = lambda status: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`knowledge` with the accounts that are used from here on; `on_refused` is told the status of each refusal."""
        self.config = config
        self.priorities = priorities
        self.limits = Limits(config.requests_max, config.bytes_max, config.ageing_seconds, config.quantum_tokens)
        self.knowledge = knowledge
        self.clock = clock
        self.metrics = AdmissionMetrics()
        self.lateness = Lateness()
        self.held = Held()
        self.closing = False
        self._promises = False
        """Whether some request has had a deadline: only then is it of interest how late first tokens come."""
        self._on_refused = on_refused
        self._ttft_budget_seconds = config.ttft_budget_ms / 1e3 if config.ttft_budget_ms is not None else None
        self.gates: dict[str, Gate] = {}

    def weight_of(self, tenant: str) -> float:
        return self.config.weights.get(tenant, 1.0)

    def use_weights(self, weights: Mapping[str, float]) -> None:
        """Tenants' shares from now on; of those that wait now, once they have waited."""
        self.config = msgspec.structs.replace(self.config, weights=dict(weights))

    def gate(self, pool: ModelPool) -> Gate:
        """Of a model's present workers: a model that went and came back is another one."""
        gate = self.gates.get(pool.model)
        if gate is None or (gate.pool is not pool and not gate.queue.count):
            self.gates = {
                model: known for model, known in self.gates.items() if known.pool.workers or known.queue.count
            }
            gate = self.gates[pool.model] = Gate(self, pool)
        return gate

    def arrived(self, request: Request, pool: ModelPool) -> None:
        """Note when the request is due, and refuse before anything is done for it what a full queue would refuse.

        Raises ServiceError.
        """
        budget = request.ttft_budget_seconds
        if budget is None:
            budget = self._ttft_budget_seconds
        if budget is not None:
            self._promises = True
            request.deadline = self.clock() + budget * KEPT_SHARE
        if self.held.requests:
            gate = self.gates.get(pool.model)
            if gate is not None and gate.queue.count:
                gate.shed(request, self.clock())

    def passes(self, request: Request, pool: ModelPool) -> bool:
        """Whether it need not wait. Also where there is no worker at all, which whoever decides says better."""
        gate = self.gates.get(pool.model)
        if gate is None or gate.pool is not pool:
            gate = self.gate(pool)
        return gate.passes(request, self.clock)

    async def wait(self, pool: ModelPool, asking: Asking) -> Turn:
        """Until it is the request's turn, which must then be entered at once. Raises ServiceError."""
        gate = self.gate(pool)
        place = gate.join(asking, self.clock())
        try:
            error = await place.turn
        except asyncio.CancelledError:
            gate.leave(place)
            self.metrics.left += 1
            raise
        if error is not None:
            raise error
        waited = self.clock() - place.joined_at
        self.metrics.waits.observe(waited)
        return Turn(gate, place, waited)

    def check(self, request: Request, receipt: Receipt, now: float, waited: bool) -> None:
        """Raises ServiceError where the request, as it was decided, would not be answered in time."""
        decision = receipt.decision
        if decision.predicted_ttft_ms is not None:
            seconds = decision.predicted_ttft_ms / 1e3
        else:
            seconds = decision.worker.load.wait_seconds(now) + prefill_seconds(receipt.query, decision.worker)
        if request.deadline is not None and now + seconds + self.lateness.seconds(now) > request.deadline:
            raise self.refused(Refusal(Reason.DEADLINE, decision.worker.load.wait_seconds(now)), waited)

    def begun(self, request: Request, pool: ModelPool, computed_tokens: int) -> None:
        """A request has been given to a worker."""
        gate = self.gates.get(pool.model)
        if gate is not None:
            gate.shares.count(request.tenant.id, self.tokens_of(request, computed_tokens))

    def ended(self, request: Request, pool: ModelPool, output_tokens: int) -> None:
        """A request has ended. `output_tokens`: what it said, where that is known; it was charged what is usual."""
        if output_tokens and (gate := self.gates.get(pool.model)) is not None:
            unusual = output_tokens - self._usual_output(request)
            if unusual > 0.0:  # totals only grow
                gate.shares.count(request.tenant.id, unusual)
            if gate.queue.count:
                gate.queue.charge(request.tenant.id, unusual)
        if self.held.requests:
            self.moved(pool)

    def answered(self, receipt: Receipt, pool: ModelPool, now: float) -> None:
        """The first token of a streamed answer has come."""
        if self._promises:
            predicted_ms = receipt.decision.predicted_ttft_ms
            if predicted_ms is not None and receipt.legs is None:
                # From the decision on: what a request waited before, it was not predicted to.
                self.lateness.observe(predicted_ms / 1e3, time.time() - receipt.decided_at, now)
        if self.held.requests:
            self.moved(pool)

    def moved(self, pool: ModelPool) -> None:
        """A worker of the model may have room again."""
        gate = self.gates.get(pool.model)
        if gate is not None and gate.queue.count:
            gate.rouse()

    def tokens_of(self, request: Request, computed_tokens: int) -> float:
        """What a tenant is charged: tokens to compute, and as many to say as is usual here, or allowed."""
        return max(computed_tokens, 1) + self._usual_output(request)

    def _usual_output(self, request: Request) -> float:
        said = self.knowledge.accounting.output_tokens_mean
        return request.output_tokens_max if 0 < request.output_tokens_max < said else said

    def rank_of(self, request: Request, now: float) -> float:
        priority = min(max(request.priority, self.priorities.lowest), self.priorities.highest)
        return now + priority * self.limits.ageing_seconds

    def refused(self, refusal: Refusal, waited: bool) -> ServiceError:
        """What to tell the client, counted."""
        self.metrics.refused[refusal.reason, waited] += 1
        error = error_of(refusal)
        self._on_refused(error.status)
        return error

    def close(self) -> None:
        """The gateway stops: whoever waits is told, and nobody waits any more."""
        self.closing = True
        for gate in self.gates.values():
            gate.close()

    def document(self) -> dict[str, Any]:
        """For `/status`."""
        return {
            "waiting": self.held.requests,
            "waiting_bytes": self.held.bytes,
            "refused": {
                when: {reason.value: count for (reason, late), count in self.metrics.refused.items() if late == waited}
                for waited, when in ((False, "on_arrival"), (True, "while_waiting"))
            },
            "left": self.metrics.left,
            "lateness_ms": self.lateness.seconds(self.clock()) * 1e3,
            "models": {model: _document(gate, self.clock()) for model, gate in self.gates.items()},
        }


def _document(gate: Gate, now: float) -> Mapping[str, Any]:
    shares = gate.shares
    shares.roll(now)
    return {
        "waiting": gate.queue.count,
        "drain_tokens_per_second": gate.queue.drain_rate,
        "held_back": sorted(shares.held_back),
        "tenants": {
            tenant: standing._asdict()
            for tenant, standing in shares.standings(gate.queue.waiting_tokens(), _TENANTS_SHOWN).items()
        },
    }


_TENANTS_SHOWN = 64
_MESSAGES = {
    Reason.QUEUE_FULL: "Too many requests are waiting for this model.",
    Reason.OVER_SHARE: "Too many requests of yours are waiting for this model, and others wait too.",
    Reason.DEADLINE: "No worker can start this request in the time it has.",
    Reason.CLOSING: "The gateway is shutting down.",
}


def error_of(refusal: Refusal) -> ServiceError:
    """How a client is told."""
    reason, message = refusal.reason, _MESSAGES[refusal.reason]
    seconds = max(ceil(refusal.retry_after_seconds), 1)
    if reason is Reason.CLOSING:
        return ShuttingDown(message, retry_after_seconds=seconds)
    if reason is Reason.DEADLINE:
        return Overloaded(message, retry_after_seconds=seconds)
    return TooManyRequests(message, code=reason.value, retry_after_seconds=seconds)
