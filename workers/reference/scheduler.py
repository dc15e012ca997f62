"""Which tokens the next step computes: continuous batching over a paged pool. Values in, values out; no tensors.

Each step has a budget of tokens. Sequences that decode come first (one token each), then prompts under way, then
waiting ones, by (priority, arrival) within each group; a long prompt is cut into chunks by what is left of the budget.
A prompt is admitted when all of it fits into the blocks that are available. Decoding sequences grow beyond that: when
blocks run out, the youngest of the least urgent loses its blocks and waits to be computed again. Its full blocks stay
in the prefix cache as long as nobody needs the room, so often little is lost.

A waiting sequence whose next block is just being computed for another, or on its way to it, is passed over until it
can take it: of a burst of prompts with one beginning, only the first computes or pulls it.

A sequence that may pull KV is given all the blocks of its prompt and put aside, without a share of the steps, until its
load has settled. What has arrived then counts as computed, wherever in the prompt it stands; what has not is computed
like any other part of a prompt. Nothing is named before every layer of it is valid. A load can be called off at any
moment, so a loading sequence can be preempted like a running one, and keeps its pulls for the next attempt.
"""

import time
from bisect import insort
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from cachecore.blocks import EMPTY_CHAIN, HASH_BYTES, Chain, PrefixHash, pack_tokens, split_chain
from cachecore.holders import Holder
from cachecore.scope import Fidelity, Naming
from cachecore.transfer.plan import Pull
from workers.engine import Generation, TokenLogprob
from workers.reference.kv_pool import KvPool, NamedRun, OutOfBlocksError
from workers.transfer.loads import Arrived, Load, RunLoad
from workers.transfer.passages import PassageLoad
from workers.transfer.report import PullLog


