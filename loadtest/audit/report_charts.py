"""Plots as SVG, written out by hand: no script, no library, no network. Colours are CSS variables of the page.

Runs have long names, so whatever compares them lies on its side: a name at the left, its figures to the right of it.
"""

from collections.abc import Iterable, Sequence
from html import escape
from math import ceil, floor, isfinite, log10
from typing import NamedTuple

WIDTH = 640
_COLOURS = 8
"""That the page defines: --series-0 and on."""
_LEGEND_COLUMNS = 3
_LINE = 18
"""Height of a line of text."""
_ROW = 24
"""Height of a bar's row."""
_TICKS = 5
_CHARACTER = 7.0
"""Width of one, at most."""


class Series(NamedTuple):
    name: str
    points: Sequence[tuple[float, float]]
    """(x, y), by x."""


class Bar(NamedTuple):
    label: str
    parts: Sequence[float]
    """Laid end to end."""
    half_width: float | None = None
    """Of the interval around its end."""


class Range(NamedTuple):
    label: str
    marks: Sequence[float]
    """Rising, as percentiles are."""


class Level(NamedTuple):
    """A line across a chart."""

    name: str
    value: float


class _Axis(NamedTuple):
    low: float
    high: float
    ticks: Sequence[float]
    logarithmic: bool = False

    def share(self, value: float) -> float:
        """Where a value lies between the ends, 0 to 1 and not beyond."""
        low, high = self.low, self.high
        if self.logarithmic:
            value, low, high = (log10(max(number, 1e-12)) for number in (value, low, high))
        return min(max((value - low) / (high - low), 0.0), 1.0)


class _Area(NamedTuple):
    """Where values are drawn; pixels from the upper left."""

    left: float
    top: float
    width: float
    height: float

    def x(self, share: float) -> float:
        return self.left + share * self.width

    def y(self, share: float) -> float:
        return self.top + (1 - share) * self.height

    @property
    def bottom(self) -> float:
        return self.top + self.height


def line_chart(
    title: str,
    x_name: str,
    y_name: str,
    series: Sequence[Series],
    *,
    logarithmic: bool = False,
    x_logarithmic: bool = False,
    level: Level | None = None,
) -> str:
    """Lines through points. Points that are not finite are left out; without any, says so."""
    shown = [one for one in (Series(name, _finite(points)) for name, points in series) if one.points]
    points = [point for one in shown for point in one.points]
    if not points:
        return _nothing(title)
    area = _Area(64, 14, WIDTH - 80, 240)
    x_axis = _axis([x for x, _ in points], x_logarithmic, from_zero=False)
    y_axis = _axis([*(y for _, y in points), *([level.value] if level else [])], logarithmic, not logarithmic)
    body = [_y_grid(y_axis, area, y_name), _x_ticks(x_axis, area, x_name)]
    if level is not None:
        y = area.y(y_axis.share(level.value))
        body += [_line(area.left, y, area.x(1), y, "level"), _text(area.x(1), y - 4, level.name, "tick", "end")]
    for number, one in enumerate(shown):
        body.append(_polyline(one, x_axis, y_axis, area, number))
    return _figure(title, body, area.bottom + 44, [one.name for one in shown])


def histogram(title: str, y_name: str, labels: Sequence[str], counts: Sequence[float]) -> str:
    """Columns beside each other, all of one kind."""
    if not any(counts):
        return _nothing(title)
    area = _Area(64, 14, WIDTH - 80, 240)
    axis = _axis(counts, False, from_zero=True)
    body, slot = [_y_grid(axis, area, y_name)], area.width / len(counts)
    for number, (label, count) in enumerate(zip(labels, counts, strict=True)):
        left, top = area.left + slot * (number + 0.1), area.y(axis.share(count))
        body.append(_rectangle(left, top, slot * 0.8, area.bottom - top, 0, f"{label}: {_number(count)}"))
        body.append(_text(left + slot * 0.4, area.bottom + 16, label, "tick", "middle"))
    return _figure(title, body, area.bottom + 30, [])


def bar_chart(
    title: str, x_name: str, bars: Sequence[Bar], part_names: Sequence[str] = (), levels: Sequence[Level] = ()
) -> str:
    """Bars below each other, each of parts, with lines across and the sum at the end."""
    shown = [bar for bar in bars if bar.parts and all(map(isfinite, bar.parts))]
    if not shown:
        return _nothing(title)
    area = _beside([bar.label for bar in shown], top=16 + _LINE * len(levels))
    ends = [sum(bar.parts) + (bar.half_width or 0.0) for bar in shown]
    axis = _axis([*ends, *(level.value for level in levels)], False, from_zero=True)
    body = [_x_grid(axis, area, x_name), *_levels(levels, axis, area)]
    for row, bar in enumerate(shown):
        body.append(_bar(bar, axis, area, row))
    return _figure(title, body, area.bottom + 44, part_names)


