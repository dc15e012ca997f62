"""An engine as `loadtest.audit.engine` describes it, one step at a time and with nothing remembered between steps."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf

from loadtest.audit.engine import EngineShape
from workers.timing import Chunk, DecodeLoad


@dataclass(eq=False)
class NaiveJob:
    arrival: float
    names: Sequence[bytes]
    prompt_tokens: int
    output_tokens: int
    priority: float = 0.0
    order: int = 0
    computed: int = 0
    outputs: int = 0
    cached_tokens: int = 0
    fresh: Sequence[bytes] = ()
    first_token_at: float = inf
    finished_at: float = inf


@dataclass
class NaiveEngine:
    shape: EngineShape
    waiting: list[NaiveJob] = field(default_factory=list)
    running: list[NaiveJob] = field(default_factory=list)
    cached: list[bytes] = field(default_factory=list)
    """Hittable names, the one unused longest first; those in use anywhere."""
    evicted: list[bytes] = field(default_factory=list)
    stored: list[bytes] = field(default_factory=list)

    def run(self, jobs: Sequence[NaiveJob]) -> None:
        """All of them to their ends."""
        coming = sorted(jobs, key=lambda job: job.arrival)
        now = 0.0
        while coming or self.waiting or self.running:
            while coming and coming[0].arrival <= now:
                self.waiting.append(coming.pop(0))
            shares = self.schedule()
            if not shares:
                now = coming[0].arrival
                continue
            now = self.complete(shares, now)

    def schedule(self) -> list[tuple[NaiveJob, int]]:
        """What one step computes for whom."""
        profile, block = self.shape.profile, self.shape.block_size_tokens
        shares = [(job, 1) for job in self.running if job.outputs]
        budget = profile.batch_tokens_max - len(shares)
        for job in [job for job in self.running if not job.outputs]:
            shares.append((job, min(job.prompt_tokens - job.computed, budget)))
            budget -= shares[-1][1]
        while self.waiting and budget > 0 and len(self.running) < profile.sequences_max:
            job = min(self.waiting, key=lambda one: (one.priority, one.order))
            if self.held([*self.running, job]) > self.shape.blocks_total:
                break
            self.waiting.remove(job)
            job.cached_tokens = job.computed = min(self.hits(job), (job.prompt_tokens - 1) // block) * block
            self.running.append(job)
            job.fresh = [name for name in job.names if name not in self.cached]
            self.cached += [name for name in job.names if name not in self.cached]
            self.evict()
            shares.append((job, min(job.prompt_tokens - job.computed, budget)))
            budget -= shares[-1][1]
        for job, tokens in shares:
            computed = job.names[: (job.computed + tokens) // block]
            self.stored += [name for name in job.fresh if name in computed]
            job.fresh = [name for name in job.fresh if name not in computed]
        return shares

    def complete(self, shares: Sequence[tuple[NaiveJob, int]], now: float) -> float:
        profile, block = self.shape.profile, self.shape.block_size_tokens
        decoding = [job for job, _ in shares if job.outputs]
        chunks = [Chunk(tokens, job.computed) for job, tokens in shares if not job.outputs]
        load = DecodeLoad(
            len(decoding), sum(job.prompt_tokens + job.outputs for job in decoding), self.shape.blocks_total * block
        )
        now += profile.step_seconds(chunks, load)
        for job, tokens in shares:
            if job.outputs:
                job.outputs += 1
            else:
                job.computed += tokens
                job.outputs = int(job.computed == job.prompt_tokens)
                if job.outputs:
                    job.first_token_at = now
        ended = [job for job, _ in shares if job.outputs == job.output_tokens]
        first = [job for job in ended if job.first_token_at == now]
        for job in [*sorted((job for job in ended if job not in first), key=lambda job: job.order), *first]:
            job.finished_at = now
            self.running.remove(job)
            unused = [name for name in job.names if not any(name in other.names for other in self.running)]
            self.cached = [name for name in self.cached if name not in unused] + unused[::-1]
        return now

    def hits(self, job: NaiveJob) -> int:
        count = 0
        while count < len(job.names) and job.names[count] in self.cached:
            count += 1
        return count

    def held(self, jobs: Sequence[NaiveJob]) -> int:
        """Blocks that these need, shared ones once."""
        block = self.shape.block_size_tokens
        own = sum(-(-(job.prompt_tokens + job.output_tokens) // block) - len(job.names) for job in jobs)
        return own + len({name for job in jobs for name in job.names})

    def evict(self) -> None:
        used = {name for job in self.running for name in job.names}
        unnamed = self.held(self.running) - len(used)
        while len(self.cached) + unnamed > self.shape.blocks_total:
            self.evicted.append(next(name for name in self.cached if name not in used))
            self.cached.remove(self.evicted[-1])
