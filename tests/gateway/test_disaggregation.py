"""A request's two legs, with a scripted prefill worker: what is counted and learned, and what the second leg gets."""

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from cachecore.blocks import Chain
from cachecore.holders import Epoch, Worker, WorkerName
from cachecore.index.contract import NO_MATCH
from cachecore.index.memory import MemoryIndex
from cachecore.prompts.contract import NamedPrompt
from cachecore.scope import DEFAULT_TENANT, Fidelity, Keyring
from gateway.config import ProbesConfig, WorkerConfig
from gateway.disaggregation import TRIALS, TRIED_AGAIN_SECONDS, Disaggregation, Division, Prompted
from gateway.edge.http1 import parse_request_head
from gateway.edge.server import Inbound
from gateway.fleet.engines.contract import Discovery, TransferAbility
from gateway.fleet.knowledge import Knowledge
from gateway.fleet.registry import Fleet
from gateway.fleet.streams import Intakes, OwnStreams
from gateway.fleet.worker import ModelPool, Parity, WorkerRecord
from gateway.requests import Kind, Request
from gateway.tenants import Tenant
from gateway.transfers import Transfers, TransferSettings
from policies import create
from policies.contract import Query, Receipt, candidate_fields
from policies.legs import Outcome
from policies.transfer import DeadlineBounds
from tests.gateway.edge.conftest import CLOSE, HANG, Script
from tests.gateway.edge.conftest import Worker as Scripted

BLOCK = 16
BLOCKS = 500
TOKENS = BLOCKS * BLOCK + 5
CHAIN = Chain(b"".join(number.to_bytes(16, "big") for number in range(1, BLOCKS + 1)))
ANSWER = b'{"usage":{"prompt_tokens":%d,"completion_tokens":1,"prompt_tokens_details":{"cached_tokens":0}}}' % TOKENS
OK = b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(ANSWER), ANSWER)
BOUNDS = DeadlineBounds(0.2, 0.2)


def parts(worker: WorkerRecord, rank: int, request_id: str) -> list[bytes]:
    return [b"POST / HTTP/1.1\r\nx-request-id: %b\r\ncontent-length: 0\r\n\r\n" % request_id.encode()]


class World:
    """A pool with a prefill and a decode worker, as probes would have found them. Its clock stands still."""

    def __init__(self) -> None:
        self.now = 100.0
        self.prefill = Scripted()
        self.knowledge = Knowledge(MemoryIndex())
        streams = OwnStreams(Intakes(self.knowledge.index, lambda *_: None))
        self.fleet = Fleet(ProbesConfig(), {}, self.knowledge, streams)
        self.pool = ModelPool("m")
        self.pool.transfers = True
        settings = TransferSettings(Fidelity.QUANTIZED, ("i8", "raw"), DeadlineBounds())
        self.transfers = Transfers(settings, Keyring.generate(), self.fleet.workers, self.knowledge.estimates)
        self.disaggregation = Disaggregation(BOUNDS, 1.0, self.fleet, self.knowledge, self.transfers, lambda: self.now)

    async def start(self) -> None:
        connections = await self.prefill.start()
        self.add("p", "prefill").connections = connections
        self.add("d", "decode")

    def add(self, name: str, role: Any) -> WorkerRecord:
        config = WorkerConfig(url=f"http://127.0.0.1:{len(self.fleet.workers) + 1}", name=name, role=role)
        record = self.fleet.workers[name] = WorkerRecord.of(config)
        record.epoch, record.healthy = Epoch(7), True
        record.trust.follow(True)
        record.holders = (record.holder(),)
        record.discovery = Discovery({}, epoch=7, block_size_tokens=BLOCK)
        record.discovery.transfer = TransferAbility(
            Worker(WorkerName(f"{name}.internal"), Epoch(7), 0), ("tcp://10.0.0.1:1",), "c1" * 16,
            frozenset({"raw", "i8"}), 20_000,
        )  # fmt: skip
        self.pool.workers.append(record)
        self.pool.refresh_roles()
        return record

    def receipt(self) -> Receipt:
        """A decision made now, of the request's first leg or its second."""
        candidates = self.fleet.candidates(self.pool)
        snapshot = self.knowledge.snapshot(self.pool, candidates, NO_MATCH, CHAIN, TOKENS, self.now, False)
        query = Query(TOKENS)
        decision = create("kv-aware").decide(query, snapshot, self.disaggregation._random)
        fields = candidate_fields(snapshot.workers)
        place = snapshot.workers.index(decision.worker)
        return Receipt("r", "m", "kv-aware", query, BLOCK, decision, place, fields, 0.0, 0.0)

    def weigh(self, chain: Chain = CHAIN, **changes: Any) -> Division | None:
        head = parse_request_head(b"POST /v1/chat/completions HTTP/1.1\r\nhost: x")
        inbound = Inbound(head, "/v1/chat/completions", b"", "")
        request = Request("r", "r", Kind.CHAT, inbound, None, Tenant(DEFAULT_TENANT))
        for name, value in changes.items():
            setattr(request, name, value)
        prompted = Prompted(request, self.pool, NamedPrompt(TOKENS, chain), NO_MATCH)
        return self.disaggregation.weigh(prompted, self.receipt(), self.now)

    def division(self, *scripts: Script) -> Division:
        self.prefill.scripts = list(scripts)
        division = self.weigh()
        assert division is not None
        assert division.legs.outcome is Outcome.TWO_LEGS
        return division

    @property
    def counted(self) -> list[int]:
        """Requests, and prompts predicted, that are still under way."""
        account = self.knowledge.accounting.account("p")
        return [len(self.knowledge.accounting), account.inflight, account.waiting, len(self.knowledge.predictions)]