@dataclass(slots=True, eq=False)
class LiveSequence:
    """A generation under way."""

    generation: Generation
    naming: Naming
    arrival: int
    token_ids: list[int] = field(default_factory=list)
    """Prompt and output."""
    blocks: list[int] = field(default_factory=list)
    computed: int = 0
    """Leading tokens whose KV is in the pool."""
    chain: Chain = EMPTY_CHAIN
    """Names of full blocks; may reach beyond what has been computed, never beyond what is known."""
    committed: int = 0
    """Leading blocks that bear their names in the pool."""
    pool_generation: int = 0
    fidelity: Fidelity = Fidelity.EXACT
    """The worst of the KV of its tokens so far."""
    prompt_fidelity: Fidelity = Fidelity.EXACT
    """Of what its first output was computed from."""
    committed_fidelity: Fidelity = Fidelity.EXACT
    """Of the last block that bears its name."""
    cached_tokens: int | None = None
    """Prompt tokens that were found in the cache, or arrived, at the first admission; None before it."""
    pulls: Sequence[Pull] = ()
    """What it may pull, by position; none once that was settled."""
    passages: Sequence[Pull] = ()
    """What it may turn and repair, by where it will stand; none once that was settled."""
    recompute_fraction: float | None = None
    """Of its passages' tokens; None leaves it to the worker."""
    pull_log: PullLog | None = None
    """None where it came without plans."""
    pulling_since: float | None = None
    """When its first pull began, by the monotonic clock."""
    load: Load | None = None
    """What it waits for."""
    arrived: list[Arrived] = field(default_factory=list)
    """What it will not have to compute when it comes there, by position."""
    prompt_logprobs: list[TokenLogprob | None] = field(default_factory=list)
    started: bool = False
    """Its first output has been delivered."""

    def __post_init__(self) -> None:
        self.token_ids = list(self.generation.token_ids)

    @property
    def prompt_count(self) -> int:
        return len(self.generation.token_ids)

    @property
    def output_count(self) -> int:
        return len(self.token_ids) - self.prompt_count

    @property
    def order(self) -> tuple[int, int]:
        """Smaller is served sooner and preempted later."""
        return self.generation.priority, self.arrival

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Every prompt token must still be computed in full: the cache keeps no logits."""
        return self.generation.sampling.prompt_logprobs is not None and not self.started

    def named(self, blocks: int) -> Chain:
        """The names of the first `blocks` full blocks."""
        known = len(self.chain) // HASH_BYTES
        if known < blocks:
            size = self.naming.scope.block_size_tokens
            parent = PrefixHash(self.chain[-HASH_BYTES:]) if known else self.naming.root
            tokens = pack_tokens(self.token_ids[known * size : blocks * size])
            self.chain = Chain(self.chain + self.naming.hasher.chain(parent, tokens))
        return Chain(self.chain[: blocks * HASH_BYTES])


class Chunk(NamedTuple):
    """Tokens `start` to `end` of a sequence, to be computed in this step."""

    sequence: LiveSequence
    start: int
    end: int

    @property
    def completes(self) -> bool:
        """All known tokens will have been computed: the next one can be drawn."""
        return self.end == len(self.sequence.token_ids)


def _said_by_client(sequence: LiveSequence, fidelity: Fidelity) -> str:
    return sequence.generation.cache_salt


def _begins_nothing(load: Load) -> None:
    raise RuntimeError("this engine moves no KV")


class Scheduler:
    """See the module's opening. `plan`, compute the chunks, `complete` each, `finish` those that have ended; `settle`
    those whose load is over."""

    def __init__(
        self,
        pool: KvPool,
        batched_tokens_max: int,
        sequences_max: int,
        *,
        begin: Callable[[Load], None] = _begins_nothing,
        salt_of: Callable[[LiveSequence, Fidelity], str] = _said_by_client,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`begin` has a load carried out; `salt_of` is what a sequence's KV of a fidelity is announced with."""
        self.pool = pool
        self.batched_tokens_max = batched_tokens_max
        self.sequences_max = sequences_max
        self._begin = begin
        self._salt_of = salt_of
        self._clock = clock
        self.own_holder: Holder | None = None
        """As which plans name this worker, where it moves KV."""
        self.preemptions = 0
        self.cache_queries = 0
        self.cache_hits = 0
        """Prompt tokens looked up and found at first admissions."""
        self.waiting: list[LiveSequence] = []
        """By `order`."""
        self.loading: list[LiveSequence] = []
        """By `order`. They hold blocks, and are not computed yet."""
        self.running: list[LiveSequence] = []
        """By `order`."""

    def __repr__(self) -> str:
        counts = f"running={len(self.running)}, loading={len(self.loading)}, waiting={len(self.waiting)}"
        return f"Scheduler({counts}, {self.pool!r})"

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.loading or self.running)

    def add(self, sequence: LiveSequence) -> None:
        insort(self.waiting, sequence, key=_order)

    def plan(self) -> list[Chunk]:
        """Choose the tokens of the next step and take blocks for them."""
        planned: dict[LiveSequence, Chunk] = {}
        preemptions = self.preemptions
        decodes = [sequence for sequence in self.running if len(sequence.token_ids) - sequence.computed == 1]
        prefills = [sequence for sequence in self.running if len(sequence.token_ids) - sequence.computed > 1]
        for sequence in (*decodes, *prefills):
            if sequence.blocks:  # else it has been preempted for an earlier one
                self._plan_running(sequence, planned)
        if self.preemptions == preemptions:
            self._admit(planned)
        return list(planned.values())

    def complete(self, chunk: Chunk) -> None:
        """The chunk's KV has been computed: name its full blocks, so that others find them."""
        chunk.sequence.computed = chunk.end
        self._advance(chunk.sequence)

    def settle(self, sequence: LiveSequence) -> None:
        """Its load is over: what arrived is its own, and the rest will be computed."""
        load, sequence.load = sequence.load, None
        if load is None:
            raise ValueError("a sequence that does not load")
        sequence.pulls = sequence.passages = ()
        sequence.arrived = load.arrived()
        size = self.pool.block_size_tokens
        if sequence.pull_log is not None:
            sequence.pull_log.settle(load, size, self._clock())
        arrived = sum(span.end_block - span.first_block for span in sequence.arrived) * size
        arrived += sum(passage.end - passage.start for passage in load.passages if passage.is_good)
        self.loading.remove(sequence)
        self._enter(sequence, arrived)
        self._advance(sequence)

    def repaired(self, sequence: LiveSequence, end: int) -> None:
        """Its tokens up to `end` have KV that was repaired for it: as good as computed, under a fidelity of its own."""
        sequence.computed = end
        sequence.fidelity = Fidelity.FUSED
        sequence.arrived = []
        self._advance(sequence)

    def give_up(self, passages: Iterable[PassageLoad]) -> None:
        """Give back what passages of the worker's own hold."""
        for passage in passages:
            if passage.borrowed:
                self.pool.release(passage.borrowed)
                passage.borrowed = ()

    def finish(self, sequence: LiveSequence) -> None:
        """It has ended, or its client has left, wherever it stands: nowhere, if a step has failed half-way."""
        if sequence in self.waiting:
            self.waiting.remove(sequence)
        self._leave(sequence)

    def _advance(self, sequence: LiveSequence) -> None:
        """Name what is complete, and step over what has arrived, as far as both follow each other."""
        size = self.pool.block_size_tokens
        self._commit(sequence, sequence.computed // size)
        while sequence.arrived and sequence.arrived[0].first_block * size == sequence.computed:
            span = sequence.arrived.pop(0)
            sequence.computed = span.end_block * size
            sequence.fidelity = max(sequence.fidelity, span.fidelity)
            self._commit(sequence, span.end_block)

    def _commit(self, sequence: LiveSequence, last: int) -> None:
        """Name a sequence's blocks up to `last`."""
        first, size = sequence.committed, self.pool.block_size_tokens
        if first >= last or sequence.pool_generation != self.pool.generation:
            return
        chain = sequence.named(last)
        run = NamedRun(
            blocks=sequence.blocks[first:last],
            chain=Chain(chain[first * HASH_BYTES :]),
            parent=PrefixHash(chain[(first - 1) * HASH_BYTES : first * HASH_BYTES]) if first else None,
            token_ids=sequence.token_ids[first * size : last * size],
            cache_salt=self._salt_of(sequence, sequence.fidelity),
            fidelity=sequence.fidelity,
            parent_fidelity=sequence.committed_fidelity,
            first_block=first,
            naming=sequence.naming,
        )
        sequence.blocks[first:last] = self.pool.commit(run)
        sequence.committed = last
        sequence.committed_fidelity = sequence.fidelity

    def _plan_running(self, sequence: LiveSequence, planned: dict[LiveSequence, Chunk]) -> None:
        end = self._end(sequence, self._budget(planned.values()))
        while end > sequence.computed:
            try:
                sequence.blocks += self.pool.allocate(self._missing(sequence, end))
            except OutOfBlocksError:
                victim = max((*self.running[-1:], *self.loading[-1:]), key=_order)
                self._preempt(victim)
                planned.pop(victim, None)
                if victim is sequence:
                    return
                continue
            planned[sequence] = Chunk(sequence, sequence.computed, end)
            return

    def _end(self, sequence: LiveSequence, budget: int) -> int:
        """Where its next chunk ends: nothing is computed that has arrived."""
        end = min(len(sequence.token_ids), sequence.computed + budget)
        return min(end, sequence.arrived[0].first_block * self.pool.block_size_tokens) if sequence.arrived else end

    def _admit(self, planned: dict[LiveSequence, Chunk]) -> None:
        computing = self._computing() if self.waiting else {}
        reserved = 0
        for sequence in list(self.waiting):
            if len(self.running) + len(self.loading) >= self.sequences_max:
                return
            budget = self._budget(planned.values())
            if not budget and not sequence.pulls and not sequence.passages:
                reserved += self._missing(sequence, len(sequence.token_ids))
                continue
            if self._awaits(sequence, computing):
                continue
            hits = self._hits(sequence)
            runs = self._wanted(sequence, len(hits))
            found = max([len(hits), *(run.end_block for run in runs)]) * self.pool.block_size_tokens
            passages = self._turnable(sequence, found)
            if not budget and not runs and not passages:
                reserved += self._missing(sequence, len(sequence.token_ids))
                continue
            if not self._take(sequence, hits, reserved):
                return
            self.waiting.remove(sequence)
            if runs or passages:
                self._load(sequence, runs, passages, found)
            else:
                self._drop_pulls(sequence)
                self._enter(sequence, 0)
                end = self._end(sequence, budget)
                sequence.blocks += self.pool.allocate(self._missing(sequence, end))
                planned[sequence] = Chunk(sequence, sequence.computed, end)
            self._note_computing(sequence, computing)

    def _computing(self) -> dict[PrefixHash, Fidelity]:
        """Names that sequences under way will give to blocks, with how good these will be at worst."""
        computing: dict[PrefixHash, Fidelity] = {}
        for sequence in (*self.running, *self.loading):
            self._note_computing(sequence, computing)
        return computing

    def _note_computing(self, sequence: LiveSequence, computing: dict[PrefixHash, Fidelity]) -> None:
        if sequence.pool_generation == self.pool.generation:
            chain = sequence.named(len(sequence.token_ids) // self.pool.block_size_tokens)
            load = sequence.load
            worst = max((sequence.fidelity, *(run.expected_fidelity for run in (load.runs if load else ()))))
            worst = Fidelity.FUSED if load and load.passages else worst
            for name in split_chain(Chain(chain[sequence.committed * HASH_BYTES :])):
                computing[name] = min(worst, computing.get(name, worst))

    def _awaits(self, sequence: LiveSequence, computing: dict[PrefixHash, Fidelity]) -> bool:
        """Whether the next block it would compute is being computed for another."""
        if sequence.wants_prompt_logprobs or not computing:
            return False
        chain = sequence.named(self._reusable(sequence))
        found = len(self._hits(sequence)) * HASH_BYTES
        coming = computing.get(PrefixHash(chain[found : found + HASH_BYTES]))
        return coming is not None and coming <= sequence.generation.fidelity

    def _hits(self, sequence: LiveSequence) -> list[int]:
        """The blocks of its cached prefix."""
        if sequence.wants_prompt_logprobs:
            return []
        return self.pool.recall(sequence.named(self._reusable(sequence)), sequence.generation.fidelity)

    def _wanted(self, sequence: LiveSequence, found: int) -> list[RunLoad]:
        """What its pulls can bring that is not there."""
        if sequence.wants_prompt_logprobs:
            return []
        runs: list[RunLoad] = []
        end = self._reusable(sequence)
        for pull in sequence.pulls:
            run = pull.plan.run
            load = RunLoad(pull, max(run.first_block, found), min(run.first_block + run.blocks, end))
            if load.first_block < load.end_block:
                runs.append(load)
                found = load.end_block
        return runs

    def _turnable(self, sequence: LiveSequence, found: int) -> list[PassageLoad]:
        """Its passages behind the `found` tokens that it has or pulls."""
        if sequence.wants_prompt_logprobs or sequence.output_count:
            return []
        passages = []
        for pull in sequence.passages:
            passage = PassageLoad(pull, sequence.token_ids, self.pool.block_size_tokens)
            if passage.start >= found:
                passages.append(passage)
                found = passage.end
        return passages

    def _borrow(self, sequence: LiveSequence, passages: Sequence[PassageLoad], found: int, room: int) -> None:
        """Reference passages that are the worker's own, as long as `room` blocks stay available. They lie behind the
        `found` tokens that the sequence has or pulls."""
        ends = [*(passage.start for passage in passages[1:]), len(sequence.token_ids) - 1]
        for passage, end_max in zip(passages, ends, strict=False):  # none, and one end, where there are no passages
            run = passage.pull.plan.run
            if passage.pull.plan.source == self.own_holder:
                held = self.pool.find(run.tail, run.blocks, Fidelity.QUANTIZED)
                if held is None or len(held.blocks) + 2 > self.pool.blocks_available - room:
                    passage.miss()
                else:
                    edges = self.pool.edges(held, Fidelity.QUANTIZED)
                    passage.borrow(held, edges, sequence.token_ids, found, end_max)
                    self.pool.acquire(passage.borrowed)
            found = passage.end

    def _take(self, sequence: LiveSequence, hits: list[int], reserved: int) -> bool:
        """Take the cached prefix. False, and nothing taken, when the rest of the prompt does not fit."""
        self.pool.acquire(hits)
        sequence.blocks = hits
        if self._missing(sequence, len(sequence.token_ids)) > self.pool.blocks_available - reserved:
            self._give_back(sequence)
            return False
        sequence.computed = len(hits) * self.pool.block_size_tokens
        sequence.committed = len(hits)
        sequence.fidelity = self.pool.fidelity_of(hits[-1]) if hits else Fidelity.EXACT
        sequence.committed_fidelity = sequence.fidelity
        sequence.pool_generation = self.pool.generation
        return True

    def _enter(self, sequence: LiveSequence, arrived: int) -> None:
        """It runs from now on; `arrived` of its tokens were neither found nor will be computed."""
        insort(self.running, sequence, key=_order)
        if sequence.cached_tokens is None:
            self.cache_queries += 0 if sequence.wants_prompt_logprobs else sequence.prompt_count
            self.cache_hits += sequence.computed
            sequence.cached_tokens = sequence.computed + arrived

    def _load(self, sequence: LiveSequence, runs: list[RunLoad], passages: list[PassageLoad], found: int) -> None:
        missing = self._missing(sequence, len(sequence.token_ids))
        self._borrow(sequence, passages, found, missing)
        sequence.blocks += self.pool.allocate(missing)
        for run in runs:
            run.blocks = sequence.blocks[run.first_block : run.end_block]
        if sequence.pulling_since is None:
            sequence.pulling_since = self._clock()
        sequence.load = Load(runs, sequence.naming, sequence.generation.fidelity, sequence.pulling_since, passages)
        held = len(sequence.pulls) + len(sequence.passages) - len(runs) - len(passages)
        if sequence.pull_log is not None and held:
            sequence.pull_log.hold(held)
        insort(self.loading, sequence, key=_order)
        self._begin(sequence.load)

    def _drop_pulls(self, sequence: LiveSequence) -> None:
        if sequence.pull_log is not None and (held := len(sequence.pulls) + len(sequence.passages)):
            sequence.pull_log.hold(held)
        sequence.pulls = sequence.passages = ()

    def _preempt(self, sequence: LiveSequence) -> None:
        self.preemptions += 1
        self._leave(sequence)
        self.add(sequence)

    def _leave(self, sequence: LiveSequence) -> None:
        if sequence.load is not None:
            sequence.load.cancel()
            self.give_up(sequence.load.passages)
            sequence.load = None
        for queue in (self.loading, self.running):
            if sequence in queue:
                queue.remove(sequence)
        self._give_back(sequence)

    def _give_back(self, sequence: LiveSequence) -> None:
        self.pool.release(sequence.blocks)
        sequence.blocks = []
        sequence.computed = 0
        sequence.committed = 0
        sequence.fidelity = sequence.committed_fidelity = Fidelity.EXACT
        sequence.arrived = []
        if not sequence.started:
            sequence.prompt_logprobs.clear()

    def _reusable(self, sequence: LiveSequence) -> int:
        """Blocks it may take from the cache. At least the last token is computed: its logits are needed."""
        return (len(sequence.token_ids) - 1) // self.pool.block_size_tokens

    def _missing(self, sequence: LiveSequence, tokens: int) -> int:
        return max(0, -(-tokens // self.pool.block_size_tokens) - len(sequence.blocks))

    def _budget(self, planned: Iterable[Chunk]) -> int:
        return self.batched_tokens_max - sum(chunk.end - chunk.start for chunk in planned)


def _order(sequence: LiveSequence) -> tuple[int, int]:
    return sequence.order
