"""What an operator is told, and that nothing is recommended which does not pay."""

import pytest

from cachecore.blocks import Chain
from loadtest.audit import advice
from loadtest.audit.report import Advice, Bound, Capacity
from loadtest.audit.traffic import Point, traffic_of
from loadtest.hardware import LINKS
from loadtest.traces.contract import Trace, TraceRequest, block_name
from workers.timing import DYNAMO_POLYNOMIAL, LLAMA_3_70B_TP8

BLOCK = 512


def trace(*prompts: list[int], session: str = "") -> Trace:
    requests = [
        TraceRequest(0.0, Chain(b"".join(map(block_name, ids))), len(ids) * BLOCK, 100, session) for ids in prompts
    ]
    return Trace("t", "made", BLOCK, requests)


SHARED = trace(*([*range(40), 100 + number] for number in range(30)))
APART = trace(*([number * 10 + place for place in range(10)] for number in range(30)))
MEMORY = advice.Memory(1e6, 0)
CURVE = [Point(1_000, 0.1), Point(10_000, 0.5), Point(100_000, 0.94), Point(400_000, 0.95)]


def by_topic(found: list[Advice]) -> dict[str, Advice]:
    return {one.topic: one for one in found}


def engine(link: str | None, profile=LLAMA_3_70B_TP8) -> advice.Engine:
    return advice.Engine(profile, 8, None if link is None else LINKS[link])


def test_traffic_that_shares_and_traffic_that_does_not() -> None:
    shared = by_topic(advice.on_traffic(traffic_of(SHARED), CURVE, MEMORY))
    assert shared["lengths"].figures["prompt_tokens"]["p50"] == 41 * BLOCK
    assert "97% of requests begin as an earlier one does" in shared["overlap"].text
    apart = by_topic(advice.on_traffic(traffic_of(APART), [Point(1_000, 0.0)], MEMORY))
    assert apart["overlap"].text == "next to nothing is asked twice: route by load, no cache will help"
    assert "cache size" not in apart


@pytest.mark.parametrize(("fleet_tokens", "verdict"), [(2e5, "together have that"), (5e4, "together have 50k tokens")])
def test_the_best_cache_is_the_least_that_reuses_nearly_all(fleet_tokens: float, verdict: str) -> None:
    memory = advice.Memory(fleet_tokens, 327_680)
    found = by_topic(advice.on_traffic(traffic_of(SHARED), CURVE, memory))["cache size"]
    assert found.figures["cache_tokens"] == 100_000
    assert "100k tokens (32.8GB of KV)" in found.text
    assert found.text.endswith(verdict)


def test_the_best_block_is_the_largest_that_loses_next_to_nothing() -> None:
    found = by_topic(advice.on_traffic(traffic_of(SHARED), CURVE, MEMORY))["block size"]
    assert found.figures["block_size_tokens"] == 8 * BLOCK  # 40 blocks are 5 x 8, and not whole sixteens
    odd = traffic_of(trace([1, 2, 3, 4], [1, 2, 3, 5]))
    assert "keep blocks at 512 tokens or below" in by_topic(advice.on_traffic(odd, CURVE, MEMORY))["block size"].text


def test_turns_that_part_early_are_told() -> None:
    parting = trace([1, 2, 3, 4], [9, 2, 3, 4, 5], [9, 2, 3, 4, 5, 6], session="s")
    found = by_topic(advice.on_traffic(traffic_of(parting), CURVE, MEMORY))["turns"]
    assert found.figures == {"turns": 2, "whole": 0.5, "parting_early": 0.5}
    assert "something at the beginning changes" in found.text


@pytest.mark.parametrize(("link", "verdict"), [("roce-400", "it pays"), ("10gbe", "no gain")])
def test_a_link_pays_or_it_does_not(link: str, verdict: str) -> None:
    (found,) = advice.on_links(traffic_of(SHARED), engine(link))
    assert found.figures["break_even_gbps"] == pytest.approx(74, abs=0.5)
    assert found.figures["verdict"] == verdict
    assert found.text.endswith(verdict)


