"""A chart as an SVG with a transparent background, legible on a white page and on a dark one."""

from __future__ import annotations

import math
from collections.abc import Callable
from html import escape

from .chart import Axis, Chart, Point, Series, short, span, ticks

TEXT, LINE = "#7b8491", "#7b849155"
WIDTH = 860
_HEIGHT, _ROW = 340, 34  # of lines or bars with what is below; of a category of dots
_LEFT, _RIGHT, _TOP = 62, 14, 40
_GROUP_GAP = 24.0


def draw(chart: Chart, caption: str = "") -> str:
    """The picture. `caption` is what a screen reader says."""
    legend, rows = _legend(chart)
    top = _TOP + 20 * rows
    height = top + (_ROW * len(chart.categories) + 50 if chart.kind == "dots" else _HEIGHT)
    box = (_LEFT, top, WIDTH - _RIGHT, height - (62 if chart.kind == "bar" else 50))
    parts = [_text(0, 18, chart.title, 15), *legend]
    body = {"bar": _bars, "dots": _dots}.get(chart.kind, _lines)(chart, box)
    inside = "\n  ".join([*parts, *body])
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
        f'role="img" font-family="system-ui, sans-serif" fill="{TEXT}">\n'
        f"  <title>{escape(caption or chart.title)}</title>\n  {inside}\n</svg>\n"
    )


Box = tuple[float, float, float, float]  # left, top, right, bottom


def _legend(chart: Chart) -> tuple[list[str], int]:
    """A mark and a name each, in as many rows as they need."""
    parts, x, row = [], 0.0, 0
    for series in chart.series:
        width = 42 + 6.9 * len(series.name)
        if x + width > WIDTH and x:
            x, row = 0.0, row + 1
        y = 38 + 20 * row
        if chart.kind == "bar" and not series.guide:
            parts.append(
                f'<rect x="{x:.1f}" y="{y - 10}" width="11" height="11" fill="{series.colour}"/>'
            )
        else:
            colour = TEXT if series.guide else series.colour
            parts.append(_stroke([(x, y - 5), (x + 18, y - 5)], colour, series.dash))
            if not series.guide:
                parts.append(_mark(series, x + 9, y - 5))
        parts.append(_text(x + 23, y, series.name))
        x += width
    return parts, row + 1


def _y_axis(
    axis: Axis, box: Box, values: list[float]
) -> tuple[list[str], Callable[[float], float]]:
    """Lines and texts, and what places a value."""
    left, top, right, bottom = box
    low, high = span(axis, values)
    place = scale(axis, low, high, bottom, top)
    parts = []
    for value in ticks(axis, low, high, 7):
        y = place(value)
        parts.append(f'<path d="M{left} {y:.1f}H{right}" stroke="{LINE}"/>')
        parts.append(_text(left - 6, y + 4, short(value, axis.base), anchor="end"))
    middle = (top + bottom) / 2
    parts.append(
        _text(13, middle, axis.label, 12, "middle").replace(
            "<text", f'<text transform="rotate(-90 13 {middle:.1f})"'
        )
    )
    return parts, place


def _lines(chart: Chart, box: Box) -> list[str]:
    """Lines and points on two axes of numbers."""
    left, _, right, bottom = box
    points = [p for s in chart.series for p in s.points if not s.guide]
    low, high = span(chart.x, [p.x for p in points])
    every = [clipped(s, low, high) for s in chart.series]
    parts, y = _y_axis(chart.y, box, [p.y for found in every for p in found])
    x = scale(chart.x, low, high, left, right)
    for value in ticks(chart.x, low, high, 10):
        parts.append(f'<path d="M{x(value):.1f} {bottom}v5" stroke="{LINE}"/>')
        parts.append(_text(x(value), bottom + 19, short(value, chart.x.base), anchor="middle"))
    parts.append(_text((left + right) / 2, bottom + 40, chart.x.label, 12, "middle"))
    for series, found in zip(chart.series, every, strict=True):
        places = [(x(p.x), y(p.y)) for p in found]
        colour = TEXT if series.guide else series.colour
        if chart.kind == "line" or series.guide:
            parts.append(_stroke(places, colour, series.dash))
        if not series.guide:
            parts += [_mark(series, *place) for place in places]
    return parts


def _dots(chart: Chart, box: Box) -> list[str]:
    """A row for each category, named above its line, with a mark for each series."""
    _, top, right, bottom = box
    low, high = span(chart.y, [p.y for s in chart.series for p in s.points])
    x, parts = scale(chart.y, low, high, 4, right), []
    for value in ticks(chart.y, low, high, 10):
        parts.append(f'<path d="M{x(value):.1f} {top}V{bottom}" stroke="{LINE}"/>')
        parts.append(_text(x(value), bottom + 19, short(value, chart.y.base), anchor="middle"))
    parts.append(_text(right / 2, bottom + 40, chart.y.label, 12, "middle"))
    for row, (name, _) in enumerate(chart.categories):
        parts.append(f'<path d="M4 {top + _ROW * row + 24}H{right}" stroke="{LINE}"/>')
        parts.append(_text(4, top + _ROW * row + 13, name, 12))
    for series in chart.series:
        if series.guide:
            at = x(series.points[0].y)
            parts.append(_stroke([(at, top), (at, bottom)], TEXT, series.dash))
        else:
            parts += [_mark(series, x(p.y), top + _ROW * p.x + 24) for p in series.points]
    return parts


