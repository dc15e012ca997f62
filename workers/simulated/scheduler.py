"""Continuous batching with chunked prefill, as vLLM schedules it: a core without clock or sockets.

A step is decided (`schedule`), takes its time elsewhere, and is done (`complete`). Running requests come first, one
token each when they decode; what the token budget leaves goes to waiting requests, by priority and then arrival. When
memory runs out, the least urgent running request gives its blocks back and starts over later.

When blocks become hittable differs between engines. vLLM names them when their computation is scheduled, so a sibling
in the same step already hits; SGLang when the request's whole prefill is done, so a burst of siblings misses.
"""

from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import islice
from typing import NamedTuple

from cachecore.blocks import BlockHasher, PrefixHash, pack_tokens, split_chain
from cachecore.scope import Fidelity
from workers.engine import Generation
from workers.simulated.cache import Block, BlockCache, NamedRun, key_of
from workers.timing import Chunk, DecodeLoad, blocks_for


class Lineage(NamedTuple):
    """How a prompt's blocks are named, and by which salt it is said that their KV is not exact."""

    hasher: BlockHasher
    root: PrefixHash
    salt_of: Callable[[Fidelity], str]


@dataclass(eq=False, slots=True)
class Work:
    """One generation in the engine."""

    generation: Generation
    order: int
    tokens: "array[int]"
    """Prompt and output so far."""
    names: list[PrefixHash]
    """Of its full blocks, as far as they are known."""
    lineage: Lineage
    voice: Iterator[int]
    """The tokens it will say."""
    loading: bool = False
    """KV is on its way to it; until then it is not admitted."""
    blocks: list[Block] = field(default_factory=list)
    computed: int = 0
    """Tokens whose KV exists."""
    named: int = 0
    """Leading blocks that are hittable, or were hits."""
    cached_tokens: int | None = None
    """Hits at first admission; None before it."""
    fidelity: Fidelity = Fidelity.EXACT
    """The worst of its hits; what it computes after them is as bad."""
    outputs: int = 0
    done: bool = False

    @property
    def prompt_tokens(self) -> int:
        return len(self.generation.token_ids)

    @property
    def pending(self) -> int:
        return len(self.tokens) - self.computed

    @property
    def decoding(self) -> bool:
        return self.outputs > 0 and self.pending == 1

    @property
    def urgency(self) -> tuple[int, int]:
        """Smaller runs sooner."""
        return (self.generation.priority, self.order)


class Share(NamedTuple):
    """What a step computes for one request."""

    work: Work
    tokens: int
    decoding: bool


class Step(NamedTuple):
    shares: list[Share]
    kv_tokens: int

    @property
    def chunks(self) -> list[Chunk]:
        return [Chunk(share.tokens, share.work.computed) for share in self.shares if not share.decoding]

    @property
    def decode_load(self) -> DecodeLoad:
        contexts = [len(share.work.tokens) for share in self.shares if share.decoding]
        return DecodeLoad(len(contexts), sum(contexts), self.kv_tokens)


class Said(NamedTuple):
    """A token that a completed step brought."""

    work: Work
    token_id: int
    finish_reason: str | None


@dataclass(slots=True)
class SchedulerCounters:
    lookup_tokens: int = 0
    hit_tokens: int = 0
    preemptions: int = 0


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    batch_tokens_max: int
    sequences_max: int
    names_early: bool = True
    """True as vLLM, False as SGLang: see the module's opening."""


