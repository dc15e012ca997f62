"""A fleet of engines behind one router in virtual time: the event loop of a replay.

Whatever happens at one moment happens in this order: steps end, KV and KV events arrive, requests come, steps begin.
So requests that come at once share a step, as they do in an engine whose step is longer than the moment.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from heapq import heappop, heappush
from math import inf
from typing import Any, NamedTuple

from loadtest.audit.engine import Engine, Job, Journal
from loadtest.audit.link import Network, Transfer
from loadtest.audit.prepared import Arrivals, PreparedTrace
from loadtest.audit.router import Held, Router
from policies.transfer import PullOption

NOT_PLACED = -1


@dataclass(slots=True)
class Outcomes:
    """What became of every request, by its number; seconds. Infinite: it never came to that."""

    arrived_at: list[float]
    ttft: list[float]
    duration: list[float]
    """From arrival to the last token."""
    worker: list[int]
    cached_tokens: list[int]
    predicted_ttft: list[float | None]
    regret_tokens: list[int]
    """That some other worker had, and the chosen one not."""
    pulled_tokens: list[int]
    rejected: list[int] = field(default_factory=list)
    holds: int = 0
    """Times that a request was made to wait for others' prefill."""
    pulls: int = 0
    failed_pulls: dict[str, int] = field(default_factory=dict)
    moved_bytes: int = 0
    ended_at: float = 0.0
    busy_seconds: list[float] = field(default_factory=list)
    """By engine."""

    @classmethod
    def of(cls, requests: int) -> "Outcomes":
        return cls(
            [inf] * requests,
            [inf] * requests,
            [inf] * requests,
            [NOT_PLACED] * requests,
            [0] * requests,
            [None] * requests,
            [0] * requests,
            [0] * requests,
        )


class _Kind(IntEnum):
    """Of what is on the agenda, in the order in which it happens at one moment."""

    HEARD = 0
    LOADED = 1
    LOAD = 2
    """After that: whoever waited for a run finds it."""
    FOLLOWS = 3
    AGAIN = 4
    """A request that was held is routed anew."""


class _Flight(NamedTuple):
    """A pull under way."""

    job: Job
    pull: PullOption
    source: int
    target: int
    end_block: int
    began: float
    transfer: Transfer | None = None


class _Report(NamedTuple):
    """What became of a pull: told with the first token."""

    flight: _Flight
    reason: str
    size_bytes: int
    seconds: float


