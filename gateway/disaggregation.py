"""Requests of two legs: a prefill worker computes the prompt, a decode worker pulls its KV and answers.

    decision ─► Disaggregation.weigh ─► one leg: the decision stands
                                    └─► two: the same body for one token ─► prefill worker ─► answered, and dropped
                                             the decision anew ─► the client's body with a plan to pull ─► decode worker

What a leg is worth is `policies.disaggregation`. The second leg's worker is decided when the first has ended, by what
is known then: a burst is not sent to the worker that was best before it. Whatever goes wrong with the first leg, the
second is sent without a plan, and computes. A client that leaves ends the leg that is under way.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from random import Random
from typing import Any, NamedTuple

from cachecore.blocks import HASH_BYTES
from cachecore.index.contract import Match
from cachecore.prompts.contract import NamedPrompt
from gateway.edge.errand import Errand, ErrandFailed
from gateway.fleet import parity
from gateway.fleet.evidence import Answer
from gateway.fleet.knowledge import Knowledge
from gateway.fleet.registry import WORKERS_MAX, Fleet
from gateway.fleet.trust import TrustLevel
from gateway.fleet.worker import ModelPool, Parity, WorkerRecord
from gateway.reliability.failures import PLAN_FAILED, of_status
from gateway.requests import Request
from gateway.transfers import Promise, Transfers
from gateway.usage import Usage, read_usage
from gateway.views.disaggregation import DisaggregationMetrics
from policies.contract import Receipt, WorkerView
from policies.disaggregation import Offer, Whole, divide, need_of
from policies.legs import Legs, Outcome
from policies.state.inflight import PrefillSample
from policies.state.sources import SourceAccounts
from policies.transfer import DeadlineBounds, LinkEstimate, Supply, arrival, promised_pull

logger = logging.getLogger("ropeway.disaggregation")

_TWO_LEGS = Outcome.TWO_LEGS
_BUSY_STATUSES = (429, 503)
_PROMPTS = "prompts"
"""What prefill workers that disappointed are left alone with."""


TRIALS = 8
"""First legs that a prefill worker is tried with before it is weighed: an estimate comes to be right in a few steps."""
TRIED_AGAIN_SECONDS = 300.0

FirstLeg = Callable[[WorkerRecord, int, str], list[bytes]]
"""What a prefill worker is sent, as which of its ranks, under which id."""


class Prompted(NamedTuple):
    """A request whose prompt is known."""

    request: Request
    pool: ModelPool
    named: NamedPrompt
    match: Match


class Disaggregation:
    """The divided requests of one gateway."""

    def __init__(
        self,
        bounds: DeadlineBounds,
        connect_seconds: float,
        fleet: Fleet,
        knowledge: Knowledge,
        transfers: Transfers | None,
        clock: Callable[[], float] = time.monotonic,
        random: Random | None = None,
    ) -> None:
        self.bounds = bounds
        self.connect_seconds = connect_seconds
        self.fleet = fleet
        self.knowledge = knowledge
        self.transfers = transfers
        self.clock = clock
        self.metrics = DisaggregationMetrics()
        self.accounts = SourceAccounts()
        """Prefill workers that disappointed."""
        self._measured_at: dict[str, float] = {}
        """When last, by worker; of as many as a fleet can have."""
        self._random = random or Random()

    def document(self) -> dict[str, Any] | None:
        """For `/status`; None where there is no prefill worker."""
        workers = [record.name for record in self.fleet.workers.values() if record.role == "prefill"]
        if not workers:
            return None
        return {
            "prefill_workers": workers,
            "requests": {outcome.value: count for outcome, count in self.metrics.outcomes.items()},
            "paused": self.accounts.document(self.clock()),
        }

    def weigh(self, prompted: Prompted, receipt: Receipt, now: float) -> "Division | None":
        """Whether a decided request had best have two legs; None where there is no prompt to divide."""
        request, pool, named, match = prompted
        if not named.chain or request.skips_cache or request.prompts_count != 1 or request.foreign:
            return None
        known = self.fleet.prefill_candidates(pool, request.adapter)
        candidates = [record for record in known if not self.accounts.paused(record.name, _PROMPTS, now)]
        tokens = named.token_count
        prefills = None
        if candidates:
            prefills = self.knowledge.snapshot(pool, candidates, match, named.chain, tokens, now, False)
        decision = receipt.decision
        target = self.fleet.workers[decision.worker.name]
        whole = Whole(decision.worker, decision.pull, target.role == "decode")
        offer = self._offers(self.promise(prompted, target, decision.worker.rank), now)
        trials = [record.name for record in candidates if self._to_be_tried(record, now)]
        legs = receipt.legs = divide(receipt.query, whole, prefills, offer, self.bounds, self._random, trials)
        return Division(self, prompted, legs, self.fleet.workers.get(legs.worker))

    def _to_be_tried(self, record: WorkerRecord, now: float) -> bool:
        """Whether too little is known of how fast a prefill worker is, or it was long ago."""
        models = [self.knowledge.estimates.prefill((holder.name, holder.rank)) for holder in record.holders]
        seen = max((model.calibration.observations for model in models), default=0)
        return seen < TRIALS or now - self._measured_at.get(record.name, now) > TRIED_AGAIN_SECONDS

    def measured(self, sample: PrefillSample, now: float) -> None:
        """A first leg has shown how fast a prefill worker is."""
        self.knowledge.estimates.observe_prefill(sample)
        if len(self._measured_at) >= WORKERS_MAX:
            self._measured_at.clear()
        self._measured_at[sample.worker] = now

    def promise(self, prompted: Prompted, target: WorkerRecord, rank: int) -> Promise:
        """All that a prefill worker can give of a prompt that it has computed."""
        request, pool, named, _ = prompted
        # A full hit still computes its last token, and engines give up that token's whole block.
        cap = max(named.token_count - 1, 0) // pool.block_size_tokens
        return Promise(request, pool, target, rank, min(len(named.chain) // HASH_BYTES, cap))

    def _offers(self, promise: Promise, now: float) -> Offer:
        transfers, workers = self.transfers, self.fleet.workers

        def offer(view: WorkerView) -> tuple[Supply, LinkEstimate] | None:
            return transfers.promised(promise, workers[view.name], view.rank, now) if transfers is not None else None

        return offer


class Division:
    """One request's two legs, or why there is only one."""

    __slots__ = ("_decode_at", "_disaggregation", "_epoch", "_prompted", "legs", "source")

    def __init__(
        self, disaggregation: Disaggregation, prompted: Prompted, legs: Legs, source: WorkerRecord | None
    ) -> None:
        self._disaggregation = disaggregation
        self._prompted = prompted
        self.legs = legs
        self.source = source
        self._epoch = source.epoch if source is not None else 0
        self._decode_at = 0.0

    @property
    def leg_id(self) -> str:
        """Of the first leg, as the request's own is of the second."""
        return f"{self._prompted.request.upstream_id}-prefill"

    @property
    def promises(self) -> bool:
        """Whether a prefill worker has, or will have, the KV of the prompt."""
        return self.legs.outcome is _TWO_LEGS

    @property
    def header(self) -> bytes:
        """For the answer."""
        legs = self.legs
        worker = f"; worker={legs.worker}; seconds={legs.seconds:.6f}" if legs.seconds is not None else ""
        return f"x-ropeway-legs: outcome={legs.outcome}{worker}\r\n".encode()

    # The first leg

    async def run(self, request: FirstLeg) -> bool:
        """Have the prompt computed, if it is to be; whether it was. Afterwards `legs` says what became of it."""
        try:
            if self.source is None or not self.promises:
                return False
            await self._compute(self.source, request(self.source, self.legs.rank, self.leg_id))
            return True
        finally:
            self._disaggregation.metrics.outcomes[self.legs.outcome] += 1

    async def _compute(self, source: WorkerRecord, parts: list[bytes]) -> None:
        """Counted from here to its end, however it ends."""
        disaggregation, legs = self._disaggregation, self.legs
        began = disaggregation.clock()
        self._begin(source, began)
        legs.outcome = Outcome.CLIENT_GONE  # until it is known better
        errand = Errand(source.connections, parts)
        try:
            async with asyncio.timeout(legs.deadline_seconds):
                head = await errand.run(disaggregation.connect_seconds)
        except TimeoutError:
            legs.outcome, legs.problem = Outcome.DEADLINE, "did not answer in time"
        except ErrandFailed as error:
            legs.outcome, legs.problem = Outcome.UNREACHABLE, f"{error}"
            disaggregation.fleet.failed(source, self.leg_id, error.failure)
        else:
            legs.outcome = _TWO_LEGS if head.status == 200 else Outcome.REFUSED
            legs.problem = "" if head.status == 200 else f"answered {head.status}"
            self._judge(source, head.status)
            failure = of_status(head.status)
            if failure is not None:
                disaggregation.fleet.failed(source, self.leg_id, failure)
        finally:
            legs.seconds = disaggregation.clock() - began
            self._end(source, began + legs.seconds)
        if self.promises:
            self._testify(source, read_usage(errand.tail), began, began + legs.seconds)
        else:
            disaggregation.fleet.safeguards.counted(PLAN_FAILED)
            logger.info("request %s: %s", self._prompted.request.id, legs)

    def _begin(self, source: WorkerRecord, now: float) -> None:
        named = self._prompted.named
        knowledge, legs = self._disaggregation.knowledge, self.legs
        key = (source.name, legs.rank)
        # Its one token comes with the end of its prefill, whatever the answer's form: it is seen, and teaches.
        knowledge.accounting.dispatch(
            self.leg_id, *key, now, named.token_count, legs.prefill_seconds, 1, legs.prior_seconds
        )
        if source.parity is not Parity.FAILED:
            if source.trust.level is TrustLevel.EXACT:
                knowledge.predictions.predict(self.leg_id, key, named.chain, now)
            else:
                knowledge.history.record(key, named.chain)
        source.requests += 1
        source.breaker.sent(self.leg_id, now)

    def _end(self, source: WorkerRecord, now: float) -> None:
        disaggregation, legs = self._disaggregation, self.legs
        knowledge = disaggregation.knowledge
        answered = legs.outcome is _TWO_LEGS
        if answered:
            source.breaker.succeeded(self.leg_id, now)
            sample = knowledge.accounting.first_token(self.leg_id, now)
            if sample is not None:
                disaggregation.measured(sample, now)
            disaggregation.accounts.delivered(source.name, _PROMPTS)
            disaggregation.metrics.prefill_seconds.observe(legs.seconds or 0.0)
        else:
            source.breaker.dropped(self.leg_id)
            knowledge.cancel_predictions(self.leg_id)
        if legs.outcome is Outcome.DEADLINE:
            disaggregation.accounts.failed(source.name, _PROMPTS, "deadline", now)
            self._learn_at_least(now, (legs.seconds or 0.0) - (legs.predicted_seconds - legs.prefill_seconds))
        knowledge.accounting.finish(self.leg_id, now, answered=answered)

    def _testify(self, source: WorkerRecord, usage: Usage | None, began: float, now: float) -> None:
        """What the answer says of our beliefs about the prefill worker, as clients' answers do of their workers."""
        _, pool, named, match = self._prompted
        trust, rank, expected = source.trust, self.legs.rank, self.legs.matched_tokens
        if usage is not None and named.complete:
            parity.observe(source, named.token_count, usage.prompt_tokens)
        if source.parity is Parity.FAILED or source.epoch != self._epoch or rank >= len(source.holders):
            return
        block, holder = pool.block_size_tokens, source.holders[rank]
        confirmed = self._disaggregation.knowledge.confirmed_tokens(match, source, rank, named.token_count, block)
        cached = usage.cached_tokens if usage is not None else None
        if expected or confirmed or cached:
            guessed = trust.level is not TrustLevel.EXACT
            trust.note(Answer(began, confirmed, expected, guessed, cached))
        held = max(confirmed, cached or 0)
        if trust.curious and held + block < len(named.chain) // HASH_BYTES * block:
            trust.sample(holder, named.chain, began, now, held <= confirmed + trust.slack_tokens)

    def _learn_at_least(self, now: float, seconds: float) -> None:
        """The prefill took longer than this."""
        legs = self.legs
        if seconds > legs.prefill_seconds:
            sample = PrefillSample(legs.worker, legs.rank, 1, legs.prior_seconds, seconds)
            self._disaggregation.measured(sample, now)

    def _judge(self, source: WorkerRecord, status: int) -> None:
        """What a worker cannot do now it is not asked again at once. Of a client's mistakes it knows nothing."""
        reason = "busy" if status in _BUSY_STATUSES else "internal" if status >= 500 else ""
        if reason:
            disaggregation = self._disaggregation
            disaggregation.accounts.failed(source.name, _PROMPTS, reason, disaggregation.clock())

    # The second

    def settle(self, receipt: Receipt, now: float) -> None:
        """The worker that answers has been decided: it pulls what the first leg has computed."""
        self._decode_at, receipt.legs = now, self.legs
        source, transfers = self.source, self._disaggregation.transfers
        if not self.promises or source is None or transfers is None or source.epoch != self._epoch:
            return
        view = receipt.decision.worker
        target = self._disaggregation.fleet.workers[view.name]
        promise = self._disaggregation.promise(self._prompted, target, view.rank)
        offered = transfers.promised(promise, source, self.legs.rank, now)
        if offered is None or offered[0].tokens <= view.matched_tokens:
            return
        need = need_of(receipt.query, view, view.load.wait_seconds(now))
        expected, decision = arrival(need, *offered), receipt.decision
        decision.pull = promised_pull(need, offered[0], expected, transfers.settings.bounds)
        decision.predicted_ttft_ms = ((self.legs.seconds or 0.0) + expected.first_token_seconds) * 1e3
        decision.explanation = f"{view.matched_tokens:,} of {need.prompt_tokens:,} tokens cached; {decision.pull}"

    def first_token(self, now: float) -> None:
        seconds = self.legs.decode_seconds = now - self._decode_at
        if self.promises:
            self._disaggregation.metrics.decode_seconds.observe(seconds)
