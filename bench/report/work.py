"""Sections about work: roofline, decode against prefill, and the twins in Triton."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from ..profile.show import total
from .cells import Cell, Study, each, median, note, work
from .chart import Axis, Chart, Point, Series
from .section import Section, Table
from .speed import charts


def roofline(study: Study, styles: dict[str, int], profile: dict[str, Any] | None) -> Section:
    """Speed over intensity, below what the same run measured of memory and arithmetic."""
    made = Section("roofline", "Roofline")
    limits = study.ceilings()
    dtypes = dict.fromkeys(study.dtype(case) for case in study.cases)
    for dtype in dtypes:
        for mode in study.modes:
            chart = _roofline(study, styles, dtype, mode, limits, profile)
            if chart.drawn():
                made.charts.append(chart)
    if not made.charts:
        made.missing = "no operation and byte counts for this operation"
        return made
    made.text = [
        "A point is a case: counted operations for each byte that must move, and the speed. The "
        "slanted line is the copy bandwidth, the flat one the GEMM rate, both measured in the run: "
        "below the slanted part more bandwidth would help, below the flat one more arithmetic."
    ]
    if limits is None:
        made.text.append("These results have no measured ceilings, so no lines are drawn.")
    if any("measured" in series.name for chart in made.charts for series in chart.series):
        made.text.append(
            "Hollow points are profiles: operations for each byte of DRAM traffic that the "
            "hardware counted, at the time under the profiler."
        )
    else:
        made.text.append("No profile has measured bytes of these cases (`fkjit profile`).")
    return made


def _roofline(
    study: Study, styles: dict[str, int], dtype: str, mode: str,
    limits: dict[str, Any] | None, profile: dict[str, Any] | None,
) -> Chart:  # fmt: skip
    series = {name: Series(name, [], styles[name]) for name in study.candidates}
    for case, name, cell in each(study, mode):
        flops, moved = work(cell, mode)
        if study.dtype(case) == dtype and flops and moved and name in series:
            speed = flops / (median(cell, mode) or 1.0) / 1e9
            text = f"{note(name, case, cell, mode)}\n{flops / moved:.4g} flop a byte, counted"
            series[name].points.append(Point(flops / moved, speed, text))
    found = [one for one in series.values() if one.points]
    found += _measured(study, styles, dtype, profile)
    x = Axis("operations for each byte [flop/B]", log=True)
    chart = Chart(
        f"{study.op}: roofline{dtype and f', {dtype}'}",
        "scatter",
        x,
        Axis("speed [TFLOP/s]", log=True),
        found,
    )
    chart.choice = {"dtype": dtype, "mode": mode}
    chart.series += _ceilings(limits, dtype, [p.x for one in found for p in one.points])
    return chart


def _ceilings(limits: dict[str, Any] | None, dtype: str, xs: Sequence[float]) -> list[Series]:
    """Memory and arithmetic as lines that meet; only memory where no GEMM was measured."""
    if not limits or not xs:
        return []
    copy, gemm = limits["copy_gbs"], limits.get("gemm_tflops", {}).get(dtype)
    low, high = min(xs) / 100, max(xs) * 100
    corner = gemm * 1e3 / copy if gemm else high
    slope = [Point(low, low * copy / 1e3), Point(corner, corner * copy / 1e3)]
    made = [Series(f"copy {copy:.0f} GB/s", slope, guide=True)]
    if gemm:
        flat = [Point(corner, gemm), Point(max(high, corner * 2), gemm)]
        made.append(Series(f"GEMM {gemm:.0f} TFLOP/s", flat, guide=True))
    return made


def _measured(
    study: Study, styles: dict[str, int], dtype: str, profile: dict[str, Any] | None
) -> list[Series]:
    """Points of a profile of the same GPU, by the bytes that its counters saw."""
    made: dict[str, Series] = {}
    for entry in profile_entries(study, profile):
        for one in entry["candidates"]:
            if (entry["problem"].get("dtype") or "") != dtype or not one.get("kernels"):
                continue
            moved = total(one, "dram_read_bytes", "dram_write_bytes")
            time = total(one, "duration")
            if moved and time and entry["flops"]:
                x, y = entry["flops"] / moved, entry["flops"] / time / 1e3
                text = (
                    f"{one['candidate']} (profiled)\n{entry['case']}\n{x:.4g} flop a byte, "
                    f"measured\n{moved / 2**20:.4g} MiB of DRAM traffic, "
                    f"{entry['bytes'] / 2**20:.4g} MiB counted\n{y:.4g} TFLOP/s"
                )
                style = _style(one["candidate"], styles)
                name = f"{one['candidate']}, measured bytes"
                series = made.setdefault(name, Series(name, [], style, hollow=True))
                series.points.append(Point(x, y, text))
    return list(made.values())


def _style(name: str, styles: dict[str, int]) -> int:
    """The candidate's own; of a kernel that was not timed by name, one after all others."""
    return styles.setdefault(name, len(styles))


