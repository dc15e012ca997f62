"""An audit end to end on a small workload: bounds in order, rows as replayed, capacities, intervals, advice checked."""

import json
from dataclasses import replace
from math import inf

import pytest

from loadtest.audit.auditing import _searched, audit, hit_rates
from loadtest.audit.plan import Cache, Plan
from loadtest.audit.prepared import prepare
from loadtest.audit.report import Report
from loadtest.audit.runs import AMPLE_BLOCKS, Scenario, replay
from loadtest.commands import UsageError
from loadtest.hardware import LINKS
from loadtest.traces.contract import Trace
from loadtest.workloads.generating import generate
from workers.timing import LLAMA_3_70B_TP8

PLAN = Plan(LLAMA_3_70B_TP8, ["kv-aware", "round-robin"], gpus=8, nodes=[4], caches=[Cache("400")])


@pytest.fixture(scope="module")
def trace() -> Trace:
    return generate("tenants", 0, requests=300)


def audited(trace: Trace, plan: Plan = PLAN, **changes: object) -> Report:
    return audit(lambda seed: trace, replace(plan, **changes))


def test_rows_are_what_replays_come_to(trace: Trace) -> None:
    report = audited(trace)
    alone = replay(prepare(trace), Scenario("round-robin", 4, capacity_blocks=400, capacity="400")).row()
    row = next(row for row in report.rows if row["policy"] == "round-robin")
    for name in ("hit_rate", "ttft_ms_mean", "ttft_ms_p90", "goodput", "uncached_max_over_mean"):
        assert row[name] == pytest.approx(alone[name]), name
    assert row["capacity"] == "400"
    assert row["seeds"] == 1


def test_bounds_stand_in_their_order(trace: Trace) -> None:
    report = audited(trace, host_bytes=200 * 512 * LLAMA_3_70B_TP8.kv_bytes_per_token)
    rates = {bound.name: bound.hit_rate for bound in report.bounds}
    assert rates["siloed"] < rates["host"] <= rates["pooled"] <= rates["oracle"] <= rates["infinite"]
    saved = {bound.name: bound.gpu_hours_saved for bound in report.bounds}
    assert saved["infinite"] / saved["siloed"] == pytest.approx(rates["infinite"] / rates["siloed"], rel=0.01)
    for row in report.rows:
        assert row["hit_rate"] <= rates["infinite"]


def test_every_token_is_hit_or_missed_for_a_reason(trace: Trace) -> None:
    for row in audited(trace).rows:
        missed = sum(row[f"missed_{why}"] for why in ("cold", "capacity", "placement"))
        assert row["hit_rate"] + missed == pytest.approx(1.0, abs=1e-5)
        assert row["missed_cold"] > 0.0


def test_requests_that_no_engine_holds_are_said(trace: Trace) -> None:
    assert not any("tokens of KV" in note for note in audited(trace).notes)
    report = audited(trace, caches=[Cache("13")], policies=["round-robin"])
    (note,) = [note for note in report.notes if "tokens of KV" in note]
    assert int(note.split()[0]) == report.rows[0]["rejects"] > 0


def test_policies_are_held_against_the_first_seed_by_seed(trace: Trace) -> None:
    ours, theirs = audited(trace, seeds=3, policies=["round-robin", "kv-aware"]).rows
    assert (ours["ttft_over_first"], ours["ttft_over_first_ci95"]) == (1.0, 0.0)
    assert theirs["ttft_over_first"] < 1.0
    sweep = audited(trace, loads=[0.1, 0.5, 1.0, 2.0], policies=["round-robin", "kv-aware"]).rows
    unknown = [(row["policy"], row["load"]) for row in sweep if row["ttft_over_first"] is None]
    assert unknown == [("kv-aware", 1.0)]  # round robin had fallen behind by then


def test_gpu_hours_are_what_computing_the_reused_would_have_taken(trace: Trace) -> None:
    report = audited(trace)
    seconds = sum(LLAMA_3_70B_TP8.prompt_seconds(request.input_tokens) for request in trace.requests)
    row = report.rows[0]
    assert row["gpu_hours_saved"] == pytest.approx(row["hit_rate"] * seconds * 8 / 3_600, abs=1e-4)


def test_what_is_pulled_is_part_of_what_is_hit(trace: Trace) -> None:
    report = audited(trace, policies=["round-robin"], links=[None, LINKS["roce-400"]])
    alone, linked = report.rows
    assert (alone["link_gbps"], alone["hit_rate_pulled"]) == (0.0, 0.0)
    assert linked["link_gbps"] == 400.0
    assert linked["hit_rate"] > alone["hit_rate"]
    assert 0.0 < linked["hit_rate_pulled"] <= linked["hit_rate"]


