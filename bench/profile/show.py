"""A profile as a table: a row a metric, a column a candidate, and below how each row is read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fkjit.cli import console as report
from fkjit.paths import document

from .metrics import METRICS, STALLS, Metric

_COLUMNS = 3  # candidates beside one another in 100 columns
_TOP = 3  # stall reasons


def main_kernel(candidate: Mapping[str, Any]) -> dict[str, Any]:
    """Of several kernels that a call launches, the longest."""
    return max(candidate["kernels"], key=lambda kernel: kernel.get("duration", 0))


def total(candidate: Mapping[str, Any], *names: str) -> float | None:
    """The sum of metrics over all kernels of a call; None where nothing was counted."""
    values = [kernel[name] for kernel in candidate["kernels"] for name in names if name in kernel]
    return sum(values) if values else None


def formatted(metric: Metric, value: float | None) -> str:
    """A metric's value for people, with its unit."""
    if value is None:
        return "-"
    if metric.unit == "ns":
        return report.duration(value * 1e-9)
    if metric.unit == "bytes":
        return report.size(value)
    if metric.unit == "%":
        return f"{value:.1f} %"
    return f"{value:,.1f}" if value % 1 else f"{value:,.0f}"


def print_entry(entry: Mapping[str, Any]) -> None:
    """One case: tables of a few candidates each, then what is missing."""
    out = report.console()
    there = [one for one in entry["candidates"] if one.get("kernels")]
    for first in range(0, len(there), _COLUMNS):
        some = there[first : first + _COLUMNS]
        title = f"{entry['op']} {entry['case']}"
        made = report.table("", *(f">{one['candidate']}" for one in some), title=title)
        report.add_rows(made, rows(some))
        out.print(made)
        out.print()
    for one in entry["candidates"]:
        if one.get("missing"):
            out.print(f"{one['candidate']}: not profiled: {one['missing']}")
        elif len(one.get("kernels", ())) > 1:
            names = ", ".join(kernel["kernel"][:60] for kernel in one["kernels"])
            out.print(f"{one['candidate']}: the longest of {len(one['kernels'])} kernels: {names}")


def rows(candidates: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """A row a metric that any of them has, then the reasons its warps waited for."""
    kernels = [main_kernel(one) for one in candidates]
    made = [
        [metric.title, *(formatted(metric, kernel.get(metric.name)) for kernel in kernels)]
        for metric in METRICS
        if any(metric.name in kernel for kernel in kernels)
    ]
    for place in range(_TOP):
        cells = [_stall(kernel, place) for kernel in kernels]
        if any(cells):
            made.append([f"stall {place + 1}", *cells])
    return made


def _stall(kernel: Mapping[str, Any], place: int) -> str:
    """ "long_scoreboard 2.1": the reason and the cycles between two instructions of a warp."""
    stalls = list(kernel.get("stalls", {}).items())
    return f"{stalls[place][0]} {stalls[place][1]:.1f}" if place < len(stalls) else ""


def print_reading(entries: Sequence[Mapping[str, Any]]) -> None:
    """A sentence for each row and each stall reason that appeared."""
    out = report.console()
    made = report.table("", "how to read it")
    kernels = [k for e in entries for one in e["candidates"] for k in one.get("kernels", ())]
    for metric in METRICS:
        if any(metric.name in kernel for kernel in kernels):
            report.add_rows(made, [(metric.title, metric.reading)])
    seen = {name for kernel in kernels for name in list(kernel.get("stalls", {}))[:_TOP]}
    report.add_rows(made, [(f"stall {n}", t) for n, t in STALLS.items() if n in seen])
    out.print(made)
    out.print(
        f"Stalls are cycles between two instructions of a warp. More: {document('PROFILING.md')}"
    )
