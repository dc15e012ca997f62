"""What the gateway knows of one worker, and of the workers that serve one model."""

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from math import gcd
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from cachecore.holders import Epoch, Worker, WorkerName
from cachecore.prompts.contract import Renderer
from gateway.config import WorkerConfig
from gateway.edge.upstream import UpstreamPool
from gateway.fleet.intake import EventIntake

DEFAULT_BLOCK_SIZE_TOKENS = 16
_NO_EPOCH = Epoch(0)


class Parity(StrEnum):
    """Whether our token ids of a prompt are the worker's."""

    PROVEN = "proven"
    """Equal to its `/tokenize` on the probe prompts, and every prompt counted since was as long as we said."""
    UNVERIFIED = "unverified"
    """It has no `/tokenize` to ask, and has not contradicted us yet."""
    FAILED = "failed"
    """It tokenizes differently: what we know of its cache does not apply, so it gets no affinity."""


class ModelEntry(dict[str, Any]):
    """An entry of a worker's `/v1/models`, kept with every field it came with."""

    @property
    def parent(self) -> str:
        """The base model of an adapter; empty for a base model."""
        return self.get("parent") or ""


@dataclass(slots=True)
class EventEndpoints:
    """Where a worker publishes its KV events; rank r adds r to both ports."""

    endpoint: str
    replay_endpoint: str | None
    topic: str
    ranks: int = 1


class EngineLoad(NamedTuple):
    """What an engine said of its queue."""

    running: int
    waiting: int
    at: float
    """Wall-clock seconds."""


class OpenPool(NamedTuple):
    """An L2 pool that a worker has open, as it said."""

    name: str
    generation: int
    run_blocks: int
    """Runs are cut at multiples of it."""
    codec: str


@dataclass(frozen=True, slots=True)
class TransferAbility:
    """What a worker says that it can do with KV of others (`/server_info`, "transfer")."""

    holder: Worker
    """How it calls itself in plans; not this gateway's name for it."""
    addresses: tuple[str, ...]
    """Where it serves; empty when it only pulls."""
    compatibility: str
    """Digest of its class: KV is exchanged within one."""
    codecs: frozenset[str]
    """That it serves and takes."""
    bytes_per_token: int
    """Of raw KV, all layers."""
    shifted: bool = False
    """Whether it takes runs that stood at other positions."""
    pools: tuple[OpenPool, ...] = ()


@dataclass(slots=True)
class Discovery:
    """What a probe learned of a worker."""

    models: dict[str, ModelEntry]
    epoch: int | None = None
    """The process's own word for its life; None when it has none."""
    block_size_tokens: int = 0
    max_model_len: int = 0
    capacity_requests: int = 0
    """Requests that one rank runs at once; 0 when it does not say."""
    tokenizer_fingerprint: str = ""
    events: EventEndpoints | None = None
    transfer: TransferAbility | None = None
    """None when it moves nothing."""
    transfer_problem: str = ""
    """Why what it says of that is not believed."""


@dataclass(slots=True, eq=False)
class WorkerRecord:
    """One registered worker. Identity is the object; `holder()` names one rank of its present life."""

    name: WorkerName
    url: str
    config: WorkerConfig
    connections: UpstreamPool
    authority: bytes
    """Host header for requests to it."""
    epoch: Epoch = _NO_EPOCH
    discovery: Discovery | None = None
    healthy: bool = False
    draining: bool = False
    failed_probes: int = 0
    reason: str = "not probed yet"
    """Why it is unhealthy; empty when it is not."""
    parity: Parity = Parity.UNVERIFIED
    parity_reason: str = ""
    parity_mismatches: int = 0
    parity_matches: int = 0
    holders: tuple[Worker, ...] = ()
    """One for each rank of its present life."""
    tokenizes: bool = False
    """Whether it answers `/tokenize`."""
    load: EngineLoad | None = None
    """Its last report; None when it makes none."""
    intakes: list[EventIntake] = field(default_factory=list)
    """Of the streams that this gateway follows itself."""
    events_trusted: bool = False
    """Whether all its event streams are followed, here or elsewhere, so that the index speaks for it."""
    requests: int = 0
    failures: int = 0
    registered_at: float = field(default_factory=time.time)

    @classmethod
    def of(cls, config: WorkerConfig) -> "WorkerRecord":
        parts = urlsplit(config.url)
        tls = None
        if parts.scheme == "https":
            import ssl

            tls = ssl.create_default_context()
        host = parts.hostname or ""
        port = parts.port or (443 if tls else 80)
        shown = f"[{host}]" if ":" in host else host
        name = config.name or f"{shown}:{port}"
        return cls(
            WorkerName(name), config.url.rstrip("/"), config, UpstreamPool(host, port, tls), f"{shown}:{port}".encode()
        )

    def __repr__(self) -> str:
        state = "healthy" if self.healthy else self.reason
        return f"WorkerRecord({self.name}, epoch={self.epoch}, {state})"

    def holder(self, rank: int = 0) -> Worker:
        return Worker(self.name, self.epoch, rank)

    def vouches_for(self, holder: Worker) -> bool:
        """Whether the worker lives, in this life, and its own events say what it holds."""
        return self.healthy and self.events_trusted and self.epoch == holder.epoch

    @property
    def eligible(self) -> bool:
        return self.healthy and not self.draining

    @property
    def block_size_tokens(self) -> int:
        """The engine's own block size; 0 while unknown."""
        if self.config.block_size_tokens:
            return self.config.block_size_tokens
        return self.discovery.block_size_tokens if self.discovery else 0

    @property
    def transfer(self) -> TransferAbility | None:
        return self.discovery.transfer if self.discovery else None

    @property
    def models(self) -> Mapping[str, ModelEntry]:
        return self.discovery.models if self.discovery else {}


@dataclass(slots=True, eq=False)
class ModelPool:
    """The workers that serve one base model, and how its prompts are named."""

    model: str
    renderer: Renderer | None = None
    """None while no way to tokenize is known; prompts are then named by the worker's own `/tokenize`."""
    renderer_problem: str = ""
    block_size_tokens: int = DEFAULT_BLOCK_SIZE_TOKENS
    workers: list[WorkerRecord] = field(default_factory=list)
    adapters: set[str] = field(default_factory=set)
    transfers: bool = False
    """Whether some worker says that it can move KV."""
    generation: int = 0
    """Grows whenever names made before are void: another block size, another renderer."""

    def refresh_block_size(self) -> bool:
        """Recompute the canonical block size, the greatest common divisor of the engines'. True when it changed."""
        size = 0
        for worker in self.workers:
            size = gcd(size, worker.block_size_tokens)
        size = size or DEFAULT_BLOCK_SIZE_TOKENS
        if size == self.block_size_tokens:
            return False
        self.block_size_tokens = size
        self.generation += 1
        return True