def clipped(series: Series, low: float, high: float) -> list[Point]:
    """A guide's points within the axis, its ends moved there along its line in logarithms."""
    if not series.guide:
        return series.points
    made = []
    for a, b in zip(series.points, series.points[1:], strict=False):
        first, last = max(a.x, low), min(b.x, high)
        if first < last:
            made += [Point(at, _between(a, b, at)) for at in (first, last)]
    return made


def _between(a: Point, b: Point, at: float) -> float:
    part = (math.log(at) - math.log(a.x)) / (math.log(b.x) - math.log(a.x))
    return math.exp(math.log(a.y) + part * (math.log(b.y) - math.log(a.y)))


def scale(
    axis: Axis, low: float, high: float, start: float, end: float
) -> Callable[[float], float]:
    """A value's place between two ends of a picture."""
    if axis.log:
        first, room = math.log(low), math.log(high) - math.log(low) or 1.0
        return lambda value: start + (math.log(value) - first) / room * (end - start)
    return lambda value: start + (value - low) / ((high - low) or 1.0) * (end - start)


def _bars(chart: Chart, box: Box) -> list[str]:
    """Groups of bars; a gap where the second name of the categories changes, with that below."""
    left, _, right, floor = box
    bars = [s for s in chart.series if not s.guide]
    values = [p.y for s in chart.series for p in s.points] + [0.0]
    parts, y = _y_axis(chart.y, box, values)
    groups = list(dict.fromkeys(group for _, group in chart.categories))
    room = (right - left - _GROUP_GAP * len(groups)) / max(1, len(chart.categories))
    wide = min(34.0, room * 0.9 / max(1, len(bars)))
    at = left + _GROUP_GAP / 2
    for group in groups:
        members = [n for n, (_, g) in enumerate(chart.categories) if g == group]
        middle = at + room * len(members) / 2
        parts.append(_text(middle, floor + 42, group, anchor="middle"))
        for number in members:
            parts.append(
                _text(at + room / 2, floor + 18, chart.categories[number][0], 12, "middle")
            )
            first = at + (room - wide * len(bars)) / 2
            for place, series in enumerate(bars):
                for point in series.points:
                    if point.x == number:
                        parts += _bar(series, point, first + place * wide, wide, y, floor)
            at += room
        at += _GROUP_GAP
    for guide in (s for s in chart.series if s.guide):
        height = y(guide.points[0].y)
        parts.append(_stroke([(left, height), (right, height)], TEXT, guide.dash))
    return parts


def _bar(
    series: Series, point: Point, x: float, wide: float, y: Callable[[float], float], floor: float
) -> list[str]:
    top = y(point.y)
    parts = [
        f'<rect x="{x:.1f}" y="{top:.1f}" width="{wide - 2:.1f}" height="{floor - top:.1f}" '
        f'fill="{series.colour}"/>'
    ]
    if wide >= 12 and floor - top > 34:  # the number fits into it, upright
        centre = x + wide / 2 + 3
        turned = f'transform="rotate(-90 {centre:.1f} {top + 6:.1f})"'
        number = f"{point.y:.0f}" if point.y >= 10 else f"{point.y:.2g}"
        label = _text(centre, top + 6, number, 11, "end")
        parts.append(label.replace("<text", f'<text fill="#fff" {turned}'))
    return parts


def _stroke(places: list[tuple[float, float]], colour: str, dash: str) -> str:
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
    dashed = f' stroke-dasharray="{dash}"' if dash else ""
    return f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"{dashed}/>'


def _mark(series: Series, x: float, y: float) -> str:
    """A marker of the series' shape."""
    fill = "none" if series.hollow or series.marker in ("ring", "cross") else series.colour
    look = f'fill="{fill}" stroke="{series.colour}" stroke-width="2"'
    shapes = {
        "square": "M-4-4h8v8h-8z", "triangle": "M0-5L5 4H-5z", "diamond": "M0-6L5 0 0 6-5 0z",
        "cross": "M-4-4L4 4M4-4L-4 4",
    }  # fmt: skip
    if series.marker in shapes:
        return f'<path transform="translate({x:.1f} {y:.1f})" d="{shapes[series.marker]}" {look}/>'
    return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" {look}/>'


def _text(x: float, y: float, text: str, size: int = 13, anchor: str = "start") -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor="{anchor}">'
        f"{escape(text)}</text>"
    )
