"""Requests that wait for a worker: whose turn it is and when, who is refused and how, what those leave who go."""

import asyncio
import json
from collections.abc import AsyncIterator
from itertools import count
from typing import Any

import pytest

from cachecore.holders import Epoch, Worker
from cachecore.index.memory import MemoryIndex
from cachecore.scope import TenantId
from gateway.admission import KEPT_SHARE, Admission, Asking, error_of
from gateway.config import AdmissionConfig, PrioritiesConfig, WorkerConfig
from gateway.edge.http1 import parse_request_head
from gateway.edge.server import Inbound
from gateway.errors import Overloaded, ServiceError, ShuttingDown, TooManyRequests
from gateway.fleet.engines.contract import Discovery, ModelEntry
from gateway.fleet.knowledge import Knowledge
from gateway.fleet.worker import ModelPool, WorkerRecord
from gateway.requests import Kind, Request
from gateway.tenants import Tenant
from policies.state.admission import Reason, Refusal

HEAD = parse_request_head(b"POST /v1/chat/completions HTTP/1.1\r\nhost: h\r\ncontent-length: 2")
TOKENS = 100


class World:
    """Two workers of one model, as probes would have found them, on a clock that stands still."""

    def __init__(self, **config: Any) -> None:
        self.now = 100.0
        self.knowledge = Knowledge(MemoryIndex())
        self.pool = ModelPool("m")
        self.statuses: list[int] = []
        self.admission = Admission(
            AdmissionConfig(**config), PrioritiesConfig(), self.knowledge, self.statuses.append, lambda: self.now
        )
        self.numbers = count()
        self.workers = [self.worker(name) for name in ("a", "b")]

    def worker(self, name: str) -> WorkerRecord:
        record = WorkerRecord.of(WorkerConfig(url="http://127.0.0.1:1", name=name))
        record.healthy, record.holders = True, (Worker(record.name, Epoch(1), 0),)
        self.pool.workers.append(record)
        return record

    def fill(self, worker: str, seconds: float = 10.0) -> str:
        """Let a worker have so much to do."""
        request_id = f"before-{next(self.numbers)}"
        self.knowledge.accounting.dispatch(request_id, worker, 0, self.now, 1000, seconds)
        return request_id

    def free(self, request_id: str) -> None:
        self.knowledge.accounting.first_token(request_id, self.now)
        self.knowledge.accounting.finish(request_id, self.now)
        self.admission.moved(self.pool)

    def request(self, tenant: str = "t", data: bytes = b"{}", **fields: Any) -> Request:
        request_id = f"r{next(self.numbers)}"
        request = Request(
            request_id, request_id, Kind.CHAT, Inbound(HEAD, "", data, ""), None, Tenant(TenantId(tenant))
        )
        for name, value in fields.items():
            setattr(request, name, value)
        return request

    def wait(self, request: Request, tokens: int = TOKENS) -> "asyncio.Task[str]":
        return asyncio.create_task(self._served(request, tokens))

    async def _served(self, request: Request, tokens: int) -> str:
        with await self.admission.wait(self.pool, Asking(request, tokens, 0)):
            self.knowledge.accounting.dispatch(request.id, "a", 0, self.now, tokens, 1.0)
            self.admission.begun(request, self.pool, tokens)
        return request.id

    @property
    def waiting(self) -> int:
        return self.admission.held.requests


async def settle() -> None:
    """Let everything happen that needs no time."""
    for _ in range(10):
        await asyncio.sleep(0)


@pytest.fixture
async def world() -> AsyncIterator[World]:
    world = World()
    yield world
    world.admission.close()
    await settle()
    assert (world.waiting, world.admission.held.bytes) == (0, 0)


async def test_who_finds_room_passes_and_who_does_not_waits(world: World) -> None:
    assert world.admission.passes(world.request(), world.pool)
    world.fill("a")
    assert world.admission.passes(world.request(), world.pool)
    world.fill("b")
    assert not world.admission.passes(world.request(), world.pool)
    # A backlog within what a worker is sent ahead is room.
    world.now += 9.8
    assert world.admission.passes(world.request(), world.pool)


@pytest.mark.parametrize("state", ["unhealthy", "draining", "barred", "gone"])
async def test_without_a_worker_nobody_waits_for_one(world: World, state: str) -> None:
    for name in "ab":
        world.fill(name)
    assert not world.admission.passes(world.request(), world.pool)
    for record in world.workers:
        record.healthy, record.draining = state in ("draining", "barred"), state == "draining"
        record.barred = state == "barred"
    if state == "gone":
        world.pool.workers.clear()
    assert world.admission.passes(world.request(), world.pool)


