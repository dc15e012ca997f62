"""Means of texts' KV, out of pools and into them: what a worker reads in place of a passage's own, and what it adds.

A passage comes with the KV of the one context in which somebody computed it. Where a pool has the mean of its text, or
of a part of it, over several, that is nearer to what this prompt would compute, and takes its place before the passage
is repaired (docs/decisions/means.md). It is a help and nothing more: what is not there in time is done without.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import numpy as np
from torch import Tensor

from cachecore.blocks import PrefixHash, pack_tokens
from cachecore.chunks import Chunker, shared
from cachecore.kv.codecs.contract import DTYPES, CodecError, KvFacts, Origin
from cachecore.kv.codecs.registry import codec_named
from cachecore.kv.layout import LayerKv
from cachecore.kv.means import MeanKv
from cachecore.kv.rope import RopeTable
from cachecore.scope import Keyring, Naming
from cachecore.store.pools import Accepted, Extent, Found, KvPool, SealedFrame
from cachecore.store.pools.means import Contexts, MeanShape, Text
from cachecore.transfer.errors import FrameError, Reason, TransferError
from cachecore.transfer.frames import Frame, FrameWriter, open_frame
from workers.transfer.loads import Load
from workers.transfer.passages import Better, PassageLoad
from workers.transfer.shape import KvShape

T = TypeVar("T")

logger = logging.getLogger("ropeway.pools")

CONTEXTS_MIN = 2
"""The KV of one context is no better than the passage's own."""
_NOWHERE = Origin(0, 0)
"""Keys of a mean are without rotation, and codecs pack each token by itself: all layers go as if they were one, since a
call for each costs more than what it does for a short text."""
_BEFORE_TOKENS = 32
"""An anchor is found within so many tokens of where its text begins, nearly always."""
READ_SECONDS_MAX = 0.5
"""What reading means may hold a prompt up by, at most."""


class MeanText(NamedTuple):
    """A text with a mean, found by its anchor."""

    naming: Naming
    anchor: PrefixHash
    token_ids: Sequence[int]
    lead: int
    """Tokens before the anchor."""


class Known(NamedTuple):
    """A mean in a pool."""

    text: MeanText
    contexts: Contexts
    frame: Frame

    def extent_in(self, prompt: Sequence[int], anchor: int) -> tuple[int, int]:
        """The tokens of a prompt that say the same, the anchor being at `anchor`."""
        before, behind = shared(self.text.token_ids, self.text.lead, prompt, anchor)
        return anchor - before, anchor + behind


