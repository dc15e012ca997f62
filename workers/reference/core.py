"""One engine step: plan, compute, draw, report. Synchronous and single-threaded; `engine` puts it on a thread.

Bookkeeping happens under `lock`, computing does not: whoever sends KV to a peer takes and gives back references to
blocks meanwhile.

A sequence whose KV is on its way is computed ahead, layer by layer as it comes: its own tokens go through layer l once
layer l of all before them is in place. Such a pass pauses wherever it has caught up, and the others' steps go on.
"""

import secrets
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from cachecore.blocks import PrefixHash
from cachecore.events import KvEvent
from cachecore.kv.layout import slots_of
from cachecore.scope import Fidelity
from workers.engine import EngineMetrics, Sampling, StepOutput, TokenLogprob
from workers.kv_quality import Approximation
from workers.reference.fusing import Found, Kv, Repair
from workers.reference.guard import Guard
from workers.reference.kv_pool import KvPool
from workers.reference.model import Forward, KvTensors, LlamaModel, Segment
from workers.reference.sampling import logprobs_of, sample
from workers.reference.scheduler import Chunk, LiveSequence, Scheduler
from workers.transfer.loads import Load
from workers.transfer.passages import PassageLoad
from workers.transfer.runs import HeldRun


class Report(NamedTuple):
    """What a step brought for one generation."""

    request_id: str
    output: StepOutput


class Chore(Protocol):
    """What an engine does when nothing else is to be done, a piece of a step's length at a time."""

    @property
    def has_work(self) -> bool: ...

    def step(self) -> None:
        """Never raises."""
        ...


class _Ahead(NamedTuple):
    """A pass that follows a load through the layers."""

    forward: Forward
    chunks: Sequence[Chunk]


