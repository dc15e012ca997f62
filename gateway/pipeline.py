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
from typing import Any, NamedTuple

from cachecore.blocks import EMPTY_CHAIN, HASH_BYTES
from cachecore.index.contract import NO_MATCH, Match
from cachecore.prompts.contract import NamedPrompt, PromptError
from cachecore.scope import Fidelity
from cachecore.store import StoreError
from gateway.admission import Admission, Asking
from gateway.config import PrioritiesConfig
from gateway.disaggregation import Disaggregation, Division, Prompted
from gateway.edge.body import BodyMemory
from gateway.edge.exchange import Ending
from gateway.edge.http1 import RequestHead, ResponseHead
from gateway.edge.server import Inbound
from gateway.errors import BadRequest, ServiceError
from gateway.fleet import parity
from gateway.fleet.evidence import Answer
from gateway.fleet.knowledge import Knowledge
from gateway.fleet.registry import Fleet
from gateway.fleet.scrutiny import SAMPLE_BYTES_MAX
from gateway.fleet.trust import TrustLevel
from gateway.fleet.worker import ModelPool, Parity, WorkerRecord
from gateway.outbound import Outbound, asking_for_usage
from gateway.prompts import Prompts
from gateway.requests import FIDELITY_HEADER, Kind, Request, read_request, request_id_of
from gateway.shifted import NO_PASSAGES, PROMPT_TOKENS_MAX, Asked, PassagePlanner, PassagePlans
from gateway.tenants import Tenant, Tenants
from gateway.transfers import Flight, Identity, Task, Transfers
from gateway.usage import read_usage
from gateway.views.metrics import GatewayMetrics
from gateway.views.receipts import Receipts
from policies import create as create_policy
from policies.bursts import HOLD_SECONDS_MAX
from policies.contract import Decision, Evidence, Policy, Query, Receipt, candidate_fields
from policies.filters import in_time, long_enough
from policies.peers.contract import Asked as Prompt
from policies.pricing import prefill_seconds, queue_key_seconds
from policies.shadow import Shadows
from policies.state.beliefs import Inquiry

logger = logging.getLogger("ropeway.pipeline")

# A named tuple's own constructor is a function in Python.
_new = tuple.__new__

# Members of enumerations are looked up by a slow path.
_FAILED, _COMPLETE = Parity.FAILED, Ending.COMPLETE
_BELIEVED, _HISTORY = TrustLevel.EXACT, Evidence.HISTORY
_DOUBTED = {level: (level.value, b"x-ropeway-trust: %b\r\n" % level.value.encode()) for level in TrustLevel}
"""What a receipt and an answer say of a worker that is believed less."""


