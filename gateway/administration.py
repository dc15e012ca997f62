"""What operators steer while the gateway serves: drained and warmed workers, the policy, pins. Every route asks for the
admin key, as all of `/admin` does.

Nothing here outlives the process but a drain that a shared directory tells all gateways of. What is to stay belongs in
the configuration file, which a running gateway reads again.

    POST   /admin/workers/NAME/drain?wait_seconds=S   no new requests; waits until it has none, S seconds at most
    POST   /admin/workers/NAME/undrain
    POST   /admin/workers/NAME/warm                   {"prefixes_max": 8, "seconds_max": 60}, both optional
    GET    /admin/policy                              the policy, those there are, and tenants' weights
    PUT    /admin/policy?dry_run=true                 {"policy": NAME, "weights": {TENANT: SHARE}}, each optional
    GET    /admin/prefixes?count=20                   the hottest prefixes, and who holds them
    GET    /admin/pins
    PUT    /admin/pins                                {"worker": NAME, "session": S}, or "tenant", or "prefix"
    DELETE /admin/pins?session=S                      `tenant`, `session` and `prefix` as they were pinned
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Annotated, Any, Protocol, TypeVar

import msgspec
from fastapi import FastAPI, Query, Request
from fastapi.params import Depends

from gateway.admission import Admission
from gateway.errors import BadRequest, NotFound
from gateway.fleet.worker import WorkerRecord
from gateway.pipeline import Pipeline
from gateway.steering.pins import Pin, Pins, Subject, as_document
from gateway.steering.samples import Samples
from gateway.steering.warming import Bounds, Warmer
from policies import POLICIES, create
from policies.replay import Replay

WAIT_SECONDS_MAX = 600.0
_POLL_SECONDS = 0.05
_MOMENTS_A_STEP = 8
"""Decisions taken again before requests have their turn: some 100 us each with 64 workers."""

Weights = dict[str, Annotated[float, msgspec.Meta(ge=0.001, le=1000)]]
Value = TypeVar("Value")


class Drains(Protocol):
    """Who drains workers: the gateway's own fleet, or the directory that it shares with others."""

    async def drain(self, name: str, draining: bool) -> bool: ...