@pytest.fixture
async def world() -> AsyncIterator[World]:
    world = World()
    await world.start()
    yield world
    for record in world.fleet.workers.values():
        record.connections.close_idle()
    await world.prefill.stop()
    world.fleet.workers.clear()
    await world.fleet.stop()


# What is divided


async def test_prefill_workers_are_no_candidates(world: World) -> None:
    assert [record.name for record in world.fleet.candidates(world.pool)] == ["d"]
    assert [record.name for record in world.fleet.prefill_candidates(world.pool)] == ["p"]
    assert world.fleet.prefill_candidates(world.pool, "adapter") == []
    world.fleet.workers["p"].draining = True
    assert world.fleet.prefill_candidates(world.pool) == []


@pytest.mark.parametrize("changes", [{"skips_cache": True}, {"prompts_count": 2}, {"chain": Chain(b"")}])
async def test_what_has_no_one_prompt_is_left_alone(world: World, changes: dict[str, Any]) -> None:
    assert world.weigh(**changes) is None


async def test_without_transfers_there_is_one_leg(world: World) -> None:
    world.disaggregation.transfers = None
    division = world.weigh()
    assert division is not None
    assert division.legs.outcome is Outcome.NO_SOURCE
    assert not await division.run(parts)
    assert world.prefill.requests == []


async def test_the_prefill_workers_cache_counts(world: World) -> None:
    world.knowledge.predictions.predict("other", ("p", 0), CHAIN, world.now)
    division = world.weigh()
    assert division is not None
    assert division.legs.matched_tokens == BLOCKS * BLOCK
    world.fleet.workers["p"].parity = Parity.FAILED
    division = world.weigh()
    assert division is not None
    assert division.legs.matched_tokens == 0


# The first leg


async def test_a_leg_is_counted_while_it_lasts_and_teaches_how_long_it_took(world: World) -> None:
    division = world.division([0.05, OK])
    running = asyncio.create_task(division.run(parts))
    await asyncio.sleep(0.02)
    assert world.counted == [1, 1, 1, 1]
    world.now += 5.0
    assert await running
    # What it will have is believed until its events say so.
    assert world.counted == [0, 0, 0, 1]
    assert (division.legs.outcome, division.legs.seconds) == (Outcome.TWO_LEGS, 5.0)
    [request] = world.prefill.requests
    assert dict(request.headers)[b"x-request-id"] == b"r-prefill"
    model = world.knowledge.estimates.prefill(("p", 0))
    assert model.calibration.observations == 1
    assert model.prefill_seconds(TOKENS, 0) > 2 * division.legs.prefill_seconds
    assert world.fleet.workers["p"].parity_matches_in_a_row == 1
    assert world.disaggregation.metrics.outcomes == {Outcome.TWO_LEGS: 1}


@pytest.mark.parametrize(
    ("script", "outcome", "paused"),
    [
        ([b"HTTP/1.1 500 Oh\r\ncontent-length: 0\r\n\r\n"], Outcome.REFUSED, True),
        ([b"HTTP/1.1 503 Oh\r\ncontent-length: 0\r\n\r\n"], Outcome.REFUSED, True),
        ([b"HTTP/1.1 400 Oh\r\ncontent-length: 0\r\n\r\n"], Outcome.REFUSED, False),
        ([HANG], Outcome.DEADLINE, True),
        ([OK[:-3], CLOSE], Outcome.UNREACHABLE, False),
    ],
)
async def test_a_leg_that_fails_leaves_nothing_behind(
    world: World, script: Script, outcome: Outcome, paused: bool
) -> None:
    division = world.division(script)
    assert await division.run(parts)
    assert division.legs.outcome is outcome
    assert division.legs.problem
    assert world.counted == [0, 0, 0, 0]
    receipt = world.receipt()
    division.settle(receipt, world.now)
    assert (receipt.legs, receipt.decision.pull) == (division.legs, None)
    document = world.disaggregation.document()
    assert document is not None
    assert document["requests"] == {outcome.value: 1}
    assert bool(document["paused"]) == paused
    # It was reachable, or it is not asked again before it was found well.
    assert world.fleet.workers["p"].healthy == (outcome is not Outcome.UNREACHABLE)


