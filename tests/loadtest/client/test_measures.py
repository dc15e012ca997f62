from math import isinf

import pytest

from loadtest.client.answers import Answer
from loadtest.client.measures import measured

ANSWERS = [
    Answer(0, 10.0, 10.001, 12.0, [10.5, 11.0, 12.0], prompt_tokens=100, output_tokens=3, cached_tokens=50, worker="a"),
    Answer(1, 11.0, 11.003, 14.0, [13.5, 14.0], prompt_tokens=300, output_tokens=2, cached_tokens=150, worker="b"),
    Answer(2, 12.0, 12.002, 12.5, failure="status 503: full", status=503),
]


def test_figures() -> None:
    result = measured("t", ANSWERS, load=2.0)
    assert (result.requests, result.answered, result.failed) == (3, 2, 1)
    assert result.failures == {"status 503": 1}
    assert result.hit_rate == 0.5
    assert result.ttft_ms.mean == pytest.approx((500 + 2500) / 2)
    assert result.inter_token_ms.mean == pytest.approx((500 + 1000 + 500) / 3)
    assert result.goodput == pytest.approx(1 / 3)
    assert result.uncached_max_over_mean == pytest.approx(150 / 100)
    assert result.late_ms.p99 == pytest.approx(3.0)
    assert result.seconds == 4.0
    assert result.row()["ttft_ms_mean"] == pytest.approx(1500)


def test_of_nothing_there_is_nothing_to_say() -> None:
    result = measured("t", ANSWERS[2:])
    assert isinf(result.ttft_ms.mean)
    assert result.row()["ttft_ms_mean"] is None
    assert measured("t", []).goodput == 0.0