def profile_entries(study: Study, profile: dict[str, Any] | None) -> list[dict[str, Any]]:
    """Those of this operation on this GPU."""
    if profile is None or profile["gpu"] != study.gpu:
        return []
    return [entry for entry in profile["entries"] if entry["op"] == study.op]


def decode(study: Study, styles: dict[str, int]) -> Section:
    """One query against many keys is bound by memory, many queries by arithmetic."""
    made = Section("decode", "Decode against prefill")
    some = [case for case in study.cases if study.problem(case).get("seqlen_q") == 1]
    if not any("seqlen_q" in study.problem(case) for case in study.cases):
        made.missing = f"{study.op} has no queries and keys"
        return made
    if not some:
        made.missing = "no case has a single query (`fkjit bench attention --set decode`)"
        return made
    heads = {_heads(study, case) for case in some}
    rest = [c for c in study.cases if c not in some and _heads(study, c) in heads]
    limits = study.ceilings() or {}
    copy = limits.get("copy_gbs")
    for mode in study.modes:
        guide = (f"device copy, {copy:.0f} GB/s", copy) if copy else None
        axis = Axis("counted bytes [GB/s]")
        made.charts.append(_dots(study, styles, "decode", some, mode, axis, 1, guide))
        if rest:
            rate = limits.get("gemm_tflops", {}).get(study.dtype(rest[0]))
            guide = (f"cuBLAS GEMM, {rate:.0f} TFLOP/s", rate) if rate else None
            axis = Axis("speed [TFLOP/s]")
            made.charts.append(_dots(study, styles, "prefill", rest, mode, axis, 0, guide))
    made.charts = [chart for chart in made.charts if chart.drawn()]
    made.text = [
        "Decode (one query a sequence) has to read all keys and values for little arithmetic: its "
        "measure is GB/s, its ceiling the copy bandwidth. Prefill of the same heads is measured in "
        "TFLOP/s."
    ]
    return made


def _heads(study: Study, case: str) -> tuple[Any, ...]:
    problem = study.problem(case)
    return tuple(problem.get(name) for name in ("dtype", "head_dim", "heads_q", "heads_kv"))


def _dots(
    study: Study, styles: dict[str, int], kind: str, cases: Sequence[str], mode: str, axis: Axis,
    which: int, guide: tuple[str, float] | None,
) -> Chart:  # fmt: skip
    """Rates of some cases, a row each: TFLOP/s for 0, GB/s for 1."""
    series = []
    for name in study.candidates:
        points = []
        for place, case in enumerate(cases):
            cell = study.cells(case).get(name, {})
            time = median(cell, mode)
            amount = work(cell, mode)[which] if time else 0.0
            if time and amount:
                rate = amount / time / (1e9 if which == 0 else 1e6)
                points.append(Point(place, rate, note(name, case, cell, mode)))
        if points:
            series.append(Series(name, points, styles[name]))
    if guide and series:
        series.append(Series(guide[0], [Point(x, guide[1]) for x in (0, len(cases))], guide=True))
    chart = Chart(f"{study.op}: {kind}", "dots", Axis(""), axis, series)
    chart.categories, chart.choice = [(case, "") for case in cases], {"kind": kind, "mode": mode}
    return chart


def twins(study: Study, styles: dict[str, int]) -> Section:
    """Time of the Triton twin over ours, and what each costs in lines."""
    made = Section("triton", "Twins in Triton")
    own = study.own

    def value(case: str, name: str, cell: Cell, mode: str) -> float | None:
        return study.speedup(case, name, mode) if cell["kind"] == "twin" else None

    axis = Axis(f"time of the twin / time of {own}")
    made.charts = charts(study, styles, axis, value, lambda family: ("as fast", 1.0))
    for mode in study.modes if made.charts else ():
        found = [
            study.speedup(case, name, mode)
            for case, name, cell in each(study, mode)
            if cell["kind"] == "twin"
        ]
        made.text += _twin_words(str(own), [ratio for ratio in found if ratio], mode)
    lines = _lines(study.op)
    if lines:
        made.tables.append(lines)
    if not made.charts:
        made.missing = "no twin was measured in these results"
    return made


def _twin_words(own: str, ratios: Sequence[float], mode: str) -> list[str]:
    """The mean of the twin's time over ours, and its range."""
    if not ratios:
        return []
    mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
    return [
        f"{mode}: the twin takes {mean:.2f} times the time of {own} ({min(ratios):.2f} to "
        f"{max(ratios):.2f}; geometric mean of {len(ratios)} cases)."
    ]


def _lines(op: str) -> Table | None:
    """Lines of code, where this operation is known here."""
    from fkjit.spec import registered

    from ..core.lines import costs

    if not registered(op):
        return None
    rows = [(line.name, line.kernel, line.total) for line in costs(op)]
    caption = (
        "Lines of code, without comments: the kernel, and with the headers or host code it needs"
    )
    return Table(("kernel", ">lines", ">with what it needs"), rows, caption)
