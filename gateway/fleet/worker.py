"""What the gateway knows of one worker, and of the workers that serve one model."""

import asyncio
import ssl
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from math import gcd
from urllib.parse import urlsplit

from cachecore.holders import Epoch, Worker, WorkerName
from cachecore.prompts.contract import Renderer
from gateway.config import RoleName, WorkerConfig
from gateway.edge.upstream import UpstreamPool
from gateway.fleet.engines.contract import (
    Discovery,
    EngineAdapter,
    EngineLoad,
    EngineTraits,
    Lack,
    ModelEntry,
    TransferAbility,
)
from gateway.fleet.engines.generic import GenericAdapter
from gateway.fleet.intake import Intake
from gateway.fleet.trust import Trust, TrustLevel
from policies.state.breakers import Breaker

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
    adapter: EngineAdapter = field(default_factory=GenericAdapter)
    """How it is asked; of any OpenAI server until it is known which engine it is."""
    traits: EngineTraits = field(default_factory=EngineTraits)
    """Its adapter's."""
    discovery: Discovery | None = None
    lacks: tuple[Lack, ...] = ()
    """What it was started without, found out once in a life."""
    asleep: bool = False
    """It has given up its cache until it is woken."""
    healthy: bool = False
    draining: bool = False
    failed_probes: int = 0
    probed: asyncio.Event = field(default_factory=asyncio.Event)
    """Set once it has been asked whether it is well, whatever it said."""
    reason: str = "not probed yet"
    """Why it is unhealthy; empty when it is not."""
    parity: Parity = Parity.UNVERIFIED
    parity_reason: str = ""
    parity_open: bool = False
    """It did not answer when it was put to proof."""
    parity_answers: int = 0
    """A bit for each of the last answers, the latest lowest: whether its prompt was counted otherwise than by us."""
    parity_matches_in_a_row: int = 0
    answers_until_sampled: int = 0
    """Then one of its prompts is compared token for token."""
    holders: tuple[Worker, ...] = ()
    """One for each rank of its present life."""
    tokenizes: bool = False
    """Whether it tells token ids of chats."""
    load: EngineLoad | None = None
    """Its last report; None when it makes none."""
    intakes: list[Intake] = field(default_factory=list)
    """Of the streams that this gateway follows itself."""
    trust: Trust = field(default_factory=Trust)
    """How far its events are believed, in its present life."""
    breaker: Breaker = field(default_factory=Breaker)
    """Whether it does its work; `healthy` says whether it lives."""
    ejected: str = ""
    """Why it is left out for a while; empty when it is not."""
    barred: bool = False
    """Whether it is ejected, or its circuit not closed: it is no room for what waits."""
    requests: int = 0
    failures: int = 0
    registered_at: float = field(default_factory=time.time)

    @classmethod
    def of(cls, config: WorkerConfig, tls: ssl.SSLContext | None = None) -> "WorkerRecord":
        """`tls`: for a URL that begins with https; None trusts whom the system trusts."""
        parts = urlsplit(config.url)
        tls = (tls or ssl.create_default_context()) if parts.scheme == "https" else None
        host = parts.hostname or ""
        port = parts.port or (443 if tls else 80)
        shown = f"[{host}]" if ":" in host else host
        connections, authority = UpstreamPool(host, port, tls), f"{shown}:{port}".encode()
        name = WorkerName(config.name or f"{shown}:{port}")
        return cls(name, config.url.rstrip("/"), config, connections, authority, draining=config.draining)

    def __repr__(self) -> str:
        state = "healthy" if self.healthy else self.reason
        return f"WorkerRecord({self.name}, epoch={self.epoch}, {state})"

    @property
    def role(self) -> RoleName:
        return self.config.role

    def holder(self, rank: int = 0) -> Worker:
        return Worker(self.name, self.epoch, rank)

    def vouches_for(self, holder: Worker) -> bool:
        """Whether the worker lives, in this life, and its own events say what it holds."""
        return self.healthy and self.trust.level is TrustLevel.EXACT and self.epoch == holder.epoch

    @property
    def eligible(self) -> bool:
        return self.healthy and not self.draining

    @property
    def block_size_tokens(self) -> int:
        """The engine's own block size; 0 while unknown."""
        if self.config.block_size_tokens:
            return self.config.block_size_tokens
        return self.discovery.block_size_tokens if self.discovery else 0

    def hit_tokens_max(self, prompt_tokens: int, block: int) -> int:
        """How much of a prompt it can have: the last token is computed again, by most engines with its whole block."""
        unit = self.hit_unit_tokens(block)
        return max(prompt_tokens - 1, 0) // unit * unit

    def hit_unit_tokens(self, block: int) -> int:
        """It has multiples of this: whole blocks of its own, which may be several of ours."""
        return (self.block_size_tokens or block) if self.traits.hits_whole_blocks else 1

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
    probe_tokens: dict[int, list[int]] = field(default_factory=dict)
    """Without a renderer, token ids of the probe prompts as the first worker told them, by position."""
    block_size_tokens: int = DEFAULT_BLOCK_SIZE_TOKENS
    caps_differ: bool = False
    """Whether some engine gives up more, or less, of a whole hit than a block of this size."""
    workers: list[WorkerRecord] = field(default_factory=list)
    adapters: set[str] = field(default_factory=set)
    transfers: bool = False
    """Whether some worker says that it can move KV."""
    prefill_workers: tuple[WorkerRecord, ...] = ()
    """Those that are sent no client's request."""
    generation: int = 0
    """Grows whenever names made before are void: another block size, another renderer."""

    def refresh_roles(self) -> None:
        self.prefill_workers = tuple(worker for worker in self.workers if worker.role == "prefill")

    def refresh_block_size(self) -> bool:
        """Recompute the canonical block size, the greatest common divisor of the engines'. True when it changed."""
        sizes = [worker.block_size_tokens for worker in self.workers]
        size = gcd(*sizes) or DEFAULT_BLOCK_SIZE_TOKENS
        self.caps_differ = max(sizes, default=0) > size or not all(w.traits.hits_whole_blocks for w in self.workers)
        if size == self.block_size_tokens:
            return False
        self.block_size_tokens = size
        self.generation += 1
        return True