@dataclass(slots=True)
class MeanStore:
    """The means that one worker can use and add to. Belongs to the transfers' loop."""

    pools: Mapping[str, KvPool]
    shape: KvShape
    rope: RopeTable
    keyring: Keyring
    codec: str
    executor: Executor
    counts: Counter[str] = field(default_factory=Counter)
    """`used`: parts of passages that a mean took the place of; `stored`: means put into a pool."""

    async def has(self, naming: Naming, anchor: PrefixHash, pool: KvPool) -> bool:
        """To be asked first: most chunks are no anchors, and to look for them is no miss."""
        return await pool.contains(self._kind(naming).key(anchor))

    async def holder(self, naming: Naming, anchor: PrefixHash) -> KvPool | None:
        """The first pool that has it."""
        for pool in self.pools.values():
            if await self.has(naming, anchor, pool):
                return pool
        return None

    async def find(self, naming: Naming, anchor: PrefixHash, pool: KvPool) -> Known | None:
        """What a pool has there; None also for what does not authenticate."""
        kind = self._kind(naming)
        answer = await pool.get(kind.key(anchor))
        if not isinstance(answer, Found):
            return None
        data = b"".join(piece for frame in answer.frames for piece in frame.buffers)
        try:
            frame = await self._elsewhere(open_frame, bytearray(data), self.keyring.frame_key)
            contexts = kind.contexts_of(frame.header, anchor)
        except TransferError as error:
            logger.info("a mean that is of no use: %s", error)
            return None
        text = MeanText(naming, anchor, np.frombuffer(frame.token_ids, "<u4").tolist(), frame.header.position)
        return Known(text, contexts, frame)

    async def put(self, text: MeanText, pool: KvPool, contexts: Contexts, mean: MeanKv) -> bool:
        """In place of what the pool had."""
        kind = self._kind(text.naming)
        sealed = await self._elsewhere(self._sealed, kind, text, contexts, mean)
        await pool.evict(kind.key(text.anchor))
        stored = isinstance(await pool.put(kind.run(text.anchor, contexts), [sealed]), Accepted)
        self.counts["stored"] += stored
        return stored

    async def mean_of(self, known: Known) -> MeanKv:
        """To be added to. Raises FrameError."""
        return await self._elsewhere(self._mean_of, known)

    async def turned(self, known: Known, part: slice, position: int) -> tuple[Tensor, Tensor]:
        """Keys and values [layers, tokens, kv_heads, head_dim] of a part, as if it began at `position`.

        Raises FrameError."""
        return await self._elsewhere(self._turned, known, part, position)

    def _kind(self, naming: Naming) -> MeanShape:
        shape = self.shape
        return MeanShape(
            shape.compatibility,
            naming.root,
            naming.scope.key_id,
            shape.layers,
            shape.kv_heads,
            shape.head_dim,
            shape.head_dim,
            shape.dtype,
            self.codec,
        )

    def _sealed(self, kind: MeanShape, text: MeanText, contexts: Contexts, mean: MeanKv) -> SealedFrame:
        dtype = DTYPES[self.shape.dtype]
        layers = LayerKv(mean.keys.flatten(0, 1).to(dtype), mean.values.flatten(0, 1).to(dtype))
        payload = codec_named(self.codec).encode(layers, _NOWHERE, None).payload
        header = kind.header(Text(text.anchor, len(text.token_ids), text.lead), contexts, len(payload))
        frame = b"".join(FrameWriter(self.keyring.frame_key).seal(header, [payload, pack_tokens(text.token_ids)]))
        return SealedFrame(Extent(0, self.shape.layers), (frame,))

    def _mean_of(self, known: Known) -> MeanKv:
        header, layers = known.frame.header, self.shape.layers
        heads, keys_dim, values_dim = header.kv_heads.size, header.head_dim, header.value_dim
        tokens = layers * header.tokens
        kv = known.frame.payload[: sum(header.layer_bytes)]
        facts = KvFacts(header.codec, *_NOWHERE, tokens, heads, keys_dim, values_dim, header.dtype)
        try:
            keys, values = codec_named(header.codec).decode(kv, facts, _NOWHERE.position, None)
        except CodecError as error:
            raise FrameError(f"a payload that does not decode: {error}", Reason.UNUSABLE) from error
        keys, values = (part.float().view(layers, header.tokens, heads, -1) for part in (keys, values))
        return MeanKv(keys, values, known.contexts.number)

    def _turned(self, known: Known, part: slice, position: int) -> tuple[Tensor, Tensor]:
        mean, dtype = self._mean_of(known).part(part), DTYPES[self.shape.dtype]
        return mean.keys_at(position, self.rope).to(dtype), mean.values.to(dtype)

    async def _elsewhere(self, work: Callable[..., T], *arguments: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(self.executor, work, *arguments)


class MeanReader:
    """Puts means in the place of passages' own KV."""

    def __init__(self, store: MeanStore) -> None:
        self._store = store

    async def improve(self, load: Load) -> None:
        """Look for the means of what a load's passages say, for as long as they may wait. Raises nothing."""
        patience = min((passage.pull.plan.deadline_seconds for passage in load.passages), default=0.0)
        try:
            async with asyncio.timeout(min(patience, READ_SECONDS_MAX)):
                await self._improve(load.naming, load.passages)
        except TimeoutError:
            logger.info("means were not read in time")
        except Exception:
            logger.exception("means were not read")

    async def _improve(self, naming: Naming, passages: Sequence[PassageLoad]) -> None:
        # What was pulled begins where a block does, and a text's anchor may be before that.
        first = max(0, passages[0].start - naming.scope.block_size_tokens - _BEFORE_TOKENS)
        prompt = passages[0].prompt
        chunks = list(Chunker(naming).cut(pack_tokens(prompt[first : passages[-1].end])))
        pools = await asyncio.gather(*(self._store.holder(naming, chunk.name) for chunk in chunks))
        covered = first
        for chunk, pool in zip(chunks, pools, strict=True):
            anchor = first + chunk.start
            if pool is not None and anchor >= covered:
                known = await self._store.find(naming, chunk.name, pool)
                if known is not None and known.contexts.number >= CONTEXTS_MIN:
                    start, end = known.extent_in(prompt, anchor)
                    await self._take(passages, known, anchor, max(start, covered), end)
                    covered = end

    async def _take(
        self, passages: Sequence[PassageLoad], known: Known, anchor: int, said_from: int, said_to: int
    ) -> None:
        """What it says of the prompt's tokens `said_from` to `said_to`, as far as these are in passages."""
        for passage in passages:
            start, end = max(said_from, passage.start), min(said_to, passage.end)
            if start < end:
                offset = known.text.lead - anchor
                part = slice(start + offset, end + offset)
                better = Better(start, *await self._store.turned(known, part, passage.stands_at(start)))
                passage.better.append(better)
                self._store.counts["used"] += 1
