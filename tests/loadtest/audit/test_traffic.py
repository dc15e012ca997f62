"""Figures of traffic, on traces small enough to count by hand."""

import pytest

from cachecore.blocks import Chain
from loadtest.audit.ceilings import Ceilings
from loadtest.audit.traffic import by_length, cache_sizes, kept_shares, quantiles, traffic_of, turns_of
from loadtest.traces.contract import NO_PREDECESSOR, Trace, TraceRequest, block_name

BLOCK = 100


def request(
    ids: list[int], tokens: int | None = None, session: str = "", follows: int = NO_PREDECESSOR, **body: object
) -> TraceRequest:
    chain = Chain(b"".join(block_name(number) for number in ids))
    length = len(ids) * BLOCK if tokens is None else tokens
    return TraceRequest(0.0, chain, length, 10, session, "", follows, 0.0, body or None)


def trace(*requests: TraceRequest) -> Trace:
    return Trace("t", "made", BLOCK, requests)


def test_reuse_is_counted_from_the_beginning_up_to_the_first_new_block() -> None:
    traffic = traffic_of(trace(request([1, 2, 3]), request([1, 2, 4]), request([5, 2, 3]), request([1, 2, 3], 250)))
    assert traffic.reused_blocks == [0, 2, 0, 3]
    assert traffic.reused_tokens == [200, 250]
    assert traffic.prompt_tokens == 300 + 300 + 300 + 250


def test_typical_reuse_weighs_prefixes_by_their_tokens() -> None:
    long = list(range(100, 200))
    short = [request([1]) for _ in range(20)]
    traffic = traffic_of(trace(*short, request(long), request(long)))
    assert sorted(set(traffic.reused_tokens)) == [100, 10_000]
    assert traffic.typical_reuse == 10_000
    assert traffic_of(trace(request([1]))).typical_reuse == 0


def test_larger_blocks_reuse_whole_blocks_only() -> None:
    points = traffic_of(trace(request([1, 2, 3, 4]), request([1, 2, 3, 5]))).block_sizes()
    hits = {point.size: point.hit_rate for point in points}
    assert hits[100] == pytest.approx(300 / 800)
    assert hits[200] == pytest.approx(200 / 800)
    assert hits[400] == 0.0


def test_cache_sizes_end_with_one_that_keeps_everything() -> None:
    requests = [request([number % 7, 10 + number % 7]) for number in range(40)]
    ceilings = Ceilings(trace(*requests))
    points = cache_sizes(ceilings, BLOCK)
    assert points[-1] == (14 * BLOCK, ceilings.infinite().tokens)
    assert [point.size for point in points] == sorted(point.size for point in points)
    assert points[0].hit_rate < points[-1].hit_rate


def test_turns_are_of_one_session_or_follow_each_other() -> None:
    first, other, second = request([1], session="a"), request([9], session="b"), request([1, 2], session="a")
    third = request([1, 2, 3], follows=2)
    assert turns_of(trace(first, other, second, third)) == [(first, second), (second, third)]


def test_who_only_waits_for_another_application_continues_no_conversation() -> None:
    reviewer = request([1], messages=[{"role": "system", "content": "You review."}])
    writer = request([2], follows=0, messages=[{"role": "system", "content": "You write."}])
    assert turns_of(trace(reviewer, writer)) == []


def test_kept_shares_are_of_full_blocks() -> None:
    grown = request([1, 2, 3, 4], session="a")
    turns = turns_of(trace(request([1, 2, 9], 250, "a"), grown, request([1, 2, 8, 8, 8], session="a")))
    assert kept_shares(turns, BLOCK) == [1.0, 0.5]
    short = turns_of(trace(request([9], 50, "s"), request([7], session="s")))
    assert kept_shares(short, BLOCK) == []


def test_overlaps_are_shares_of_each_prompt() -> None:
    overlaps = traffic_of(trace(request([1, 2, 3, 4]), request([1, 5, 6, 7]), request([1, 2, 3, 4]))).histograms()[2]
    assert dict(zip(overlaps.labels, overlaps.counts, strict=True)) == {
        "none": 1,
        "to 25%": 1,
        "to 50%": 0,
        "to 75%": 0,
        "to 90%": 0,
        "to 100%": 1,
    }


def test_lengths_fall_into_powers_of_two() -> None:
    histogram = by_length("t", [1, 256, 257, 1_024, 5_000])
    assert dict(zip(histogram.labels, histogram.counts, strict=True)) == {
        "to 256": 2,
        "to 512": 1,
        "to 1k": 1,
        "to 2k": 0,
        "to 4k": 0,
        "to 8k": 1,
    }
    assert by_length("t", []).counts == [0]


def test_quantiles() -> None:
    assert quantiles(list(range(100, 0, -1))) == {"p10": 11, "p50": 51, "p90": 91, "p99": 100, "p100": 100}
    assert quantiles([]) == {}
