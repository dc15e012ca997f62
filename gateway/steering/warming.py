"""Warming a worker: the hottest prompts that it lacks are sent there again, for one token that nobody reads.

    hot prefixes ─► those the worker has not ─► the shortest prompt with each, one after the other ─► pulled where some
                                                other worker has it and that is quicker, else computed

A prompt goes under its own tenant's salt, to a worker that its tenant's requests go to anyway. One worker is warmed at
a time, within bounds; what is sent is counted as load, so that clients' requests go elsewhere meanwhile.
"""

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Callable
from typing import Annotated, Any, NamedTuple

import msgspec

from cachecore.blocks import Chain
from cachecore.index.contract import Match
from cachecore.prompts.contract import NamedPrompt, PromptError
from cachecore.scope import Fidelity
from gateway.edge.errand import Errand, ErrandFailed
from gateway.edge.http1 import ResponseHead
from gateway.errors import NotSupported, ServiceError, TooManyRequests, Unavailable
from gateway.fleet.trust import TrustLevel
from gateway.fleet.worker import ModelPool, Parity, WorkerRecord
from gateway.pipeline import Pipeline
from gateway.requests import Request, read_request
from gateway.steering.samples import HotPrefix, Samples, hottest
from gateway.transfers import Flight, Identity, Task
from policies.contract import Query, WorkerView
from policies.pricing import prefill_seconds

PREFIXES_LOOKED_AT = 256
BEHIND_SECONDS = 60.0
"""Where engines order by priority, clients' requests of the next minute come first."""


