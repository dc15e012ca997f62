"""A report as one page that needs nothing but itself."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from string import Template
from typing import Any

from loadtest.audit.report import FORMULAS, IDENTITY, INTERVAL, Bound, Report, Row
from loadtest.audit.report_charts import Bar, Level, Range, Series, bar_chart, histogram, line_chart, range_chart
from loadtest.audit.report_table import COLUMNS, row_cells

_TEMPLATE = Path(__file__).with_name("report.html")
_PERCENTILES = ("p50", "p90", "p99")
_SLO_SHARE = 0.90


def page(report: Report) -> str:
    """The page. Sections without data are left out or say so."""
    sections = [
        _section("What to do", _advice(report)),
        _section("Capacity at the SLO", _capacities(report)),
        _section("Runs", _rows(report.rows)),
        _section("Plots", _plots(report)),
        _section("Bounds", _bounds(report)),
        _section("Hit rates without time", _ceilings(report.ceilings)),
        _section("The traffic", _traffic(report)),
        _section("What is counted", _definitions(FORMULAS)),
        _section("Notes", _items(report.notes)),
    ]
    facts = ", ".join(f"{name} {_plain(value)}" for name, value in report.facts.items())
    return Template(_TEMPLATE.read_text(encoding="utf-8")).substitute(
        title=escape(report.trace), facts=escape(facts), sections="\n".join(filter(None, sections))
    )


def _section(title: str, body: str) -> str:
    return f"<h2>{escape(title)}</h2>\n{body}" if body else ""


def _advice(report: Report) -> str:
    return _items([f"{topic}: {text}" for topic, text, _ in report.advice])


def _items(texts: Sequence[str]) -> str:
    return f"<ul>{''.join(f'<li>{escape(text)}</li>' for text in texts)}</ul>" if texts else ""


def _definitions(pairs: Mapping[str, str]) -> str:
    entries = "".join(f"<dt>{escape(name)}</dt><dd>{escape(text)}</dd>" for name, text in pairs.items())
    return f"<dl>{entries}</dl>"


def _ceilings(ceilings: Mapping[str, Any]) -> str:
    return _definitions({name: str(value) for name, value in ceilings.items()}) if ceilings else ""


def _table(header: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    head = "".join(f"<th>{escape(name)}</th>" for name in header)
    body = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in line)}</tr>" for line in lines)
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _rows(rows: Sequence[Row]) -> str:
    return _table([column.title for column in COLUMNS], map(row_cells, rows)) if rows else ""


def _capacities(report: Report) -> str:
    header = ("policy", "nodes", "capacity", "link Gb/s", "load", "±")
    lines = [
        (
            one.policy,
            str(one.nodes),
            one.capacity,
            _plain(one.link_gbps),
            one.note if one.load is None else f"{one.load:.2f}",
            "" if one.half_width is None else f"{one.half_width:.2f}",
        )
        for one in report.capacities
    ]
    return _table(header, lines) if lines else ""


def _bounds(report: Report) -> str:
    header = ("bound", "nodes", "capacity", "hit rate", "in blocks", "GPU h saved")
    lines = [
        (
            bound.name,
            str(bound.nodes),
            bound.capacity,
            f"{bound.hit_rate:.4f}",
            f"{bound.hit_rate_blocks:.4f}",
            f"{bound.gpu_hours_saved:.2f}",
        )
        for bound in report.bounds
    ]
    return _table(header, lines) if lines else ""


def _traffic(report: Report) -> str:
    charts = [histogram(title, "requests", labels, counts) for title, labels, counts in report.histograms]
    charts += [
        line_chart(title, x_name, y_name, [Series(y_name, points)], x_logarithmic=True)
        for title, x_name, y_name, points in report.curves
    ]
    return _grid(charts)


def _grid(charts: Sequence[str]) -> str:
    return f'<div class="plots">{"".join(charts)}</div>' if charts else ""


def _plots(report: Report) -> str:
    if not report.rows:
        return ""
    name = _namer(report.rows)
    rows = _at_one_load(report.rows)
    charts = [
        _hit_rates(report, rows, name),
        _whereabouts(rows, name),
        _percentiles("Time to first token", "ttft_ms", rows, name),
        _percentiles("End to end", "e2e_ms", rows, name),
        _bars("Goodput at the SLO", "share of requests", "goodput", rows, name, Level("SLO", _SLO_SHARE)),
        _bars("Balance: computed tokens, max over mean", "times", "uncached_max_over_mean", rows, name),
        _bars("Refused", "requests", "rejects", rows, name),
        _bars("KV moved between workers", "bytes", "bytes_moved", rows, name),
        _bars("Computing that pulls saved", "seconds", "recompute_saved_seconds", rows, name),
        _bars("GPU hours saved by reuse", "hours", "gpu_hours_saved", rows, name, *_hours(report, rows)),
    ]
    if len({row.get("load") for row in report.rows}) > 1:
        charts = [*_over_loads(report.rows, name), *charts]
    return _grid([chart for chart in charts if chart])


_Namer = Callable[[Row], str]


def _namer(rows: Sequence[Row]) -> _Namer:
    """Names runs by their policy and whatever else differs between them."""
    differing = [name for name in ("nodes", "capacity", "link_gbps") if len({row.get(name) for row in rows}) > 1]

    def name(row: Row) -> str:
        extras = {
            "nodes": f"{row.get('nodes')} nodes",
            "capacity": str(row.get("capacity")),
            "link_gbps": f"{row['link_gbps']:g} Gb/s" if row.get("link_gbps") else "no link",
        }
        return ", ".join([str(row.get("policy", "run")), *(extras[one] for one in differing)])

    return name


def _at_one_load(rows: Sequence[Row]) -> Sequence[Row]:
    """Of a sweep, the greatest load that every run has: later ones are only of those that kept up."""
    runs: dict[tuple[Any, ...], set[float]] = {}
    for row in rows:
        key = tuple(row.get(name) for name in IDENTITY if name != "load")
        runs.setdefault(key, set()).add(row.get("load", 0))
    chosen = max(set.intersection(*runs.values()), default=0)
    return [row for row in rows if row.get("load", 0) == chosen]


def _over_loads(rows: Sequence[Row], name: _Namer) -> list[str]:
    slo = Level("SLO", _SLO_SHARE)
    return [
        line_chart("Goodput over load", "load", "share of requests", _series(rows, "goodput", name), level=slo),
        line_chart("TTFT p90 over load", "load", "ms", _series(rows, "ttft_ms_p90", name), logarithmic=True),
        line_chart("Hit rate over load", "load", "share of tokens", _series(rows, "hit_rate", name)),
    ]


def _series(rows: Sequence[Row], figure: str, name: _Namer) -> list[Series]:
    points: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        if row.get(figure) is not None:
            points.setdefault(name(row), []).append((row.get("load", 0), row[figure]))
    return [Series(one, found) for one, found in points.items()]


def _bars(title: str, x_name: str, figure: str, rows: Sequence[Row], name: _Namer, *levels: Level) -> str:
    """Nothing where no row has the figure, or all are zero."""
    bars = [Bar(name(row), [row[figure]], row.get(figure + INTERVAL)) for row in rows if row.get(figure) is not None]
    return bar_chart(title, x_name, bars, levels=levels) if any(bar.parts[0] for bar in bars) else ""


def _hit_rates(report: Report, rows: Sequence[Row], name: _Namer) -> str:
    bars = []
    for row in rows:
        if row.get("hit_rate") is not None:
            pulled = row.get("hit_rate_pulled") or 0.0
            bars.append(Bar(name(row), [row["hit_rate"] - pulled, pulled], row.get("hit_rate" + INTERVAL)))
    levels = [Level(bound.name, bound.hit_rate) for bound in _bounds_of(report, rows)]
    return bar_chart("Hit rate by tier", "share of tokens", bars, ["own memory", "pulled from a peer"], levels)


_WHEREABOUTS = ("own memory", "pulled from a peer", "missed: placement", "missed: capacity", "missed: cold")


def _whereabouts(rows: Sequence[Row], name: _Namer) -> str:
    """Where a run's prompt tokens came from, or why they were computed."""
    bars = []
    for row in rows:
        if row.get("missed_cold") is not None:
            missed = [max(row[f"missed_{why}"], 0.0) for why in ("placement", "capacity", "cold")]
            pulled = row.get("hit_rate_pulled") or 0.0
            bars.append(Bar(name(row), [row["hit_rate"] - pulled, pulled, *missed]))
    return bar_chart("Where prompt tokens came from", "share of tokens", bars, _WHEREABOUTS) if bars else ""


def _hours(report: Report, rows: Sequence[Row]) -> list[Level]:
    return [Level(bound.name, bound.gpu_hours_saved) for bound in _bounds_of(report, rows)]


def _bounds_of(report: Report, rows: Sequence[Row]) -> list[Bound]:
    """Of the first fleet that is shown."""
    first = rows[0] if rows else {}
    return [
        bound
        for bound in report.bounds
        if bound.nodes == first.get("nodes") and bound.capacity == str(first.get("capacity"))
    ]


def _percentiles(title: str, figure: str, rows: Sequence[Row], name: _Namer) -> str:
    ranges = []
    for row in rows:
        marks = [row.get(f"{figure}_{percentile}") for percentile in _PERCENTILES]
        ranges.append(Range(name(row), [mark for mark in marks if mark is not None]))
    complete = [one for one in ranges if len(one.marks) == len(_PERCENTILES)]
    return range_chart(title, "ms", complete, _PERCENTILES)


def _plain(value: Any) -> str:
    return f"{value:,.6g}" if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else str(value)
