"""The story of a request, each stage a line: `Pipeline.begin`.

Decide first, without I/O; then act. From a complete body to a decision nothing is awaited, but for three things that
cannot be had at once: a prompt with much new text is tokenized off the loop, a model without a tokenizer of ours is
tokenized by its worker, and a shared index without a loaded mirror is asked, within its budget. What is in flight is
counted at the moment of decision, so a burst sees itself.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine
from random import Random
from typing import Any, NamedTuple

import orjson

from cachecore.blocks import EMPTY_CHAIN, HASH_BYTES
from cachecore.index.contract import NO_MATCH, Match
from cachecore.prompts.contract import NamedPrompt, PromptError
from cachecore.scope import Fidelity
from cachecore.store import StoreError
from gateway.config import PrioritiesConfig
from gateway.disaggregation import Disaggregation, Division, Prompted
from gateway.edge.body import BodyMemory
from gateway.edge.exchange import Ending
from gateway.edge.http1 import HOP_BY_HOP, RequestHead, ResponseHead, forwardable
from gateway.edge.server import Inbound
from gateway.errors import BadRequest, ServiceError
from gateway.fleet import parity
from gateway.fleet.engines.contract import EngineTraits
from gateway.fleet.evidence import Answer
from gateway.fleet.knowledge import Knowledge
from gateway.fleet.registry import Fleet
from gateway.fleet.scrutiny import SAMPLE_BYTES_MAX
from gateway.fleet.trust import TrustLevel
from gateway.fleet.worker import ModelPool, Parity, WorkerRecord
from gateway.prompts import Prompts
from gateway.requests import FIDELITY_HEADER, Kind, Request, read_request, request_id_of
from gateway.shifted import NO_PASSAGES, PROMPT_TOKENS_MAX, Asked, PassagePlanner, PassagePlans
from gateway.tenants import Tenant, Tenants
from gateway.transfers import Flight, Identity, Task, Transfers
from gateway.usage import read_usage
from gateway.views.metrics import GatewayMetrics
from gateway.views.receipts import Receipts
from policies import create as create_policy
from policies.contract import Decision, Evidence, Policy, Query, Receipt, candidate_fields
from policies.pricing import prefill_seconds

logger = logging.getLogger("ropeway.pipeline")

# A named tuple's own constructor is a function in Python.
_new = tuple.__new__

# Members of enumerations are looked up by a slow path.
_FAILED, _PROVEN, _COMPLETE = Parity.FAILED, Parity.PROVEN, Ending.COMPLETE
_BELIEVED, _HISTORY = TrustLevel.EXACT, Evidence.HISTORY
_DOUBTED = {level: (level.value, b"x-ropeway-trust: %b\r\n" % level.value.encode()) for level in TrustLevel}
"""What a receipt and an answer say of a worker that is believed less."""
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
        receipt = self._choose(request, pool, named, matched, (), now)
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
        policy_name, tokens = policy.name, named.token_count
        own_history_only = policy_name == "prefix-aware"
        if pool.transfers and self.transfers is not None:
            accepted = self.transfers.accepted(request, pool, now)
            snapshot = self.knowledge.snapshot(pool, candidates, match, chain, tokens, now, own_history_only, accepted)
            if request.prompts_count == 1:
                pulls = self.transfers.pulls(request, pool, chain, match, tokens, now)
                snapshot = snapshot._replace(pulls=pulls)
        else:
            snapshot = self.knowledge.snapshot(pool, candidates, match, chain, tokens, now, own_history_only)
        query = _new(Query, (tokens, request.output_tokens_max, request.session, request.priority))
        decision, views = policy.decide(query, snapshot, self._random), snapshot.workers
        if snapshot.pulls is not None and decision.pull is None:
            decision.pull = snapshot.pulls.option(decision.worker, decision.worker.load.wait_seconds(now))
        return Receipt(
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
        journey = Journey(self, request, pool, named, match)
        if pool.prefill_workers and self.disaggregation is not None:
            return journey.divide(self.disaggregation)
        journey.decide()
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
        "_receipt",
        "_request",
        "_started_at",
        "_trust",
        "_worker",
        "answer_headers",
        "connections",
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
        self._started_at = self._first_byte_at = 0.0
        self._division: Division | None = None
        self._flight: Flight | None = None
        self._passages = NO_PASSAGES
        self._kv_headers = b""
        self.reads_head = self.strips_usage = False

    @property
    def attempt(self) -> "Journey":
        # Not an attribute: a reference to itself would leave every request to the garbage collector.
        return self

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
        further = None
        if request.states_priority or settings.forward_token_ids:
            further = self._further_changes(worker, plans)
        if settings.requests_usage and request.streams and request.kind is not Kind.OTHER:
            further = self._ask_for_usage(further)
        body = request.upstream_body(salt, settings.forward_kv_transfer_params, plans, further)
        headers = self._kv_headers
        if len(worker.holders) > 1 and worker.traits.rank_header:
            headers += b"%b: %d\r\n" % (worker.traits.rank_header, rank)
        openings = request.head.notes.get("openings")
        opening = openings.get(worker.url) if openings else None
        if opening is None:
            opening = pipeline.upstream_opening(request.head, worker)
        size = sum(map(len, body))
        head = b"%b%b\r\n%bcontent-length: %d\r\n\r\n"
        return [head % (opening, request.upstream_id.encode(), headers, size), *body]

    def _first_leg(self, worker: WorkerRecord, rank: int, request_id: str) -> list[bytes]:
        """What a prefill worker is sent."""
        pipeline, request, settings = self._pipeline, self._request, self._pipeline.settings
        further = None
        if request.states_priority or settings.forward_token_ids:
            further = self._further_changes(worker, None)
        salt = request.salt_json if worker.traits.salts else None
        body = request.prefill_body(salt, request_id, further)
        # What is computed is as bad as what it was computed after.
        headers = b"%b: exact\r\n" % FIDELITY_HEADER if worker.transfer is not None else b""
        if len(worker.holders) > 1 and worker.traits.rank_header:
            headers += b"%b: %d\r\n" % (worker.traits.rank_header, rank)
        head = b"%b%b\r\n%bcontent-length: %d\r\n\r\n"
        opening = pipeline.upstream_opening(request.head, worker)
        return [head % (opening, request_id.encode(), headers, sum(map(len, body))), *body]

    def _ask_for_usage(self, changes: dict[str, bytes | None] | None) -> dict[str, bytes | None] | None:
        """In a stream that would not bring its usage; the client never sees it."""
        body = self._request.body
        options = body.values({"stream_options"}).get("stream_options") if body is not None else None
        if options is not None and (not isinstance(options, dict) or options.get("include_usage")):
            return changes
        self.strips_usage = True
        asked = orjson.dumps({**(options or {}), "include_usage": True})
        return {**(changes or {}), "stream_options": asked}

    def _further_changes(self, worker: WorkerRecord, plans: bytes | None) -> dict[str, bytes | None]:
        """What else of a body is not as the client wrote it: its priority, and its prompt as token ids."""
        request, settings = self._request, self._pipeline.settings
        changes: dict[str, bytes | None] = {}
        if request.states_priority:
            changes["priority"] = None
            if settings.priorities.forwarded and worker.traits.priorities:
                lowest, highest = settings.priorities.lowest, settings.priorities.highest
                changes["priority"] = b"%d" % min(max(request.priority, lowest), highest)
        if settings.forward_token_ids and worker.parity is _PROVEN and not request.values.get("echo"):
            changes |= self._prompt_as_tokens(worker.traits, plans)
        return changes

    def _prompt_as_tokens(self, traits: EngineTraits, plans: bytes | None) -> dict[str, bytes | None]:
        """Nothing where the engine takes none, or the prompt is not known to the end."""
        request, named = self._request, self._named
        is_chat = request.kind is Kind.CHAT
        takes_them = traits.chat_token_ids if is_chat else traits.token_ids
        if not takes_them or not named.complete or request.question() is None:
            return {}
        if is_chat and self._pipeline.settings.forward_kv_transfer_params and "kv_transfer_params" in request.values:
            return {}
        tokens = self._pipeline.prompts.tokens_of(request, self._pool)
        if not tokens:
            return {}
        listed = orjson.dumps(tokens.tolist())
        if not is_chat:
            return {"prompt": listed}
        return {"kv_transfer_params": b'{"prompt_token_ids":%b%b' % (listed, b"," + plans[1:] if plans else b"}")}

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
        if self._division is not None:
            self._division.first_token(now)
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
