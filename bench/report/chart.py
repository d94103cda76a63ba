"""A chart as data. The page's script, svg.py and png.py draw the same ones."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

# Distinguishable with any common colour blindness, and of middling brightness: legible on white
# and on a dark page. The first is ours; shapes and dashes tell the rest apart without colour.
PALETTE = (
    "#2f7fd6", "#d98a00", "#109a72", "#d2551c", "#bd6699", "#4aa5da", "#8a8f98", "#a08c10",
    "#8a63d2", "#5f9a1f",
)  # fmt: skip
MARKERS = ("circle", "square", "triangle", "diamond", "cross", "ring")
DASHES = ("", "6 3", "2 3")


@dataclass(frozen=True)
class Axis:
    """`base`: 2 for lengths, where each tick is twice the last; 10 otherwise."""

    label: str  # with its unit: "time of a call [ms]"
    log: bool = False
    base: int = 10
    zero: bool = True  # a linear axis begins at 0


@dataclass(frozen=True)
class Point:
    """`note`: lines to show when it is pointed at."""

    x: float
    y: float
    note: str = ""


@dataclass
class Series:
    """Points of one name. `style` numbers colour, marker and dash; a `guide` is a plain line."""

    name: str
    points: list[Point]
    style: int = 0
    guide: bool = False
    hollow: bool = False

    @property
    def colour(self) -> str:
        return PALETTE[self.style % len(PALETTE)]

    @property
    def marker(self) -> str:
        return MARKERS[self.style % len(MARKERS)]

    @property
    def dash(self) -> str:
        return "4 4" if self.guide else DASHES[self.style // len(PALETTE) % len(DASHES)]


@dataclass
class Chart:
    """`kind`: "line", "scatter"; "dots", "bar": their points' x counts `categories` (name, group).

    "dots" has a row for each category, with `y` running to the right.
    """

    title: str
    kind: str
    x: Axis
    y: Axis
    series: list[Series]
    categories: list[tuple[str, str]] = field(default_factory=list)
    choice: dict[str, str] = field(default_factory=dict)  # what it shows of several: mode, case

    def drawn(self) -> bool:
        """Whether there is anything to see."""
        return any(series.points for series in self.series if not series.guide)

    def to_dict(self) -> dict[str, Any]:
        """For the page's script; numbers with five digits."""
        made = asdict(self)
        for plain, series in zip(made["series"], self.series, strict=True):
            plain.update(colour=series.colour, marker=series.marker, dash=series.dash)
            plain["points"] = [[_short(p.x), _short(p.y), p.note] for p in series.points]
        return made


def _short(value: float) -> float:
    return float(f"{value:.5g}")


def styles(names: Iterable[str], first: Sequence[str] = ()) -> dict[str, int]:
    """A style for each name, the same wherever it appears; `first` take the first ones."""
    every = list(names)
    ordered = [name for name in first if name in every]
    ordered += [name for name in dict.fromkeys(every) if name not in ordered]
    return {name: number for number, name in enumerate(ordered)}


def span(axis: Axis, values: Sequence[float]) -> tuple[float, float]:
    """Where an axis begins and ends, with a little air."""
    low, high = min(values), max(values)
    if axis.log:
        factor = 2**0.25 if axis.base == 2 else 1.25
        return low / factor, high * factor
    low = min(low, 0.0) if axis.zero else low
    air = 0.06 * ((high - low) or 1.0)
    return (low if axis.zero and low >= 0 else low - air), high + air


def ticks(axis: Axis, low: float, high: float, most: int = 8) -> list[float]:
    """Round values within an axis, at most about `most`."""
    if not axis.log:
        return _linear_ticks(low, high, most)
    if axis.base == 2:
        powers = range(math.ceil(math.log2(low)), math.floor(math.log2(high)) + 1)
        step = max(1, -(-len(powers) // most))
        return [2.0**power for power in powers[::step]]
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for steps in ((1, 2, 5), (1, 3), (1,)):
        found = [s * 10.0**d for d in decades for s in steps if low <= s * 10.0**d <= high]
        if len(found) <= most:
            break
    if len(found) < 3:
        return _linear_ticks(low, high, most)
    return found[:: max(1, -(-len(found) // most))]


def _linear_ticks(low: float, high: float, most: int) -> list[float]:
    raw = (high - low) / max(1, most - 1) or 1.0
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(s * power for s in (1, 2, 5, 10) if s * power >= raw * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [round(n * step, 12) for n in range(first, math.floor(high / step + 1e-9) + 1)]


def short(value: float, base: int = 10) -> str:
    """A tick's text: 2048 -> "2k" on a scale of lengths, 0.05, 1500 -> "1500"."""
    if base == 2 and value >= 1024 and value % 1024 == 0:
        return f"{value / 1024:.0f}k" if value < 1 << 20 else f"{value / (1 << 20):g}M"
    if value and (abs(value) >= 1e5 or abs(value) < 1e-3):
        return f"{value:.0e}".replace("e-0", "e-").replace("e+0", "e")
    return f"{value:g}"
