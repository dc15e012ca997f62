"""Pulls of the same run at the same time: one is carried out, the others wait for what comes of it."""

import asyncio
from collections.abc import Hashable

from cachecore.transfer.errors import Reason
from cachecore.transfer.plan import Pull
from cachecore.transfer.transport import Expectation, Failed, Fetched, Outcome, Sink, Transport


class CoalescingTransport:
    """Around any transport.

    What another pull brings goes into that one's sink; who gets a `shared` outcome finds the run where the other put
    it. When the pull that is carried out is given up (its client went away) or runs out of its own time, one of those
    who wait carries on in its place, from the start.
    """

    def __init__(self, inner: Transport) -> None:
        self._inner = inner
        self._running: dict[Hashable, asyncio.Future[Outcome | None]] = {}

    async def fetch(self, pull: Pull, expectation: Expectation, sink: Sink, deadline: float) -> Outcome:
        key = _key(pull, expectation)
        while (running := self._running.get(key)) is not None:
            left = deadline - asyncio.get_running_loop().time()
            done, _ = await asyncio.wait([running], timeout=max(0.0, left))
            if not done:
                return Failed(Reason.DEADLINE, expectation.layers.first, "waiting for another pull of the same run")
            outcome = running.result()
            if outcome is not None:
                return _shared(outcome, expectation)
        return await self._lead(key, pull, expectation, sink, deadline)

    async def _lead(self, key: Hashable, pull: Pull, expectation: Expectation, sink: Sink, deadline: float) -> Outcome:
        running = self._running[key] = asyncio.get_running_loop().create_future()
        shared: Outcome | None = None
        try:
            outcome = await self._inner.fetch(pull, expectation, sink, deadline)
            ran_out = isinstance(outcome, Failed) and outcome.reason is Reason.DEADLINE
            shared = None if ran_out else outcome
            return outcome
        finally:
            del self._running[key]
            running.set_result(shared)


def _shared(outcome: Outcome, expectation: Expectation) -> Outcome:
    """What the other pull's outcome is to one whose sink has seen nothing."""
    match outcome:
        case Fetched():
            return outcome._replace(shared=True)
        case Failed():
            return outcome._replace(layer=expectation.layers.first)
    return outcome


def _key(pull: Pull, expectation: Expectation) -> Hashable:
    capability = pull.capability
    return pull.plan._replace(deadline_seconds=0.0), capability.key_id, capability.fidelity, expectation
