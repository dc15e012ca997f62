"""The one document that says how the gateway is: `/status`, the dashboard and `ropeway top` all read it."""

import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from cachecore.holders import Tier
from cachecore.index.memory import MemoryIndex
from cachecore.index.mirror import MirrorIndex
from cachecore.index.schema import holder_id
from gateway.fleet.engines.contract import Discovery
from gateway.fleet.intake import Intake
from gateway.fleet.knowledge import Knowledge
from gateway.fleet.registry import Fleet
from gateway.fleet.trust import TrustLevel
from gateway.fleet.worker import ModelPool, WorkerRecord
from gateway.prompts import Prompts
from gateway.views import prefixes
from gateway.views.metrics import GatewayMetrics
from gateway.views.receipts import Receipts
from gateway.views.receipts import document as receipt_document
from gateway.views.traffic import Traffic, errors, latencies

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
    cached_tokens: dict[str, int] | None
    """What the index knows of in its tiers, `l0` and `l1`; null where the index is not in this process."""
    load: dict[str, Any] | None
    """`running`, `waiting` and `at`, as the engine itself last said; null when it does not."""
    circuit: str
    """Of its breaker: `closed`, `open` or `half_open`."""
    ejected: str
    """Why it is left out for a while; empty when it is not."""
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
    """`errors`: failed by no fault of the client's. `left`: the client went first. `retries`: further attempts."""
    tokens: dict[str, int]
    ttft_ms: dict[str, Any]
    """Percentiles of the last minute, over the last receipts."""
    traffic: dict[str, Any] = field(default_factory=dict)
    """The last ten minutes, a row of `samples` for each interval, in the order of `fields` (`views.traffic.Sample`)."""
    prefixes: list[dict[str, Any]] = field(default_factory=list)
    """What the last prompts shared, heaviest first, as a tree of bounded size, and who holds it."""
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
    reliability: dict[str, Any] = field(default_factory=dict)
    """Failures by their row of docs/reliability.md, budgets, ejections, hedges."""
    configuration: dict[str, Any] | None = None
    """Whether it was read again, what was wrong with it, and what of it needs a restart (`gateway.reload`)."""
    receipts: list[dict[str, Any]] = field(default_factory=list)

    def document(self) -> dict[str, Any]:
        return asdict(self)


class StatusView:
    """Builds a `Status` when asked; keeps nothing but references."""

    def __init__(
        self,
        version: str,
        policy: Callable[[], str],
        fleet: Fleet,
        knowledge: Knowledge,
        metrics: GatewayMetrics,
        receipts: Receipts,
        prompts: Prompts,
        traffic: Traffic,
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
        self.traffic = traffic
        self._sharing = sharing
        self._transfers = transfers
        self._disaggregation = disaggregation
        self._admission = admission
        self._shadows = shadows
        self._started_at = time.time()
        self.configuration: Callable[[], dict[str, Any]] | None = None
        self.draining = False
        """Whether the gateway is stopping, and should be sent nothing more."""

    @property
    def ready(self) -> bool:
        """Whether at least one worker can take a request."""
        if self.draining:
            return False
        return any(record.eligible and record.role != "prefill" for record in self._fleet.workers.values())

    @property
    def workers(self) -> list[WorkerRecord]:
        return list(self._fleet.workers.values())

    def receipt(self, request_id: str) -> dict[str, Any] | None:
        """Of a request that was among the last."""
        found = self._receipts.find(request_id)
        return None if found is None else receipt_document(found)

    def now(self) -> Status:
        status = self.summary()
        status.workers = [self.worker(record) for record in self._fleet.workers.values()]
        status.estimates = self._knowledge.estimates.document()
        status.traffic = self.traffic.document()
        return status

    def summary(self) -> Status:
        """All but what grows with the fleet and with time: workers, estimates, samples of traffic."""
        metrics = self._metrics
        metrics.settle()
        endings = metrics.endings
        shown = zip(self._receipts, range(RECEIPTS_SHOWN), strict=False)
        return Status(
            version=self._version,
            started_at=self._started_at,
            uptime_seconds=time.time() - self._started_at,
            ready=self.ready,
            policy=self._policy(),
            workers=[],
            models=[_model(pool) for pool in self._fleet.pools.values()],
            index=asdict(self._knowledge.index.stats()),
            prompts=self._prompts.statistics(),
            estimates={},
            requests={
                "total": sum(endings.values()),
                "complete": sum(count for (ending, _), count in endings.items() if ending == "complete"),
                "errors": errors(endings),
                "left": sum(count for (ending, _), count in endings.items() if ending == "client_gone"),
                "retries": sum(metrics.retries.values()),
                "refused": sum(metrics.refusals.values()),
                "inflight": self._knowledge.accounting.own_requests,
            },
            tokens={
                "prompt": metrics.prompt_tokens,
                "matched": sum(metrics.matched_tokens.values()),
                "confirmed": metrics.tier_tokens[-1],
                "reported_prompt": metrics.reported_prompt_tokens,
                "reported_cached": metrics.reported_cached_tokens,
                "phantom": metrics.phantom_tokens,
            },
            ttft_ms=latencies(self._receipts, time.time()),
            prefixes=prefixes.document(self._receipts, self._knowledge.index),
            sharing=self._sharing() if self._sharing is not None else None,
            transfers=self._transfers() if self._transfers is not None else None,
            disaggregation=self._disaggregation() if self._disaggregation is not None else None,
            admission=self._admission() if self._admission is not None else None,
            shadows=self._shadows() if self._shadows is not None else [],
            reliability=self._fleet.safeguards.document(),
            configuration=self.configuration() if self.configuration is not None else None,
            receipts=[receipt_document(receipt) for receipt, _ in shown],
        )

    def worker(self, record: WorkerRecord) -> WorkerStatus:
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
            cached_tokens=self._cached_tokens(record),
            load=record.load._asdict() if record.load and record.healthy else None,
            circuit=record.breaker.circuit.value,
            ejected=record.ejected,
            requests=record.requests,
            failures=record.failures,
            connections=len(record.connections),
        )

    def _cached_tokens(self, record: WorkerRecord) -> dict[str, int] | None:
        index = self._knowledge.index
        if not isinstance(index, MemoryIndex | MirrorIndex):
            return None
        models = {*record.models}
        blocks = {pool.block_size_tokens for model, pool in self._fleet.pools.items() if model in models}
        block = min(blocks, default=record.block_size_tokens)
        return {
            tier.name.lower(): block * sum(index.blocks_held(holder, tier) for holder in record.holders)
            for tier in (Tier.L0, Tier.L1)
        }


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