class Fleet:
    """Runs one trace to its end, once."""

    def __init__(
        self,
        trace: PreparedTrace,
        arrivals: Arrivals,
        engines: Sequence[Engine],
        router: Router,
        network: Network | None = None,
        event_lag_seconds: float = 0.0,
    ) -> None:
        self.outcomes = Outcomes.of(len(trace.requests))
        self._requests = trace.requests
        self._followers = trace.followers
        self._arrivals = arrivals
        self._engines = engines
        self._router = router
        self._network = network
        self._lag_seconds = event_lag_seconds
        self._agenda: list[tuple[float, int, int, Any]] = []
        self._agenda_count = 0
        self._tokens_max = min(engine.tokens_max for engine in engines)
        self._ends: list[tuple[float, int]] = []
        self._expected = [inf] * len(engines)
        """What `ends` says of each engine that has something to do."""
        self._touched: set[int] = set()
        self._reports: dict[int, _Report] = {}
        self._arriving: dict[tuple[int, bytes], float] = {}
        self._placed = 0

    def run(self) -> Outcomes:
        open_loop, agenda, ends, engines = self._arrivals.open, self._agenda, self._ends, self._engines
        position, count, touched = 0, len(open_loop), self._touched
        while True:
            now = open_loop[position][0] if position < count else inf
            if agenda and agenda[0][0] < now:
                now = agenda[0][0]
            while ends and engines[ends[0][1]].ends_at != ends[0][0]:
                heappop(ends)  # a leap that was cut
            if ends and ends[0][0] < now:
                now = ends[0][0]
            if now == inf:
                break
            while ends and ends[0][0] <= now:
                ended, number = heappop(ends)
                if engines[number].ends_at == ended:
                    self._advance(number, now)
            while agenda and agenda[0][0] <= now:
                _, kind, _, what = heappop(agenda)
                self._happen(kind, what, now)
            while position < count and open_loop[position][0] <= now:
                self._arrive(open_loop[position][1], now)
                position += 1
            for number in touched:
                self._start(number, now)
            touched.clear()
        return self._close()

    # Engines

    def _advance(self, number: int, now: float) -> None:
        engine, outcomes, router = self._engines[number], self.outcomes, self._router
        first_tokens, finished = engine.advance()
        self._expected[number] = inf
        self._tell(number, now)
        for job in first_tokens:
            outcomes.ttft[job.number] = now - outcomes.arrived_at[job.number]
            outcomes.cached_tokens[job.number] = job.cached_tokens
            if self._reports:
                self._report(job.number, now)
            router.first_token(self._requests[job.number].request_id, now)
        for job in finished:
            outcomes.duration[job.number] = now - outcomes.arrived_at[job.number]
            router.finish(self._requests[job.number].request_id, job.output_tokens, now)
            self._release_followers(job.number, now)
            outcomes.ended_at = now
        self._touched.add(number)

    def _start(self, number: int, now: float) -> None:
        engine = self._engines[number]
        engine.start(now)
        if engine.ends_at != self._expected[number]:
            self._expected[number] = engine.ends_at
            heappush(self._ends, (engine.ends_at, number))

    def _tell(self, number: int, now: float) -> None:
        """A worker announces what changed in its cache."""
        journal = self._engines[number].take_journal()
        if journal is None:
            return
        if self._lag_seconds:
            self._schedule(now + self._lag_seconds, _Kind.HEARD, (number, journal))
        else:
            self._router.heard(number, journal, self._requests)

    # The agenda

    def _schedule(self, time: float, kind: _Kind, what: object) -> None:
        self._agenda_count += 1
        heappush(self._agenda, (time, kind, self._agenda_count, what))

    def _happen(self, kind: int, what: Any, now: float) -> None:
        if kind == _Kind.HEARD:
            number, journal = what
            assert isinstance(journal, Journal)  # noqa: S101
            self._router.heard(number, journal, self._requests)
        elif kind == _Kind.LOAD:
            self._load(what, now)
        elif kind == _Kind.LOADED:
            self._loaded(what, now)
        elif kind == _Kind.FOLLOWS:
            self._arrive(what, now)
        else:
            number, held_seconds = what
            self._route(number, held_seconds, now)

    # Requests

    def _arrive(self, number: int, now: float) -> None:
        request, outcomes = self._requests[number], self.outcomes
        outcomes.arrived_at[number] = now
        if request.prompt_tokens + request.output_tokens > self._tokens_max:
            self._reject(number, now)
            return
        self._route(number, 0.0, now)

    def _route(self, number: int, held_seconds: float, now: float) -> None:
        request, outcomes = self._requests[number], self.outcomes
        routed = self._router.route(request, now, held_seconds)
        if isinstance(routed, Held):
            outcomes.holds += 1
            self._schedule(now + routed.seconds, _Kind.AGAIN, (number, held_seconds + routed.seconds))
            return
        worker = outcomes.worker[number] = routed.worker
        outcomes.predicted_ttft[number] = routed.predicted_seconds
        outcomes.regret_tokens[number] = routed.best_matched_tokens - routed.matched_tokens
        self._placed += 1
        job = Job(number, request.names, request.prompt_tokens, request.output_tokens, self._placed, routed.priority)
        if routed.pull is None:
            self._engines[worker].submit(job, now)
            self._touched.add(worker)
        else:
            outcomes.pulls += 1
            source = self._router.number_of(routed.pull.source)
            end = routed.pull.end_token // self._engines[worker].shape.block_size_tokens
            self._load(_Flight(job, routed.pull, source, worker, end, now), now)

    def _reject(self, number: int, now: float) -> None:
        """What no engine can ever hold is refused; whoever waited for it comes all the same."""
        self.outcomes.rejected.append(number)
        self._release_followers(number, now)

    def _release_followers(self, number: int, now: float) -> None:
        for follower in self._followers.get(number, ()):
            after = now + self._requests[follower].delay_seconds
            self._schedule(max(after, self._arrivals.earliest[follower]), _Kind.FOLLOWS, follower)

    # Pulls

    def _load(self, flight: _Flight, now: float) -> None:
        """A worker sets out to pull; where the same run is on its way to it already, it waits for that one."""
        job, pull, target, end = flight.job, flight.pull, flight.target, flight.end_block
        tail = (target, job.names[end - 1])
        arrives = self._arriving.get(tail)
        if arrives is not None and arrives > now:
            self._schedule(arrives, _Kind.LOAD, flight)
            return
        block = self._engines[target].shape.block_size_tokens
        first = self._engines[target].cached_prefix(job.names)
        if first >= end:
            self._enter(flight, "held", now)
        elif first < pull.first_token // block or self._engines[flight.source].cached_prefix(job.names) < end:
            self._enter(flight, "stale", now)
        else:
            assert self._network is not None  # noqa: S101
            size = round((end - first) * block * self._router.settings.wire_bytes_per_token)
            transfer = self._network.transfer(flight.source, target, size, now, pull.deadline_seconds)
            self._arriving[tail] = transfer.arrives_at
            self._schedule(transfer.arrives_at, _Kind.LOADED, flight._replace(began=now, transfer=transfer))

    def _loaded(self, flight: _Flight, now: float) -> None:
        job, transfer = flight.job, flight.transfer
        assert transfer is not None  # noqa: S101
        self._arriving.pop((flight.target, job.names[flight.end_block - 1]), None)
        if not transfer.complete:
            self._enter(flight, "deadline", now)
            return
        blocks = self._engines[flight.target].take_in(job, flight.end_block)
        if blocks < 0:
            self._enter(flight, "unusable", now)
            return
        self._tell(flight.target, now)
        self.outcomes.pulled_tokens[job.number] = blocks * self._engines[flight.target].shape.block_size_tokens
        self._enter(flight, "", now)

    def _enter(self, flight: _Flight, reason: str, now: float) -> None:
        """The request goes on to its engine, whatever became of its pull."""
        size = flight.transfer.size_bytes if flight.transfer is not None else 0
        self._reports[flight.job.number] = _Report(flight, reason, size, now - flight.began)
        self._engines[flight.target].submit(flight.job, now)
        self._touched.add(flight.target)

    def _report(self, number: int, now: float) -> None:
        report = self._reports.pop(number, None)
        if report is None:
            return
        flight, reason, size, seconds = report
        request_id = self._requests[number].request_id
        if not reason:
            self._router.pulled(request_id, flight.pull, flight.target, size, seconds, now)
            return
        failed = self.outcomes.failed_pulls
        failed[reason] = failed.get(reason, 0) + 1
        self._router.pull_failed(request_id, flight.pull, flight.target, reason, now)

    def _close(self) -> Outcomes:
        outcomes = self.outcomes
        outcomes.busy_seconds = [engine.busy_seconds for engine in self._engines]
        outcomes.moved_bytes = self._network.moved_bytes if self._network is not None else 0
        return outcomes
