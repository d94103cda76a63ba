"""`ncu --csv --page raw`: a row a launch, the second row has units."""

from __future__ import annotations

import csv
import re
from collections.abc import Sequence
from dataclasses import dataclass

from fkjit.errors import ParameterError

_RANGE = re.compile(r"fkjit-profile\[(.*?)\]")
_NVTX = "Push/Pop_Range"
# To base units, for a report that was printed without --print-units base.
_SCALE = {
    **{prefix + "byte": 1000.0**power for power, prefix in enumerate(("", "K", "M", "G", "T"))},
    "usecond": 1e3, "msecond": 1e6, "second": 1e9, "us": 1e3, "ms": 1e6, "s": 1e9,
    "Kinst": 1e3, "Minst": 1e6, "Ginst": 1e9,
}  # fmt: skip


@dataclass(frozen=True)
class Launch:
    """One kernel of a profile. `metrics` by Nsight Compute's names; times in ns, sizes in bytes."""

    range: str | None  # which candidate on which case: what `range_name` was given
    kernel: str
    grid: tuple[int, ...]
    block: tuple[int, ...]
    metrics: dict[str, float]


def range_name(text: str) -> str:
    """The NVTX range that launches of a candidate are found by."""
    return f"fkjit-profile[{text}]"


def parse(text: str) -> list[Launch]:
    """The launches of a report, in order. ParameterError where there is no table in the text."""
    lines = text.splitlines()
    start = next((i for i, line in enumerate(lines) if line.startswith('"ID"')), None)
    if start is None:
        raise ParameterError("profile: no table of `ncu --csv --page raw` in what ncu printed")
    head, *rows = csv.reader(line for line in lines[start:] if not line.startswith("=="))
    units: Sequence[str] = [""] * len(head)
    if rows and not rows[0][0]:
        units, *rows = rows
    return [_launch(head, units, row) for row in rows if len(row) == len(head) and row[0]]


def _launch(head: Sequence[str], units: Sequence[str], row: Sequence[str]) -> Launch:
    named = dict(zip(head, row, strict=True))
    metrics = {}
    for name, unit, value in zip(head, units, row, strict=True):
        number = _number(value)
        if "__" in name and number is not None:
            metrics[name] = number * _SCALE.get(unit.partition("/")[0], 1.0)
    ranges = [_RANGE.search(value) for name, value in named.items() if _NVTX in name]
    found = next((match[1] for match in ranges if match), None)
    name, grid, block = (named.get(key, "") for key in ("Kernel Name", "Grid Size", "Block Size"))
    return Launch(found, name, _sizes(grid), _sizes(block), metrics)


def _number(text: str) -> float | None:
    try:
        return float(text.replace(",", ""))
    except ValueError:  # "n/a", or text
        return None


def _sizes(text: str) -> tuple[int, ...]:
    """ "(64, 32, 1)" -> (64, 32, 1)"""
    return tuple(int(digits) for digits in re.findall(r"\d+", text))
