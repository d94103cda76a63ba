"""The picture of docs/MOE.md, step by step from PyTorch's calls to one launch, out of what the
suite printed (medians of warm calls):

    fkjit bench moe_route moe_regroup moe_route_and_regroup --modes warm 2> run.log
    python -m bench.moe_steps run.log docs/moe_steps.svg

Drawn as `fkjit report` draws. A step of two launches is the sum of their times.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from pathlib import Path

from .report import svg
from .report.chart import Axis, Chart, Point, Series

CASE = "fp32 T32768 E64 K2"
ROUTE, SORT, BOTH = "moe_route", "moe_regroup", "moe_route_and_regroup"
# What it is called, which proposal it takes up, and whose times it is the sum of.
STEPS = (
    ("PyTorch", "", ((BOTH, "torch"),)),
    ("one kernel routes, PyTorch sorts", "fusion", ((ROUTE, "fkjit"), (SORT, "torch"))),
    ("Triton: histogram, then atomics", "counting sort", ((BOTH, "triton"),)),
    ("two launches", "counting sort, stable", ((ROUTE, "fkjit"), (SORT, "fkjit"))),
    ("one launch", "fusion of both", ((BOTH, "fkjit"),)),
)
NAMES = ("with fkjit", "without")
_LINE = re.compile(r"^\[\d+/\d+\] (\w+) (.*?): (.*)$")
_TIME = re.compile(r"(\S+) ([\d.]+) (us|ms|s) ")
_UNITS = {"us": 1.0, "ms": 1e3, "s": 1e6}


def read(text: str) -> dict[tuple[str, str], float]:
    """Microseconds of each operation and candidate on the case."""
    found = {}
    for line in filter(None, map(_LINE.match, text.splitlines())):
        op, case, times = line.groups()
        if case == CASE:
            for name, time, unit in _TIME.findall(times):
                found[op, name] = float(time) * _UNITS[unit]
    return found


def steps(found: dict[tuple[str, str], float]) -> list[float]:
    """Microseconds of each step."""
    return [sum(found[part] for part in parts) for _, _, parts in STEPS]


def picture(times: Sequence[float], caption: str) -> str:
    """A row for each step, time to the right."""
    series = []
    for style, name in enumerate(NAMES):
        ours = [any(who == "fkjit" for _, who in parts) is (style == 0) for _, _, parts in STEPS]
        points = [Point(n, t) for n, t in enumerate(times) if ours[n]]
        series.append(Series(name, points, style))
    title = "Route 32,768 tokens to 2 of 64 experts, and sort the choices"
    chart = Chart(title, "dots", Axis(""), Axis("time [µs]", log=True), series)
    chart.categories = [
        (f"{name}: {time:.1f} µs{' (sum of two)' if len(parts) > 1 else ''}", proposal)
        for (name, proposal, parts), time in zip(STEPS, times, strict=True)
    ]
    return svg.draw(chart, caption)


def main() -> None:
    """Draw the run given on the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("log", type=Path, help="what `fkjit bench` printed")
    parser.add_argument("svg", type=Path, help="the picture to write")
    given = parser.parse_args()
    caption = f"Medians of warm calls, fp32; {given.log.name}"
    given.svg.write_text(picture(steps(read(given.log.read_text())), caption))


if __name__ == "__main__":
    main()
