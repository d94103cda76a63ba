"""What moved between two runs beyond noise.

A cell moved when its median changed by more than THRESHOLD and by more than NOISES times the noise
of both runs together. Noise is what statistics.noise says of a cell. The threshold is there for
what no single run can see: another clock, another temperature, another place in memory.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fkjit.cli import console as report

from .method import MODES
from .statistics import noise
from .store import Run, latest, read

THRESHOLD = 0.03
NOISES = 3.0
REGRESSED = 1  # exit status


@dataclass(frozen=True)
class Change:
    """One cell in one mode, in both runs. Medians in ms; `ratio` above 1 is slower."""

    op: str
    case: str
    candidate: str
    kind: str
    mode: str
    before: float
    after: float
    ratio: float
    noise: float  # relative, of both together

    def verdict(self, threshold: float) -> str:
        """ "slower", "faster" or "same"."""
        if abs(math.log(self.ratio)) <= max(math.log1p(threshold), NOISES * self.noise):
            return "same"
        return "slower" if self.ratio > 1 else "faster"


@dataclass(frozen=True)
class Comparison:
    """All common cells, and those of ours that have a time in one of the runs only."""

    changes: Sequence[Change]
    broken: Sequence[tuple[str, str]]  # cell, what is wrong with it now
    gone: int  # cells that only the first run has
    new: int  # cells that only the second run has
    drift: float | None  # median ratio of peers of unchanged version
    drift_cells: int

    def moved(self, threshold: float) -> list[Change]:
        """Beyond noise, the largest change first."""
        found = [change for change in self.changes if change.verdict(threshold) != "same"]
        return sorted(found, key=lambda change: -abs(math.log(change.ratio)))

    def regressions(self, threshold: float) -> list[Change]:
        """Those of ours that are slower."""
        return [
            c
            for c in self.moved(threshold)
            if c.kind == "ours" and c.verdict(threshold) == "slower"
        ]


def compare(before: Sequence[Run], after: Sequence[Run], relative: bool = False) -> Comparison:
    """Cell by cell. With `relative` the drift of the peers is taken out of every ratio."""
    old, new = latest(list(before)), latest(list(after))
    common = [key for key in new if key in old]
    changes = [c for key in common for c in _changes(old[key], new[key])]
    steady = [
        c.ratio
        for c in changes
        if c.kind == "peer" and _same_version(old, new, (c.op, c.case, c.candidate))
    ]
    drift = float(np.median(steady)) if steady else None
    if relative and drift:
        changes = [_without(change, drift) for change in changes]
    broken = [
        (" ".join(key), new[key]["error"])
        for key in common
        if new[key]["kind"] == "ours" and "error" in new[key] and "error" not in old[key]
    ]
    return Comparison(
        changes=changes,
        broken=broken,
        gone=len(old.keys() - new.keys()),
        new=len(new.keys() - old.keys()),
        drift=drift,
        drift_cells=len(steady),
    )


def _changes(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[Change]:
    found = []
    for mode in MODES:
        a, b = before.get(mode, {}), after.get(mode, {})
        if "p50" in a and "p50" in b:
            found.append(
                Change(
                    op=after["op"],
                    case=after["case"],
                    candidate=after["candidate"],
                    kind=after["kind"],
                    mode=mode,
                    before=a["p50"],
                    after=b["p50"],
                    ratio=b["p50"] / a["p50"],
                    noise=math.hypot(noise(a), noise(b)),
                )
            )
    return found


def _same_version(old: Mapping[Any, Any], new: Mapping[Any, Any], key: Any) -> bool:
    return old[key].get("version") == new[key].get("version")


def _without(change: Change, drift: float) -> Change:
    return Change(**{**change.__dict__, "ratio": change.ratio / drift})


def main(paths: Sequence[Path], threshold: float, relative: bool) -> int:
    """Print what moved. 1 when one of ours is slower, or no longer right; else 0."""
    first, second = (read(path) for path in paths)
    found = compare(first, second, relative)
    out = report.console()
    moved = found.moved(threshold)
    out.print(_head("before", paths[0], first))
    out.print(_head("after", paths[1], second))
    if moved:
        made = report.table(
            "op", "case", "candidate", "mode", ">before", ">after", ">change", ">noise", ""
        )
        report.add_rows(made, [_row(change, threshold) for change in moved])
        out.print(made)
    regressions = found.regressions(threshold)
    for cell, why in found.broken:
        out.print(f"{cell}: {why}")
    out.print(_summary(found, moved, regressions, threshold))
    return REGRESSED if regressions or found.broken else 0


def _head(word: str, path: Path, runs: Sequence[Run]) -> str:
    header = runs[-1].header
    return f"{word}: {path.name}: {header.get('gpu')}, {header.get('commit')}, {header['date']}"


def _row(change: Change, threshold: float) -> list[str]:
    return [
        change.op,
        change.case,
        change.candidate,
        change.mode,
        report.duration(change.before * 1e-3),
        report.duration(change.after * 1e-3),
        f"{100 * (change.ratio - 1):+.1f} %",
        f"{100 * change.noise:.1f} %",
        change.verdict(threshold),
    ]


def _summary(
    found: Comparison, moved: Sequence[Change], regressions: Sequence[Change], threshold: float
) -> str:
    parts = [
        f"{len(found.changes)} times compared, {len(moved)} moved beyond noise and "
        f"{100 * threshold:g} %, {len(regressions)} of ours are slower"
    ]
    if found.broken:
        parts.append(f"{len(found.broken)} of ours had a time and have an error now")
    if found.gone or found.new:
        parts.append(f"cells only before: {found.gone}, only after: {found.new}")
    if found.drift is not None:
        parts.append(
            f"peers of the same version changed by {100 * (found.drift - 1):+.1f} % "
            f"(median of {found.drift_cells})"
        )
    return "\n".join(parts)
