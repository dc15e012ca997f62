"""One engine in virtual time: continuous batching with chunked prefill, step-exact, and a cache of blocks.

A step decodes one token for each running sequence, gives what the batch budget leaves to prompts, and lasts as long as
`workers.timing` says. Requests wait by priority, then arrival; whoever is first waits until there is room for all of
its blocks, outputs included, so nobody is ever preempted. Admission makes the prompt's full blocks hittable at once, as
Dynamo's mock engine does; since prompts are computed one after the other, whoever hits them comes after they have been
computed. They are announced chunk by chunk. A prompt that is wholly cached still computes its last block.

Blocks that no request uses stay hittable until their memory is wanted, the one unused longest first. A request gives
its blocks back from the end, so a leaf always leaves before its parent.

Between two events nothing changes but the decoded context, which grows by one token for each sequence and step; so a
run of decode steps is one leap, whose length is a sum in closed form:

    step(X) = a + b X + c X^2        X the context;    X = C, C + n, C + 2n ...  for n sequences

A leap ends where a sequence ends. A request that arrives cuts it at the end of the step under way.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from math import inf
from typing import NamedTuple

from workers.timing import TimingProfile, blocks_for

_USAGE_TERMS_MAX = 3


@dataclass(frozen=True, slots=True)
class EngineShape:
    """What one engine is."""

    profile: TimingProfile
    block_size_tokens: int
    blocks_total: int
    """KV memory. The usage polynomial of a profile that has one speaks of all of it."""

    def __post_init__(self) -> None:
        if self.block_size_tokens < 1 or self.blocks_total < 1:
            raise ValueError("an engine needs blocks, of at least one token")
        if len(self.profile.decode_usage_seconds) > _USAGE_TERMS_MAX:
            raise ValueError(f"profile {self.profile.name!r}: a usage polynomial of degree 2 at most can be leapt over")


class Job:
    """One request in an engine."""

    __slots__ = (
        "cached_tokens",
        "computed_tokens",
        "fresh",
        "names",
        "number",
        "order",
        "output_tokens",
        "priority",
        "prompt_tokens",
        "unnamed_blocks",
    )

    def __init__(
        self,
        number: int,
        names: Sequence[bytes],
        prompt_tokens: int,
        output_tokens: int,
        order: int,
        priority: float = 0.0,
    ) -> None:
        self.number = number
        """Whatever the caller calls it."""
        self.names = names
        """Of the prompt's full blocks, and of no others."""
        self.prompt_tokens = prompt_tokens
        self.output_tokens = output_tokens
        self.order = order
        """Unique; among jobs of one priority the smaller runs sooner."""
        self.priority = priority
        """Smaller runs sooner."""
        self.cached_tokens = 0
        """Hits at admission."""
        self.computed_tokens = 0
        self.fresh: Sequence[int] = ()
        """Places of its blocks that are new and not announced yet."""
        self.unnamed_blocks = 0


class Happened(NamedTuple):
    """What a step brought."""

    first_tokens: Sequence[Job]
    finished: Sequence[Job]


class Journal(NamedTuple):
    """What became of the hittable blocks since it was last asked for."""

    stored: Sequence[tuple[Job, int, int]]
    """Blocks of a job's prompt, from the second up to before the third."""
    evicted: Sequence[bytes]


