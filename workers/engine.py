"""The line between a worker's HTTP surface and the engine behind it.

`workers.openai` speaks OpenAI's API over any `Engine`; `workers.reference` and `workers.simulated` implement it.
"""

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from cachecore.prompts.contract import Renderer


@dataclass(frozen=True, slots=True)
class Sampling:
    """How to draw tokens; names and defaults are OpenAI's (top_k, min_p, ignore_eos: vLLM's)."""

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    """0 draws from the whole vocabulary."""
    min_p: float = 0.0
    seed: int | None = None
    logprobs: int | None = None
    """How many alternatives to report per token; 0 reports the chosen one alone; None reports nothing."""
    prompt_logprobs: int | None = None
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Generation:
    """One sequence to generate. A request with n > 1 or several prompts becomes several of these."""

    request_id: str
    """Unique among live ones."""
    token_ids: Sequence[int]
    sampling: Sampling
    cache_salt: str = ""
    adapter: str = ""
    priority: int = 0
    """Smaller runs sooner, as in vLLM."""
    kv_transfer_params: Mapping[str, Any] | None = None


class TokenLogprob(NamedTuple):
    token_id: int
    logprob: float
    top: Sequence[tuple[int, float]] = ()
    """(token id, logprob), best first."""


@dataclass(slots=True)
class StepOutput:
    """What one engine step brought for one generation."""

    token_ids: Sequence[int] = ()
    """New tokens (a stop token is included)."""
    logprobs: Sequence[TokenLogprob] = ()
    """One per new token where asked for."""
    prompt_logprobs: Sequence[TokenLogprob | None] | None = None
    """On the first output only, where asked for; None for the first token of the prompt."""
    finish_reason: str | None = None
    """`stop` or `length`; set on the last output."""
    cached_tokens: int = 0
    """Prompt tokens that were not computed. Final from the first output on."""


class EngineError(Exception):
    """The engine refuses a generation (too long, unknown adapter). `status` is the HTTP status to answer with."""

    def __init__(self, message: str, status: int = 400) -> None:
        super().__init__(message)
        self.status = status


@dataclass(slots=True)
class EngineMetrics:
    """What `/metrics` reports under vLLM's names. Counters only grow."""

    requests_running: int = 0
    requests_waiting: int = 0
    kv_cache_usage: float = 0.0
    """Share of KV blocks in use by running requests, 0..1."""
    prefix_cache_queries: int = 0
    """Prompt tokens looked up."""
    prefix_cache_hits: int = 0
    """Prompt tokens found."""
    prompt_tokens: int = 0
    generation_tokens: int = 0
    preemptions: int = 0
    requests_finished: dict[str, int] = field(default_factory=dict)
    """By finish reason; `abort` for those whose client left."""


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """What a worker says of itself on `/v1/models` and `/server_info`."""

    model: str
    """The served name."""
    epoch: int
    """One life of this process: its start time in nanoseconds."""
    block_size_tokens: int
    blocks_total: int
    max_model_len: int
    dtype: str = ""
    revision: str = ""
    root: str = ""
    """Where the weights came from."""
    sequences_max: int = 0
    """Generations that run at once; 0 when there is no limit."""


class Engine(Protocol):
    info: EngineInfo
    renderer: Renderer

    @property
    def metrics(self) -> EngineMetrics: ...

    async def start(self) -> None: ...

    async def stop(self) -> None:
        """End the loop; live generations end with finish reason `abort`. May be called twice."""
        ...

    def generate(self, generation: Generation) -> AsyncIterator[StepOutput]:
        """Run one generation. Closing the iterator aborts it within one step. Raises EngineError before any output."""
        ...

    def stop_token_ids(self) -> Sequence[int]:
        """Tokens that end a generation unless `ignore_eos`."""
        ...

    async def reset_prefix_cache(self) -> None: ...

    async def cached_blocks(self) -> Mapping[int, int]:
        """Copies of every block that a prefix can hit, by the handle that its KV events carry. All of it has been
        announced by the time this returns."""
        ...
