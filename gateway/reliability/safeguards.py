"""What keeps the failures of some workers from becoming everybody's: circuit breakers, ejection, budgets.

The decisions are `policies.state`'s; here they meet the fleet. Whether a worker lives is told by probes, and by
connections that cannot be made (`Fleet.failed`); whether it does its work, by how its requests end, which is what is
counted here. As long as all do, `impaired` is empty and nobody asks any further.

Where all workers that are well by their probes would be left out, none is: it is better to try them than to be sure of
failing (`panics`).
"""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from random import Random
from typing import Any

from gateway.config import BreakersConfig, EjectionConfig, HedgingConfig, RetriesConfig
from gateway.fleet.worker import ModelPool, WorkerRecord
from gateway.reliability.failures import Blame, Failure
from gateway.reliability.hedging import Hedging
from policies.estimates import FleetEstimates
from policies.state.attempts import AttemptBudget
from policies.state.breakers import CLOSED, BreakerSettings
from policies.state.ejection import Ejections, EjectionSettings, Member, Slowness

logger = logging.getLogger("ropeway.reliability")

TURN_SECONDS = 1.0
_MEASURED_TOKENS = 1024
"""How slow a worker is: what it should take to prefill so many."""

# Members of enumerations are looked up by a slow path.
_NONE = Blame.NONE


class Safeguards:
    """Of one gateway."""

    def __init__(
        self,
        breakers: BreakersConfig | None = None,
        ejection: EjectionConfig | None = None,
        retries: RetriesConfig | None = None,
        hedging: HedgingConfig | None = None,
        clock: Callable[[], float] = time.monotonic,
        random: Random | None = None,
    ) -> None:
        self.clock = clock
        self._random = random or Random()
        self._breakers = breakers or BreakersConfig()
        self._ejecting = ejection or EjectionConfig()
        retries = retries or RetriesConfig()
        self.attempts_max = retries.attempts_max
        self.budget = AttemptBudget(retries.budget_share, retries.budget_per_second_min)
        """Of retries."""
        self.hedging = Hedging(hedging, clock) if hedging is not None and hedging.enabled else None
        """None where no request is put to two workers."""
        self.ejections = Ejections(_ejection_settings(self._ejecting))
        self.impaired: set[WorkerRecord] = set()
        """Those that get no request, or not any."""
        self.failures: Counter[str] = Counter()
        """By the name of their row."""
        self.panics = 0
        """Requests that were given to workers that should have been left alone, for want of others."""

    def joined(self, record: WorkerRecord) -> None:
        record.breaker.settings = _breaker_settings(self._breakers)

    def left(self, record: WorkerRecord) -> None:
        self.impaired.discard(record)
        self.ejections.forget(record.name)

    def reborn(self, record: WorkerRecord) -> None:
        """A new life has begun."""
        record.breaker.reborn()

    # What requests tell

    def counted(self, failure: Failure) -> None:
        """A failure that no worker is held to account for."""
        self.failures[failure.name] += 1

    def failed(self, record: WorkerRecord, request_id: str, failure: Failure) -> None:
        """An attempt at a worker has failed."""
        self.failures[failure.name] += 1
        if failure.blame is _NONE or not self._breakers.enabled:
            record.breaker.dropped(request_id)
            return
        record.failures += 1
        if record.breaker.failed(request_id, self.clock(), self._random.random()):
            self.impaired.add(record)
            record.barred = True
            pause = record.breaker.reopens_at - self.clock()
            logger.warning("worker %s fails its requests (%s): left alone for %.1f s", record.name, failure.name, pause)

    # What decisions ask

    def admitted(self, workers: list[WorkerRecord]) -> list[WorkerRecord]:
        """Those that may be sent a request, of workers that are well by their probes; all, where none may."""
        now = self.clock()
        admitted = [worker for worker in workers if not worker.ejected and worker.breaker.admits(now)]
        if not admitted and workers:
            self.panics += 1
            return workers
        return admitted

    # Turns

    async def run(self, pools: Mapping[str, ModelPool], estimates: FleetEstimates) -> None:
        """Judge the workers of each model once a second, for ever."""
        while True:
            await asyncio.sleep(TURN_SECONDS)
            try:
                self.turn(pools.values(), estimates)
            except Exception:
                logger.exception("cannot judge the workers")

    def turn(self, pools: Iterable[ModelPool], estimates: FleetEstimates | None = None) -> None:
        """`estimates`: of how fast workers are; without, none is ejected for being slow."""
        now = self.clock()
        self.budget.advance(now)
        if self.hedging is not None:
            self.hedging.budget.advance(now)
        impaired: set[WorkerRecord] = set()
        for pool in pools:
            self._judge(pool.workers, estimates, now)
            for record in pool.workers:
                record.barred = bool(record.ejected) or record.breaker.circuit is not CLOSED
            impaired.update(record for record in pool.workers if record.barred)
        self.impaired = impaired

    def _judge(self, workers: Sequence[WorkerRecord], estimates: FleetEstimates | None, now: float) -> None:
        for record in workers:
            if record.ejected and not self.ejections.reason(record.name, now):
                logger.info("worker %s is back", record.name)
                record.ejected = ""
                record.breaker.forget()
        members = [self._member(record, estimates, now) for record in workers if record.healthy]
        if self._ejecting.enabled:
            self.ejections.judge(members, now)
        for record in workers:
            reason = self.ejections.reason(record.name, now)
            if reason and not record.ejected:
                logger.warning("worker %s is left out for a while: it %s", record.name, reason)
                record.ejected = reason

    def _member(self, record: WorkerRecord, estimates: FleetEstimates | None, now: float) -> Member:
        breaker = record.breaker
        judged = self._ejecting.slowness_factor is not None
        slowness = _slowness(record, estimates) if judged and estimates is not None else None
        return Member(record.name, breaker.outcomes(now), slowness, breaker.circuit is not CLOSED)

    def document(self) -> dict[str, Any]:
        """For `/status`."""
        budget = self.budget
        return {
            "failures": dict(self.failures),
            "retries": {"spent": budget.spent, "denied": budget.denied, "left": budget.left(self.clock())},
            "ejections": self.ejections.total,
            "panics": self.panics,
            "hedging": self.hedging.document() if self.hedging is not None else None,
        }


def _slowness(record: WorkerRecord, estimates: FleetEstimates) -> Slowness | None:
    """By its slowest rank."""
    models = [estimates.prefill((holder.name, holder.rank)) for holder in record.holders]
    if not models:
        return None
    slowest = max(models, key=lambda model: model.prefill_seconds(_MEASURED_TOKENS, 0))
    return Slowness(slowest.prefill_seconds(_MEASURED_TOKENS, 0), slowest.calibration.observations)


def _breaker_settings(config: BreakersConfig) -> BreakerSettings:
    return BreakerSettings(
        config.failures_in_a_row,
        config.failure_share,
        config.requests_min,
        config.window_seconds,
        config.open_seconds_min,
        config.open_seconds_max,
    )


def _ejection_settings(config: EjectionConfig) -> EjectionSettings:
    return EjectionSettings(
        config.share_max,
        config.failure_margin,
        config.slowness_factor,
        config.requests_min,
        config.seconds,
        config.seconds_max,
    )
