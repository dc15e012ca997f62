"""One engine step: plan, compute, draw, report. Synchronous and single-threaded; `engine` puts it on a thread."""

import secrets
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from workers.engine import EngineMetrics, Sampling, StepOutput, TokenLogprob
from workers.reference.kv_pool import KvPool
from workers.reference.model import KvTensors, LlamaModel, Segment
from workers.reference.sampling import logprobs_of, sample
from workers.reference.scheduler import Chunk, LiveSequence, Scheduler


class Report(NamedTuple):
    """What a step brought for one generation."""

    request_id: str
    output: StepOutput


class EngineCore:
    """The model, its KV pool and the generations under way."""

    def __init__(
        self, model: LlamaModel, scheduler: Scheduler, metrics: EngineMetrics, end_token_ids: Sequence[int]
    ) -> None:
        pool = scheduler.pool
        self.model = model
        self.kv = KvTensors(model.config, pool.blocks_total, pool.block_size_tokens, model.dtype, model.device)
        self.scheduler = scheduler
        self.metrics = metrics
        self._end_token_ids = frozenset(end_token_ids)
        self._live: dict[str, LiveSequence] = {}
        self._generators: dict[str, torch.Generator] = {}
        self._arrivals = 0

    @property
    def pool(self) -> KvPool:
        return self.scheduler.pool

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work

    def add(self, sequence: LiveSequence) -> None:
        sequence.arrival = self._arrivals
        self._arrivals += 1
        request_id, seed = sequence.generation.request_id, sequence.generation.sampling.seed
        self._live[request_id] = sequence
        generator = torch.Generator()
        generator.manual_seed(secrets.randbits(63) if seed is None else seed % 2**63)
        self._generators[request_id] = generator
        self.scheduler.add(sequence)
        self._measure()

    def abort(self, request_id: str) -> None:
        """Its client has left. Unknown ids are ignored: it may have ended by itself just now."""
        if request_id in self._live:
            self._end(self._live[request_id], "abort")
            self._measure()

    def abort_all(self) -> list[str]:
        """End everything under way; returns the request ids."""
        request_ids = list(self._live)
        for request_id in request_ids:
            self.abort(request_id)
        return request_ids

    def step(self) -> list[Report]:
        """Compute one step. An empty list means that it computed parts of prompts only."""
        chunks = self.scheduler.plan()
        if not chunks:
            return []
        logits = self.model.forward([_segment(chunk) for chunk in chunks], self.kv)
        for chunk in chunks:
            self.scheduler.complete(chunk)
        reports = self._draw(chunks, logits)
        self._measure()
        return reports

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
        return [
            self._report(sequence, token_id, _logprobs(sampling, row, token_id))
            for sequence, sampling, token_id, row in zip(drawing, samplings, token_ids, logits, strict=True)
        ]

    def _report(self, sequence: LiveSequence, token_id: int, logprobs: Sequence[TokenLogprob]) -> Report:
        sampling = sequence.generation.sampling
        output = StepOutput(cached_tokens=sequence.cached_tokens or 0)
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
        finished = self.metrics.requests_finished
        finished[reason] = finished.get(reason, 0) + 1

    def _measure(self) -> None:
        self.metrics.requests_running = len(self.scheduler.running)
        self.metrics.requests_waiting = len(self.scheduler.waiting)
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