class Scheduler:
    """Decides what each step computes."""

    def __init__(self, cache: BlockCache, hasher: BlockHasher, limits: SchedulerLimits) -> None:
        self.cache = cache
        self.counters = SchedulerCounters()
        self.running: list[Work] = []
        self._waiting: list[tuple[tuple[int, int], Work]] = []
        self._waiting_count = self._loading_count = 0
        self._hasher = hasher
        self._limits = limits
        self._order = 0

    @property
    def block_size_tokens(self) -> int:
        return self._hasher.block_size_tokens

    @property
    def waiting_count(self) -> int:
        return self._waiting_count + self._loading_count

    @property
    def busy(self) -> bool:
        return bool(self.running or self._waiting_count)

    def add(
        self, generation: Generation, voice: Iterator[int], lineage: Lineage | None = None, *, loading: bool = False
    ) -> Work:
        """Queue a generation; its blocks are named under its salt and adapter. One that is `loading` keeps its place in
        the queue, but is not admitted before `loaded`."""
        tokens = array("I", generation.token_ids)
        lineage = lineage or self._own_lineage(generation)
        names = list(split_chain(lineage.hasher.chain(lineage.root, pack_tokens(tokens))))
        self._order += 1
        work = Work(generation, self._order, tokens, names, lineage, voice, loading)
        if loading:
            self._loading_count += 1
        else:
            self._enqueue(work)
        return work

    def _own_lineage(self, generation: Generation) -> Lineage:
        scope = f"{len(generation.cache_salt)}.{generation.cache_salt}.{generation.adapter}"
        root = self._hasher.root(scope.encode("utf-8", "surrogatepass"))
        return Lineage(self._hasher, root, lambda _: generation.cache_salt)

    def loaded(self, work: Work) -> None:
        """What was on its way has come, or will not."""
        if work.loading and not work.done:
            work.loading = False
            self._loading_count -= 1
            self._enqueue(work)

    def cached_blocks(self, work: Work) -> int:
        """Leading blocks that the work would hit now."""
        return len(self.cache.match(work.names, work.generation.fidelity))

    def take_in(self, work: Work, end: int, fidelity: Fidelity) -> bool:
        """Blocks of the work's prompt before `end` have come from elsewhere: make them hittable, those that are not.
        False for want of memory."""
        held = self.cache.match(work.names[:end], work.generation.fidelity)
        first = len(held)
        if end - first > self.cache.free - self.cache.idle_among(held):
            return False
        self.cache.hold(held)
        blocks = self.cache.allocate(end - first)
        if blocks:
            self._publish_run(work, [*held, *blocks], first, end, max([fidelity, *(block.fidelity for block in held)]))
        self.cache.release([*held, *blocks])
        return True

    def abort(self, work: Work) -> bool:
        """Take a generation out at once. False when it was done already."""
        if work.done:
            return False
        self._finish(work)
        return True

    def reset(self) -> None:
        """Forget all cached KV. Running requests start over, since later blocks of theirs would have no parent."""
        for work in list(self.running):
            self._preempt(work)
        self.cache.clear()

    def schedule(self) -> Step:
        """Decide the next step and allocate its memory. Empty when there is nothing to compute."""
        shares: list[Share] = []
        preemptions = self.counters.preemptions
        budget = self._continue_running(shares)
        if self.counters.preemptions == preemptions:
            self._admit_waiting(shares, budget)
        return Step(shares, self.cache.blocks_total * self.block_size_tokens)

    def complete(self, step: Step) -> list[Said]:
        """The step is done: what each request of it says."""
        return [said for share in step.shares if not share.work.done and (said := self._complete(share)) is not None]

    def _continue_running(self, shares: list[Share]) -> int:
        budget = self._limits.batch_tokens_max
        for work in list(self.running):
            count = min(work.pending, budget)
            if count == 0 or work not in self.running or not self._make_room(work, count, shares):
                continue
            shares.append(self._share(work, count))
            budget -= count
        return budget

    def _admit_waiting(self, shares: list[Share], budget: int) -> None:
        while self._waiting and budget and len(self.running) < self._limits.sequences_max:
            work = self._waiting[0][1]
            if work.done:
                heappop(self._waiting)
                continue
            count = self._admit(work, budget)
            if count == 0:
                return
            heappop(self._waiting)
            self._waiting_count -= 1
            self.running.append(work)
            shares.append(self._share(work, count))
            budget -= count

    def _admit(self, work: Work, budget: int) -> int:
        """Take the hits and memory for a first chunk; how many tokens it has. 0 (and no change) for want of memory."""
        # The last token is computed even where everything is cached: its logits are wanted.
        size = self.block_size_tokens
        hits = self.cache.match(islice(work.names, (len(work.tokens) - 1) // size), work.generation.fidelity)
        count = min(len(work.tokens) - len(hits) * size, budget)
        needed = blocks_for(len(hits) * size + count, size) - len(hits)
        if needed > self.cache.free - self.cache.idle_among(hits):
            return 0
        self.cache.hold(hits)
        work.blocks = hits
        work.named = len(hits)
        work.fidelity = max((block.fidelity for block in hits), default=Fidelity.EXACT)
        work.computed = len(hits) * size
        if work.cached_tokens is None:
            work.cached_tokens = work.computed
            self.counters.lookup_tokens += len(work.tokens)
            self.counters.hit_tokens += work.computed
        return count

    def _make_room(self, work: Work, count: int, shares: list[Share]) -> bool:
        """Free memory for `count` more tokens by preempting others. False when `work` itself had to go."""
        while self._missing_blocks(work, count) > self.cache.free:
            scheduled = {id(share.work) for share in shares}
            victim = max((one for one in self.running if id(one) not in scheduled), key=lambda one: one.urgency)
            self._preempt(victim)
            if victim is work:
                return False
        return True

    def _missing_blocks(self, work: Work, count: int) -> int:
        return blocks_for(work.computed + count, self.block_size_tokens) - len(work.blocks)

    def _share(self, work: Work, count: int) -> Share:
        share = Share(work, count, work.decoding)
        work.blocks += self.cache.allocate(self._missing_blocks(work, count))
        if self._limits.names_early:
            self._name_blocks(work, work.computed + count)
        return share

    def _complete(self, share: Share) -> Said | None:
        work = share.work
        work.computed += share.tokens
        if work.pending:
            return None
        if not self._limits.names_early and work.outputs == 0:
            self._name_blocks(work, work.computed)
        token_id = next(work.voice)
        work.tokens.append(token_id)
        work.outputs += 1
        reason = self._finish_reason(work, token_id)
        if reason is not None:
            self._finish(work)
        return Said(work, token_id, reason)

    def _finish_reason(self, work: Work, token_id: int) -> str | None:
        sampling = work.generation.sampling
        if token_id in sampling.stop_token_ids:
            return "stop"
        return "length" if work.outputs >= sampling.max_tokens else None

    def _finish(self, work: Work) -> None:
        work.done = True
        if work in self.running:
            if not self._limits.names_early:
                self._name_blocks(work, work.computed)
            self.running.remove(work)
            self.cache.release(work.blocks)
            work.blocks = []
        elif work.loading:
            self._loading_count -= 1
        else:
            self._waiting_count -= 1

    def _preempt(self, work: Work) -> None:
        self.running.remove(work)
        self.cache.release(work.blocks)
        work.blocks, work.computed, work.named = [], 0, 0
        self.counters.preemptions += 1
        self._enqueue(work)

    def _enqueue(self, work: Work) -> None:
        heappush(self._waiting, (work.urgency, work))
        self._waiting_count += 1

    def _name_blocks(self, work: Work, computed: int) -> None:
        """Make the full blocks among the first `computed` tokens hittable."""
        first, end = work.named, computed // self.block_size_tokens
        if end <= first:
            return
        self._learn_names(work, end)
        work.named = end
        if not self._limits.names_early:
            first += self._share_copies(work, first, end)
            if first == end:
                return
        self._publish_run(work, work.blocks, first, end, work.fidelity)

    def _publish_run(self, work: Work, blocks: Sequence[Block], first: int, end: int, fidelity: Fidelity) -> None:
        """Make blocks `first` to `end` of the work's prompt hittable; `blocks` are its own from the first on."""
        parent = blocks[first - 1].name if first else None
        self.cache.name(blocks[first:end], work.names[first:end], parent or work.lineage.root, fidelity)
        size, exact = self.block_size_tokens, fidelity is Fidelity.EXACT
        self.cache.journal.append(
            NamedRun(
                names=[block.name for block in blocks[first:end] if block.name is not None],
                parent=parent,
                token_ids=work.tokens[first * size : end * size].tolist(),
                cache_salt=work.generation.cache_salt if exact else work.lineage.salt_of(fidelity),
                adapter=work.generation.adapter,
            )
        )

    def _share_copies(self, work: Work, first: int, end: int) -> int:
        """SGLang keeps one copy of a block: ours give way to those that others stored meanwhile. How many did."""
        stored = self.cache.match([key_of(name, work.fidelity) for name in work.names[first:end]])
        self.cache.hold(stored)
        self.cache.release(work.blocks[first : first + len(stored)])
        work.blocks[first : first + len(stored)] = stored
        return len(stored)

    def _learn_names(self, work: Work, end: int) -> None:
        """Name the blocks that the output has filled."""
        known = len(work.names)
        if known < end:
            size = self.block_size_tokens
            parent = work.names[-1] if work.names else work.lineage.root
            filled = pack_tokens(work.tokens[known * size : end * size])
            work.names += split_chain(work.lineage.hasher.chain(parent, filled))
