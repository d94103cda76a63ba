"""A chart as a PNG, through matplotlib, which brings its own letters along."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

from fkjit.errors import ToolchainError

from .chart import Axis, Chart, Series, short, span, ticks
from .svg import clipped

_MARKERS = {
    "circle": "o", "square": "s", "triangle": "^", "diamond": "D", "cross": "x", "ring": "o",
}  # fmt: skip


def available() -> str | None:
    """Why there are no PNGs here, or None."""
    try:
        import_module("matplotlib")
    except ImportError:
        return "PNG needs matplotlib: pip install 'fkjit[bench]'"
    return None


def write(chart: Chart, path: Path) -> None:
    """A picture 1290 pixels wide, of lines or dots. ToolchainError without matplotlib."""
    why = available()
    if why:
        raise ToolchainError(f"report: {why}")
    import_module("matplotlib").use("Agg")
    pyplot = import_module("matplotlib.pyplot")
    height = 2.0 + 0.28 * len(chart.categories) if chart.kind == "dots" else 4.2
    figure, axes = pyplot.subplots(figsize=(8.6, height), dpi=150, layout="constrained")
    axes.set_title(chart.title, loc="left", fontsize=10)
    axes.grid(color="#7b8491", alpha=0.3)
    axes.tick_params(labelsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    (_dots if chart.kind == "dots" else _lines)(axes, chart)
    columns = min(4, len(chart.series))
    figure.legend(loc="outside lower center", ncols=columns, fontsize=7.5, frameon=False)
    figure.savefig(path, facecolor="white")
    pyplot.close(figure)


def _lines(axes: Any, chart: Chart) -> None:
    low, high = span(chart.x, [p.x for s in chart.series for p in s.points if not s.guide])
    every = []
    for series in chart.series:
        points = clipped(series, low, high)
        every += [p.y for p in points]
        xs, ys = [p.x for p in points], [p.y for p in points]
        axes.plot(xs, ys, **_look(series, chart.kind == "line" or series.guide))
    _axis(axes, "x", chart.x, (low, high))
    _axis(axes, "y", chart.y, span(chart.y, every))
    axes.set_xlabel(chart.x.label, fontsize=8)
    axes.set_ylabel(chart.y.label, fontsize=8)


def _axis(axes: Any, name: str, axis: Axis, ends: tuple[float, float]) -> None:
    """Scale, ends and ticks as the other drawings have them."""
    if axis.log:
        axes.set(**{f"{name}scale": "log"})
    axes.set(**{f"{name}lim": ends})
    values = ticks(axis, *ends)
    one = getattr(axes, f"{name}axis")
    one.set_ticks(values, [short(value, axis.base) for value in values])
    one.set_minor_locator(import_module("matplotlib.ticker").NullLocator())


def _look(series: Series, joined: bool) -> dict[str, Any]:
    dashes = [float(n) for n in series.dash.split()]
    style: Any = (0, tuple(dashes)) if dashes else "-"
    hollow = series.hollow or series.marker == "ring"
    return {
        "label": series.name,
        "color": "#7b8491" if series.guide else series.colour,
        "linestyle": style if joined else "none",
        "marker": "none" if series.guide else _MARKERS[series.marker],
        "markersize": 5,
        "markerfacecolor": "none" if hollow else None,
        "linewidth": 1.5,
    }


def _dots(axes: Any, chart: Chart) -> None:
    """The first category on top."""
    for series in chart.series:
        if series.guide:
            axes.axvline(series.points[0].y, label=series.name, color="#7b8491", linestyle="--")
        else:
            xs, ys = [p.y for p in series.points], [p.x for p in series.points]
            axes.plot(xs, ys, **_look(series, joined=False))
    axes.set_yticks(range(len(chart.categories)), [name for name, _ in chart.categories])
    axes.set_ylim(len(chart.categories) - 0.5, -0.5)
    _axis(axes, "x", chart.y, span(chart.y, [p.y for s in chart.series for p in s.points]))
    axes.set_xlabel(chart.y.label, fontsize=8)
