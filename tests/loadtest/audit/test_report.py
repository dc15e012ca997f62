"""Rows averaged, the JSON's shape, the table, the page and its plots: also of nothing, and of names that are markup."""

import json
import re
from html.parser import HTMLParser
from math import inf, nan

import pytest

from loadtest.audit.report import Advice, Bound, Capacity, Curve, Histogram, Report, averaged
from loadtest.audit.report_charts import Bar, Level, Range, Series, bar_chart, histogram, line_chart, range_chart
from loadtest.audit.report_html import page
from loadtest.audit.report_table import print_report

VOID = {"meta"}


def row(policy: str = "kv-aware", load: float = 2.0, seed: int = 0, **figures: object) -> dict[str, object]:
    return {
        "policy": policy,
        "nodes": 8,
        "load": load,
        "capacity": "engine",
        "link_gbps": 0.0,
        "seed": seed,
        "hit_rate": 0.3,
        "hit_rate_pulled": 0.1,
        "ttft_ms_mean": 800.0,
        "ttft_ms_p50": 500.0,
        "ttft_ms_p90": 1_600.0,
        "ttft_ms_p99": 6_000.0,
        "e2e_ms_p50": 9_000.0,
        "e2e_ms_p90": 30_000.0,
        "e2e_ms_p99": 60_000.0,
        "goodput": 0.93,
        "uncached_max_over_mean": 1.05,
        "rejects": 0,
        "bytes_moved": 3_000_000_000,
        "simulator_seconds": 2.5,
        **figures,
    }


def full_report(trace: str = "conversation.jsonl", policy: str = "kv-aware") -> Report:
    return Report(
        trace=trace,
        facts={"requests": 12_031, "seeds": 1},
        ceilings={"hit_rate_infinite": 0.3664},
        rows=averaged([row(policy), row(policy, 4.0, goodput=0.7), row("dynamo"), row("dynamo", 4.0)]),
        bounds=[Bound("infinite", 8, "engine", 0.3736, 0.3664, 1.5), Bound("siloed", 8, "engine", 0.09, 0.08, 0.2)],
        capacities=[
            Capacity(policy, 8, "engine", 0.0, 4.12, 0.05),
            Capacity("dynamo", 8, "engine", 0.0, None, None, "above 4"),
        ],
        advice=[Advice("nodes", "run 6 instead of 8", {"nodes_ours": 6})],
        histograms=[Histogram("Prompt lengths", ["to 1k", "to 2k"], [3, 9])],
        curves=[Curve("Hit rate by cache size", "tokens", "share", [(1e3, 0.1), (1e6, 0.3)])],
        notes=["one seed"],
    )


