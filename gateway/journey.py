"""One request under way: who was chosen, what is sent there, and the accounts that are settled when it ends."""

import asyncio
from collections.abc import Callable
from copy import copy
from typing import TYPE_CHECKING

from cachecore.blocks import HASH_BYTES
from cachecore.index.contract import Match
from cachecore.prompts.contract import NamedPrompt
from cachecore.scope import Fidelity
from gateway.disaggregation import Disaggregation, Division, Prompted
from gateway.edge.contract import Ending, Patience
from gateway.edge.http1 import ResponseHead
from gateway.errors import ServiceError
from gateway.fleet import parity
from gateway.fleet.evidence import Answer
from gateway.fleet.scrutiny import SAMPLE_BYTES_MAX
from gateway.fleet.trust import TrustLevel
from gateway.fleet.worker import ModelPool, Parity, WorkerRecord
from gateway.outbound import asking_for_usage
from gateway.reliability.failures import (
    CLIENT_GONE,
    FAILED_STATUS_MIN,
    PLAN_FAILED,
    WORKER_REFUSAL,
    Failure,
    Retry,
)
from gateway.reliability.hedging import Hedging, Outcome
from gateway.requests import FIDELITY_HEADER, Request
from gateway.shifted import NO_PASSAGES, PROMPT_TOKENS_MAX, Asked, PassagePlanner, PassagePlans
from gateway.transfers import Flight, Identity, Task
from gateway.usage import read_usage
from gateway.views.receipts import CHAIN_BYTES_MAX
from policies.bursts import HOLD_SECONDS_MAX
from policies.contract import Decision, Evidence, Receipt
from policies.peers.contract import Asked as Prompt
from policies.pricing import prefill_seconds, queue_key_seconds
from policies.state.breakers import CLOSED

if TYPE_CHECKING:
    from opentelemetry.trace import Span

    from gateway.pipeline import Pipeline

# Members of enumerations are looked up by a slow path.
_FAILED, _COMPLETE, _CLOSED = Parity.FAILED, Ending.COMPLETE, CLOSED
_BELIEVED, _HISTORY = TrustLevel.EXACT, Evidence.HISTORY
_DOUBTED = {level: (level.value, b"x-ropeway-trust: %b\r\n" % level.value.encode()) for level in TrustLevel}
"""What a receipt and an answer say of a worker that is believed less."""


