"""A fleet in virtual time: who comes when, what is pulled from whom, and that nobody's books are wrong at the end."""

from collections.abc import Sequence
from math import inf
from random import Random
from typing import NamedTuple

import pytest

from cachecore.blocks import Chain
from cachecore.holders import Epoch, Tier, Worker, WorkerName
from loadtest.audit.engine import Engine, EngineShape
from loadtest.audit.fleet import Fleet, Outcomes
from loadtest.audit.link import LinkShape, Network
from loadtest.audit.prepared import prepare
from loadtest.audit.router import Router, RouterSettings
from loadtest.traces.contract import NO_PREDECESSOR, Trace, TraceRequest, block_name
from policies import create
from policies.contract import Decision, Policy, Query, Snapshot
from policies.transfer import DeadlineBounds, PullOption
from workers.timing import LLAMA_3_70B_TP8 as PROFILE
from workers.timing import Chunk

BLOCK = 512
TOKEN_BYTES = PROFILE.kv_bytes_per_token
STEP = PROFILE.decode_constant_seconds


class Row(NamedTuple):
    arrival: float
    path: Sequence[int]
    outputs: int = 2
    tokens: int = 0
    """Of the prompt beyond its blocks."""
    follows: int = NO_PREDECESSOR
    delay: float = 0.0


class Scripted:
    """Sends requests where a script says, in order of arrival."""

    name = "scripted"

    def __init__(self, *places: int) -> None:
        self.places = list(places)

    def decide(self, query: Query, snapshot: Snapshot, random: Random) -> Decision:
        return Decision(snapshot.workers[self.places.pop(0)], "as the script says")


def fleet_of(
    rows: Sequence[Row],
    policy: Policy,
    *,
    nodes: int = 2,
    blocks: int = 10_000,
    link: LinkShape | None = None,
    lag: float = 0.0,
) -> Fleet:
    requests = [
        TraceRequest(
            row.arrival,
            Chain(b"".join(block_name(hash((*row.path[: end + 1], "x")) % 2**62) for end in range(len(row.path)))),
            len(row.path) * BLOCK + row.tokens,
            row.outputs,
            follows=row.follows,
            delay_seconds=row.delay,
        )
        for row in rows
    ]
    trace = prepare(Trace("test", "test", BLOCK, requests))
    settings = RouterSettings(BLOCK, nodes, PROFILE.sequences_max, blocks, TOKEN_BYTES if link is not None else 0.0)
    router = Router(policy, settings, Random(1))
    engines = [Engine(EngineShape(PROFILE, BLOCK, blocks)) for _ in range(nodes)]
    network = Network(link, nodes) if link is not None else None
    if link is not None:
        teach(router, link, nodes)
    return Fleet(trace, trace.arrivals(1.0), engines, router, network, lag)


def teach(router: Router, link: LinkShape, nodes: int) -> None:
    """The links have been used before: the router knows how fast they are."""
    pairs = [(source, target) for source in range(nodes) for target in range(nodes) if source != target]
    for source, target in pairs * 8:
        for blocks in (1, 20):
            seconds = link.latency_seconds + seconds_for(blocks, link)
            size = blocks * BLOCK * TOKEN_BYTES
            router.beliefs.estimates.observe_link(f"worker-{source}", f"worker-{target}", size, seconds, 0.0)


def run(rows: Sequence[Row], *places: int, link: LinkShape | None = None, lag: float = 0.0) -> Outcomes:
    return fleet_of(rows, Scripted(*places), link=link, lag=lag).run()


def prefill(blocks: int, context: int = 0, extra: int = 0) -> float:
    return PROFILE.prompt_seconds(blocks * BLOCK + extra, context * BLOCK)


# Arrivals


def test_requests_that_come_at_once_share_a_step() -> None:
    outcomes = run([Row(1.0, [1, 2]), Row(1.0, [1, 2]), Row(1.0, [3, 4])], 0, 0, 1)
    together = PROFILE.prefill_seconds([Chunk(2 * BLOCK), Chunk(BLOCK, BLOCK)])
    assert outcomes.ttft == pytest.approx([together, together, prefill(2)])
    assert outcomes.cached_tokens == [0, BLOCK, 0]