class Structure(HTMLParser):
    """Fails on tags that do not nest; collects text and attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[str] = []
        self.links: list[str] = []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.seen.append(tag)
        self.links += [value or "" for name, value in attributes if name in ("src", "href")]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.seen.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def structure(text: str) -> Structure:
    parsed = Structure()
    parsed.feed(text)
    parsed.close()
    assert parsed.open == []
    return parsed


def test_seeds_are_averaged_and_have_an_interval() -> None:
    rows = averaged([row(seed=0, ttft_ms_mean=800.0), row("dynamo"), row(seed=1, ttft_ms_mean=900.0)])
    assert [(one["policy"], one["seeds"]) for one in rows] == [("kv-aware", 2), ("dynamo", 1)]
    assert rows[0]["ttft_ms_mean"] == 850.0
    assert rows[0]["ttft_ms_mean_ci95"] == pytest.approx(12.706 * 50)
    assert "ttft_ms_mean_ci95" not in rows[1]
    assert "seed" not in rows[0]


def test_other_loads_capacities_and_links_are_other_rows() -> None:
    assert len(averaged([row(), row(load=4.0), row(capacity="ample"), row(link_gbps=400.0), row(nodes=4)])) == 5


def test_a_figure_that_one_seed_lacks_is_none() -> None:
    (one,) = averaged([row(ttft_ms_p99=None), row(seed=1)])
    assert one["ttft_ms_p99"] is None
    assert one["ttft_ms_p90"] == 1_600.0


def test_the_json_has_the_promised_shape() -> None:
    document = json.loads(json.dumps(full_report().as_json(), allow_nan=False))
    assert list(document)[:2] == ["trace", "hit_rate_infinite"]
    assert document["hit_rate_infinite"] == 0.3664
    assert document["slo_capacity"] == {"kv-aware": 4.12, "dynamo": None}
    wanted = {"policy", "nodes", "load", "capacity", "link_gbps", "hit_rate", "goodput", "uncached_max_over_mean"}
    wanted |= {f"ttft_ms_{statistic}" for statistic in ("mean", "p50", "p90", "p99")}
    assert wanted <= set(document["rows"][0])
    assert document["advice"] == [{"topic": "nodes", "text": "run 6 instead of 8", "nodes_ours": 6}]


def test_the_first_fleet_gives_the_capacity_by_policy() -> None:
    two = [Capacity("a", 8, "engine", 0.0, 4.0, None), Capacity("a", 8, "ample", 0.0, 5.0, None)]
    assert Report("t", capacities=two).as_json()["slo_capacity"] == {"a": 4.0}


def test_a_page_stands_alone_in_both_colour_schemes() -> None:
    text = page(full_report())
    parsed = structure(text)
    assert "script" not in parsed.seen
    assert parsed.links == []
    assert "http" not in re.sub(r'xmlns="[^"]*"', "", text)
    assert "prefers-color-scheme: dark" in text
    light, dark = (set(re.findall(r"--[\w-]+(?=:)", part)) for part in text.split("@media", 1))
    assert light <= dark | {"--ground"}
    assert parsed.seen.count("svg") >= 8


def test_a_page_has_every_figure_of_the_rows() -> None:
    text = page(full_report())
    for shown in (
        "0.300",
        "800",
        "1,600",
        "6,000",
        "0.930",
        "1.05",
        "run 6 instead of 8",
        "4.12 ",
        "above 4",
        "12,031",
    ):
        assert shown.strip() in text


def test_a_page_of_nothing_is_a_page() -> None:
    parsed = structure(page(Report("empty")))
    assert "svg" not in parsed.seen


def test_names_are_text_and_not_markup() -> None:
    text = page(full_report('<script>alert("1")</script>', "<b>&amp;"))
    assert "<script" not in text
    assert "<b>" not in text
    structure(text)


def test_a_dollar_in_a_name_is_a_dollar() -> None:
    assert "$facts" in page(Report("$facts"))


@pytest.mark.parametrize(
    "chart",
    [
        line_chart("t", "x", "y", []),
        line_chart("t", "x", "y", [Series("a", []), Series("b", [(1.0, nan), (inf, 2.0)])]),
        bar_chart("t", "x", []),
        bar_chart("t", "x", [Bar("a", [inf])]),
        range_chart("t", "x", [Range("a", [])], ("p50",)),
        histogram("t", "y", [], []),
        histogram("t", "y", ["a"], [0]),
    ],
)
def test_a_chart_of_nothing_says_so(chart: str) -> None:
    assert "no data" in chart
    assert "<svg" not in chart
    structure(chart)


@pytest.mark.parametrize(
    "chart",
    [
        line_chart("t", "x", "y", [Series("a", [(1.0, 0.0)])]),
        line_chart("t", "x", "y", [Series("a", [(0.0, 0.0), (2.0, 0.0)])], logarithmic=True, x_logarithmic=True),
        line_chart("t", "x", "y", [Series("a", [(1.0, 5.0), (1.0, 5.0)])], level=Level("SLO", 0.9)),
        bar_chart("t", "x", [Bar("a", [0.0])]),
        bar_chart("t", "x", [Bar("a" * 200, [1e15, 1e-9], 5.0)], ["x" * 100], [Level("z", 2.0)]),
        bar_chart("t", "x", [Bar("a", [-3.0])]),
        range_chart("t", "ms", [Range("a", [5.0, 5.0, 5.0])], ("p50", "p90", "p99")),
        range_chart("t", "ms", [Range("a", [0.0, 1.0, 1e9])], ("p50", "p90", "p99")),
        histogram("t", "y", ["a"], [1]),
    ],
)
def test_odd_data_gives_finite_places(chart: str) -> None:
    structure(chart)
    numbers = re.findall(r'(?:x|y|x1|x2|y1|y2|cx|cy|width|height)="(-?[\d.]+|nan|inf)"', chart)
    assert numbers
    assert not {"nan", "inf"} & set(numbers)


def test_a_bar_ends_where_its_value_is() -> None:
    chart = bar_chart("t", "x", [Bar("a", [0.25]), Bar("b", [0.5]), Bar("c", [0.25, 0.25])])
    widths = [float(width) for width in re.findall(r'<rect [^>]*width="([\d.]+)"', chart)]
    assert widths[1] == pytest.approx(2 * widths[0], abs=0.2)
    assert widths[2] + widths[3] == pytest.approx(widths[1], abs=0.2)


def test_the_table_names_what_differs_and_hides_what_does_not(capsys: pytest.CaptureFixture[str]) -> None:
    print_report(full_report())
    said = capsys.readouterr().out.partition("hit rate:")[0]
    assert "0.300" in said
    assert "pulled" in said
    assert "refused" not in said
    assert "capacity" in said  # of the bounds
    print_report(Report("t", rows=averaged([row(rejects=3), row(rejects=3, link_gbps=400.0)])))
    said = capsys.readouterr().out.partition("hit rate:")[0]
    assert "refused" in said
    assert "400" in said


def test_a_table_of_nothing_prints(capsys: pytest.CaptureFixture[str]) -> None:
    print_report(Report("empty [bold]"))
    assert capsys.readouterr().out == "empty [bold]\n"