class Bounds(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How much a worker is warmed with."""

    prefixes_max: Annotated[int, msgspec.Meta(ge=1, le=64)] = 8
    seconds_max: Annotated[float, msgspec.Meta(gt=0, le=300)] = 60.0
    """What is under way then is broken off."""


class _Errand(NamedTuple):
    """A prompt on its way to a worker."""

    prefix: HotPrefix
    request: Request
    pool: ModelPool
    named: NamedPrompt
    match: Match
    view: WorkerView


class Warmer:
    """Warms the workers of one gateway."""

    def __init__(
        self,
        pipeline: Pipeline,
        samples: Samples | None,
        connect_seconds: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._pipeline = pipeline
        self._samples = samples
        self._connect_seconds = connect_seconds
        self._clock = clock
        self._turn = asyncio.Lock()
        self._numbers = itertools.count(1)

    async def prefixes(self, count: int) -> list[tuple[HotPrefix, dict[str, int]]]:
        """The hottest prefixes, and how many tokens of each which worker is known to hold."""
        return [(prefix, _held(await self._match(prefix.chain), prefix)) for prefix in await self._hottest(count)]

    async def warm(self, record: WorkerRecord, bounds: Bounds) -> list[dict[str, Any]]:
        """What became of each prefix that was sent. Raises ServiceError."""
        if self._samples is None:
            raise NotSupported("nothing is kept to warm with: samples.decisions_max is 0")
        if not record.healthy:
            raise Unavailable(f"the worker {record.name!r} is not well: {record.reason}")
        if self._turn.locked():
            raise TooManyRequests("a worker is being warmed already", retry_after_seconds=5)
        done: list[dict[str, Any]] = []
        async with self._turn:
            ends_at = self._clock() + bounds.seconds_max
            for prefix in await self._hottest(PREFIXES_LOOKED_AT):
                if len(done) >= bounds.prefixes_max or self._clock() >= ends_at:
                    break
                done += [outcome async for outcome in self._warm_ranks(prefix, record, ends_at)]
        return done

    async def _warm_ranks(
        self, prefix: HotPrefix, record: WorkerRecord, ends_at: float
    ) -> AsyncIterator[dict[str, Any]]:
        """Each rank of the worker that lacks the prefix."""
        for rank in range(len(record.holders)):
            errand = await self._errand(prefix, record, rank)
            if errand is not None and self._clock() < ends_at:
                yield await self._send(errand, record, ends_at)

    async def _hottest(self, count: int) -> list[HotPrefix]:
        prompts = self._samples.prompts if self._samples is not None else ()
        generations = {model: pool.generation for model, pool in self._pipeline.fleet.pools.items()}
        known = [prompt for prompt in prompts if generations.get(prompt.model) == prompt.generation]
        return await asyncio.to_thread(hottest, known, count)

    async def _match(self, chain: Chain) -> Match:
        matching = self._pipeline.knowledge.index.match(chain)
        return await self._pipeline.matched(matching)

    async def _errand(self, prefix: HotPrefix, record: WorkerRecord, rank: int) -> _Errand | None:
        """None where the worker has the prefix already, or cannot serve it."""
        example, pipeline = prefix.example, self._pipeline
        try:
            request = read_request(example.inbound, example.tenant, pipeline.fleet)
            pool, request.adapter = pipeline.fleet.pool(request.model)
            naming = pipeline.prompts.name(request, pool)
            named = naming if isinstance(naming, NamedPrompt) else await naming
        except (ServiceError, PromptError):
            return None
        able = record in pool.workers and (not request.adapter or request.adapter in record.models)
        if not able or named.chain[: len(prefix.chain)] != prefix.chain:
            return None
        match = await self._match(named.chain)
        block, tokens = pool.block_size_tokens, named.token_count
        # From here to `_send`'s first await nothing else writes into the view.
        views = pipeline.knowledge.snapshot(pool, [record], match, named.chain, tokens, self._clock(), False).workers
        view = next((view for view in views if view.rank == rank), None)
        wanted = min(prefix.tokens, record.hit_tokens_max(tokens, block))
        if view is None or view.matched_tokens + block > wanted:
            return None
        return _Errand(prefix, request, pool, named, match, view)

    async def _send(self, errand: _Errand, record: WorkerRecord, ends_at: float) -> dict[str, Any]:
        """Counted from here to its end, however it ends."""
        began = self._clock()
        request_id = f"warm-{errand.request.upstream_id}-{next(self._numbers)}"
        flight = self._plan(errand, record, request_id, began)
        self._begin(errand, record, request_id, flight, began)
        head, problem = None, ""
        try:
            async with asyncio.timeout(ends_at - began):
                sent = Errand(record.connections, self._message(errand, record, request_id, flight))
                head = await sent.run(self._connect_seconds)
        except TimeoutError:
            problem = "broken off: the time for warming is over"
        except ErrandFailed as error:
            problem = f"{error}"
        finally:
            outcome = self._end(request_id, head, flight)
        if head is not None and head.status != 200:
            problem = f"answered {head.status}"
        return {
            "prefix": errand.prefix.name,
            "rank": errand.view.rank,
            "tokens": errand.prefix.tokens,
            "seconds": self._clock() - began,
            "outcome": "failed" if problem else outcome,
            "problem": problem,
        }

    def _plan(self, errand: _Errand, record: WorkerRecord, request_id: str, now: float) -> Flight | None:
        """A pull, where some other worker can give what this one lacks sooner than it would compute it."""
        transfers, request, pool = self._pipeline.transfers, errand.request, errand.pool
        if transfers is None or record.transfer is None:
            return None
        chain, view = errand.named.chain, errand.view
        pulls = transfers.pulls(request, pool, chain, errand.match, errand.named.token_count, now)
        option = pulls.option(view, view.load.wait_seconds(now)) if pulls is not None else None
        if option is None:
            return None
        identity = Identity(*self._pipeline.prompts.identity(request, pool))
        accepted = transfers.accepted(request, pool, now)
        return transfers.plan(option, Task(request_id, record, identity, chain, pool.block_size_tokens, accepted), now)

    def _message(self, errand: _Errand, record: WorkerRecord, request_id: str, flight: Flight | None) -> list[bytes]:
        """The client's own request, for one token."""
        pipeline, request, pool = self._pipeline, errand.request, errand.pool
        plans = flight.body if flight is not None else None
        queue_key = time.time() + BEHIND_SECONDS
        further = dict(pipeline.outbound.changes(request, pool, errand.named, record, plans, queue_key) or {})
        headers, transfers = b"", pipeline.transfers
        if record.transfer is not None and transfers is not None:
            # What is computed is as bad as what it was computed after.
            accepted = transfers.accepted(request, pool, self._clock()) if flight is not None else Fidelity.EXACT
            headers = transfers.fidelity_header(accepted)
        if plans is not None:
            further.setdefault("kv_transfer_params", plans)
        salt = request.salt_json if record.traits.salts else None
        body = request.prefill_body(salt, request_id, further)
        if len(record.holders) > 1 and record.traits.rank_header:
            headers += b"%b: %d\r\n" % (record.traits.rank_header, errand.view.rank)
        opening = pipeline.outbound.opening(request, record)
        head = b"%b%b\r\n%bcontent-length: %d\r\n\r\n"
        return [head % (opening, request_id.encode(), headers, sum(map(len, body))), *body]

    def _begin(self, errand: _Errand, record: WorkerRecord, request_id: str, flight: Flight | None, now: float) -> None:
        knowledge, view, named = self._pipeline.knowledge, errand.view, errand.named
        seconds = prefill_seconds(Query(named.token_count), view)
        if flight is not None:
            seconds = flight.option.prefill_seconds
        knowledge.accounting.dispatch(request_id, view.name, view.rank, now, named.token_count, seconds, 1)
        if record.parity is not Parity.FAILED and record.trust.level is TrustLevel.EXACT:
            knowledge.predictions.predict(request_id, (view.name, view.rank), named.chain, now)
        record.requests += 1

    def _end(self, request_id: str, head: ResponseHead | None, flight: Flight | None) -> str:
        pipeline, now = self._pipeline, self._clock()
        answered = head is not None and head.status == 200
        pipeline.knowledge.accounting.finish(request_id, now)  # its one token teaches nothing of others' answers
        if not answered:
            pipeline.knowledge.cancel_predictions(request_id)
        if flight is None or pipeline.transfers is None:
            return "computed"
        if head is None:
            pipeline.transfers.abandoned(flight)
            return "failed"
        report = pipeline.transfers.answered(flight, head.headers, now)
        return "pulled" if report is not None and report.outcome == "fetched" else "computed"


def _held(match: Match, prefix: HotPrefix) -> dict[str, int]:
    held: dict[str, int] = {}
    for (holder, _, _), depth in match.depths.items():
        held[holder.name] = max(held.get(holder.name, 0), depth * prefix.example.block_size_tokens)
    return held
