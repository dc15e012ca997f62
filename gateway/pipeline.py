"""The story of a request, each stage a line: `Pipeline.begin`.

Decide first, without I/O; then act. From a complete body to a decision nothing is awaited, but for three things that
cannot be had at once: a prompt with much new text is tokenized off the loop, a model without a tokenizer of ours is
tokenized by its worker, and a shared index without a loaded mirror is asked, within its budget. What is in flight is
counted at the moment of decision, so a burst sees itself.
"""

import logging
import time
from collections.abc import Awaitable, Callable, Coroutine
from random import Random
from typing import Any, NamedTuple

from cachecore.blocks import EMPTY_CHAIN
from cachecore.index.contract import NO_MATCH, Match
from cachecore.prompts.contract import NamedPrompt, PromptError
from cachecore.scope import Fidelity
from cachecore.store import StoreError
from gateway.edge.body import BodyMemory
from gateway.edge.exchange import Ending
from gateway.edge.http1 import HOP_BY_HOP, RequestHead, ResponseHead, forwardable
from gateway.edge.server import Inbound
from gateway.errors import BadRequest, ServiceError
from gateway.fleet import parity
from gateway.fleet.knowledge import Knowledge
from gateway.fleet.registry import Fleet
from gateway.fleet.worker import ModelPool, Parity, WorkerRecord
from gateway.prompts import Prompts
from gateway.requests import Kind, Request, read_request, request_id_of
from gateway.shifted import NO_PASSAGES, PROMPT_TOKENS_MAX, Asked, PassagePlanner, PassagePlans
from gateway.tenants import Tenant, Tenants
from gateway.transfers import Flight, Identity, Task, Transfers
from gateway.usage import read_usage
from gateway.views.metrics import GatewayMetrics
from gateway.views.receipts import Receipts
from policies import create as create_policy
from policies.contract import Decision, Policy, Query, Receipt, candidate_fields
from policies.pricing import prefill_seconds

logger = logging.getLogger("ropeway.pipeline")

# Members of enumerations are looked up by a slow path.
_FAILED, _COMPLETE = Parity.FAILED, Ending.COMPLETE
_OPENINGS_MAX = 64
"""Workers that one head is written out for, until it is done anew."""

# Not sent upstream: what belongs to this connection, what the gateway sets itself, and what is meant for it alone.
# Answers come uncompressed, so that usage can be read off them.
_DROPPED_FROM_REQUESTS = HOP_BY_HOP | {
    b"host",
    b"content-length",
    b"expect",
    b"accept-encoding",
    b"x-request-id",
    b"x-ropeway-fidelity",
    b"x-ropeway-policy",
    b"x-ropeway-session",
}


