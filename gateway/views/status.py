"""The one document that says how the gateway is: `/status`, the dashboard and `ropeway top` all read it."""

import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from cachecore.index.schema import holder_id
from gateway.fleet.engines.contract import Discovery
from gateway.fleet.intake import Intake
from gateway.fleet.knowledge import Knowledge
from gateway.fleet.registry import Fleet
from gateway.fleet.trust import TrustLevel
from gateway.fleet.worker import ModelPool, WorkerRecord
from gateway.prompts import Prompts
from gateway.views.metrics import GatewayMetrics
from gateway.views.receipts import Receipts

RECEIPTS_SHOWN = 20


@dataclass(slots=True)
class WorkerStatus:
    name: str
    url: str
    role: str
    healthy: bool
    draining: bool
    reason: str
    epoch: int
    ranks: int
    models: list[str]
    engine: str
    engine_version: str
    lacks: list[dict[str, str]]
    """What the engine was started without, what that costs and the remedy."""
    block_size_tokens: int
    max_model_len: int
    parity: str
    parity_reason: str
    events: list[dict[str, Any]]
    """One entry for each rank's event stream."""
    events_trusted: bool
    trust: dict[str, Any]
    """How far its events are believed, which doubts stand and what they stand on."""
    transfer: dict[str, Any] | None
    """What it says that it can do with KV, or why that is not believed; null when it moves nothing."""
    inflight: int
    waiting: int
    inflight_tokens: int
    outstanding_prefill_ms: float
    capacity_requests: int
    """Requests it runs at once, all ranks together; 0 while unknown."""
    kv_tokens: int
    """Its KV memory; 0 while unknown."""
    kv_held_tokens: int
    """What requests in flight need of it."""
    kv_fill: float
    """Share of it that cached blocks take; 1 while unknown."""
    load: dict[str, Any] | None
    """`running`, `waiting` and `at`, as the engine itself last said; null when it does not."""
    requests: int
    failures: int
    connections: int


@dataclass(slots=True)
class ModelStatus:
    model: str
    renderer: str
    block_size_tokens: int
    workers: list[str]
    adapters: list[str]


@dataclass(slots=True)
class Status:
    version: str
    started_at: float
    """Wall-clock seconds."""
    uptime_seconds: float
    ready: bool
    policy: str
    workers: list[WorkerStatus]
    models: list[ModelStatus]
    index: dict[str, Any]
    prompts: Mapping[str, Any]
    estimates: Mapping[str, Any]
    requests: dict[str, int]
    tokens: dict[str, int]
    sharing: dict[str, Any] | None = None
    """How the index is shared with other gateways; null where it is not."""
    transfers: dict[str, Any] | None = None
    """What workers pull from each other; null where they are not told to."""
    disaggregation: dict[str, Any] | None = None
    """Requests with two legs; null where no worker does nothing but prefill."""
    admission: dict[str, Any] | None = None
    """Who waits at the gateway and who is refused; null where nobody has to wait."""
    shadows: list[dict[str, Any]] = field(default_factory=list)
    """What policies that are asked and not followed would have done better."""
    receipts: list[dict[str, Any]] = field(default_factory=list)

    def document(self) -> dict[str, Any]:
        return asdict(self)


