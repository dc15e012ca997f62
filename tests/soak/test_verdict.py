"""A verdict that could not be bad would be worth nothing."""

from tests.soak.verdict import Sample, growing, slope_percent, verdict

MIB = 2**20


def samples(rss: list[float], sizes: list[float]) -> list[Sample]:
    return [Sample(10.0 * n, int(r * MIB), {"of": s}) for n, (r, s) in enumerate(zip(rss, sizes, strict=True))]


def test_a_slope_is_that_of_the_line() -> None:
    assert slope_percent([(0, 100.0), (300, 101.0), (600, 102.0)]) == 2.0 / 101.0 * 100.0
    assert slope_percent([(0, 100.0), (600, 100.0)]) == 0.0
    assert abs(slope_percent([(0, 100.0), (10, 110.0), (20, 110.0), (30, 100.0)])) < 1e-9


def test_steady_is_stable() -> None:
    latencies = [(float(second), 10.0 + second % 7) for second in range(600)]
    told = verdict(samples([300.0 + n % 3 * 0.1 for n in range(60)], [1000.0] * 60), latencies, 100.0, 600.0)
    assert (told["verdict"], told["reasons"]) == ("stable", [])
    assert told["p99_ms_by_half"] == [16.0, 16.0]


def test_what_grows_is_found() -> None:
    latencies = [(float(second), 10.0) for second in range(600)]
    leaking = verdict(samples([300.0 + n * 0.1 for n in range(60)], [1000.0] * 60), latencies, 100.0, 600.0)
    assert leaking["verdict"] == "not stable"
    assert leaking["resident_slope_percent_per_ten_minutes"] > 1.0
    growth = verdict(samples([300.0] * 60, [1000.0 + 20 * n for n in range(60)]), latencies, 100.0, 600.0)
    assert growth["verdict"] == "not stable"
    assert list(growth["growing"]) == ["of"]


def test_what_gets_slower_is_found() -> None:
    latencies = [(float(second), 10.0 if second < 350 else 60.0) for second in range(600)]
    assert verdict(samples([300.0] * 60, [1.0] * 60), latencies, 100.0, 600.0)["verdict"] == "not stable"


def test_what_only_filled_up_does_not_count_as_growing() -> None:
    assert growing(samples([1.0] * 30, [min(100.0 * n, 900.0) for n in range(30)][10:] + [900.0] * 10)) == {}