async def test_one_that_took_too_long_is_known_to_be_slow(world: World) -> None:
    division = world.division([HANG])
    clock: Callable[[], float] = iter((100.0, 103.0)).__next__
    world.disaggregation.clock = clock
    await division.run(parts)
    model = world.knowledge.estimates.prefill(("p", 0))
    assert model.prefill_seconds(TOKENS, 0) > 2 * division.legs.prefill_seconds


async def test_a_paused_worker_is_asked_again_later(world: World) -> None:
    world.disaggregation.accounts.failed("p", "prompts", "internal", world.now)
    division = world.weigh()
    assert division is not None
    assert division.legs.outcome is Outcome.NO_SOURCE
    world.now += 10.0
    assert await world.division([OK]).run(parts)
    world.disaggregation.accounts.failed("p", "prompts", "internal", world.now)
    document = world.disaggregation.document()
    assert document is not None
    # Having answered, it begins anew.
    assert document["paused"] == {"p>prompts": 2.0}


async def test_a_client_that_leaves_ends_the_leg(world: World) -> None:
    division = world.division([HANG])
    running = asyncio.create_task(division.run(parts))
    while not world.prefill.requests:
        await asyncio.sleep(0.005)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert world.counted == [0, 0, 0, 0]
    assert world.disaggregation.metrics.outcomes == {Outcome.CLIENT_GONE: 1}
    while world.prefill.open:
        await asyncio.sleep(0.005)


async def test_a_prefill_worker_is_tried_until_it_is_known(world: World) -> None:
    """Even where it is thought to be much slower than it is."""
    model = world.knowledge.estimates.prefill(("p", 0))
    model.calibration.fixed = model.calibration.variable = 50.0
    model.apply_calibration()
    trials = 0
    while True:
        world.prefill.scripts = [[0.01, OK]]
        division = world.weigh()
        assert division is not None
        running = asyncio.create_task(division.run(parts))
        await asyncio.sleep(0)
        world.now += 0.2
        if not await running:
            break
        trials += division.legs.trial
        world.knowledge.predictions.cancel(division.leg_id)
        assert trials <= TRIALS
        if not division.legs.trial:
            break
    assert trials == TRIALS
    assert model.prefill_seconds(TOKENS, 0) == pytest.approx(0.2, rel=0.5)
    # It is known now; five minutes later it might be another.
    model.calibration.fixed = model.calibration.variable = 50.0
    model.apply_calibration()
    division = world.weigh()
    assert division is not None
    assert division.legs.outcome is Outcome.BYPASS
    world.now += TRIED_AGAIN_SECONDS + 1.0
    division = world.weigh()
    assert division is not None
    assert (division.legs.outcome, division.legs.trial) == (Outcome.TWO_LEGS, True)


# The second


async def test_the_second_leg_pulls_all_complete_blocks(world: World) -> None:
    division = world.division([OK])
    await division.run(parts)
    receipt = world.receipt()
    division.settle(receipt, world.now)
    pull = receipt.decision.pull
    assert pull is not None
    assert (str(pull.source), pull.first_token, pull.end_token) == ("p", 0, BLOCKS * BLOCK)
    assert receipt.document()["reason"].startswith(f"0 of {TOKENS:,} tokens cached; pull 8,000 tokens from p as i8, ")
    division.first_token(world.now + 0.5)
    assert receipt.document()["legs"]["decode_ms"] == pytest.approx(500.0)
    assert division.header.startswith(b"x-ropeway-legs: outcome=two_legs; worker=p; seconds=0.000000\r\n")


async def test_what_is_there_by_now_is_not_pulled(world: World) -> None:
    division = world.division([OK])
    await division.run(parts)
    world.knowledge.predictions.predict("other", ("d", 0), CHAIN, world.now)
    receipt = world.receipt()
    division.settle(receipt, world.now)
    assert receipt.decision.pull is None


async def test_a_prefill_worker_that_has_restarted_has_nothing(world: World) -> None:
    division = world.division([OK])
    await division.run(parts)
    world.fleet.workers["p"].epoch = Epoch(8)
    receipt = world.receipt()
    division.settle(receipt, world.now)
    assert receipt.decision.pull is None
