"""What calls cost the host, out of stored runs of `fkjit bench host`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..core.store import Run
from .section import Section, Table

_HEAD = (
    "call", ">warm [us]", ">warm / torch.add", ">alternating [us]", ">more / torch.add",
    ">new shape [us]",
)  # fmt: skip


def section(run: Run) -> Section:
    """The table of one run."""
    made = Section("host", "Host time of a call")
    times = [cell for cell in run.host if cell["unit"] == "us"]
    if not times:
        made.missing = "no run of `fkjit bench host` is stored"
        return made
    made.text = [
        "Microseconds that the caller waits: the same arrays again (least of many rounds, in turns "
        "with torch.add), two shapes in turns, and shapes that no call has had (median).",
        *(
            f"A {cell['case']} of new shapes: {cell['before']:.0f} MB of host memory before, "
            f"{cell['after']:.0f} MB after."
            for cell in run.host
            if cell["unit"] == "MB"
        ),
    ]
    made.tables = [Table(_HEAD, [_row(cell) for cell in times])]
    return made


def runs_of(runs: Sequence[Run]) -> dict[str, Run]:
    """By GPU, the last run that has host times."""
    return {str(run.header.get("gpu") or "no GPU"): run for run in runs if run.host}


def _row(cell: dict[str, Any]) -> list[str]:
    add, warm, pair, new = (cell[n] for n in ("torch_add", "warm", "alternating", "new"))
    return [
        cell["case"], f"{warm:.1f}", f"{warm / add:.2f}", f"{pair:.1f}",
        f"{(pair - warm) / add:.2f}",
        "" if new is None else f"{new:.0f}",
    ]  # fmt: skip
