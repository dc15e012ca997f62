"""A report for a terminal."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from loadtest.audit.report import FORMULAS, INTERVAL, Report, Row


class Column(NamedTuple):
    title: str
    figure: str
    shown: Callable[[Any], str]
    is_leading: bool = False
    """Whether it has its interval in a terminal too, where there is room for few."""


def _share(value: float) -> str:
    return f"{value:.3f}"


def _milliseconds(value: float) -> str:
    return f"{value:,.0f}" if value < 99_999.5 else f"{value / 1e3:,.0f}s"


def _bytes(value: float) -> str:
    return f"{value / 1e9:,.1f}"


def _text(value: Any) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:g}" if isinstance(value, float) else str(value)


def _link(gbps: float) -> str:
    return f"{gbps:g}" if gbps else "none"


COLUMNS = (
    Column("policy", "policy", _text),
    Column("nodes", "nodes", _text),
    Column("load", "load", _text),
    Column("capacity", "capacity", _text),
    Column("link", "link_gbps", _link),
    Column("hit", "hit_rate", _share, is_leading=True),
    Column("pulled", "hit_rate_pulled", _share),
    Column("blocks", "hit_rate_blocks", _share),
    Column("cold", "missed_cold", _share),
    Column("capacity missed", "missed_capacity", _share),
    Column("placement missed", "missed_placement", _share),
    Column("TTFT", "ttft_ms_mean", _milliseconds, is_leading=True),
    Column("x first", "ttft_over_first", lambda value: f"{value:.2f}", is_leading=True),
    Column("p50", "ttft_ms_p50", _milliseconds),
    Column("p90", "ttft_ms_p90", _milliseconds),
    Column("p99", "ttft_ms_p99", _milliseconds),
    Column("E2E", "e2e_ms_p50", _milliseconds),
    Column("p90", "e2e_ms_p90", _milliseconds),
    Column("TPOT p90", "tpot_ms_p90", _milliseconds),
    Column("goodput", "goodput", _share, is_leading=True),
    Column("by size", "goodput_size_aware", _share),
    Column("refused", "rejects", _text),
    Column("regret", "regret_tokens_mean", lambda value: f"{value:,.0f}"),
    Column("TTFT foretold ±", "ttft_error_ms_median", _milliseconds),
    Column("balance", "uncached_max_over_mean", lambda value: f"{value:.2f}"),
    Column("busy", "utilisation", _share),
    Column("pulls", "pulls", _text),
    Column("GB moved", "bytes_moved", _bytes),
    Column("s saved", "recompute_saved_seconds", lambda value: f"{value:,.0f}"),
    Column("GPU h saved", "gpu_hours_saved", lambda value: f"{value:.2f}"),
)
_NARROW = (
    *(
        "policy",
        "load",
        "hit_rate",
        "ttft_ms_mean",
        "ttft_over_first",
        "ttft_ms_p50",
        "ttft_ms_p90",
        "ttft_ms_p99",
        "e2e_ms_p50",
    ),
    *("goodput", "uncached_max_over_mean"),
)
"""What fits into 80 columns ..."""
_TELLING = ("nodes", "capacity", "link_gbps")
"""... and what is added where rows differ in it, and where it is not zero."""
_EVENTFUL = ("hit_rate_pulled", "rejects")
_NONE = "-"


def row_cells(row: Row) -> list[str]:
    """Of every column, with intervals."""
    return [_cell(row, column, True) for column in COLUMNS]


def _cell(row: Row, column: Column, with_interval: bool) -> str:
    value = row.get(column.figure)
    if value is None:
        return _NONE
    half_width = row.get(column.figure + INTERVAL) if with_interval else None
    return column.shown(value) + (f" ±{column.shown(half_width)}" if half_width else "")


WIDTH_MIN = 120
"""Where no terminal says how wide it is."""


def print_report(report: Report) -> None:
    """Facts, bounds, rows, capacities, advice, and what each figure counts; on stdout."""
    console = Console()
    if not console.is_terminal:
        console = Console(width=max(console.width, WIDTH_MIN))
    console.print(report.trace, style="bold", highlight=False, markup=False)
    for name, value in report.facts.items():
        console.print(f"  {name}: {_text(value)}", highlight=False, markup=False)
    for note in report.notes:
        console.print(f"  note: {note}", highlight=False, markup=False)
    for table in (_ceilings(report), _bounds(report), _rows(report.rows), _capacities(report)):
        if table is not None:
            console.print(table)
    for topic, text, _ in report.advice:
        console.print(f"{topic}: {text}", highlight=False, markup=False)
    if report.rows:
        _print_formulas(console)


def _print_formulas(console: Console) -> None:
    console.print()
    for name, text in FORMULAS.items():
        console.print(f"  {name}: {text}", highlight=False, markup=False, style="dim")


def _ceilings(report: Report) -> Table | None:
    if not report.ceilings:
        return None
    table = _table("hit rates without time", "bound", "hit rate")
    for name, value in report.ceilings.items():
        table.add_row(name, _text(value))
    return table


def _bounds(report: Report) -> Table | None:
    if not report.bounds:
        return None
    table = _table("bounds, by tokens", "bound", "nodes", "capacity", "hit", "blocks", "GPU h saved")
    for name, nodes, capacity, tokens, blocks, hours in report.bounds:
        table.add_row(name, str(nodes), capacity, _share(tokens), _share(blocks), f"{hours:.2f}")
    return table


def _rows(rows: Sequence[Row]) -> Table | None:
    if not rows:
        return None
    added = {name for name in _TELLING if len({row.get(name) for row in rows}) > 1}
    added |= {name for name in _EVENTFUL if any(row.get(name) for row in rows)}
    columns = [column for column in COLUMNS if column.figure in {*_NARROW, *added}]
    table = _table("runs; times in ms: TTFT mean, p50, p90, p99; E2E p50", *(column.title for column in columns))
    for row in rows:
        table.add_row(*(_cell(row, column, column.is_leading) for column in columns))
    return table


def _capacities(report: Report) -> Table | None:
    if not report.capacities:
        return None
    table = _table("SLO capacity: load at which goodput is 0.90", "policy", "nodes", "capacity", "link", "load")
    for policy, nodes, capacity, link_gbps, load, half_width, note, _ in report.capacities:
        shown = note if load is None else f"{load:.2f}" + (f" ±{half_width:.2f}" if half_width else "")
        table.add_row(policy, str(nodes), capacity, _link(link_gbps), shown)
    return table


def _table(title: str, *names: str) -> Table:
    table = Table(title=title, title_justify="left", box=SIMPLE, padding=(0, 1, 0, 0), pad_edge=False)
    for number, name in enumerate(names):
        table.add_column(name, justify="right" if number else "left", no_wrap=True)
    return table
