"""What `kv-aware` does in situations that others have failed in."""

from collections import Counter

import pytest

from loadtest.audit.link import LinkShape
from loadtest.audit.prepared import PreparedTrace, prepare
from loadtest.audit.runs import Scenario, run_fleet
from loadtest.workloads.generating import generate
from tests.loadtest.audit.placements import best_placement

SIBLINGS, SHARED_BLOCKS = 64, 8
BURST = Scenario("kv-aware", nodes=8, link=LinkShape(400.0), link_known=True)


@pytest.fixture(scope="module")
def burst() -> PreparedTrace:
    """64 siblings of one prompt of 4k tokens that nobody has, all at once."""
    trace = prepare(generate("burst", requests=SIBLINGS))
    assert len({request.chain[: SHARED_BLOCKS * 16] for request in trace.requests}) == 1
    return trace


def test_a_burst_of_siblings_is_computed_by_two_workers_and_pulled_by_the_others(burst: PreparedTrace) -> None:
    outcomes = run_fleet(burst, BURST)
    shared_tokens = SHARED_BLOCKS * burst.block_size_tokens
    computed = {
        worker for worker, cached in zip(outcomes.worker, outcomes.cached_tokens, strict=True) if cached < shared_tokens
    }
    assert len(computed) <= 2
    assert max(Counter(outcomes.worker).values()) <= 16
    best = best_placement(burst, BURST, SHARED_BLOCKS, computing_max=2, siblings_max=16)
    assert sum(outcomes.ttft) / SIBLINGS <= 1.2 * best.ttft_seconds_mean


def test_a_burst_where_nothing_can_be_pulled_starts_as_soon_as_it_can(burst: PreparedTrace) -> None:
    outcomes = run_fleet(burst, Scenario("kv-aware", nodes=8))
    assert max(Counter(outcomes.worker).values()) <= 16
    best = best_placement(burst, BURST, SHARED_BLOCKS, computing_max=8, siblings_max=16)
    assert sum(outcomes.ttft) / SIBLINGS <= 1.2 * best.ttft_seconds_mean