class PipelineSettings(NamedTuple):
    policy: str
    policy_header_allowed: bool
    forward_kv_transfer_params: bool
    priorities: PrioritiesConfig = PrioritiesConfig()
    forward_token_ids: bool = False
    requests_usage: bool = False


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
        )

    # The story

    def begin(self, inbound: Inbound) -> "Journey | Coroutine[Any, Any, Journey]":
        """Decide where a request goes. Raises ServiceError."""
        request = self._read(inbound)
        pool, adapter = self.fleet.pool(request.model)
        request.adapter = adapter
        if self.admission is not None:
            self.admission.arrived(request, pool)
        named = self._name(request, pool)
        if not isinstance(named, NamedPrompt):
            return self._begin_later(request, pool, named)
        matched = self._match(pool, request, named)
        if not isinstance(matched, Match):
            return self._match_later(request, pool, named, matched)
        return self._embark(request, pool, named, matched)

    async def _begin_later(self, request: Request, pool: ModelPool, naming: Awaitable[NamedPrompt]) -> "Journey":
        named = await self._named(request, naming)
        return await self._match_later(request, pool, named, self._match(pool, request, named))

    async def _match_later(
        self, request: Request, pool: ModelPool, named: NamedPrompt, matching: Match | Awaitable[Match]
    ) -> "Journey":
        embarked = self._embark(request, pool, named, await self._matched(matching))
        return embarked if isinstance(embarked, Journey) else await embarked

    async def explain(self, inbound: Inbound) -> Receipt:
        """The receipt of a request, which is sent nowhere and counted nowhere. Raises ServiceError."""
        request = self._read(inbound)
        pool, request.adapter = self.fleet.pool(request.model)
        named = self._name(request, pool)
        named = named if isinstance(named, NamedPrompt) else await self._named(request, named)
        matched = await self._matched(self._match(pool, request, named))
        now = self.clock()
        receipt = self._choose(request, pool, named, matched, (), now, counted=False)
        if pool.prefill_workers and self.disaggregation is not None:
            self.disaggregation.weigh(Prompted(request, pool, named, matched), receipt, now)
        return receipt

    # Stages

    def owns(self, method: str, path: str) -> bool:
        return Kind.of(method, path) is not None

    def admit(self, head: RequestHead) -> None:
        self._tenant_of(head)

    def answer_headers(self, head: RequestHead | None) -> bytes:
        return b"x-request-id: %b\r\n" % request_id_of(head).encode()

    def _tenant_of(self, head: RequestHead) -> Tenant:
        tenant: Tenant | None = head.notes.get("tenant")
        if tenant is None:
            tenant = head.notes["tenant"] = self.tenants.authenticate(head.get(b"authorization"))
        return tenant

    def _read(self, inbound: Inbound) -> Request:
        tenant = self._tenant_of(inbound.head)
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

    def _match(self, pool: ModelPool, request: Request, named: NamedPrompt) -> Match | Awaitable[Match]:
        if not named.chain or request.skips_cache:
            return NO_MATCH
        return self.knowledge.index.match(named.chain)

    async def _matched(self, matching: Match | Awaitable[Match]) -> Match:
        """What a shared index answers; nothing where it does not in time."""
        try:
            return matching if isinstance(matching, Match) else await matching
        except StoreError:
            self.metrics.failed_lookups += 1
            return NO_MATCH

    def _choose(
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
        return receipt

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

    def _embark(
        self, request: Request, pool: ModelPool, named: NamedPrompt, match: Match
    ) -> "Journey | Coroutine[Any, Any, Journey]":
        if self.admission is not None and not self.admission.passes(request, pool):
            return self._wait(self.admission, request, pool, named, match)
        return self._depart(Journey(self, request, pool, named, match))

    async def _wait(
        self, admission: Admission, request: Request, pool: ModelPool, named: NamedPrompt, match: Match
    ) -> "Journey":
        """As `_embark`, when a worker has room and it is this request's turn."""
        matched = max(match.depths.values(), default=0) * pool.block_size_tokens
        with await admission.wait(pool, Asking(request, named.token_count, min(matched, named.token_count))) as turn:
            # Time has passed: who holds what is another thing now.
            match = await self._matched(self._match(pool, request, named))
            journey = Journey(self, request, pool, named, match)
            journey.queued_header = b"x-ropeway-queued-ms: %d\r\n" % (turn.waited_seconds * 1e3)
            departed = self._depart(journey)
        return departed if isinstance(departed, Journey) else await departed

    def _depart(self, journey: "Journey") -> "Journey | Coroutine[Any, Any, Journey]":
        if journey._pool.prefill_workers and self.disaggregation is not None:
            return journey.divide(self.disaggregation)
        if journey._pool.transfers:
            receipt = journey.choose(0.0)
            if receipt.decision.hold_seconds:
                return self._hold(journey, receipt)
            journey.decide(receipt)
        else:
            journey.decide()
        return journey

    async def _hold(self, journey: "Journey", receipt: Receipt) -> "Journey":
        """As `_depart`, once somebody has computed what would otherwise be computed everywhere."""
        began = self.clock()
        while receipt.decision.hold_seconds:
            await asyncio.sleep(receipt.decision.hold_seconds)
            journey._match = await self._matched(self._match(journey._pool, journey._request, journey._named))
            receipt = journey.choose(self.clock() - began)
        journey.decide(receipt)
        journey._started_at = began
        return journey


class Journey:
    """One request under way. Implements `gateway.edge.exchange.Listener` and, for its present attempt, `Attempt`."""

    __slots__ = (
        "_division",
        "_excluded",
        "_first_byte_at",
        "_flight",
        "_kv_headers",
        "_match",
        "_named",
        "_passages",
        "_pipeline",
        "_pool",
        "_queue_key",
        "_receipt",
        "_request",
        "_started_at",
        "_trust",
        "_worker",
        "answer_headers",
        "connections",
        "queued_header",
        "reads_head",
        "request_parts",
        "strips_usage",
    )

    def __init__(self, pipeline: Pipeline, request: Request, pool: ModelPool, named: NamedPrompt, match: Match) -> None:
        self._pipeline = pipeline
        self._request = request
        self._pool = pool
        self._named = named
        self._match = match
        self._excluded: tuple[WorkerRecord, ...] = ()
        self._started_at = self._first_byte_at = self._queue_key = 0.0
        self._division: Division | None = None
        self._flight: Flight | None = None
        self._passages = NO_PASSAGES
        self._kv_headers = b""
        self.queued_header = b""
        """A header line for the answer of a request that has waited."""
        self.reads_head = self.strips_usage = False

    @property
    def attempt(self) -> "Journey":
        # Not an attribute: a reference to itself would leave every request to the garbage collector.
        return self

    def choose(self, held_seconds: float) -> Receipt:
        """The decision alone, for a request that may be held and was so long. Raises NoWorker."""
        pipeline, request = self._pipeline, self._request
        now = pipeline.clock()
        if request.deadline is not None:
            # Of what is left to it, half at most is waited for others.
            held_seconds = max(held_seconds, HOLD_SECONDS_MAX - (request.deadline - now) / 2)
        return pipeline._choose(
            request, self._pool, self._named, self._match, self._excluded, now, held_seconds=held_seconds
        )

    async def divide(self, disaggregation: Disaggregation) -> "Journey":
        """As `decide`, once a prefill worker has computed the prompt, where that is worth it."""
        pipeline, request, pool, named = self._pipeline, self._request, self._pool, self._named
        began = pipeline.clock()
        receipt = pipeline._choose(request, pool, named, self._match, (), began)
        division = disaggregation.weigh(Prompted(request, pool, named, self._match), receipt, began)
        self._division = division
        try:
            computed = division is not None and await division.run(self._first_leg)
        except asyncio.CancelledError:
            pipeline.receipts.add(receipt)
            pipeline.metrics.ended(Ending.CLIENT_GONE, 0, pipeline.clock() - began)
            raise
        if computed:
            # Time has passed: what is known of the workers is another thing now.
            self._match = await pipeline._matched(pipeline._match(pool, request, named))
        self.decide(None if computed else receipt)
        self._started_at = began
        return self

    def decide(self, receipt: Receipt | None = None) -> None:
        """Choose a worker, unless that is done, count the request there, and prepare what to send. Raises NoWorker."""
        pipeline, request, named = self._pipeline, self._request, self._named
        knowledge = pipeline.knowledge
        now = pipeline.clock()
        if receipt is None:
            receipt = pipeline._choose(request, self._pool, named, self._match, self._excluded, now)
        if request.deadline is not None and pipeline.admission is not None:
            pipeline.admission.check(request, receipt, now, waited=bool(self.queued_header))
        self._receipt = receipt
        self._started_at = now
        if self._division is not None:
            self._division.settle(receipt, now)
        decision, policy = receipt.decision, receipt.policy
        view, seconds = decision.worker, decision.prefill_seconds
        self._worker = worker = pipeline.fleet.workers[view.name]
        if seconds is None:
            seconds = prefill_seconds(receipt.query, view)
        matched, prior_seconds = view.matched_tokens, None
        if request.streams or knowledge.estimates.wants_answer():
            computed, decoding = named.token_count - matched, view.load.running_context_tokens
            prior_seconds = view.prefill.prior_seconds(computed, matched, decoding)
        if self._pool.transfers:
            self._plan_pull(worker, decision, now)
            if self._flight is not None:
                # How long its first token takes says little of prefill.
                seconds, prior_seconds = self._flight.option.prefill_seconds, None
            elif self._passages.tokens:
                seconds, prior_seconds = self._passages.prefill_seconds, None
        if decision.burst is not None:
            knowledge.lease(request.upstream_id, decision.burst, decision, seconds, now)
            decision.burst = None  # receipts are kept, and it leads to the request
        knowledge.accounting.dispatch(
            request.upstream_id,
            view.name,
            view.rank,
            now,
            named.token_count,
            seconds,
            request.output_tokens_max,
            prior_seconds,
            not request.streams,
        )
        if view.load.kv_tokens:
            knowledge.accounting.pin(request.upstream_id, named.chain, self._pool.block_size_tokens)
        if pipeline.shadows is not None:
            prompt = Prompt(named.chain, named.token_count, self._pool.block_size_tokens)
            pipeline.shadows.dispatched(request.upstream_id, prompt, view, now)
        self._queue_key = queue_key_seconds(receipt.decided_at, seconds)
        trust = self._trust = worker.trust
        level = trust.level
        if named.chain and worker.parity is not _FAILED:
            key = (view.name, view.rank)
            if level is _BELIEVED:
                exact = self._flight is None or self._flight.option.fidelity == Fidelity.EXACT
                exact = exact and not self._passages.tokens
                predictions = knowledge.predictions if exact else knowledge.inexact_predictions
                predictions.predict(request.upstream_id, key, named.chain, now)
            if level is not _BELIEVED or policy == "prefix-aware":
                knowledge.history.record(key, named.chain)
            else:
                knowledge.history.note(key, named.chain)
        worker.requests += 1
        self.connections = worker.connections
        self.request_parts = self._upstream_request(worker, view.rank)
        self.answer_headers = (
            f"x-ropeway-worker: {worker.name}\r\nx-ropeway-matched-tokens: {view.confirmed_tokens}\r\n"
            f"x-ropeway-policy: {policy}\r\nx-request-id: {request.id}\r\n"
        ).encode()
        if level is not _BELIEVED:
            receipt.trust, header = _DOUBTED[level]
            self.answer_headers += header
        if self._division is not None:
            self.answer_headers += self._division.header
        if self.queued_header:
            self.answer_headers += self.queued_header
        if pipeline.admission is not None:
            pipeline.admission.begun(request, self._pool, named.token_count - matched)
        pipeline.receipts.add(receipt)
        pipeline.metrics.routed(receipt)

    def _plan_pull(self, worker: WorkerRecord, decision: Decision, now: float) -> None:
        """What the worker is told besides, if it can move KV: what to pull, and how good the KV must be."""
        pipeline, request = self._pipeline, self._request
        transfers = pipeline.transfers
        self._flight, self._passages, self._kv_headers, self.reads_head = None, NO_PASSAGES, b"", False
        if transfers is None or worker.transfer is None:
            return
        accepted = transfers.accepted(request, self._pool, now)
        self._kv_headers, self.reads_head = transfers.fidelity_header(accepted), True
        promised = self._division is not None and self._division.promises
        if pipeline.passages is not None and accepted is Fidelity.FUSED and not promised:
            passages = self._plan_passages(pipeline.passages, worker, decision, now)
            if passages.saved_seconds > (0.0 if decision.pull is None else decision.pull.saved_seconds):
                self._passages, decision.pull = passages, None
                pipeline.passages.metrics.sent(passages)
        if decision.pull is not None:
            identity = Identity(*pipeline.prompts.identity(request, self._pool))
            chain, block = self._named.chain, self._pool.block_size_tokens
            task = Task(request.upstream_id, worker, identity, chain, block, accepted)
            self._flight = transfers.plan(decision.pull, task, now)

    def _plan_passages(
        self, planner: PassagePlanner, worker: WorkerRecord, decision: Decision, now: float
    ) -> PassagePlans:
        """What the worker is to turn and repair of a prompt that it would compute."""
        request, view, count = self._request, decision.worker, self._named.token_count
        if request.prompts_count > 1 or request.skips_cache or not self._named.complete or count > PROMPT_TOKENS_MAX:
            return NO_PASSAGES
        said = self._pipeline.prompts.passages_of(request, self._pool)
        if said is None:
            return NO_PASSAGES
        return planner.plans(
            Asked(request, self._pool, *said, view.matched_tokens, worker, view.rank, view.prefill), now
        )

    def _upstream_request(self, worker: WorkerRecord, rank: int) -> list[bytes]:
        pipeline, request, settings = self._pipeline, self._request, self._pipeline.settings
        salt = None
        if worker.traits.salts:
            salt = request.salt_json or pipeline.prompts.salt_json(request, self._pool)
        plans = self._flight.body if self._flight is not None else self._passages.body
        further = pipeline.outbound.changes(request, self._pool, self._named, worker, plans, self._queue_key)
        if settings.requests_usage and request.streams and request.kind is not Kind.OTHER:
            asked = asking_for_usage(request)
            if asked is not None:
                # The client never sees what that brings.
                self.strips_usage = True
                further = {**(further or {}), "stream_options": asked}
        body = request.upstream_body(salt, settings.forward_kv_transfer_params, plans, further)
        headers = self._kv_headers
        if len(worker.holders) > 1 and worker.traits.rank_header:
            headers += b"%b: %d\r\n" % (worker.traits.rank_header, rank)
        opening = pipeline.outbound.opening(request.head, worker)
        size = sum(map(len, body))
        head = b"%b%b\r\n%bcontent-length: %d\r\n\r\n"
        return [head % (opening, request.upstream_id.encode(), headers, size), *body]

    def _first_leg(self, worker: WorkerRecord, rank: int, request_id: str) -> list[bytes]:
        """What a prefill worker is sent."""
        outbound, request = self._pipeline.outbound, self._request
        further = outbound.changes(request, self._pool, self._named, worker, None, self._queue_key)
        salt = request.salt_json if worker.traits.salts else None
        body = request.prefill_body(salt, request_id, further)
        # What is computed is as bad as what it was computed after.
        headers = b"%b: exact\r\n" % FIDELITY_HEADER if worker.transfer is not None else b""
        if len(worker.holders) > 1 and worker.traits.rank_header:
            headers += b"%b: %d\r\n" % (worker.traits.rank_header, rank)
        head = b"%b%b\r\n%bcontent-length: %d\r\n\r\n"
        opening = outbound.opening(request.head, worker)
        return [head % (opening, request_id.encode(), headers, sum(map(len, body))), *body]

    # exchange.Listener

    def answered(self, head: ResponseHead) -> None:
        transfers = self._pipeline.transfers
        if transfers is not None and head.status == 200:
            flight, self._flight = self._flight, None
            self._receipt.pull_report = transfers.answered(flight, head.headers, self._pipeline.clock())

    def first_byte(self) -> None:
        pipeline = self._pipeline
        now = self._first_byte_at = pipeline.clock()
        if not self._request.streams:
            # The first byte of an answer in one piece is its last token's: it says nothing of the first.
            return
        if self._pool.transfers:
            pipeline.knowledge.release_leases(self._request.upstream_id)
        sample = pipeline.knowledge.accounting.first_token(self._request.upstream_id, now)
        if sample is not None:
            pipeline.knowledge.estimates.observe_prefill(sample)
        if self._division is not None:
            self._division.first_token(now)
        seconds = now - self._started_at
        self._receipt.seen_ttft_ms = seconds * 1e3
        pipeline.metrics.first_byte(seconds)
        if pipeline.shadows is not None:
            pipeline.shadows.first_token(self._request.upstream_id, now)
        if pipeline.admission is not None:
            pipeline.admission.answered(self._receipt, self._pool, now)

    def retry(self, reason: str, elsewhere: bool) -> bool:
        pipeline = self._pipeline
        pipeline.metrics.retried(reason)
        if not elsewhere:
            return True
        pipeline.fleet.suspect(self._worker, reason)
        pipeline.knowledge.cancel_predictions(self._request.upstream_id)
        self._end_flight()
        self._excluded += (self._worker,)
        try:
            self.decide()
        except ServiceError:
            return False
        return True

    def ended(self, ending: Ending, status: int, body_bytes: int, tail: bytes) -> None:
        pipeline, request = self._pipeline, self._request
        now = pipeline.clock()
        output_tokens = 0
        answered = ending is _COMPLETE and status == 200
        if answered:
            self._worker.answers_until_sampled -= 1
            if self._worker.answers_until_sampled < 0:
                self._sample()
            usage, cached_tokens = read_usage(tail), None
            if usage is not None:
                output_tokens, cached_tokens = usage.completion_tokens, usage.cached_tokens
                self._check(usage.prompt_tokens, cached_tokens)
            if self._named.chain and request.prompts_count == 1:
                self._testify(cached_tokens, now)
        elif status != 200 or not self._first_byte_at:
            pipeline.knowledge.cancel_predictions(request.upstream_id)
        if self._pool.transfers:
            pipeline.knowledge.release_leases(request.upstream_id)
        sample = pipeline.knowledge.accounting.finish(request.upstream_id, now, output_tokens, answered)
        if sample is not None:
            pipeline.knowledge.estimates.observe_answer(sample)
        pipeline.metrics.ended(ending, status, now - self._started_at)
        if pipeline.shadows is not None:
            pipeline.shadows.finished(request.upstream_id, now)
        if self._flight is not None:
            self._end_flight()
        if pipeline.admission is not None:
            pipeline.admission.ended(request, self._pool, output_tokens)

    def _end_flight(self) -> None:
        """No word came of the pull."""
        flight, self._flight = self._flight, None
        if flight is not None and self._pipeline.transfers is not None:
            self._pipeline.transfers.abandoned(flight)

    def _sample(self) -> None:
        """Offer the prompt for a comparison token for token."""
        request = self._request
        question = request.question() if self._named.complete and len(request.data) <= SAMPLE_BYTES_MAX else None
        if question is not None:
            pool = self._pool
            told = self._pipeline.prompts.told_tokens(pool, question) if pool.renderer is None else None
            self._pipeline.fleet.sample(self._worker, pool, question, told)

    def _check(self, prompt_tokens: int, cached_tokens: int | None) -> None:
        """Hold the worker's own count beside what we said."""
        self._receipt.reported_prompt_tokens = prompt_tokens
        self._receipt.reported_cached_tokens = cached_tokens
        if self._request.prompts_count == 1 and self._named.complete:
            parity.observe(self._worker, self._named.token_count, prompt_tokens)
        if cached_tokens is not None:
            self._pipeline.metrics.hit(self._receipt, cached_tokens)

    def _testify(self, cached_tokens: int | None, now: float) -> None:
        """What the answer says of our beliefs about the worker's cache, for whoever weighs them."""
        receipt, worker, trust = self._receipt, self._worker, self._trust
        if receipt.decision.pull is not None or self._passages.tokens or worker.parity is _FAILED:
            return
        _, rank, matched, confirmed, _, evidence = receipt.candidate_fields[receipt.chosen]
        chain, block = self._named.chain, self._pool.block_size_tokens
        guessed = evidence is _HISTORY
        by_index = not guessed and trust.level is _BELIEVED and receipt.policy != "prefix-aware"
        if not by_index and self._match.depths and rank < len(worker.holders):
            # Whether the index would have been right is of interest all the same.
            tokens = self._named.token_count
            confirmed = self._pipeline.knowledge.confirmed_tokens(self._match, worker, rank, tokens, block)
        if matched or confirmed or cached_tokens:
            trust.note(Answer(self._started_at, confirmed, matched, guessed, cached_tokens))
        if trust.curious and rank < len(worker.holders):
            cached, slack = cached_tokens or 0, trust.slack_tokens
            held = confirmed if cached_tokens is None else max(confirmed, cached + slack)
            if held < len(chain) // HASH_BYTES * block:
                trust.sample(worker.holders[rank], chain, self._started_at, now, cached <= confirmed + slack)
