"""Runs that were computed at another position of another prompt, on their way to where this prompt says the same.

They come into memory of their own, keys turned to where they will stand, and become blocks of the prompt once an engine
has repaired them. What they say has been compared by then: a run's names follow from the name before it and its tokens,
so the name that a plan gives its last block is that of this prompt's own tokens, or the plan is refused (`plans`).
Frames that bring token ids are compared once more.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from typing import NamedTuple

from torch import Tensor

from cachecore.blocks import pack_tokens
from cachecore.chunks import same_tokens
from cachecore.kv.codecs.contract import CodecError, KvFacts
from cachecore.kv.codecs.registry import codec_named
from cachecore.kv.rope import RopeTable
from cachecore.scope import Fidelity
from cachecore.transfer.errors import FrameError, Reason
from cachecore.transfer.frames import Frame
from cachecore.transfer.plan import Pull
from cachecore.transfer.transport import Fetched, Outcome, Refused
from workers.transfer.placing import PlacingSink
from workers.transfer.runs import Edges, HeldRun


class Better(NamedTuple):
    """KV of some of a passage's tokens that is nearer to what this prompt would compute than the passage's own."""

    start: int
    """In the prompt."""
    keys: Tensor
    """[layers, tokens, kv_heads, head_dim], turned to where the passage's keys are (`PassageLoad.stands_at`)."""
    values: Tensor


class PassageLoad:
    """One run, for tokens `start` to `end` of a sequence."""

    def __init__(self, pull: Pull, token_ids: Sequence[int], size: int) -> None:
        """`token_ids` of the whole prompt; `size` is a block's."""
        self.pull, plan = pull, pull.plan
        self.start = plan.target_position
        self.end = self.start + plan.run.blocks * size
        self.prompt = token_ids
        self.token_ids = token_ids[self.start : self.end]
        self.position = plan.source_position
        """Of the first token, where it was computed."""
        self.borrowed: Sequence[int] = ()
        """This worker's own blocks, referenced until they have been read; else `keys` and `values` come."""
        self.skipped = 0
        """Tokens of the borrowed blocks before the first."""
        self.keys: Tensor | None = None
        """[layers, tokens, kv_heads, head_dim], turned to `start`; complete when it has been fetched."""
        self.values: Tensor | None = None
        self.better: list[Better] = []
        self.layers = 0
        self.outcome: Outcome | None = None
        """None until it has settled."""

    def __repr__(self) -> str:
        return f"PassageLoad({self.start}..{self.end}, {self.outcome})"

    @property
    def is_good(self) -> bool:
        return isinstance(self.outcome, Fetched)

    @property
    def is_alone(self) -> bool:
        """Nothing came before it where it was computed."""
        return self.position == 0

    def stands_at(self, token: int) -> int:
        """The position that the keys of the prompt's `token` are turned to: this prompt's, but for borrowed ones."""
        return token - self.start + (self.position if self.borrowed else self.start)

    def improve(self, keys: Tensor, values: Tensor) -> None:
        """Put what is better in its place, in the passage's [layers, tokens, kv_heads, head_dim]."""
        for start, better_keys, better_values in self.better:
            place = slice(start - self.start, start - self.start + better_keys.shape[1])
            keys[:, place], values[:, place] = better_keys.to(keys.device), better_values.to(values.device)

    def miss(self) -> None:
        """It is this worker's own, and not here, or there is no room for it."""
        self.outcome = Refused(Reason.STALE)

    def borrow(self, held: HeldRun, edges: Edges, token_ids: Sequence[int], start_min: int, end_max: int) -> None:
        """It is this worker's own. What its neighbours hold of the same text comes along: passages seldom begin and
        end where blocks do. It stays within tokens `start_min` to `end_max` of the prompt."""
        size = len(held.held[0].token_ids)
        ahead = (
            same_tokens(reversed(edges.before[1]), reversed(token_ids[start_min : self.start])) if edges.before else 0
        )
        best = max(edges.after, key=lambda one: same_tokens(one[1], token_ids[self.end : end_max]), default=None)
        behind = 0 if best is None else same_tokens(best[1], token_ids[self.end : end_max])
        first = [edges.before[0]] if ahead and edges.before else []
        last = [best[0]] if behind and best else []
        self.borrowed = [*first, *held.blocks, *last]
        self.skipped = size - ahead if ahead else 0
        self.start, self.end, self.position = self.start - ahead, self.end + behind, self.position - ahead
        self.outcome = Fetched(0, 0, 0.0)


class PassageSink(PlacingSink):
    """A `cachecore.transfer.transport.Sink` that fills a passage's own memory."""

    def __init__(
        self, passage: PassageLoad, layers: int, rope: RopeTable, executor: Executor, wake: Callable[[], None]
    ) -> None:
        super().__init__(executor)
        self._passage = passage
        self._layers = layers
        self._rope = rope
        self._wake = wake

    async def take(self, frame: Frame) -> None:
        """Raises FrameError, also for the frame before."""
        if frame.header.fidelity > Fidelity.QUANTIZED:
            raise FrameError(f"KV that is {frame.header.fidelity.name}", Reason.UNEXPECTED)
        if frame.header.with_tokens and bytes(frame.token_ids) != pack_tokens(self._passage.token_ids):
            raise FrameError("a run that says something else than the prompt", Reason.UNEXPECTED)
        await self.hand_over(self._place, frame)

    def _place(self, frame: Frame) -> None:
        passage, header = self._passage, frame.header
        shape = (header.tokens, header.kv_heads.size, header.head_dim, header.value_dim, header.dtype)
        for layer, payload in frame.layer_payloads():
            try:
                facts = KvFacts(header.codec, layer, header.position, *shape)
                kv = codec_named(header.codec).decode(payload, facts, passage.start, self._rope)
            except CodecError as error:
                raise FrameError(f"a payload that does not decode: {error}", Reason.UNUSABLE) from error
            if passage.keys is None or passage.values is None:
                passage.keys, passage.values = (part.new_empty((self._layers, *part.shape)) for part in kv)
            passage.keys[layer], passage.values[layer] = kv
            passage.layers = layer + 1
        self._wake()