class Engine:
    """Told the time, never asks for it: `submit` and `start` at any time, `advance` at `ends_at`."""

    def __init__(self, shape: EngineShape) -> None:
        profile = shape.profile
        self.shape = shape
        self.ends_at = inf
        """When the step or leap under way ends; never while idle."""
        self.started_at = 0.0
        self.busy_seconds = 0.0
        self.steps = 0
        self._batch_tokens_max = profile.batch_tokens_max
        self._sequences_max = profile.sequences_max
        self._block_tokens = shape.block_size_tokens
        self._prefill = (
            profile.prefill_constant_seconds,
            profile.prefill_linear_seconds,
            profile.prefill_square_seconds,
            profile.prefill_pair_seconds,
        )
        self._decode = _decode_terms(shape)
        self._references: dict[bytes, int] = {}
        self._idle: OrderedDict[bytes, None] = OrderedDict()
        self._unnamed_blocks = 0
        self._waiting: list[tuple[float, int, Job]] = []
        self._running = 0
        self._partial: Job | None = None
        self._completing: list[Job] = []
        self._decoding = 0
        self._context_tokens = 0
        self._clock = 0
        """Decode steps so far: a sequence that decodes ends at a number of it."""
        self._ends: list[tuple[int, int, Job]] = []
        self._leap_steps = 0
        """Decode steps under way; 0 in a step that prefills but decodes nothing."""
        self._leaps = False
        self._blocked = False
        self._stored: list[tuple[Job, int, int]] = []
        self._evicted: list[bytes] = []

    @property
    def running(self) -> int:
        return self._running

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def decoding(self) -> int:
        return self._decoding

    @property
    def cached_blocks(self) -> int:
        """Hittable ones."""
        return len(self._references) + len(self._idle)

    @property
    def pinned_blocks(self) -> int:
        """Of requests in the engine, what is reserved for their outputs included."""
        return len(self._references) + self._unnamed_blocks

    @property
    def tokens_max(self) -> int:
        """Of prompt and output together; a longer request would never be admitted."""
        return self.shape.blocks_total * self._block_tokens

    def cached_prefix(self, names: Sequence[bytes]) -> int:
        """Leading blocks that are hittable now."""
        references, idle = self._references, self._idle
        count = 0
        for name in names:
            if name not in references and name not in idle:
                break
            count += 1
        return count

    def submit(self, job: Job, now: float) -> None:
        """A request has come. It is looked at when the step under way ends; an idle engine waits for `start`."""
        waiting = self._waiting
        heappush(waiting, (job.priority, job.order, job))
        if self._leaps and (not self._blocked or waiting[0][2] is job):
            self._cut(now)

    def take_in(self, job: Job, end: int) -> int:
        """KV of the job's blocks before `end` has come from elsewhere: make hittable what is not yet. How many blocks
        that were; -1 for want of memory, which changes nothing."""
        references, idle = self._references, self._idle
        names = job.names[:end]
        missing = [place for place, name in enumerate(names) if name not in references and name not in idle]
        held = sum(1 for name in names if name in idle)
        if self.pinned_blocks + held + len(missing) > self.shape.blocks_total:
            return -1
        for name in reversed(names):  # a parent is used after its children
            if name not in references:
                idle[name] = None
                idle.move_to_end(name)
        self._evict()
        self._note_stored(job, missing)
        return len(missing)

    def start(self, now: float) -> None:
        """Begin the next step if none is under way and there is work."""
        if self.ends_at != inf:
            return
        budget = self._batch_tokens_max - self._decoding
        tokens, pairs = self._schedule_prefill(budget)
        decoding = self._decoding
        self._leaps = False
        self._leap_steps = 1 if decoding else 0
        if tokens:
            constant, linear, square, pair = self._prefill
            seconds = constant + tokens * (linear + square * tokens) + pair * pairs
            if decoding:
                seconds += self._decode_seconds(1)
        elif decoding:
            self._leap_steps = self._ends[0][0] - self._clock
            self._leaps = True
            seconds = self._decode_seconds(self._leap_steps)
        else:
            return
        self.started_at = now
        self.ends_at = now + seconds

    def advance(self) -> Happened:
        """The step or leap under way ends, at `ends_at`. The next one begins with `start`."""
        self.busy_seconds += self.ends_at - self.started_at
        self.ends_at = inf
        finished = self._decode_steps() if self._leap_steps else []
        first_tokens = self._completing
        if first_tokens:
            self._completing = []
            for job in first_tokens:
                if job.output_tokens > 1:
                    heappush(self._ends, (self._clock + job.output_tokens - 1, job.order, job))
                    self._decoding += 1
                    self._context_tokens += job.prompt_tokens + 1
                else:
                    finished.append(job)
        for job in finished:
            self._release(job)
        return Happened(first_tokens, finished)

    def take_journal(self) -> Journal | None:
        """What changed since the last call; None when nothing did."""
        if not self._stored and not self._evicted:
            return None
        journal = Journal(self._stored, self._evicted)
        self._stored, self._evicted = [], []
        return journal

    # Steps

    def _schedule_prefill(self, budget: int) -> tuple[int, float]:
        """Tokens to prefill in this step, and its pairs of a new token and one before it."""
        tokens, pairs = 0, 0.0
        job = self._partial
        self._blocked = False
        waiting = self._waiting
        while budget > 0:
            if job is None:
                if not waiting:
                    break
                if self._running >= self._sequences_max or not self._admit(waiting[0][2]):
                    self._blocked = True
                    break
                job = heappop(waiting)[2]
            context = job.computed_tokens
            chunk = job.prompt_tokens - context
            if chunk > budget:
                chunk = budget
                self._partial = job
            else:
                self._partial = None
                self._completing.append(job)
            job.computed_tokens = context + chunk
            if job.fresh:
                self._announce(job)
            budget -= chunk
            tokens += chunk
            pairs += chunk * (context + 0.5 * chunk)
            job = None
        return tokens, pairs

    def _decode_steps(self) -> list[Job]:
        steps, ends = self._leap_steps, self._ends
        self._clock = clock = self._clock + steps
        self.steps += steps
        self._context_tokens += self._decoding * steps
        finished: list[Job] = []
        while ends and ends[0][0] <= clock:
            job = heappop(ends)[2]
            self._decoding -= 1
            self._context_tokens -= job.prompt_tokens + job.output_tokens
            finished.append(job)
        return finished

    def _decode_seconds(self, steps: int) -> float:
        """Of so many decode steps in a row, from the present context on."""
        constant, sequence, linear, square = self._decode
        n, context = self._decoding, self._context_tokens
        pairs = steps * (steps - 1) // 2
        seconds = steps * (constant + sequence * n) + linear * (steps * context + n * pairs)
        if square:
            third = pairs * (2 * steps - 1) / 3
            seconds += square * (steps * context * context + 2 * context * n * pairs + n * n * third)
        return seconds

    def _cut(self, now: float) -> None:
        """End the leap under way with the step that `now` falls into."""
        elapsed = now - self.started_at
        low, high = 0, self._leap_steps
        while high - low > 1:
            middle = (low + high) // 2
            if self._decode_seconds(middle) < elapsed:
                low = middle
            else:
                high = middle
        if high < self._leap_steps:
            self._leap_steps = high
            self.ends_at = self.started_at + self._decode_seconds(high)

    # Blocks

    def _admit(self, job: Job) -> bool:
        """Take the hits and all the memory that the job will need. False (and no change) for want of memory."""
        names, references, idle = job.names, self._references, self._idle
        block = self._block_tokens
        needed = blocks_for(job.prompt_tokens + job.output_tokens, block)
        pinned = len(references) + self._unnamed_blocks
        if pinned + needed > self.shape.blocks_total:
            needed -= sum(1 for name in names if name in references)
            if pinned + needed > self.shape.blocks_total:
                return False
        hits = min(self.cached_prefix(names), (job.prompt_tokens - 1) // block)
        fresh: list[int] = []
        for position, name in enumerate(names):
            count = references.get(name)
            if count is not None:
                references[name] = count + 1
                continue
            references[name] = 1
            if name in idle:
                del idle[name]
            else:
                fresh.append(position)
        job.unnamed_blocks = blocks_for(job.prompt_tokens + job.output_tokens, block) - len(names)
        self._unnamed_blocks += job.unnamed_blocks
        self._evict()
        job.cached_tokens = job.computed_tokens = hits * block
        self._running += 1
        job.fresh = fresh
        return True

    def _announce(self, job: Job) -> None:
        """What is computed, or will be with this step."""
        fresh, end = job.fresh, job.computed_tokens // self._block_tokens
        count = len(fresh) if fresh[-1] < end else sum(place < end for place in fresh)
        self._note_stored(job, fresh[:count])
        job.fresh = fresh[count:]

    def _note_stored(self, job: Job, places: Sequence[int]) -> None:
        """Blocks at these places of the prompt have become hittable: one run nearly always."""
        while places:
            first, count = places[0], len(places)
            if places[-1] - first >= count:
                count = next(at for at, place in enumerate(places) if place != first + at)
            self._stored.append((job, first, first + count))
            places = places[count:]

    def _evict(self) -> None:
        idle = self._idle
        excess = len(self._references) + len(idle) + self._unnamed_blocks - self.shape.blocks_total
        while excess > 0:
            self._evicted.append(idle.popitem(last=False)[0])
            excess -= 1

    def _release(self, job: Job) -> None:
        references, idle = self._references, self._idle
        for name in reversed(job.names):
            count = references[name] - 1
            if count:
                references[name] = count
            else:
                del references[name]
                idle[name] = None
        self._unnamed_blocks -= job.unnamed_blocks
        self._running -= 1


def _decode_terms(shape: EngineShape) -> tuple[float, float, float, float]:
    """Of a decode step: constant, per sequence, per token of context, per squared token of context."""
    profile = shape.profile
    usage = (*profile.decode_usage_seconds, 0.0, 0.0, 0.0)
    kv_tokens = shape.blocks_total * shape.block_size_tokens
    return (
        profile.decode_constant_seconds + usage[0],
        profile.decode_sequence_seconds,
        profile.decode_context_seconds + usage[1] / kv_tokens,
        usage[2] / kv_tokens**2,
    )
