"""The slow questions to one worker, asked beside its probes: what it lacks, and whether it still tokenizes as we do.

Once in a life it is asked what it was started without. Of its answers' prompts one in a while is put to it again, to be
tokenized: where its token ids differ from ours, it has truncated or rendered something otherwise, and loses its
affinity. One that has lost it, and whose answers have been as we said for long enough, is put to proof again.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import httpx

from cachecore.holders import Epoch
from gateway.fleet import parity
from gateway.fleet.engines.contract import Lack
from gateway.fleet.engines.questions import ProbeError, Questions
from gateway.fleet.worker import ModelPool, Parity, WorkerRecord

logger = logging.getLogger("ropeway.fleet")

SAMPLE_BYTES_MAX = 32 * 1024
"""Of a body: rendering it again holds up the loop."""
SAMPLES_PER_SECOND = 8.0
"""Of all workers together."""
SAMPLES_AT_ONCE = 8
_AGAIN_SECONDS = 5.0
_FIRST_SAMPLE = 4
"""Answers of a new life before one is sampled."""


class Sample(NamedTuple):
    """A prompt that a worker was sent, as the question what its token ids are."""

    pool: ModelPool
    question: Mapping[str, Any]
    told: Sequence[int] | None = None
    """Its token ids as another worker has told them, where it cannot be tokenized here."""


class SampleBudget:
    """How many samples may be taken now, of a whole fleet: a bucket that fills at `SAMPLES_PER_SECOND`."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._left = float(SAMPLES_AT_ONCE)
        self._filled_at = clock()

    def take(self) -> bool:
        now = self._clock()
        self._left = min(self._left + (now - self._filled_at) * SAMPLES_PER_SECOND, SAMPLES_AT_ONCE)
        self._filled_at = now
        if self._left < 1.0:
            return False
        self._left -= 1.0
        return True


UNSALTED = Lack(
    "cache_salt",
    "it keeps one cache for all tenants, who can measure what others have asked",
    "give it to one tenant alone, or turn its prefix cache off",
)
"""Of engines that keep nobody apart."""


class Scrutiny:
    """Of one worker. `run` until cancelled."""

    def __init__(
        self, record: WorkerRecord, http: httpx.AsyncClient, budget: SampleBudget, divided: bool = False
    ) -> None:
        """`divided`: there are tenants who must not learn of each other."""
        self._record = record
        self._divided = divided
        self._budget = budget
        self._ask = Questions(http, record.url)
        self._wake = asyncio.Event()
        self._studied: Epoch | None = None
        self._sample: Sample | None = None
        record.answers_until_sampled = _FIRST_SAMPLE

    def life_begun(self) -> None:
        self._studied = self._sample = None
        self._record.answers_until_sampled = _FIRST_SAMPLE
        self._wake.set()

    def sample(self, sample: Sample) -> None:
        """A prompt to compare, if there is room for one. Called when `answers_until_sampled` is used up."""
        self._record.answers_until_sampled = parity.SAMPLED_EVERY
        if self._sample is None and self._budget.take():
            self._sample = sample
            self._wake.set()

    async def run(self) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            try:
                await self._study()
            except ProbeError as error:
                logger.info("worker %s left a question open: %s", self._record.name, error)
                if self._studied != self._record.epoch:
                    await asyncio.sleep(_AGAIN_SECONDS)
                    self._wake.set()
            except Exception:
                logger.exception("a closer look at worker %s failed", self._record.name)

    async def _study(self) -> None:
        record = self._record
        if self._studied != record.epoch and record.discovery is not None:
            epoch, found = record.epoch, tuple(await record.adapter.lacks(self._ask, record.discovery))
            if record.epoch != epoch:
                return  # the next life has woken us already
            if self._divided and not record.traits.salts:
                found += (UNSALTED,)
            self._studied, record.lacks = epoch, found
            for lack in found:
                logger.warning("worker %s lacks %s", record.name, lack)
        sample, self._sample = self._sample, None
        if sample is not None:
            await self._compare(sample)

    async def _compare(self, sample: Sample) -> None:
        record, epoch = self._record, self._record.epoch
        if record.parity is Parity.FAILED:
            if record.parity_matches_in_a_row >= parity.ANSWERS_REMEMBERED:
                verdict = await parity.prove(record.adapter, self._ask, sample.pool)
                if verdict.parity is not Parity.FAILED and record.epoch == epoch:
                    parity.settle(record, verdict.parity, verdict.reason)
            return
        difference = await self._difference(sample)
        # What is told by the clock may have changed between our rendering and its own: the second time counts.
        if difference and (difference := await self._difference(sample)) and record.epoch == epoch:
            parity.settle(record, Parity.FAILED, difference)

    async def _difference(self, sample: Sample) -> str:
        renderer, told, what = sample.pool.renderer, sample.told, "a prompt that it was sent"
        if renderer is None and told is None:
            return ""
        theirs = await self._record.adapter.tokenize(self._ask, sample.question)
        if theirs is None:
            return ""
        if renderer is not None:
            return parity.compare(renderer, sample.question, theirs, what)
        return parity.difference(told or (), theirs, "at another worker", what)
