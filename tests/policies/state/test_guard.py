"""Budgets of reused KV's quality: when they trip, what then, and what they leave alone."""

import math
from random import Random

import pytest

from policies.state.guard import FUSED, GuardSettings, QualityGuard, Sample, Trip, Way

BUDGETS = {"i8": 3e-4, "i4h": 1.5e-2, FUSED: 0.06}
SETTINGS = GuardSettings(BUDGETS)


def sample(
    kl: float, codec: str = "i8", fidelity: str = "quantized", fraction: float = 0.0, tenant: str = "a"
) -> Sample:
    return Sample(tenant, codec, fidelity, fraction, kl, 0.9)


def feed(guard: QualityGuard, drawn: list[float], now: float = 0.0, **fields: object) -> tuple[int, Trip | None]:
    """How many samples it took to trip, and the trip."""
    for count, kl in enumerate(drawn, start=1):
        trip = guard.record("m", sample(kl, **fields), now)  # type: ignore[arg-type]
        if trip is not None:
            return count, trip
    return len(drawn), None


def lognormal(mean: float, spread: float, count: int, seed: int) -> list[float]:
    """Heavy-tailed, as divergences are."""
    rng = Random(seed)
    return [rng.lognormvariate(math.log(mean) - spread**2 / 2, spread) for _ in range(count)]


def test_a_bad_codec_goes_off_soon_and_for_its_tenant_alone() -> None:
    guard = QualityGuard(SETTINGS)
    count, trip = feed(guard, lognormal(3e-2, 1.0, 200, seed=1))
    assert trip is not None
    assert count <= 20
    assert trip == Trip(Way("m", "a", "i8"), trip.kl_mean, 3e-4, count, None)
    assert trip.kl_mean > 3e-3
    assert not guard.allows("m", "a", "i8", 1.0)
    assert guard.allows("m", "b", "i8", 1.0)
    assert guard.allows("other", "a", "i8", 1.0)
    assert guard.allows("m", "a", "i4h", 1.0)


@pytest.mark.parametrize("seed", range(20))
def test_a_codec_within_its_budget_stays(seed: int) -> None:
    assert feed(QualityGuard(SETTINGS), lognormal(1.5e-4, 1.0, 1000, seed))[1] is None


@pytest.mark.parametrize("seed", range(20))
def test_a_codec_half_as_bad_again_as_its_budget_trips_within_two_hundred(seed: int) -> None:
    assert feed(QualityGuard(SETTINGS), lognormal(4.5e-4, 0.8, 200, seed))[1] is not None


def test_one_wild_answer_is_not_enough() -> None:
    guard = QualityGuard(SETTINGS)
    assert feed(guard, [1e-5] * 20 + [5e-3] + [1e-5] * 79)[1] is None
    assert guard.allows("m", "a", "i8", 0.0)


def test_logits_that_are_no_numbers_trip() -> None:
    count, trip = feed(QualityGuard(SETTINGS), [math.nan, math.inf] * 10)
    assert (count, trip is not None and trip.kl_mean) == (SETTINGS.samples_min, 20.0)


def test_fused_prompts_recompute_more_and_more_and_then_nothing_is_fused() -> None:
    guard = QualityGuard(SETTINGS)
    assert guard.recompute_fraction("m", "a") == 0.15
    for fraction, then in ((0.15, 0.3), (0.3, 0.5), (0.5, None)):
        count, trip = feed(guard, [0.2, 0.3] * 10, fidelity="fused", codec="raw", fraction=fraction)
        assert trip is not None
        assert (count, trip.way.way, trip.recompute_fraction) == (SETTINGS.samples_min, FUSED, then)
        assert guard.allows("m", "a", FUSED, 0.0) is (then is not None)
        assert guard.recompute_fraction("m", "a") == (then or 0.5)
    assert guard.recompute_fraction("m", "b") == 0.15


def test_answers_that_recomputed_less_say_nothing_once_more_is_recomputed() -> None:
    guard = QualityGuard(SETTINGS)
    feed(guard, [0.2] * 8, fidelity="fused", fraction=0.15)
    assert guard.recompute_fraction("m", "a") == 0.3
    assert feed(guard, [0.2] * 50, fidelity="fused", fraction=0.15)[1] is None
    assert feed(guard, [0.2] * 50, fidelity="fused", fraction=0.3)[0] == 8


def test_what_is_off_is_tried_again_after_a_rest_that_doubles() -> None:
    guard, now = QualityGuard(SETTINGS), 0.0
    for rest in (3600.0, 7200.0, 14_400.0, 28_800.0, 57_600.0, 86_400.0, 86_400.0):
        assert feed(guard, [1.0] * 8, now)[1] is not None
        assert not guard.allows("m", "a", "i8", now + rest - 1)
        assert feed(guard, [1.0] * 50, now + 1)[1] is None  # stragglers do not count
        now += rest
        assert guard.allows("m", "a", "i8", now)


def test_moved_kv_counts_for_fusing_whatever_its_codec() -> None:
    guard = QualityGuard(SETTINGS)
    feed(guard, [0.2] * 7, codec="i8", fidelity="rotated")
    trip = guard.record("m", sample(0.2, "i4h", "fused", 0.15), 0.0)
    assert trip is not None
    assert trip.way.way == FUSED


def test_what_has_no_budget_is_left_alone() -> None:
    assert feed(QualityGuard(SETTINGS), [9.0] * 300, codec="zip")[1] is None


def test_the_report_says_what_is_known() -> None:
    guard = QualityGuard(SETTINGS)
    feed(guard, [1e-4, 3e-4])
    feed(guard, [1.0] * 8, tenant="b")
    rows = {row.way.tenant: row for row in guard.report(1.0)}
    assert (rows["a"].samples, rows["a"].allowed, rows["a"].trips) == (2, True, 0)
    assert rows["a"].kl_mean == pytest.approx(2e-4)
    assert (rows["b"].samples, rows["b"].allowed, rows["b"].trips) == (0, False, 1)
    assert repr(guard) == "QualityGuard(2 ways, 1 tripped)"


def test_memory_is_bounded() -> None:
    guard = QualityGuard(GuardSettings(BUDGETS, ways_max=3))
    for number in range(5):
        feed(guard, [1e-4], now=float(number), tenant=f"t{number}")
    assert {row.way.tenant for row in guard.report(9.0)} == {"t2", "t3", "t4"}


def test_settings_must_make_sense() -> None:
    with pytest.raises(ValueError, match="samples_min"):
        GuardSettings(BUDGETS, window=4)
    with pytest.raises(ValueError, match="fraction"):
        GuardSettings(BUDGETS, fractions=())