class PipelineSettings(NamedTuple):
    policy: str
    policy_header_allowed: bool
    forward_kv_transfer_params: bool


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
        self.clock = clock
        self._random = random or Random()
        self.policy = create_policy(settings.policy)
        self._policies: dict[str, Policy] = {settings.policy: self.policy}
        self._bodies = BodyMemory()

    # The story

    def begin(self, inbound: Inbound) -> "Journey | Coroutine[Any, Any, Journey]":
        """Decide where a request goes. Raises ServiceError."""
        request = self._read(inbound)
        pool, adapter = self.fleet.pool(request.model)
        request.adapter = adapter
        named = self._name(request, pool)
        if not isinstance(named, NamedPrompt):
            return self._begin_later(request, pool, named)
        matched = self._match(pool, request, named)
        if not isinstance(matched, Match):
            return self._match_later(request, pool, named, matched)
        return self._embark(request, pool, named, matched)

    async def _begin_later(self, request: Request, pool: ModelPool, naming: Awaitable[NamedPrompt]) -> "Journey":
        named = await self._named(request, naming)
        matched = self._match(pool, request, named)
        return self._embark(request, pool, named, await self._matched(matched))

    async def _match_later(
        self, request: Request, pool: ModelPool, named: NamedPrompt, matching: Awaitable[Match]
    ) -> "Journey":
        return self._embark(request, pool, named, await self._matched(matching))

    async def explain(self, inbound: Inbound) -> Receipt:
        """The receipt of a request, which is sent nowhere and counted nowhere. Raises ServiceError."""
        request = self._read(inbound)
        pool, request.adapter = self.fleet.pool(request.model)
        named = self._name(request, pool)
        named = named if isinstance(named, NamedPrompt) else await self._named(request, named)
        matched = await self._matched(self._match(pool, request, named))
        return self._choose(request, pool, named, matched, (), self.clock())

    # Stages

    def owns(self, method: str, path: str) -> bool:
        return Kind.of(method, path) is not None

    def admit(self, head: RequestHead) -> None:
        self._tenant_of(head)

    def answer_headers(self, head: RequestHead | None) -> bytes:
        return b"x-request-id: %b\r\n" % request_id_of(head).encode()

    def upstream_opening(self, head: RequestHead, worker: WorkerRecord) -> bytes:
        """A request to a worker up to its id, with the client's header lines that travel: all but a key of ours."""
        dropped = _DROPPED_FROM_REQUESTS if self.tenants.open else _DROPPED_FROM_REQUESTS | {b"authorization"}
        forwarded = b"".join(b"%b: %b\r\n" % field for field in forwardable(head.headers, dropped))
        opening = b"%b %b HTTP/1.1\r\nhost: %b\r\n%bx-request-id: "
        opening %= (head.method, head.target, worker.authority, forwarded)
        openings = head.notes.setdefault("openings", {})
        if len(openings) >= _OPENINGS_MAX:
            openings.clear()
        openings[worker.url] = opening
        return opening

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
    ) -> Receipt:
        """The decision, and what it was made from."""
        started = time.perf_counter()
        policy = self._policy_of(request) if request.policy else self.policy
        candidates = self.fleet.candidates(pool, request.adapter, excluded)
        chain = EMPTY_CHAIN if request.skips_cache else named.chain
        tokens, own_history_only = named.token_count, policy.name == "prefix-aware"
        if pool.transfers and self.transfers is not None:
            accepted = self.transfers.accepted(request, pool, now)
            snapshot = self.knowledge.snapshot(pool, candidates, match, chain, tokens, now, own_history_only, accepted)
            if request.prompts_count == 1:
                pulls = self.transfers.pulls(request, pool, chain, match, tokens, now)
                snapshot = snapshot._replace(pulls=pulls)
        else:
            snapshot = self.knowledge.snapshot(pool, candidates, match, chain, tokens, now, own_history_only)
        query = Query(tokens, request.output_tokens_max, request.session, request.priority)
        decision, views = policy.decide(query, snapshot, self._random), snapshot.workers
        if snapshot.pulls is not None and decision.pull is None:
            decision.pull = snapshot.pulls.option(decision.worker, decision.worker.load.wait_seconds(now))
        return Receipt(
            request.id,
            request.model,
            policy.name,
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

    def _embark(self, request: Request, pool: ModelPool, named: NamedPrompt, match: Match) -> "Journey":
        journey = Journey(self, request, pool, named, match)
        journey.decide()
        return journey


class Journey:
    """One request under way. Implements `gateway.edge.exchange.Listener` and, for its present attempt, `Attempt`."""

    __slots__ = (
        "_excluded",
        "_first_byte_at",
        "_flight",
        "_kv_headers",
        "_match",
        "_named",
        "_passages",
        "_pipeline",
        "_pool",
        "_receipt",
        "_request",
        "_started_at",
        "_worker",
        "answer_headers",
        "connections",
        "reads_head",
        "request_parts",
    )

    def __init__(self, pipeline: Pipeline, request: Request, pool: ModelPool, named: NamedPrompt, match: Match) -> None:
        self._pipeline = pipeline
        self._request = request
        self._pool = pool
        self._named = named
        self._match = match
        self._excluded: tuple[WorkerRecord, ...] = ()
        self._started_at = self._first_byte_at = 0.0
        self._flight: Flight | None = None
        self._passages = NO_PASSAGES
        self._kv_headers = b""
        self.reads_head = False

    @property
    def attempt(self) -> "Journey":
        # Not an attribute: a reference to itself would leave every request to the garbage collector.
        return self

    def decide(self) -> None:
        """Choose a worker, count the request there, and prepare what to send. Raises NoWorker."""
        pipeline, request, named = self._pipeline, self._request, self._named
        knowledge = pipeline.knowledge
        now = pipeline.clock()
        receipt = self._receipt = pipeline._choose(request, self._pool, named, self._match, self._excluded, now)
        self._started_at = now
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
        knowledge.accounting.dispatch(
            request.upstream_id,
            view.name,
            view.rank,
            now,
            named.token_count,
            seconds,
            request.output_tokens_max,
            prior_seconds,
            in_one_piece=not request.streams,
        )
        if named.chain and worker.parity is not _FAILED:
            key = (view.name, view.rank)
            if worker.events_trusted:
                exact = self._flight is None or self._flight.option.fidelity == Fidelity.EXACT
                exact = exact and not self._passages.tokens
                predictions = knowledge.predictions if exact else knowledge.inexact_predictions
                predictions.predict(request.upstream_id, key, named.chain, now)
            if not worker.events_trusted or policy == "prefix-aware":
                knowledge.history.record(key, named.chain)
        worker.requests += 1
        self.connections = worker.connections
        self.request_parts = self._upstream_request(worker)
        self.answer_headers = (
            f"x-ropeway-worker: {worker.name}\r\nx-ropeway-matched-tokens: {view.confirmed_tokens}\r\n"
            f"x-ropeway-policy: {policy}\r\nx-request-id: {request.id}\r\n"
        ).encode()
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
        if pipeline.passages is not None and accepted is Fidelity.FUSED:
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

    def _upstream_request(self, worker: WorkerRecord) -> list[bytes]:
        pipeline, request = self._pipeline, self._request
        salt = request.salt_json or pipeline.prompts.salt_json(request, self._pool)
        plans = self._flight.body if self._flight is not None else self._passages.body
        body = request.upstream_body(salt, pipeline.settings.forward_kv_transfer_params, plans)
        openings = request.head.notes.get("openings")
        opening = openings.get(worker.url) if openings else None
        if opening is None:
            opening = pipeline.upstream_opening(request.head, worker)
        size = sum(map(len, body))
        head = b"%b%b\r\n%bcontent-length: %d\r\n\r\n"
        return [head % (opening, request.upstream_id.encode(), self._kv_headers, size), *body]

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
        sample = pipeline.knowledge.accounting.first_token(self._request.upstream_id, now)
        if sample is not None:
            pipeline.knowledge.estimates.observe_prefill(sample)
        seconds = now - self._started_at
        self._receipt.seen_ttft_ms = seconds * 1e3
        pipeline.metrics.first_byte(seconds)

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
            usage = read_usage(tail)
            if usage is not None:
                output_tokens = usage.completion_tokens
                self._check(usage.prompt_tokens, usage.cached_tokens)
        elif status != 200 or not self._first_byte_at:
            pipeline.knowledge.cancel_predictions(request.upstream_id)
        sample = pipeline.knowledge.accounting.finish(request.upstream_id, now, output_tokens, answered)
        if sample is not None:
            pipeline.knowledge.estimates.observe_answer(sample)
        pipeline.metrics.ended(ending, status, now - self._started_at)
        if self._flight is not None:
            self._end_flight()

    def _end_flight(self) -> None:
        """No word came of the pull."""
        flight, self._flight = self._flight, None
        if flight is not None and self._pipeline.transfers is not None:
            self._pipeline.transfers.abandoned(flight)

    def _check(self, prompt_tokens: int, cached_tokens: int | None) -> None:
        """Hold the worker's own count beside what we said."""
        self._receipt.reported_prompt_tokens = prompt_tokens
        self._receipt.reported_cached_tokens = cached_tokens
        if self._request.prompts_count == 1 and self._named.complete and self._pool.renderer is not None:
            parity.observe(self._worker, self._named.token_count, prompt_tokens)
        if cached_tokens is not None:
            self._pipeline.metrics.hit(self._receipt, cached_tokens)