@pytest.mark.parametrize("way", ["unhealthy", "barred"])
async def test_a_worker_that_is_no_candidate_is_no_room(world: World, way: str) -> None:
    world.fill("a")
    assert world.admission.passes(world.request(), world.pool)
    world.workers[1].healthy, world.workers[1].barred = way != "unhealthy", way == "barred"
    assert not world.admission.passes(world.request(), world.pool)


async def test_an_adapter_waits_for_those_that_serve_it_and_holds_up_nobody_else(world: World) -> None:
    # Where nobody serves the adapter, whoever decides says so.
    assert world.admission.passes(world.request(adapter="lora"), world.pool)
    world.workers[0].discovery = Discovery({"m": ModelEntry({}), "lora": ModelEntry({})})
    before = [world.fill("a"), world.fill("b")]
    assert not world.admission.passes(world.request(adapter="lora"), world.pool)
    adapted, plain = world.wait(world.request(adapter="lora")), world.wait(world.request())
    await settle()
    world.free(before[1])
    await settle()
    assert (adapted.done(), plain.done()) == (False, True)
    world.free(plain.result())
    world.free(before[0])
    await settle()
    assert adapted.done()


async def test_turns_come_one_by_one_as_room_does(world: World) -> None:
    before = world.fill("a")
    world.fill("b")
    tasks = [world.wait(world.request()) for _ in range(3)]
    await settle()
    assert world.waiting == 3
    world.free(before)
    await settle()
    # The first has taken the room that there was: a second that each would fill.
    assert [task.done() for task in tasks] == [True, False, False]
    world.free(tasks[0].result())
    await settle()
    assert [task.done() for task in tasks] == [True, True, False]
    world.free(tasks[1].result())
    await settle()
    assert tasks[2].done()
    assert world.waiting == 0


async def test_backlogs_that_fall_with_the_clock_are_noticed(world: World) -> None:
    for name in "ab":
        world.fill(name)
    task = world.wait(world.request())
    await settle()
    assert not task.done()
    world.now += 9.9
    await asyncio.wait_for(task, 5.0)


async def test_where_something_always_moves_turns_come_all_the_same(world: World) -> None:
    before = world.fill("a")
    world.fill("b")
    task = world.wait(world.request())
    await settle()
    loop, stirred = asyncio.get_running_loop(), count()

    def stir() -> None:
        world.admission.moved(world.pool)
        if next(stirred) < 1000:
            loop.call_soon(stir)

    stir()
    world.free(before)
    await settle()
    assert task.done()


async def test_who_leaves_frees_its_place_at_once_and_is_never_served(world: World) -> None:
    before = world.fill("a")
    world.fill("b")
    leaving, staying = world.wait(world.request()), world.wait(world.request())
    await settle()
    leaving.cancel()
    await settle()
    assert (world.waiting, world.admission.metrics.left) == (1, 1)
    world.free(before)
    await settle()
    assert staying.done()


async def test_who_leaves_in_the_moment_its_turn_comes_passes_it_on(world: World) -> None:
    before = world.fill("a")
    world.fill("b")
    leaving, staying = world.wait(world.request()), world.wait(world.request())
    await settle()
    gate = world.admission.gate(world.pool)
    world.free(before)
    while gate._granted is None:
        await asyncio.sleep(0)
    leaving.cancel()
    await settle()
    assert leaving.cancelled()
    assert staying.done()
    assert world.waiting == 0


async def test_a_turn_that_comes_to_nothing_is_given_back(world: World) -> None:
    before = world.fill("a")
    world.fill("b")

    async def fail() -> None:
        with await world.admission.wait(world.pool, Asking(world.request(), TOKENS, 0)):
            raise Overloaded("too late after all")

    failing = asyncio.create_task(fail())
    await settle()
    following = world.wait(world.request())
    await settle()
    world.free(before)
    await settle()
    with pytest.raises(Overloaded):
        await failing
    assert following.done()


# Refused


async def refused(world: World, task: "asyncio.Task[str]", kind: type[ServiceError]) -> ServiceError:
    with pytest.raises(kind) as caught:
        await asyncio.wait_for(task, 5.0)
    assert caught.value.status == world.statuses[-1]
    return caught.value


