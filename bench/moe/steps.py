"""The picture of docs/MOE.md, step by step from PyTorch's calls to one launch (see tables.py).

Drawn as `fkjit report` draws. A step of two launches is the sum of their times.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..report import svg
from ..report.bandwidth import Cells
from ..report.chart import Axis, Chart, Point, Series

CASE = "fp32 T32768 E64 K2"
ROUTE, SORT, BOTH = "moe_route", "moe_regroup", "moe_route_and_regroup"
# What it is called, which proposal it takes up, how it was timed, whose times it is the sum of.
STEPS = (
    ("PyTorch, call by call", "", "warm", ((BOTH, "torch"),)),
    ("PyTorch in a CUDA graph", "graphs", "graph", ((BOTH, "torch"),)),
    ("one kernel routes, PyTorch sorts", "fusion", "graph", ((ROUTE, "fkjit"), (SORT, "torch"))),
    ("Triton: histogram, then atomics", "counting sort", "graph", ((BOTH, "triton"),)),
    ("two launches", "stable counting sort", "graph", ((ROUTE, "fkjit"), (SORT, "fkjit"))),
    ("one launch", "fusion of both", "graph", ((BOTH, "fkjit"),)),
    ("one launch, call by call", "without graphs", "warm", ((BOTH, "fkjit"),)),
)
NAMES = ("with fkjit", "without")


def steps(known: dict[tuple[str, str], Cells]) -> list[float]:
    """Microseconds of each step, of what `bandwidth.trials` found."""
    return [
        sum(known[op, CASE][name][mode]["p50"] * 1e3 for op, name in parts)
        for _, _, mode, parts in STEPS
    ]


def picture(times: Sequence[float], source: str) -> str:
    """A row for each step, time to the right; `source`: the file of results."""
    series = []
    for style, name in enumerate(NAMES):
        ours = [any(who == "fkjit" for _, who in parts) is (style == 0) for *_, parts in STEPS]
        points = [Point(n, t) for n, t in enumerate(times) if ours[n]]
        series.append(Series(name, points, style))
    title = "Route 32,768 tokens to 2 of 64 experts, and sort the choices"
    chart = Chart(title, "dots", Axis(""), Axis("time [µs]", log=True), series)
    chart.categories = [
        (f"{name}: {time:.1f} µs{' (sum of two)' if len(parts) > 1 else ''}", proposal)
        for (name, proposal, _, parts), time in zip(STEPS, times, strict=True)
    ]
    return svg.draw(chart, f"Medians, fp32 logits; {source}")
