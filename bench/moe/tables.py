"""The tables and the picture of docs/MOE.md out of stored runs of the routing operations.

python -m bench.moe.tables bench/results/FILE.jsonl …    oldest first
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from ..report.bandwidth import trials
from ..report.tables import (
    NOT_MEASURED,
    Known,
    Trial,
    known_of,
    listed,
    markdown,
    shown,
    time_of,
    with_tables,
)
from . import cases_moe, cases_moe_rows
from . import steps as moe_steps

ROOT = Path(__file__).resolve().parents[2]
PAGE, PICTURE = ROOT / "docs" / "MOE.md", ROOT / "docs" / "moe_steps.svg"
ROUTE, REGROUP, BOTH = "moe_route", "moe_regroup", "moe_route_and_regroup"
NAMES = ("fkjit", "triton", "torch")
HEADLINES = (
    ("route", ROUTE, cases_moe.SETS["default"]),
    ("regroup", REGROUP, [p for p in cases_moe.SETS["default"] if p["dtype"] == "fp32"]),
    ("both in one launch", BOTH, cases_moe.SETS["default"]),
)
ROWS = (("permute", "moe_permute"), ("combine", "moe_combine"))


def speed_of(cell: dict[str, Any]) -> str:
    """GB/s, and how much that is of the copy's."""
    graph = cell["graph"]
    return f"{graph['gbs']:.0f} ({graph['share_copy']:.3f})"


def headlines(known: Known) -> Iterator[list[str]]:
    """One shape a row: ours, the twin, PyTorch."""
    yield ["microseconds in a CUDA graph", *_COLUMNS, "PyTorch / fkjit"]
    for text, op, problems in HEADLINES:
        for p in problems:
            trial = known.get((op, cases_moe.label(p)), NOT_MEASURED)
            times = [time_of(trial.cells, name) for name in NAMES]
            if times[0] is not None:
                ratio = "" if times[2] is None else f"{times[2] / times[0]:.1f}"
                yield [f"{text}, {cases_moe.label(p)}{trial.mark}", *map(shown, times), ratio]


def rows(known: Known) -> Iterator[list[str]]:
    """What moves rows: microseconds, and GB/s as a share of the copy."""
    yield ["rows, microseconds in a CUDA graph", *_COLUMNS, "fkjit, GB/s (share of the copy)"]
    for text, op in ROWS:
        for p in cases_moe_rows.SETS["default"]:
            trial = known.get((op, cases_moe_rows.label(p)), NOT_MEASURED)
            if "fkjit" in trial.cells:
                times = [shown(time_of(trial.cells, name)) for name in NAMES]
                first = f"{text}, {cases_moe_rows.label(p)}{trial.mark}"
                yield [first, *times, speed_of(trial.cells["fkjit"])]


def sizes(known: Known, op: str) -> Iterator[list[str]]:
    """Experts and choices down, tokens across, as far as measured: ours, the twin, PyTorch."""
    found = {
        (p["experts"], p["top_k"], p["tokens"]): trial
        for p in cases_moe.SETS["table"]
        if "fkjit" in (trial := known.get((op, cases_moe.label(p)), NOT_MEASURED)).cells
    }
    tokens = sorted({key[2] for key in found})
    yield ["experts, choices", *(f"{count:,}" for count in tokens)]
    for experts, top_k in dict.fromkeys(key[:2] for key in found):
        row = (found.get((experts, top_k, count), NOT_MEASURED) for count in tokens)
        yield [f"{experts}, {top_k}", *map(_times, row)]


def _times(trial: Trial) -> str:
    if not trial.cells:
        return ""
    return " / ".join(shown(time_of(trial.cells, name)) for name in NAMES) + trial.mark


def tables(paths: Sequence[Path]) -> dict[str, str]:
    """Markdown by the name of its markers, of runs from the oldest to the last."""
    known = known_of(paths)
    makers: dict[str, Callable[[], Iterator[list[str]]]] = {
        "headlines": lambda: headlines(known),
        "rows": lambda: rows(known),
        "sizes of route": lambda: sizes(known, ROUTE),
        "sizes of both": lambda: sizes(known, BOTH),
    }
    return {name: markdown(make()) for name, make in makers.items()} | {"runs": listed(paths)}


def main() -> None:
    """Write the tables and the picture of the runs given on the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("results", type=Path, nargs="+", help="result files of `fkjit bench`")
    paths = parser.parse_args().results
    PAGE.write_text(with_tables(PAGE.read_text(), tables(paths)))
    PICTURE.write_text(moe_steps.picture(moe_steps.steps(trials(paths[-1])), paths[-1].name))


_COLUMNS = ("fkjit", "Triton", "PyTorch")

if __name__ == "__main__":
    main()
