"""The audit beside what Dynamo 1.6.1's own offline replay says of the Mooncake conversation trace.

It needs the trace (tests/shared.py), and a minute: `make test-traces`.
"""

import pytest

from loadtest.audit.prepared import PreparedTrace, prepare
from loadtest.audit.runs import Scenario, replay
from loadtest.traces.reading import read_trace
from tests.shared import shared
from workers.timing import DYNAMO_POLYNOMIAL

pytestmark = pytest.mark.traces

GOLDEN = Scenario("round-robin", nodes=8, load=8.0, profile=DYNAMO_POLYNOMIAL, capacity_blocks=16_384)


@pytest.fixture(scope="module")
def conversation() -> PreparedTrace:
    return prepare(read_trace(shared("traces", "mooncake", "conversation_trace.jsonl")))


def test_round_robin_takes_the_time_that_dynamo_says(conversation: PreparedTrace) -> None:
    result = replay(conversation, GOLDEN)
    assert result.hit_rate == pytest.approx(0.1371, rel=0.005)
    ttft = result.ttft_ms
    assert (ttft.mean, ttft.p50, ttft.p90, ttft.p99) == pytest.approx((1089, 681, 2665, 5416), rel=0.005)
    assert (result.e2e_ms.p50, result.e2e_ms.p90, result.e2e_ms.p99) == pytest.approx((11141, 32158, 59011), rel=0.005)
    assert result.goodput == pytest.approx(0.819, abs=0.001)
    assert result.tpot_ms.p90 == pytest.approx(99, abs=1)
    assert (result.requests, result.rejects, result.pulls) == (12_031, 0, 0)


def test_round_robin_where_memory_is_short(conversation: PreparedTrace) -> None:
    """16,384 blocks of 64 tokens, or 2,048 of 512."""
    scenario = Scenario("round-robin", 8, 4.0, DYNAMO_POLYNOMIAL, capacity_blocks=2_048)
    result = replay(conversation, scenario)
    assert result.hit_rate == pytest.approx(0.082, abs=0.0005)
    ttft = result.ttft_ms
    assert (ttft.mean, ttft.p50, ttft.p90, ttft.p99) == pytest.approx((475, 274, 1174, 2781), rel=0.005)
    assert (result.e2e_ms.p50, result.e2e_ms.p90, result.e2e_ms.p99) == pytest.approx((7794, 19192, 36644), rel=0.005)


def test_dynamos_cost_decides_as_dynamo_does(conversation: PreparedTrace) -> None:
    """Its ties are random, and so are ours."""
    result = replay(conversation, Scenario("dynamo", 8, 8.0, DYNAMO_POLYNOMIAL, 16_384))
    assert result.hit_rate == pytest.approx(0.239, rel=0.05)
    assert (result.ttft_ms.mean, result.ttft_ms.p50) == pytest.approx((484, 357), rel=0.05)
    assert result.ttft_ms.p90 == pytest.approx(994, rel=0.12)


def test_the_first_block_that_all_prompts_share_concentrates_nothing(conversation: PreparedTrace) -> None:
    """Longest prefix first would send every request to one worker."""
    jitter = conversation.grid_seconds / 2
    assert jitter == 1.5
    result = replay(conversation, Scenario("kv-aware", load=4.0, capacity_blocks=2_500, jitter_seconds=jitter))
    assert result.uncached_max_over_mean <= 1.15
    assert result.requests_max_over_mean <= 1.5
    assert result.hit_rate > 0.25
    assert result.ttft_ms.mean < 1_000