def test_a_request_that_follows_another_comes_after_its_end() -> None:
    rows = [
        Row(0.0, [1], outputs=10),
        Row(0.0, [1, 2], follows=0, delay=2.5),
        Row(9.0, [1, 2, 3], follows=1, delay=1.0),
    ]
    outcomes = run(rows, 0, 0, 0)
    first_ended_at = outcomes.duration[0]
    assert outcomes.arrived_at == pytest.approx([0.0, first_ended_at + 2.5, 9.0])
    assert outcomes.cached_tokens == [0, BLOCK, 2 * BLOCK]


def test_what_no_engine_can_hold_is_refused_and_its_followers_come_all_the_same() -> None:
    fleet = fleet_of([Row(0.0, range(11)), Row(0.0, [1], follows=0, delay=1.0)], Scripted(0), blocks=10)
    outcomes = fleet.run()
    assert outcomes.rejected == [0]
    assert outcomes.ttft[0] == inf
    assert (outcomes.arrived_at[1], outcomes.worker) == (1.0, [-1, 0])


# Pulls

LINK = LinkShape(400.0, latency_seconds=0.005)


def seconds_for(blocks: int, link: LinkShape = LINK) -> float:
    return blocks * BLOCK * TOKEN_BYTES / (link.gigabits_per_second / 8 * 0.9e9)


def test_a_pull_takes_the_links_time_and_the_rest_is_computed() -> None:
    outcomes = run([Row(0.0, range(20)), Row(5.0, range(20), tokens=100)], 0, 1, link=LINK)
    assert outcomes.pulled_tokens == [0, 20 * BLOCK]
    assert outcomes.cached_tokens == [0, 20 * BLOCK]
    assert outcomes.moved_bytes == 20 * BLOCK * TOKEN_BYTES
    assert outcomes.ttft[1] == pytest.approx(0.005 + seconds_for(20) + prefill(0, 20, 100))


def test_a_pulled_request_starts_when_its_kv_is_there_though_the_engine_decodes() -> None:
    rows = [Row(0.0, range(20)), Row(0.0, [99], outputs=4000), Row(5.0, range(20), tokens=100)]
    outcomes = run(rows, 0, 1, 1, link=LINK)
    expected = 0.005 + seconds_for(20) + prefill(0, 20, 100) + STEP
    assert expected <= outcomes.ttft[2] <= expected + 1.2 * STEP


def test_only_what_is_missing_is_pulled() -> None:
    rows = [Row(0.0, range(20)), Row(0.0, range(8)), Row(5.0, range(20), tokens=100)]
    outcomes = run(rows, 0, 1, 1, link=LINK)
    assert outcomes.pulled_tokens[2] == 12 * BLOCK
    assert outcomes.moved_bytes == 12 * BLOCK * TOKEN_BYTES


class Pulling(Scripted):
    """Has every request but the first pull 20 blocks from the first worker."""

    def decide(self, query: Query, snapshot: Snapshot, random: Random) -> Decision:
        decision = super().decide(query, snapshot, random)
        if snapshot.pulls is not None:
            size = 20 * BLOCK * TOKEN_BYTES
            decision.pull = PullOption("worker-0", 0, 20 * BLOCK, "raw", 0, size, 0, 0.1, 0.1, 0.3, 5.0)
        return decision


def test_siblings_pull_a_run_once_and_wait_for_it() -> None:
    rows = [Row(0.0, range(20)), *[Row(5.0, range(20), tokens=100)] * 3]
    outcomes = fleet_of(rows, Pulling(0, 1, 1, 1), link=LINK).run()
    assert outcomes.moved_bytes == 20 * BLOCK * TOKEN_BYTES
    assert outcomes.pulled_tokens == [0, 20 * BLOCK, 0, 0]
    assert outcomes.cached_tokens[1:] == [20 * BLOCK] * 3
    assert outcomes.failed_pulls == {"held": 2}


def test_a_busy_source_serves_one_after_the_other() -> None:
    rows = [Row(0.0, range(20)), *[Row(5.0, range(20), tokens=100)] * 3]
    outcomes = fleet_of(rows, Scripted(0, 1, 2, 3), nodes=4, link=LINK).run()
    turns = [0.005 + turn * seconds_for(20) + prefill(0, 20, 100) for turn in (1, 2, 3)]
    assert outcomes.ttft[1:] == pytest.approx(turns)