class Proposal(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What is to change of how requests are placed; what is not said stays."""

    policy: str | None = None
    weights: Weights | None = None
    """All of them: a tenant that is not named has a share of 1."""


class Administration:
    """The steering of one gateway."""

    def __init__(
        self,
        pipeline: Pipeline,
        drains: Drains,
        admission: Admission | None,
        samples: Samples | None,
        connect_seconds: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._pipeline = pipeline
        self._drains = drains
        self._admission = admission
        self._samples = samples
        self._clock = clock
        self.pins = Pins()
        self.warmer = Warmer(pipeline, samples, connect_seconds)

    # Workers

    async def drain(self, name: str, wait_seconds: float = 0.0) -> dict[str, Any]:
        """Send it nothing new; wait so long for what it is serving to end. Raises NotFound."""
        shared = await self._drains.drain(name, True)
        ends_at = self._clock() + wait_seconds
        # Other gateways' requests count as well, and nobody says when they end.
        while self._inflight(name) and self._clock() < ends_at:  # noqa: ASYNC110
            await asyncio.sleep(_POLL_SECONDS)
        return self._drained(name, True, shared)

    async def undrain(self, name: str) -> dict[str, Any]:
        """Raises NotFound."""
        return self._drained(name, False, await self._drains.drain(name, False))

    async def warm(self, name: str, bounds: Bounds) -> dict[str, Any]:
        """Raises ServiceError."""
        return {"worker": name, "warmed": await self.warmer.warm(self._worker(name), bounds)}

    async def prefixes(self, count: int) -> list[dict[str, Any]]:
        return [
            {
                "prefix": prefix.name,
                "model": prefix.example.model,
                "tenant": prefix.example.tenant.id,
                "tokens": prefix.tokens,
                "prompts": prefix.prompts,
                "held_tokens": held,
            }
            for prefix, held in await self.warmer.prefixes(count)
        ]

    def _drained(self, name: str, draining: bool, shared: bool) -> dict[str, Any]:
        gateways = "all" if shared else "this one"
        return {"worker": name, "draining": draining, "inflight": self._inflight(name), "gateways": gateways}

    def _inflight(self, name: str) -> int:
        """Of all gateways that share an index."""
        record = self._pipeline.fleet.workers.get(name)
        accounting = self._pipeline.knowledge.accounting
        holders = record.holders if record is not None else ()
        return sum(accounting.account(holder.name, holder.rank).inflight for holder in holders)

    def _worker(self, name: str) -> WorkerRecord:
        record = self._pipeline.fleet.workers.get(name)
        if record is None:
            raise NotFound(f"there is no worker {name!r}")
        return record

    # The policy

    def policy(self) -> dict[str, Any]:
        weights = dict(self._admission.config.weights) if self._admission is not None else {}
        return {"policy": self._pipeline.settings.policy, "policies": list(POLICIES), "weights": weights}

    def change(self, proposal: Proposal) -> dict[str, Any]:
        """From the next request on. Raises BadRequest, and changes nothing then."""
        self._check(proposal)
        if proposal.policy is not None:
            self._pipeline.use_policy(proposal.policy)
        if proposal.weights is not None and self._admission is not None:
            self._admission.use_weights(proposal.weights)
        return self.policy()

    async def rehearse(self, proposal: Proposal) -> dict[str, Any]:
        """What another policy would have done with the last decisions. Raises BadRequest."""
        self._check(proposal)
        present = self._pipeline.settings.policy
        replay = Replay(create(present), create(proposal.policy or present))
        moments = list(self._samples.moments) if self._samples is not None else []
        for number, moment in enumerate(moments, start=1):
            replay.take(moment)
            if not number % _MOMENTS_A_STEP:
                await asyncio.sleep(0)
        return replay.document()

    def _check(self, proposal: Proposal) -> None:
        if proposal.policy is not None and proposal.policy not in POLICIES:
            raise BadRequest(f"there is no policy {proposal.policy!r}; there are {', '.join(POLICIES)}", param="policy")
        if proposal.weights is not None and self._admission is None:
            raise BadRequest("nobody waits here, so nobody has a share: admission.enabled is false", param="weights")

    # Pins

    def pin(self, pin: Pin) -> list[Pin]:
        """Raises ServiceError."""
        self._worker(pin.worker)
        self.pins.put(pin)
        return self._pinned()

    def unpin(self, subject: Subject) -> list[Pin]:
        """Raises NotFound."""
        self.pins.delete(subject)
        return self._pinned()

    def _pinned(self) -> list[Pin]:
        # Without any, requests pay nothing for it.
        self._pipeline.pins = self.pins if len(self.pins) else None
        return self.pins.listed()


def add_administration_routes(app: FastAPI, administration: Administration, admin: Sequence[Depends]) -> None:
    """`admin`: what asks for the key."""

    @app.post("/admin/workers/{name:path}/drain", dependencies=admin)
    async def drain(
        name: str, wait_seconds: Annotated[float, Query(ge=0, le=WAIT_SECONDS_MAX)] = 0.0
    ) -> dict[str, Any]:
        """Send a worker no new requests; wait, at most so long, until it has none."""
        return await administration.drain(name, wait_seconds)

    @app.post("/admin/workers/{name:path}/undrain", dependencies=admin)
    async def undrain(name: str) -> dict[str, Any]:
        """Send a worker requests again."""
        return await administration.undrain(name)

    @app.post("/admin/workers/{name:path}/warm", dependencies=admin)
    async def warm(name: str, request: Request) -> dict[str, Any]:
        """Have a worker compute, or pull, the hottest prefixes that it lacks."""
        return await administration.warm(name, await _read(request, Bounds, "bounds for warming"))

    @app.get("/admin/policy", dependencies=admin)
    async def policy() -> dict[str, Any]:
        """The policy that decides, and the shares of tenants that wait."""
        return administration.policy()

    @app.put("/admin/policy", dependencies=admin)
    async def change_policy(request: Request, dry_run: bool = False) -> dict[str, Any]:
        """Change policy or weights; with `dry_run` only say what that would have done with the last decisions."""
        proposal = await _read(request, Proposal, "a policy")
        return await administration.rehearse(proposal) if dry_run else administration.change(proposal)

    @app.get("/admin/prefixes", dependencies=admin)
    async def prefixes(count: Annotated[int, Query(ge=1, le=256)] = 20) -> dict[str, Any]:
        """What the last prompts have in common, and how much of it which worker holds."""
        return {"prefixes": await administration.prefixes(count)}

    @app.get("/admin/pins", dependencies=admin)
    async def pins() -> dict[str, Any]:
        """Which requests are pinned to which worker."""
        return {"pins": as_document(administration.pins.listed())}

    @app.put("/admin/pins", dependencies=admin)
    async def pin(request: Request) -> dict[str, Any]:
        """Pin a session's, a tenant's or a prefix's requests to a worker."""
        return {"pins": as_document(administration.pin(await _read(request, Pin, "a pin")))}

    @app.delete("/admin/pins", dependencies=admin)
    async def unpin(tenant: str = "", session: str = "", prefix: str = "") -> dict[str, Any]:
        """Let a pinned session, tenant or prefix go where the policy sends it."""
        subject = Subject(tenant=tenant, session=session, prefix=prefix)
        return {"pins": as_document(administration.unpin(subject))}


async def _read(request: Request, kind: type[Value], what: str) -> Value:
    body = await request.body()
    try:
        return msgspec.json.decode(body or b"{}", type=kind)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise BadRequest(f"not {what}: {error}") from None
