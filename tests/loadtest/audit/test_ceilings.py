"""Hit rates without time: golden numbers, small cases by hand, and a naive model beside each cache."""

from itertools import product
from random import Random

import pytest

from loadtest.audit.ceilings import Ceilings, HitRate, ceilings_row
from loadtest.traces.building import names_of
from loadtest.traces.contract import Trace, TraceRequest
from loadtest.traces.reading import read_trace
from tests.shared import shared

GOLDEN = {
    "conversation": {
        "hit_rate_infinite": 0.3664,
        "hit_rate_infinite_tokens": 0.3736,
        "hit_rate_infinite_request_mean": 0.4094,
        "hit_rate_lru_1000": 0.0445,
        "hit_rate_lru_10000": 0.2112,
        "hit_rate_lru_50000": 0.3546,
        "hit_rate_round_robin_2": 0.2706,
        "hit_rate_round_robin_4": 0.1918,
        "hit_rate_round_robin_8": 0.1363,
    },
    "synthetic": {
        "hit_rate_infinite": 0.6396,
        "hit_rate_infinite_tokens": 0.6512,
        "hit_rate_infinite_request_mean": 0.4315,
        "hit_rate_lru_1000": 0.0825,
        "hit_rate_lru_10000": 0.4235,
        "hit_rate_lru_50000": 0.6396,
        "hit_rate_round_robin_2": 0.5088,
        "hit_rate_round_robin_4": 0.3646,
        "hit_rate_round_robin_8": 0.2264,
    },
}
"""Measured by a script of another's."""


def mooncake(name: str) -> Trace:
    return read_trace(shared("traces", "mooncake", f"{name}_trace.jsonl"))


@pytest.mark.traces
@pytest.mark.parametrize("name", list(GOLDEN))
def test_golden(name: str) -> None:
    assert ceilings_row(mooncake(name)) == GOLDEN[name]


@pytest.mark.traces
def test_a_beginning_that_all_share_draws_all_to_one_node() -> None:
    rate, requests = Ceilings(mooncake("conversation")).longest_prefix(8)
    assert round(rate.blocks, 4) == 0.3664
    assert requests == [12_031, 0, 0, 0, 0, 0, 0, 0]


@pytest.mark.traces
def test_the_longest_prefix_spreads_where_beginnings_differ() -> None:
    rate, requests = Ceilings(mooncake("synthetic")).longest_prefix(8)
    assert round(rate.blocks, 4) == 0.6396
    assert max(requests) < 1.15 * sum(requests) / 8


def trace_of(*paths: list[int], block: int = 10, lengths: list[int] | None = None) -> Trace:
    given = lengths or [len(path) * block for path in paths]
    requests = [
        TraceRequest(float(place), names_of(path), length, 1)
        for place, (path, length) in enumerate(zip(paths, given, strict=True))
    ]
    return Trace("made", "made", block, requests)


def test_weights() -> None:
    """The second prompt reuses two of its three blocks, the last of which has 5 of 10 tokens; the third all of one."""
    rate = Ceilings(trace_of([1, 2, 3], [1, 2, 4], [1], lengths=[30, 25, 7])).infinite()
    assert rate.blocks == pytest.approx(3 / 7)
    assert rate.tokens == pytest.approx(27 / 62)
    assert rate.request_mean == pytest.approx((0 + 20 / 25 + 1) / 3)


def test_a_block_counts_only_behind_what_is_before_it() -> None:
    ceilings = Ceilings(trace_of([1, 2, 3, 4], [5, 6], [1, 2, 3, 4]))
    # What was used first is evicted first, so 3 and 4 are still there, and useless.
    assert ceilings.pooled(4).blocks == 0.0
    assert ceilings.pooled(6).blocks == pytest.approx(4 / 10)


def test_who_knows_the_future_keeps_what_comes_again() -> None:
    ceilings = Ceilings(trace_of([1, 2], [3, 4], [5, 6], [1, 2], [3, 4]))
    assert ceilings.pooled(2).blocks == 0.0
    assert ceilings.oracle(2).blocks == pytest.approx(2 / 10)
    assert ceilings.oracle(4).blocks == ceilings.infinite().blocks == pytest.approx(4 / 10)


@pytest.mark.parametrize("seed", range(5))
def test_a_share_is_a_share_whatever_the_last_blocks_hold(seed: int) -> None:
    """Prompts end within a block: no more of it is hit than it has tokens."""
    rng = Random(seed)
    paths = random_paths(rng)
    ceilings = Ceilings(trace_of(*paths, lengths=[len(path) * 10 - rng.randint(0, 9) for path in paths]))
    for rate in (ceilings.infinite(), ceilings.pooled(6), ceilings.oracle(6), ceilings.round_robin(2)):
        assert all(0.0 <= share <= 1.0 for share in (rate.blocks, rate.tokens, rate.request_mean))
    twice = Ceilings(trace_of([1, 2], [1, 2], lengths=[11, 11])).infinite()
    assert (twice.blocks, twice.tokens, twice.request_mean) == (0.5, 0.5, 0.5)


