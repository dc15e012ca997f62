"""`ropeway quality`'s results for people: a table, and a plot of what recomputing buys."""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from xml.sax.saxutils import escape

from rich.console import Console
from rich.table import Table

from workers.reference.quality import CONTEXTS, FRACTIONS, QualityReport

_BAR_COLUMNS = 48
_PANEL, _MARGIN = 400, 130
"""Pixels of a panel's sides, and beside it."""
_SHARE_MAX = 0.32
_KL_MIN = 1e-9
_COLORS = ("#888888", "#222222", "#d55e00", "#e69f00", "#0072b2", "#cc79a7", "#009e73")
_PLACES = {
    "in_place": "not moved",
    "after_system": "cached after the system prompt",
    "alone": "cached alone",
    "in_context": "cached behind another passage",
    "mean": f"the mean of copies behind {CONTEXTS} other passages",
}


def print_table(report: QualityReport, console: Console) -> None:
    """Rows by where KV was cached; `x rotation` compares with turning keys and recomputing nothing."""
    for cached, title in _PLACES.items():
        table = Table(title=f"{report.model}, {report.corpus}, {report.prompts} prompts: {title}", title_justify="left")
        for name in ("method", "recomputed", "codec"):
            table.add_column(name)
        for name in ("KL", "x rotation", "top-1"):
            table.add_column(name, justify="right")
        rotation = _rotation(report.rows, cached)
        for row in _rows(report.rows, cached):
            ratio = f"{row['kl_mean'] / rotation:.3f}" if rotation else ""
            recomputed = f"{row['recompute_fraction']:.0%}"
            numbers = (f"{row['kl_mean']:.2e}", ratio, f"{row['top1_agreement']:.3f}")
            table.add_row(row["method"], recomputed, row["codec"], *numbers)
        if table.row_count:
            console.print(table)


def text_plot(report: QualityReport) -> str:
    """KL of every way that moves raw KV as a bar, in characters."""
    lines = []
    for cached in ("after_system", "alone"):
        rows = [row for row in _rows(report.rows, cached) if row["codec"] == "raw" and row["recompute_fraction"] < 1]
        longest = max((row["kl_mean"] for row in rows), default=0.0)
        lines += [f"mean KL, {_PLACES[cached]}"] if rows else []
        for row in rows:
            bar = "#" * round(_BAR_COLUMNS * max(row["kl_mean"], 0.0) / longest) if longest else ""
            lines.append(f"  {row['method']:<21} {row['recompute_fraction']:>4.0%} {bar} {row['kl_mean']:.4f}")
    return "\n".join(lines)


def svg_plot(report: QualityReport) -> str:
    """Curves of KL (logarithmic) over the recomputed share, one panel for each way of caching, as an SVG document."""
    panels = {cached: _curves(report.rows, cached) for cached in ("after_system", "alone")}
    levels = [level for curves in panels.values() for points in curves.values() for _, level in points]
    decades = range(math.floor(min(levels)), math.ceil(max(levels)) + 1)
    parts: list[str] = []
    for index, (cached, curves) in enumerate(panels.items()):
        left = _MARGIN + index * (_PANEL + _MARGIN)
        parts += _axes(left, decades, f"mean KL over the share recomputed, {_PLACES[cached]}")
        for color, (method, points) in zip(_COLORS, curves.items(), strict=False):
            places = [(_across(left, share), _height(level, decades)) for share, level in points]
            parts += _curve(method, color, places)
    size = f'width="{2 * (_PANEL + _MARGIN) + _MARGIN}" height="{_PANEL + 80}"'
    style = 'font-family="sans-serif" font-size="12"'
    return "\n".join((f'<svg xmlns="http://www.w3.org/2000/svg" {size} {style}>', *parts, "</svg>\n"))


def _axes(left: int, decades: range, title: str) -> Iterator[str]:
    yield f'<text x="{left}" y="20">{escape(title)}</text>'
    for decade in decades:
        y = _height(decade, decades)
        yield f'<path d="M{left} {y:.0f}h{_PANEL}" stroke="#ddd"/>'
        yield f'<text x="{left - 6}" y="{y + 4:.0f}" text-anchor="end">1e{decade}</text>'
    for share in FRACTIONS:
        yield f'<text x="{_across(left, share):.0f}" y="{_PANEL + 62}" text-anchor="middle">{share:.0%}</text>'


def _curve(name: str, color: str, places: Sequence[tuple[float, float]]) -> Iterator[str]:
    line = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
    yield f'<polyline points="{line}" fill="none" stroke="{color}" stroke-width="2"/>'
    for x, y in places:
        yield f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{color}"/>'
    x, y = places[-1]
    yield f'<text x="{x + 6:.0f}" y="{y + 4:.0f}" fill="{color}">{escape(name)}</text>'


def _across(left: int, share: float) -> float:
    return left + share / _SHARE_MAX * _PANEL


def _height(level: float, decades: range) -> float:
    return 40 + _PANEL * (decades[-1] - level) / max(len(decades) - 1, 1)


def _curves(rows: Sequence[Mapping[str, Any]], cached: str) -> dict[str, list[tuple[float, float]]]:
    """(recomputed share, decimal logarithm of KL) by method."""
    curves: dict[str, list[tuple[float, float]]] = {}
    for row in _rows(rows, cached):
        if row["codec"] == "raw" and row["recompute_fraction"] < 1:
            point = (row["recompute_fraction"], math.log10(max(row["kl_mean"], _KL_MIN)))
            curves.setdefault(row["method"], []).append(point)
    return curves


def _rows(rows: Sequence[Mapping[str, Any]], cached: str) -> Iterator[Mapping[str, Any]]:
    return (row for row in rows if row["cached"] == cached)


def _rotation(rows: Sequence[Mapping[str, Any]], cached: str) -> float:
    return next((float(row["kl_mean"]) for row in _rows(rows, cached) if row["method"] == "rotation"), 0.0)
