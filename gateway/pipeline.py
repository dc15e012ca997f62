"""The story of a request, each stage a line: `Pipeline.begin`.

Decide first, without I/O; then act. From a complete body to a decision nothing is awaited, but for what cannot be had
at once: a prompt with much new text is tokenized off the loop, a model without a tokenizer of ours is tokenized by its
worker, a shared index without a loaded mirror is asked, within its budget, where no worker has room a request waits for
its turn, and where its siblings are having the same prompt computed, until it can be pulled. What is in flight is
counted at the moment of decision, so a burst sees itself.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine
from functools import partial
from random import Random
from typing import TYPE_CHECKING, Any, NamedTuple

from cachecore.blocks import EMPTY_CHAIN
from cachecore.index.contract import NO_MATCH, Match
from cachecore.prompts.contract import NamedPrompt, PromptError
from cachecore.scope import TenantId
from cachecore.store import StoreError
from gateway.admission import Admission, Asking
from gateway.api.translated import Translated
from gateway.api.translator import Translator, inbound_of, translated
from gateway.config import PrioritiesConfig
from gateway.disaggregation import Disaggregation, Prompted
from gateway.edge.body import BodyMemory
from gateway.edge.contract import Patience
from gateway.edge.http1 import RequestHead
from gateway.edge.server import Inbound
from gateway.errors import BadRequest, ServiceError
from gateway.fleet.knowledge import Knowledge
from gateway.fleet.registry import Fleet
from gateway.fleet.worker import ModelPool, WorkerRecord
from gateway.journey import Journey
from gateway.limits import RateLimits
from gateway.logs import RequestLog
from gateway.outbound import Outbound
from gateway.prompts import Prompts
from gateway.reliability.failures import TIME_OVER, of_error
from gateway.requests import Kind, Request, credentials, read_request, request_id_of
from gateway.shifted import PassagePlanner
from gateway.steering.pins import Pins
from gateway.steering.samples import Samples
from gateway.tenants import Roster, Tenant, Tenants
from gateway.transfers import Transfers
from gateway.views.metrics import GatewayMetrics
from gateway.views.receipts import Receipts
from policies import create as create_policy
from policies.contract import Policy, Query, Receipt, candidate_fields
from policies.filters import in_time, long_enough
from policies.peers.contract import Asked as Prompt
from policies.shadow import Shadows
from policies.state.beliefs import Inquiry

if TYPE_CHECKING:
    from gateway.tracing import Tracing

logger = logging.getLogger("ropeway.pipeline")

# Members of enumerations are looked up by a slow path.
_CHAT = Kind.CHAT
# A named tuple's own constructor is a function in Python.
_new = tuple.__new__

Later = Callable[[], Coroutine[Any, Any, Journey]]
"""What of a beginning takes its time."""


class PipelineSettings(NamedTuple):
    policy: str
    policy_header_allowed: bool
    forward_kv_transfer_params: bool
    priorities: PrioritiesConfig = PrioritiesConfig()
    forward_token_ids: bool = False
    requests_usage: bool = False
    introduced_as: bytes = b""
    """As in `Outbound`."""
    total_seconds: float | None = None
    """What a request may take altogether, and the most that it may ask for; None bounds neither."""


class Pipeline:
    """Implements `gateway.edge.server.Handler`."""

    def __init__(
        self,
        settings: PipelineSettings,
        fleet: Fleet,
        knowledge: Knowledge,
        prompts: Prompts,
        tenants: Tenants,
        metrics: GatewayMetrics,
        receipts: Receipts,
        transfers: Transfers | None = None,
        passages: PassagePlanner | None = None,
        disaggregation: Disaggregation | None = None,
        admission: Admission | None = None,
        shadows: Shadows | None = None,
        samples: Samples | None = None,
        clock: Callable[[], float] = time.monotonic,
        random: Random | None = None,
    ) -> None:
        self.settings = settings
        self.fleet = fleet
        self.knowledge = knowledge
        self.prompts = prompts
        self.tenants = tenants
        self.metrics = metrics
        self.receipts = receipts
        self.transfers = transfers
        """None where no worker is told to pull KV."""
        self.passages = passages
        """None where nothing is looked for at other positions."""
        self.disaggregation = disaggregation
        """None where prompts are computed by the worker that answers."""
        self.admission = admission
        """None where nobody waits here, however long the workers' queues are."""
        self.shadows = shadows
        """None where no policy is asked but the one that decides."""
        self.request_log: RequestLog | None = None
        """None where requests leave no line in the log."""
        self.tracing: Tracing | None = None
        """None where no request has a span."""
        self.samples = samples
        """None where nothing is kept for operators' questions."""
        self._retries = fleet.safeguards.budget
        self.hedging = fleet.safeguards.hedging
        """None where no request is put to two workers."""
        self.pins: Pins | None = None
        """None where no request is pinned to a worker."""
        self.limits: RateLimits | None = None
        """None where nobody's requests or tokens per minute are limited."""
        self.translator = Translator()
        self.kept_paths: tuple[str, ...] = ()
        """Whose requests are answered here, by their beginnings, though workers might."""
        self.clock = clock
        self._random = random or Random()
        self.policy = create_policy(settings.policy)
        self._policies: dict[str, Policy] = {settings.policy: self.policy}
        self._bodies = BodyMemory()
        self.outbound = Outbound(
            prompts,
            settings.priorities,
            settings.forward_token_ids,
            settings.forward_kv_transfer_params,
            forward_authorization=tenants.open,
            introduced_as=settings.introduced_as,
        )

    def trace(self, tracing: "Tracing") -> None:
        """From here on every request has a span."""
        self.tracing = tracing
        self.outbound.trace()

    # The story

    def begin(self, inbound: Inbound) -> Journey | Translated | Coroutine[Any, Any, Journey | Translated]:
        """Decide where a request goes. Raises ServiceError."""
        try:
            request = self._read(inbound)
            pool, adapter = self.fleet.pool(request.model)
            request.adapter = adapter
            if request.kind is not _CHAT and self.translator.concerns(request, pool):
                return self._begin_translated(inbound, request, pool)
            return self._begin(request, pool)
        except Exception as error:
            self._refused(error)
            raise

    def begin_for(
        self, tenant: str, inbound: Inbound
    ) -> Journey | Translated | Coroutine[Any, Any, Journey | Translated]:
        """As `begin`, for a tenant that is not there itself. Its request goes on for as long as it has any key."""
        owner = self.tenants.absent(TenantId(tenant))
        if self.limits is not None:
            self.limits.admit(owner)
        request = read_request(inbound, owner, self.fleet, self._bodies)
        pool, request.adapter = self.fleet.pool(request.model)
        if request.kind is not _CHAT and self.translator.concerns(request, pool):
            return self._begin_translated(inbound, request, pool)
        return self._begin(request, pool)

    def _begin_translated(
        self, inbound: Inbound, request: Request, pool: ModelPool
    ) -> Translated | Coroutine[Any, Any, Translated]:
        """As `begin`, of a request that is asked in another form."""
        asked = self.translator.asked(request)
        inner = read_request(inbound_of(inbound, asked), request.tenant, self.fleet, self._bodies)
        inner.adapter = request.adapter
        return translated(self._begin(inner, pool), asked)

    def _begin(self, request: Request, pool: ModelPool) -> Journey | Coroutine[Any, Any, Journey]:
        if self.settings.total_seconds is not None or request.timeout_seconds is not None:
            bounds = (self.settings.total_seconds, request.timeout_seconds)
            request.time_over_at = self.clock() + min(seconds for seconds in bounds if seconds is not None)
        if self.admission is not None:
            self.admission.arrived(request, pool)
        named = self._name(request, pool)
        if not isinstance(named, NamedPrompt):
            return self._in_time(request, partial(self._begin_later, request, pool, named))
        matched = self.match(pool, request, named)
        if not isinstance(matched, Match):
            return self._in_time(request, partial(self._match_later, request, pool, named, matched))
        embarked = self._embark(request, pool, named, matched)
        return embarked if isinstance(embarked, Journey) else self._in_time(request, embarked)

    async def _in_time(self, request: Request, beginning: Later) -> Journey:
        """Begin within the request's own time, if it has one."""
        try:
            if request.time_over_at is None:
                return await beginning()
            async with asyncio.timeout(request.time_over_at - self.clock()):
                return await beginning()
        except TimeoutError:
            error = TIME_OVER.error()
            self._refused(error)
            raise error from None
        except Exception as error:
            self._refused(error)
            raise

    def _refused(self, error: Exception) -> None:
        failure = of_error(error)
        if failure is not None:
            self.fleet.safeguards.counted(failure)

    async def _begin_later(self, request: Request, pool: ModelPool, naming: Awaitable[NamedPrompt]) -> Journey:
        named = await self._named(request, naming)
        return await self._match_later(request, pool, named, self.match(pool, request, named))

    async def _match_later(
        self, request: Request, pool: ModelPool, named: NamedPrompt, matching: Match | Awaitable[Match]
    ) -> Journey:
        embarked = self._embark(request, pool, named, await self.matched(matching))
        return embarked if isinstance(embarked, Journey) else await embarked()

    async def explain(self, inbound: Inbound) -> Receipt:
        """The receipt of a request, which is sent nowhere and counted nowhere. Raises ServiceError."""
        request = self._read(inbound)
        pool, request.adapter = self.fleet.pool(request.model)
        named = self._name(request, pool)
        named = named if isinstance(named, NamedPrompt) else await self._named(request, named)
        matched = await self.matched(self.match(pool, request, named))
        now = self.clock()
        receipt = self.choose(request, pool, named, matched, (), now, counted=False)
        if pool.prefill_workers and self.disaggregation is not None:
            self.disaggregation.weigh(Prompted(request, pool, named, matched), receipt, now)
        return receipt

    # Stages

    def owns(self, method: str, path: str) -> bool:
        return Kind.of(method, path) is not None and not path.startswith(self.kept_paths)

    def admit(self, head: RequestHead) -> None:
        self._tenant_of(head)

    def answer_headers(self, head: RequestHead | None) -> bytes:
        return b"x-request-id: %b\r\n" % request_id_of(head).encode()

    def _tenant_of(self, head: RequestHead) -> Tenant:
        roster = self.tenants.roster
        admitted: tuple[Roster, Tenant] | None = head.notes.get("tenant")
        if admitted is None or admitted[0] is not roster:
            admitted = head.notes["tenant"] = roster, self.tenants.authenticate(credentials(head))
        return admitted[1]

    def _read(self, inbound: Inbound) -> Request:
        tenant = self._tenant_of(inbound.head)
        if self.limits is not None:
            self.limits.admit(tenant)
        try:
            return read_request(inbound, tenant, self.fleet, self._bodies)
        except ServiceError as error:
            self.metrics.refused(error.status)
            raise

    def _name(self, request: Request, pool: ModelPool) -> NamedPrompt | Awaitable[NamedPrompt]:
        try:
            return self.prompts.name(request, pool)
        except PromptError as error:
            raise self._bad_prompt(request, error) from None

    async def _named(self, request: Request, naming: Awaitable[NamedPrompt]) -> NamedPrompt:
        try:
            return await naming
        except PromptError as error:
            raise self._bad_prompt(request, error) from None

    def _bad_prompt(self, request: Request, error: PromptError) -> BadRequest:
        refusal = BadRequest(f"{error}", param="messages" if request.kind is Kind.CHAT else "prompt")
        self.metrics.refused(refusal.status)
        return refusal

    def match(self, pool: ModelPool, request: Request, named: NamedPrompt) -> Match | Awaitable[Match]:
        if not named.chain or request.skips_cache:
            return NO_MATCH
        return self.knowledge.index.match(named.chain)

    async def matched(self, matching: Match | Awaitable[Match]) -> Match:
        """What a shared index answers; nothing where it does not in time."""
        try:
            return matching if isinstance(matching, Match) else await matching
        except StoreError:
            self.metrics.failed_lookups += 1
            return NO_MATCH

    def choose(
        self,
        request: Request,
        pool: ModelPool,
        named: NamedPrompt,
        match: Match,
        excluded: tuple[WorkerRecord, ...],
        now: float,
        counted: bool = True,
        held_seconds: float | None = None,
    ) -> Receipt:
        """The decision, and what it was made from."""
        started = time.perf_counter()
        policy = self._policy_of(request) if request.policy else self.policy
        candidates = self.fleet.candidates(pool, request.adapter, excluded)
        if self.pins is not None:
            candidates = self.pins.narrow(request, named.chain, candidates)
        chain = EMPTY_CHAIN if request.skips_cache else named.chain
        policy_name, tokens = policy.name, named.token_count
        own_history_only = policy_name == "prefix-aware"
        if pool.transfers and self.transfers is not None:
            accepted = self.transfers.accepted(request, pool, now)
            snapshot = self.knowledge.snapshot(pool, candidates, match, chain, tokens, now, own_history_only, accepted)
            if request.prompts_count == 1:
                pulls = self.transfers.pulls(request, pool, chain, match, tokens, now)
                inquiry = _new(Inquiry, (chain, tokens, pool.block_size_tokens, True, False, False))
                pull_seconds = partial(self.transfers.pull_seconds, request, pool, now)
                burst = self.knowledge.burst(inquiry, snapshot.workers, now, pull_seconds)
                snapshot = snapshot._replace(pulls=pulls, burst=burst)
        else:
            snapshot = self.knowledge.snapshot(pool, candidates, match, chain, tokens, now, own_history_only)
        query = _new(Query, (tokens, request.output_tokens_max, request.session, request.priority, held_seconds))
        if tokens + request.output_tokens_max > self.knowledge.context_tokens_min:
            snapshot = snapshot._replace(workers=long_enough(query, snapshot.workers))
        if request.deadline is not None:
            snapshot = snapshot._replace(workers=in_time(query, snapshot.workers, now, request.deadline - now))
        decision, views = policy.decide(query, snapshot, self._random), snapshot.workers
        if snapshot.pulls is not None and decision.pull is None:
            decision.pull = snapshot.pulls.option(decision.worker, decision.worker.load.wait_seconds(now))
        receipt = Receipt(
            request.id,
            request.model,
            policy_name,
            query,
            pool.block_size_tokens,
            decision,
            views.index(decision.worker),
            candidate_fields(views),
            time.time(),
            (time.perf_counter() - started) * 1e6,
            pool.renderer.name if pool.renderer else "remote",
            request.tenant.id,
        )
        if counted and self.shadows is not None and not decision.hold_seconds:
            self.shadows.judge(query, Prompt(chain, tokens, pool.block_size_tokens), snapshot, decision)
        if counted and self.samples is not None and now >= self.samples.due:
            self.samples.take(request, pool, chain, query, snapshot)
        return receipt

    def use_policy(self, name: str) -> None:
        """From the next request on. Raises ValueError where there is none of this name."""
        policy = self._policies.get(name) or create_policy(name)
        self.policy = self._policies[name] = policy
        self.settings = self.settings._replace(policy=name)

    def _policy_of(self, request: Request) -> Policy:
        name = request.policy
        if name == self.settings.policy:
            return self.policy
        if not self.settings.policy_header_allowed:
            raise BadRequest("Choosing a policy by header is not allowed here.", param="x-ropeway-policy")
        policy = self._policies.get(name)
        if policy is None:
            try:
                policy = self._policies[name] = create_policy(name)
            except ValueError as error:
                raise BadRequest(f"{error}", param="x-ropeway-policy") from None
        return policy

    def _embark(self, request: Request, pool: ModelPool, named: NamedPrompt, match: Match) -> Journey | Later:
        self._retries.requests += 1
        if self.limits is not None:
            self.limits.charge(request.tenant, named.token_count)
        if self.admission is not None and not self.admission.passes(request, pool):
            return partial(self._wait, self.admission, request, pool, named, match)
        return self._depart(Journey(self, request, pool, named, match))

    async def _wait(
        self, admission: Admission, request: Request, pool: ModelPool, named: NamedPrompt, match: Match
    ) -> Journey:
        """As `_embark`, when a worker has room and it is this request's turn."""
        matched = max(match.depths.values(), default=0) * pool.block_size_tokens
        with await admission.wait(pool, Asking(request, named.token_count, min(matched, named.token_count))) as turn:
            # Time has passed: who holds what is another thing now.
            match = await self.matched(self.match(pool, request, named))
            journey = Journey(self, request, pool, named, match)
            journey.queued_header = b"x-ropeway-queued-ms: %d\r\n" % (turn.waited_seconds * 1e3)
            departed = self._depart(journey)
        return departed if isinstance(departed, Journey) else await departed()

    def _depart(self, journey: Journey) -> Journey | Later:
        if self.hedging is not None or journey.request.time_over_at is not None:
            journey.patience = partial(self._patience, journey.request, journey.pool)
        if journey.pool.prefill_workers and self.disaggregation is not None:
            return partial(journey.divide, self.disaggregation)
        if journey.pool.transfers:
            receipt = journey.choose(0.0)
            if receipt.decision.hold_seconds:
                return partial(journey.hold, receipt)
            journey.decide(receipt)
        else:
            journey.decide()
        return journey

    def _patience(self, request: Request, pool: ModelPool) -> Patience:
        """How long a decided request may take from now on, and when a second worker is asked."""
        total_seconds, hedge_seconds, hedging = None, None, self.hedging
        if request.time_over_at is not None:
            total_seconds = max(request.time_over_at - self.clock(), 0.0)
        if hedging is not None and not pool.transfers and not pool.prefill_workers:
            hedging.budget.requests += 1
            hedge_seconds = hedging.after_seconds(request.streams)
        return Patience(total_seconds, hedge_seconds)
