"""Tells each worker's `Trust` once a turn what has come up, and sees to what it answers: log lines, the remedy."""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping

from cachecore.holders import Worker
from cachecore.index.contract import Match
from cachecore.store import StoreError
from gateway.fleet.evidence import Sample, StreamFacts
from gateway.fleet.knowledge import Knowledge
from gateway.fleet.trust import Doubt, Remedy, Trust, TrustLevel, Turn
from gateway.fleet.worker import ModelPool, WorkerRecord

logger = logging.getLogger("ropeway.trust")

TURN_SECONDS = 0.5

_CONSEQUENCES = {
    TrustLevel.EXACT: "its events are believed",
    TrustLevel.HISTORY: "its matches count as guesses",
    TrustLevel.LOAD: "it is placed by load alone",
}


class TrustWatch:
    """Watches the workers of all pools while `run` runs."""

    def __init__(
        self, pools: Mapping[str, ModelPool], knowledge: Knowledge, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._pools = pools
        self._knowledge = knowledge
        self._clock = clock
        self._heard: dict[Worker, tuple[int | None, float | None]] = {}
        """The last batch of each stream that another gateway follows, and when it was seen here."""
        self._loads: dict[str, float] = {}
        """When the load report was made that was last looked at, by worker."""
        self.raised: Counter[tuple[str, Doubt]] = Counter()
        """How often each doubt was raised, by worker."""

    async def run(self) -> None:
        while True:
            await asyncio.sleep(TURN_SECONDS)
            try:
                await self.turn()
            except Exception:
                logger.exception("a turn of the watch over the workers' events failed")

    async def turn(self) -> None:
        """One look at every worker."""
        records = {record.name: (record, pool) for pool in self._pools.values() for record in pool.workers}
        holders = {holder for record, _ in records.values() for holder in record.holders}
        self._heard = {holder: heard for holder, heard in self._heard.items() if holder in holders}
        self._loads = {name: at for name, at in self._loads.items() if name in records}
        for key in [key for key in self.raised if key[0] not in records]:
            del self.raised[key]
        for record, pool in records.values():
            await self._look_at(record, pool)

    async def _look_at(self, record: WorkerRecord, pool: ModelPool) -> None:
        trust, now, level = record.trust, self._clock(), record.trust.level
        trust.slack_tokens = max(pool.block_size_tokens, record.block_size_tokens)
        if record.load is not None and record.load.at != self._loads.get(record.name):
            self._loads[record.name] = record.load.at
            trust.count_hits(record.load.hit_tokens, now)
        reachable = True
        for sample in trust.questions(now):
            found = await self._found(record, pool, sample)
            if found:
                trust.found(sample)
            reachable = reachable and found is not None
        turn = trust.turn(self._facts(record, now, reachable), now)
        if record.trust is trust:
            self._see_to(record, trust, level, turn)

    async def _found(self, record: WorkerRecord, pool: ModelPool, sample: Sample) -> bool | None:
        """Whether the index has a sample's blocks; None when it does not answer."""
        matching = self._knowledge.index.match(sample.chain)
        try:
            match = matching if isinstance(matching, Match) else await matching
        except StoreError:
            return None
        holders = (sample.holder,) if _chooses_rank(record) else record.holders
        depth = max((depth for place, depth in match.depths.items() if place.holder in holders), default=0)
        ratio = max(1, record.block_size_tokens // pool.block_size_tokens)
        return depth >= match.blocks // ratio * ratio

    def _facts(self, record: WorkerRecord, now: float, reachable: bool) -> StreamFacts:
        heard = {holder: at for holder in record.holders if (at := self._heard_elsewhere(holder, now)) is not None}
        events, unreadable, gaps, restarts, behind = 0, 0, 0, 0, not reachable
        for intake in record.intakes:
            stats, rekeyed = intake.stats(), intake.rekey_stats()
            heard.pop(intake.holder, None)
            if stats.last_seen is not None:
                heard[intake.holder] = stats.last_seen
            # A medium that we do not know says nothing of the ones that we do.
            refused = sum(rekeyed.refused.values()) - rekeyed.refused["medium"]
            unreadable += stats.malformed + refused
            events += stats.events - refused
            gaps += stats.gaps
            restarts += stats.restarts
            behind = behind or intake.behind
        if heard and not _chooses_rank(record):
            heard = dict.fromkeys(record.holders, max(heard.values()))
        return StreamFacts(heard, events, unreadable, gaps, restarts, behind)

    def _heard_elsewhere(self, holder: Worker, now: float) -> float | None:
        """When a batch of a stream that perhaps another gateway follows was last seen to come in."""
        sequence, (known, at) = self._knowledge.index.sequence(holder), self._heard.get(holder, (None, None))
        if sequence != known:
            at = now
        self._heard[holder] = sequence, at
        return at

    def _see_to(self, record: WorkerRecord, trust: Trust, before: TrustLevel, turn: Turn) -> None:
        for doubt, reason in turn.raised:
            self.raised[record.name, doubt] += 1
            level = logging.ERROR if doubt is Doubt.SILENT else logging.WARNING
            logger.log(level, "worker %s: %s: %s; %s", record.name, doubt, reason, _CONSEQUENCES[trust.level])
        for doubt in turn.dropped:
            logger.info("worker %s: %s no longer; %s", record.name, doubt, _CONSEQUENCES[trust.level])
        if before is not TrustLevel.EXACT and trust.level is TrustLevel.EXACT:
            logger.info("worker %s: its events are believed again", record.name)
        if before is TrustLevel.EXACT and trust.level is not TrustLevel.EXACT:
            for holder in record.holders:
                self._knowledge.history.recall((holder.name, holder.rank))
        if turn.remedy is not None:
            for intake in record.intakes:
                logger.warning("worker %s, rank %d: what it holds is forgotten", record.name, intake.holder.rank)
                intake.forget(reread=turn.remedy is Remedy.REREAD)


def _chooses_rank(record: WorkerRecord) -> bool:
    """Whether requests go to the rank that we say; where the engine chooses, any of them may have served one."""
    return bool(record.traits.rank_header) or len(record.holders) == 1
