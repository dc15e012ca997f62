"""Replays by name, their numbers, and what is made of several of them."""

import json
from dataclasses import replace
from math import inf, isnan

import pytest

from cachecore.blocks import Chain
from loadtest.audit.link import LinkShape
from loadtest.audit.prepared import PreparedTrace, prepare
from loadtest.audit.runs import (
    RunResult,
    Scenario,
    policy_named,
    replay,
    seeds,
    seek_capacity,
    slo_capacity,
    sweep,
)
from loadtest.traces.contract import NO_PREDECESSOR, Trace, TraceRequest, block_name
from workers.timing import DYNAMO_POLYNOMIAL, LLAMA_3_70B_TP8

BLOCK = 512


def request(arrival: float, blocks: range, input_tokens: int, output_tokens: int = 1) -> TraceRequest:
    return TraceRequest(arrival, Chain(b"".join(map(block_name, blocks))), input_tokens, output_tokens)


def trace_of(*requests: TraceRequest) -> PreparedTrace:
    return prepare(Trace("test", "test", BLOCK, requests))


def grid(count: int, gap: float) -> PreparedTrace:
    """Prompts of 8 blocks, of which the first 4 are everybody's."""
    requests = []
    for number in range(count):
        chain = Chain(b"".join(map(block_name, [0, 1, 2, 3, *range(10 + 4 * number, 14 + 4 * number)])))
        requests.append(TraceRequest(number // 4 * 4 * gap, chain, 8 * BLOCK, 20))
    return prepare(Trace("grid", "test", BLOCK, requests))


def test_the_numbers_of_a_run() -> None:
    """Four requests at one engine, each alone: a miss, a part, a whole prompt whose last block is computed, another."""
    trace = trace_of(
        request(0.0, range(4), 4 * BLOCK),
        request(10.0, range(3), 3 * BLOCK + 100),
        request(20.0, range(4), 4 * BLOCK, output_tokens=11),
        request(30.0, range(100, 230), 130 * BLOCK),
    )
    result = replay(trace, Scenario("round-robin", nodes=1))
    assert (result.requests, result.rejects, result.trace) == (4, 0, "test")
    assert (result.capacity_blocks, result.row()["capacity"]) == (2_500, 2_500)
    assert result.hit_rate == pytest.approx(6 * BLOCK / (141 * BLOCK + 100))
    assert result.hit_rate_blocks == pytest.approx(6 / 142)
    prompt_seconds = LLAMA_3_70B_TP8.prompt_seconds
    own = [prompt_seconds(4 * BLOCK), prompt_seconds(100, 3 * BLOCK), prompt_seconds(BLOCK, 3 * BLOCK)]
    long = prompt_seconds(130 * BLOCK)
    assert result.ttft_ms.mean == pytest.approx(1e3 * (sum(own) + long) / 4)
    assert result.ttft_ms.p50 == pytest.approx(1e3 * sorted(own)[2])
    assert result.ttft_ms.p99 == pytest.approx(1e3 * long)
    assert long > 2.0
    assert (result.goodput, result.goodput_size_aware) == (0.75, 1.0)
    assert result.tpot_ms.p50 == pytest.approx(10.5, abs=0.2)
    assert result.e2e_ms.p99 == pytest.approx(1e3 * long)
    assert result.makespan_seconds == pytest.approx(30.0 + long)
    assert result.utilisation == pytest.approx((sum(own) + long + 0.105) / (30.0 + long), rel=1e-3)
    assert isnan(result.ttft_error_ms_median)


def test_what_is_refused_counts_against_goodput() -> None:
    trace = trace_of(request(0.0, range(4), 4 * BLOCK), request(1.0, range(100, 130), 30 * BLOCK))
    result = replay(trace, Scenario("round-robin", nodes=2, capacity_blocks=20))
    assert (result.rejects, result.goodput, result.goodput_size_aware) == (1, 0.5, 0.5)


def test_a_row_is_json_with_the_keys_of_the_report() -> None:
    scenario = Scenario("kv-aware", nodes=2, load=2.0, capacity_blocks=300, capacity="small", link=LinkShape(400.0))
    row = replay(grid(20, 1.0), scenario).row()
    assert json.loads(json.dumps(row, allow_nan=False)) == row
    assert {
        "policy", "nodes", "load", "capacity", "link_gbps", "hit_rate", "ttft_ms_mean", "ttft_ms_p50", "ttft_ms_p90",
        "ttft_ms_p99", "goodput", "uncached_max_over_mean",
    } <= row.keys()  # fmt: skip
    assert (row["policy"], row["nodes"], row["load"], row["capacity"], row["link_gbps"]) == (
        "kv-aware", 2, 2.0, "small", 400.0,
    )  # fmt: skip


def test_load_is_how_densely_requests_come() -> None:
    assert grid(400, 1.0).grid_seconds == 4.0
    trace = grid(8, 1.0)
    assert [time for time, _ in trace.arrivals(2.0).open] == [0.0] * 4 + [2.0] * 4
    spread = [time for time, _ in trace.arrivals(2.0, jitter_seconds=2.0, seed=5).open]
    assert spread == sorted(spread)
    assert len(set(spread[1:])) > 5
    assert all(0.0 <= time <= 3.0 for time in spread)
    assert spread == [time for time, _ in trace.arrivals(2.0, 2.0, 5).open]
    assert spread != [time for time, _ in trace.arrivals(2.0, 2.0, 6).open]
    with pytest.raises(ValueError, match="load must be positive"):
        trace.arrivals(0.0)


def test_names_of_blocks_that_are_not_full_are_dropped() -> None:
    prepared = trace_of(request(0.0, range(3), 2 * BLOCK + 5)).requests[0]
    assert prepared.names == [block_name(0), block_name(1)]
    assert prepared.chain == b"".join(prepared.names)
    assert prepared.follows == NO_PREDECESSOR


def test_a_node_twice_as_fast_takes_half_the_time() -> None:
    trace = trace_of(request(0.0, range(4), 4 * BLOCK, 5), request(100.0, range(10, 14), 4 * BLOCK, 5))
    for profile in (LLAMA_3_70B_TP8, DYNAMO_POLYNOMIAL):
        slow, fast = (
            replay(trace, Scenario("round-robin", 1, profile=profile, node_speeds=(speed,))) for speed in (1.0, 2.0)
        )
        assert fast.ttft_ms.p50 == pytest.approx(slow.ttft_ms.p50 / 2)
        assert fast.e2e_ms.p50 == pytest.approx(slow.e2e_ms.p50 / 2)


def test_estimates_that_start_wrong_come_right() -> None:
    trace = grid(400, 0.2)
    errors = {
        factor: replay(trace, Scenario("kv-aware", 2, prior_factor=factor)).ttft_error_ms_median
        for factor in (0.5, 1.0, 3.0)
    }
    assert max(errors.values()) < 1.5 * errors[1.0] + 10.0


def test_the_router_may_order_engines_queues() -> None:
    """A long prompt comes just before a short one, behind another long one."""
    long, short = request(0.001, range(100, 160), 60 * BLOCK), request(0.002, range(200, 201), BLOCK)
    trace = trace_of(request(0.0, range(60), 60 * BLOCK), long, short)
    scenario = Scenario("round-robin", nodes=1)
    first_come, ordered = (
        replay(trace, replace(scenario, engine_priorities=priorities)) for priorities in (False, True)
    )
    assert ordered.ttft_ms.p50 < 0.8 * first_come.ttft_ms.p50
    assert ordered.ttft_ms.p99 > first_come.ttft_ms.p99


def test_capacity_at_an_slo_lies_where_goodput_falls_to_it() -> None:
    assert slo_capacity([(2.0, 0.95), (1.0, 1.0), (3.0, 0.85)]) == pytest.approx(2.5)
    assert slo_capacity([(1.0, 0.99), (2.0, 0.90), (3.0, 0.5)]) == pytest.approx(2.0)
    assert slo_capacity([(1.0, 0.89), (2.0, 0.95)]) == 0.0
    assert slo_capacity([(1.0, 0.99), (2.0, 0.95)]) == inf
    assert slo_capacity([]) == 0.0


def test_a_sweep_ends_where_goodput_has_fallen() -> None:
    done: list[RunResult] = []
    results = sweep(grid(60, 1.0), Scenario("round-robin", 1), [4.0, 16.0, 1.0, 32.0], done.append, share_min=0.9)
    loads = [result.scenario.load for result in results]
    assert loads == sorted(loads)
    assert [result.goodput < 0.9 for result in results] == [False] * (len(results) - 1) + [True]
    assert done == results


@pytest.mark.parametrize("start", [2.0, 30.0])
def test_capacity_is_sought_from_either_side(start: float) -> None:
    trace, scenario = grid(60, 1.0), Scenario("round-robin", 1)
    results = seek_capacity(trace, replace(scenario, load=start), factor=1.5)
    assert len(results) > 2
    points = [(result.scenario.load, result.goodput) for result in results]
    everywhere = [(result.scenario.load, result.goodput) for result in sweep(trace, scenario, range(2, 32, 2))]
    assert slo_capacity(points) == pytest.approx(slo_capacity(everywhere), rel=0.1)
    assert 2.0 < slo_capacity(points) < 30.0


def test_seeds_differ_and_repeat() -> None:
    scenario = Scenario("kv-aware", 2, load=2.0, jitter_seconds=2.0)
    first, second = (seeds(grid(60, 0.5), scenario, 3) for _ in range(2))
    assert [result.scenario.seed for result in first] == [0, 1, 2]
    assert [result.ttft_ms for result in first] == [result.ttft_ms for result in second]
    assert len({result.ttft_ms for result in first}) == 3


def test_policies_of_ours_and_of_others_have_names() -> None:
    assert (policy_named("kv-aware").name, policy_named("dynamo").name) == ("kv-aware", "dynamo")
    with pytest.raises(ValueError, match=r"unknown policy 'lpm'; there are .*kv-aware.*dynamo"):
        policy_named("lpm")


@pytest.mark.parametrize(
    "wrong",
    [{"nodes": 0}, {"load": 0.0}, {"prior_factor": 0.0}, {"capacity_blocks": -1}, {"nodes": 2, "node_speeds": (1.0,)}],
)
def test_a_scenario_that_cannot_be_is_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="positive"):
        Scenario(**wrong)  # type: ignore[arg-type]
