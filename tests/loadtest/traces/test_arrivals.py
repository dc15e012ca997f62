"""Arrival times: grids found and left, speed, slices; conversations stay whole."""

from random import Random

import pytest

from cachecore.blocks import EMPTY_CHAIN
from loadtest.traces.arrivals import dequantised, first, grid_seconds, poisson, sliced, sped_up
from loadtest.traces.contract import NO_PREDECESSOR, Trace, TraceRequest


def trace_of(arrivals: list[float], follows: dict[int, int] | None = None) -> Trace:
    requests = [
        TraceRequest(arrival, EMPTY_CHAIN, 10 + place, 5, follows=(follows or {}).get(place, NO_PREDECESSOR))
        for place, arrival in enumerate(arrivals)
    ]
    return Trace("made", "made", 16, requests)


def times(trace: Trace) -> list[float]:
    return [request.arrival_seconds for request in trace.requests]


def on_grid(grid: float, count: int = 400) -> list[float]:
    """Poisson times cut to a grid, some a millisecond short of it, as clocks do."""
    rng = Random(3)
    found = (int(now / grid) * grid for now, _ in zip(poisson(rng, 2.0 / grid), range(count), strict=False))
    return sorted(max(stamp - 0.001 * (rng.random() < 0.3), 0.0) for stamp in found)


@pytest.mark.parametrize("grid", [3.0, 1.0, 0.1])
def test_a_grid_is_found(grid: float) -> None:
    assert grid_seconds(on_grid(grid)) == pytest.approx(grid)


def test_times_off_any_grid_have_none() -> None:
    rng = Random(1)
    arrivals = [now for now, _ in zip(poisson(rng, 3.0), range(300), strict=False)]
    assert grid_seconds(arrivals) == 0.0
    assert grid_seconds([*arrivals, arrivals[7], arrivals[9]]) == 0.0
    assert grid_seconds([]) == grid_seconds([0.0] * 50) == 0.0


def test_few_stamps_are_no_grid() -> None:
    assert grid_seconds([0.0, 0.0, 3.0, 6.0]) == 0.0


def test_spreading_moves_each_arrival_by_half_the_grid_at_most() -> None:
    raw = trace_of(on_grid(3.0))
    spread = dequantised(raw, seed=5)
    assert times(spread) == sorted(times(spread))
    assert times(spread)[0] == 0.0
    assert len(set(times(spread))) == len(raw.requests)
    before = {request.input_tokens: request.arrival_seconds for request in raw.requests}
    moved = [request.arrival_seconds - before[request.input_tokens] for request in spread.requests]
    # Everything is counted from the first arrival, which itself moved.
    assert max(moved) - min(moved) <= 3.0
    assert max(moved) - min(moved) > 2.5
    assert "grid of 3 s (seed 5)" in spread.notes[-1]


def test_spreading_is_by_seed() -> None:
    raw = trace_of(on_grid(3.0))
    assert times(dequantised(raw, 1)) == times(dequantised(raw, 1))
    assert times(dequantised(raw, 1)) != times(dequantised(raw, 2))


def test_without_a_grid_nothing_is_spread() -> None:
    raw = trace_of([0.0, 0.4, 1.7])
    assert dequantised(raw) is raw
    assert times(dequantised(raw, grid=0.0)) == times(raw)


def test_what_follows_moves_with_its_conversation() -> None:
    raw = trace_of([*on_grid(3.0, 100), 1000.0, 1004.5], {101: 100})
    spread = dequantised(raw, 9)
    places = {request.input_tokens: place for place, request in enumerate(spread.requests)}
    follower = spread.requests[places[111]]
    assert follower.follows == places[110]
    assert follower.arrival_seconds - spread.requests[follower.follows].arrival_seconds == pytest.approx(4.5)


def test_speed_makes_arrivals_denser_and_keeps_pauses() -> None:
    raw = trace_of([0.0, 8.0, 9.0, 16.0], {2: 1})
    fast = sped_up(raw, 4.0)
    assert times(fast) == [0.0, 2.0, 3.0, 4.0]
    assert [request.follows for request in fast.requests] == [-1, -1, 1, -1]
    assert sped_up(raw, 1.0) is raw
    with pytest.raises(ValueError, match="greater than 0"):
        sped_up(raw, 0.0)


def test_speed_keeps_the_order_of_arrival() -> None:
    fast = sped_up(trace_of([0.0, 1.0, 40.0], {1: 0}), 100.0)
    assert times(fast) == pytest.approx([0.0, 0.4, 1.0])
    assert [request.input_tokens for request in fast.requests] == [10, 12, 11]
    assert [request.follows for request in fast.requests] == [-1, -1, 0]


def test_a_slice_starts_at_zero_and_begins_cut_conversations_anew() -> None:
    raw = trace_of([0.0, 1.0, 2.0, 3.0, 9.0], {2: 0, 3: 2})
    part = sliced(raw, 1.5, 5.0)
    assert times(part) == [0.0, 1.0]
    assert [request.follows for request in part.requests] == [-1, 0]
    assert len(sliced(raw, 2.0).requests) == 3
    assert sliced(raw, 100.0).requests == []


def test_the_first_requests() -> None:
    raw = trace_of([0.0, 1.0, 2.0], {2: 1})
    assert first(raw, 2).requests == raw.requests[:2]
    assert first(raw, 10).requests == raw.requests
