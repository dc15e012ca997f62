"""Which tokens the next step computes: continuous batching over a paged pool. Values in, values out; no tensors.

Each step has a budget of tokens. Sequences that decode come first (one token each), then prompts under way, then
waiting ones, by (priority, arrival) within each group; a long prompt is cut into chunks by what is left of the budget.
A prompt is admitted when all of it fits into the blocks that are available. Decoding sequences grow beyond that: when
blocks run out, the youngest of the least urgent loses its blocks and waits to be computed again. Its full blocks stay
in the prefix cache as long as nobody needs the room, so often little is lost.

A waiting sequence whose next block is just being computed for another is passed over until it can take it: of a burst
of prompts with one beginning, only the first computes it.
"""

from bisect import insort
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from cachecore.blocks import EMPTY_CHAIN, HASH_BYTES, Chain, PrefixHash, pack_tokens, split_chain
from cachecore.scope import Naming
from workers.engine import Generation, TokenLogprob
from workers.reference.kv_pool import KvPool, NamedRun, OutOfBlocksError


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
    cached_tokens: int | None = None
    """Prompt tokens found in the cache at the first admission; None before it."""
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


class Scheduler:
    """See the module's opening. `plan`, compute the chunks, `complete` each, `finish` those that have ended."""

    def __init__(self, pool: KvPool, batched_tokens_max: int, sequences_max: int) -> None:
        self.pool = pool
        self.batched_tokens_max = batched_tokens_max
        self.sequences_max = sequences_max
        self.preemptions = 0
        self.cache_queries = 0
        self.cache_hits = 0
        """Prompt tokens looked up and found at first admissions."""
        self.waiting: list[LiveSequence] = []
        """By `order`."""
        self.running: list[LiveSequence] = []
        """By `order`."""

    def __repr__(self) -> str:
        return f"Scheduler(running={len(self.running)}, waiting={len(self.waiting)}, {self.pool!r})"

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

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
        sequence = chunk.sequence
        sequence.computed = chunk.end
        size = self.pool.block_size_tokens
        first, last = sequence.committed, chunk.end // size
        if first >= last or sequence.pool_generation != self.pool.generation:
            return
        chain = sequence.named(last)
        run = NamedRun(
            blocks=sequence.blocks[first:last],
            chain=Chain(chain[first * HASH_BYTES :]),
            parent=PrefixHash(chain[(first - 1) * HASH_BYTES : first * HASH_BYTES]) if first else None,
            token_ids=sequence.token_ids[first * size : last * size],
            cache_salt=sequence.generation.cache_salt,
        )
        sequence.blocks[first:last] = self.pool.commit(run)
        sequence.committed = last

    def finish(self, sequence: LiveSequence) -> None:
        """It has ended, or its client has left, wherever it stands."""
        if sequence in self.running:
            self.running.remove(sequence)
            self._give_back(sequence)
        else:
            self.waiting.remove(sequence)

    def _plan_running(self, sequence: LiveSequence, planned: dict[LiveSequence, Chunk]) -> None:
        end = min(len(sequence.token_ids), sequence.computed + self._budget(planned.values()))
        while end > sequence.computed:
            try:
                sequence.blocks += self.pool.allocate(self._missing(sequence, end))
            except OutOfBlocksError:
                victim = self.running[-1]
                self._preempt(victim)
                planned.pop(victim, None)
                if victim is sequence:
                    return
                continue
            planned[sequence] = Chunk(sequence, sequence.computed, end)
            return

    def _admit(self, planned: dict[LiveSequence, Chunk]) -> None:
        computing = {name for sequence in self.running for name in self._computing(sequence)} if self.waiting else set()
        for sequence in list(self.waiting):
            budget = self._budget(planned.values())
            if not budget or len(self.running) >= self.sequences_max:
                return
            if self._awaits(sequence, computing):
                continue
            if not self._start(sequence):
                return
            self.waiting.remove(sequence)
            insort(self.running, sequence, key=_order)
            computing.update(self._computing(sequence))
            end = min(len(sequence.token_ids), sequence.computed + budget)
            sequence.blocks += self.pool.allocate(self._missing(sequence, end))
            planned[sequence] = Chunk(sequence, sequence.computed, end)

    def _computing(self, sequence: LiveSequence) -> Iterator[PrefixHash]:
        """Names that a running sequence will give to blocks of what it knows."""
        if sequence.pool_generation == self.pool.generation:
            chain = sequence.named(len(sequence.token_ids) // self.pool.block_size_tokens)
            yield from split_chain(Chain(chain[sequence.committed * HASH_BYTES :]))

    def _awaits(self, sequence: LiveSequence, computing: set[PrefixHash]) -> bool:
        """Whether the next block it would compute is being computed for another."""
        if sequence.wants_prompt_logprobs or not computing:
            return False
        chain = sequence.named(self._reusable(sequence))
        found = len(self.pool.match(chain)) * HASH_BYTES
        return PrefixHash(chain[found : found + HASH_BYTES]) in computing

    def _start(self, sequence: LiveSequence) -> bool:
        """Take the cached prefix. False, and nothing taken, when the rest of the prompt does not fit."""
        hits = [] if sequence.wants_prompt_logprobs else self.pool.match(sequence.named(self._reusable(sequence)))
        self.pool.acquire(hits)
        sequence.blocks = hits
        if self._missing(sequence, len(sequence.token_ids)) > self.pool.blocks_available:
            self._give_back(sequence)
            return False
        sequence.computed = len(hits) * self.pool.block_size_tokens
        sequence.committed = len(hits)
        sequence.pool_generation = self.pool.generation
        if sequence.cached_tokens is None:
            sequence.cached_tokens = sequence.computed
            self.cache_queries += 0 if sequence.wants_prompt_logprobs else sequence.prompt_count
            self.cache_hits += sequence.computed
        return True

    def _preempt(self, sequence: LiveSequence) -> None:
        self.preemptions += 1
        self.running.remove(sequence)
        self._give_back(sequence)
        self.add(sequence)

    def _give_back(self, sequence: LiveSequence) -> None:
        self.pool.release(sequence.blocks)
        sequence.blocks = []
        sequence.computed = 0
        sequence.committed = 0
        if not sequence.started:
            sequence.prompt_logprobs.clear()

    def _reusable(self, sequence: LiveSequence) -> int:
        """Blocks it may take from the cache. At least the last token is computed: its logits are needed."""
        return (len(sequence.token_ids) - 1) // self.pool.block_size_tokens

    def _missing(self, sequence: LiveSequence, tokens: int) -> int:
        return -(-tokens // self.pool.block_size_tokens) - len(sequence.blocks)

    def _budget(self, planned: Iterable[Chunk]) -> int:
        return self.batched_tokens_max - sum(chunk.end - chunk.start for chunk in planned)


def _order(sequence: LiveSequence) -> tuple[int, int]:
    return sequence.order