class StatusView:
    """Builds a `Status` when asked; keeps nothing but references."""

    def __init__(
        self,
        version: str,
        policy: str,
        fleet: Fleet,
        knowledge: Knowledge,
        metrics: GatewayMetrics,
        receipts: Receipts,
        prompts: Prompts,
        sharing: Callable[[], dict[str, Any]] | None = None,
        transfers: Callable[[], dict[str, Any]] | None = None,
        disaggregation: Callable[[], dict[str, Any] | None] | None = None,
        admission: Callable[[], dict[str, Any]] | None = None,
        shadows: Callable[[], list[dict[str, Any]]] | None = None,
    ) -> None:
        self._version = version
        self._policy = policy
        self._fleet = fleet
        self._knowledge = knowledge
        self._metrics = metrics
        self._receipts = receipts
        self._prompts = prompts
        self._sharing = sharing
        self._transfers = transfers
        self._disaggregation = disaggregation
        self._admission = admission
        self._shadows = shadows
        self._started_at = time.time()

    @property
    def ready(self) -> bool:
        """Whether at least one worker can take a request."""
        return any(record.eligible and record.role != "prefill" for record in self._fleet.workers.values())

    def now(self) -> Status:
        metrics = self._metrics
        metrics.settle()
        receipts = [receipt.document() for receipt, _ in zip(self._receipts, range(RECEIPTS_SHOWN), strict=False)]
        return Status(
            version=self._version,
            started_at=self._started_at,
            uptime_seconds=time.time() - self._started_at,
            ready=self.ready,
            policy=self._policy,
            workers=[self._worker(record) for record in self._fleet.workers.values()],
            models=[_model(pool) for pool in self._fleet.pools.values()],
            index=asdict(self._knowledge.index.stats()),
            prompts=self._prompts.statistics(),
            estimates=self._knowledge.estimates.document(),
            requests={
                "total": sum(metrics.endings.values()),
                "complete": sum(count for (ending, _), count in metrics.endings.items() if ending == "complete"),
                "refused": sum(metrics.refusals.values()),
                "inflight": self._knowledge.accounting.own_requests,
            },
            tokens={
                "prompt": metrics.prompt_tokens,
                "matched": sum(metrics.matched_tokens.values()),
                "reported_prompt": metrics.reported_prompt_tokens,
                "reported_cached": metrics.reported_cached_tokens,
                "phantom": metrics.phantom_tokens,
            },
            sharing=self._sharing() if self._sharing is not None else None,
            transfers=self._transfers() if self._transfers is not None else None,
            disaggregation=self._disaggregation() if self._disaggregation is not None else None,
            admission=self._admission() if self._admission is not None else None,
            shadows=self._shadows() if self._shadows is not None else [],
            receipts=receipts,
        )

    def _worker(self, record: WorkerRecord) -> WorkerStatus:
        accounts = [self._knowledge.accounting.account(holder.name, holder.rank) for holder in record.holders]
        discovery = record.discovery
        return WorkerStatus(
            name=record.name,
            url=record.url,
            role=record.role,
            healthy=record.healthy,
            draining=record.draining,
            reason=record.reason,
            epoch=record.epoch,
            ranks=len(record.holders),
            models=list(record.models),
            engine=record.adapter.name,
            engine_version=discovery.version if discovery else "",
            lacks=[lack._asdict() for lack in record.lacks],
            block_size_tokens=record.block_size_tokens,
            max_model_len=discovery.max_model_len if discovery else 0,
            parity=record.parity.value,
            parity_reason=record.parity_reason,
            events=[_events(intake) for intake in record.intakes],
            events_trusted=record.trust.level is TrustLevel.EXACT,
            trust=record.trust.document(time.monotonic()),
            transfer=_transfer(discovery) if discovery else None,
            inflight=sum(account.inflight for account in accounts),
            waiting=sum(account.waiting for account in accounts),
            inflight_tokens=sum(account.inflight_tokens for account in accounts),
            outstanding_prefill_ms=sum(account.outstanding_prefill_seconds for account in accounts) * 1e3,
            capacity_requests=sum(account.capacity_requests for account in accounts),
            kv_tokens=sum(account.kv_tokens for account in accounts),
            kv_held_tokens=sum(account.kv_held_tokens for account in accounts),
            kv_fill=sum(account.fill for account in accounts) / len(accounts) if accounts else 1.0,
            load=record.load._asdict() if record.load and record.healthy else None,
            requests=record.requests,
            failures=record.failures,
            connections=len(record.connections),
        )


def _transfer(discovery: Discovery) -> dict[str, Any] | None:
    ability = discovery.transfer
    if ability is None:
        return {"problem": discovery.transfer_problem} if discovery.transfer_problem else None
    return {
        "holder": holder_id(ability.holder).decode(),
        "addresses": list(ability.addresses),
        "compatibility": ability.compatibility,
        "codecs": sorted(ability.codecs),
        "bytes_per_token": ability.bytes_per_token,
        "pools": [pool._asdict() for pool in ability.pools],
    }


def _events(intake: Intake) -> dict[str, Any]:
    rekeyed = intake.rekey_stats()
    return {"rank": intake.holder.rank, "endpoint": intake.source.live_endpoint} | {
        "intake": asdict(intake.stats()),
        "rekey": {**asdict(rekeyed), "refused": dict(rekeyed.refused)},  # of a counter `asdict` counts the items
    }


def _model(pool: ModelPool) -> ModelStatus:
    return ModelStatus(
        model=pool.model,
        renderer=pool.renderer.name if pool.renderer else "remote",
        block_size_tokens=pool.block_size_tokens,
        workers=sorted(worker.name for worker in pool.workers),
        adapters=sorted(pool.adapters),
    )