class Journey:
    """One request under way. Implements `gateway.edge.exchange.Listener` and, for its present attempt, `Attempt`."""

    __slots__ = (
        "_division",
        "_excluded",
        "_failures",
        "_first_byte_at",
        "_flight",
        "_is_second",
        "_kv_headers",
        "_passages",
        "_pipeline",
        "_queue_key",
        "_receipt",
        "_span",
        "_started_at",
        "_trust",
        "_worker",
        "answer_headers",
        "connections",
        "match",
        "named",
        "patience",
        "pool",
        "queued_header",
        "reads_head",
        "request",
        "request_parts",
        "strips_usage",
    )

    def __init__(
        self, pipeline: "Pipeline", request: Request, pool: ModelPool, named: NamedPrompt, match: Match
    ) -> None:
        self._pipeline = pipeline
        self.request = request
        self.pool = pool
        self.named = named
        self.match = match
        self._excluded: tuple[WorkerRecord, ...] = ()
        self._failures: list[Failure] | None = None
        """Of all legs; None before the first."""
        self._is_second = False
        self.patience: Callable[[], Patience] | None = None
        self._started_at = self._first_byte_at = self._queue_key = 0.0
        self._division: Division | None = None
        self._flight: Flight | None = None
        self._passages = NO_PASSAGES
        self._kv_headers = b""
        self._span: Span | None = None
        self.queued_header = b""
        """A header line for the answer of a request that has waited."""
        self.reads_head = self.strips_usage = False

    @property
    def attempt(self) -> "Journey":
        # Not an attribute: a reference to itself would leave every request to the garbage collector.
        return self

    def choose(self, held_seconds: float) -> Receipt:
        """The decision alone, for a request that may be held and was so long. Raises NoWorker."""
        pipeline, request = self._pipeline, self.request
        now = pipeline.clock()
        if request.deadline is not None:
            # Of what is left to it, half at most is waited for others.
            held_seconds = max(held_seconds, HOLD_SECONDS_MAX - (request.deadline - now) / 2)
        return pipeline.choose(
            request, self.pool, self.named, self.match, self._excluded, now, held_seconds=held_seconds
        )

    async def hold(self, receipt: Receipt) -> "Journey":
        """As `decide`, once somebody has computed what would otherwise be computed everywhere."""
        pipeline = self._pipeline
        began = pipeline.clock()
        while receipt.decision.hold_seconds:
            await asyncio.sleep(receipt.decision.hold_seconds)
            self.match = await pipeline.matched(pipeline.match(self.pool, self.request, self.named))
            receipt = self.choose(pipeline.clock() - began)
        self.decide(receipt)
        self._started_at = began
        return self

    async def divide(self, disaggregation: Disaggregation) -> "Journey":
        """As `decide`, once a prefill worker has computed the prompt, where that is worth it."""
        pipeline, request, pool, named = self._pipeline, self.request, self.pool, self.named
        began = pipeline.clock()
        receipt = pipeline.choose(request, pool, named, self.match, (), began)
        division = disaggregation.weigh(Prompted(request, pool, named, self.match), receipt, began)
        self._division = division
        try:
            computed = division is not None and await division.run(self._first_leg)
        except asyncio.CancelledError:
            pipeline.receipts.add(receipt)
            pipeline.metrics.ended(Ending.CLIENT_GONE, 0, pipeline.clock() - began)
            raise
        if computed:
            # Time has passed: what is known of the workers is another thing now.
            self.match = await pipeline.matched(pipeline.match(pool, request, named))
        self.decide(None if computed else receipt)
        self._started_at = began
        return self

    def decide(self, receipt: Receipt | None = None) -> None:
        """Choose a worker, unless that is done, count the request there, and prepare what to send. Raises NoWorker."""
        pipeline, request, named = self._pipeline, self.request, self.named
        knowledge = pipeline.knowledge
        now = pipeline.clock()
        if receipt is None:
            receipt = pipeline.choose(request, self.pool, named, self.match, self._excluded, now)
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
        if self.pool.transfers:
            self._plan_pull(worker, decision, now)
            if self._flight is not None:
                # How long its first token takes says little of prefill.
                seconds, prior_seconds = self._flight.option.prefill_seconds, None
            elif self._passages.tokens:
                seconds, prior_seconds = self._passages.prefill_seconds, None
        if worker.breaker.circuit is not _CLOSED:
            # A trial: its head says enough, however long the answer takes.
            worker.breaker.sent(request.upstream_id, now)
            self.reads_head = True
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
            knowledge.accounting.pin(request.upstream_id, named.chain, self.pool.block_size_tokens)
        if pipeline.shadows is not None:
            prompt = Prompt(named.chain, named.token_count, self.pool.block_size_tokens)
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
        if pipeline.limits is not None:
            self.answer_headers += pipeline.limits.header_lines(request.tenant)
        if pipeline.admission is not None and not self._is_second:
            pipeline.admission.begun(request, self.pool, named.token_count - matched)
        receipt.chain = named.chain[:CHAIN_BYTES_MAX]
        pipeline.receipts.add(receipt)
        pipeline.metrics.routed(receipt)

    def _plan_pull(self, worker: WorkerRecord, decision: Decision, now: float) -> None:
        """What the worker is told besides, if it can move KV: what to pull, and how good the KV must be."""
        pipeline, request = self._pipeline, self.request
        transfers = pipeline.transfers
        self._flight, self._passages, self._kv_headers, self.reads_head = None, NO_PASSAGES, b"", False
        if transfers is None or worker.transfer is None:
            return
        accepted = transfers.accepted(request, self.pool, now)
        self._kv_headers, self.reads_head = transfers.fidelity_header(accepted), True
        promised = self._division is not None and self._division.promises
        if pipeline.passages is not None and accepted is Fidelity.FUSED and not promised:
            passages = self._plan_passages(pipeline.passages, worker, decision, now)
            if passages.saved_seconds > (0.0 if decision.pull is None else decision.pull.saved_seconds):
                self._passages, decision.pull = passages, None
                pipeline.passages.metrics.sent(passages)
        if decision.pull is not None:
            identity = Identity(*pipeline.prompts.identity(request, self.pool))
            chain, block = self.named.chain, self.pool.block_size_tokens
            task = Task(request.upstream_id, worker, identity, chain, block, accepted)
            self._flight = transfers.plan(decision.pull, task, now)

    def _plan_passages(
        self, planner: PassagePlanner, worker: WorkerRecord, decision: Decision, now: float
    ) -> PassagePlans:
        """What the worker is to turn and repair of a prompt that it would compute."""
        request, view, count = self.request, decision.worker, self.named.token_count
        if request.prompts_count > 1 or request.skips_cache or not self.named.complete or count > PROMPT_TOKENS_MAX:
            return NO_PASSAGES
        said = self._pipeline.prompts.passages_of(request, self.pool)
        if said is None:
            return NO_PASSAGES
        return planner.plans(
            Asked(request, self.pool, *said, view.matched_tokens, worker, view.rank, view.prefill), now
        )

    def _upstream_request(self, worker: WorkerRecord, rank: int) -> list[bytes]:
        pipeline, request, settings = self._pipeline, self.request, self._pipeline.settings
        salt = None
        if worker.traits.salts:
            salt = request.salt_json or pipeline.prompts.salt_json(request, self.pool)
        plans = self._flight.body if self._flight is not None else self._passages.body
        further = pipeline.outbound.changes(request, self.pool, self.named, worker, plans, self._queue_key)
        if settings.requests_usage and request.streams and not request.foreign:
            asked = asking_for_usage(request)
            if asked is not None:
                # The client never sees what that brings.
                self.strips_usage = True
                further = {**(further or {}), "stream_options": asked}
        body = request.upstream_body(salt, settings.forward_kv_transfer_params, plans, further)
        headers = self._kv_headers
        if len(worker.holders) > 1 and worker.traits.rank_header:
            headers += b"%b: %d\r\n" % (worker.traits.rank_header, rank)
        if pipeline.tracing is not None:
            if self._span is None:
                self._span = pipeline.tracing.begin(request)
            headers += pipeline.tracing.header_lines(self._span)
        opening = pipeline.outbound.opening(request, worker)
        size = sum(map(len, body))
        head = b"%b%b\r\n%bcontent-length: %d\r\n\r\n"
        return [head % (opening, request.upstream_id.encode(), headers, size), *body]

    def _first_leg(self, worker: WorkerRecord, rank: int, request_id: str) -> list[bytes]:
        """What a prefill worker is sent."""
        outbound, request = self._pipeline.outbound, self.request
        further = outbound.changes(request, self.pool, self.named, worker, None, self._queue_key)
        salt = request.salt_json if worker.traits.salts else None
        body = request.prefill_body(salt, request_id, further)
        # What is computed is as bad as what it was computed after.
        headers = b"%b: exact\r\n" % FIDELITY_HEADER if worker.transfer is not None else b""
        if len(worker.holders) > 1 and worker.traits.rank_header:
            headers += b"%b: %d\r\n" % (worker.traits.rank_header, rank)
        head = b"%b%b\r\n%bcontent-length: %d\r\n\r\n"
        opening = outbound.opening(request, worker)
        return [head % (opening, request_id.encode(), headers, sum(map(len, body))), *body]

    # exchange.Listener

    def answered(self, head: ResponseHead) -> None:
        transfers, breaker = self._pipeline.transfers, self._worker.breaker
        if breaker.circuit is not _CLOSED and head.status == 200:
            breaker.succeeded(self.request.upstream_id, self._pipeline.clock())
        if transfers is not None and head.status == 200:
            flight, self._flight = self._flight, None
            report = self._receipt.pull_report = transfers.answered(flight, head.headers, self._pipeline.clock())
            if report is not None and report.outcome != "fetched":
                self._pipeline.fleet.safeguards.counted(PLAN_FAILED)

    def first_byte(self) -> None:
        pipeline = self._pipeline
        now = self._first_byte_at = pipeline.clock()
        if not self.request.streams:
            # The first byte of an answer in one piece is its last token's: it says nothing of the first.
            return
        if self.pool.transfers:
            pipeline.knowledge.release_leases(self.request.upstream_id)
        sample = pipeline.knowledge.accounting.first_token(self.request.upstream_id, now)
        if sample is not None:
            pipeline.knowledge.estimates.observe_prefill(sample)
        if self._division is not None:
            self._division.first_token(now)
        seconds = now - self._started_at
        self._receipt.seen_ttft_ms = seconds * 1e3
        pipeline.metrics.first_byte(seconds)
        if pipeline.shadows is not None:
            pipeline.shadows.first_token(self.request.upstream_id, now)
        if pipeline.admission is not None:
            pipeline.admission.answered(self._receipt, self.pool, now)

    def failed(self, failure: Failure) -> bool:
        pipeline, safeguards = self._pipeline, self._pipeline.fleet.safeguards
        self.broke(failure)
        if failure.retry is Retry.NO or self._exhausted(failure, safeguards.attempts_max):
            return False
        if failure.retry is Retry.ELSEWHERE:
            if not safeguards.budget.spend(pipeline.clock()):
                return False
            if not self._goes_elsewhere():
                safeguards.budget.refund()
                return False
        pipeline.metrics.retried(failure.name)
        return True

    def _exhausted(self, failure: Failure, attempts_max: int) -> bool:
        """Whether so many attempts have failed that there is to be no other. A stale connection is always replaced
        once: nothing had been tried."""
        failures = self._failures or []
        if failure.attempts_max and failures.count(failure) >= failure.attempts_max:
            return True
        return len(failures) >= (max(attempts_max, 2) if failure.retry is Retry.SAME else attempts_max)

    def _goes_elsewhere(self) -> bool:
        """Whether there is another worker for it; if so, it is decided."""
        self._pipeline.knowledge.cancel_predictions(self.request.upstream_id)
        self._end_flight()
        self._excluded += (self._worker,)
        try:
            self.decide()
        except ServiceError:
            return False
        return True

    def broke(self, failure: Failure) -> None:
        if self._failures is None:
            self._failures = []
        self._failures.append(failure)
        self._pipeline.fleet.failed(self._worker, self.request.upstream_id, failure)

    def hedge(self) -> "Journey | None":
        hedging = self._pipeline.hedging
        if hedging is None or not hedging.granted():
            return None
        request = copy(self.request)
        request.upstream_id = f"{self.request.upstream_id}-hedge"
        request.deadline = None  # it has been promised that already
        second = Journey(self._pipeline, request, self.pool, self.named, self.match)
        if self._failures is None:
            self._failures = []
        second._failures = self._failures
        second._excluded, second._is_second = (self._worker,), True
        try:
            second.decide()
        except ServiceError:
            hedging.outcomes[Outcome.NOBODY] += 1
            hedging.budget.refund()
            return None
        second._started_at = self._started_at
        second.answer_headers += b"x-ropeway-hedge: %b\r\n" % self._worker.name.encode()
        return second

    def ended(self, ending: Ending, status: int, body_bytes: int, tail: bytes) -> None:
        pipeline, request = self._pipeline, self.request
        now = pipeline.clock()
        output_tokens = 0
        answered = ending is _COMPLETE and status == 200
        if answered:
            self._worker.breaker.succeeded(request.upstream_id, now)
            self._worker.answers_until_sampled -= 1
            if self._worker.answers_until_sampled < 0:
                self._sample()
            usage, cached_tokens = read_usage(tail), None
            if usage is not None:
                output_tokens, cached_tokens = usage.completion_tokens, usage.cached_tokens
                self._check(usage.prompt_tokens, cached_tokens)
            if self.named.chain and request.prompts_count == 1:
                self._testify(cached_tokens, now)
        else:
            self._unanswered(ending, status)
        if self.pool.transfers:
            pipeline.knowledge.release_leases(request.upstream_id)
        sample = pipeline.knowledge.accounting.finish(request.upstream_id, now, output_tokens, answered)
        if sample is not None:
            pipeline.knowledge.estimates.observe_answer(sample)
        pipeline.metrics.ended(ending, status, now - self._started_at)
        if pipeline.request_log is not None:
            seconds = now - self._started_at
            pipeline.request_log.ended(self._receipt, ending, status, seconds, body_bytes, output_tokens)
        if pipeline.tracing is not None and self._span is not None:
            pipeline.tracing.end(self._span, self._receipt, ending, status, output_tokens)
        if pipeline.hedging is not None:
            self._tell_of_hedging(pipeline.hedging, ending, answered, now)
        if pipeline.shadows is not None:
            pipeline.shadows.finished(request.upstream_id, now)
        if self._flight is not None:
            self._end_flight()
        if pipeline.admission is not None:
            pipeline.admission.ended(request, self.pool, output_tokens)
        if pipeline.limits is not None and output_tokens:
            pipeline.limits.said(request.tenant, output_tokens)

    def _unanswered(self, ending: Ending, status: int) -> None:
        """It has ended otherwise than with a whole answer."""
        pipeline, request_id = self._pipeline, self.request.upstream_id
        if ending is Ending.CLIENT_GONE and not self._is_second:
            pipeline.fleet.safeguards.counted(CLIENT_GONE)
        self._worker.breaker.dropped(request_id)
        if status != 200 or not self._first_byte_at:
            pipeline.knowledge.cancel_predictions(request_id)
        if 400 <= status < FAILED_STATUS_MIN:
            pipeline.fleet.failed(self._worker, request_id, WORKER_REFUSAL)

    def _tell_of_hedging(self, hedging: Hedging, ending: Ending, answered: bool, now: float) -> None:
        if self._is_second:
            unheard = ending in (Ending.OVERTAKEN, Ending.CLIENT_GONE, Ending.REFUSED)
            hedging.outcomes[Outcome.LOST if unheard else Outcome.WON] += 1
        elif answered or ending is Ending.OVERTAKEN:
            # One that was overtaken would have taken longer: without it the quantile would sink and sink.
            began = answered and self.request.streams
            hedging.observe((self._first_byte_at if began else now) - self._started_at, self.request.streams)

    def _end_flight(self) -> None:
        """No word came of the pull."""
        flight, self._flight = self._flight, None
        if flight is not None and self._pipeline.transfers is not None:
            self._pipeline.transfers.abandoned(flight)

    def _sample(self) -> None:
        """Offer the prompt for a comparison token for token."""
        request = self.request
        question = request.question() if self.named.complete and len(request.data) <= SAMPLE_BYTES_MAX else None
        if question is not None:
            pool = self.pool
            told = self._pipeline.prompts.told_tokens(request, pool, question) if pool.renderer is None else None
            self._pipeline.fleet.sample(self._worker, pool, question, told)

    def _check(self, prompt_tokens: int, cached_tokens: int | None) -> None:
        """Hold the worker's own count beside what we said."""
        self._receipt.reported_prompt_tokens = prompt_tokens
        self._receipt.reported_cached_tokens = cached_tokens
        if self.request.prompts_count == 1 and self.named.complete:
            parity.observe(self._worker, self.named.token_count, prompt_tokens)
        if cached_tokens is not None:
            self._pipeline.metrics.hit(self._receipt, cached_tokens)

    def _testify(self, cached_tokens: int | None, now: float) -> None:
        """What the answer says of our beliefs about the worker's cache, for whoever weighs them."""
        receipt, worker, trust = self._receipt, self._worker, self._trust
        if receipt.decision.pull is not None or self._passages.tokens or worker.parity is _FAILED:
            return
        _, rank, matched, confirmed, _, evidence = receipt.candidate_fields[receipt.chosen]
        chain, block = self.named.chain, self.pool.block_size_tokens
        guessed = evidence is _HISTORY
        by_index = not guessed and trust.level is _BELIEVED and receipt.policy != "prefix-aware"
        if not by_index and self.match.depths and rank < len(worker.holders):
            # Whether the index would have been right is of interest all the same.
            tokens = self.named.token_count
            confirmed = self._pipeline.knowledge.confirmed_tokens(self.match, worker, rank, tokens, block)
        if matched or confirmed or cached_tokens:
            trust.note(Answer(self._started_at, confirmed, matched, guessed, cached_tokens))
        if trust.curious and rank < len(worker.holders):
            cached, slack = cached_tokens or 0, trust.slack_tokens
            held = confirmed if cached_tokens is None else max(confirmed, cached + slack)
            if held < len(chain) // HASH_BYTES * block:
                trust.sample(worker.holders[rank], chain, self._started_at, now, cached <= confirmed + slack)