def range_chart(title: str, x_name: str, ranges: Sequence[Range], mark_names: Sequence[str]) -> str:
    """For each run a line from its first mark to its last, marks as dots; on a logarithmic axis."""
    shown = [one for one in ranges if one.marks and all(isfinite(mark) for mark in one.marks)]
    if not shown:
        return _nothing(title)
    area = _beside([one.label for one in shown], top=14)
    axis = _axis([mark for one in shown for mark in one.marks], True, from_zero=False)
    body = [_x_grid(axis, area, x_name)]
    for row, one in enumerate(shown):
        y = area.top + _ROW * (row + 0.5)
        places = [area.x(axis.share(mark)) for mark in one.marks]
        body += [_label(one.label, area, y), _line(places[0], y, places[-1], y, "whisker")]
        body += [
            _dot(place, y, number, 4.5, f"{one.label}, {mark_names[number]}: {_number(mark)}")
            for number, (place, mark) in enumerate(zip(places, one.marks, strict=True))
        ]
    return _figure(title, body, area.bottom + 44, mark_names)


# Parts of charts


def _beside(labels: Sequence[str], top: float) -> _Area:
    """Room for rows, to the right of their labels."""
    left = min(16 + _CHARACTER * max(map(len, labels)), WIDTH / 2)
    return _Area(left, top, WIDTH - left - 60, _ROW * len(labels))


def _bar(bar: Bar, axis: _Axis, area: _Area, row: int) -> str:
    top, base = area.top + _ROW * row + 4, 0.0
    middle = top + (_ROW - 8) / 2
    pieces = [_label(bar.label, area, middle)]
    for number, part in enumerate(bar.parts):
        left, right = area.x(axis.share(base)), area.x(axis.share(base + part))
        pieces.append(_rectangle(left, top, right - left, _ROW - 8, number, f"{bar.label}: {_number(part)}"))
        base += part
    end = base + (bar.half_width or 0.0)
    if bar.half_width:
        start = area.x(axis.share(base - bar.half_width))
        pieces.append(_line(start, middle, area.x(axis.share(end)), middle, "whisker"))
    pieces.append(_text(area.x(axis.share(end)) + 5, middle + 4, _number(base), "tick"))
    return "".join(pieces)


def _levels(levels: Sequence[Level], axis: _Axis, area: _Area) -> Iterable[str]:
    """Names one above the other, since levels may lie close together."""
    for number, level in enumerate(levels):
        x, y = area.x(axis.share(level.value)), 14 + _LINE * number
        yield _line(x, y + 2, x, area.bottom, "level")
        yield _text(x - 5, y, f"{level.name} {_number(level.value)}", "tick", "end")


def _polyline(series: Series, x_axis: _Axis, y_axis: _Axis, area: _Area, number: int) -> str:
    places = [(area.x(x_axis.share(x)), area.y(y_axis.share(y))) for x, y in series.points]
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
    dots = [
        _dot(*place, number, 3, f"{series.name}: {_number(x)}, {_number(y)}")
        for place, (x, y) in zip(places, series.points, strict=True)
    ]
    return f'<polyline points="{path}" class="line" style="stroke:{_colour(number)}"/>{"".join(dots)}'


def _y_grid(axis: _Axis, area: _Area, name: str) -> str:
    lines = []
    for tick in axis.ticks:
        y = area.y(axis.share(tick))
        lines.append(
            _line(area.left, y, area.x(1), y, "grid") + _text(area.left - 6, y + 4, _number(tick), "tick", "end")
        )
    middle = area.top + area.height / 2
    turned = f'<g transform="rotate(-90 14 {middle:.0f})">{_text(14, middle, name, "name", "middle")}</g>'
    return "".join(lines) + turned


def _x_grid(axis: _Axis, area: _Area, name: str) -> str:
    lines = [_line(x, area.top, x, area.bottom, "grid") for x in (area.x(axis.share(tick)) for tick in axis.ticks)]
    return "".join(lines) + _x_ticks(axis, area, name)


def _x_ticks(axis: _Axis, area: _Area, name: str) -> str:
    ticks = [_text(area.x(axis.share(tick)), area.bottom + 16, _number(tick), "tick", "middle") for tick in axis.ticks]
    return "".join(ticks) + _text(area.x(0.5), area.bottom + 34, name, "name", "middle")


