"""The line between a worker's HTTP surface and the engine behind it.

`workers.openai` speaks OpenAI's API over any `Engine`; `workers.reference` and `workers.simulated` implement it.
"""

from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, NamedTuple, Protocol

from cachecore.prompts.contract import Renderer
from cachecore.scope import Fidelity


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
    """Under `cachecore.transfer.plan.PARAMETER` a list of plans; what is wrong with one costs that plan alone."""
    fidelity: Fidelity = Fidelity.EXACT
    """The worst KV that it may be answered from."""


class TokenLogprob(NamedTuple):
    token_id: int
    logprob: float
    top: Sequence[tuple[int, float]] = ()
    """(token id, logprob), best first."""


class TransferOutcome(StrEnum):
    FETCHED = "fetched"
    """Everything that was missing and planned has come."""
    HELD = "held"
    """Nothing had to be fetched: what was planned was there, or just arriving for somebody else."""
    REFUSED = "refused"
    """A plan was not carried out, or its source said no, and that part was computed."""
    FAILED = "failed"
    """Part of it did not come, or not in time, and was computed."""


@dataclass(frozen=True, slots=True)
class TransferReport:
    """What became of the plans of a generation."""

    outcome: TransferOutcome
    reason: str = ""
    """`cachecore.transfer.errors.Reason` of the first plan that was refused or failed."""
    tokens: int = 0
    """Of the prompt, that came and were used."""
    payload_bytes: int = 0
    seconds: float = 0.0
    """From the beginning of the first fetch to the end of the last."""
    sources: int = 0
    """That something came from."""

    def header(self) -> str:
        """As `x-ropeway-transfer` has it."""
        parts = [f"outcome={self.outcome.value}"]
        if self.reason:
            parts.append(f"reason={self.reason}")
        numbers = f"tokens={self.tokens}; bytes={self.payload_bytes}; seconds={self.seconds:.6f}"
        return "; ".join((*parts, numbers, f"sources={self.sources}"))


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
    fidelity: Fidelity = Fidelity.EXACT
    """The worst of the KV that the prompt was answered from. Final from the first output on."""
    transfer: TransferReport | None = None
    """On the first output only; None where there was no plan."""


class EngineError(Exception):
    """The engine refuses a generation (too long, unknown adapter). `status` is the HTTP status to answer with."""

    def __init__(self, message: str, status: int = 400) -> None:
        super().__init__(message)
        self.status = status


@dataclass(slots=True)
class TransferMetrics:
    """What `/metrics` reports as `ropeway_worker_transfer_*`. Counters only grow, but for `loading`."""

    loading: int = 0
    """Generations that wait for KV."""
    pulls: Counter[tuple[str, str]] = field(default_factory=Counter)
    """Plans, by `TransferOutcome` value and reason."""
    pulled_tokens: int = 0
    pulled_bytes: int = 0
    pull_seconds: float = 0.0
    """Of the pulls that were fetched, all together."""
    served: int = 0
    """Pulls of others, served to the end."""
    served_bytes: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    """Pulls of others that were refused, by reason."""


@dataclass(slots=True)
class HostMetrics:
    """What `/metrics` reports as `ropeway_worker_host_*`: KV in host memory (tier L1). Counters only grow, but for the
    first three."""

    blocks: int = 0
    bytes: int = 0
    bytes_max: int = 0
    hit_tokens: int = 0
    """That came back to the engine's memory."""
    stored_blocks: int = 0
    removed_blocks: int = 0
    """For want of room."""
    saved_bytes: int = 0
    """Copied from the engine's memory; less than was stored where blocks were still there."""
    fetched_bytes: int = 0
    """Copied back."""
    copy_seconds: float = 0.0
    """That the engine's thread spent on copies."""


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
    transfer: TransferMetrics | None = None
    """None for an engine that moves no KV."""
    host: HostMetrics | None = None
    """None for an engine that keeps no KV in host memory."""


@dataclass(frozen=True, slots=True)
class TransferInfo:
    """The `transfer` of `/server_info`: what the engine can move, and as whom."""

    holder: str
    """`holder_id` of `cachecore.index.schema`: what plans name as source and target."""
    addresses: Sequence[str]
    """Where it serves: `scheme://host:port`."""
    compatibility: str
    """Hex digest of the class; only equal ones exchange KV."""
    codecs: Sequence[str]
    """What it serves and takes."""
    bytes_per_token: int
    """As the engine keeps it: all layers, keys and values."""
    shifted: bool = False
    """Whether it takes runs that were computed at another position."""
    pools: Sequence[Mapping[str, Any]] = ()
    """Pools that it has open: `name`, `generation`, `run_blocks`, `codec`."""

    def document(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__slots__}


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
    transfer: TransferInfo | None = None
    """None while the engine moves no KV."""


class Engine(Protocol):
    info: EngineInfo
    """May be replaced: an address is known once the engine has started."""
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