def test_without_a_link_only_the_break_even_is_told_and_without_kv_nothing() -> None:
    (found,) = advice.on_links(traffic_of(SHARED), engine(None))
    assert set(found.figures) == {"break_even_gbps"}
    assert advice.on_links(traffic_of(SHARED), engine("roce-400", DYNAMO_POLYNOMIAL)) == []


@pytest.mark.parametrize(
    ("reached", "link", "end"),
    [
        (0.94, "roce-400", "not worth having"),
        (0.5, "roce-400", "over 400 Gb/s: it pays"),
        (0.5, "10gbe", "but its link is slower than computing: it does not pay"),
        (0.5, None, "which --link names"),
    ],
)
def test_a_pool_pays_or_it_does_not(reached: float, link: str | None, end: str) -> None:
    bounds = [Bound("infinite", 8, "engine", 0.945, 0.9, 1.0), Bound("siloed", 8, "engine", 0.2, 0.2, 0.1)]
    rows = [{"policy": "kv-aware", "hit_rate": reached}, {"policy": "round-robin", "hit_rate": 0.2}]
    (found,) = advice.on_pool(traffic_of(SHARED), engine(link), bounds, rows)
    assert found.text.endswith(end)
    assert "(kv-aware)" in found.text
    assert found.figures["gain"] == pytest.approx(0.945 - reached)


def test_without_replays_a_pool_is_held_against_caches_of_their_own() -> None:
    bounds = [Bound("infinite", 8, "engine", 0.9, 0.9, 1.0), Bound("siloed", 8, "engine", 0.2, 0.2, 0.1)]
    assert "(caches of their own)" in advice.on_pool(traffic_of(SHARED), engine(None), bounds, [])[0].text
    assert advice.on_pool(traffic_of(SHARED), engine(None), [], []) == []


def test_fewer_nodes_in_proportion_to_capacity() -> None:
    ours, theirs = Capacity("kv-aware", 8, "engine", 0.0, 4.0, None), Capacity("dynamo", 8, "engine", 0.0, 3.0, None)
    assert advice.nodes_for(ours, theirs) == 6
    assert advice.nodes_for(ours, theirs._replace(load=3.1)) == 7
    assert advice.nodes_for(ours._replace(load=None), theirs) is None
    assert advice.nodes_for(ours._replace(load=None, note="above 4", floor=4.0), theirs) == 6
    assert advice.nodes_for(ours, theirs._replace(load=None, floor=4.0)) is None
    assert list(advice.compared_capacities([ours, theirs, theirs._replace(nodes=4)])) == [(ours, theirs)]


def test_a_word_on_nodes_says_how_it_was_checked() -> None:
    assert advice.on_nodes("kv-aware", "dynamo", 3.0, 8, 6, 0.912).text == (
        "at load 3.00, where 8 nodes just keep the SLO under dynamo, run 6 under kv-aware (replayed: goodput 0.912)"
    )
    assert "no fewer than 8" in advice.on_nodes("kv-aware", "dynamo", 3.0, 8, 8, 0.9).text


def test_savings_are_for_a_day_at_the_lowest_load() -> None:
    bounds = [Bound("siloed", 8, "engine", 0.1, 0.1, 2.0)]
    rows = [
        {"policy": "kv-aware", "load": 2.0, "gpu_hours_saved": 6.0},
        {"policy": "dynamo", "load": 2.0, "gpu_hours_saved": 5.0},
        {"policy": "kv-aware", "load": 4.0, "gpu_hours_saved": 7.0},
    ]
    (found,) = advice.on_savings(rows, bounds, 7_200.0, 2.5)  # the trace takes an hour at load 2
    assert found.figures == {
        "policy": "kv-aware",
        "gpu_hours_saved_per_day": 144.0,
        "gpu_hours_saved_per_day_siloed": 48.0,
        "dollars_per_day": 240.0,
    }
    assert "dollars" not in advice.on_savings(rows, bounds, 7_200.0, None)[0].text
    assert advice.on_savings([], bounds, 7_200.0, None) == advice.on_savings(rows, bounds, 0.0, None) == []