def _figure(title: str, body: Iterable[str], height: float, names: Sequence[str]) -> str:
    """The page's frame of a chart, with a legend below it."""
    rows = ceil(len(names) / _columns(names))
    legend = "".join(_legend(number, name, names, height) for number, name in enumerate(names))
    return (
        f'<figure><figcaption>{escape(title)}</figcaption><svg viewBox="0 0 {WIDTH} {height + rows * _LINE:.0f}" '
        f'role="img" aria-label="{escape(title, quote=True)}">{"".join(body)}{legend}</svg></figure>'
    )


def _columns(names: Sequence[str]) -> int:
    """Of a legend: fewer where names are long."""
    longest = max(map(len, names), default=1)
    return min(max(int(WIDTH / (longest * _CHARACTER + 40)), 1), _LEGEND_COLUMNS)


def _legend(number: int, name: str, names: Sequence[str], top: float) -> str:
    columns = _columns(names)
    row, column = divmod(number, columns)
    x, y = 20 + column * (WIDTH - 20) / columns, top + 6 + row * _LINE
    return _rectangle(x, y - 8, 10, 10, number, name) + _text(x + 16, y + 1, name, "tick")


def _nothing(title: str) -> str:
    return f'<figure><figcaption>{escape(title)}</figcaption><p class="nothing">no data</p></figure>'


# Shapes


def _line(x: float, y: float, x_end: float, y_end: float, kind: str) -> str:
    return f'<line x1="{x:.1f}" y1="{y:.1f}" x2="{x_end:.1f}" y2="{y_end:.1f}" class="{kind}"/>'


def _text(x: float, y: float, text: str, kind: str, anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" class="{kind}" text-anchor="{anchor}">{escape(text)}</text>'


def _label(text: str, area: _Area, y: float) -> str:
    return _text(area.left - 8, y + 4, text, "tick", "end")


def _dot(x: float, y: float, number: int, radius: float, title: str) -> str:
    circle = f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius:g}" style="fill:{_colour(number)}">'
    return f"{circle}<title>{escape(title)}</title></circle>"


def _rectangle(x: float, y: float, width: float, height: float, number: int, title: str) -> str:
    size = f'x="{x:.1f}" y="{y:.1f}" width="{max(width, 0):.1f}" height="{max(height, 0):.1f}"'
    return f'<rect {size} style="fill:{_colour(number)}"><title>{escape(title)}</title></rect>'


def _colour(number: int) -> str:
    return f"var(--series-{number % _COLOURS})"


# Axes


def _finite(points: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    return sorted((x, y) for x, y in points if isfinite(x) and isfinite(y))


def _axis(values: Sequence[float], logarithmic: bool, from_zero: bool) -> _Axis:
    low, high = min(values), max(values)
    return _log_axis(low, high) if logarithmic else _linear_axis(min(low, 0.0) if from_zero else low, high)


def _log_axis(low: float, high: float) -> _Axis:
    """From one of 1, 2, 5 times a power of ten to another; ticks at all of them, or at powers where these are many."""
    low, high = max(low, 1e-3), max(high, 1e-3)
    steps = [digit * 10.0**power for power in range(floor(log10(low)), ceil(log10(high)) + 1) for digit in (1, 2, 5)]
    first = max((step for step in steps if step <= low), default=steps[0])
    last = min((step for step in steps if step >= high and step > first), default=steps[-1])
    ticks = [step for step in steps if first <= step <= last]
    powers = [tick for tick in ticks if log10(tick) == round(log10(tick))]
    return _Axis(first, last, powers if len(ticks) > 2 * _TICKS else ticks, True)


def _linear_axis(low: float, high: float) -> _Axis:
    if high <= low:
        high = low + max(abs(low), 1.0)
    rough = (high - low) / _TICKS
    unit = 10.0 ** floor(log10(rough))
    step = next(factor * unit for factor in (1, 2, 2.5, 5, 10) if factor * unit >= rough * (1 - 1e-9))
    first, last = floor(low / step + 1e-9), ceil(high / step - 1e-9)
    return _Axis(first * step, last * step, [number * step for number in range(first, last + 1)])


_SCALES: Sequence[tuple[float, str]] = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


def _number(value: float) -> str:
    """Short: 1.2k, 0.37, 45."""
    for scale, letter in _SCALES:
        if abs(value) >= scale:
            return f"{value / scale:.3g}{letter}"
    return f"{value:.3g}"