async def test_who_has_waited_long_enough_is_told(world: World) -> None:
    for name in "ab":
        world.fill(name, 1000.0)
    task = world.wait(world.request())
    await settle()
    world.now += 59.9
    await settle()
    assert not task.done()
    world.now += 0.2
    error = await refused(world, task, Overloaded)
    assert (error.code, error.retry_after_seconds) == ("overloaded", 1)


async def test_a_deadline_counts_from_the_arrival_and_leaves_time_for_the_prefill(world: World) -> None:
    for name in "ab":
        world.fill(name, 1000.0)
    request = world.request(ttft_budget_seconds=5.0)
    world.admission.arrived(request, world.pool)
    assert request.deadline == 100.0 + 5.0 * KEPT_SHARE
    model = world.knowledge.estimates.prefill(("a", 0))
    task = world.wait(request)
    await settle()
    world.now = request.deadline - model.prefill_seconds(TOKENS, 0, 0) - 0.01
    await settle()
    assert not task.done()
    world.now += 0.02
    await refused(world, task, Overloaded)


async def test_what_no_worker_could_compute_in_time_is_refused_on_arrival(world: World) -> None:
    for name in "ab":
        world.fill(name)
    request = world.request(ttft_budget_seconds=0.2)
    world.admission.arrived(request, world.pool)
    task = world.wait(request)
    await settle()
    assert task.done()
    await refused(world, task, Overloaded)
    assert world.admission.metrics.refused == {(Reason.DEADLINE, False): 1}


async def test_the_budget_of_requests_that_say_nothing_is_configured() -> None:
    world = World(ttft_budget_ms=1500.0)
    silent, stated = world.request(), world.request(ttft_budget_seconds=3.0)
    for request in (silent, stated):
        world.admission.arrived(request, world.pool)
    assert (silent.deadline, stated.deadline) == (100.0 + 1.5 * KEPT_SHARE, 100.0 + 3.0 * KEPT_SHARE)
    unbounded = world.request()
    World().admission.arrived(unbounded, world.pool)
    assert unbounded.deadline is None


async def test_a_full_queue_is_429_before_anything_is_done_for_a_request() -> None:
    world = World(requests_max=2)
    for name in "ab":
        world.fill(name)
    tasks = [world.wait(world.request()) for _ in range(2)]
    await settle()
    with pytest.raises(TooManyRequests) as caught:
        world.admission.arrived(world.request(), world.pool)
    assert caught.value.code == "queue_full"
    assert world.statuses == [429]
    # Somebody else's first takes the place of the last of the longest line.
    other = world.request("u")
    world.admission.arrived(other, world.pool)
    other_task = world.wait(other)
    await settle()
    error = await refused(world, tasks[1], TooManyRequests)
    assert (error.code, error.retry_after_seconds) == ("over_share", 1)
    assert not tasks[0].done()
    assert not other_task.done()
    again = await refused(world, world.wait(world.request()), TooManyRequests)
    assert "of yours" in str(again)
    world.admission.close()
    for task in (tasks[0], other_task):
        await refused(world, task, ShuttingDown)


async def test_bodies_are_bounded_in_bytes_over_all_models() -> None:
    world = World(bytes_max=2048)
    other = ModelPool("other")
    other.workers = world.pool.workers
    for name in "ab":
        world.fill(name)
    first = world.wait(world.request(data=b"x" * 1500))
    await settle()
    with pytest.raises(TooManyRequests):
        await world.admission.wait(other, Asking(world.request(data=b"x" * 600), TOKENS, 0))
    assert world.admission.held.bytes == 1500
    world.admission.close()
    await refused(world, first, ShuttingDown)
    assert world.admission.held.bytes == 0


async def test_closing_tells_everyone_and_lets_nobody_wait(world: World) -> None:
    before = world.fill("a")
    world.fill("b")
    task = world.wait(world.request())
    await settle()
    world.admission.close()
    error = await refused(world, task, ShuttingDown)
    assert (error.status, error.code) == (503, "shutting_down")
    await refused(world, world.wait(world.request()), ShuttingDown)
    world.free(before)
    assert world.admission.passes(world.request(), world.pool)


@pytest.mark.parametrize(
    ("refusal", "status", "retry_after"),
    [
        (Refusal(Reason.OVER_SHARE, 0.0), 429, b"1"),
        (Refusal(Reason.QUEUE_FULL, 2.1), 429, b"3"),
        (Refusal(Reason.DEADLINE, 7.0), 503, b"7"),
        (Refusal(Reason.CLOSING, 0.0), 503, b"1"),
    ],
)
def test_every_refusal_is_an_openai_error_that_says_when_to_come_back(
    refusal: Refusal, status: int, retry_after: bytes
) -> None:
    error = error_of(refusal)
    assert error.status == status
    assert dict(error.headers())[b"retry-after"] == retry_after
    assert set(json.loads(error.body())["error"]) == {"message", "type", "param", "code"}