def test_nodes_share_nothing() -> None:
    ceilings = Ceilings(trace_of([1, 2], [1, 2], [1, 2], [1, 2]))
    assert ceilings.round_robin(2).blocks == pytest.approx(4 / 8)
    assert ceilings.round_robin(4).blocks == 0.0
    assert ceilings.siloed(2, 1).blocks == 0.0
    assert ceilings.siloed(2, 2).blocks == pytest.approx(4 / 8)


def random_paths(rng: Random, count: int = 40) -> list[list[int]]:
    """Walks down a small tree, so that a name has one parent."""
    return [
        [int("1" + "".join(digits[: depth + 1]), 4) for depth in range(len(digits))]
        for digits in ([rng.choice("0123") for _ in range(rng.randint(1, 4))] for _ in range(count))
    ]


def naive_lru(paths: list[list[int]], capacity: int) -> int:
    kept: list[int] = []
    hits = 0
    for path in paths:
        depth = 0
        while depth < len(path) and path[depth] in kept:
            depth += 1
        hits += depth
        for block in path:
            if block in kept:
                kept.remove(block)
            kept.append(block)
        kept = kept[-capacity:]
    return hits


@pytest.mark.parametrize("seed", range(8))
def test_least_recently_used_beside_a_naive_one(seed: int) -> None:
    paths = random_paths(Random(seed))
    ceilings = Ceilings(trace_of(*paths))
    for capacity in (1, 3, 7, 20, 300):
        assert ceilings.pooled(capacity).blocks * ceilings.blocks == pytest.approx(naive_lru(paths, capacity))


def best_hits(paths: list[list[int]], capacity: int) -> int:
    """By trying every way of keeping at most `capacity` blocks after each prompt."""
    states: dict[frozenset[int], int] = {frozenset(): 0}
    for path in paths:
        following: dict[frozenset[int], int] = {}
        for kept, hits in states.items():
            depth = next((place for place, block in enumerate(path) if block not in kept), len(path))
            pool = sorted(kept | set(path))
            for chosen in product((False, True), repeat=len(pool)):
                left = frozenset(block for block, keep in zip(pool, chosen, strict=True) if keep)
                if len(left) <= capacity:
                    following[left] = max(following.get(left, 0), hits + depth)
        states = following
    return max(states.values())


@pytest.mark.parametrize("seed", range(6))
def test_nobody_beats_the_oracle_and_it_is_reached(seed: int) -> None:
    rng = Random(seed)
    paths = [path[:3] for path in random_paths(rng, 7)]
    ceilings = Ceilings(trace_of(*paths))
    for capacity in (1, 2, 3):
        assert round(ceilings.oracle(capacity).blocks * ceilings.blocks) == best_hits(paths, capacity)


@pytest.mark.parametrize("seed", range(4))
def test_bounds_are_ordered(seed: int) -> None:
    ceilings = Ceilings(trace_of(*random_paths(Random(seed), 120)))
    for capacity in (2, 8, 40):
        siloed, pooled = ceilings.siloed(4, capacity), ceilings.pooled(4 * capacity)
        oracle, infinite = ceilings.oracle(4 * capacity), ceilings.infinite()
        assert max(siloed.blocks, pooled.blocks) <= oracle.blocks <= infinite.blocks
        assert ceilings.siloed(4, 10**6) == ceilings.round_robin(4)


def test_sized_bounds_have_names() -> None:
    row = ceilings_row(trace_of([1, 2], [1, 3], [1, 2]), lru_blocks=[2], nodes=[2], node_blocks=1, host_blocks=3)
    assert list(row) == [
        "hit_rate_infinite",
        "hit_rate_infinite_tokens",
        "hit_rate_infinite_request_mean",
        "hit_rate_lru_2",
        "hit_rate_round_robin_2",
        "hit_rate_siloed_2",
        "hit_rate_pooled_2",
        "hit_rate_oracle_2",
        "hit_rate_siloed_host_2",
    ]
    assert row["hit_rate_infinite"] == 0.5
    # The first and the third go to one node: with host memory, all of the third is there.
    assert (row["hit_rate_siloed_2"], row["hit_rate_siloed_host_2"]) == (0.0, 0.3333)


def test_an_empty_trace_and_a_cache_of_nothing() -> None:
    ceilings = Ceilings(Trace("none", "made", 16, []))
    assert ceilings.infinite() == ceilings.oracle(1) == HitRate(0.0, 0.0, 0.0)
    with pytest.raises(ValueError, match="at least one block"):
        ceilings.pooled(0)
    with pytest.raises(ValueError, match="at least one block"):
        ceilings.oracle(0)


def test_progress_reaches_its_end() -> None:
    seen: list[tuple[int, int]] = []
    ceilings_row(trace_of([1]), lru_blocks=[1, 2], nodes=[2], progress=lambda done, total: seen.append((done, total)))
    assert seen == [(1, 3), (2, 3), (3, 3)]
