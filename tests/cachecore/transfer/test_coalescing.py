"""Two requests that load the same run: one transfer, and nobody depends on who was first."""

import asyncio
from dataclasses import dataclass, field, replace

import pytest

from cachecore.blocks import PrefixHash
from cachecore.scope import Fidelity
from cachecore.transfer.coalescing import CoalescingTransport
from cachecore.transfer.errors import Reason
from cachecore.transfer.header import Span
from cachecore.transfer.plan import Pull
from cachecore.transfer.tcp.client import TcpTransport
from cachecore.transfer.transport import Expectation, Failed, Fetched, Outcome, Refused, Sink
from tests.cachecore.transfer.serving import PATIENT, serving
from tests.cachecore.transfer.world import (
    EXPECTATION,
    KEYRING,
    LAYERS,
    RUN,
    ListSink,
    MemorySource,
    make_plan,
    make_pull,
    whole_run,
)

PULL = make_pull(make_plan())
DONE = Fetched(6, 100, 0.5)


@dataclass
class Scripted:
    """A transport whose outcomes are set from outside, one for each pull that it carries out."""

    pulls: list[asyncio.Future[Outcome]] = field(default_factory=list)

    async def fetch(self, pull: Pull, expectation: Expectation, sink: Sink, deadline: float) -> Outcome:
        self.pulls.append(asyncio.get_running_loop().create_future())
        return await self.pulls[-1]


@dataclass
class Callers:
    inner: Scripted = field(default_factory=Scripted)

    def __post_init__(self) -> None:
        self.transport = CoalescingTransport(self.inner)

    async def call(
        self, pull: Pull = PULL, expectation: Expectation = EXPECTATION, seconds: float = 30
    ) -> asyncio.Task[Outcome]:
        """Under way when this returns."""
        deadline = asyncio.get_running_loop().time() + seconds
        task = asyncio.create_task(self.transport.fetch(pull, expectation, ListSink(), deadline))
        await settle()
        return task


async def settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


async def test_one_is_carried_out_for_all() -> None:
    callers = Callers()
    tasks = [await callers.call() for _ in range(8)]
    assert len(callers.inner.pulls) == 1
    callers.inner.pulls[0].set_result(DONE)
    outcomes = await asyncio.gather(*tasks)
    assert outcomes == [DONE] + [DONE._replace(shared=True)] * 7
    again = await callers.call()
    assert len(callers.inner.pulls) == 2
    callers.inner.pulls[1].set_result(DONE)
    assert await again == DONE


@pytest.mark.parametrize(
    ("outcome", "others"),
    [
        (Refused(Reason.STALE), Refused(Reason.STALE)),
        (Failed(Reason.CLOSED, 3, "gone"), Failed(Reason.CLOSED, 0, "gone")),  # nothing is in their sinks
    ],
)
async def test_a_failure_is_shared(outcome: Outcome, others: Outcome) -> None:
    callers = Callers()
    tasks = [await callers.call() for _ in range(3)]
    callers.inner.pulls[0].set_result(outcome)
    assert await asyncio.gather(*tasks) == [outcome, others, others]


async def test_when_one_gives_up_another_carries_on() -> None:
    callers = Callers()
    first, second, third = [await callers.call() for _ in range(3)]
    first.cancel()
    await settle()
    assert len(callers.inner.pulls) == 2
    callers.inner.pulls[1].set_result(DONE)
    assert await asyncio.gather(second, third) == [DONE, DONE._replace(shared=True)]
    assert first.cancelled()


async def test_one_that_waits_may_give_up() -> None:
    callers = Callers()
    first, second = [await callers.call() for _ in range(2)]
    second.cancel()
    await settle()
    assert second.cancelled()
    callers.inner.pulls[0].set_result(DONE)
    assert await first == DONE


async def test_what_one_sink_raises_is_not_the_others() -> None:
    callers = Callers()
    first, second = [await callers.call() for _ in range(2)]
    callers.inner.pulls[0].set_exception(ZeroDivisionError())
    with pytest.raises(ZeroDivisionError):
        await first
    await settle()
    callers.inner.pulls[1].set_result(DONE)
    assert await second == DONE


async def test_a_shorter_deadline_ends_the_waiting_alone() -> None:
    callers = Callers()
    first, second = await callers.call(), await callers.call(seconds=0.05)
    outcome = await second
    assert outcome[:2] == (Reason.DEADLINE, 0)
    callers.inner.pulls[0].set_result(DONE)
    assert await first == DONE


async def test_a_deadline_of_ones_own_is_not_the_others() -> None:
    callers = Callers()
    first, second = [await callers.call() for _ in range(2)]
    callers.inner.pulls[0].set_result(Failed(Reason.DEADLINE, 2))
    assert await first == Failed(Reason.DEADLINE, 2)
    await settle()
    callers.inner.pulls[1].set_result(DONE)
    assert await second == DONE


@pytest.mark.parametrize(
    ("pull", "expectation"),
    [
        (make_pull(make_plan(run=RUN._replace(tail=PrefixHash(b"u" * 16)))), EXPECTATION),
        (make_pull(make_plan(target_position=64), fidelity=Fidelity.ROTATED), EXPECTATION),
        (make_pull(make_plan(codec="i8")), EXPECTATION),
        (make_pull(make_plan("tcp://127.0.0.1:2")), EXPECTATION),
        (make_pull(make_plan(), fidelity=Fidelity.QUANTIZED), EXPECTATION),
        (PULL, replace(EXPECTATION, layers=Span(0, 3, LAYERS))),
    ],
)
async def test_what_differs_is_another_pull(pull: Pull, expectation: Expectation) -> None:
    callers = Callers()
    tasks = [await callers.call(), await callers.call(pull, expectation)]
    assert len(callers.inner.pulls) == 2
    for running in callers.inner.pulls:
        running.set_result(DONE)
    assert await asyncio.gather(*tasks) == [DONE, DONE]


async def test_another_deadline_in_the_plan_is_the_same_pull() -> None:
    callers = Callers()
    tasks = [await callers.call(), await callers.call(make_pull(make_plan(deadline_seconds=1.0)))]
    assert len(callers.inner.pulls) == 1
    callers.inner.pulls[0].set_result(DONE)
    assert await asyncio.gather(*tasks) == [DONE, DONE._replace(shared=True)]


async def test_over_a_real_transport() -> None:
    """The first one's client goes away within the run; the second one gets all of it."""
    gate = asyncio.Event()
    source = MemorySource(before=lambda layer: gate.wait() if layer == 3 else None)
    sinks = [ListSink(), ListSink()]
    async with serving(source) as server:
        inner = TcpTransport(KEYRING, PATIENT)
        transport = CoalescingTransport(inner)
        deadline = asyncio.get_running_loop().time() + 30
        order = make_pull(make_plan(server.address))
        tasks = [asyncio.create_task(transport.fetch(order, EXPECTATION, sink, deadline)) for sink in sinks]
        while len(sinks[0].frames) < 3:
            await asyncio.sleep(0.001)
        tasks[0].cancel()
        gate.set()
        outcome = await tasks[1]
        inner.close()
    assert isinstance(outcome, Fetched)
    assert not outcome.shared
    assert sinks[1].layers == whole_run()
    assert sinks[0].layers == whole_run(range(3))
    assert len(source.requests) == 2