def test_a_sweep_gives_capacities_and_stops_where_nobody_keeps_up(trace: Trace) -> None:
    report = audited(trace, loads=[0.1, 1.0, 10.0, 100.0])
    loads = {policy: [row["load"] for row in report.rows if row["policy"] == policy] for policy in PLAN.policies}
    assert all(found[-1] < 100.0 for found in loads.values())
    capacities = {one.policy: one.load for one in report.capacities}
    ours, theirs = capacities["kv-aware"], capacities["round-robin"]
    assert ours is not None
    assert theirs is not None
    assert 0.1 < theirs < ours < 10.0
    (nodes,) = (one for one in report.advice if one.topic == "nodes")
    assert nodes.figures["nodes"] == 4
    assert nodes.figures["nodes_ours"] <= 4
    assert nodes.figures["goodput"] >= 0.9


def test_capacities_are_found_without_being_told_where_to_look(trace: Trace) -> None:
    report = audited(trace, loads=[], policies=["round-robin"])
    (found,) = report.capacities
    goodputs = {row["load"]: row["goodput"] for row in report.rows}
    below = max(load for load, goodput in goodputs.items() if goodput >= 0.9)
    above = min(load for load, goodput in goodputs.items() if goodput < 0.9)
    assert found.load is not None
    assert below <= found.load <= above <= below * 1.031
    assert list(goodputs) == sorted(goodputs)
    assert len(goodputs) < 12


@pytest.mark.parametrize(
    ("capacity", "first_loads"),
    [
        (5.0, [1.0, 2.0, 4.0, 8.0]),
        (0.3, [1.0, 0.5, 0.25]),
        (0.02, [1.0, 0.5, 0.25]),
        (0.0, [1.0, 0.5, 0.25]),
        (inf, [1.0, 2.0, 4.0]),
    ],
)
def test_the_search_doubles_or_halves_first(capacity: float, first_loads: list[float]) -> None:
    asked: list[float] = []
    shares = list(_searched(lambda load: asked.append(load) or load <= capacity))
    assert asked[: len(first_loads)] == first_loads
    assert shares == sorted(shares)
    assert shares[-1] == 1.0
    assert len(asked) < 15


def test_capacities_outside_of_what_was_run_are_said_to_be(trace: Trace) -> None:
    notes = {one.note for one in audited(trace, loads=[0.05, 0.1]).capacities}
    assert notes == {"above 0.1"}
    notes = {one.note for one in audited(trace, loads=[800.0, 900.0], policies=["round-robin"]).capacities}
    assert notes == {"below 800"}


def test_one_load_gives_no_capacity(trace: Trace) -> None:
    assert audited(trace).capacities == []


def test_seeds_of_a_workload_are_other_draws_and_give_intervals() -> None:
    asked: list[int] = []

    def draw(seed: int) -> Trace:
        asked.append(seed)
        return generate("tenants", seed, requests=120)

    report = audit(draw, replace(PLAN, policies=["round-robin"], seeds=3))
    assert asked == [0, 1, 2]
    assert report.rows[0]["seeds"] == 3
    assert report.rows[0]["ttft_ms_mean_ci95"] > 0.0


def test_progress_ends_where_it_said_it_would(trace: Trace) -> None:
    last: dict[str, tuple[float, float]] = {}
    plan = replace(PLAN, loads=[0.1, 80.0, 90.0], seeds=2)
    audit(lambda seed: trace, plan, lambda what, done, total: last.__setitem__(what, (done, total)))
    assert last["replays"] == (2, 2)
    assert all(done == total for done, total in last.values())


def test_all_of_it_is_json(trace: Trace) -> None:
    json.dumps(audited(trace, loads=[0.1, 40.0]).as_json(), allow_nan=False)


@pytest.mark.parametrize(
    ("text", "blocks"), [("engine", 2_500), ("ample", AMPLE_BLOCKS), ("77", 77), ("20%", 4_570), ("100%", 22_850)]
)
def test_caches_by_name(text: str, blocks: int) -> None:
    assert Cache(text).blocks(LLAMA_3_70B_TP8, 512, 182_800, 8) == blocks


def test_no_cache_and_no_requests_are_said(trace: Trace) -> None:
    with pytest.raises(UsageError, match="a cache of 1% leaves no block of 512 tokens"):
        Cache("1%").blocks(LLAMA_3_70B_TP8, 512, 100, 8)
    with pytest.raises(UsageError, match="no requests"):
        audited(Trace("empty", "made", 512, []))


def test_hit_rates_alone(trace: Trace) -> None:
    document = hit_rates(trace).as_json()
    assert {f"hit_rate_round_robin_{nodes}" for nodes in (2, 4, 8)} <= set(document)
    assert 0.0 < document["hit_rate_round_robin_8"] < document["hit_rate_infinite"] < 1.0
    assert document["rows"] == []
