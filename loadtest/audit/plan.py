"""What an audit is asked to replay."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf
from typing import NamedTuple

from loadtest.audit.runs import AMPLE_BLOCKS
from loadtest.commands import UsageError
from loadtest.hardware import Codec, Link
from workers.timing import TimingProfile

HOST_RATIO = 2
"""Host memory beside an engine's own: what SGLang's HiCache takes by default."""


class Cache(NamedTuple):
    """KV memory of each engine, as it was asked for."""

    text: str = "engine"
    """`engine`, `ample`, a number of blocks, or a percentage of the trace's distinct blocks over all nodes."""

    def blocks(self, profile: TimingProfile, block_size_tokens: int, distinct_blocks: int, nodes: int) -> int:
        """Raises UsageError for none at all."""
        blocks = self._blocks(profile, block_size_tokens, distinct_blocks, nodes)
        if blocks < 1:
            raise UsageError(f"a cache of {self.text} leaves no block of {block_size_tokens} tokens to an engine")
        return blocks

    def _blocks(self, profile: TimingProfile, block_size_tokens: int, distinct_blocks: int, nodes: int) -> int:
        if self.text == "engine":
            return profile.kv_blocks(block_size_tokens)
        if self.text == "ample":
            return AMPLE_BLOCKS
        if self.text.endswith("%"):
            return int(float(self.text[:-1]) / 100 * distinct_blocks / nodes)
        return int(self.text)


@dataclass(frozen=True, slots=True)
class Plan:
    """What to replay: every policy on every fleet."""

    profile: TimingProfile
    policies: Sequence[str]
    gpus: int = 1
    """Of one engine."""
    nodes: Sequence[int] = (8,)
    loads: Sequence[float] = (1.0,)
    """Without any, each policy's capacity is searched for."""
    caches: Sequence[Cache] = (Cache(),)
    links: Sequence[Link | None] = (None,)
    codec: Codec = field(default_factory=lambda: Codec("raw", 1.0, inf))
    """Of KV that is pulled."""
    seeds: int = 1
    host_bytes: float | None = None
    """Host memory for KV behind each engine, in the bound that has some; None for `HOST_RATIO`."""
    engine_priorities: bool = False
    spreads_arrivals: bool = True
    """Whether stamps on a grid are spread over it."""
    prior_factor: float = 1.0
    dollars_per_gpu_hour: float | None = None
