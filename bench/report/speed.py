"""Sections about times: latency, throughput, speed-up, scaling, bandwidth, memory."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence

from .cells import Cell, Family, Study, families, median, note, work
from .chart import Axis, Chart, Point, Series
from .section import Section, Table

_FAR = 8  # times the highest point: a guide above that would flatten everything below it
Value = Callable[[str, str, Cell, str], float | None]  # case, candidate, cell, mode


def latency(study: Study, styles: dict[str, int]) -> Section:
    """Medians in milliseconds."""
    made = Section("latency", "Latency", ["Median time of a call on the GPU; less is better."])
    axis = Axis("time of a call [ms]", log=True)
    made.charts = charts(study, styles, axis, lambda case, name, cell, mode: median(cell, mode))
    return _or_missing(made, "no times in these results")


def throughput(study: Study, styles: dict[str, int]) -> Section:
    """Counted work over time, with the GEMM rate of the run."""
    made = Section("throughput", "Throughput")
    made.text = ["Counted floating-point operations over the median time; more is better."]

    def value(case: str, name: str, cell: Cell, mode: str) -> float | None:
        seconds = (median(cell, mode) or 0.0) * 1e-3
        return work(cell, mode)[0] / seconds / 1e12 if seconds else None

    limits = (study.ceilings() or {}).get("gemm_tflops", {})

    def guide(family: Family) -> tuple[str, float] | None:
        dtypes = {study.dtype(case) for _, case in family.places}
        rate = limits.get(dtypes.pop()) if len(dtypes) == 1 else None
        return (f"cuBLAS GEMM, {rate:.0f} TFLOP/s", rate) if rate else None

    made.charts = charts(study, styles, Axis("speed [TFLOP/s]"), value, guide)
    return _or_missing(made, "no operation counts for this operation")


def bandwidth(study: Study, styles: dict[str, int]) -> Section:
    """Compulsory bytes over time, with the copy bandwidth of the run."""
    made = Section("bandwidth", "Bandwidth")
    made.text = [
        "Bytes that must move (each input read once, each output written once) over the median "
        "time. What a kernel bound by arithmetic reaches here says little; what one bound by "
        "memory reaches says everything."
    ]

    def value(case: str, name: str, cell: Cell, mode: str) -> float | None:
        seconds = (median(cell, mode) or 0.0) * 1e-3
        return work(cell, mode)[1] / seconds / 1e9 if seconds else None

    rate = (study.ceilings() or {}).get("copy_gbs")
    guide = (f"device copy, {rate:.0f} GB/s", rate) if rate else None
    axis = Axis("counted bytes [GB/s]", log=True)
    made.charts = charts(study, styles, axis, value, lambda family: guide)
    return _or_missing(made, "no byte counts for this operation")


def memory(study: Study, styles: dict[str, int]) -> Section:
    """Peak of the allocator over a call."""
    made = Section("memory", "Memory")
    made.text = ["Peak of the device memory that a call allocates, inputs not counted."]

    def value(case: str, name: str, cell: Cell, mode: str) -> float | None:
        peak = cell.get("memory", {}).get("peak_bytes")
        return peak / 2**20 if peak else None

    modes = study.modes[:1]
    axis = Axis("peak of a call [MiB]", log=True)
    made.charts = charts(study, styles, axis, value, modes=modes)
    return _or_missing(made, "these results have no memory figures")


def speedup(study: Study, styles: dict[str, int]) -> Section:
    """Times of peers over ours, of the same run."""
    made = Section("speedup", "Speed-up against each peer")
    own = study.own
    made.text = [
        f"Time of a peer over the time of {own} in the same run: above 1 {own} is faster, below "
        "1 the peer is."
    ]

    def value(case: str, name: str, cell: Cell, mode: str) -> float | None:
        return None if name == own or cell["kind"] == "ours" else study.speedup(case, name, mode)

    axis = Axis(f"time of the peer / time of {own}", log=True)
    made.charts = charts(study, styles, axis, value, lambda family: ("as fast", 1.0))
    return _or_missing(made, "no peer was measured beside ours")


def scaling(study: Study, styles: dict[str, int]) -> Section:
    """Ours over the length, a line for each batch; the exponent of growth."""
    made = Section("scaling", "Scaling with length")
    own = study.own
    rows = [f for f in families(study) if f.along and not f.tokens and len(f.places) > 1]
    exponents = []
    for mode in study.modes:
        for title, group in _by_batch(rows).items():
            found = [(family.label, _own_points(study, family, mode)) for family in group]
            lines = [
                Series(label, points, number)
                for number, (label, points) in enumerate(found)
                if len(points) > 1
            ]
            if not lines:
                continue
            x, y = (
                Axis(str(group[0].along), log=True, base=2),
                Axis("time of a call [ms]", log=True),
            )
            choice = {"cases": title, "mode": mode}
            made.charts.append(Chart(f"{own}: {title}", "line", x, y, lines, choice=choice))
            exponents += [(s.name, mode, f"{_exponent(s.points):.2f}") for s in lines]
    if made.charts:
        made.text = [
            f"Time of {own} over the size, a line for each batch. Exponent 1: time grows with the "
            "size, as bytes do; 2: with its square, as attention's work does; less where small "
            "cases do not fill the GPU."
        ]
        head = ("cases", "mode", ">exponent")
        made.tables = [Table(head, exponents, "Exponent of time over size", fold=True)]
    return _or_missing(made, "no two cases differ in one size alone")


def _by_batch(rows: Sequence[Family]) -> dict[str, list[Family]]:
    """Families that differ in batch and heads alone, under what they share."""
    made: dict[str, list[Family]] = {}
    for family in rows:
        words = [word for word in family.label.split() if not re.fullmatch(r"B\d+|batch=\d+", word)]
        made.setdefault(" ".join(words), []).append(family)
    return made


def _own_points(study: Study, family: Family, mode: str) -> list[Point]:
    own, points = study.own or "", []
    for x, case in family.places:
        cell = study.cells(case).get(own, {})
        time = median(cell, mode)
        if time:
            points.append(Point(x, time, note(own, case, cell, mode)))
    return points


def _exponent(points: Sequence[Point]) -> float:
    """The slope of time over length between the first and the last, both in logarithms."""
    first, last = points[0], points[-1]
    return math.log(last.y / first.y) / math.log(last.x / first.x)


def charts(
    study: Study,
    styles: dict[str, int],
    axis: Axis,
    value: Value,
    guide: Callable[[Family], tuple[str, float] | None] = lambda family: None,
    modes: Sequence[str] | None = None,
) -> list[Chart]:
    """A chart for each family and mode, with a series for each candidate that has values."""
    made = []
    for family in families(study):
        for mode in study.modes if modes is None else modes:
            found = [
                _series(study, family, mode, name, styles[name], value) for name in study.candidates
            ]
            found = [series for series in found if series.points]
            if not found:
                continue
            line = guide(family)
            if line and (axis.log or line[1] < _FAR * max(p.y for s in found for p in s.points)):
                ends = (family.places[0][0], family.places[-1][0])
                found.append(Series(line[0], [Point(x, line[1]) for x in ends], guide=True))
            x = Axis(family.along or "", log=family.along is not None, base=2)
            kind = "line" if family.along else "dots"
            chart = Chart(f"{study.op}: {family.label}", kind, x, axis, found)
            chart.choice = {"cases": family.label, **({"mode": mode} if modes is None else {})}
            if family.along is None:
                chart.categories = [(case, "") for _, case in family.places]
            made.append(chart)
    return made


def _series(study: Study, family: Family, mode: str, name: str, style: int, value: Value) -> Series:
    points = []
    for x, case in family.places:
        cell = study.cells(case).get(name)
        y = value(case, name, cell, mode) if cell and median(cell, mode) else None
        if cell and y:
            points.append(Point(x, y, note(name, case, cell, mode)))
    return Series(name, points, style)


def _or_missing(section: Section, why: str) -> Section:
    if section.empty():
        section.text, section.missing = [], why
    return section
