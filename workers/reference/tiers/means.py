"""Text that prompts have in common, noticed as it is computed, and averaged over what came before it.

    engine's thread ── note(run) ──► queue ──► cut into chunks ──► seen behind something else? ──► read, join, put
                                                                                       (transfers' loop and threads)

The first time, a chunk is only remembered: most text never comes again. The second time, behind something else, all
that both prompts say around it becomes a mean, if the first copy is still in the cache; the chunk is its anchor. The
mean grows with each new context up to CONTEXTS_MAX, and is left alone then. A context that says less of the text makes
the text shorter, if most of it remains. What was computed at its place twice is one context, as its name in the chain
is the same.

Only exact KV is averaged. The queue is bounded; what does not fit goes unnoticed, as does what was evicted before its
turn came.
"""

import asyncio
import contextlib
import logging
from collections import Counter, OrderedDict, deque
from collections.abc import Sequence
from typing import NamedTuple

import torch

from cachecore.blocks import HASH_BYTES, PrefixHash, pack_tokens
from cachecore.chunks import Chunker, shared
from cachecore.kv.means import CONTEXTS_MAX, MeanKv
from cachecore.scope import Fidelity, Naming
from cachecore.store.pools import KvPool
from cachecore.store.pools.means import NO_CONTEXTS, Contexts
from cachecore.transfer.errors import TransferError
from workers.reference.kv_pool import NamedRun
from workers.transfer.means import Known, MeanStore, MeanText
from workers.transfer.pages import stretches_of
from workers.transfer.runs import HeldRun
from workers.transfer.source import KvSource

logger = logging.getLogger("ropeway.pools")

RUNS_MAX = 256
"""That wait to be looked at."""
CHUNKS_MAX = 50_000
"""Remembered, the least recently seen being forgotten first: half a million tokens, with their ids some 50 MB."""
TEXT_TOKENS_MIN = 24
TEXT_TOKENS_MAX = 1024
"""Longer ones become several."""


class Sighting(NamedTuple):
    """Where a chunk was computed: `start` tokens into a run."""

    run: NamedRun
    start: int

    @property
    def context(self) -> PrefixHash:
        """Names all that came before the chunk, and where the chunk begins behind it."""
        return _name_at(self.run, self.start)


class Sightings:
    """What was seen of which chunk. See the module's opening for the rules."""

    def __init__(self, chunks_max: int = CHUNKS_MAX) -> None:
        self._chunks_max = chunks_max
        self._seen: OrderedDict[PrefixHash, tuple[set[PrefixHash], list[Sighting]]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._seen)

    def add(self, name: PrefixHash, sighting: Sighting) -> Sequence[Sighting]:
        """Those that are to join the chunk's mean now."""
        contexts, waiting = self._seen.setdefault(name, (set(), []))
        self._seen.move_to_end(name)
        while len(self._seen) > self._chunks_max:
            self._seen.popitem(last=False)
        if sighting.context in contexts or len(contexts) >= CONTEXTS_MAX:
            return ()
        contexts.add(sighting.context)
        waiting.append(sighting)
        if len(contexts) == 1:
            return ()
        due = list(waiting)
        waiting.clear()
        return due

    def restart(self, name: PrefixHash, sighting: Sighting) -> None:
        """Its mean is gone: this is the first copy of another."""
        self._seen[name] = ({sighting.context}, [sighting])