def test_what_its_source_has_evicted_meanwhile_is_computed() -> None:
    """Events come late, so the router still believes in what is gone."""
    rows = [Row(0.0, range(10)), Row(20.0, range(100, 112)), Row(25.0, range(10), tokens=100)]
    outcomes = fleet_of(rows, Scripted(0, 0, 1), blocks=14, link=LINK, lag=9.0).run()
    assert outcomes.failed_pulls == {"stale": 1}
    assert outcomes.moved_bytes == 0
    assert outcomes.ttft[2] == pytest.approx(prefill(10, 0, 100))


def test_a_pull_that_is_too_slow_is_given_up_and_remembered() -> None:
    """The link is a hundredth of what it was when it was measured."""
    rows = [Row(0.0, range(20)), Row(5.0, range(20), tokens=100)]
    fleet = fleet_of(rows, Scripted(0, 1), link=LINK)
    fleet._network = Network(LinkShape(4.0), 2)
    outcomes = fleet.run()
    assert outcomes.failed_pulls == {"deadline": 1}
    assert (outcomes.moved_bytes, outcomes.cached_tokens[1]) == (0, 0)
    assert outcomes.ttft[1] == pytest.approx(DeadlineBounds().seconds_min + prefill(20, 0, 100))
    link = fleet._router.beliefs.estimates.link("worker-0", "worker-1")
    assert link.transfer_seconds(20 * BLOCK * TOKEN_BYTES) > 1.1 * (0.005 + seconds_for(20))


def test_what_is_only_predicted_is_pulled_from_nobody() -> None:
    """The first is under way when the second comes: nothing of it is there yet."""
    outcomes = run([Row(0.0, range(20)), Row(0.001, range(20), tokens=100)], 0, 1, link=LINK)
    assert (outcomes.pulls, outcomes.cached_tokens) == (0, [0, 0])


def test_what_is_announced_chunk_by_chunk_is_pulled_as_far_as_it_is_computed() -> None:
    rows = [Row(0.0, range(40)), Row(0.5, range(40), tokens=100)]
    assert prefill(16) < 0.5 < prefill(32)
    outcomes = run(rows, 0, 1, link=LINK)
    assert outcomes.pulled_tokens == [0, 16 * BLOCK]


# Books


def random_rows(random: Random, count: int) -> list[Row]:
    rows, arrival = [], 0.0
    for number in range(count):
        arrival += random.expovariate(20.0)
        path = [random.randrange(3) for _ in range(random.randrange(1, 30))]
        follows = random.randrange(number) if number and random.random() < 0.2 else NO_PREDECESSOR
        rows.append(Row(arrival, path, random.randrange(1, 200), random.randrange(BLOCK), follows, random.random()))
    return rows


@pytest.mark.parametrize("policy", ["kv-aware", "prefix-aware", "round-robin"])
@pytest.mark.parametrize("gigabits_per_second", [0.0, 10.0, 400.0])
def test_every_book_is_right_in_the_end(policy: str, gigabits_per_second: float) -> None:
    rows, nodes = random_rows(Random(7), 400), 3
    link = LinkShape(gigabits_per_second) if gigabits_per_second else None
    fleet = fleet_of(rows, create(policy), nodes=nodes, blocks=120, link=link)
    outcomes = fleet.run()
    assert max(outcomes.duration) < inf
    assert all(ttft <= duration for ttft, duration in zip(outcomes.ttft, outcomes.duration, strict=True))
    router, engines = fleet._router, fleet._engines
    for number, engine in enumerate(engines):
        held = set(router.index.holdings(Worker(WorkerName(f"worker-{number}"), Epoch(1)), Tier.L0))
        assert held == {*engine._references, *engine._idle}
        assert (engine.running, engine.waiting, engine.pinned_blocks) == (0, 0, 0)
        account = router.beliefs.accounting.account(f"worker-{number}")
        assert (account.inflight, account.waiting, account.inflight_tokens, account.kv_held_tokens) == (0, 0, 0, 0)
        assert account.fill == pytest.approx(engine.cached_blocks / 120)
    assert len(router.beliefs.accounting) == len(router.sources) == 0
    assert router.index.stats().unknown_removals == 0
    if gigabits_per_second == 400.0 and policy == "kv-aware":
        assert outcomes.moved_bytes > 0


def test_a_run_is_the_same_every_time() -> None:
    rows = random_rows(Random(3), 200)
    one, other = (fleet_of(rows, create("kv-aware"), nodes=4, blocks=120, link=LINK).run() for _ in range(2))
    assert one == other