class EngineCore:
    """The model, its KV pool and the generations under way."""

    def __init__(
        self,
        model: LlamaModel,
        scheduler: Scheduler,
        metrics: EngineMetrics,
        end_token_ids: Sequence[int],
        nudge: Callable[[], None],
        ahead_steps: int = 0,
    ) -> None:
        """`nudge` is called, on any thread, when blocks have become free that an idle step may have wanted.
        `ahead_steps` is how many steps' tokens of a prompt may follow its load through the layers."""
        pool = scheduler.pool
        self.model = model
        self.kv = KvTensors(model.config, pool.blocks_total, pool.block_size_tokens, model.dtype, model.device)
        self.scheduler = scheduler
        self.metrics = metrics
        self.repair = Repair()
        """What becomes of passages."""
        self.guard: Guard | None = None
        """Sees how answers begin that are not from exact KV."""
        self.chores: list[Chore] = []
        """What to do when there is nothing else: the first that has work does a piece of it."""
        self._nudge = nudge
        self._reach = ahead_steps * scheduler.batched_tokens_max
        self._end_token_ids = frozenset(end_token_ids)
        self.lock = threading.Lock()
        self.idle = False
        """The last step had nothing to compute: nothing changes before something comes from outside."""
        self._ahead: dict[Load, _Ahead] = {}
        self._live: dict[str, LiveSequence] = {}
        self._generators: dict[str, torch.Generator] = {}
        self._arrivals = 0

    @property
    def pool(self) -> KvPool:
        return self.scheduler.pool

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work

    @property
    def has_chores(self) -> bool:
        return not self.has_work and any(chore.has_work for chore in self.chores)

    def add(self, sequence: LiveSequence) -> None:
        with self.lock:
            self._add(sequence)
        self._measure()

    def abort(self, request_id: str) -> None:
        """Its client has left. Unknown ids are ignored: it may have ended by itself just now."""
        with self.lock:
            if request_id in self._live:
                self._end(self._live[request_id], "abort")
        self._measure()

    def abort_all(self) -> list[str]:
        """End everything under way; returns the request ids."""
        request_ids = list(self._live)
        for request_id in request_ids:
            self.abort(request_id)
        return request_ids

    def clear(self) -> None:
        """Forget every cached prefix."""
        with self.lock:
            self.pool.clear()

    def handles(self) -> Sequence[int]:
        """Every block that a prefix can hit, as events call it."""
        return self.pool.handles()

    def take_events(self) -> list[KvEvent]:
        with self.lock:
            return self.pool.take_events()

    def _add(self, sequence: LiveSequence) -> None:
        sequence.arrival = self._arrivals
        self._arrivals += 1
        request_id, seed = sequence.generation.request_id, sequence.generation.sampling.seed
        self._live[request_id] = sequence
        generator = torch.Generator()
        generator.manual_seed(secrets.randbits(63) if seed is None else seed % 2**63)
        self._generators[request_id] = generator
        self.scheduler.add(sequence)

    @contextmanager
    def lend(self, tail: PrefixHash, blocks: int, worst: Fidelity) -> Iterator[HeldRun | None]:
        """As `transfer.source.Lender`."""
        with self.lock:
            run = self.pool.find(tail, blocks, worst)
            if run is not None:
                self.pool.acquire(run.blocks)
        try:
            yield run
        finally:
            if run is not None:
                with self.lock:
                    self.pool.release(run.blocks)
                self._nudge()

    def vouch(self, run: HeldRun) -> None:
        """As `transfer.source.Lender`: what is referenced stays as it is."""

    def step(self) -> list[Report]:
        """Compute one step. An empty list means that it computed parts of prompts only, or nothing."""
        with self.lock:
            chunks = self.scheduler.plan()
        reports = self._compute(chunks) if chunks else []
        moved, more = self._follow_loads(sum(chunk.end - chunk.start for chunk in chunks))
        self.idle = not chunks and not moved
        if self.has_chores:
            next(chore for chore in self.chores if chore.has_work).step()
        self._measure()
        return reports + more

    def _compute(self, chunks: Sequence[Chunk]) -> list[Report]:
        logits = self.model.forward([_segment(chunk) for chunk in chunks], self.kv)
        return self._complete(chunks, logits)

    def _complete(self, chunks: Sequence[Chunk], logits: Tensor) -> list[Report]:
        with self.lock:
            for chunk in chunks:
                self.scheduler.complete(chunk)
        return self._draw(chunks, logits)

    # ---- loads -------------------------------------------------------------------------------------------------------

    def _follow_loads(self, spent_tokens: int) -> tuple[bool, list[Report]]:
        """Compute what loads have made possible, within what is left of the step; whether anything was."""
        moved, reports = False, []
        allowance = (self.scheduler.batched_tokens_max - spent_tokens) * self.model.layers
        for sequence in list(self.scheduler.loading):
            load = sequence.load
            if load is None:
                continue
            ahead = self._ahead.get(load)
            if load.failed or (ahead is None and load.settled):
                settled = self._settle(sequence, load)
                moved |= settled
                if settled and load.passages:
                    reports += self._repair(sequence, load.passages)
            elif load.layers and self._reach:
                ahead = ahead or self._begin_ahead(sequence, load)
                computed = self._advance(ahead, load.layers, allowance)
                allowance -= computed * ahead.forward.tokens
                moved |= computed > 0
                if load.settled and ahead.forward.layer == self.model.layers:
                    moved |= self._settle(sequence, load)
                    reports += self._complete(ahead.chunks, self.model.finish(ahead.forward))
        self._ahead = {load: ahead for load, ahead in self._ahead.items() if not load.cancelled}
        return moved, reports

    def _begin_ahead(self, sequence: LiveSequence, load: Load) -> _Ahead:
        size, reach = self.pool.block_size_tokens, self._reach
        chunks = []
        for start, end in load.gaps(sequence.committed, len(sequence.token_ids), size):
            chunks.append(Chunk(sequence, start, min(end, start + reach)))
            reach -= chunks[-1].end - start
            if chunks[-1].end < end or not reach:
                break
        forward = self.model.begin([_segment(chunk) for chunk in chunks], self.kv)
        ahead = self._ahead[load] = _Ahead(forward, chunks)
        return ahead

    def _advance(self, ahead: _Ahead, layers: int, allowance: int) -> int:
        """Go on by a layer at least, where one is in place; by how many."""
        forward = ahead.forward
        before = forward.layer
        self.model.advance(forward, min(layers, before + max(1, allowance // forward.tokens)))
        return forward.layer - before

    def _settle(self, sequence: LiveSequence, load: Load) -> bool:
        """Let a sequence go on whose load is over."""
        if not load.settled:
            return False
        self._ahead.pop(load, None)
        with self.lock:
            self.scheduler.settle(sequence)
        return True

    # ---- passages ----------------------------------------------------------------------------------------------------

    def _repair(self, sequence: LiveSequence, passages: Sequence[PassageLoad]) -> list[Report]:
        """Make a running sequence's own of what passages have come, and of all before and behind them."""
        start = sequence.computed
        try:
            found = [self._found(passage) for passage in passages if passage.is_good and passage.start >= start]
            if not found:
                return []
            prefix = self._read(sequence.blocks, 0, start)
            repaired = self._repair_of(sequence)(self.model, sequence.token_ids, prefix, found)
        finally:
            with self.lock:
                self.scheduler.give_up(passages)
        end = start + repaired.kv.keys.shape[1]
        slots = slots_of(sequence.blocks, self.pool.block_size_tokens, start, end).to(self.model.device)
        for layer in range(self.model.layers):
            self.kv.write(layer, slots, repaired.kv.keys[layer], repaired.kv.values[layer])
        with self.lock:
            self.scheduler.repaired(sequence, end)
        if repaired.logits is None:
            return []
        return self._draw([Chunk(sequence, end - 1, end)], repaired.logits)

    def _found(self, passage: PassageLoad) -> Found:
        start, alone, device = passage.start, passage.is_alone, self.model.device
        if passage.borrowed:
            kv = self._read(passage.borrowed, passage.skipped, passage.skipped + passage.end - start)
            passage.improve(*kv)
            return Found(start, kv, passage.position, alone)
        assert passage.keys is not None and passage.values is not None  # noqa: S101, PT018 - it has been fetched
        passage.improve(passage.keys, passage.values)
        return Found(start, Kv(passage.keys.to(device), passage.values.to(device)), start, alone)

    def _repair_of(self, sequence: LiveSequence) -> Repair:
        fraction = sequence.recompute_fraction
        return self.repair if fraction is None else replace(self.repair, fraction=fraction)

    def _read(self, blocks: Sequence[int], start: int, end: int) -> Kv:
        """A copy of tokens `start` to `end` of a block table."""
        slots = slots_of(blocks, self.pool.block_size_tokens, start, end).to(self.model.device)
        return Kv(*(pool.flatten(1, 2).index_select(1, slots) for pool in (self.kv.keys, self.kv.values)))

    def _draw(self, chunks: Sequence[Chunk], logits: Tensor) -> list[Report]:
        rows, drawing, last = [], [], -1
        for chunk in chunks:
            first = last + 1
            last += chunk.end - chunk.start if chunk.sequence.wants_prompt_logprobs else 1
            if chunk.sequence.wants_prompt_logprobs:
                _collect_prompt_logprobs(chunk, logits[first : last + 1])
            if chunk.completes:
                rows.append(last)
                drawing.append(chunk.sequence)
        if not drawing:
            return []
        logits = logits[rows]
        samplings = [sequence.generation.sampling for sequence in drawing]
        generators = [self._generators[sequence.generation.request_id] for sequence in drawing]
        token_ids = sample(logits, samplings, generators)
        if self.guard is not None:
            for sequence, token_id, row in zip(drawing, token_ids, logits, strict=True):
                self._show(self.guard, sequence, token_id, row)
        logprobs = [_logprobs(*drawn) for drawn in zip(samplings, logits, token_ids, strict=True)]
        with self.lock:
            return [self._report(*drawn) for drawn in zip(drawing, token_ids, logprobs, strict=True)]

    def _show(self, guard: Guard, sequence: LiveSequence, token_id: int, logits: Tensor) -> None:
        request_id, log = sequence.generation.request_id, sequence.pull_log
        if not sequence.started and sequence.fidelity is not Fidelity.EXACT and log is not None and log.has_fetched:
            # Found in the cache, nobody remembers what it came in: only who fetched it is considered.
            fused = sequence.fidelity is Fidelity.FUSED
            fraction = self._repair_of(sequence).fraction if fused else 0.0
            tenant = sequence.naming.scope.key_id.tenant
            used = Approximation(tenant, log.codec, sequence.fidelity, fraction)
            guard.consider(request_id, sequence.generation.token_ids, used)
        guard.observe(request_id, token_id, logits)

    def _report(self, sequence: LiveSequence, token_id: int, logprobs: Sequence[TokenLogprob]) -> Report:
        sampling = sequence.generation.sampling
        if not sequence.started:
            sequence.prompt_fidelity = sequence.fidelity
        output = StepOutput(cached_tokens=sequence.cached_tokens or 0, fidelity=sequence.prompt_fidelity)
        if not sequence.started and sequence.pull_log is not None:
            output.transfer = sequence.pull_log.report()
        if sequence.wants_prompt_logprobs:
            output.prompt_logprobs = list(sequence.prompt_logprobs)
        if not sequence.started:
            sequence.started = True
            self.metrics.prompt_tokens += sequence.prompt_count
        if sampling.max_tokens > 0:
            sequence.token_ids.append(token_id)
            self.metrics.generation_tokens += 1
            output.token_ids, output.logprobs = (token_id,), logprobs
        output.finish_reason = self._finish_reason(sequence)
        if output.finish_reason:
            self._end(sequence, output.finish_reason)
        return Report(sequence.generation.request_id, output)

    def _finish_reason(self, sequence: LiveSequence) -> str | None:
        sampling = sequence.generation.sampling
        if sequence.output_count:
            token_id = sequence.token_ids[-1]
            if token_id in sampling.stop_token_ids:
                return "stop"
            if token_id in self._end_token_ids and not sampling.ignore_eos:
                return "stop"
        return "length" if sequence.output_count >= sampling.max_tokens else None

    def _end(self, sequence: LiveSequence, reason: str) -> None:
        self.scheduler.finish(sequence)
        del self._live[sequence.generation.request_id]
        del self._generators[sequence.generation.request_id]
        if self.guard is not None:
            self.guard.close(sequence.generation.request_id)
        finished = self.metrics.requests_finished
        finished[reason] = finished.get(reason, 0) + 1

    def _measure(self) -> None:
        self.metrics.requests_running = len(self.scheduler.running)
        self.metrics.requests_waiting = len(self.scheduler.waiting) + len(self.scheduler.loading)
        if self.metrics.transfer is not None:
            self.metrics.transfer.loading = len(self.scheduler.loading)
        self.metrics.kv_cache_usage = self.pool.usage
        self.metrics.preemptions = self.scheduler.preemptions
        self.metrics.prefix_cache_queries = self.scheduler.cache_queries
        self.metrics.prefix_cache_hits = self.scheduler.cache_hits


def _segment(chunk: Chunk) -> Segment:
    sequence = chunk.sequence
    return Segment(
        sequence.token_ids[chunk.start : chunk.end], chunk.start, sequence.blocks, sequence.wants_prompt_logprobs
    )


def _logprobs(sampling: Sampling, row: Tensor, token_id: int) -> list[TokenLogprob]:
    return [] if sampling.logprobs is None else logprobs_of(row.unsqueeze(0), [token_id], sampling.logprobs)


def _collect_prompt_logprobs(chunk: Chunk, logits: Tensor) -> None:
    """Row i of `logits` predicts token start + i + 1; the last row of a prompt predicts no prompt token."""
    sequence = chunk.sequence
    if not chunk.start:
        sequence.prompt_logprobs.append(None)
    following = sequence.token_ids[chunk.start + 1 : chunk.end + 1]
    if following:
        alternatives = sequence.generation.sampling.prompt_logprobs or 0
        sequence.prompt_logprobs += logprobs_of(logits[: len(following)], following, alternatives)