# Order


async def test_tenants_take_turns_however_many_wait_of_each() -> None:
    world = World(quantum_tokens=1.0)
    before = world.fill("a")
    world.fill("b")
    tasks = {f"flood {number}": world.wait(world.request("flood")) for number in range(20)}
    await settle()
    tasks |= {f"quiet {number}": world.wait(world.request("quiet")) for number in range(2)}
    await settle()
    order: list[str] = []
    world.free(before)
    while len(order) < 6:
        await settle()
        (name,) = [name for name, task in tasks.items() if task.done() and name not in order]
        order.append(name)
        world.free(tasks[name].result())
    assert sorted(name[:5] for name in order[:4]) == ["flood", "flood", "quiet", "quiet"]
    assert [name for name in order if name.startswith("flood")] == [f"flood {number}" for number in range(4)]
    world.admission.close()
    await asyncio.gather(*tasks.values(), return_exceptions=True)


async def test_priorities_order_a_tenants_own_and_are_clamped(world: World) -> None:
    admission = world.admission
    ranks = [admission.rank_of(world.request(priority=priority), 100.0) for priority in (-1000, 0, 1, 100, 10**9)]
    assert ranks == [100.0, 100.0, 105.0, 600.0, 600.0]
    before = world.fill("a")
    world.fill("b")
    low, high = world.wait(world.request(priority=2)), world.wait(world.request(priority=1))
    await settle()
    world.free(before)
    await settle()
    assert (low.done(), high.done()) == (False, True)


async def test_an_output_that_was_longer_than_usual_is_charged_afterwards(world: World) -> None:
    request = world.request(output_tokens_max=10)
    world.admission.gate(world.pool)
    world.admission.begun(request, world.pool, 100)
    totals = world.admission.gate(world.pool).shares.totals
    assert totals == {"t": 110.0}
    world.admission.ended(request, world.pool, 10)
    world.admission.ended(request, world.pool, 4)
    world.admission.ended(request, world.pool, 0)
    assert totals == {"t": 110.0}
    unbounded = world.request()
    world.admission.begun(unbounded, world.pool, 0)
    usual = world.knowledge.accounting.output_tokens_mean
    assert totals == {"t": 111.0 + usual}
    world.admission.ended(unbounded, world.pool, 1000)
    assert totals == {"t": 1111.0}


async def test_models_that_are_gone_are_forgotten(world: World) -> None:
    gone = ModelPool("gone")
    gone.workers = [world.workers[0]]
    assert world.admission.passes(world.request(), gone)
    gone.workers = []
    assert world.admission.passes(world.request(), world.pool)
    assert list(world.admission.gates) == ["m"]
    # Back again it is another one, with nothing to its account.
    again = ModelPool("m")
    again.workers = world.pool.workers
    world.admission.begun(world.request(), world.pool, 1)
    assert world.admission.passes(world.request(), again)
    assert world.admission.gates["m"].pool is again
    assert world.admission.gates["m"].shares.totals == {}


async def test_who_is_held_back_waits_for_more_room_than_others(world: World) -> None:
    world.fill("b")
    world.fill("a", 0.2)
    gate = world.admission.gate(world.pool)
    gate.shares.held_back = frozenset({"greedy"})
    assert world.admission.passes(world.request("modest"), world.pool)
    assert not world.admission.passes(world.request("greedy"), world.pool)
    task = world.wait(world.request("greedy"))
    await settle()
    assert not task.done()
    world.now += 0.15
    await asyncio.wait_for(task, 5.0)


async def test_status_says_who_waits_and_who_was_refused(world: World) -> None:
    for name in "ab":
        world.fill(name)
    task = world.wait(world.request("acme"))
    await settle()
    document = world.admission.document()
    assert (document["waiting"], document["waiting_bytes"]) == (1, 2)
    model = document["models"]["m"]
    assert model["waiting"] == 1
    assert model["tenants"]["acme"]["waiting_tokens"] == TOKENS + world.knowledge.accounting.output_tokens_mean
    world.admission.close()
    await refused(world, task, ShuttingDown)
    assert world.admission.document()["refused"] == {"on_arrival": {}, "while_waiting": {"closing": 1}}