class MeanKeeper:
    """`note` is for the engine's thread, all else for the transfers' loop."""

    def __init__(self, store: MeanStore, source: KvSource, sightings: Sightings | None = None) -> None:
        self._store = store
        self._source = source
        self._sightings = sightings or Sightings()
        self._runs: deque[NamedRun] = deque()
        self._filled = asyncio.Event()
        self._loop = asyncio.get_running_loop()

    def __repr__(self) -> str:
        return f"MeanKeeper({len(self._sightings)} chunks, {len(self._runs)} runs waiting)"

    @property
    def counts(self) -> Counter[str]:
        return self._store.counts

    def note(self, run: NamedRun) -> None:
        """Blocks that were just named."""
        if run.naming is None or run.fidelity is not Fidelity.EXACT or len(self._runs) >= RUNS_MAX:
            return
        self._runs.append(run)
        with contextlib.suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(self._filled.set)

    async def run(self) -> None:
        """Look at what is noted, until cancelled."""
        while True:
            await self._filled.wait()
            self._filled.clear()
            while self._runs:
                try:
                    await self._look_at(self._runs.popleft())
                except Exception:
                    logger.exception("a mean was not kept")

    async def _look_at(self, run: NamedRun) -> None:
        if run.naming is None:
            return
        covered = 0
        for chunk in Chunker(run.naming).cut(pack_tokens(run.token_ids)):
            sighting = Sighting(run, chunk.start)
            due = self._sightings.add(chunk.name, sighting)
            if due and chunk.start >= covered:
                ends = [await self._join(run.naming, chunk.name, due, pool) for pool in self._store.pools.values()]
                covered = max([covered, *ends])

    async def _join(self, naming: Naming, anchor: PrefixHash, due: Sequence[Sighting], pool: KvPool) -> int:
        """Where in the last one's run the text ends."""
        newest = due[-1]
        is_there = await self._store.has(naming, anchor, pool)
        known = await self._store.find(naming, anchor, pool) if is_there else None
        if known is None and (len(due) == 1 or not pool.stats().up):
            # There is none any more; or there may be one, to which more has been added than is known here.
            self._sightings.restart(anchor, newest)
            return 0
        others = [(sighting.run.token_ids, sighting.start) for sighting in due[:-1]]
        if known is not None:
            others.append((known.text.token_ids, known.text.lead))
        before, behind = _common(newest, others)
        if before + behind < max(TEXT_TOKENS_MIN, len(known.text.token_ids) // 2 if known is not None else 0):
            return 0
        await self._add(MeanText(naming, anchor, _said(newest, before, behind), before), due, known, pool)
        return newest.start + behind

    async def _add(self, text: MeanText, due: Sequence[Sighting], known: Known | None, pool: KvPool) -> None:
        count, mean, contexts = len(text.token_ids), None, NO_CONTEXTS
        if known is not None:
            start = known.text.lead - text.lead
            mean = (await self._store.mean_of(known)).part(slice(start, start + count))
            contexts = known.contexts
        before = contexts.number
        for sighting in due:
            if sighting.context in contexts or contexts.number >= CONTEXTS_MAX:
                continue
            one = await self._read(sighting.run, sighting.start - text.lead, count)
            if one is not None:
                mean = one if mean is None else mean.joined(one)
                contexts = contexts.joined(Contexts.of(sighting.context))
        if mean is not None and contexts.number > before:
            await self._store.put(text, pool, contexts, mean)

    async def _read(self, run: NamedRun, start: int, count: int) -> MeanKv | None:
        """Tokens of a run; None when they have been evicted."""
        size = _size_of(run)
        first, end = start // size, -(-(start + count) // size)
        wanted = slice(start - first * size, start - first * size + count)
        position = run.first_block * size + start
        with self._source.lender.lend(_name_at(run, end * size - 1), end - first, Fidelity.EXACT) as held:
            if held is None or held.held[0].naming is None or run.naming is None:
                return None
            if held.held[0].naming.root != run.naming.root:
                return None
            loop = asyncio.get_running_loop()
            try:
                return await loop.run_in_executor(self._source.executor, self._copied, held, wanted, position)
            except TransferError:  # the lender does not vouch for it any more
                return None

    def _copied(self, run: HeldRun, wanted: slice, position: int) -> MeanKv:
        source = self._source
        assert source.rope is not None  # noqa: S101  no means are kept where it is not known
        layers = [source.pages.read(layer, stretches_of(run.blocks)) for layer in range(source.shape.layers)]
        keys = torch.stack([layer.keys[wanted].cpu() for layer in layers])
        values = torch.stack([layer.values[wanted].cpu() for layer in layers])
        source.lender.vouch(run)
        return MeanKv.of(keys, values, position, source.rope)


def _size_of(run: NamedRun) -> int:
    return len(run.token_ids) * HASH_BYTES // len(run.chain)


def _name_at(run: NamedRun, token: int) -> PrefixHash:
    """Of the block that a token of the run is in."""
    block = token // _size_of(run)
    return PrefixHash(run.chain[block * HASH_BYTES : (block + 1) * HASH_BYTES])


def _common(newest: Sighting, others: Sequence[tuple[Sequence[int], int]]) -> tuple[int, int]:
    """How many tokens all say before the chunk, and how many from it on."""
    found = [shared(newest.run.token_ids, newest.start, tokens, start) for tokens, start in others]
    before, behind = (min(part) for part in zip(*found, strict=True))
    behind = min(behind, TEXT_TOKENS_MAX)
    return min(before, TEXT_TOKENS_MAX - behind), behind


def _said(sighting: Sighting, before: int, behind: int) -> Sequence[int]:
    return sighting.run.token_ids[sighting.start - before : sighting.start + behind]
